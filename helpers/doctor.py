"""What this machine can run, row by row, and the command that mends each gap.

Two kinds of rows. The checks in this file look at facts and cost milliseconds: `helpers.start()` makes them in every
notebook's first cell, and the doctor makes the same. The trials in `helpers.trials` run something small on every rung
in a process of its own, since a statement that something works is true only once it has worked.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from warnings import catch_warnings

from . import ROOT, apart, install, machine
from .machine import Driver, installed, nvidia

GIB = 2**30
LITTLE, CROWDED = 8 * GIB, 3 * GIB
"""A card with less memory than LITTLE, or with less of it free than CROWDED, is too small for some cells."""

A_GPU = "run the course on a machine with an NVIDIA GPU; README.md shows how on Colab"
DRIVER = "update the NVIDIA driver to 580 or later"
FIRST = ("filelock", "ipython", "matplotlib", "numpy", "nvidia-ml-py", "psutil")
"""Packages that every lesson's first cell takes for granted: without one of them nothing runs."""


@dataclass(frozen=True)
class Row:
    """What is known of one thing. state: "ok", "limited" (it works in part, or differently) or "missing".

    needed: without it the course cannot run here; warn: the first cell of a notebook tells of it too.
    """

    name: str
    state: str
    sentence: str
    mend: str = ""
    needed: bool = False
    warn: bool = False


# ---- for the first cell of a notebook ------------------------------------------------------------------------------


def blocking() -> machine.NotReady | None:
    """What keeps the course from running here, to be raised; None where nothing does."""
    for row in checks():
        if row.needed and row.state == "missing":
            return machine.NotReady(row.sentence, row.mend)
    return None


def warnings() -> list[str]:
    """What is amiss and can be mended, though the course runs: one sentence and the command each."""
    return [f"{row.sentence} Mend: {row.mend}" for row in checks() if row.warn and row.state != "ok"]


# ---- facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """What torch says. cuda, hip: the versions it was built for, or empty; card: name, capability, bytes, free."""

    version: str
    cuda: str
    hip: str
    card: tuple[str, tuple[int, int], int, int] | None


def the_torch() -> Torch:
    """The torch of this Python. Raises ImportError or OSError where it cannot be loaded."""
    import torch

    card = None
    with catch_warnings(action="ignore"):  # of a driver that is too old torch warns, and the row of the GPU says it
        available = bool(torch.version.cuda) and torch.cuda.is_available()
    if available:
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        card = p.name, (p.major, p.minor), p.total_memory, torch.cuda.mem_get_info()[0]
    return Torch(torch.__version__, torch.version.cuda or "", torch.version.hip or "", card)


def anew() -> str:
    """The command that brings back a package that an environment has lost: .venv's stamp does not know of that."""
    return "make clean lab" if _in_venv() else "make lab"


def _in_venv() -> bool:
    return Path(sys.prefix) == ROOT / ".venv"


# ---- checks --------------------------------------------------------------------------------------------------------


def checks() -> list[Row]:
    """The rows that cost milliseconds, in the order in which they are worth reading."""
    rows = [system(), python()]
    if any(row.state == "missing" for row in rows):
        return rows
    rows += [packages(), folder(), disk(), torch()]
    if rows[-1].state != "missing":
        rows += [gpu(), cupy()]
    stuck = any(row.needed and row.state == "missing" for row in rows)
    return [*rows, triton(), compiler(), *([] if stuck else compilers())]


def system() -> Row:
    """Linux, or what to do on another system."""
    if problem := install.system_problem():
        return Row("System", "missing", *problem, needed=True)
    return Row("System", "ok", f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}.")


def python() -> Row:
    """The version of this Python, too old and too new included."""
    if problem := install.python_problem():
        return Row("Python", "missing", *problem, needed=True)
    return Row("Python", "ok", f"Python {platform.python_version()} ({sys.prefix}).")


