"""What a function launches, line by line, and the bytes that each launch must at least read and write.

`eager(fn, *args)` watches PyTorch's dispatcher while `fn` runs; `compiled(code)` reads the wrapper that Inductor
generated, `xla(text)` XLA's optimised HLO, `relax(script)` TVM's graph. All count an argument once a launch, at its
whole size: the least that the launch can move through memory, whatever its loops do. So they can be compared with one
another, and with what the hardware counted. (Of what is sliced HLO says how much is read, and that is counted.)
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Launch:
    """One launch. kind: "eager", "Triton", "C++", "library" (cuBLAS and its like), "ATen" (an operator of PyTorch's, or
    of its library of custom ones), "own" (a Triton kernel of the reader's), "XLA" or "TVM" (what these two generate).

    reads, writes: bytes, None where the code does not tell (an ATen call, a shape with a symbol in it).
    operators: the operators of the reader's program that it carries out. copies: it computes nothing, it only moves
    what is there. sources, targets: names of what it reads and writes, where it was read from generated code.
    """

    kind: str
    name: str
    operators: tuple[str, ...]
    reads: int | None
    writes: int | None
    copies: bool = False
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def row(self) -> dict:
        """For `show.table`."""

        def mb(n):
            return "" if n is None else n / 1e6

        return {
            "kind": self.kind,
            "launch": self.name,
            "MB read": mb(self.reads),
            "MB written": mb(self.writes),
        }


def total(launches: list[Launch]) -> int:
    """Bytes read and written by all launches. Errors: ValueError where one of them does not tell."""
    if silent := [launch.name for launch in launches if launch.reads is None or launch.writes is None]:
        raise ValueError(f"the generated code does not tell the bytes of {', '.join(silent)}")
    return sum(launch.reads + launch.writes for launch in launches)


def round_trips(launches: list[Launch]) -> dict[str, tuple[str, str]]:
    """What one launch leaves in memory for a later one: the buffer's name, and who writes and who first reads it."""
    written, trips = {}, {}
    for launch in launches:
        for name in launch.sources:
            if name in written:
                trips.setdefault(name, (written[name], launch.name))
        written |= dict.fromkeys(launch.targets, launch.name)
    return trips


def eager(fn: Callable, *args) -> list[Launch]:
    """The operators that `fn(*args)` sends to the device one after another, without those that only make a view.

    One launch an operator: a few take more kernels than one. Tensors on device "meta" do: shapes without memory.
    """
    with torch.no_grad(), Watch() as watch:
        fn(*args)
    return watch.launches


class Mode(TorchDispatchMode):
    """A dispatch mode that can be entered without torch's compiler: torch would import it, which takes seconds, only to
    keep it from compiling the mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Watch(Mode):
    """While it is entered, `launches` grows by what is sent to the device."""

    def __init__(self):
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values()
        written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        memory = {t.untyped_storage()._cdata for t in read}
        mutates = operator._schema.is_mutable
        # an output in its input's memory, of an operator that changes nothing, is a view: nothing is launched
        if written and (mutates or not all(t.untyped_storage()._cdata in memory for t in written)):
            name = operator.overloadpacket.__name__
            counted = [sum(t.numel() * t.element_size() for t in tensors) for tensors in (read, written)]
            self.launches.append(Launch("eager", name, (name,), *counted, copies=name in _COPIES))
        return out


def tidy(code: str) -> str:
    """Inductor's code without imports, launch metadata and graph dumps: what is worth reading and recording.

    `compiled` reads it as it reads the whole.
    """
    return "\n".join(line for line in code.splitlines() if not _NOISE.match(line))


def kernels(code: str) -> str:
    """The kernels alone: the Triton functions, or the C++ ones."""
    code = tidy(code)
    found = re.findall(r"(@triton\.jit.*?|extern \"C\".*?)\s*'''", code, re.S)
    return "\n\n".join(re.sub(r"\n\s*\n", "\n", text) for text in found)


def wrapper(code: str) -> str:
    """The Python that allocates and launches, one `call` a graph, without its checks and deletions."""
    bodies = re.findall(r"^ *(def call\(.*?)(?=^\S|\Z)", code, re.S | re.M)
    dull = re.compile(r"(del |assert_|args\.clear|raw_stream|with torch.cuda|torch.cuda.set_device|$)")
    lines = [[line for line in map(str.strip, body.splitlines()) if not dull.match(line)] for body in bodies]
    return "\n\n".join("\n    ".join(body) for body in lines)


_COPIES = {"clone", "copy", "copy_", "cat", "stack", "flip", "roll", "constant_pad_nd", "index_select"}
"""Operators that only move data."""
_NOISE = re.compile(
    r"\s*(#   |# Graph fragment|# kernel path|triton_meta=|inductor_meta=|filename=|min_elem_per_thread=)"
    r"|(import|from) |(aten|inductor_ops|_quantized|assert_\w+|empty_strided_\w+|reinterpret_tensor|"
    r"alloc_from_pool|async_compile) = |del async_compile|triton_helpers\.set_driver|\s*inductor_cpu_"
    r"|\s*std::atomic<int> inductor_cpu"
)
_SIZED = re.compile(
    r"(\w+) = (?:rand|empty)_strided\w*\(\((.*?)\), \(.*?\),(?: device='[^']*',)? (?:dtype=)?torch\.(\w+)\)"
)
_SAME = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*;\s*del ")
_OPERATORS = re.compile(r"# .*Original ATen: \[(.*)\]")
_LAUNCH = re.compile(
    r"(?:(\w+) = )?((triton|cpp)_\w+|\w+(?=\.run\()|extern_kernels\.\w+|torch\.ops\.[\w.]+)(?:\.run)?\((.*)\)$"
)
_KERNEL = re.compile(r"def (triton_\w+)\((.*?)\):|(cpp_\w+) = async_compile\.cpp\w*\(.*?void\s+kernel\((.*?)\)", re.S)


_ROLES = re.compile(r"\b(?:(in_out|in|out)_ptr\d+|arg_[A-Z])\b")
"""Pointers among a kernel's arguments; `arg_A` is what a template calls an operand of its product."""
_BODY = re.compile(r"(?:def (triton_\w+)\(|(cpp_\w+) = async_compile\.cpp)(.*?)\n *'''", re.S)
_VALUE = re.compile(r"^\s*(?:auto )?tmp\d+ = (.*)", re.MULTILINE)
_MOVED = re.compile(r"tl\.load\(.*\)|.*loadu\(.*\);|(?:static_cast<\w+>\()?in_ptr\d+\[.*\]\)?;|tmp\d+(?:\.to\(.*\))?;?")
"""A value that is only fetched, or handed on."""


def compiled(code: str) -> list[Launch]:
    """The launches in `code`, the Python that Inductor generated (one or several graphs), in order.

    A C++ kernel may hold several loops, one after another: only the Triton count is a count of passes over memory.
    Errors: ValueError where the text holds no wrapper of Inductor's.
    """
    graphs = [part for part in re.split(r"(?=# AOT ID)", code) if "def call(" in part]
    if not graphs:
        raise ValueError("no wrapper of Inductor's here: it would hold `def call(`")
    return [launch for graph in graphs for launch in _graph(graph)]


def _graph(code: str) -> list[Launch]:
    roles = {
        triton or cpp: [role or "in" for role in re.findall(_ROLES, signature or arguments)]
        for triton, signature, cpp, arguments in _KERNEL.findall(code)
    }
    sizes = {name: _bytes(shape, dtype) for name, shape, dtype in _SIZED.findall(code)}
    moving = {
        triton or cpp
        for triton, cpp, text in _BODY.findall(code)
        if all(_MOVED.fullmatch(value) for value in _VALUE.findall(text))
    }
    before = {new: old for new, old in _SAME.findall(code)}  # what lies in a buffer until its memory is used again
    launches, operators = [], ()
    body = code[code.index("def call(") :].split("def benchmark_compiled_module")[0]
    for line in map(str.strip, body.splitlines()):
        if found := _OPERATORS.match(line):
            operators = tuple(dict.fromkeys(re.sub(r"\b(aten|prims)\.", "", found[1]).split(", ")))
        if found := _SAME.match(line):
            sizes.setdefault(found[1], sizes.get(found[2]))
        if not (found := _LAUNCH.match(line)):
            continue
        _, name, generated, arguments = found.groups()
        if generated:
            # the pointers come first in a call, then the sizes
            pairs = list(zip(roles[name], _tensors(arguments), strict=False))
            sources = tuple(before.get(n, n) if role == "in_out" else n for role, n in pairs if role != "out")
            targets = tuple(n for role, n in pairs if role != "in")
            reads = [sizes.get(n) for role, n in pairs if role != "out"]
            kind = {"triton": "Triton", "cpp": "C++"}[generated]
            counted = _sum(reads), _sum(map(sizes.get, targets))
            launches.append(Launch(kind, name, operators, *counted, name in moving, sources, targets))
        elif name.startswith("extern_kernels."):
            taken, _, target = arguments.partition("out=")
            sources, target = tuple(_tensors(taken)), target.split(",")[0]
            counted = _sum(map(sizes.get, sources)), sizes.get(target)
            launches.append(Launch("library", name, operators, *counted, False, sources, (target,)))
        elif not name.startswith("torch.ops."):  # a Triton kernel of the reader's
            launches.append(Launch("own", name, operators, None, None))
        else:
            launches.append(Launch("ATen", name.removeprefix("torch.ops."), operators, None, None))
        operators = ()
    return launches


_HLO_PART = re.compile(r"^(ENTRY )?%?([\w.-]+)(?: \([^\n]*)? \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_HLO_LINE = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, (.*))?$")
_HLO_TYPE = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128)\[([\d,]*)\]")
_HLO_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "call"}
_HLO_PARTS = {"slice", "dynamic-slice", "gather"}
_HLO_QUIET = _HLO_FREE | {"broadcast", "convert", "reshape", "iota"}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation in HLO.

    arrays: (dtype, sides) of what it makes, several where it makes a tuple. operands: the names of what it takes; of a
    parameter inside a fusion the one operand of the fusion that it stands for. target: of a call, whose code that is.
    inside: the lines of the computation that a fusion carries out. rest: what else the line says.
    """

    name: str
    op: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    target: str = ""
    inside: tuple["Instruction", ...] = ()
    rest: str = ""

    def sizes(self) -> list[int]:
        """The bytes of each of `arrays`; a library's workspace, which its call makes last, has none."""
        bits = [8 if kind == "pred" else int(re.search(r"\d+", kind)[0]) for kind, _ in self.arrays]
        sizes = [math.prod(sides) * n // 8 for n, (_, sides) in zip(bits, self.arrays, strict=True)]
        is_workspace = self.op == "custom-call" and len(sizes) > 1 and self.arrays[-1][0] == "s8"
        return [*sizes[:-1], 0] if is_workspace else sizes


def hlo(text: str) -> list[Instruction]:
    """The instructions of the ENTRY computation of an HLO module, in order.

    Those of a computation that is called, a group of launches that become one CUDA graph, stand before its call.
    Errors: ValueError where there is no ENTRY.
    """
    parts = {name: (bool(entry), body) for entry, name, body in _HLO_PART.findall(text)}
    entry = next((body for is_entry, body in parts.values() if is_entry), None)
    if entry is None:
        raise ValueError("no HLO module here: it would hold an ENTRY computation")
    return _instructions(entry, {name: body for name, (_, body) in parts.items()})


def _instructions(body: str, parts: dict[str, str], given: tuple[str, ...] = ()) -> list[Instruction]:
    """The lines of one computation; given: the operands that its parameters stand for."""
    found = []
    for line in filter(None, map(_HLO_LINE.match, body.splitlines())):
        _, name, kind, op, arguments, rest = line.groups(default="")
        arrays = tuple((k, tuple(int(s) for s in sides.split(",") if s)) for k, sides in _HLO_TYPE.findall(kind))
        operands = tuple(re.findall(r"%?([A-Za-z_][\w.-]*)", re.sub(r"\S+\[[\d,]*\]\S* ", "", arguments)))
        if op == "parameter" and given:
            operands = (given[int(arguments)],)
        if op == "call":
            found += _instructions(parts[re.search(r"to_apply=%?([\w.-]+)", rest)[1]], parts)
        target, calls = (re.search(p, rest) for p in (r'custom_call_target="([^"]+)"', r"\bcalls=%?([\w.-]+)"))
        inside = tuple(_instructions(parts.get(calls[1], ""), parts, operands)) if calls else ()
        found.append(Instruction(name, op, arrays, operands, target[1] if target else "", inside, rest))
    return found


def xla(text: str) -> list[Launch]:
    """The launches in an optimised HLO module, in order; of a fusion with the operations inside it."""
    return carried_out(hlo(text))


def carried_out(instructions: Iterable[Instruction]) -> list[Launch]:
    """The launches among the instructions of an ENTRY computation.

    A library call is named by its target and, where it has one, its epilogue. Its workspace is not counted. Of an
    operand that a launch only slices or gathers from, no more is read than that takes.
    """
    sizes, launches = {}, []
    for one in instructions:
        sizes[one.name] = sum(one.sizes())
        if one.op in _HLO_FREE:
            continue
        operators = (
            tuple(dict.fromkeys(i.op for i in one.inside if i.op not in _HLO_QUIET)) if one.inside else (one.op,)
        )
        made_by, shown = "XLA", one.name
        if one.target:
            epilogue = re.search(r'"epilogue":"(\w+)"', one.rest)
            made_by = "library"
            shown = one.target.strip("_").replace("$", " ") + (f", epilogue {epilogue[1]}" if epilogue else "")
        elif "__triton" in one.rest:
            made_by = "Triton"
        moved = not set(operators) - {"copy", "transpose", "slice", "concatenate", "pad", "gather"}
        sources = tuple(dict.fromkeys(one.operands))
        reads = sum(_read(one, source, sizes.get(source, 0)) for source in sources)
        launches.append(Launch(made_by, shown, operators, reads, sizes[one.name], moved, one.operands, (one.name,)))
    return launches


def _read(launch: Instruction, operand: str, whole: int) -> int:
    """The bytes that a launch reads of an operand of `whole` bytes."""
    names = {i.name for i in launch.inside if i.op == "parameter" and i.operands == (operand,)} or {operand}
    users = [i for i in launch.inside or (launch,) if names & set(i.operands) and i.op != "parameter"]
    parts = [i for i in users if i.op in _HLO_PARTS and i.operands[0] in names]
    return whole if len(parts) < len(users) else min(whole, sum(sum(i.sizes()) for i in parts))


_RELAX_TENSOR = re.compile(r"(\w+): R\.Tensor\(\(([^)]*)\), dtype=\"(\w+)\"\)")
_RELAX_CALL = re.compile(
    r"^ *(\w+)(?:: R\.Tensor\(\(([^)]*)\), dtype=\"(\w+)\"\))? = "
    r"(?:R\.call_tir\((?:\w+\.)?(\w+), \((.*?)\), out_\w+=R\.Tensor\(\(([^)]*)\), dtype=\"(\w+)\"\)"
    r"|cls\.(\w+)\((.*?)\)$)",
    re.MULTILINE,
)


def relax(script: str) -> list[Launch]:
    """The launches in the function `main` of a Relax module that was lowered: each calls a TensorIR function, or a
    group of them that FuseOps has made. Errors: ValueError where there is no `main`."""
    found = re.search(r"^ *def main\(.*?(?=^\S|\Z|^ *def )", script, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError("no Relax module here: it would hold `def main(`")
    sizes = {name: _bytes(shape, dtype) for name, shape, dtype in _RELAX_TENSOR.findall(found[0])}
    launches = []
    for name, shape, dtype, function, arguments, out_shape, out_dtype, group, given in _RELAX_CALL.findall(found[0]):
        sources = tuple(re.findall(r"[A-Za-z_]\w*", arguments or given))
        sizes[name] = _bytes(out_shape or shape, out_dtype or dtype)
        function = function or group
        moved = re.fullmatch(r"(transpose|concatenate|take|strided_slice)\d*", function) is not None
        reads = _sum(sizes.get(source) for source in dict.fromkeys(sources))
        launches.append(Launch("TVM", function, (function,), reads, sizes[name], moved, sources, (name,)))
    return launches


def _tensors(arguments: str) -> list[str]:
    """The names passed in a call: positional ones, a reinterpreted tensor under its own name."""
    flat = re.sub(r"reinterpret_tensor\((\w+),.*?\), \d+\)", r"\1", arguments)
    return [name for part in flat.split(",") if re.fullmatch(r"[A-Za-z_]\w*", name := part.strip())]


def _bytes(shape: str, dtype: str) -> int | None:
    sides = [side.strip() for side in shape.split(",") if side.strip()]
    if not all(side.isdigit() for side in sides):
        return None  # a symbol: the size is known only when it runs
    return math.prod(map(int, sides)) * getattr(torch, dtype).itemsize


def _sum(parts) -> int | None:
    parts = list(parts)
    return None if None in parts else sum(parts)
