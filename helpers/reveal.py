"""Generated code, to read: what Triton's compiler makes of a kernel, what torch.compile and XLA make of a function.

Nothing here needs a GPU, nor the GPU that the code is for. A Triton or Gluon kernel is compiled in a child process,
since a process that interprets Triton cannot compile it; registers and spills are what ptxas said, SASS is read by the
nvdisasm in triton's wheel.
"""

import ast
import difflib
import itertools
import logging
import re
import subprocess
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FunctionType

from . import apart, child, cuda, machine, paper, refusals, show, source

_compiled: dict[tuple, "Compiled"] = {}
_calls = itertools.count()
_traced: dict[tuple, "Passes"] = {}
_IR_LOCATION = re.compile(r'^#loc.*\n|\s*\bloc\((?:"[^"]*"(?:\([^()]*\))?|#\w+|unknown)\)', re.MULTILINE)
_MLIR_OP = re.compile(r'^\s*(?:%[\w:#]+(?:, %[\w:#]+)*\s*=\s*)?"?(([a-z]\w*)\.[a-z][\w.]*)', re.MULTILINE)
_SASS_OP = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_PTX_OP = re.compile(
    r"^\s*(?:\$\w+:\s*)?(?:\{\s*)?(?:@!?%?\w+\s+)?"
    r"(?:([a-z][\w.:]*)(?=[\s;]).*;\s*(?://.*)?|((?:ld|mma|wgmma|tcgen05)\.[\w.:]+)[ \t]*)$",  # operands may follow
    re.MULTILINE,
)
_AMD_OP = re.compile(r"^\s+((?:[vs]|ds|global|buffer|flat|scratch)_\w+)(?=\s|$)", re.MULTILINE)
_DUMPED = re.compile(
    r"^// -----// IR Dump Before (\S+) \(([\w-]*)\) \('[\w.]+' operation(?:: @(\S+))?\) //----- //\n", re.MULTILINE
)
_TYPES = {
    "bool": "i1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip


KINDS = {
    "mma.sync": r"mma\.sync|wmma\.mma|[HIBDQ]MMA\b",
    "wgmma": r"wgmma\.mma_async|[HIQ]GMMA\b",
    "tcgen05": r"tcgen05\.mma|UTC\w*MMA\b",
    "mfma": r"v_s?mfmac?_",
    "wmma": r"v_s?wmmac?_",
    "fma": r"fma\.|FFMA|HFMA2|v_(?:pk_)?fmac?_|v_dot2",
    "TMA": r"cp\.(?:reduce\.)?async\.bulk\.tensor|UTMA(?:LDG|STG|REDG)",
    "cp.async": r"cp\.async\.c[ag]|LDGSTS",
    "global loads": r"ld\.global|LDG\b|(?:global|buffer|flat)_load",
    "global stores": r"st\.global|STG\b|(?:global|buffer|flat)_store",
    "shared loads": r"ld\.shared|ldmatrix|LDS\b|LDSM\b|ds_(?:read|load)",
    "shared stores": r"st\.shared|stmatrix|STS\b|STSM\b|ds_(?:write|store)",
    "shuffles": r"shfl|SHFL|ds_b?permute|v_permlane",
    "barriers": r"bar\.sync|barrier\.sync|BAR\b|s_barrier",
    "mbarriers": r"mbarrier|SYNCS\b",
}
"""Kinds of instructions, and how their names begin in PTX, in SASS and in AMD's assembly. The first five multiply
matrices: mma.sync one tile for a warp (sm_80 and consumer cards), wgmma for four warps out of shared memory (sm_90),
tcgen05 into tensor memory (sm_100), mfma and wmma on AMD's data-centre and consumer cards."""
MATRIX = ("mma.sync", "wgmma", "tcgen05", "mfma", "wmma")
"""Those of `KINDS` that run on tensor cores, or on what AMD calls matrix cores."""
_MATRIX_OP = "|".join(KINDS[kind] for kind in MATRIX)
MULTIPLIES = rf"\b(?:{_MATRIX_OP}|{KINDS['fma']})"
"""A line of assembly that multiplies."""


class CompileFailed(RuntimeError):
    """The compiler refused; the message is its own, with the kernel's line where it gave one."""


@dataclass(frozen=True)
class Compiled:
    """A Triton kernel at each stage of its compilation for `arch`, as text, and what the code holds of an SM.

    `registers` are per thread; `spills` are bytes a thread stores to local memory because registers ran out;
    `shared_bytes` are per program. For AMD `amdgcn` stands in place of `ptx` and `sass`, registers are VGPRs. A Gluon
    kernel has no `ttir`: it is written at the level of `ttgir`.
    """

    name: str
    arch: str
    ttir: str
    ttgir: str
    llir: str
    ptx: str
    amdgcn: str
    registers: int
    spills: int
    shared_bytes: int
    cubin: bytes = field(repr=False)

    @cached_property
    def sass(self) -> str:
        """The machine code, disassembled by nvdisasm when first asked for."""
        if not self.ptx:
            return ""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(self.cubin)
            f.flush()
            done = subprocess.run([cuda.tool("nvdisasm"), "-c", f.name], capture_output=True, text=True, check=True)
        return done.stdout

    def dialects(self) -> dict[str, Counter]:
        """How many operations of each MLIR dialect its two Triton stages hold: {"ttir": Counter, "ttgir": …}."""
        return {s: _dialects(getattr(self, s)) for s in ("ttir", "ttgir") if getattr(self, s)}

    @property
    def kinds(self) -> Counter:
        """How many instructions of each of `KINDS` stand in its PTX, or its assembly for AMD."""
        return kinds(self.ptx or self.amdgcn)

    @property
    def fits(self) -> bool:
        """Whether a card of `arch` has the shared memory that one program takes (the compiler does not ask)."""
        return self.shared_bytes <= machine.shared_limit(self.arch)

    def row(self) -> dict:
        """It in one line of a table: what multiplies matrices, what fetches, and what it holds of an SM."""
        found = self.kinds
        fetching = ("TMA", "cp.async", "global loads")
        return {
            "target": self.arch,
            "matrix instructions": ", ".join(f"{found[k]} {k}" for k in MATRIX if found[k])
            or f"none ({found['fma']} fma)",
            "fetched by": ", ".join(f"{found[k]} {k}" for k in fetching if found[k]),
            "registers a thread": self.registers,
            "bytes spilled": self.spills,
            "shared memory KB": self.shared_bytes / 1024,
            "of KB on the card": machine.shared_limit(self.arch) / 1024,
            "lines of assembly": (self.sass or self.amdgcn).count("\n"),
        }


@dataclass(frozen=True)
class Pass:
    """One pass of MLIR over a kernel: in which stage's pipeline it ran, its name, the module before and after."""

    stage: str
    name: str
    argument: str
    before: str = field(repr=False)
    after: str = field(repr=False)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def gained(self) -> Counter:
        """Operations that there are more of afterwards: {"ttg.local_alloc": 2}."""
        return operations(self.after) - operations(self.before)

    @property
    def lost(self) -> Counter:
        """Operations that there are fewer of afterwards."""
        return operations(self.before) - operations(self.after)

    def diff(self, context: int = 1) -> str:
        """What it changed, line by line, as `diff` shows it."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=context, lineterm="")
        return "\n".join(list(lines)[2:])


@dataclass(frozen=True)
class Passes:
    """Every pass that ran over a kernel on its way to `arch`, in order, and the MLIR that each stage ended with.

    `stages`: {"ttir": text, "ttgir": text, "llir": text}, the last in MLIR's LLVM dialect, before LLVM itself takes
    over; a Gluon kernel begins with "ttgir".
    """

    name: str
    arch: str
    passes: list[Pass] = field(repr=False)
    stages: dict[str, str] = field(repr=False)

    def __iter__(self):
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, name: str) -> Pass:
        """The first pass of that name or argument ("tritongpu-pipeline") that changed something, else the first."""
        named = [p for p in self.passes if name in (p.name, p.argument)]
        if not named:
            raise KeyError(f"{name} did not run over {self.name} for {self.arch}")
        return next((p for p in named if p.changed), named[0])

    def dialects(self) -> dict[str, Counter]:
        """How many operations of each dialect there are at the end of each stage."""
        return {stage: _dialects(text) for stage, text in self.stages.items()}

    def rows(self, changed: bool = True) -> list[dict]:
        """Lines of a table, those passes only that changed something: what each added and took away, the most first."""

        def spelled(counts, most=6):
            named = [f"{n} {op}" for op, n in counts.most_common(most)]
            return ", ".join(named + ["…"] * (len(counts) > most))

        return [
            {"stage": p.stage, "pass": p.argument or p.name, "adds": spelled(p.gained), "removes": spelled(p.lost)}
            for p in self.passes
            if p.changed or not changed
        ]


@dataclass(frozen=True)
class Generated:
    """What torch.compile generated: the code of each graph, and what one call launches.

    `kernels` are the generated kernels and `extern_calls` the library calls (`extern_kernels.mm`), in the order in
    which a call makes them, as often as it makes them. `graphs` above 1 means that the function was broken.
    """

    code: str
    kernels: list[str]
    extern_calls: list[str]
    graphs: int = 1


@dataclass(frozen=True)
class Traced:
    """What torch.compile handed to its backend over some calls, and what the graphs returned.

    `breaks`: "the line: why" for each graph break of the last call. `recompiled`: what the first call assumed and the
    next to be compiled did not keep ("fn.position == 0"), where nothing broke. `opaque`: nodes that no compiler can
    look into: operators from outside PyTorch, functions let into the graph unread, numbers that the host waits for.
    """

    graphs: int
    breaks: list[str]
    recompiled: str
    opaque: list[str]
    outputs: list


def triton(
    kernel,
    signature: dict,
    constexprs: dict | None = None,
    arch: str | None = None,
    num_warps=4,
    num_stages=3,
    line_info=False,
    **options,
) -> Compiled:
    """Compile a Triton or Gluon kernel for `arch` ("sm_90", "gfx942"; by default this machine's): every stage.

    `kernel`: the kernel, or its name in this notebook. `signature`: each argument's type, "*fp32", "i32",
    "tensordesc<fp16[128,64]>", or an example of it, a tensor, tensor descriptor or number. As at a launch, pointers
    are taken to be aligned to 16 bytes; an integer that is a multiple of 16, which lets loads be vectorised, is
    written "i32:16". `constexprs`: name -> value. `line_info` leaves in the PTX the `.loc` notes that say which source
    line an instruction came from. `options`: the launch's others, such as `num_ctas` and `maxnreg`.
    Raises `CompileFailed`, TypeError for arguments that do not fit the kernel, `source.Missing`.
    """
    arch = arch or machine.here().arch
    return compiled(*_asked(kernel, signature, constexprs), arch, num_warps, num_stages, line_info, options)


ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""A100, H100 and H200, B200, and AMD's MI300: what `targets` compiles for."""


def targets(kernel, signature: dict, constexprs: dict | None = None, archs=ARCHS, **options) -> dict[str, Compiled]:
    """`triton` for several architectures at once, by name; `show.table([c.row() for c in made.values()])` compares."""
    made = at_once(lambda arch: triton(kernel, signature, constexprs, arch, **options), archs)
    return dict(zip(archs, made, strict=True))


def at_once(make: Callable, asked: Iterable) -> list:
    """`[make(one) for one in asked]`, where each `make` asks `triton` for a kernel: they are compiled side by side, in
    as many processes as there are processors. What does not compile raises as it would without this.
    """
    asked = list(asked)
    for text, calls in _wanted(make, asked).items():
        if len(calls) > 1:
            with show.working(f"compiling {len(calls)} kernels"):
                _compile_several(text, calls)
    return [make(one) for one in asked]


def ahead(make: Callable, asked: Iterable) -> None:
    """Begin to compile what `[make(one) for one in asked]` asks `triton` for, side by side, and do not wait. Whoever
    then asks for a kernel, this or another, waits until these are there; `apart.settle` waits, too."""
    wanted = _wanted(make, asked)

    def work() -> None:
        for text, calls in wanted.items():
            _compile_several(text, calls)

    if wanted:
        _begun.append(apart.later(work))


_begun: list[Future] = []
"""What `ahead` has begun and nobody has waited for."""


def _settle() -> None:
    """Have what `ahead` has begun; what does not compile says so to whoever asks for it by itself."""
    while _begun:
        with show.working("compiling kernels"):
            _begun.pop(0).exception()


def _wanted(make: Callable, asked: Iterable) -> dict[str, dict]:
    """The kernels that `make` would have to compile: {text: {call: (name, architecture)}}."""
    _settle()
    wanted = {}
    for one in asked:
        try:
            with _asking():
                make(one)
        except _Asked as found:
            text, call, name, arch = found.args
            wanted.setdefault(text, {})[call] = name, arch
    return wanted


def _compile_several(text: str, calls: dict[str, tuple[str, str]]) -> None:
    several = f"_several([{', '.join(f'lambda: {call}' for call in calls)}])"
    layouts = _LAYOUTS if "Layout(" in several else ""
    done = child.run(text + _COMPILE + layouts, several, interpreted=False, seconds=300)
    for (call, (name, arch)), value in zip(calls.items(), done.value if done.ok else (), strict=False):
        if value is not None:
            _keep(text, call, name, arch, value)


class _Asked(BaseException):
    """A kernel that `at_once` was asked for, and that is not compiled yet."""


_gathering = False


@contextmanager
def _asking() -> Iterator[None]:
    """Where `compiled` says what it would compile, and does not."""
    global _gathering
    _gathering = True
    try:
        yield
    finally:
        _gathering = False


def passes(
    kernel,
    signature: dict,
    constexprs: dict | None = None,
    arch: str | None = None,
    num_warps=4,
    num_stages=3,
    **options,
) -> Passes:
    """The passes of MLIR that take a kernel, arguments as those of `triton`, from Triton's dialect to LLVM's.

    What follows is not MLIR's: LLVM optimises ("llir") and writes PTX, ptxas makes the machine code.
    """
    arch = arch or machine.here().arch
    text, name, types, constants = _asked(kernel, signature, constexprs)
    call = _call(name, types, constants, arch, num_warps, num_stages, False, options, "_trace")
    if (text, call) not in _traced:
        traced = _compile(text, call, name, arch)
        ends = {stage: _IR_LOCATION.sub("", end) for stage, end in traced["ends"].items()}
        ran = []
        for stage, dump in traced["dumps"].items():
            _, *parts = _DUMPED.split(dump)
            parts[3::4] = [_IR_LOCATION.sub("", _NOTED.sub("", text)).strip() for text in parts[3::4]]
            befores = parts[3::4]
            afters = [*befores[1:], ends[stage].strip()]
            for pass_name, argument, before, after in zip(parts[::4], parts[1::4], befores, afters, strict=True):
                ran.append(Pass(stage, pass_name, argument, before, after))
        _traced[text, call] = Passes(name, arch, ran, ends)
    return _traced[text, call]


def _asked(kernel, signature: dict, constexprs: dict | None) -> tuple[str, str, dict, dict]:
    """A kernel's module text, its name, its arguments' types and its constants as expressions."""
    name = kernel if isinstance(kernel, str) else _name(kernel)
    text = source.live(kernel) if isinstance(kernel, str) else source.of(kernel)
    types = {n: t if isinstance(t, str) else type_of(t) for n, t in signature.items()}
    return text, name, types, {n: repr(v) for n, v in (constexprs or {}).items()}


def compiled(
    text: str,
    name: str,
    types: dict[str, str | dict],
    constants: dict[str, str],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 3,
    line_info: bool = False,
    options: dict | None = None,
    sealed: bool = False,
) -> Compiled:
    """`triton` for the kernel `name` of a module text; `constants` are expressions. Raises as `triton` does.

    sealed: as `child.run` takes it, since the text is run to have its kernel."""
    call = _call(name, types, constants, arch, num_warps, num_stages, line_info, options or {}, None)
    if (text, call) not in _compiled and not _gathering:
        _settle()
    if (text, call) not in _compiled:
        if _gathering:
            raise _Asked(text, call, name, arch)
        _keep(text, call, name, arch, _compile(text, call, name, arch, sealed))
    return _compiled[text, call]


def _keep(text: str, call: str, name: str, arch: str, value: dict) -> None:
    for stage in ("ttir", "ttgir"):
        value[stage] = _IR_LOCATION.sub("", value[stage])
    _compiled[text, call] = Compiled(
        name, arch, cubin=bytes.fromhex(value.pop("binary")), **(value | _resources(value.pop("log"), value))
    )


def shared_bytes(text: str, name: str, types: dict, constants: dict, arch: str, num_warps: int, num_stages: int) -> int:
    """Shared memory of a program of `compiled`, in a fraction of its time: LLVM and ptxas have no part in it."""
    call = _call(name, types, constants, arch, num_warps, num_stages, False, {}, "_shared")
    return _compile(text, call, name, arch)


def inductor(fn, *args, run=True, arch: str | None = None) -> Generated:
    """Compile `fn` with torch.compile, call it with `args`, and return the code: Triton on a GPU, C++ on a CPU.

    With `run=False` it ends once the first graph's code is written: no kernel is compiled from it, tuned or launched.
    `arch`, one of `paper.ARCHS`: the Triton for such a card, written here, whether this machine has one or not;
    nothing is run, and tensors lend only their shapes.

    Compiled functions of this process are left as they are. The code goes through Inductor's cache on disk: a
    `torch.compile(fn)` called with like arguments finds it there, here and in a child process, and so does this.
    Raises `refusals.CannotCompile`, and `machine.NotReady` without a C++ compiler where one is needed.
    """
    import torch._dynamo
    from torch._inductor.graph import GraphLowering

    if arch:
        with paper.gpu(arch):
            return inductor(fn, *paper.like(args), run=False)
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    codes = []

    def save(code):
        codes.append(code)
        if not run:
            raise _Written

    plain_save = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(save)
    # code that nobody compiles: no need to try which vector instructions g++ can make, nor to look it up on disk, nor
    # for a GPU to start a process a processor, which would compile each kernel before the code is whole
    quick = {} if run else {"cpp.vec_isa_ok": True, "fx_graph_cache": False, "compile_threads": 1}
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        with (
            show.working("torch.compile"),
            refusals.strictly(name),
            torch._inductor.config.patch(quick),
            warnings.catch_warnings(),
        ):
            # products of fp32 are meant as they are written
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication")
            torch.compile(_fresh(fn))(*args)
    except _Written:
        pass  # this is how run=False ends
    finally:
        GraphLowering.save_output_code = plain_save
    codes = [_without_harness(code) for code in dict.fromkeys(codes)]
    kernels, externs = [], []
    for code in codes:
        defined = re.findall(r"^(\w+) = async_compile\.\w+\(", code, re.MULTILINE)
        calls = code[max(code.rfind("def call("), 0) :]
        calls = calls[: calls.find("\ndef ")] if "\ndef " in calls else calls
        launch = rf"\b({'|'.join(map(re.escape, defined))})(?:\.run)?\(" if defined else r"(?!)"
        kernels += re.findall(launch, calls)
        externs += re.findall(r"\b(extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(", calls)
    return Generated("\n\n".join(codes), kernels, externs, len(codes))


def graphs(make: Callable, calls: Sequence[tuple]) -> Traced:
    """Trace what `make()` returns through all of `calls`, tuples of arguments; nothing is generated.

    `make` is called for each look, so that a state which changes from call to call begins anew. What torch.compile
    has learnt in this process is forgotten, before and after.
    """
    import torch

    taken, breaks, recompiled = [], [], ""

    def fresh():
        torch._dynamo.reset()
        fn = make()
        return lambda *args: fn(*args)

    def backend(graph, example_inputs):
        taken.append(graph)
        return graph.forward

    with torch.no_grad(), _only_errors("torch._dynamo"):  # it warns of what is returned here
        compiled = torch.compile(fresh(), backend=backend)
        outputs, count = [compiled(*args) for args in calls], len(taken)
        if any(graph.compile_subgraph_reason.graph_break for graph in taken):  # else it would trace all for nothing
            for reason in torch._dynamo.explain(fresh())(*calls[-1]).break_reasons:
                breaks.append(f"{reason.user_stack[-1].line}: {reason.reason.splitlines()[0]}")
        if not breaks:  # explain is silent on a break with no operator before it
            try:
                torch.compile(fresh(), backend=backend, fullgraph=True)(*calls[-1])
            except torch._dynamo.exc.TorchDynamoException as refused:
                lines = re.findall(r'File "[^"]*", line \d+, in .*\n +(.*)', str(refused))
                breaks.append(": ".join([*lines[-1:], str(refused).splitlines()[0]]))
        if count > 1 and not breaks:
            with torch._dynamo.config.patch(error_on_recompile=True):
                compiled = torch.compile(fresh(), backend=backend)
                try:
                    for args in calls:
                        compiled(*args)
                except torch._dynamo.exc.RecompileError as refused:
                    failed = re.search(r"- 0/0: (.*?)\s*(?:#|$)", str(refused), re.MULTILINE)
                    recompiled = failed[1] if failed else ""
    torch._dynamo.reset()
    return Traced(count, breaks, recompiled, sorted({n for graph in taken for n in _opaque(graph)}), outputs)


@contextmanager
def _only_errors(logger: str):
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _opaque(graph) -> list[str]:
    names = []
    for node in (n for part in graph.modules() if hasattr(part, "graph") for n in part.graph.nodes):
        target = node.target
        if node.op == "call_method":
            hidden = target in ("item", "tolist", "numpy", "cpu")
        elif node.op == "call_function":
            home = getattr(target, "namespace", "") or getattr(target, "__module__", "") or "torch"
            if home == "higher_order":
                hidden = target.name() not in ("cond", "while_loop", "autograd_function_apply", "invoke_subgraph")
            else:
                hidden = home.partition(".")[0] not in ("aten", "prims", "torch", "_operator", "builtins", "math")
        else:
            hidden = False
        if hidden:
            names.append(target if isinstance(target, str) else getattr(target, "__name__", str(target)))
    return names


class _Written(BaseException):
    """Ends a compilation from inside; like KeyboardInterrupt no Exception, which the compiler would wrap."""


def machine_code(*made: Generated, arch: str = "sm_90", **blocks) -> list[Compiled]:
    """The Triton kernels in Inductor's code, compiled for `arch` with or without a card, in the order of the texts.

    What Inductor knows of the arguments (dtypes, which are aligned to 16 bytes) is in the text and passed on, as are a
    template's warps and stages. The block's sides, which it would tune at the first launch, are `blocks`: XBLOCK=1024
    for a row of elements, 64 × 64 for a tile, one row in steps of 2048 for a reduction, by 4 warps.
    Raises `CompileFailed`.
    """
    found = [kernel for one in made for kernel in _GENERATED.findall(one.code)]
    named = [f"{name}_of_{i}" for i, (_, _, name) in enumerate(found)]  # two texts may use one name
    module = _INDUCTOR + "\n".join(
        text.replace(f"def {name}(", f"def {new}(", 1) for (_, text, name), new in zip(found, named, strict=True)
    )

    def make(i):
        head = found[i][0]
        types = ast.literal_eval(re.search(r"'signature': (\{.*?\})", head)[1])
        aligned = {at for (at,) in ast.literal_eval(re.search(r"'configs': \[(\{.*?\})\]", head)[1])}
        sides = [n for n, kind in types.items() if kind == "constexpr"]
        known = {"R0_BLOCK": 2048, "XBLOCK": 1 if "R0_BLOCK" in sides else 64 if "YBLOCK" in sides else 1024}
        spelled = {}
        for at, (name, kind) in enumerate(types.items()):
            if name not in sides:  # a pointer is taken to be aligned, a number is not, unless it is said
                said = (
                    ":1" if kind[0] == "*" and at not in aligned else ":16" if kind[0] != "*" and at in aligned else ""
                )
                spelled[name] = kind + said
        launch = [re.search(rf"num_{part}=(\d+)", head) for part in ("warps", "stages")]
        asked = [int(number[1]) if number else usual for number, usual in zip(launch, (4, 3), strict=True)]
        constants = {n: repr((known | blocks).get(n, 64)) for n in sides}
        return compiled(module, named[i], spelled, constants, arch, *asked)

    return at_once(make, range(len(found)))


_GENERATED = re.compile(r"async_compile\.triton\('\w+', '''(.*?)(@triton\.jit\s+def (?=(\w+)).*?)'''", re.S)
_INDUCTOR = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

"""
"""What Inductor's kernels refer to."""


def _without_harness(code: str) -> str:
    """Inductor's text without its end, which would time it with random inputs; what they were stays as comments."""
    runs, *harness = re.split(r"\n\n+def (?:get_args|benchmark_compiled_module)\(", code)
    inputs = re.findall(r"^ +(\w+ = rand_strided\(.*\))$", "\n".join(harness), re.MULTILINE)
    return "\n".join([runs, "", *(f"# {line}" for line in inputs), ""])


@dataclass(frozen=True)
class Xla:
    """What XLA made of a JAX function for an H200: each stage as text, and what XLA itself counted.

    `stablehlo` is what JAX hands over, `before` the same as HLO, `after` the optimised HLO. `bytes_before` and
    `bytes_after` are XLA's own count of bytes accessed (not a number where it has none), `seconds` what it took.
    `mlir`: for each kernel that XLA generates itself the modules that its emitter went through, in order.
    """

    stablehlo: str
    before: str
    after: str
    bytes_before: float
    bytes_after: float
    seconds: float
    mlir: dict[str, list[str]] = field(repr=False)

    def dialects(self) -> dict[str, Counter]:
        """How many operations of each MLIR dialect: what JAX hands over, then each emitter's first module, the most of
        each dialect that there are in between, and the last."""
        found = {"StableHLO": _dialects(self.stablehlo)}
        for name, modules in self.mlir.items():
            first, *between, last = map(_dialects, modules)
            most = {d: max(counts[d] for counts in between) for d in sorted(set().union(*between))}
            found |= {f"{name}, first": first, f"{name}, between": Counter(most), f"{name}, last": last}
        return found


def xla(fn: Callable, *arguments: str, flags: Sequence[str] = (), mlir: bool = False) -> Xla:
    """Compile a JAX function for an H200, whether this machine has a GPU or none: XLA goes by its rules, and measures
    nothing.

    `fn` imports jax inside. `arguments`: dtype and shape of each in HLO's spelling, "f16[4096,1024]". `flags`: of
    XLA_FLAGS. `mlir`: have every pass over MLIR written down, which takes seconds. Raises `machine.NotReady` without
    JAX or its plugin for GPUs, and `apart.Failed`.
    """
    (made,) = xlas([(fn, arguments)], flags=(*flags, *["--xla_dump_emitter_re=.*"] * mlir))
    return made


def xlas(asked: Iterable[tuple[Callable, Sequence[str]]], *, flags: Sequence[str] = ()) -> list[Xla]:
    """`xla` for several functions, each with its arguments, one after another in one process, which begins once."""
    if lacking := apart.problem("jax", gpu=True):
        raise lacking
    asked = list(asked)
    texts = dict.fromkeys(source.of(fn) for fn, _ in asked)
    spelled = ", ".join(f"({fn.__name__}, {tuple(arguments)!r})" for fn, arguments in asked)
    with show.working("XLA"):
        done = _by_xla("\n\n".join(texts) + _XLA, f"_xla([{spelled}], {_H200!r}, {tuple(flags)!r})")
    if not done.ok:
        names = ", ".join(fn.__name__ for fn, _ in asked)
        raise apart.Failed(f"XLA did not compile {names}: {done.why()}")
    return [_read_xla(dict(value)) for value in done.value]


def _read_xla(value: dict) -> Xla:
    modules = {}
    for name, text in value.pop("dumps").items():
        parts = [_NOTED.sub("", part).strip() for part in _MLIR_DUMP.split(text)]
        modules[name] = [part for part in parts if "module" in part]
    tidied = {stage: _tidy_hlo(value[stage]) for stage in ("before", "after")}
    return Xla(**value | tidied, mlir=modules)


def _by_xla(text: str, call: str) -> child.Result:
    """What XLA's process gives. One text is compiled once: whoever asks for it a second time, in another thread while
    the first one waits for it, say, gets that."""
    with _asking_xla:
        mine = (text, call) not in _made_by_xla
        future = _made_by_xla.setdefault((text, call), Future())
    if not mine:
        return future.result()
    try:
        done = child.run(text, call, packages="jax", seconds=300, env={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"})
    except BaseException as error:  # it was stopped: the next one asks anew
        del _made_by_xla[text, call]
        future.set_exception(error)
        raise
    if not done.ok:
        del _made_by_xla[text, call]
    future.set_result(done)
    return done


_made_by_xla: dict[tuple[str, str], Future] = {}
_asking_xla = threading.Lock()


def _tidy_hlo(text: str) -> str:
    """HLO without what tells where it came from: tables of files, metadata, shardings."""
    text = re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n*", "", text, flags=re.MULTILINE)
    text = re.sub(r", (?:metadata|frontend_attributes|sharding)=\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}", "", text)
    return text.strip()


_MLIR_DUMP = re.compile(r"^// -----// IR Dump .*$", re.MULTILINE)
_H200 = """gpu_device_info {
 threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
 registers_per_core_limit: 65536 registers_per_block_limit: 65536
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000
 cuda_compute_capability { major: 9 } }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
"""An H200, in the words of XLA's GpuTargetConfigProto."""

_XLA = """

def _xla(asked, card, flags):
    import glob
    import os
    import re
    import shutil
    import tempfile
    import time

    folder = tempfile.mkdtemp()
    os.environ["XLA_FLAGS"] = " ".join(["--xla_dump_to=" + folder, "--xla_gpu_autotune_level=0", *flags])
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from jaxlib import _jax

    jax.config.update("jax_platforms", "cpu")  # a GPU that is here has no part in it
    topology = topologies.get_topology_desc("h200", "cuda", target_config=card, topology="1x1x1")
    kinds = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "s32": "int32"}

    def accessed(analysis):
        return (analysis or {}).get("bytes accessed", float("nan"))

    def made(fn, arguments):
        def lower(sharding):
            spelled = [re.fullmatch(r"(\\w+)\\[([\\d,]*)\\]", one).groups() for one in arguments]
            shapes = [(tuple(map(int, filter(None, sides.split(",")))), kinds[kind]) for kind, sides in spelled]
            paper = [jax.ShapeDtypeStruct(s, jax.numpy.dtype(d), sharding=sharding) for s, d in shapes]
            return jax.jit(fn).lower(*paper)

        shutil.rmtree(folder)  # what an earlier one left
        os.mkdir(folder)
        lowered = lower(SingleDeviceSharding(topology.devices[0]))
        began = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - began
        # a card on paper counts nothing; the CPU's client counts the card's graph
        module = compiled.runtime_executable().hlo_modules()[0]
        counted = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
        dumps = {}
        for path in sorted(glob.glob(folder + "/*")):
            if found := re.search(r"jit_\\w+?\\.([\\w.]+)\\.(mlir-passes\\.log|triton-to-llvm\\.txt)$", path):
                with open(path) as file:
                    dumps[found[1]] = file.read()
        return {
            "stablehlo": lowered.as_text(),
            "before": lowered.as_text(dialect="hlo"),
            "after": compiled.as_text(),
            "bytes_before": accessed(lower(None).cost_analysis()),
            "bytes_after": accessed(counted),
            "seconds": seconds,
            "dumps": dumps,
        }

    return [made(fn, arguments) for fn, arguments in asked]
"""


def instructions(code: str) -> Counter:
    """How often each instruction, modifiers included ("LDG.E.128", "ld.global.v4.b32"), stands in a text of assembly:
    SASS, PTX or AMD's."""
    sass = _SASS_OP.findall(code) or _AMD_OP.findall(code)
    return Counter(sass or [op for ops in _PTX_OP.findall(code) if not (op := "".join(ops)).startswith(".")])


def kinds(code: str) -> Counter:
    """How many instructions of each of `KINDS` stand in a text of PTX, SASS or AMD's assembly."""
    found = Counter()
    for op, count in instructions(code).items():
        found.update({kind: count for kind, names in KINDS.items() if re.match(names, op)})
    return found


@dataclass(frozen=True)
class Loop:
    """A loop in SASS. `text`: its instructions, an address before each."""

    text: str

    @property
    def instructions(self) -> Counter:
        """How often each instruction stands in it, without its modifiers: {"FFMA": 64, "LDS": 4, …}."""
        return Counter(op.partition(".")[0] for op in _LOOP_OP.findall(self.text))

    @property
    def share(self) -> float:
        """Which share of its instructions multiplies: of a loop of FFMA what is left is overhead."""
        counts = self.instructions
        return sum(n for op, n in counts.items() if re.match(MULTIPLIES, op)) / max(counts.total(), 1)

    def __str__(self) -> str:
        counts = self.instructions
        ordered = sorted(counts.items(), key=lambda pair: (not re.match(MULTIPLIES, pair[0]), -pair[1]))
        spelled = ", ".join(f"{n} {op}" for op, n in ordered[:8])
        return f"{counts.total()} instructions: {spelled}{', …' if len(counts) > 8 else ''}"


def hot_loop(sass: str) -> Loop | None:
    """The loop of a kernel's SASS, as `Binary.sass` gives it, in which the arithmetic is done: the innermost one with
    the most matrix instructions, or where there are none multiply-adds. None for a kernel without such a loop."""
    lines, labels = [], {}
    for line in sass.splitlines():
        if found := _SASS_LINE.match(line):
            lines.append((int(found[1], 16), re.sub(r"\s+", " ", found[2]).strip()))
        elif found := re.match(r"(\.L_\w+):", line):  # nvdisasm's labels
            labels[found[1]] = len(lines)
    at = {address: i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(?:0x([0-9a-f]+)|`\((\.L_\w+)\))", text)
        start = target and (at.get(int(target[1], 16)) if target[1] else labels.get(target[2]))
        if start is not None and start < i:
            loops.append((start, i + 1))
    matrix = any(re.match(_MATRIX_OP, _plain_op(text)) for _, text in lines)

    def weight(loop):
        ops = [_plain_op(text) for _, text in lines[slice(*loop)]]
        return sum(bool(re.match(_MATRIX_OP if matrix else KINDS["fma"], op)) for op in ops)

    loops = [loop for loop in loops if weight(loop)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return None
    hot = max(inner, key=weight)
    return Loop("\n".join(f"{address:04x}  {text}" for address, text in lines[slice(*hot)]))


_SASS_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LOOP_OP = re.compile(r"^[0-9a-f]+  (?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)


def _plain_op(text: str) -> str:
    return re.sub(r"^@!?U?P\w+ ", "", text)


def operations(ir: str) -> Counter:
    """How often each operation ("tt.dot", "scf.for") stands in a text of MLIR."""
    return Counter(op for op, _ in _MLIR_OP.findall(ir))


def _dialects(ir: str) -> Counter:
    return Counter(dialect for _, dialect in _MLIR_OP.findall(ir))


# ------------------------------------------------------------------------------------------------------------

_NOTED = re.compile(r"^// -----// .*\Z", re.MULTILINE | re.DOTALL)
"""What a pass prints of itself while it runs, after the module that it was given."""


def _call(name, types, constants, arch, num_warps, num_stages, line_info, options, instead) -> str:
    spelled = ", ".join(f"{n!r}: {v}" for n, v in constants.items())
    options = {"num_warps": num_warps, "num_stages": num_stages} | options
    return f"_compile({name}, {types!r}, {{{spelled}}}, {arch!r}, {line_info}, {options!r}, {instead})"


def _compile(text: str, call: str, name: str, arch: str, sealed: bool = False):
    _settle()  # it would else need another process to compile in
    with show.working("compiling the kernel"):
        layouts = _LAYOUTS if "Layout(" in call else ""
        done = child.run(text + _COMPILE + layouts, call, interpreted=False, seconds=300, sealed=sealed)
    if not done.ok:
        raise (TypeError if done.error.startswith("TypeError: ") else CompileFailed)(_reason(done, name, arch))
    return done.value


_COMPILE = """

import contextlib as _contextlib
import io as _io
import json as _json
import os as _os
import tempfile as _tempfile

import triton
import triton.language


def _compile(kernel, types, constexprs, arch, line_info, options, instead):
    while not hasattr(kernel, "cache_key"):
        kernel = kernel.fn  # inside @triton.autotune, @triton.heuristics
    names = kernel.arg_names
    strange, absent = {*types, *constexprs} - {*names}, [n for n in names if n not in types and n not in constexprs]
    if strange or absent:
        said = [f"has no argument {', '.join(sorted(strange))}"] * bool(strange)
        said += [f"needs the type or value of {', '.join(absent)}"] * bool(absent)
        raise TypeError(f"{kernel.__name__} {' and '.join(said)}; its arguments are {', '.join(names)}")
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = not line_info
    triton.knobs.nvidia.dump_ptxas_log = True
    attributes = {}

    def spelled(given, path):
        if isinstance(given, dict):  # a tuple
            parts = [spelled(part, (*path, i)) for i, part in enumerate(given["parts"])]
            return globals()[given["of"]](*parts) if given["of"] in globals() else tuple(parts)
        name, _, multiple = given.partition(":")
        if multiple == "16" or name.startswith("*") and not multiple:
            attributes[path] = [["tt.divisibility", 16]]
        return name

    signature = {n: "constexpr" if n in constexprs else spelled(types[n], (i,)) for i, n in enumerate(names)}
    if arch.startswith("gfx"):
        target = triton.backends.compiler.GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    else:
        target = triton.backends.compiler.GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
    written = triton.compiler.ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as written
    source = written(kernel, signature, constexprs, attributes)
    if instead:
        return instead(source, target, options)
    log = _io.StringIO()
    with _contextlib.redirect_stdout(log):
        made = triton.compile(source, target=target, options=options)
    stages = {s: made.asm.get(s, "") for s in ("ttir", "ttgir", "llir", "ptx", "amdgcn")}
    binary = made.asm["cubin" if "cubin" in made.asm else "hsaco"].hex()
    return stages | {"binary": binary, "shared_bytes": made.metadata.shared, "log": log.getvalue()}


def _several(calls):
    # what each gives, None where it fails: a process each, as many at a time as there are processors
    room, waiting, running, made = len(_os.sched_getaffinity(0)), dict(enumerate(calls)), {}, {}
    while waiting or running:
        if waiting and len(running) < room:
            i = next(iter(waiting))
            call, file = waiting.pop(i), _tempfile.TemporaryFile()
            if pid := _os.fork():
                running[pid] = i, file
                continue
            try:
                file.write(_json.dumps(call()).encode())
                file.flush()
            finally:  # whoever asks for this one by itself hears why
                _os._exit(0)
        i, file = running.pop(_os.wait()[0])
        file.seek(0)
        made[i] = _json.loads(file.read() or "null")
    return [made[i] for i in range(len(calls))]


class _Known(BaseException):
    pass


def _shared(source, target, options):
    from triton._C.libtriton import llvm

    def stop(module, *rest):
        raise _Known(module.get_int_attr("ttg.shared"))

    llvm.to_module = stop  # the child ends after this
    try:
        triton.compile(source, target=target, options=options)
    except _Known as known:
        return known.args[0]


def _trace(source, target, options):
    # what MLIR dumps before each pass, on stderr, by stage, and the module that each stage ended with
    from triton._C.libtriton import llvm

    dumps, ends, backend = {}, {}, type(triton.compiler.make_backend(target))
    add_stages, to_module = backend.add_stages, llvm.to_module

    def watched(stage, run):
        def stage_and_dump(module, metadata):
            with _tempfile.TemporaryFile() as said:
                kept = _os.dup(2)
                _os.dup2(said.fileno(), 2)
                try:
                    made = run(module, metadata)
                finally:
                    _os.dup2(kept, 2)
                    _os.close(kept)
                said.seek(0)
                dumps[stage] = said.read().decode()
            ends.setdefault(stage, str(made))
            return made

        return stage_and_dump

    def add_watched(self, stages, *rest):
        add_stages(self, stages, *rest)
        for stage in set(stages) & {"ttir", "ttgir", "llir"}:
            stages[stage] = watched(stage, stages[stage])

    def translated(module, *rest):  # the last that MLIR has of it
        ends["llir"] = str(module)
        return to_module(module, *rest)

    _os.environ["MLIR_ENABLE_DUMP"] = "1"  # the child ends after this
    backend.add_stages, llvm.to_module = add_watched, translated
    triton.compile(source, target=target, options=options)
    return {"dumps": {stage: dumps[stage] for stage in ends}, "ends": ends}
"""


_LAYOUTS = """

import triton.experimental.gluon.language as _gluon

globals().update({n: getattr(_gluon, n) for n in dir(_gluon) if n.endswith("Layout")})
"""
"""For constants of Gluon kernels."""


def _resources(log: str, stages: dict) -> dict[str, int]:
    if stages["amdgcn"]:
        found = (
            re.search(r"\.vgpr_count:\s*(\d+)", stages["amdgcn"]),
            re.search(r"\.private_segment_fixed_size:\s*(\d+)", stages["amdgcn"]),
        )
    else:
        entry = log[log.index("Compiling entry function") :]
        found = re.search(r"Used (\d+) registers", entry), re.search(r"(\d+) bytes spill stores", entry)
    return {"registers": int(found[0][1]), "spills": int(found[1][1])}


def _reason(done: child.Result, name: str, arch: str) -> str:
    if done.error:
        kind, _, said = done.error.partition(": ")
        return said if kind == "TypeError" else f"{name} did not compile for {arch}. {done.error}"
    return f"{name} did not compile for {arch}: {done.why()}. {done.stderr[-2000:]}"


def type_of(example) -> str | dict:
    """An example of an argument, as Triton's compiler spells its type. Raises TypeError.

    Of a tuple {"of": the name of its class, where it is a named one, "parts": the types of its parts}.
    """
    if isinstance(example, tuple):
        return {"of": type(example).__name__ * hasattr(example, "_fields"), "parts": [type_of(x) for x in example]}
    if hasattr(example, "block_shape"):  # a tensor descriptor; Gluon's says how its tiles lie in shared memory
        layout = f",{example.layout!r}" if hasattr(example, "layout") else ""
        shape = ",".join(map(str, example.block_shape))
        return f"tensordesc<{type_of(example.base)[1:]}[{shape}]{layout}>"
    if hasattr(example, "data_ptr"):
        return "*" + _TYPES[str(example.dtype).removeprefix("torch.")]
    if isinstance(example, bool):
        return "i1"
    if isinstance(example, int):
        return ("i32" if -(2**31) <= example < 2**31 else "i64") + (":16" if example % 16 == 0 else "")
    if isinstance(example, float):
        return "fp32"
    raise TypeError(f"a kernel takes no {type(example).__name__}; write its type, such as '*fp32' or 'i32'")


def _name(kernel) -> str:
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return kernel.__name__


def _fresh(fn):
    """A caller of `fn` that torch.compile has not seen: it caches, and learns which sizes change, by code object."""

    def reveal(*args):
        return fn(*args)

    code: CodeType = reveal.__code__.replace(co_name=f"reveal_{next(_calls)}")
    return FunctionType(code, reveal.__globals__, None, None, reveal.__closure__)