def packages() -> Row:
    """Is the environment whole? In .venv its stamp says; elsewhere (conda, an image) the versions installed do."""
    name, wrong = "Packages", wrong_versions()
    if lost := [f"{package} is missing" for package in FIRST if f"{package} is missing" in wrong]:
        return Row(name, "missing", f"Packages that every lesson needs: {'; '.join(lost)}.", anew(), needed=True)
    if _in_venv():
        chosen = install.read(install.venv("asked"))
        state = install.state()
        if state == "ready" and wrong:
            sentence = f"Packages changed after .venv was installed: {'; '.join(wrong)}."
            return Row(name, "limited", sentence, anew(), warn=True)
        if state == "ready":
            build = f", TORCH={chosen['torch']}" if chosen["torch"] else ""
            return Row(name, "ok", f".venv is complete: EXTRAS={chosen['extras']}{build}.")
        fault = {"stale": "is older than pyproject.toml and constraints.txt"}.get(
            state, "was cut short being installed"
        )
        return Row(name, "limited", f".venv {fault}.", "make install", warn=True)
    if not wrong:
        return Row(name, "ok", f"All that the course needs is installed in {sys.prefix}.")
    mend = "make lab"
    if problem := install.venv_problem():
        wrong, mend = [*wrong, problem[0]], f"{problem[1]} && make lab"
    return Row(name, "limited", f"Packages that the course needs: {'; '.join(wrong)}.", mend, warn=True)


def wrong_versions() -> list[str]:
    """Direct dependencies of pyproject.toml that are missing or of a version outside its range."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # without it no other can be looked at
        return ["packaging is missing"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wrong = []
    for line in project["dependencies"]:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        found = installed(wanted.name).get(wanted.name)
        if found is None:
            wrong.append(f"{wanted.name} is missing")
        elif not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} is {found}, not {wanted.specifier}")
    return wrong


def folder() -> Row:
    """A notebook may run in any folder, but one of another checkout would read that one's helpers for its own."""
    name, here = "Folder", Path.cwd()
    for above in (here, *here.parents):
        file = above / "pyproject.toml"
        if above != ROOT and file.is_file() and 'name = "gpu-kernel-ladder"' in file.read_text(errors="replace"):
            sentence = f"This runs in the checkout {above}, with the packages of another, {ROOT}."
            return Row(name, "limited", sentence, f"cd {above} && make lab", warn=True)
    where = "" if here == ROOT or ROOT in here.parents else f" (this runs in {here}, which is fine)"
    return Row(name, "ok", f"The checkout is {ROOT}{where}.")


def disk() -> Row:
    """Free space where the checkout is; what an installation takes, `make` has asked for before."""
    free = shutil.disk_usage(ROOT).free / install.GB
    if free < 1:
        sentence = f"The disk of {ROOT} has only {free:.1f} GB free, and compilers keep what they made there."
        return Row("Disk", "limited", sentence, "rm -rf ~/.cache/pip ~/.triton/cache", warn=True)
    return Row("Disk", "ok", f"{free:.0f} GB free.")


def torch() -> Row:
    """Whether torch loads, and for what it was built."""
    try:
        found = the_torch()
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Row("PyTorch", "missing", f"torch cannot be imported ({first}).", "make clean lab", needed=True)
    build = (
        f"built for ROCm {found.hip}" if found.hip else f"built for CUDA {found.cuda}" if found.cuda else "a CPU build"
    )
    return Row("PyTorch", "ok", f"torch {found.version.partition('+')[0]}, {build}.")


