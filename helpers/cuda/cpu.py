"""Build CUDA C for the CPU with g++ and run it there: the Python side of runner.h and runtime.cpp."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .. import install, machine
from . import abi
from .nvrtc import FILE, CompileError, include_folders
from .translate import NOT_ON_A_CPU, to_cpp, variables

HERE = Path(__file__).parent

# -fsanitize=thread puts a call before every access, which runtime.cpp answers. Structs stay whole (a float4 is one
# access, as on a GPU), loops are not vectorised, and pointers may be reinterpreted, as nvcc lets them be. Faults name
# lines and no variables: to track these took a third of g++'s time.
FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-gdwarf-4",
    "-fno-var-tracking",
    "-w",
    "-fPIC",
    "-fno-plt",
    "-fstack-clash-protection",
    "-fsanitize=thread",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-tree-sra",
    "-fno-tree-vectorize",
    "-fno-tree-loop-distribute-patterns",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-threadsafe-statics",
]
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread"]
if platform.machine() == "x86_64":
    FLAGS += ["-mtls-dialect=gnu2"]

_lock = threading.RLock()  # one kernel at a time: runtime.cpp's hooks serve one launch
_runtime_lock = threading.Lock()  # the runner is made once


@dataclass(frozen=True)
class Outcome:
    """What one run gave: the runtime's structs, copied, and what the kernel printed."""

    failure: abi.Failure
    accesses: tuple[abi.Access, ...]
    races: tuple[abi.Race, ...]
    printed: str


@dataclass(frozen=True)
class Library:
    """One source built for the CPU."""

    path: Path
    handle: ctypes.CDLL
    entries: tuple[str, ...]

    def variable(self, name: str) -> tuple[int, int]:
        """(address, bytes) of a `__constant__` or `__device__` variable."""
        try:
            address, size = (
                getattr(self.handle, f"cc_address_{name}"),
                getattr(self.handle, f"cc_size_{name}"),
            )
        except AttributeError:
            raise KeyError(
                f"The source has no __constant__ or __device__ variable {name!r} at its top level."
            ) from None
        address.restype, size.restype = ctypes.c_void_p, ctypes.c_size_t
        return address(), size()

    def run(
        self,
        entry: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: Sequence[bytes],
        ranges: Sequence[tuple[int, int]],
        *,
        shared_bytes: int = 0,
        strict: bool = True,
        mode: int = abi.RUN,
        order: str = "forward",
        seed: int = 0,
        blocks: int = 0,
        workers: int = 0,
        idle: bool = False,
    ) -> Outcome:
        """Run one launch to its end or first failure. ranges: (low, high) addresses that the kernel may touch."""
        buffers = [ctypes.create_string_buffer(v, max(len(v), 1)) for v in values]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(ctypes.addressof(b) for b in buffers))
        spans = (abi.Range * max(len(ranges), 1))(*(abi.Range(*r) for r in ranges))
        launch = abi.Launch(
            kernel=ctypes.cast(getattr(self.handle, f"cc_entry_{self.entries.index(entry)}"), ctypes.c_void_p),
            anchor=ctypes.cast(self.handle.cc_anchor, ctypes.c_void_p),
            arguments=pointers,
            ranges=spans,
            range_count=len(ranges),
            strict=strict,
            grid=abi.U3(*grid),
            block=abi.U3(*block),
            shared_bytes=shared_bytes,
            workers=workers or min(os.cpu_count() or 1, 16),
            mode=mode,
            order=abi.ORDERS[order],
            seed=seed,
            blocks=blocks,
            idle=idle,
        )
        with _lock:
            status = _runtime().cc_launch(ctypes.byref(launch))
        if status < 0:
            raise MemoryError("There is not enough memory for the stacks of one block's threads.")
        printed = ctypes.string_at(launch.printed, launch.printed_bytes).decode(errors="replace")
        outcome = Outcome(
            abi.Failure.from_buffer_copy(launch.failure),
            tuple(abi.Access.from_buffer_copy(launch.accesses[i]) for i in range(launch.access_count)),
            tuple(abi.Race.from_buffer_copy(launch.races[i]) for i in range(launch.race_count)),
            printed,
        )
        _runtime().cc_release(ctypes.byref(launch))
        return outcome

    def lines(self, pcs: Sequence[int]) -> dict[int, int]:
        """The reader's line of each return address (an offset in the library); 0 where there is none."""
        pcs = sorted({pc for pc in pcs if pc})
        if not pcs:
            return {}
        asked = "\n".join(hex(pc - 1) for pc in pcs)  # the call itself, not what follows it
        run = subprocess.run(
            ["addr2line", "-a", "-i", "-e", str(self.path)],
            input=asked,
            capture_output=True,
            text=True,
            check=True,
        )
        out: dict[int, int] = {}
        current = 0
        for line in run.stdout.splitlines():
            if re.fullmatch(r"0x[0-9a-f]+", line):
                current = int(line, 16) + 1
                out.setdefault(current, 0)
            elif (m := re.search(rf"(?:^|/){re.escape(FILE)}:(\d+)", line)) and not out[current]:
                out[current] = int(m[1])  # frames come innermost first: the first of the reader's own counts
        return out


