"""Lab 03: what torch.compile fuses, what breaks its graph, what makes it copy, recompile or launch too often, and a
kernel of one's own inside what it compiles.
"""

import torch

from . import Case, Draw, Exercise, padded, spaced, turned

LAB = "03_torch_compile"
LIMIT = 8.0
"""The largest magnitude that the block of `graph-breaks` lets through."""


# ---- what-fuses ---------------------------------------------------------------------------------------------------

FUSING = """\
import torch


def gate(x, y):
    h = torch.sigmoid(x)
    h = h * y
    return h + x


def peek(x, y):
    h = torch.sigmoid(x)
    h = h * y
    return h + x, h


def normalise(x):
    peak = x.abs().amax(-1, keepdim=True)
    return x / (peak + 1e-6)


def straighten(x, y):
    h = (x * 2).t().contiguous()
    return h + y


def project(x, w):
    h = x * 2
    h = h @ w
    return torch.relu(h)


def gated_pair(x, v, w):
    return torch.relu(x @ v) * (x @ w)
"""
"""The functions asked about; every argument and result is a square matrix."""


def look_inside(answer, text, side):
    """The prediction, and what torch.compile makes of each function in `text` for an H200: side × side, fp32."""
    import contextlib
    import io
    import types

    import torch

    from helpers import ledger, reveal, source

    functions = [f for f in vars(source.run(text, "fusing")).values() if isinstance(f, types.FunctionType)]
    matrices = [torch.empty(side, side, device="meta") for _ in range(3)]
    seen = {}
    for fn in functions:
        with contextlib.redirect_stdout(io.StringIO()):  # its sign of life is not the answer's print
            code = reveal.inductor(fn, *matrices[: fn.__code__.co_argcount], arch="sm_90").code
        launches = ledger.compiled(code)
        # a kernel's own few numbers a row are no matrix, and rounding drops them
        seen[fn.__name__] = [len(launches), round(sum(launch.writes for launch in launches) / (4 * side * side))]
    return answer(), {"seen": seen}


def judge_fusing(inputs, outputs, facts):
    """A prediction for each function; says which numbers differ from the generated code, not by how much."""
    seen = facts["seen"]
    pairs = isinstance(outputs, dict) and all(isinstance(p, tuple | list) and len(p) == 2 for p in outputs.values())
    if not pairs or set(outputs) != set(seen):
        asked = ", ".join(f"`{name}`" for name in seen)
        return [
            ("wrong-answer", f"The answer must be a dict with a pair (launches, matrices written) for each of {asked}.")
        ]
    wrong = [
        f"the {what} of `{name}`"
        for name in seen
        for what, said, is_so in zip(("launches", "matrices written"), outputs[name], seen[name], strict=True)
        if isinstance(said, bool) or said != is_so
    ]
    return [("wrong-answer", f"The generated code shows another number for {'; '.join(wrong)}.")] if wrong else []


# ---- graph-breaks, one-compilation --------------------------------------------------------------------------------


def both_ways(answer, weights, calls):
    """A model's outputs for each of `calls`, compiled and eager, and what torch.compile saw of it."""
    import torch
    from torch.utils._pytree import tree_map

    from helpers import reveal

    # compiled first: what an eager run might leave behind is not there yet
    try:
        traced = reveal.graphs(lambda: answer(*weights), [(x,) for x in calls])
    except Exception:
        answer(*weights)(calls[0].clone())  # an error of its own is told better without the compiler
        raise
    with torch.no_grad():
        model, slots, eager = answer(*weights), {}, []
        for x in calls:  # one tensor takes all the calls of a shape: a remembered result would be found out
            slot = slots.setdefault(x.shape, x.clone())
            # a copy of each result: it may be a view of what the next call changes
            eager.append(tree_map(lambda out: torch.as_tensor(out).clone(), model(slot.copy_(x))))
    compiled = tree_map(torch.as_tensor, traced.outputs)
    facts = {name: getattr(traced, name) for name in ("graphs", "breaks", "recompiled", "opaque")}
    return {"eager": eager, "compiled": compiled}, facts


