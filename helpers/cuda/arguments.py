"""What a launch's arguments become: values of exactly the sizes that the kernel's parameters have.

The sizes come from the compiled kernel (PTX), so that a Python int never reaches a `long long` as 4 bytes or a
float a `double` as 4. Types are read from the source where they can be, to name what does not fit.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..machine import Plain
from .nvrtc import Parameter
from .tma import TensorMap


@dataclass(frozen=True)
class Declared:
    """A parameter as the source spells it: its type without const and the like, and its name."""

    type: str
    name: str

    @property
    def pointer(self) -> bool:
        return self.type.endswith("*") or self.type.endswith("]")


@dataclass(frozen=True)
class Value:
    """One argument, ready to pass: its bytes, and for an array the array itself (kept alive by holding it)."""

    bytes: bytes
    array: object = None
    name: str = ""


class LaunchError(Plain, ValueError):
    """A launch that a GPU would refuse."""


class BadArgument(Plain, TypeError):
    """An argument that does not fit its parameter; the message names both."""


def declared(code: str, kernel: str, count: int) -> tuple[Declared, ...]:
    """The parameters of `kernel` as written in `code`; unnamed and untyped where the text cannot be matched."""
    name = re.escape(re.sub(r"<.*", "", kernel, flags=re.S).split("::")[-1].strip())
    text = without_comments(code)
    for m in re.finditer(rf"\b__global__\b[^;{{}}]*?\b{name}\s*\(", text):
        inside = text[m.end() : closing(text, m.end() - 1)]
        parts = [p for p in _split(inside) if p.strip()]
        if len(parts) == count:
            return tuple(_declaration(p) for p in parts)
    return tuple(Declared("", "") for _ in range(count))


def without_comments(code: str) -> str:
    """`code` with comments and the insides of literals blanked; every offset and line stays where it was."""

    def blank(m: re.Match) -> str:
        return re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0][0] + re.sub(r"[^\n]", " ", m[0][1:-1]) + m[0][-1]

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', blank, code, flags=re.S)


def closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket."""
    out, depth = [""], 0
    for c in text:
        depth += {"(": 1, "<": 1, "[": 1, "{": 1, ")": -1, ">": -1, "]": -1, "}": -1}.get(c, 0)
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


_DROPPED = re.compile(
    r"\b(?:const|volatile|__restrict__|__restrict|restrict|__grid_constant__|struct|typename|register)\b"
)


def _declaration(text: str) -> Declared:
    text = _DROPPED.sub(" ", text.split("=")[0])
    found = re.match(r"(.*?[\s*&>])\s*(\w+)\s*((?:\[[^\]]*\])*)\s*$", text.strip(), re.S)
    if not found or found[2] in _ITEMS:
        return Declared(re.sub(r"\s+", " ", text).strip().replace(" *", "*"), "")
    return Declared(re.sub(r"\s+", " ", found[1]).strip().replace(" *", "*") + ("*" if found[3] else ""), found[2])


_ITEMS = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "half": (torch.float16,),
    "__half": (torch.float16,),
    "half2": (torch.float16,),
    "__half2": (torch.float16,),
    "__nv_bfloat16": (torch.bfloat16,),
    "nv_bfloat16": (torch.bfloat16,),
    "__nv_bfloat162": (torch.bfloat16,),
    "nv_bfloat162": (torch.bfloat16,),
    "float2": (torch.float32,),
    "float4": None,  # vector types are also used to move other data 16 bytes at a time
    "int": (torch.int32, torch.uint32),
    "long long": (torch.int64, torch.uint64),
    "long long int": (torch.int64, torch.uint64),
    "int64_t": (torch.int64, torch.uint64),
}
# others fit any tensor: unsigned types, short and char often name raw bits (packed int4, bf16 payloads)


def bind(kernel: str, parameters: tuple[Parameter, ...], named: tuple[Declared, ...], args, device: str) -> list[Value]:
    """Check and convert `args` for one launch. device: "cuda" or "cpu", where arrays must be.

    Arrays are torch tensors (or cupy arrays, on a GPU): their contiguity is the caller's business. Python numbers
    become the parameter's type; numpy scalars must have it; numpy arrays of size 1 and tensor maps go by value.
    """
    args = tuple(args)
    if len(args) != len(parameters):
        want = ", ".join(f"{d.type} {d.name}".strip() or "?" for d in named)
        raise BadArgument(f"{kernel} takes {len(parameters)} arguments ({want}), but {len(args)} were given.")
    out = []
    for i, (arg, parameter, spelled) in enumerate(zip(args, parameters, named, strict=True)):
        out.append(_value(arg, parameter, spelled, _Where(kernel, i, spelled), device))
    return out


class _Where(NamedTuple):
    """Which argument: put into words only where a message needs it, since every launch checks every argument."""

    kernel: str
    position: int
    spelled: Declared

    def __format__(self, _spec: str) -> str:
        named = f" ({self.spelled.type} {self.spelled.name})" if self.spelled.name else ""
        return f"{self.kernel}: argument {self.position}{named}"


