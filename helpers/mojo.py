"""Mojo from a cell: a text is compiled and run, compiled for any GPU to be read or launched, or imported.

    mojo.run(TEXT)                                # its main(), here: what it prints
    built = mojo.build(TEXT, "sm_90a")            # every kernel that main() launches, compiled for that GPU
    built.kernel("softmax").text                  # PTX, or the assembly of AMD's GPUs
    built.kernel("softmax").launcher()            # as any kernel of the course, on the GPU or in CPU mode on the CPU
    mojo.module(TEXT, "ops").saxpy(…)             # functions that a text makes for Python

Everything compiled is kept, and what was refused. A GPU is not needed to compile for one, and telemetry is off.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from filelock import FileLock

from . import apart, child, cuda, machine, show

OFF = {"MODULAR_TELEMETRY_ENABLED": "0"}
"""The one switch by which Mojo and MAX look up no host."""
FILE, MAIN, REFUSED = "program.mojo", "main.mojo", "refused.json"
_START = (
    "import sys\nfrom importlib.metadata import entry_points\n"
    "[start] = entry_points(group='console_scripts', name='mojo')\nsys.exit(start.load()())"
)


class CompileError(cuda.CompileError):
    """Mojo that does not compile: `errors` holds (line, message) pairs, as `cuda.CompileError` does."""


class Failed(machine.Plain, RuntimeError):
    """A program of Mojo's that did not end well; the message is its own."""


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for one GPU. `name`: its function; `entry`: the name that the compiler gave it."""

    name: str
    entry: str
    arch: str
    text: str

    @cached_property
    def module(self) -> "cuda.PtxModule":
        """The PTX as a module of the course's. Raises ValueError for a kernel that is not NVIDIA's."""
        if not self.arch.startswith("sm_"):
            raise ValueError(f"{self.name} is compiled for {self.arch}; PTX is for NVIDIA's GPUs.")
        return cuda.PtxModule(self.text)

    def problem(self) -> machine.NotReady | None:
        """What keeps it from being launched here; None where nothing does, as always in CPU mode."""
        here = machine.here().arch
        if not machine.gpu() or self.arch.rstrip("af") == here.rstrip("af"):
            return None
        sentence = f"The PTX of {self.name} is for {self.arch}, and this GPU is {here}."
        return machine.NotReady(sentence, apart.INSTALL if problem() else "")

    def launcher(self) -> "cuda.Kernel":
        """The kernel, to be launched: `kernel(grid, block, args)`, on torch tensors."""
        return self.module.get_function(self.entry)


@dataclass(frozen=True)
class Built:
    """What `build` made: the kernels of a program; the seconds that it took, when it was compiled."""

    arch: str
    kernels: tuple[Kernel, ...]
    seconds: float

    def kernel(self, name: str) -> Kernel:
        """The kernel made of the function `name`. Raises KeyError where there is none, or more than one."""
        found = [kernel for kernel in self.kernels if kernel.name == name]
        if len(found) != 1:
            there = ", ".join(kernel.name for kernel in self.kernels) or "none"
            raise KeyError(f"{len(found)} kernels are made of {name!r}; main() launches: {there}.")
        return found[0]


def problem() -> machine.NotReady | None:
    """What keeps Mojo from running here; None where nothing does."""
    return apart.problem("max")


def run(code: str, *, seconds: float = 300, gpu: bool = False) -> str:
    """Compile `code` for this machine and run its `main()`: what it printed.

    gpu: it launches kernels, and is compiled for this machine's GPU. Raises `CompileError`, `Failed`, and
    `machine.NotReady` where Mojo is missing.
    """
    done = child.command([str(program(code, seconds=seconds, gpu=gpu))], env=OFF, seconds=seconds)
    if not done.ok:
        raise Failed(f"The program did not end well: {done.why()}. {done.stderr[-1000:].strip()}")
    return done.stdout


def program(code: str, *, seconds: float = 300, gpu: bool = False) -> Path:
    """The program that `run` runs, compiled and not run."""
    options = [f"--target-accelerator={machine.here().arch}"] if gpu else []
    return _made(code, ("build", *options, "-o", "program"), seconds) / "program"


def build(code: str, arch: str, *, main: str = "", seconds: float = 300) -> Built:
    """Compile the kernels that `main()` launches for a GPU, such as "sm_90a" or "gfx942"; nothing is run.

    main: a program around `code`, which it imports as the module `program`. The PTX then names lines of `code`.
    HELPERS_TARGETS: GPUs with spaces between, for which alone anything is compiled; for others `machine.NotReady`.
    """
    if (targets := os.environ.get("HELPERS_TARGETS")) and arch not in targets.split():
        raise machine.NotReady(f"HELPERS_TARGETS is {targets}, without {arch}.", "unset HELPERS_TARGETS")
    options = ("build", *["-g1"] * bool(main), "--emit", "asm", f"--target-accelerator={arch}", "-o", "program.s")
    folder = _made(code, options, seconds, main)
    kernels = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".ptx", ".amdgcn", ".s", ".asm") or path.name == "program.s":
            continue
        text = path.read_text()
        entry = (re.search(r"\.entry\s+([\w$]+)", text) or re.search(r"\.amdhsa_kernel\s+(\S+)", text))[1]
        kernels.append(Kernel(_function(entry, code + main), entry, arch, text))
    return Built(arch, tuple(kernels), float((folder / "seconds").read_text()))


def ahead(wanted: Iterable[tuple[str, str]]) -> None:
    """Begin to compile (code, arch) pairs and do not wait: `build` then finds them, or waits for its own alone.

    What is refused is left for `build` to say.
    """
    for code, arch in wanted:
        begin(build, code, arch)


def begin(make: Callable[..., object], *args, **named) -> None:
    """Begin a call of one of this module's that compiles, as `begin(library, code, name)`, as `ahead` does."""
    if not problem():
        apart.later(partial(make, *args, **named))