def judge_graphs(inputs, outputs, facts):
    """One graph that the compiler can see through, compiled once for all calls."""
    if facts["breaks"]:
        places = "; ".join(f"`{line}` ({why})" for line, _, why in (b.rpartition(": ") for b in facts["breaks"]))
        return [("graph-break", f"torch.compile has to stop and let Python go on at {places}.")]
    if facts["opaque"]:
        names = ", ".join(f"`{name}`" for name in facts["opaque"])
        return [("graph-break", f"The graph holds {names}, which the compiler cannot look into: a break out of sight.")]
    if not facts["graphs"]:
        said = "None of the operators reach the compiler. A break inside a loop leaves the whole function to Python."
        return [("graph-break", said)]
    if facts["graphs"] > 1:
        assumed = facts["recompiled"].replace("fn.", "self.")
        said = f": the first had assumed `{assumed}`" if assumed else ""
        return [
            (
                "too-many-kernels",
                f"Tensors of the same shapes took {facts['graphs']} compilations, each with kernels of its own{said}.",
            )
        ]
    return []


def capped_block(weights, calls):
    """See `graph-breaks`: for each call (y, level), however it is run."""
    up, down = weights

    def forward(x):
        peak = x.abs().max()
        x = x * (LIMIT / peak) if peak > LIMIT else x
        h = torch.relu(x @ up)
        level = h.sum() / max(int((h > 0).sum()), 1)
        return x + (h / (level + 1e-3)) @ down, level

    return dict.fromkeys(("eager", "compiled"), [forward(x) for x in calls])


def block_inputs(tokens, width, hidden, *batches):
    """Inputs of `graph-breaks`. batches: functions of (draw, tokens, width), a call each."""

    def inputs(draw: Draw):
        weights = draw(width, hidden, kind="normal") / width**0.5, draw(hidden, width, kind="normal") / hidden**0.5
        return weights, [batch(draw, tokens, width) for batch in batches]

    return inputs


def drawn(draw, tokens, width):
    return draw(tokens, width)


def calm(draw, tokens, width):
    return draw(tokens, width, kind="normal").clamp(-LIMIT, LIMIT)


def loud(draw, tokens, width):
    return 10 * draw(tokens, width, kind="normal")


def zero(draw, tokens, width):
    return torch.zeros(tokens, width)


def sunk(draw, tokens, width):
    """The largest magnitude belongs to a negative number."""
    x = draw(tokens, width, kind="normal").clamp(-LIMIT, LIMIT)
    x[tokens // 2, width // 2] = -30.0
    return x


def silent(draw: Draw):
    """Weights and inputs for which no hidden unit is positive; one token."""
    up, down = -draw(16, 24, kind="normal").abs(), draw(24, 16, kind="normal")
    return (up, down), [draw(1, 16, kind="normal").abs().clamp(0.1, 6.0), 10 + draw(1, 16, kind="normal").abs()]


graph_breaks = Exercise(
    name="graph-breaks",
    lab=LAB,
    rung="compiler",
    entry="WholeBlock",
    title="A block in one graph",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("one call below the limit, one above", block_inputs(8, 16, 24, calm, loud), seen=True),
        Case("rare outliers, then zeros", block_inputs(33, 24, 40, drawn, zero), kind="outliers"),
        Case(
            "all far above the limit, then a negative peak; stored column by column",
            block_inputs(7, 16, 24, lambda *of: turned(drawn(*of)), lambda *of: turned(sunk(*of))),
            kind="offset",
        ),
        Case("one token, no hidden unit is positive", silent),
        Case("1000 tokens of 512", block_inputs(1000, 512, 1024, calm, loud), mode="gpu"),
    ),
    reference=capped_block,
    allow=frozenset({"*", "cond"}),
    drive=both_ways,
    judge=judge_graphs,
    hints=(
        "Four lines of `forward` ask for something that only the device knows, or do something that is no tensor "
        "operation. The verdict names the lines at which the compiler had to stop: mend these, and check again.",
        "A number that stays on the device is a tensor of one element: it divides, multiplies and compares just as "
        "well. An `if` over it becomes a formula that is right on both sides: which factor leaves a small input as it "
        "is? A mean over a selection is a sum in which the rest is zero, over a count.",
        "factor = LIMIT / peak, but at most 1 (`clamp`); no print. After `relu` all that was not selected is zero, so "
        "the sum of `active` is the sum of `h`; its length is the sum of `h > 0`, here at least 1.",
    ),
    core=True,
    seconds=60,
)


