"""Generated code, to read: what Triton's compiler makes of a kernel, what torch.compile makes of a function.

Nothing here needs a GPU. A Triton kernel is compiled in a child process, since a process that interprets Triton
cannot compile it; registers and spills are what ptxas said, SASS is read by the nvdisasm in triton's wheel.
"""

import itertools
import logging
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FunctionType

from . import child, cuda, machine, show, source

_compiled: dict[tuple, "Compiled"] = {}
_calls = itertools.count()
_IR_LOCATION = re.compile(r'^#loc.*\n|\s*\bloc\((?:"[^"]*"(?:\([^()]*\))?|#\w+|unknown)\)', re.MULTILINE)
_MLIR_OP = re.compile(r'^\s*(?:%[\w:#]+(?:, %[\w:#]+)*\s*=\s*)?"?([a-z]\w*)\.[a-z]', re.MULTILINE)
_SASS_OP = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_PTX_OP = re.compile(
    r"^\s*(?:\$\w+:\s*)?(?:\{\s*)?(?:@!?%?\w+\s+)?([a-z][\w.:]*)(?=[\s;]).*;\s*(?://.*)?$", re.MULTILINE
)
_TYPES = {
    "bool": "i1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip


class CompileFailed(RuntimeError):
    """The compiler refused; the message is its own, with the kernel's line where it gave one."""


@dataclass(frozen=True)
class Compiled:
    """A Triton kernel at each stage of its compilation for `arch`, as text, and what the code holds of an SM.

    `registers` are per thread; `spills` are bytes a thread stores to local memory because registers ran out;
    `shared_bytes` are per program. For AMD `amdgcn` stands in place of `ptx` and `sass`, registers are VGPRs.
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
        return {s: Counter(_MLIR_OP.findall(getattr(self, s))) for s in ("ttir", "ttgir")}


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
) -> Compiled:
    """Compile a Triton kernel for `arch` ("sm_90", "gfx942"; by default this machine's) and return every stage.

    `kernel`: the kernel, or its name in this notebook. `signature`: each argument's type, "*fp32", "i32", or an
    example of it, a tensor or number. As at a launch, pointers are taken to be aligned to 16 bytes; an integer that
    is a multiple of 16, which lets loads be vectorised, is written "i32:16". `constexprs`: name -> value.
    `line_info` leaves in the PTX the `.loc` notes that say which source line an instruction came from.
    Raises `CompileFailed`, TypeError for arguments that do not fit the kernel, `source.Missing`.
    """
    arch = arch or machine.here().arch
    name = kernel if isinstance(kernel, str) else _name(kernel)
    text = source.live(kernel) if isinstance(kernel, str) else source.of(kernel)
    types = {n: t if isinstance(t, str) else type_of(t) for n, t in signature.items()}
    constants = {n: repr(v) for n, v in (constexprs or {}).items()}
    return compiled(text, name, types, constants, arch, num_warps, num_stages, line_info)


def compiled(
    text: str,
    name: str,
    types: dict[str, str | dict],
    constants: dict[str, str],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 3,
    line_info: bool = False,
) -> Compiled:
    """`triton` for the kernel `name` of a module text; `constants` are expressions. Raises as `triton` does."""
    spelled = ", ".join(f"{n!r}: {v}" for n, v in constants.items())
    call = f"_compile({name}, {types!r}, {{{spelled}}}, {arch!r}, {num_warps}, {num_stages}, {line_info})"
    if (text, call) not in _compiled:
        with show.working("compiling the kernel"):
            done = child.run(text + _COMPILE, call, interpreted=False, seconds=300)
        if not done.ok:
            raise (TypeError if done.error.startswith("TypeError: ") else CompileFailed)(_reason(done, name, arch))
        value = done.value
        for stage in ("ttir", "ttgir"):
            value[stage] = _IR_LOCATION.sub("", value[stage])
        _compiled[text, call] = Compiled(
            name,
            arch,
            cubin=bytes.fromhex(value.pop("binary")),
            **(value | _resources(value.pop("log"), value)),
        )
    return _compiled[text, call]


def inductor(fn, *args, run=True) -> Generated:
    """Compile `fn` with torch.compile, call it with `args`, and return the code: Triton on a GPU, C++ on a CPU.

    With `run=False` it ends once the first graph's code is written: no kernel is compiled from it, tuned or launched.

    Compiled functions of this process are left as they are. The code goes through Inductor's cache on disk: a
    `torch.compile(fn)` called with like arguments finds it there, here and in a child process, and so does this.
    """
    import torch
    from torch._inductor.graph import GraphLowering

    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    codes = []

    def save(code):
        codes.append(code)
        if not run:
            raise _Written

    plain_save = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(save)
    # code that nobody compiles: no need to try which vector instructions g++ can make, nor to look it up on disk
    quick = {} if run else {"cpp.vec_isa_ok": True, "fx_graph_cache": False}
    try:
        with show.working("torch.compile"), torch._inductor.config.patch(quick):
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


def _without_harness(code: str) -> str:
    """Inductor's text without its end, which would time it with random inputs; what they were stays as comments."""
    runs, *harness = re.split(r"\n\n+def (?:get_args|benchmark_compiled_module)\(", code)
    inputs = re.findall(r"^ +(\w+ = rand_strided\(.*\))$", "\n".join(harness), re.MULTILINE)
    return "\n".join([runs, "", *(f"# {line}" for line in inputs), ""])


def instructions(code: str) -> Counter:
    """How often each instruction, modifiers included ("LDG.E.128", "ld.global.v4.b32"), stands in SASS or PTX text."""
    sass = _SASS_OP.findall(code)
    return Counter(sass or [op for op in _PTX_OP.findall(code) if not op.startswith(".")])


# ------------------------------------------------------------------------------------------------------------

_COMPILE = """

import contextlib as _contextlib
import io as _io

import triton
import triton.language


def _compile(kernel, types, constexprs, arch, num_warps, num_stages, line_info):
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
    source = triton.compiler.ASTSource(kernel, signature, constexprs, attributes)
    log = _io.StringIO()
    with _contextlib.redirect_stdout(log):
        made = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    stages = {s: made.asm.get(s, "") for s in ("ttir", "ttgir", "llir", "ptx", "amdgcn")}
    binary = made.asm["cubin" if "cubin" in made.asm else "hsaco"].hex()
    return stages | {"binary": binary, "shared_bytes": made.metadata.shared, "log": log.getvalue()}
"""


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