def module(code: str, name: str, *, seconds: float = 300):
    """The module `name` that `code` makes for Python with `PyInit_<name>`: imported into this process."""
    return imported(library(code, name, seconds=seconds))


def library(code: str, name: str, *, main: str = "", seconds: float = 300) -> Path:
    """The file of such a module, not imported, or of any library. main: as for `build`; it then exports."""
    return _made(code, ("build", "--emit", "shared-lib", "-o", f"{name}.so"), seconds, main) / f"{name}.so"


def imported(path: Path):
    """The module that lies in a file of `library`'s."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def package(code: str) -> Path:
    """A folder with `code` as a package of Mojo's: what MAX takes as `custom_extensions`."""
    folder = machine.cache("mojo") / f"package_{hashlib.sha256(code.encode()).hexdigest()[:24]}"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.mojo").write_text(code)
    return folder


def seconds(code: str, *options: str) -> float:
    """Seconds that a compilation of `code` takes when nothing is kept, by the compiler's own cache neither."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        _compile(code, ("build", *options), Path(cache), 300, {"MODULAR_CACHE_DIR": cache})
        return time.perf_counter() - began


def _made(code: str, options: Sequence[str], seconds: float, main: str = "") -> Path:
    """A folder with what the compiler makes of `code`, or of the program `main` around it."""
    if lacking := problem():
        raise lacking
    versions = machine.installed("mojo-compiler", "max")
    digest = hashlib.sha256("\0".join([code, main, *options, str(versions), sys.prefix]).encode()).hexdigest()[:24]
    folder = machine.cache("mojo") / digest
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made, show.working("Mojo: compiling"):
                began = time.perf_counter()
                try:
                    _compile(code, options, Path(made), seconds, main=main)
                except CompileError as why:
                    if not any(line for line, _ in why.errors):
                        raise  # it did not get through, which may pass: nothing of the reader's was refused
                    Path(made, REFUSED).write_text(json.dumps([why.errors, why.log]))
                Path(made, "seconds").write_text(f"{time.perf_counter() - began}")
                shutil.copytree(made, folder)
    if (folder / REFUSED).exists():
        errors, log = json.loads((folder / REFUSED).read_text())
        raise CompileError(code, [tuple(error) for error in errors], log, "This Mojo does not compile.")
    return folder


def _compile(
    code: str, options: Sequence[str], folder: Path, seconds: float, env: dict | None = None, main: str = ""
) -> None:
    """Have `code` compiled in a folder. What the compiler warns of is shown; what it refuses is `CompileError`."""
    (folder / FILE).write_text(code)
    if main:
        (folder / MAIN).write_text(main)
    words = [str(folder / w) if i and options[i - 1] == "-o" else w for i, w in enumerate(options)]
    done = child.python(
        ["-c", _START, *words, folder / (MAIN if main else FILE)], env=OFF | (env or {}), seconds=seconds
    )
    said = _said(done.stderr)
    if not done.ok:
        errors = [(line, text) for line, kind, text in said if kind == "error"]
        crashed = re.findall(r"^LLVM ERROR: (.+)", done.stderr, re.M) or [done.stderr.strip()[:300]]
        errors = _deepest(said) or errors or [(0, f"the compiler did not get through: {done.why()}. {crashed[0]}")]
        raise CompileError(code, errors, done.stderr, "This Mojo does not compile.")
    for line, kind, text in said:
        if kind == "warning":
            show.note(f"Mojo, line {line}: {text}", kind="warning")


def _said(log: str) -> list[tuple[int, str, str]]:
    """What the compiler said, or MAX of an operator: (line, kind, message), line 0 where it is not the reader's."""
    found = re.findall(r"^(\S[^\n]*?):(\d+):\d+: (error|warning|note): (.+)$", log, re.M)
    return [
        (int(line) if path.endswith((FILE, "__init__.mojo")) else 0, kind, text) for path, line, kind, text in found
    ]


def refused(log: str) -> list[tuple[int, str]]:
    """(line, message) of each error that the compiler's words, or MAX's, tell of a reader's text; it may be none."""
    said = _said(log)
    return _deepest(said) or [(line, text) for line, kind, text in said if kind == "error" and line]


def _deepest(said: list[tuple[int, str, str]]) -> list[tuple[int, str]]:
    """Of an error that shows only when a function is instantiated: the reader's innermost line, and the cause."""
    if not any("instantiation failed" in text for _, _, text in said):
        return []
    lines = [line for line, _, _ in said if line]
    causes = [text for _, _, text in said if "failed: " in text] or [said[-1][2]]
    return [(lines[-1], causes[-1])] if lines else []


def _function(entry: str, code: str) -> str:
    """The function of `code` that an entry's name begins with, after those of the files."""
    names = sorted(re.findall(r"^def (\w+)", code, re.M), key=len, reverse=True)
    bare = re.sub(rf"^(?:{Path(MAIN).stem}_)?(?:{Path(FILE).stem}_)?", "", entry)
    return next((name for name in names if bare.startswith(f"{name}_")), entry)