def decoded(weights, calls):
    """See `one-compilation`: for each token a result of shape (width), however it is run."""
    qkv, _ = weights
    keys, values, out = [], [], []
    for x in calls:
        q, k, v = (qkv @ x).chunk(3)
        keys.append(k)
        values.append(v)
        out.append(torch.softmax(torch.stack(keys) @ q / len(q) ** 0.5, 0) @ torch.stack(values))
    return dict.fromkeys(("eager", "compiled"), out)


def decoder_inputs(tokens, room, width):
    def inputs(draw: Draw):
        return (draw(3 * width, width, kind="normal") / width**0.5, room), [draw(width) for _ in range(tokens)]

    return inputs


one_compilation = Exercise(
    name="one-compilation",
    lab=LAB,
    rung="compiler",
    entry="SteadyDecoder",
    title="A decoder that is compiled once, not once a token",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("5 tokens in a cache of 20", decoder_inputs(5, 20, 8), seen=True),
        Case("4 tokens fill the cache", decoder_inputs(4, 4, 13), kind="outliers"),
        Case("6 tokens in a cache of 31", decoder_inputs(6, 31, 16), kind="integers"),
        Case("one token, a cache of one", decoder_inputs(1, 1, 5)),
        Case("7 tokens in a cache of 4096", decoder_inputs(7, 4096, 128), mode="gpu"),
    ),
    reference=decoded,
    allow=frozenset({"*"}),
    drive=both_ways,
    judge=judge_graphs,
    hints=(
        "A compiled function belongs to what it assumed: shapes, and the values of Python numbers that it read. "
        "Which of both changes with each token here? The verdict says what the first compilation had assumed.",
        "Let the position be a tensor, and let every step work on the whole cache, whose shape never changes. Slots "
        "that are not filled yet must get no weight in the softmax. Indexing with a tensor of no dimensions asks for "
        "its value; a comparison with the numbers of all slots does not.",
        "slots = arange(room). Write: where slots == position, the new key, else the old one. Attend: scores of all "
        "slots, -inf where slots > position, softmax, times all values. Then position + 1.",
    ),
    seconds=60,
)


# ---- view-chain, fusable-norm, few-launches -----------------------------------------------------------------------


def compiled_cost(answer, *inputs):
    """The result, compiled and eager; as in CPU mode also what torch.compile makes of the function for an H200."""
    import contextlib
    import io

    import torch

    from helpers import ledger, machine, reveal

    # compiled first: what an eager run might leave behind is not there yet
    try:
        traced = reveal.graphs(lambda: answer, [inputs])
    except Exception:
        answer(*inputs)  # an error of its own is told better without the compiler
        raise
    facts = {name: getattr(traced, name) for name in ("graphs", "breaks", "recompiled", "opaque")}
    with torch.no_grad():
        made = None
        # one card's code is the same on every machine: where there is a GPU it has been counted before this runs there
        if traced.graphs == 1 and not traced.breaks and not machine.gpu():
            with contextlib.redirect_stdout(io.StringIO()):  # its sign of life is not the answer's print
                made = reveal.inductor(answer, *inputs, arch="sm_90")
            facts["graphs"] = made.graphs
        eager = answer(*inputs)
        if made and made.graphs:
            launches = ledger.compiled(made.code)
            silent = [launch.name for launch in launches if launch.reads is None or launch.writes is None]
            facts |= {"launches": len(launches), "silent": silent, "moved": 0 if silent else ledger.total(launches)}
            facts["library"] = sum(launch.kind == "library" for launch in launches)
            facts["copies"] = [launch.name for launch in launches if launch.copies]
    return {"eager": eager, "compiled": traced.outputs[0]}, facts


