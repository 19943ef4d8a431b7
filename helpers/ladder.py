"""The course's workloads on every rung that has them: what each rung gave and what it cost, from the records.

`WORKLOADS` says, for each, the least it must move and compute and the ways that the lessons took; `rows(workload)` is
its table, `plots.climb(points())` the chart of all, from the reference's record or from another, such as that of the
reader's card (`OWN`). Nothing is measured here: a way names the id of the figure that its lesson declares, the text
whose lines are counted, and its tool, of `TOOLS`.
"""

import re
import subprocess
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from . import ROOT, WORK, machine, records, source, timing
from .records import Measurement, declared

RUNGS = ("library", "AI compiler", "Triton", "CUDA", "Mojo")
"""The rungs of the ladder, from the top."""


@dataclass(frozen=True)
class Tool:
    """A tool of a rung: whose cards it reaches, which of NVIDIA's generations, and what its user has to know."""

    rung: str
    vendors: str
    generations: str
    know: str


_ALL, _HOPPER = "sm_75 and later", "sm_90 only"
TOOLS = {
    "PyTorch, an operator a call": Tool("library", "NVIDIA, AMD, Intel", _ALL, "PyTorch"),
    "cuBLASLt": Tool("library", "NVIDIA", _ALL, "layouts, which epilogues there are"),
    "cuDNN attention": Tool("library", "NVIDIA", "sm_80 and later", "which backend takes which mask"),
    "FlashAttention-2": Tool("library", "NVIDIA, AMD", "sm_80 and later", "which backend takes which mask"),
    "torch.compile": Tool("AI compiler", "NVIDIA, AMD, Intel", _ALL, "graphs, guards, what may be fused"),
    "torch.compile, max-autotune": Tool("AI compiler", "NVIDIA, AMD, Intel", _ALL, "the same, and its choices"),
    "FlexAttention": Tool("AI compiler", "NVIDIA, AMD", "sm_80 and later", "scores and masks as functions"),
    "TVM": Tool("AI compiler", "NVIDIA, AMD, Intel, Apple", _ALL, "schedules, its tensor-core rules"),
    "XLA": Tool("AI compiler", "NVIDIA, AMD, TPUs", _ALL, "JAX, how to read HLO"),
    "Triton": Tool("Triton", "NVIDIA, AMD, Intel", _ALL, "tiles, masks, memory traffic"),
    "Gluon": Tool("Triton", "one generation a source", _HOPPER, "layouts, barriers, warps' roles"),
    "CUDA": Tool("CUDA", "NVIDIA", _ALL, "threads, warps, shared memory, vector loads"),
    "CUDA with wgmma and TMA": Tool("CUDA", "NVIDIA", _HOPPER, "the same, and the instructions of one card"),
    "Mojo": Tool("Mojo", "NVIDIA, AMD, Apple", _ALL, "Mojo's types, tiles or threads"),
    "MAX": Tool("Mojo", "NVIDIA, AMD", _ALL, "graphs of its operators"),
}
"""By name. Vendors as their documentation states them; lessons 06 and 11 compile for two of them."""


@dataclass(frozen=True)
class Way:
    """One way to run a workload.

    time: the id of its time. code: where its text stands: ("06_triton_matmul", "linear_gelu"), a name in capitals
    being a program as a string; or paths in notebooks/ of `.cu` files; empty where a lesson writes a single call.
    moved: the id of its DRAM bytes, counted: MB, or a multiple of the least.
    build: the id of the seconds until it runs first, compiling or tuning.
    """

    tool: str
    time: str
    code: tuple[str, ...] = ()
    moved: str = ""
    build: str = ""

    @cached_property
    def lines(self) -> int:
        """Lines of code to write: neither blank nor a comment nor a docstring; 1 for a single call."""
        if not self.code:
            return 1
        if self.code[0].endswith((".cu", ".cuh")):
            return sum(code_lines((ROOT / "notebooks" / name).read_text(), "//") for name in self.code)
        file, name = self.code
        if name.isupper():
            return code_lines(source.load(file, name), "#" if self.tool == "Mojo" else "//")
        return code_lines(source.saved(file, name)[1], ("# ", "//"))


def code_lines(text: str, comment: str | tuple[str, ...]) -> int:
    """Lines that are neither blank nor a comment nor a docstring. A program in a raw string counts."""
    text = re.sub(r'(\br"""(?:[^"]|"(?!""))*""")|"""(?:[^"]|"(?!""))*"""', lambda found: found[1] or "", text)
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith(comment))


