"""What this machine is: GPU or CPU mode, its limits, the rates on its datasheet.

The mode is decided once, when `helpers` is imported: "gpu" where an NVIDIA card of compute capability 7.5 or
later and a CUDA build of torch are there, else "cpu". `HELPERS_MODE=cpu` or `=gpu` forces it. In CPU mode
`TRITON_INTERPRET=1` is set, which Triton reads while it is being imported: hence `helpers` before `triton`.
"""

import os
import platform
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

OLDEST = (7, 5)
"""Compute capability of the oldest card the course runs on (T4)."""


class Plain:
    """Mixed into an exception whose message says all: IPython shows it without a traceback."""

    def _render_traceback_(self):
        return [str(self)]


class NotReady(Plain, RuntimeError):
    """This machine cannot do what was asked: one sentence, and the command that mends it."""

    def __init__(self, sentence: str, mend: str = ""):
        super().__init__(sentence + (f"\nMend: {mend}" if mend else ""))
        self.sentence, self.mend = sentence, mend


@dataclass(frozen=True)
class Peaks:
    """Rates on a card's datasheet: bytes/s of its memory; dense fp16 tensor-core and plain fp32 FLOP/s."""

    bytes_per_s: float
    fp16_flops: float
    fp32_flops: float
    source: str


# The names are those that nvidia-smi prints. Dense rates: the datasheets print twice that "with sparsity".
DATASHEETS = {
    "NVIDIA H200": Peaks(4.8e12, 989e12, 67e12, "NVIDIA H200 datasheet, SXM"),
    "NVIDIA H100 80GB HBM3": Peaks(3.35e12, 989e12, 67e12, "NVIDIA H100 datasheet, SXM"),
    "NVIDIA H100 PCIe": Peaks(2.0e12, 756e12, 51e12, "NVIDIA H100 datasheet, PCIe"),
    "NVIDIA A100-SXM4-80GB": Peaks(2.039e12, 312e12, 19.5e12, "NVIDIA A100 datasheet, 80 GB SXM"),
    "NVIDIA A100-SXM4-40GB": Peaks(1.555e12, 312e12, 19.5e12, "NVIDIA A100 datasheet, 40 GB SXM"),
    "NVIDIA L4": Peaks(300e9, 121e12, 30.3e12, "NVIDIA L4 datasheet"),
    "Tesla T4": Peaks(320e9, 65e12, 8.1e12, "NVIDIA T4 datasheet"),
}


# Dense operations of one SM in one cycle: fp16 on tensor cores with fp32 accumulation, and fp32 on CUDA cores (a
# multiply-add counts twice), from the datasheets above and the whitepapers of GA102, AD102, GB100 and GB202.
PER_CYCLE = {
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (512, 256),
}


# KB of shared memory that one block may take where it asks for them: CUDA's programming guide, "Technical
# Specifications per Compute Capability"; and the local data share of AMD's MI300 (CDNA 3 ISA).
SHARED_KB = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
    "sm_121": 99,
    "gfx942": 64,
    "gfx1100": 64,
}


@dataclass(frozen=True)
class Machine:
    """What this machine is. Sizes are in bytes; what a CPU has no counterpart for is 0 or empty there."""

    mode: str
    why: str
    name: str
    capability: tuple[int, int] | None = None
    sms: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    shared_bytes_per_block: int = 0
    shared_bytes_per_sm: int = 0
    registers_per_sm: int = 0
    uuid: str = ""
    driver: str = ""
    peaks: Peaks | None = None

    @property
    def arch(self) -> str:
        """The target of code that is compiled to be read: this card's, or in CPU mode Hopper's."""
        return "sm_{}{}".format(*self.capability) if self.capability else "sm_90"

    def free_bytes(self) -> int:
        """Bytes of memory that are free now, on the card or, in CPU mode, in RAM. What torch keeps for later use
        counts as free."""
        if self.mode == "gpu":
            import torch

            return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        import psutil

        return psutil.virtual_memory().available


def prepare() -> None:
    """Set what must be set before triton is imported. Called by `import helpers`.

    It raises nothing about the machine: that is for `helpers.start()` and the doctor to say.
    """
    try:
        mode = _mode()[0]
    except NotReady:
        return
    if mode == "cpu":
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        if os.environ.get("TRITON_INTERPRET") == "1":
            try:
                from . import interpreter
            except ImportError:  # numpy is missing, as the doctor's row of packages says
                return
            interpreter.install()
    else:
        os.environ.pop("TRITON_INTERPRET", None)


@lru_cache(maxsize=1)
def _mode() -> tuple[str, str]:
    """The mode and one sentence that says why. Asking creates no CUDA context."""
    wanted = os.environ.get("HELPERS_MODE", "")
    if wanted not in ("", "cpu", "gpu"):
        raise NotReady(f"HELPERS_MODE={wanted!r} is no mode.", "export HELPERS_MODE=cpu, or =gpu, or unset it")
    if wanted == "cpu":
        return "cpu", "HELPERS_MODE=cpu asks for it"
    reason = _no_gpu()
    if reason is None:
        return "gpu", "a CUDA card and a CUDA build of torch are here"
    if wanted == "gpu":
        raise NotReady(f"HELPERS_MODE=gpu, but {reason}.", "python -m helpers doctor names what is missing")
    return "cpu", reason