def cost_judge(launches, products, least):
    """A judge of what `compiled_cost` counted. least: called with the inputs, bytes of the best answer known."""

    def judge(inputs, outputs, facts):
        if (found := judge_graphs(inputs, outputs, facts)) or "launches" not in facts:
            return found
        if products and not facts["library"]:
            said = (
                "No product is left to the library: one of sums and products in a generated kernel uses no tensor core."
            )
            return [("too-slow", said)]
        bound = least(*inputs)
        if facts["library"] > products:
            enough = f"one after another; {products} can do" if products else "from memory to memory; none is needed"
            said = (
                f"Compiled, it makes {facts['library']} product{'s' * (facts['library'] > 1)} in the library, {enough}."
            )
            return [("too-many-kernels", said)]
        if facts["silent"]:
            instead = "hand the library views" if products else "work on all of them in one view"
            said = f"Compiled, it puts pieces together in {facts['silent'][0]}: {instead} instead."
            return [("too-many-bytes", said)]
        if facts["moved"] > 1.05 * bound:
            copies = f", of which {', '.join(facts['copies'])} only copies," if facts["copies"] else ""
            said = f"its {facts['launches']} launches{copies} move {facts['moved']:,} bytes; {bound:,} are enough"
            return [("too-many-bytes", f"Compiled, {said}.")]
        if facts["launches"] > launches:
            enough = f"{launches} {'is' if launches == 1 else 'are'} enough"
            return [("too-many-kernels", f"Compiled, it launches {facts['launches']} kernels; {enough}.")]
        return []

    return judge


def projected(q, w, gain):
    """See `view-chain`: the result, however it is run."""
    y = torch.einsum("bthd,hdc->bthc", q, w).flatten(2) * gain
    return dict.fromkeys(("eager", "compiled"), y * torch.sigmoid(y))


def projection_inputs(batch, tokens, heads, width, out):
    def inputs(draw: Draw):
        w = draw(heads, width, out, kind="normal") / width**0.5
        return draw(batch, tokens, heads, width), w, 1 + draw(heads * out, kind="normal")

    return inputs


def projection_bytes(q, w, gain):
    """The product reads q and w and writes y; one kernel reads y and the gain and writes the result."""
    y = q.shape[0] * q.shape[1] * gain.numel()
    return 4 * (q.numel() + w.numel() + y + y + gain.numel() + y)


view_chain = Exercise(
    name="view-chain",
    lab=LAB,
    rung="compiler",
    entry="head_projection",
    title="A matrix for each head, without copies",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("3 sequences of 10 tokens, 4 heads", projection_inputs(3, 10, 4, 16, 8), seen=True),
        Case("an odd number of everything", projection_inputs(5, 7, 3, 11, 13), kind="outliers"),
        Case("one token of each sequence", projection_inputs(6, 1, 5, 8, 12), kind="offset"),
        Case("8 sequences of 512 tokens", projection_inputs(8, 512, 16, 128, 64), mode="gpu"),
    ),
    reference=projected,
    allow=frozenset({"*"}),
    drive=compiled_cost,
    judge=cost_judge(launches=2, products=1, least=projection_bytes),
    hints=(
        "Which of the lines that only move things (`transpose`, `expand`, `reshape`) can be done by strides alone? "
        "Write down the strides of `q` after `transpose(1, 2)`: can batch and head become one dimension?",
        "`bmm` takes three dimensions, each with a stride of its own. All tokens of all sequences use the same matrix "
        "of a head. So the head alone is the batch of the product; which two dimensions of `q` lie one behind the "
        "other and can be merged without a copy?",
        "q: (B, T, H, D) viewed as (B·T, H, D), its first two dimensions swapped; the product with w gives "
        "(H, B·T, C); swap back, then bring it into the shape of the result. The kernel that multiplies by `gain` "
        "reads any order.",
    ),
    core=True,
    seconds=60,
)