BY_HAND = {
    "products, from naive to TMA and wgmma: CUDA C": ("09_gemm", "09_gemm.py"),
    "one row, cache, mask, router: CUDA C": ("10_kernels", "10_kernels.py"),
    "a product: Gluon": ("06_gemm_gluon.py",),
    "attention: Gluon": ("07_attention_gluon.py",),
}
"""What the course wrote by hand and keeps in files of their own, in notebooks/: kernels, and their host side."""


def cost() -> list[dict]:
    """What these took: lines of code, commits that changed them, days from the first to the last of these, and hours
    of the clock in which there was one. Raises `machine.NotReady` where the course's history is not at hand."""
    if not (ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository") != ["false"]:
        raise machine.NotReady("The course's history is not here, or not all of it.", "git fetch --unshallow")
    rows = []
    for what, names in BY_HAND.items():
        paths = [ROOT / "notebooks" / name for name in names]
        files = [file for path in paths for file in (sorted(path.glob("*.cu*")) if path.is_dir() else [path])]
        stamps = [int(line) for line in _git("log", "--format=%at", "--", *map(str, paths))]
        if not stamps:  # files without their history, in some other repository
            raise machine.NotReady("The course's history is not here.", "git clone it")
        rows.append(
            {
                "kernels by hand": what,
                "lines": sum(code_lines(f.read_text(), "#" if f.suffix == ".py" else "//") for f in files),
                "commits": len(stamps),
                "days": (max(stamps) - min(stamps)) // 86400 + 1,
                "hours with a commit": len({stamp // 3600 for stamp in stamps}),
            }
        )
    return rows


def _git(*arguments: str) -> list[str]:
    """The lines that git prints; none where there is no git."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class Workload:
    """What is computed, the least bytes of it (`reads`, `writes`), its operations, and the rate that is theirs: that
    of "fp16" matrix products or of "fp32" arithmetic."""

    name: str
    reads: int
    writes: int
    flops: float
    unit: str
    ways: tuple[Way, ...]

    @property
    def least(self) -> int:
        """Bytes."""
        return self.reads + self.writes

    def floor(self, ceilings: timing.Ceilings) -> float:
        """µs that no way beats: bytes at the bandwidth of a copy (of a read, where hardly anything is written),
        operations at the rate of a large product, or an empty kernel, whichever takes longest."""
        memory = self.least / (ceilings.copy if self.writes > 0.05 * self.least else ceilings.read)
        rate = ceilings.fp16_matmul if self.unit == "fp16" else ceilings.fp32_matmul
        return max(memory * 1e6, self.flops / rate * 1e6, ceilings.empty_kernel_us)


def _linear(m: int, n: int, k: int, *more: Way) -> Workload:
    shape = f"{m}x{n}x{k}"
    first = shape == "16384x4096x1024"  # the one whose bytes were counted

    def way(tool, name, *code, build=""):
        counted = f"fusion_bytes.{name}.{shape}" if first and name != "max_autotune" else ""
        return Way(tool, f"linear_gelu.{name}.{shape}", code, counted, build)

    return Workload(
        f"linear + GELU, {m} × {n} × {k}",
        2 * (m * k + n * k + n),
        2 * m * n,
        2 * m * n * k,
        "fp16",
        (
            way("PyTorch, an operator a call", "eager", "03_torch_compile", "linear_gelu"),
            way("cuBLASLt", "cublaslt", "03_torch_compile", "linear_gelu_epilogue"),
            way("torch.compile", "compile", "03_torch_compile", "linear_gelu", build="compile.seconds.inductor"),
            way("torch.compile, max-autotune", "max_autotune", "03_torch_compile", "linear_gelu",
                build="compile.seconds.max_autotune"),
            way("TVM", "tvm", "04_tvm_xla", "layer_by_rule", build="compile.seconds.tvm"),
            way("XLA", "xla", "04_tvm_xla", "jax_layer", build="compile.seconds.xla"),
            *more,
        ),
    )  # fmt: skip


_BIG, _K, _N = 16384 * 4096, 8192, 4096
_CACHE = 16 * 8 * 32768 * 128  # elements of K, and of V
_QUERY = 2 * 16 * 32 * 128  # bytes of q, and of the output
WORKLOADS = (
    _linear(
        16384, 4096, 1024,
        Way("Triton", "linear_gelu.triton.16384x4096x1024", ("06_triton_matmul", "linear_gelu"),
            "linear_gelu.bytes.fused"),
        Way("Gluon", "linear_gelu.gluon.16384x4096x1024", ("06_gemm_gluon", "linear_gelu")),
        Way("CUDA with wgmma and TMA", "linear_gelu.cuda_lesson.cuda.16384x4096x1024",
            ("09_gemm/21_pingpong.cu", "09_gemm/hopper.cuh"), "linear_gelu.cuda_bytes.fused"),
        Way("Mojo", "linear_gelu.mojo.16384x4096x1024", ("11_mojo_max", "LINEAR")),
        Way("MAX", "linear_gelu.max.16384x4096x1024", build="compile.seconds.max"),
    ),
    _linear(4096, 4096, 4096),
    _linear(512, 16384, 4096),
    Workload("softmax, 16384 × 4096, fp32", 4 * _BIG, 4 * _BIG, 5 * _BIG, "fp32", (
        Way("PyTorch, an operator a call", "ladder.softmax.library", ("00_start_here", "softmax_library")),
        Way("torch.compile", "ladder.softmax.compiler", ("00_start_here", "softmax_formula")),
        Way("Triton", "ladder.softmax.triton", ("05_triton_first_kernels", "softmax")),
        Way("CUDA", "ladder.softmax.cuda", ("08_cuda_first_kernels", "SOFTMAX")),
    )),
    Workload("RMSNorm, 16384 × 4096, fp16", 2 * _BIG, 2 * _BIG, 4 * _BIG, "fp32", (
        Way("PyTorch, an operator a call", "compile.rms_norm.library"),
        Way("torch.compile", "compile.rms_norm.compiled", ("03_torch_compile", "rms_norm"),
            "compile.bytes.rms_norm_compiled"),
        Way("Triton", "softmax.rows.4096.rmsnorm", ("05_rmsnorm_rows", "rmsnorm_rows")),
    )),
    Workload("GEMV, 1 × 8192 × 4096, fp16", 2 * (_K * _N + _K), 2 * _N, 2 * _K * _N, "fp32", (
        Way("PyTorch, an operator a call", "gemv.cublas.1x8192x4096"),
        Way("Triton", "gemv.triton.1x8192x4096", ("10_triton", "gemv")),
        Way("CUDA", "gemv.cuda.1x8192x4096", ("10_kernels/01_gemv.cu",)),
    )),
    Workload("GEMV, 1 × 8192 × 4096, int4 weights", _K * _N // 2 + 2 * _K * _N // 128 + 2 * _K, 2 * _N, 2 * _K * _N,
             "fp32", (
        Way("PyTorch, an operator a call", "gemv_int4.cublas.1x8192x4096"),
        Way("CUDA", "gemv_int4.cuda.1x8192x4096", ("10_kernels/02_gemv_int4.cu",)),
    )),
    Workload("attention, prefill, 4 × 16 heads × 4096 × 128", 2 * 3 * 4 * 16 * 4096 * 128, 2 * 4 * 16 * 4096 * 128,
             4 * 4 * 16 * 4096**2 * 128, "fp16", (
        Way("PyTorch, an operator a call", "attention.d128.4k.math"),
        Way("FlashAttention-2", "attention.d128.4k.fa2"),
        Way("cuDNN attention", "attention.d128.4k.cudnn"),
        Way("FlexAttention", "attention.d128.4k.flex"),
        Way("Triton", "attention.d128.4k.triton", ("07_triton_attention", "fast")),
        Way("Gluon", "attention.d128.4k.gluon", ("07_attention_gluon", "attention_gluon_kernel")),
    )),
    Workload("attention, decode, 16 × 32 heads × 32768 × 128", 4 * _CACHE + _QUERY, _QUERY,
             4 * 16 * 32 * 32768 * 128, "fp16", (
        Way("PyTorch, an operator a call", "attention.decode.sdpa"),
        Way("Triton", "attention.decode.split", ("07_triton_attention", "decode")),
    )),
    Workload("attention, decode, the same with an int8 cache", 2 * _CACHE + 2 * 4 * 16 * 8 * 32768 + _QUERY, _QUERY,
             4 * 16 * 32 * 32768 * 128, "fp16", (
        Way("CUDA", "kv_int8.int8", ("10_kernels/05_kv_decode.cu", "10_kernels/06_kv_combine.cu")),
    )),
    Workload("router, 4096 tokens, 8 of 64 experts", 4 * 4096 * 64, 12 * 4096 * 8, 8 * 4096 * 64, "fp32", (
        Way("PyTorch, an operator a call", "router.torch.sort", ("10_hand_written", "router_sort")),
        Way("torch.compile", "router.compile.sum", ("10_hand_written", "router_sum")),
        Way("CUDA", "router.cuda", ("10_kernels/08_router.cu",)),
    )),
)  # fmt: skip
"""Each with the ways that the lessons took, from the top of the ladder down."""


_CODES, _TOKENS = 2 * 14336 * 4096, 16
CAPSTONE = Workload(
    "gated projection, 16 × 14336 × 4096, int4 weights",
    _CODES // 2 + 2 * _CODES // 128 + 2 * _TOKENS * 4096 + _TOKENS,
    2 * _TOKENS * 14336,
    2 * _TOKENS * _CODES,
    "fp16",
    (
        Way("PyTorch, an operator a call", "capstone.eager.us", ("12_choosing", "by_library")),
        Way("torch.compile", "capstone.compile.us", ("12_choosing", "by_compiler")),
        Way("Triton", "capstone.triton.us", ("12_choosing", "gated_projection")),
        Way("CUDA", "capstone.cuda.us", ("12_choosing", "by_cuda")),
    ),
)
"""What lab 12 asks for, and the course's own answers. It is not on the chart of lesson 12, which comes before."""


OWN = WORK / "ladder.json"
"""The record of the reader's card, made by `python -m helpers measure --ladder`."""


def ids() -> set[str]:
    """The figures that the ladder is made of."""
    named = (key for workload in WORKLOADS for way in workload.ways for key in (way.time, way.moved, way.build))
    return {*filter(None, named), *timing.CEILINGS}


def ceilings(record: Path | None = None) -> timing.Ceilings:
    """What a record's GPU reaches, whatever the mode: recorded times stand over that card's floor."""
    found = records.recorded(*timing.CEILINGS, path=record)
    copy, read, fp16, fp32, empty = (found[key].value for key in timing.CEILINGS)
    return timing.Ceilings(copy * 1e12, read * 1e12, fp16 * 1e12, fp32 * 1e12, empty, f"recorded: {found.where}")


def over_floor(workload: Workload, way: Way, record: Path | None = None) -> Measurement:
    """The way's time over the workload's floor, both of one record (the reference's by default); NaN where it is not
    recorded yet."""
    time, floor = records.recorded(way.time, path=record)[way.time], workload.floor(ceilings(record))
    return replace(time, value=time.value / floor, low=time.low / floor, high=time.high / floor, unit="x floor")


def rows(workload: Workload, record: Path | None = None) -> list[dict]:
    """A line a way, from the top of the ladder down: what it gave and what it cost."""
    out = []
    for way in workload.ways:
        tool = TOOLS[way.tool]
        found = records.recorded(*filter(None, (way.time, way.moved, way.build)), path=record)
        over = over_floor(workload, way, record).value
        out.append(
            {
                "rung": tool.rung,
                "tool": way.tool,
                "µs": "–" if over != over else found[way.time].value,
                "over the floor": "–" if over != over else over,
                "bytes over the least": _over_least(found[way.moved], workload) if way.moved else "–",
                "lines": way.lines,
                "build, s": found[way.build].value if way.build else "–",
                "vendors": tool.vendors,
                "NVIDIA's cards": tool.generations,
                "what you had to know": tool.know,
                "measured in": _lessons().get(way.time, "–"),
            }
        )
    return out


@cache
def _lessons() -> dict[str, str]:
    """The number of the lesson that declares each figure."""
    return {key: path.name[:2] for path in sorted((ROOT / "notebooks").glob("*.ipynb")) for key in declared(path)}


def _over_least(moved: Measurement, workload: Workload) -> float:
    return moved.value * 1e6 / workload.least if moved.unit == "MB" else moved.value


def points(record: Path | None = None) -> dict[str, list[tuple[str, str, Measurement]]]:
    """For the chart: by workload, the (tool, rung, time over the floor) of each way."""
    return {w.name: [(way.tool, TOOLS[way.tool].rung, over_floor(w, way, record)) for way in w.ways] for w in WORKLOADS}