def gpu() -> Row:
    """Which mode this is, and in CPU mode what keeps the GPU from being used."""
    wanted = os.environ.get("HELPERS_MODE", "")
    if wanted not in ("", "cpu", "gpu"):
        mend = "unset HELPERS_MODE, or set it to cpu or gpu"
        return Row("GPU", "missing", f"HELPERS_MODE={wanted} is no mode.", mend, needed=True)
    usable, row = card(nvidia(), the_torch())
    if usable and wanted == "cpu":
        return Row(
            "GPU", "limited", f"HELPERS_MODE=cpu asks for CPU mode; without it: {row.sentence}", "unset HELPERS_MODE"
        )
    if usable or wanted == "cpu":
        return replace(row, warn=row.warn and usable)
    if wanted == "gpu":
        mend = f"unset HELPERS_MODE (then this is CPU mode), or {row.mend}"
        return Row("GPU", "missing", f"HELPERS_MODE=gpu asks for a GPU. {row.sentence}", mend, needed=True)
    return replace(row, sentence=f"{row.sentence} So this is CPU mode.")


def card(driver: Driver | None, torch: Torch) -> tuple[bool, Row]:
    """Can the course use a GPU through this driver and this torch? And the row that says so, or why not."""

    def no(sentence: str, mend: str, warn: bool = True) -> tuple[bool, Row]:
        return False, Row("GPU", "limited" if warn else "missing", sentence, mend, warn=warn)

    if torch.hip:
        return no("This torch is a ROCm build, and the course's kernels are for NVIDIA cards.", "make lab TORCH=cpu")
    if torch.card:
        return _card(*torch.card, driver)
    if driver is None or not driver.cards:
        return no("There is no NVIDIA GPU, or no driver for it.", A_GPU, warn=False)
    name, capability = max(driver.cards, key=lambda card: card[1])
    if capability < machine.OLDEST:
        return no(*_too_old(name, capability))
    runs = f"driver {driver.version} runs CUDA up to {_dotted(driver.cuda)}"
    if driver.cuda < (12, 0):
        return no(f"There is a {name}, but its {runs}, and torch needs 12 or later.", DRIVER)
    build = "cu130" if driver.cuda >= (13, 0) else "cu126"
    if not torch.cuda:
        return no(f"There is a {name}, but this torch is a CPU build.", f"make lab TORCH={build}")
    if int(torch.cuda.split(".")[0]) > driver.cuda[0]:
        mend = f"make lab TORCH={build}, or {DRIVER}"
        return no(f"There is a {name}, but its {runs}, and this torch is built for CUDA {torch.cuda}.", mend)
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return no(f"There is a {name}, but CUDA_VISIBLE_DEVICES={hidden!r} hides it.", "unset CUDA_VISIBLE_DEVICES")
    return no(f"There is a {name}, but torch cannot use it.", "python -c 'import torch; torch.cuda.init()' says why")


def _card(name: str, capability: tuple[int, int], total: int, free: int, driver: Driver | None) -> tuple[bool, Row]:
    """The row of a card that torch can use; the course may still not."""
    if capability < machine.OLDEST:
        sentence, mend = _too_old(name, capability)
        return False, Row("GPU", "limited", sentence, mend, warn=True)
    has = f"{name}, compute capability {_dotted(capability)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if total < LITTLE:
        sentence = f"{has}: some cells need up to {LITTLE // GIB} GiB and may run out of memory."
        return True, Row("GPU", "limited", sentence, "export HELPERS_MODE=cpu, for those lessons", warn=True)
    if free < CROWDED:
        mend = "nvidia-smi names the processes that hold it; in JupyterLab: Kernel, Shut Down All Kernels"
        return True, Row("GPU", "limited", f"{has}: others use it, and cells may run out of memory.", mend, warn=True)
    return True, Row("GPU", "ok", f"{has}" + (f", driver {driver.version}." if driver else "."))


def _too_old(name: str, capability: tuple[int, int]) -> tuple[str, str]:
    oldest = f"{_dotted(machine.OLDEST)} (Turing, such as a T4)"
    return f"{name} has compute capability {_dotted(capability)}, and the course needs {oldest}.", A_GPU