EPS = 1e-6


def head_normed(x, gain):
    """See `fusable-norm`: the result, however it is run."""
    h = x.view(len(x), *gain.shape)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * gain
    return dict.fromkeys(("eager", "compiled"), y.transpose(0, 1))


def norm_inputs(tokens, heads, width, scale=1.0):
    def inputs(draw: Draw):
        gain = 1 + draw(heads, width, kind="normal") / 4
        return (scale * draw(tokens, heads * width)).half(), gain

    return inputs


def norm_bytes(x, gain):
    """x and the gain are read, the result is written, as many fp16 numbers as x has."""
    return 2 * x.numel() + 4 * gain.numel() + 2 * x.numel()


def judge_norm(inputs, outputs, facts):
    """One launch, and a result that lies as an attention reads it."""
    found = cost_judge(launches=1, products=0, least=norm_bytes)(inputs, outputs, facts)
    if not found and not facts["contiguous"]:
        return [("wrong-shape", "The result is not contiguous: each head's tokens must lie one behind the other.")]
    return found


fusable_norm = Exercise(
    name="fusable-norm",
    lab=LAB,
    rung="compiler",
    entry="fused_norm",
    title="A norm for each head, in one kernel",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("33 tokens, 5 heads of 24", norm_inputs(33, 5, 24), seen=True),
        Case("64 tokens, 16 heads of 128", norm_inputs(64, 16, 128), kind="outliers"),
        Case("one token, 3 heads of 17: squares too large for fp16", norm_inputs(1, 3, 17, 2.0), kind="offset"),
        Case("9 tokens, 2 heads of 40: so small that EPS counts", norm_inputs(9, 2, 40, 1e-3)),
        Case("4096 tokens, 16 heads of 128", norm_inputs(4096, 16, 128), mode="gpu"),
    ),
    reference=head_normed,
    allow=frozenset({"*"}),
    drive=compiled_cost,
    judge=judge_norm,
    hints=(
        "Look at the table line by line: which step is a call into a library, and what has to lie in memory for it? "
        "Which step puts together what a loop has taken apart?",
        "A reduction along the last dimension fuses with what comes before and after it, if it is one reduction over "
        "one shape. So let the heads be a dimension of a view, not the turns of a loop, and let the mean be a sum and "
        "no product. Conversions cost nothing inside a kernel.",
        "h = x viewed as (tokens, heads, width), in fp32; divide by the root of the mean of the squares along the last "
        "dimension plus EPS; times gain; back to fp16; swap the first two dimensions, contiguous.",
    ),
    seconds=60,
)


def adapted(x, a, b, which):
    """See `few-launches`: the result, however it is run."""
    y = torch.einsum("tr,tro->to", torch.einsum("tw,trw->tr", x, a[which]), b[which])
    return dict.fromkeys(("eager", "compiled"), y)


def adapter_inputs(tokens, width, rank, out, adapters):
    def inputs(draw: Draw):
        a, b = draw(adapters, rank, width), draw(adapters, rank, out)
        return draw(tokens, width), a, b, draw.integers(0, adapters, tokens, dtype=torch.int64)

    return inputs


def adapter_bytes(x, a, b, which):
    """Product, mask, product: between them (tokens, adapters * rank) goes to memory and back, twice."""
    between = len(x) * a.shape[0] * a.shape[1]
    return 4 * (x.numel() + a.numel() + 4 * between + b.numel() + len(x) * b.shape[2]) + 8 * len(x)