@lru_cache(maxsize=128)
def build(code: str, entries: tuple[str, ...], options: tuple[str, ...] = ()) -> Library:
    """Compile `code` for the CPU, or take it from the cache. entries: kernel names and name expressions.

    Raises `CompileError` where the source uses what only a GPU has, `machine.NotReady` without g++.
    """
    with _lock:
        path = compiled(code, entries, options)
        return Library(path, ctypes.CDLL(str(path)), entries)


def compiled(code: str, entries: tuple[str, ...], options: tuple[str, ...] = ()) -> Path:
    """The library of `build`, which another process is to load. Threads may have several made at once."""
    names = variables(code)
    text = to_cpp(code, entries, names)
    kept = [o for o in options if re.match(r"-[DUIO]", o)]
    runtime = made()  # its name stands for the runner's own text and the compiler
    path = machine.cache("cuda") / f"{_hash(text, *_headers(code, kept), *kept, *FLAGS, runtime.name)}.so"
    if not path.exists():
        _compile(code, text, kept, runtime, path)
    return path


def _headers(code: str, options: Sequence[str]) -> list[str]:
    """The texts of what `code` includes from the folders of its own options (-I), and of what that includes."""
    folders, texts, wanted = [Path(o[2:]) for o in options if o.startswith("-I")], {}, [code]
    while wanted:
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', wanted.pop(), re.M):
            found = next((f / name for f in folders if (f / name).is_file()), None)
            if found and found not in texts:
                texts[found] = found.read_text()
                wanted.append(texts[found])
    return list(texts.values())


def _compile(code: str, text: str, options: list[str], runtime: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, thing, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_text(text)
        includes = [f"-I{HERE}", *(x for f in include_folders() for x in ("-isystem", f))]
        run = _gxx([*FLAGS, *options, *includes, "-c", source, "-o", thing])
        if run.returncode:
            raise CompileError(code, _errors(run.stderr), run.stderr, NOT_ON_A_CPU)
        named = subprocess.run(["nm", "--defined-only", thing], capture_output=True, text=True, check=True).stdout
        # hooks by which the runner sees accesses; what g++ runs at load time, where a GPU runs nothing
        if found := re.search(r" (__tsan_\w+|_GLOBAL__sub_I_\S*)$", named, re.M):
            own = "it computes a variable's first value when it is loaded"
            said = f"{found[1]} is a name of the runner's own" if found[1].startswith("__tsan") else own
            raise CompileError(code, [(0, said)], "", NOT_ON_A_CPU)
        linked = _gxx(["-shared", "-Wl,-Bsymbolic", thing, runtime, f"-Wl,-rpath,{path.parent}", "-o", built])
        if linked.returncode:
            raise RuntimeError(f"g++ could not link a kernel for the CPU: {linked.stderr.strip()}")
        built.rename(path)


def _errors(log: str) -> list[tuple[int, str]]:
    own = re.findall(rf"^{re.escape(FILE)}:(\d+):\d+: error: (.+)$", log, re.M)
    return [(int(n), m) for n, m in own] or [(0, m) for m in re.findall(r"error: (.+)$", log, re.M)[:3]] or [(0, log)]


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(made()))


def made() -> Path:
    """The library that every kernel's needs, the runner itself: on a machine's first day it takes g++ seconds."""
    with _runtime_lock:
        return _runtime_path()


@lru_cache(maxsize=1)
def _runtime_path() -> Path:
    path = machine.cache("cuda") / f"runtime-{_hash(*_own_text(), *RUNTIME_FLAGS, _compiler_version())}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder, path.name)
            run = _gxx([*RUNTIME_FLAGS, HERE / "runtime.cpp", f"-Wl,-soname,{path.name}", "-o", built, "-ldl"])
            if run.returncode:
                raise RuntimeError(f"g++ could not build the CPU runner: {run.stderr.strip()}")
            built.rename(path)
    return path


def _own_text() -> list[str]:
    return [(HERE / f).read_text() for f in sorted(p.name for p in HERE.glob("run*.*"))]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _gxx(arguments: list) -> subprocess.CompletedProcess:
    return subprocess.run([compiler(), *map(str, arguments)], capture_output=True, text=True)


@lru_cache(maxsize=1)
def compiler() -> str:
    """Path of g++; `machine.NotReady` with the command that mends it where the runner cannot work."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise machine.NotReady(
            f"CUDA C runs on the CPU on Linux (x86-64 or ARM64) only, and this is {platform.system()} on "
            f"{platform.machine()}: kernels can be read here, not run.",
            "use WSL2 on Windows, or a Linux container or machine",
        )
    found = shutil.which("g++")
    if not found or not shutil.which("addr2line"):
        raise machine.NotReady(
            f"Running CUDA C on the CPU needs {'addr2line' if found else 'g++'}, which was not found.",
            install.package("binutils") if found else install.package("g++", dnf="gcc-c++"),
        )
    version = _version_of(found)
    if int(version.split(".")[0]) < 10:
        raise machine.NotReady(
            f"Running CUDA C on the CPU needs g++ 10 or later; this is {version}.",
            install.package("g++", dnf="gcc-c++"),
        )
    return found


def _version_of(path: str) -> str:
    return subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


def _compiler_version() -> str:
    return f"{compiler()} {_version_of(compiler())}"
