"""PTX that another compiler wrote (Mojo's, say): assembled for a GPU, or run on the CPU for its values.

    kernel = cuda.PtxModule(ptx).get_function(name)     # then as any kernel of the course
    kernel(grid, block, (x, y, n))

For the CPU each line of PTX becomes one line of C++, so that a fault names the line of PTX. Copies by `cp.async` are
done at once there: a missing wait stays unseen.
"""

import re
import subprocess
import tempfile
from functools import cached_property, lru_cache
from pathlib import Path

from . import cpu, nvrtc
from .module import RawModule
from .nvrtc import CompileError

TRITONS_PTX = 8.7
"""The newest version of PTX that the older of the two ptxas in triton's wheel takes, for cards before Blackwell."""
NOT_HERE = "This PTX assembles for a GPU, but the CPU runner cannot run it."


class PtxModule(RawModule):
    """A text of PTX as a `RawModule`: the same launch, traces and checks. Kernels have the names of its entries.

    source: (the name of a file, its text) that the PTX's `.loc` lines refer to; faults then name lines of it.
    Raises `CompileError` where ptxas refuses the text, and in CPU mode where the runner lacks an instruction.
    """

    def __init__(self, ptx: str, source: tuple[str, str] = ("", "")):
        super().__init__(source[1] or ptx)
        self.ptx, self.file = ptx, source[0]

    @cached_property
    def binary(self) -> nvrtc.Binary:
        """What ptxas makes of it, for the architecture that the text names."""
        return assemble(self.ptx)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.binary.lowered)

    @cached_property
    def _on_cpu(self) -> cpu.Library:
        return cpu.build(*self._for_cpu)

    @property
    def _for_cpu(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        # another compiler has optimised it: -O2 takes twice as long again over a thousand lines, and runs no faster
        return to_cuda(self.ptx, self.file), self._names, ("-O1",)

    def compile_for_cpu(self) -> None:
        """Have g++ compile it for a process that will run it on the CPU. Raises as that would."""
        cpu.compiled(*self._for_cpu)


@lru_cache(maxsize=64)
def assemble(ptx: str) -> nvrtc.Binary:
    """PTX to machine code with ptxas, for the `.target` in the text. Raises `CompileError`, `machine.NotReady`."""
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.M)[1]
    newer = float(re.search(r"^\.version\s+(\S+)", ptx, re.M)[1]) > TRITONS_PTX
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx)
        run = subprocess.run(
            [nvrtc.tool("ptxas-blackwell" if newer else "ptxas"), f"-arch={arch}", "-v", text, "-o", cubin],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            said = re.findall(r"line (\d+); error\s*: (.+)", run.stderr) or [(0, run.stderr.strip())]
            raise CompileError(ptx, [(int(n), m) for n, m in said[:4]], run.stderr, "ptxas refuses this PTX.")
        binary = cubin.read_bytes()
    entries = nvrtc._entries(ptx)
    used = nvrtc._resources(run.stderr.replace("ptxas-blackwell", "ptxas"))
    return nvrtc.Binary(
        ptx,
        arch,
        ptx,
        binary,
        {name: nvrtc.Resources(*used[name], *entries[name][1:]) for name in entries},
        {name: entries[name][0] for name in entries},
        {name: name for name in entries},
        run.stderr,
    )


def to_cuda(ptx: str, file: str = "") -> str:
    """CUDA C for the CPU runner that computes what the PTX does, line for line. Raises `CompileError`.

    file: one that the PTX's `.loc` lines name; the CUDA C then has the numbers of its lines.
    """
    return _Translation(ptx, file).text


_C = {"pred": "bool"} | {
    f"{kind}{size}": {"b": "u", "u": "u", "s": ""}[kind] + f"int{size}_t" for kind in "bus" for size in (8, 16, 32, 64)
}
_C |= {"f16": "ptx::f16", "f32": "float", "f64": "double"}
_SPECIAL = {
    **{f"%tid.{a}": f"threadIdx.{a}" for a in "xyz"},
    **{f"%ctaid.{a}": f"blockIdx.{a}" for a in "xyz"},
    **{f"%ntid.{a}": f"blockDim.{a}" for a in "xyz"},
    **{f"%nctaid.{a}": f"gridDim.{a}" for a in "xyz"},
    "%laneid": "cc_lane()",
}
_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "div": "/", "rem": "%"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARED |= {name + "u": sign for name, sign in _COMPARED.items()}
_FUNCTIONS = {
    "ex2": "__builtin_exp2f(A)",
    "lg2": "__builtin_log2f(A)",
    "tanh": "__builtin_tanhf(A)",
    "rcp": "1 / A",
    "sqrt": "__builtin_sqrtf(A)",
    "rsqrt": "1 / __builtin_sqrtf(A)",
    "sin": "__builtin_sinf(A)",
    "cos": "__builtin_cosf(A)",
    "abs": "(A < 0 ? -A : A)",
    "neg": "-A",
    "not": "~A",
    "min": "ptx::least(A, B)",
    "max": "ptx::largest(A, B)",
    "shl": "ptx::left(A, B)",
    "shr": "ptx::right(A, B)",
}
_NOTHING = ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "membar", "fence", "griddepcontrol")


