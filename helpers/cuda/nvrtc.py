"""Compile CUDA C with NVRTC, NVIDIA's run-time compiler, on any Linux machine: it needs no GPU and no driver."""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path

from .. import machine
from . import compiler

FILE = "kernel.cu"
"""The name under which the reader's text is compiled: compilers and debuggers name its lines with it."""


class CompileError(machine.Plain, Exception):
    """CUDA C that does not compile: `errors` holds (line, message) pairs, line 0 where the compiler names none.

    The message shows each error with the reader's own line beneath it; IPython prints it without a traceback.
    """

    def __init__(
        self,
        code: str,
        errors: Sequence[tuple[int, str]],
        log: str,
        head: str = "This CUDA C does not compile.",
    ):
        self.code, self.errors, self.log = code, tuple(errors), log
        lines = code.splitlines()
        shown = [head]
        for number, message in self.errors:
            shown.append(f"line {number}: {message}" if number else message)
            if 0 < number <= len(lines):
                shown.append(f"    {lines[number - 1].strip()}")
        super().__init__("\n".join(shown))


@dataclass(frozen=True)
class Resources:
    """What ptxas gave one kernel. Bytes are per thread, but `shared_bytes` (static) is per block.

    `max_threads`: the most threads a block may have, from `__launch_bounds__`; 0 where the source sets none.
    `cluster`: the blocks of a cluster along x, y, z, from `__cluster_dims__`.
    """

    registers: int
    shared_bytes: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    stack_bytes: int
    max_threads: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers written to and read back from memory because they did not fit."""
        return self.spill_stores_bytes + self.spill_loads_bytes


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as PTX declares it: `kind` is "f32", "u64", ... or "bytes" for a class or vector type."""

    kind: str
    size: int
    align: int


@dataclass(frozen=True)
class Binary:
    """What a compilation gave. `kernels`, `parameters` and `lowered` are keyed by kernel name or name expression."""

    code: str
    arch: str
    ptx: str
    cubin: bytes
    kernels: dict[str, Resources]
    parameters: dict[str, tuple[Parameter, ...]]
    lowered: dict[str, str]
    log: str = field(repr=False)

    def sass(self, name: str | None = None) -> str:
        """The machine code, of one kernel or of all, read with the `cuobjdump` in triton's wheel."""
        if name is not None and name not in self.lowered:
            raise KeyError(f"No kernel {name!r} was compiled; there are: {', '.join(self.lowered)}.")
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.cubin)
            chosen = ["-fun", self.lowered[name]] if name else []
            run = subprocess.run(
                [tool("cuobjdump"), "-sass", *chosen, cubin],
                capture_output=True,
                text=True,
                env=os.environ | {"PATH": f"{Path(tool('nvdisasm')).parent}:{os.environ.get('PATH', '')}"},
            )
        if run.returncode:
            raise RuntimeError(f"cuobjdump could not read the compiled kernel: {(run.stderr or run.stdout).strip()}")
        return run.stdout


def compile(  # noqa: A001  (the course's name for it: cuda.compile)
    code: str, arch: str | None = None, options: Sequence[str] = (), name_expressions: Sequence[str] = ()
) -> Binary:
    """Compile CUDA C source text for one architecture; nothing is run.

    arch: "sm_90", "sm_90a", ... (default: this machine's, sm_90 without a GPU); an `-arch=` among `options` wins.
    name_expressions: C++ names to instantiate, such as "scale<float, 128>".
    Raises `CompileError` with the reader's line numbers, ValueError for an architecture NVRTC does not know.
    """
    asked = _asked(code, arch, options, name_expressions)
    if asked not in _binaries:
        _binaries[asked] = _binary(asked, compiler.made(*_job(*asked)))
    return _binaries[asked]