few_launches = Exercise(
    name="few-launches",
    lab=LAB,
    rung="compiler",
    entry="mixed_adapters",
    title="Tokens of many adapters in two products",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("40 tokens, 5 adapters of rank 4", adapter_inputs(40, 64, 4, 48, 5), seen=True),
        Case("small integers", adapter_inputs(23, 33, 3, 29, 7), kind="integers", exact=True),
        Case("2 tokens, more adapters than that", adapter_inputs(2, 40, 2, 24, 9), kind="outliers"),
        Case("256 tokens, 8 adapters of rank 16", adapter_inputs(256, 1024, 16, 1024, 8), mode="gpu"),
    ),
    reference=adapted,
    allow=frozenset({"*"}),
    drive=compiled_cost,
    judge=cost_judge(launches=4, products=2, least=adapter_bytes),
    hints=(
        "The compiler fuses what lies between products, never two products. How many products does the loop make, "
        "and what are the shapes of `a[i].T` and `b[i]`?",
        "Lay the low-rank matrices of all adapters side by side: one product gives every token its small vector in "
        "every adapter, which is cheap as the rank is small. Then wipe out what is not the token's own; a second "
        "product adds up what is left.",
        "h = x times the transpose of a viewed as (adapters · rank, width): (tokens, adapters · rank). Column j "
        "belongs to adapter j // rank: zero it where that is not which[token]. h times b viewed as "
        "(adapters · rank, out).",
    ),
    seconds=60,
)


# ---- custom-operator ----------------------------------------------------------------------------------------------


def in_a_model(answer, x, decay, inward, grad, a, v):
    """The model's result and gradients, eager and compiled, the operator's own result; what the compiler saw of it."""
    import contextlib
    import io

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from helpers import ledger, machine, reveal

    weights = x, decay, inward

    def trained(model):
        leaves = [t.detach().clone().requires_grad_() for t in weights]
        out = model(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    eager = trained(answer)  # an error of its own is told better without the compiler
    operator = torch.ops.lab03.recurrence
    with torch.no_grad():
        alone = operator(a, v)
        traced = reveal.graphs(lambda: answer, [weights])
    facts = {name: getattr(traced, name) for name in ("graphs", "breaks", "recompiled", "opaque")}
    outputs = {"eager": eager, "compiled": eager, "operator": alone}
    if traced.graphs != 1 or traced.breaks:
        return outputs, facts
    with FakeTensorMode() as mode:
        fake = operator(*map(mode.from_tensor, (a, v)))
    for key, made in (("fake", fake), ("real", alone)):
        facts[key] = [list(made.shape), list(made.stride()), str(made.dtype), made.device.type]
    if facts["fake"] != facts["real"]:  # nothing can be generated for it
        return outputs, facts
    outputs["compiled"] = trained(torch.compile(answer, backend="aot_eager", fullgraph=True))
    if not machine.gpu():  # one card's code is the same on every machine
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            launches = ledger.compiled(reveal.inductor(answer, *weights, arch="sm_90").code)
        facts["launched"] = [[launch.kind, launch.name] for launch in launches]
    return outputs, facts


def judge_operator(inputs, outputs, facts):
    """One graph, in which the operator is called and all else is seen; and a kernel that the operator launches."""
    if found := judge_graphs(inputs, outputs, facts | {"opaque": []}):
        return found
    if facts["opaque"] != ["recurrence.default"]:
        names = ", ".join(f"`{name}`" for name in facts["opaque"]) or "nothing"
        said = f"Of what the compiler cannot look into, the graph must hold `recurrence` alone; it holds {names}."
        return [("graph-break", said)]
    if not facts["kernels"]:
        return [("forbidden", "No Triton kernel was launched: the operator must launch `scan_columns`.")]
    for name, said, is_so in zip(("shape", "strides", "dtype", "device"), facts["fake"], facts["real"], strict=True):
        if said != is_so:
            told = f"promises a result with {name} {said}; for the same inputs the operator returns {is_so}"
            return [("wrong-shape", f"The function under `register_fake` {told}.")]
    if "launched" not in facts:
        return []
    kinds = [kind for kind, _ in facts["launched"]]
    if kinds.count("library") != 2 or kinds.count("ATen") != 1 or len(kinds) > 5:
        made = ", ".join(name for _, name in facts["launched"])
        said = f"two products, the operator and two generated kernels are enough; it launches {made}"
        return [("too-many-kernels", f"Compiled, {said}.")]
    return []


def remembered(x, decay, inward, grad, a, v):
    """See `custom-operator`: result and gradients, however they come about, and the operator's result."""

    def recurrence(a, x):
        h = [torch.zeros_like(x[0])]
        for t in range(len(x)):
            h.append(a[t] * h[-1] + x[t])
        return torch.stack(h[1:])

    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_() for t in (x, decay, inward)]
        x, decay, inward = leaves
        out = torch.tanh(recurrence(torch.sigmoid(x @ decay), x @ inward)) * x
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return {"eager": found, "compiled": found, "operator": recurrence(a, v)}