def _value(arg, parameter: Parameter, spelled: Declared, where: _Where, device: str) -> Value:
    if isinstance(arg, torch.Tensor):
        return _tensor(arg, parameter, spelled, where, device)
    if isinstance(arg, TensorMap):
        if parameter.kind != "bytes" or parameter.size != len(arg.bytes):
            raise BadArgument(f"{where} is {_words(parameter)}, but a tensor map of {len(arg.bytes)} bytes was given.")
        return Value(arg.bytes, arg, spelled.name)
    if hasattr(arg, "__cuda_array_interface__"):
        if device != "cuda":
            raise BadArgument(f"{where} is an array on a GPU, but in CPU mode kernels take CPU tensors.")
        _fits(parameter, where, "an array")
        return Value(np.uint64(arg.__cuda_array_interface__["data"][0]).tobytes(), arg, spelled.name)
    if arg is None:
        _fits(parameter, where, "None (a null pointer)")
        return Value(bytes(8), None, spelled.name)
    if isinstance(arg, np.ndarray) and arg.size != 1:
        raise BadArgument(f"{where} is a numpy array of {arg.size} elements: pass a torch tensor on {device!r}.")
    if isinstance(arg, np.ndarray | np.generic):
        return Value(_numpy(arg, parameter, where), None, spelled.name)
    if isinstance(arg, bool | int | float):
        return Value(_number(arg, parameter, spelled, where), None, spelled.name)
    raise BadArgument(
        f"{where} is a {type(arg).__name__}: pass a torch tensor, a number, a numpy scalar, "
        "or a numpy array of size 1 for a struct."
    )


def _tensor(arg: torch.Tensor, parameter: Parameter, spelled: Declared, where: _Where, device: str) -> Value:
    _fits(parameter, where, "a tensor")
    if spelled.type and not spelled.pointer and spelled.type in _ITEMS:
        raise BadArgument(f"{where} is a number, but a tensor was given.")
    if arg.device.type != device:
        mend = 'tensor.to("cuda")' if device == "cuda" else "tensor.cpu()"
        raise BadArgument(f"{where} is on {str(arg.device)!r}, but this kernel runs on {device!r}: use {mend}.")
    if arg.is_cuda and (here := torch.cuda.current_device()) != arg.get_device():
        raise BadArgument(f"{where} is on {str(arg.device)!r}, but the current GPU, which runs the kernel, is {here}.")
    allowed = _ITEMS.get(spelled.type[:-1].strip()) if spelled.type.count("*") == 1 else None
    if allowed and arg.dtype not in allowed:
        wanted = str(allowed[0]).removeprefix("torch.")
        raise BadArgument(
            f"{where} is a tensor of {str(arg.dtype).removeprefix('torch.')}, but the kernel reads it as {wanted}: "
            f"convert it with .to(torch.{wanted}), or reinterpret its bits with .view(torch.{wanted})."
        )
    return Value(arg.data_ptr().to_bytes(8, "little"), arg, spelled.name)


def _fits(parameter: Parameter, where: _Where, what: str) -> None:
    if parameter.kind not in ("u64", "b64", "s64"):
        raise BadArgument(f"{where} is {_words(parameter)}, but {what} was given.")


def _words(parameter: Parameter) -> str:
    kinds = {"f": "a float", "u": "an integer", "s": "an integer", "b": "a value"}
    if parameter.kind == "bytes":
        return f"a struct or vector of {parameter.size} bytes"
    return f"{kinds[parameter.kind[0]]} of {parameter.size} bytes"


def _numpy(arg, parameter: Parameter, where: _Where) -> bytes:
    array = np.asarray(arg)
    same_kind = parameter.kind == "bytes" or (array.dtype.kind == "f") == (parameter.kind[0] == "f")
    if array.nbytes != parameter.size or not same_kind:
        raise BadArgument(
            f"{where} is {_words(parameter)}, but a numpy {array.dtype} of {array.nbytes} bytes was given."
        )
    return array.tobytes()


def _number(arg: float, parameter: Parameter, spelled: Declared, where: _Where) -> bytes:
    if spelled.pointer and isinstance(arg, int | float):
        raise BadArgument(f"{where} is a pointer, but the number {arg!r} was given: pass the tensor itself.")
    if parameter.kind == "bytes":
        raise BadArgument(
            f"{where} is {_words(parameter)}, but the number {arg!r} was given: pass a numpy scalar or array of size 1 "
            f"with exactly that layout (for __half, numpy.float16({arg!r}))."
        )
    if parameter.kind[0] == "f":
        return np.array(arg, {4: np.float32, 8: np.float64, 2: np.float16}[parameter.size]).tobytes()
    if isinstance(arg, float):
        raise BadArgument(f"{where} is {_words(parameter)}, but the float {arg!r} was given: use int({arg!r}).")
    bits = 8 * parameter.size
    signed = not _UNSIGNED.match(spelled.type) if spelled.type else True
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1)) if spelled.type in _SIGNED else (1 << bits)
    if not low <= int(arg) < high:
        raise BadArgument(f"{where} is {_words(parameter)}, and {arg} does not fit it.")
    return (int(arg) & ((1 << bits) - 1)).to_bytes(parameter.size, "little")


_UNSIGNED = re.compile(r"^(?:unsigned|uint\d+_t|size_t|uchar|ushort|uint)\b")
_SIGNED = {
    "int",
    "long long",
    "long",
    "short",
    "signed char",
    "int32_t",
    "int64_t",
    "int16_t",
    "int8_t",
    "long long int",
}