def compile_all(asked: Iterable[tuple]) -> list[Binary]:
    """`[compile(*one) for one in asked]`, but side by side, in as many processes as there are processors: in one
    process NVRTC takes one text after the other. What does not compile raises as it would without this."""
    asked = [_asked(*one) for one in asked]
    missing = [one for one in dict.fromkeys(asked) if one not in _binaries]
    count = min(len(os.sched_getaffinity(0)), len(missing))
    if count > 1:
        shares = [missing[i::count] for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            for share, made in zip(shares, pool.map(_apart, shares), strict=True):
                _binaries.update({one: _binary(one, m) for one, m in zip(share, made, strict=False) if not m.status})
    return [compile(*one) for one in asked]


def _apart(share: list[tuple]) -> list[compiler.Made]:
    """What a process of its own made of these; nothing where it failed."""
    jobs = pickle.dumps([_job(*one) for one in share])
    run = subprocess.run([sys.executable, "-P", compiler.__file__], input=jobs, capture_output=True)
    return [compiler.Made(**fields) for fields in pickle.loads(run.stdout)] if not run.returncode else []


def write_binaries(path: Path) -> None:
    """Everything that this process has compiled, for `read_binaries` in a process that it starts."""
    path.write_bytes(pickle.dumps(_binaries))


def read_binaries(path: str) -> None:
    """Take over what `write_binaries` wrote, so that it is not compiled again: a file of one's own, it is a pickle."""
    _binaries.update(pickle.loads(Path(path).read_bytes()))


_binaries: dict[tuple, Binary] = {}
"""By what was asked for, as `_asked` gives it."""


def _asked(code: str, arch: str | None = None, options: Sequence[str] = (), name_expressions: Sequence[str] = ()):
    """What decides a compilation: code, architecture, the other options, names."""
    given = [o for o in options if not _ARCH_OPTION.match(o)]
    for option in options:
        if found := _ARCH_OPTION.match(option):
            arch = found[1]
    return code, arch or machine.here().arch, tuple(given), tuple(name_expressions)


_ARCH_OPTION = re.compile(r"^(?:-arch|--gpu-architecture)=(\w+)$")


def _job(code: str, arch: str, options: tuple[str, ...], expressions: tuple[str, ...]) -> tuple:
    """Arguments of `compiler.made`."""
    nvrtc = _nvrtc()
    _check_arch(nvrtc, arch)
    flags = [f"-arch={arch}", "--ptxas-options=-v", "-lineinfo"]
    if nvrtc.nvrtcVersion()[1] >= 13:
        flags.append("--no-cache")  # beside a driver it keeps what it compiled, and then reports no registers
    flags += [] if any(o.startswith(("-std", "--std")) for o in options) else ["-std=c++17"]
    flags += [*options, *(f"-I{folder}" for folder in include_folders())]
    return code, FILE, flags, _HEADERS, expressions


def _binary(asked: tuple, made: compiler.Made) -> Binary:
    code, arch, *_ = asked
    if made.status:
        found = _errors(made.log)
        if made.ptx:
            found = _errors_in_ptx(made.log, made.ptx) or found
        raise CompileError(code, found or [(0, f"{made.status}: {made.log.strip()}")], made.log)
    entries = _entries(made.ptx)
    by_lowered = {lowered: name for name, lowered in made.names}
    lowered = {by_lowered.get(entry, _plain(entry)): entry for entry in entries}
    resources = _resources(made.log)
    return Binary(
        code,
        arch,
        made.ptx,
        made.cubin,
        {n: Resources(*resources[e], *entries[e][1:]) for n, e in lowered.items()},
        {n: entries[e][0] for n, e in lowered.items()},
        lowered,
        made.log,
    )


_INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long long"}
_STDINT = (
    "".join(
        f"typedef {sign} {kind} {u}int{bits}_t;\n"
        for u, sign in (("", "signed"), ("u", "unsigned"))
        for bits, kind in _INTEGERS.items()
    )
    + "typedef signed long long intptr_t;\ntypedef unsigned long long uintptr_t;\n"
)
_IN_STD = "namespace std {" + "".join(f" using ::{u}int{b}_t;" for u in ("", "u") for b in _INTEGERS) + " }\n"
_MATH = "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)\n"
_FLOAT = """#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
"""
_LIMITS = """#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ull
#define CHAR_BIT 8
"""
# NVRTC brings no C library. What kernels include from one is built in (assert, printf, math), or types and constants.
_HEADERS = {
    name: f"#pragma once\n{text}"
    for name, text in {
        "stdint.h": _STDINT,
        "cstdint": _STDINT + _IN_STD,
        "math.h": _MATH,
        "cmath": _MATH,
        "float.h": _FLOAT,
        "cfloat": _FLOAT,
        "limits.h": _LIMITS,
        "climits": _LIMITS,
    }.items()
} | dict.fromkeys(("assert.h", "cassert", "stdio.h", "cstdio", "stddef.h", "cstddef"), "#pragma once\n")


def _errors(log: str) -> list[tuple[int, str]]:
    """(line, message) of each error: the front end's, which name lines, or ptxas's, which name functions."""
    found = [
        (int(m[1]), re.sub(r"\s*\n\s*", " ", m[2]))
        for m in re.finditer(rf"^{re.escape(FILE)}\((\d+)\): (?:catastrophic )?error: (.+)$", log, re.M)
    ]
    for m in re.finditer(r"^\s*ptxas (?:error|fatal)\s*:\s*(.+)$", log, re.M):
        much = re.search(r"function '(\S+)' uses too much shared data \((\w+) bytes, (\w+) max\)", m[1])
        found.append(
            (0, m[1].strip())
            if not much
            else (0, _TOO_MUCH.format(_plain(much[1]), int(much[2], 16), int(much[3], 16)))
        )
    return found


def _errors_in_ptx(log: str, ptx: str) -> list[tuple[int, str]]:
    """(line, message) of what ptxas refuses of inline PTX, by the reader's line that each instruction came from."""
    lines, found = ptx.splitlines(), []
    own = re.search(rf'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?{re.escape(FILE)}"', ptx, re.M)
    for m in re.finditer(r"ptx input, line (\d+); error\s*: (.+)$", log, re.M):
        before = reversed(lines[: int(m[1])])
        at = (re.match(rf"\s*\.loc\s+{own[1] if own else 1}\s+(\d+)", line) for line in before)
        found.append((next((int(loc[1]) for loc in at if loc), 0), m[2].strip()))
    return list(dict.fromkeys(found))[:MOST_IN_PTX]


MOST_IN_PTX = 4
"""Errors of inline PTX that are told: one instruction stands in many places once loops are unrolled."""

_TOO_MUCH = (
    "{} declares {:,} bytes of __shared__ arrays; arrays of fixed size may have {:,} bytes in all. "
    "Use `extern __shared__` and the launch's shared_mem for more."
)


def _entries(ptx: str) -> dict[str, tuple[tuple[Parameter, ...], int, tuple[int, int, int]]]:
    """Entry functions of a PTX text: lowered name -> (parameters, maximal threads of a block or 0, cluster)."""
    out = {}
    for m in re.finditer(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{", ptx):
        parameters = tuple(
            Parameter(f"{p['kind']}", _SIZES[p["kind"]], _SIZES[p["kind"]])
            if not p["count"]
            else Parameter("bytes", int(p["count"]), int(p["align"] or 1))
            for p in _PARAMETER.finditer(m[2] or "")
        )
        sides = {
            name: tuple(int(n) for n in found[1].split(","))
            for name in ("(?:max|req)ntid", "reqnctapercluster")
            if (found := re.search(rf"\.{name}\s+(\d+(?:\s*,\s*\d+)*)", m[3]))
        }
        cluster = (*sides.get("reqnctapercluster", ()), 1, 1, 1)[:3]
        out[m[1]] = (parameters, prod(sides.get("(?:max|req)ntid", (0,))), cluster)
    return out


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<kind>[usbf]\d+|pred)(?:\s+\.ptr(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?)?"
    r"\s+[\w$]+(?:\[(?P<count>\d+)\])?"
)
_SIZES = {f"{k}{bits}": bits // 8 for k in "usbf" for bits in (8, 16, 32, 64)}


def _resources(log: str) -> dict[str, tuple[int, int, int, int, int]]:
    """Per lowered name (registers, static shared, spill stores, spill loads, stack) from ptxas's report."""
    out = {}
    for part in re.split(r"ptxas info\s*: Compiling entry function ", log)[1:]:
        name = re.match(r"'([^']+)'", part)[1]
        own = part.split(f"Function properties for {name}", 1)[-1]

        def number(pattern: str, text: str = own) -> int:
            found = re.search(pattern, text)
            return int(found[1]) if found else 0

        out[name] = (
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes smem"),
            number(r"(\d+) bytes spill stores"),
            number(r"(\d+) bytes spill loads"),
            number(r"(\d+) bytes stack frame"),
        )
    return out


def _plain(lowered: str) -> str:
    """The readable name of a C++ function that is no template: `_Z3addPfi` -> "add"; others unchanged."""
    found = re.match(r"_Z(\d+)", lowered)
    return lowered[found.end() : found.end() + int(found[1])] if found else lowered


def _check_arch(nvrtc, arch: str) -> None:
    known = compiler.value(nvrtc.nvrtcGetSupportedArchs(), last=True)
    found = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if not found or int(found[1]) not in known:
        version = ".".join(str(v) for v in nvrtc.nvrtcVersion()[1:])
        raise ValueError(
            f"NVRTC {version} does not compile for {arch!r}; it knows {', '.join(f'sm_{n}' for n in known)}."
        )


def _nvrtc():
    """The bindings, with the library behind them loaded."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as why:
        raise machine.NotReady(
            f"NVRTC, the CUDA compiler, cannot be loaded: {why}.",
            'pip install -c constraints.txt -e ".[all]"',
        ) from why
    return nvrtc


@lru_cache(maxsize=1)
def include_folders() -> tuple[str, ...]:
    """Folders with NVIDIA's headers: those in the wheels, then those of a CUDA toolkit if something is missing."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    wheels = [r / f for r in roots for f in ("cu13/include", "cuda_runtime/include", "cuda_cccl/include")]
    toolkits = [Path(p) / "include" for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    out: list[str] = []
    for folder in [*wheels, *toolkits]:
        if folder.is_dir() and not all(_has(out, header) for header in ("cuda_fp16.h", "mma.h", "cuda/barrier")):
            out += [str(f) for f in (folder, folder / "cccl") if f.is_dir()]
    if not _has(out, "cuda_fp16.h"):
        raise machine.NotReady(
            "NVIDIA's headers (cuda_fp16.h and others) were not found, neither in wheels nor in a CUDA toolkit.",
            "pip install -c constraints.txt nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl",
        )
    return tuple(out)


def _has(folders: list[str], header: str) -> bool:
    return any(Path(f, header).exists() for f in folders)


@lru_cache(maxsize=8)
def tool(name: str) -> str:
    """Path of a CUDA command-line tool: `cuobjdump`, `nvdisasm`, `ptxas`…, from triton's wheel or a toolkit."""
    import shutil

    spec = importlib.util.find_spec("triton")
    for root in spec.submodule_search_locations if spec else ():
        if (found := Path(root, "backends", "nvidia", "bin", name)).exists():
            return str(found)
    if found := shutil.which(name):
        return found
    raise machine.NotReady(f"{name} was found neither in triton's wheel nor on the PATH.", "pip install triton")