def cupy() -> Row:
    """CuPy's wheels are built for one CUDA major version: the driver, torch and CuPy must agree."""
    found, cuda = installed("cupy", "cupy-cuda12x", "cupy-cuda13x"), the_torch().cuda.split(".")[0]
    if not found:
        mend = anew() if _in_venv() else f"{_pip()} install -c {ROOT}/constraints.txt {_cupy_for(cuda)}"
        return Row(
            "CuPy", "missing", "CuPy, which launches raw CUDA kernels on a GPU, is not installed.", mend, warn=True
        )
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        mend = f"{_pip()} uninstall -y {' '.join(found)} && make clean lab"
        return Row("CuPy", "limited", f"Several builds of CuPy overwrite one another: {listed}.", mend, warn=True)
    [name] = found
    built = re.search(r"cuda(\d+)x", name)
    if built and cuda and built[1] != cuda:
        sentence = f"CuPy is built for CUDA {built[1]} ({listed}), and torch for CUDA {cuda}."
        right = f"{_pip()} install {_cupy_for(cuda)}"
        return Row("CuPy", "limited", sentence, f"{_pip()} uninstall -y {name} && {right}", warn=True)
    return Row("CuPy", "ok", f"{listed}.")


def _pip() -> str:
    return f"{sys.executable} -m pip"


def _cupy_for(cuda: str) -> str:
    return f"cupy-cuda{12 if cuda == '12' else 13}x"


def triton() -> Row:
    """Whether Triton is there, and in CPU mode whether helpers came before it."""
    found = installed("triton")
    if not found:
        return Row("Triton", "missing", "Triton is not installed.", anew(), needed=True)
    functions = sys.modules.get("triton.language")
    try:
        cpu = not machine.gpu()
    except machine.NotReady:  # another row says so
        cpu = False
    if cpu and functions is not None and type(functions.sum).__name__ == "JITFunction":
        sentence = "triton was imported before helpers, so its kernels wait for a GPU, and this is CPU mode."
        mend = "Kernel, Restart Kernel; then run `import helpers` before `import triton`"
        return Row("Triton", "missing", sentence, mend, needed=True)
    return Row("Triton", "ok", f"triton {found['triton']}.")


def compiler() -> Row:
    """g++, which torch.compile and the CPU runner of CUDA C call."""
    if path := shutil.which("g++"):
        return Row("C++ compiler", "ok", f"{path}.")
    sentence = "There is no g++: torch.compile and raw CUDA in CPU mode (lessons 00, 03, 04, 08, 09) need it."
    return Row("C++ compiler", "missing", sentence, install.package("g++", dnf="gcc-c++"), warn=True)


def compilers() -> list[Row]:
    """TVM, JAX and MAX where they are installed, but something about them is not as it has to be."""
    rows = []
    for package, name in (("tvm", "TVM"), ("jax", "JAX"), ("max", "Mojo and MAX")):
        if importlib.util.find_spec(package) and (problem := apart.problem(package)):
            rows.append(Row(name, "limited", problem.sentence, problem.mend))
    return rows


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# ---- the doctor ----------------------------------------------------------------------------------------------------


def main(as_json: bool) -> int:
    """Print every row. Returns 0 when the course can run here in either mode, else 1."""
    rows = []

    def add(row: Row) -> None:
        rows.append(row)
        if not as_json:
            print(f"{row.state:8} {row.name:20} {row.sentence}", flush=True)
            if row.mend and row.state != "ok":
                print(f"{'':29} Mend: {row.mend}", flush=True)

    for row in checks():
        add(row)
    ready = blocking() is None
    if ready:
        from . import trials

        for row in trials.rows():
            add(row)
        ready = not any(row.needed and row.state == "missing" for row in rows)
    mode, why = (machine.here().mode, machine.here().why) if ready else (None, "")
    if as_json:
        listed = [asdict(row) for row in rows]
        print(json.dumps({"ready": ready, "mode": mode, "why": why, "rows": listed}, indent=1))
    elif ready:
        print(f"\nThe course can run here, in {mode.upper()} mode.")
    else:
        print("\nThe course cannot run here yet: mend what is missing above.")
    return 0 if ready else 1