def _no_gpu() -> str | None:
    """Why the GPU cannot be used, as a clause; None where it can."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        raise NotReady(f"torch cannot be imported ({error}).", "make clean lab") from error
    if torch.version.hip:
        return "this torch is a ROCm build, and the course's kernels are for NVIDIA cards"
    if not torch.version.cuda:
        return "this torch is a CPU build" + (" although the machine has an NVIDIA driver" if nvidia() else "")
    with warnings.catch_warnings(action="ignore"):  # of a driver that is too old; the doctor's sentence says it
        available = torch.cuda.is_available()
    if not available:
        if not (driver := nvidia()):
            return "no NVIDIA driver was found"
        return f"torch, built for CUDA {torch.version.cuda}, cannot use driver {driver.version} or sees no card"
    if (found := torch.cuda.get_device_capability()) < OLDEST:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found[0]}.{found[1]}, below {OLDEST[0]}.{OLDEST[1]}"
    return None


@dataclass(frozen=True)
class Driver:
    """What NVML says: the driver's version, the newest CUDA it runs, the cards' names and compute capabilities."""

    version: str
    cuda: tuple[int, int]
    cards: tuple[tuple[str, tuple[int, int]], ...]


def nvidia() -> Driver | None:
    """The NVIDIA driver; None where there is none. Asking creates no CUDA context."""
    try:
        import pynvml as nvml
    except ImportError:  # the doctor's row of packages says that nvidia-ml-py is missing; torch still tells of a card
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no library, no driver, no permission: for the course all mean that there is none
        return None
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cards = [(nvml.nvmlDeviceGetName(h), tuple(nvml.nvmlDeviceGetCudaComputeCapability(h))) for h in handles]
        return Driver(nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), tuple(cards))
    finally:
        nvml.nvmlShutdown()


@lru_cache(maxsize=1)
def here() -> Machine:
    """This machine, looked at once."""
    mode, why = _mode()
    if mode == "cpu":
        import psutil

        return Machine("cpu", why, _cpu_name(), memory_bytes=psutil.virtual_memory().total)
    import torch

    p, driver = torch.cuda.get_device_properties(torch.cuda.current_device()), nvidia()
    return Machine(
        "gpu",
        why,
        p.name,
        (p.major, p.minor),
        p.multi_processor_count,
        p.L2_cache_size,
        p.total_memory,
        p.shared_memory_per_block_optin,
        p.shared_memory_per_multiprocessor,
        p.regs_per_multiprocessor,
        f"GPU-{p.uuid}",
        driver.version if driver else "",
        DATASHEETS.get(p.name) or _peaks_by_clock(p),
    )


def _peaks_by_clock(properties) -> Peaks | None:
    """Peaks of a card without a datasheet above: its highest clocks times what it does in a cycle."""
    import pynvml

    per_cycle = PER_CYCLE.get((properties.major, properties.minor))
    if per_cycle is None:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
    cycles = properties.multi_processor_count * 1e6 * pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    memory = 2e6 * pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)  # two transfers a cycle
    width = pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    return Peaks(
        memory * width, cycles * per_cycle[0], cycles * per_cycle[1], "computed from the card's highest clocks"
    )


def shared_limit(arch: str = "") -> int:
    """Bytes of shared memory that one block may take, on `arch` or, without it, here (in CPU mode: sm_90).

    The lesson's kernels choose their tiles by it. Raises ValueError for an architecture that is not in `SHARED_KB`.
    """
    if arch in ("", here().arch) and here().shared_bytes_per_block:
        return here().shared_bytes_per_block
    arch = arch or here().arch
    if arch not in SHARED_KB:
        raise ValueError(f"no limit is known for {arch}; known are {', '.join(SHARED_KB)}")
    return SHARED_KB[arch] * 1024


def gpu() -> bool:
    """True in GPU mode."""
    return _mode()[0] == "gpu"


def device() -> str:
    """The torch device that lessons put tensors on: "cuda" or "cpu"."""
    return "cuda" if gpu() else "cpu"


def pick(*, gpu, cpu):
    """`gpu` in GPU mode, `cpu` in CPU mode: sizes that suit where a cell runs."""
    return gpu if _mode()[0] == "gpu" else cpu


def cache(name: str) -> Path:
    """A folder of this account's for what can be made again (compiled kernels, profiler runs); made if missing."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "gpu-kernel-ladder" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def python_path() -> str:
    """PYTHONPATH for a child process: the checkout first, so that the `helpers` it imports are these."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]))


def installed(*names: str) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def versions() -> dict[str, str]:
    """Versions of what figures depend on: Python, torch, CUDA, triton, cupy, the driver."""
    import torch

    out = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        out["cuda"] = torch.version.cuda
    for distribution, version in installed("triton", "cupy-cuda13x", "cupy-cuda12x").items():
        out[distribution.partition("-")[0]] = version
    if here().driver:
        out["driver"] = here().driver
    return out


def banner() -> str:
    """One line: mode, machine, versions; in CPU mode also why, and what that means for figures."""
    m = here()
    with_versions = ", ".join(f"{k} {v}" for k, v in versions().items())
    if m.mode == "gpu":
        size = f"{m.sms} SMs, {m.l2_bytes / 2**20:.0f} MiB of L2, {m.memory_bytes / 2**30:.0f} GiB"
        return f"GPU mode: {m.name} (compute capability {m.capability[0]}.{m.capability[1]}; {size}). {with_versions}"
    return (
        f"CPU mode ({m.why}): kernels run on {m.name} for their values; "
        f"every time and rate of a GPU was recorded on the one that its label names. {with_versions}"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