def memory_inputs(tokens, width, lay=lambda t: t):
    """lay: how the operator's own inputs, which are no square of the model's, lie in memory."""

    def inputs(draw: Draw):
        weights = [draw(width, width, kind="normal") / width**0.5 for _ in range(2)]
        a, v = torch.sigmoid(draw(tokens + 2, width + 3, kind="normal")), draw(tokens + 2, width + 3)
        return draw(tokens, width), *weights, draw(tokens, width, kind="normal"), lay(a), lay(v)

    return inputs


custom_operator = Exercise(
    name="custom-operator",
    lab=LAB,
    rung="compiler",
    entry="gated_memory",
    title="Your own kernel in a compiled model",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("9 tokens of 16", memory_inputs(9, 16), seen=True),
        Case("one token; the operator's own inputs lie column by column", memory_inputs(1, 24, turned)),
        Case("5 tokens of 130: three blocks; the operator's own inputs in padded rows", memory_inputs(5, 130, padded)),
        Case("12 tokens of 7; the operator's own inputs in every second place", memory_inputs(12, 7, spaced)),
        Case("100 tokens of 512", memory_inputs(100, 512), mode="gpu"),
    ),
    reference=remembered,
    allow=frozenset({"*", "library.custom_op"}),
    modules=frozenset({"triton"}),
    drive=in_a_model,
    judge=judge_operator,
    hints=(
        "Four functions, four questions. The operator: which memory does the kernel write, and how many programs "
        "cover the columns? The fake one: what would the result look like, if nobody computed it? What must be kept "
        "for the backward? And what does a change of h[t] change later?",
        "The gradient of h[t] is what arrives from outside, plus a[t + 1] times the gradient of h[t + 1]: the same "
        "recurrence, from the last token to the first, with decays that are shifted by one. It is also the gradient "
        "of x[t]. That of a[t] has a factor beside it, h[t - 1].",
        "fake: empty, in x's shape, contiguous. keep: save a and the result. backward: later = a from the second token "
        "on, then a row of zeros; gx = flip(recurrence(flip(later), flip(grad))) along the tokens; earlier = a row of "
        "zeros, then h without its last; the gradients are gx · earlier and gx.",
    ),
    seconds=60,
)


# -------------------------------------------------------------------------------------------------------------------

what_fuses = Exercise(
    name="what-fuses",
    lab=LAB,
    rung="compiler",
    entry="what_fuses",
    title="Predict launches, and what reaches memory",
    form="prediction",
    made_of="python",
    cases=(Case("matrices of 64 × 64", lambda draw: (FUSING, 64), seen=True, mode="cpu"),),  # whose code is an H200's
    drive=look_inside,
    judge=judge_fusing,
    hints=(
        "Take the lines one after another and ask of each result: who reads it, and can the kernel that makes it go "
        "on with the next line?",
        "Pointwise lines run together into one kernel, through views too, and so does a reduction of a row with what "
        "follows it. A product of matrices is the library's own launch: what it reads and what it writes must be in "
        "memory. A result that is returned is written, whoever else reads it.",
        "For each function: launches = products + groups of lines between products; matrices written = one for each "
        "product + what a product reads and no argument is + what is returned and no product has written.",
    ),
    core=True,
    seconds=60,
)

EXERCISES = (
    what_fuses, graph_breaks, view_chain, fusable_norm, one_compilation, few_launches, custom_operator
)  # fmt: skip
