"""Lab 04: count an optimised graph's bytes, predict what XLA fuses and calls, schedule a loop nest in TensorIR."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import lru_cache

from .. import child, ledger, records, reveal, source
from . import Case, Exercise, travelling

LAB = "04_tvm_xla"  # all cases are of mode "cpu": no answer does anything on a GPU, so one pass will do there, too
LIBRARY = ("--xla_gpu_enable_triton_gemm=false",)
"""Flags of XLA with which products go to cuBLASLt, whatever the card and the size."""


# ---- hlo-bytes ----------------------------------------------------------------------------------------------------


def rms_norm(x, gain):
    import jax

    wide = x.astype("float32")
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def silu_layer(x, w, b):
    import jax

    return jax.nn.silu(x @ w + b)


def attention(q, k, v):
    import jax

    return jax.nn.softmax(q @ k.T * 0.125, -1) @ v


def gated_halves(x):
    import jax

    return jax.nn.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]


def rotated(x, cosine, sine):
    import jax

    a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return jax.numpy.concatenate([a * cosine - b * sine, a * sine + b * cosine], 1)


def embedded(table, ids, position):
    return table.at[ids].get(mode="promise_in_bounds") + position


def last_tokens(x, gain):
    return x[-48:] * gain


def with_token_before(x, mix):
    import jax

    before = jax.numpy.concatenate([x[:1] * 0, x[:-1]])
    return x + mix * (before - x)


def sum_and_turned(x, y):
    return x + y, (x + y).T


def softmax_of_columns(x):
    import jax

    return jax.nn.softmax(x, 0)


def sums_both_ways(x):
    return x.sum(0), x.sum(1)


def where_above(x, y, limit):
    import jax

    return jax.numpy.where(x > limit, x, y), x > limit


def squared(x):
    return x @ x


def feed_forward(x, up, down, b):
    import jax

    return jax.nn.relu(x @ up + b) @ down


MODULES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "a row's norm": (rms_norm, ("f16[1536,1024]", "f16[1024]")),
    "a layer with SiLU": (silu_layer, ("f16[768,512]", "f16[512,1280]", "f16[1280]")),
    "attention of one head": (attention, ("bf16[896,64]", "bf16[640,64]", "bf16[640,64]")),
    "one half gates the other": (gated_halves, ("f16[1000,1408]",)),
    "rotary embedding, fp32": (rotated, ("f32[600,256]", "f32[600,128]", "f32[600,128]")),
    "rows of a table, by number": (embedded, ("f16[32000,320]", "s32[200]", "f16[320]")),
    "the last rows": (last_tokens, ("bf16[4096,384]", "bf16[384]")),
    "each token with the one before": (with_token_before, ("f16[480,640]", "f16[640]")),
    "a sum, and the sum turned": (sum_and_turned, ("f16[640,384]", "f16[640,384]")),
    "softmax of columns": (softmax_of_columns, ("f16[1100,520]",)),
    "sums of columns and of rows": (sums_both_ways, ("f32[700,900]",)),
    "a choice, and the mask": (where_above, ("f16[512,600]", "f16[512,600]", "f16[600]")),
    "a matrix times itself": (squared, ("f16[704,704]",)),
    "two products in a row": (feed_forward, ("bf16[320,512]", "bf16[512,2048]", "bf16[2048,512]", "bf16[2048]")),
}
"""JAX functions with their arguments, as `reveal.xla` takes them; the notebook shows the first two."""


@lru_cache(maxsize=1)
def modules() -> records.Output:
    """Of each of MODULES the optimised HLO for an H200 ("hlo"), and XLA's own count of its bytes ("bytes").

    Compiled here where JAX can, recorded elsewhere.
    """

    def made():
        found = zip(MODULES, reveal.xlas(MODULES.values(), flags=LIBRARY), strict=True)
        return {name: {"hlo": one.after, "bytes": one.bytes_after} for name, one in found}

    return records.output("xla.modules", made)


def instructions(hlo: str) -> list[dict]:
    """The ENTRY computation of a module as the answer gets it: `ledger.Instruction` as plain data."""

    def plain(one: ledger.Instruction) -> dict:
        kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "rest"}
        return kept | {"inside": [plain(i) for i in one.inside]}

    return [plain(one) for one in ledger.hlo(hlo)]


def _back(one: dict) -> ledger.Instruction:
    return ledger.Instruction(**one | {"inside": tuple(map(_back, one["inside"]))})


def accessed(graph: list[dict]) -> int:
    """See `hlo-bytes`."""
    return ledger.total(ledger.carried_out(map(_back, graph)))


def _mistakes(graph: list[dict]) -> list[tuple[int, str]]:
    """What the mistakes come to that are easily made, each in words."""
    lines = [_back(one) for one in graph]
    launches, right = ledger.carried_out(lines), accessed(graph)
    whole = {one.name: sum(one.sizes()) for one in lines}
    written = sum(one.writes for one in launches)
    calls = [one for one in lines if one.target and one.arrays[-1][0] == "s8"]
    workspace = sum(one.arrays[-1][1][0] for one in calls)
    sliced = sum(whole[name] for one in launches for name in set(one.sources)) - (right - written)
    twice = sum(whole[name] for one in launches for name in one.sources) - (right - written + sliced)
    read = {name for one in launches for name in one.sources}
    elements = [dataclasses.replace(one, arrays=tuple(("s8", sides) for _, sides in one.arrays)) for one in lines]
    idle = dict.fromkeys(one.op for one in lines if one.name not in {launch.targets[0] for launch in launches})
    passed_by = {
        op: sum(whole[name] for one in lines if one.op == op for name in {one.name, *one.operands}) for op in idle
    }
    return [
        (right + workspace, "the bytes that a library takes as workspace, of type s8, are counted as a result"),
        (right + sliced, "an operand that a fusion only slices or gathers from is counted whole: look `inside`"),
        (right + twice, "an operand that stands twice in a launch is counted twice"),
        (written, "only results are counted: a launch also reads"),
        (right - written, "only what is read is counted: a launch also writes"),
        *((right + n, f"each `{op}` is counted, which launches nothing") for op, n in passed_by.items()),
        (right + sum(passed_by.values()), "lines that launch nothing are counted"),
        (
            sum(whole[name] for name in read) + written,
            "what two launches read is counted once, but each of them reads it",
        ),
        (
            passed_by.get("parameter", 0) + written,
            "what one launch leaves for the next is counted as written, not as read",
        ),
        (ledger.total(ledger.carried_out(elements)), "elements are counted, not bytes"),
    ]


def judge_bytes(inputs, said, facts):
    """Says what a wrong count looks like, not by how much it is off."""
    [graph] = inputs
    right = accessed(graph)
    if isinstance(said, bool) or not isinstance(said, int | float):
        what = type(said).__name__ if said is not None else "None"
        return [("wrong-answer", f"The answer must be one number of bytes; it is of type {what}.")]
    if said == right:
        return []
    likely = next((words for count, words in _mistakes(graph) if said == count != right), "")
    launches = [one.name for one in ledger.carried_out(map(_back, graph))]
    counted = f"It looks as if {likely}." if likely else f"Its launches are {', '.join(f'`{n}`' for n in launches)}."
    side = "more" if said > right else "less"
    return [("wrong-answer", f"{said:,.0f} bytes is {side} than this module moves. {counted}")]


def _module(about: str, seen: bool = False) -> Case:
    return Case(about, lambda draw: (instructions(modules().value[about]["hlo"]),), seen=seen, mode="cpu")


hlo_bytes = Exercise(
    name="hlo-bytes",
    lab=LAB,
    rung="compiler",
    entry="bytes_accessed",
    title="Predict the bytes of an optimised graph",
    form="prediction",
    made_of="python",
    cases=tuple(_module(about, seen=i < 2) for i, about in enumerate(MODULES)),
    judge=judge_bytes,
    hints=(
        "Go through the first module line by line with a pencil. Which lines start a kernel or a call, and which only "
        "give a name to what is there already? Of those that start something, what stands in brackets is read, and "
        "what stands left of the operation is written.",
        "Keep a table from a line's name to the bytes that it makes: operands are found there. Then three details: an "
        "operand is read once by a launch, however often it stands there; a library's workspace is a scratch pad; and "
        "a fusion need not read all of an operand. Its `inside` tells: who uses the parameter that stands for it?",
        "For each line: made[name] = sum over its arrays of product of sides × size, without the s8 of a custom-call. "
        "Skip parameter, constant, tuple, get-tuple-element, bitcast; else total += made[name]. For each "
        "different operand: users = lines inside that take its stand-in; if there are some, and all are slice, "
        "dynamic-slice or gather: total += what these make, else made[operand].",
    ),
    core=True,
)


# ---- xla-fuses ----------------------------------------------------------------------------------------------------


def gated(x, y, v, w, b):
    import jax

    return jax.nn.sigmoid(x) * y + x


def normalised(x, y, v, w, b):
    import jax

    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) + y


def activated(x, y, v, w, b):
    import jax

    return jax.nn.relu(x @ w + b)


def swished(x, y, v, w, b):
    import jax

    return jax.nn.silu(x @ w + b)


def added(x, y, v, w, b):
    return 0.5 * (x @ w) + y


def prepared(x, y, v, w, b):
    import jax

    return jax.numpy.tanh(x) @ w


def attended(x, y, v, w, b):
    import jax

    return jax.nn.softmax(x @ v.T * 0.03, -1) @ w


def weighed(x, y, v, w, b):
    return (x * y) @ b


EIGHT = (gated, normalised, activated, swished, added, prepared, attended, weighed)
"""The functions asked about: x, y, v, w are square matrices of one size, b a vector, all fp16."""

SIDE = 1024


def eight_as_text() -> str:
    """The eight functions, to read."""
    return "\n\n".join(travelling(fn).replace("    import jax\n\n", "") for fn in EIGHT)


@lru_cache(maxsize=1)
def eight() -> records.Output:
    """The optimised HLO of each of EIGHT for an H200: compiled here where JAX can, recorded elsewhere."""
    shapes = (*[f"f16[{SIDE},{SIDE}]"] * 4, f"f16[{SIDE}]")

    def made():
        found = reveal.xlas([(fn, shapes) for fn in EIGHT], flags=LIBRARY)
        return {fn.__name__: one.after for fn, one in zip(EIGHT, found, strict=True)}

    return records.output("xla.eight", made)


def judge_eight(inputs, outputs, facts):
    """A prediction for each function; says which numbers differ from the optimised HLO, not by how much."""
    made = eight().value
    pairs = isinstance(outputs, dict) and all(isinstance(p, tuple | list) and len(p) == 2 for p in outputs.values())
    if not pairs or set(outputs) != set(made):
        asked = ", ".join(f"`{name}`" for name in made)
        said = f"The answer must be a dict with a pair (kernels of XLA's own, library calls) for each of {asked}."
        return [("wrong-answer", said)]
    wrong = []
    for name, hlo in made.items():
        launches = ledger.xla(hlo)
        calls = sum(one.kind == "library" for one in launches)
        for what, said, is_so in zip(("kernels", "calls"), outputs[name], (len(launches) - calls, calls), strict=True):
            if type(said) is not int or said != is_so:
                wrong.append(f"the {what} of `{name}`")
    return [("wrong-answer", f"The optimised HLO shows another number for {'; '.join(wrong)}.")] if wrong else []


xla_fuses = Exercise(
    name="xla-fuses",
    lab=LAB,
    rung="compiler",
    entry="what_xla_makes",
    title="Predict what XLA fuses, and what it calls",
    form="prediction",
    made_of="python",
    cases=(Case(f"matrices of {SIDE} × {SIDE}", lambda draw: (), seen=True, mode="cpu"),),
    judge=judge_eight,
    hints=(
        "First find the products of matrices: each is a call of the library here. All that is left lies before, "
        "between or behind them.",
        "Work on elements runs together into one kernel, and with it what a row needs of its own sums. Behind a call "
        "there may be nothing left at all: what does an epilogue of cuBLASLt know, and what can α and β do? Before a "
        "call nothing can be taken in. And is a matrix times a vector worth a call, or is it a sum like any other?",
        "calls = products of two matrices. kernels = groups of lines before, between and behind them, less those that "
        "ride along: a bias, ReLU and GELU as epilogue, a factor as α, a matrix that is added as β · C. SiLU is in no "
        "epilogue. A product with a vector: multiply and reduce, with what stands before it.",
    ),
    core=True,
)


# ---- tensorir-schedule --------------------------------------------------------------------------------------------

NEST = """\
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(
        x: T.Buffer((K, N), "float32"),
        c: T.Buffer((K, M), "float32"),
        w: T.Buffer((K,), "float32"),
        kernel: T.Buffer((N, M), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        difference = T.sblock_alloc_buffer((N, M, K))
        weighted = T.sblock_alloc_buffer((N, M, K))
        distance = T.sblock_alloc_buffer((N, M))
        for i, j, r in T.grid(N, M, K):
            with T.sblock("difference"):
                vi, vj, vr = T.axis.remap("SSS", [i, j, r])
                difference[vi, vj, vr] = x[vr, vi] - c[vr, vj]
        for i, j, r in T.grid(N, M, K):
            with T.sblock("weighted"):
                vi, vj, vr = T.axis.remap("SSS", [i, j, r])
                weighted[vi, vj, vr] = w[vr] * difference[vi, vj, vr] * difference[vi, vj, vr]
        for i, j, r in T.grid(N, M, K):
            with T.sblock("distance"):
                vi, vj, vr = T.axis.remap("SSR", [i, j, r])
                with T.init():
                    distance[vi, vj] = T.float32(0)
                distance[vi, vj] = distance[vi, vj] + weighted[vi, vj, vr]
        for i, j in T.grid(N, M):
            with T.sblock("kernel"):
                vi, vj = T.axis.remap("SS", [i, j])
                kernel[vi, vj] = T.exp(-distance[vi, vj])
"""
LEAST = 10.0
"""How many times as fast as the plain nest a schedule must be."""


def loop_nest(n: int, m: int, k: int) -> str:
    """NEST at these sizes, TVMScript: x (k, n), c (k, m), w (k) -> kernel (n, m), all fp32."""
    sizes = {"N": n, "M": m, "K": k}
    return re.sub(r"\b[NMK]\b", lambda found: str(sizes[found[0]]), NEST)


def traced(answer, text, seed, timed):
    """What the answer does to the schedule of a module, as data: the trace that TVM keeps of it, as JSON."""
    import json
    import re

    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import ScheduleError

    def plain(part):
        part = getattr(part, "value", part)  # of a number that is an expression of TVM's
        if part is None or isinstance(part, bool | int | float):
            return part
        return str(part) if isinstance(part, str) else [plain(one) for one in part]

    sch = Schedule(tvm.script.from_source(text))
    try:
        answer(sch)
    except ScheduleError as error:  # it holds the whole program; the reason stands at its end
        found = re.search(r"primitive '([\w-]+)'.*Error message: *(?:ScheduleError: *)?(.+)", str(error), re.DOTALL)
        if not found:
            raise
        reason = re.sub(r"[ :]*(?:Problematic stmt: )?\b(?:tirx|s_tir)\.\w+#\d+", "", found[2]).strip(" .\n")
        means = {
            "data parallel": "The loop runs over a sum.",
            "init statement": "A sum has to be finished before it is read.",
            "non-single-branch": "Between these loops a block has its place already, such as the sum's beginning.",
            "same scope": "They are not all around one block.",
            "product of factors": "The pieces do not cover the loop at this size; None takes what is left.",
        }
        plainly = next((f" {words}" for sign, words in means.items() if sign in reason), "")
        raise ScheduleError(f"TVM refuses `{found[1].replace('-', '_')}`: {reason}.{plainly}") from error
    return json.dumps(plain(sch.trace.as_json())), {}


HARMLESS = re.compile(
    "Get.*|Sample.*|Compute.*|ReverseCompute.*|Decompose.*|Transform.*|Re[Ii]ndex.*|Reorder.*|Cache.*|Split|Fuse.*|Merge|"
    "LoopPartition|AddUnitLoop|Parallel|Vectorize|Unroll|RFactor|PadEinsum|RollingBuffer|Blockize|StorageAlign|SetScope|"
    "Annotate|Unannotate"
)
"""Instructions of a trace that TVM checks before it carries them out."""
HINTS = {"pragma_auto_unroll_max_step", "pragma_unroll_explicit"}
"""What a schedule may write on a loop: others carry code of their own."""


def replayed(text, trace, seed, timed):
    """A trace carried out anew on the module of `text`, in a process that no answer has run in.

    Returns {"refused": why} or {"wrong": [how many, index, got, expected] or None, "unwritten": how many, "times": how
    many times as fast it is as the module itself, each at its best of several turns, by CPU time}.
    """
    import json
    import re
    import time

    import numpy as np
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    def built(mod):
        return tvm.compile(mod, target={"kind": "llvm", "mcpu": "x86-64-v3"})["main"]

    plain = tvm.script.from_source(text)
    (k, n), (_, m) = (tuple(map(int, sides)) for sides in re.findall(r"[xc]: T\.Buffer\(\((\d+), (\d+)\)", text))
    draw = np.random.default_rng(seed)
    x, c = (draw.standard_normal((k, side)).astype("float32") for side in (n, m))
    w = draw.random(k).astype("float32") / k
    wide = [a.astype("float64") for a in (x, c, w)]
    exact = np.exp(-(wide[0] ** 2 * wide[2][:, None]).sum(0)[:, None] - (wide[1] ** 2 * wide[2][:, None]).sum(0)
                   + 2 * (wide[0] * wide[2][:, None]).T @ wide[1])  # fmt: skip
    out = tvm.runtime.tensor(np.full((n, m), np.nan, "float32"))
    given = [*map(tvm.runtime.tensor, (x, c, w)), out]
    sch = Schedule(plain)
    Trace.apply_json_to_schedule(json.loads(trace), sch)
    try:
        mine = built(sch.mod)
        mine(*given)
    except Exception as error:  # of TVM's compiler, or of its check of what the function is given
        return {"refused": str(error).strip().splitlines()[0][:300]}
    got = out.numpy().astype("float64")
    unwritten, wrong = np.isnan(got), np.abs(got - exact) > 1e-5
    report = {"unwritten": int(unwritten.sum()), "wrong": None, "times": None}
    if wrong.any():
        first = tuple(map(int, np.argwhere(wrong)[0]))
        report["wrong"] = [int(wrong.sum()), first, float(got[first]), float(exact[first])]
    if timed and not wrong.any() and not unwritten.any():
        best, theirs = {}, built(plain)
        for _ in range(7):
            for name, fn, calls in (("plain", theirs, 1), ("mine", mine, 5)):
                for _ in range(calls):
                    began = time.process_time_ns()
                    fn(*given)
                    best[name] = min(best.get(name, 1 << 62), time.process_time_ns() - began)
        report["times"] = best["plain"] / best["mine"]
    return report


def judge_schedule(inputs, trace, facts):
    """Carries the trace out, compares values, and where the case asks for it the speed."""
    text, seed, timed = inputs
    try:
        done_to = [(str(kind), [*attributes]) for kind, _, attributes, _ in json.loads(trace)[0]]
    except (IndexError, KeyError, TypeError, ValueError):
        return [("crash", "The list of rewrites that came back from its process is damaged.")]
    for kind, attributes in done_to:
        if kind == "Bind":
            return [
                ("compile", "A loop is bound to threads of a GPU, and this schedule is for a CPU: leave `bind` out.")
            ]
        if not HARMLESS.fullmatch(kind) or (kind == "Annotate" and not {*attributes} <= HINTS):
            what = " ".join(map(str, (kind, *attributes)))
            said = (
                f"The schedule holds `{what}`, which TVM does not check, or which brings in other code: leave it out."
            )
            return [("forbidden", said)]
    call = f"replayed({text!r}, {trace!r}, {seed}, {timed})"
    done = child.run(source.of(replayed), call, packages="tvm", seconds=30, env={"TVM_NUM_THREADS": "1"})
    if not done.ok:
        kind = "timeout" if done.timed_out else "crash"
        return [(kind, f"TVM did not get through compiling and running the scheduled nest: {done.why()}.")]
    found = done.value
    if reason := found.get("refused"):
        return [("compile", f"The schedule is legal, and no program comes of it: {reason}")]
    if found["unwritten"]:
        return [("unwritten", f"{found['unwritten']:,} elements of `kernel` are not written.")]
    if wrong := found["wrong"]:
        count, place, got, expected = wrong
        first = f"the first is {tuple(place)}: {got:.6g}, expected {expected:.6g}."
        return [("wrong-values", f"{count:,} elements of `kernel` are wrong; {first}")]
    if not timed:
        return []
    ratio = found["times"]
    if ratio >= LEAST:
        said = f"{ratio:.1f} times as fast as the plain nest, both on one core (at least {LEAST:.0f})"
        return [("checked", said)]
    kinds = [kind for kind, _ in done_to]
    said = f"On one core it is {ratio:.1f} times as fast as the plain nest; {LEAST:.0f} times is asked for."
    if sum(kind in ("ComputeInline", "ReverseComputeInline", "ComputeAt") for kind in kinds) < 2:
        said += " `difference` or `weighted` still goes to memory, as a tensor of n · m · k."
    elif "Reorder" not in kinds:
        said += " The innermost loop is still the sum's: each step of it waits for the one before."
    elif "Parallel" in kinds:
        said += " `parallel` gains nothing here: what counts is what one core does."
    else:
        said += " Which loop is the innermost, and does each of its steps wait for the one before?"
    return [("too-slow", said)]


def _nest(about: str, n: int, m: int, k: int, timed: bool = False, seen: bool = False) -> Case:
    return Case(about, lambda draw: (loop_nest(n, m, k), draw.integer(0, 2**31), timed), seen=seen, mode="cpu")


tensorir_schedule = Exercise(
    name="tensorir-schedule",
    lab=LAB,
    rung="compiler",
    entry="schedule",
    title="A schedule that beats the plain nest ten times",
    form="rewrite",
    made_of="python",
    package="tvm",
    cases=(
        _nest("n, m, k = 64, 64, 64: all sizes are multiples of a tile", 64, 64, 64, seen=True),
        _nest("n, m, k = 37, 53, 29: none is", 37, 53, 29),
        _nest("one row", 1, 300, 17),
        _nest("one column", 130, 1, 40),
        _nest("one element", 1, 1, 1),
        _nest("n, m, k = 256, 512, 128, timed", 256, 512, 128, timed=True, seen=True),
    ),
    drive=traced,
    judge=judge_schedule,
    hints=(
        "Two things cost time. Two blocks write tensors of n · m · k elements, of which each is used once. And look at "
        "the table: how far does each access move when the innermost loop takes a step, and does one step wait for "
        "the one before?",
        "A block that computes elements from elements can be inlined into its reader; a sum cannot. Then let the "
        "innermost loop be one along which `c` and `distance` lie side by side and no step waits for another, so that "
        "one instruction does eight. The sum's beginning has to become a block of its own, and that comes last.",
        "compute_inline difference, weighted. i, j, r = loops of distance. Split j into pieces of 16 or 32 and i into "
        "pieces of 4; order: i outer, j outer, r, i inner, j inner. unroll i inner, vectorize j inner. "
        "reverse_compute_at kernel at j outer, vectorize its last loop. decompose_reduction distance at r.",
    ),
    hints_for={
        "compile": (
            "TVM names the rewrite that it refuses. Take that line out, look with `scheduled` at the loops that are "
            "there, and ask of each which block it belongs to, and whether it runs over a sum.",
        ),
    },
    core=True,
    seconds=60,
)

EXERCISES = (hlo_bytes, xla_fuses, tensorir_schedule)