class _Translation:
    def __init__(self, ptx: str, file: str = ""):
        self.ptx, self.shared, self.used, self.line = ptx, {}, 0, 0
        self.file = next((n for n, f in re.findall(r'\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"', ptx) if f == file), "")
        self.sizes: dict[str, str] = {}
        bare = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), ptx, flags=re.S)
        for name, count in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]", bare):
            self.used = -(-self.used // 128) * 128
            self.shared[name], self.used = self.used, self.used + int(count)
        debug = r"(?ms)\.section\s+\.debug_\w+\s*\{.*?\}"
        bare = re.sub(debug, lambda m: "\n" * m[0].count("\n"), bare)
        bare = re.sub(r"\.visible\s+\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", self._head, bare)
        bare = re.sub(r"(?m)^[ \t]+[a-z@][^;\n]*\n[^;]*;", _on_one_line, bare)
        lines = [self._line(number, line) for number, line in enumerate(bare.split("\n"), 1)]
        # the runner's own names on the first line, which holds no instruction
        self.text = f'#include <cuda_fp16.h>\n#include "runner_ptx.h"\n#line 1 "{nvrtc.FILE}"\n' + "\n".join(lines)

    def _head(self, found: re.Match) -> str:
        parameters = [p.strip() for p in found[2].split(",") if p.strip()]
        spelled, self.parameters = [], {}
        for text in parameters:
            kind, name = re.search(r"\.param\s.*?\.([usbf]\d+)\b", text)[1], text.split()[-1]
            if "[" in name:
                raise CompileError(self.ptx, [(0, f"{name} is passed by value as bytes")], "", NOT_HERE)
            self.parameters[name] = f"parameter_{len(spelled)}"
            pointer = ".ptr" in text or self._points(name)
            spelled.append(f"{'unsigned char*' if pointer else _C[kind]} {self.parameters[name]}")
        shared = f"__shared__ __align__(128) char shared[{max(self.used, 1)}];"
        lines = "\n" * found[0].count("\n")
        return f'extern "C" __global__ void {found[1]}({", ".join(spelled)}) {{ {shared}{lines}@@'

    def _points(self, parameter: str) -> bool:
        """Whether a parameter is used as an address of global memory."""
        held = re.search(rf"ld\.param\.u64\s+(%rd\d+), \[{re.escape(parameter)}\]", self.ptx)
        return bool(held and re.search(rf"cvta\.to\.global\.u64\s+%rd\d+, {held[1]};", self.ptx))

    def _line(self, number: int, line: str) -> str:
        text = line.strip()
        if self.file and (found := re.match(rf".*?(?:\.loc|inlined_at)\s+{self.file} ([1-9]\d*)", text)):
            self.line = int(found[1])
        line = self._translated(number, line, text)
        return f'#line {self.line} "{nvrtc.FILE}"\n{line}' if self.line else line

    def _translated(self, number: int, line: str, text: str) -> str:
        if text.startswith("extern") or text.endswith("@@") or text in ("", "{", "}", "("):
            return line.replace("@@", "")
        text = re.sub(r"^\{\s*(?=\w)|(?<=;)\s*\}$", "", text)  # braces of inline PTX
        if found := re.fullmatch(r"([$\w]+):", text):
            return f"{found[1].replace('$', '')}:;"
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+%(\w+)<(\d+)>;", text):
            kind = _C[f"b{found[1][1:]}" if found[1] != "pred" else "pred"]
            self.sizes[found[2]] = kind
            return f"{kind} {', '.join(f'{found[2]}{i}' for i in range(int(found[3])))};"
        if text.startswith("."):
            if re.match(
                r"\.(version|target|address_size|shared|file|loc|section|maxntid|reqntid|minnctapersm|pragma)", text
            ):
                return ""
            calls = ".func" in text
            said = "a function that is not inlined; `print` brings some" if calls else "not known"
            raise CompileError(self.ptx, [(number, f"{text.split()[0]} is {said}")], "", NOT_HERE)
        found = re.fullmatch(r"(?:@(!?)%(p\d+)\s+)?([\w.:]+)\s*(.*);", text)
        if not found:
            raise CompileError(self.ptx, [(number, "this line is not understood")], "", NOT_HERE)
        done = self._instruction(found[3].replace("::entry", ""), _operands(found[4]), number)
        if done is None:
            raise CompileError(self.ptx, [(number, f"{found[3]} has no counterpart here")], "", NOT_HERE)
        return f"if ({found[1]}{found[2]}) {{ {done} }}" if found[2] else f"{{ {done} }}" if done else ""

    def _value(self, operand: str, kind: str) -> str:
        """An operand, as a value of PTX's type `kind`."""
        c = _C[kind]
        if operand in _SPECIAL:
            return f"({c}){_SPECIAL[operand]}"
        if operand in self.shared:
            return f"({c}){self.shared[operand]}"
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"ptx::bits<{c}>((uint32_t)0x{found[1]})"
        if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return f"ptx::bits<{c}>((uint64_t)0x{found[1]})"
        if found := re.fullmatch(r"0x([0-9a-fA-F]{4})", operand):
            return f"ptx::bits<{c}>((uint16_t)0x{found[1]})" if kind == "f16" else f"({c}){operand}"
        if not operand.startswith("%"):
            return f"({c}){operand}{'' if kind == 'pred' else 'll'}"
        name = operand[1:]
        own = self.sizes[re.sub(r"\d+$", "", name)]
        if own == "bool" or own == c:
            return name
        if kind[0] == "f":
            return f"ptx::bits<{c}>({name})"
        return f"({c}){name}"

    def _set(self, operand: str, value: str, kind: str) -> str:
        """Write `value`, of PTX's type `kind`, to a register: a narrower one is widened as its sign asks."""
        own = self.sizes[re.sub(r"\d+$", "", operand[1:])]
        return f"{operand[1:]} = {f'ptx::bits<{own}>({value})' if kind[0] == 'f' else f'({own})({value})'};"

    def _address(self, operand: str, space: str) -> str:
        inside = operand.strip("[] ")
        base, offset = re.fullmatch(r"([%\w$.]+?)(?:\s*\+\s*(-?\w+))?", inside).groups()
        if base in getattr(self, "parameters", {}):
            return f"((char*)&{self.parameters[base]} + {offset or 0})"
        if space == "shared":
            return f"(shared + {self._value(base, 'u32')} + {offset or 0})"
        return f"((char*){self._value(base, 'u64')} + {offset or 0})"

    def _instruction(self, op: str, given: list[str], number: int) -> str | None:
        """One instruction as C++; "" for what does nothing here, None for what is not known."""
        name, *rest = op.split(".")
        kind = next((part for part in reversed(rest) if part in _C), "")
        if op.startswith(_NOTHING):
            return ""
        if op in ("ret", "exit"):
            return "return;"
        if name == "bra":
            return f"goto {given[0].replace('$', '')};"
        if name in ("bar", "barrier") and "sync" in rest:
            return f"__syncwarp({self._value(given[0], 'u32')});" if "warp" in rest else "__syncthreads();"
        if name == "cvta":
            if "shared" in rest:
                one = f"shared + {self._value(given[1], 'u64')}" if "to" not in rest else ""
                return self._set(given[0], f"(uint64_t)({one})" if one else f"(char*){given[1][1:]} - shared", kind)
            return self._set(given[0], self._value(given[1], kind), kind)
        if name in ("ld", "ldu", "st"):
            return self._memory(name, rest, kind, given)
        if name == "cp" and op.startswith("cp.async.c") and len(given) == 3:
            size = int(given[2])
            kind = {4: "uint32_t", 8: "uint64_t", 16: "ptx::V4<uint32_t>"}[size]
            return f"*({kind}*){self._address(given[0], 'shared')} = *({kind}*){self._address(given[1], 'global')};"
        if name == "ldmatrix" and kind == "b16" and "trans" not in rest:
            outs = _parts(given[0])
            at = f"(uint32_t)({self._address(given[1], 'shared')} - shared)"
            read = f"ptx::ldmatrix(shared, out, {at}, {number});"
            back = " ".join(self._set(r, f"out[{i}]", "b32") for i, r in enumerate(outs))
            return f"uint32_t out[{len(outs)}]; {read} {back}"
        if name == "mma" and op.endswith("m16n8k16.row.col.f32.f16.f16.f32"):
            d, a, b, c = map(_parts, given)
            lists = [
                f"{t} {n}[] = {{{', '.join(self._value(r, k) for r in regs)}}};"
                for n, t, k, regs in (
                    ("a", "uint32_t", "b32", a),
                    ("b", "uint32_t", "b32", b),
                    ("c", "float", "f32", c),
                )
            ]
            back = " ".join(self._set(r, f"d[{i}]", "f32") for i, r in enumerate(d))
            return f"float d[4]; {' '.join(lists)} ptx::mma(d, a, b, c, {number}); {back}"
        if name == "shfl" and kind == "b32":
            return self._shuffle(rest, given, number)
        if name == "mov":
            return self._move(kind, given)
        if name == "cvt":
            return self._convert(rest, given)
        if name == "setp" and rest[0] in _COMPARED and len(rest) <= 3:
            a, b = (self._value(x, kind) for x in given[1:])
            test = f"{a} {_COMPARED[rest[0]]} {b}"
            unordered = f" || {a} != {a} || {b} != {b}" if rest[0].endswith("u") and kind[0] == "f" else ""
            return f"{given[0][1:]} = {test}{unordered};"
        if name == "selp":
            a, b = (self._value(x, kind) for x in given[1:3])
            return self._set(given[0], f"{given[3][1:]} ? {a} : {b}", kind)
        return self._arithmetic(name, rest, kind, given)

    def _memory(self, name: str, rest: list[str], kind: str, given: list[str]) -> str | None:
        if not kind or kind == "pred":
            return None
        space = next((part.partition("::")[0] for part in rest if part.partition("::")[0] in _SPACES), "generic")
        place, register = (given[0], given[1]) if name == "st" else (given[1], given[0])
        vector = next((int(part[1]) for part in rest if part in ("v2", "v4")), 1)
        bits = "b" + kind[1:] if kind[0] == "f" else kind  # moved, not computed with
        c = _C[bits] if vector == 1 else f"ptx::V{vector}<{_C[bits]}>"
        registers = _parts(register) if vector > 1 else [register]
        if name == "st":
            values = ", ".join(self._value(r, bits) for r in registers)
            value = values if vector == 1 else f"{{{{{values}}}}}"
            return f"{c} value = {value}; *({c}*){self._address(place, space)} = value;"
        back = (self._set(r, "value" if vector == 1 else f"value.at[{i}]", bits) for i, r in enumerate(registers))
        return f"{c} value = *({c}*){self._address(place, space)}; {' '.join(back)}"

    def _shuffle(self, rest: list[str], given: list[str], number: int) -> str:
        out, _, inside = given[0].partition("|")
        value, mask = self._value(given[1], "b32"), self._value(given[4], "u32")
        lane, clamp = (self._value(x, "u32") for x in given[2:4])
        source = f"bool inside; int from = ptx::lane_{rest[1]}({lane}, {clamp}, inside);"
        shuffled = f"cc::value_of<uint32_t>(cc_exchange({mask}, {value}, from, cc::SHUFFLE_OP, {number}))"
        return f"{source} {self._set(out, shuffled, 'b32')}" + (f" {inside.strip()[1:]} = inside;" if inside else "")

    def _move(self, kind: str, given: list[str]) -> str:
        if given[1].startswith("{"):
            parts = _parts(given[1])
            size = int(kind[1:]) // len(parts)
            whole = " | ".join(f"({_C[kind]}){self._value(p, f'u{size}')} << {i * size}" for i, p in enumerate(parts))
            return self._set(given[0], whole, kind)
        if given[0].startswith("{"):
            parts = _parts(given[0])
            size = int(kind[1:]) // len(parts)
            value = self._value(given[1], kind)
            return f"{_C[kind]} whole = {value}; " + " ".join(
                self._set(p, f"whole >> {i * size}", f"u{size}") for i, p in enumerate(parts) if p != "_"
            )
        return self._set(given[0], self._value(given[1], kind), kind)

    def _convert(self, rest: list[str], given: list[str]) -> str | None:
        if rest[-2:] == ["f16x2", "f32"]:
            high, low = (f"(uint32_t)ptx::bits<uint16_t>(ptx::f16({self._value(x, 'f32')}))" for x in given[1:])
            return self._set(given[0], f"{high} << 16 | {low}", "b32")
        kinds = [part for part in rest if part in _C]
        if len(kinds) != 2 or len(given) != 2 or ("sat" in rest and kinds != ["f32", "f32"]):
            return None
        to, source = kinds
        value = self._value(given[1], source)
        if "sat" in rest:
            value = f"ptx::least(ptx::largest({value}, 0.f), 1.f)"
        if to == "f16":
            value = f"ptx::f16((float)({value}))"
        elif source[0] == "f" and to[0] == "f" and any(part in ("rni", "rmi", "rpi", "rzi") for part in rest):
            which = {"rni": "rint", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}
            value = f"__builtin_{next(which[p] for p in rest if p in which)}f((float){value})"
        elif source == "f16":
            value = f"({_C[to]})(float)({value})"
        else:
            value = f"({_C[to]})({value})"
        return self._set(given[0], value, to)

    def _arithmetic(self, name: str, rest: list[str], kind: str, given: list[str]) -> str | None:
        rounded = {"rm", "rp", "rz"} & {*rest}
        if not kind or (rounded and kind[0] == "f" and (name, kind, rounded) != ("fma", "f32", {"rm"})):
            return None
        values = [self._value(x, "u32" if name in ("shl", "shr") and i == 1 else kind) for i, x in enumerate(given[1:])]
        if name in ("fma", "mad") and kind[0] == "f":
            a, b, c = values
            if "rm" in rest and kind == "f32":
                return self._set(given[0], f"ptx::fused_down({a}, {b}, {c})", kind)
            fused = "__builtin_fma" + ("" if kind == "f64" else "f")
            return self._set(given[0], f"({_C[kind]}){fused}({a}, {b}, {c})", kind)
        if name in ("mul", "mad"):
            a, b, *c = values
            if "wide" in rest:
                wide = kind[0] + str(2 * int(kind[1:]))
                product = f"({_C[wide]}){a} * ({_C[wide]}){b}"
                return self._set(given[0], product + (f" + {self._value(given[3], wide)}" if c else ""), wide)
            product = f"ptx::high<{_C[kind]}>({a}, {b})" if "hi" in rest else f"({_C[kind]})({a} * {b})"
            return self._set(given[0], f"({_C[kind]})({' + '.join([product, *c])})", kind)
        if name in _BINARY:
            return self._set(given[0], f"({_C[kind]})({values[0]} {_BINARY[name]} {values[1]})", kind)
        if name in _FUNCTIONS:
            how = "!A" if (name, kind) == ("not", "pred") else _FUNCTIONS[name]
            spelled = re.sub(r"\b([AB])\b", lambda m: f"({values['AB'.index(m[1])]})", how)
            return self._set(given[0], f"({_C[kind]})({spelled})", kind)
        return None


_SPACES = ("global", "shared", "param", "local", "const")


def _on_one_line(found: re.Match) -> str:
    """An instruction that is written on several lines, on the last of them."""
    return "\n" * found[0].count("\n") + " ".join(found[0].split())


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]
