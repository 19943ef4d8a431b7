"""The GEMM ladder's host side: which kernels there are, how each is launched, and what is refused.

A rung is one kernel in `09_gemm/NN_name.cu`, named `gemm`; its head says the idea. Sizes are macros that come from
here. `RUNGS` lists them: `gemm(a, b, 5)`, `gemm(x, w, "producer_consumer")`, or `RUNGS[4](a, b)`.

* fp32, on CUDA cores: c = a @ b for a (M, K), b (K, N), c (M, N).
* bf16 and fp16, on tensor cores: y = x @ w.T for x (M, K), w (N, K), y (M, N), as a linear layer holds them; sums are
  fp32. From TMA on, kernels take `TensorMap`s in place of pointers.

All tensors are contiguous, on the current GPU (on the CPU in CPU mode, for the rungs that its runner can run), and
the launch is on torch's current stream.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from pathlib import Path

import torch

from helpers import ROOT, cuda, machine

KERNELS = ROOT / "notebooks" / "09_gemm"
HALVES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MOST = 2**31 - 2**10
"""Rows or columns: a kernel may step one tile beyond them before it compares."""


@dataclass(frozen=True)
class Config:
    """Sizes of a kernel. tile: (BM, BN, BK) elements; threads a block; dynamic shared memory in bytes; macros: more
    of them, as "STAGES=4"; boxes: (rows, columns) of the tiles that TMA moves, of x, of w and, if stored so, of y."""

    tile: tuple[int, int, int]
    threads: int
    shared: int = 0
    macros: tuple[str, ...] = ()
    boxes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Rung:
    """One kernel. configs: its sizes, the first that fits the card's shared memory counts.

    arch: the least it runs on, "sm_80"; with an "a", "sm_90a", the only one. multiples: what K and N must be multiples
    of; where K's is more than 1, tensors begin at multiples of 16 bytes. wide: indices are 64 bits. cpu: the CPU
    runner can run it. grid: "tiles" (x: tiles of N, y: tiles of M) or "persistent" (one block an SM at most, and no
    more than its number of rounds needs, which was faster on an H200), rounded to whole clusters of `cluster` blocks.
    gelu: with GELU=1 and a last parameter, the bias, it computes gelu(x @ w.T + bias).
    Parameters of the kernel: a, b, c (x, w, y; the first `boxes` of them as tensor maps), int M, int N, int K.
    """

    number: int
    name: str
    configs: tuple[Config, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    arch: str = "sm_75"
    multiples: tuple[int, int] = (1, 1)
    wide: bool = False
    cpu: bool = True
    grid: str = "tiles"
    cluster: int = 1
    gelu: bool = False

    def __str__(self) -> str:
        return f"{self.number:02} {self.name}"

    @property
    def path(self) -> Path:
        return KERNELS / f"{self.number:02}_{self.name}.cu"

    @cached_property
    def code(self) -> str:
        """The kernel's text."""
        return self.path.read_text(encoding="utf-8")

    @property
    def idea(self) -> str:
        """One line, the first of the kernel's head."""
        return self.code.splitlines()[0].partition(": ")[2]

    @property
    def linear(self) -> bool:
        """Whether it computes x @ w.T, rather than a @ b."""
        return torch.float32 not in self.dtypes

    def why_not(self, arch: str) -> str:
        """Why it is not for cards of `arch` ("sm_86"), in a sentence; "" where it is."""
        number, exact = _number(self.arch), self.arch.endswith("a")
        if exact and _number(arch) != number:
            return f"{self} is written in instructions that only {self.arch[:-1]} has, and this is {arch}."
        if _number(arch) < number:
            return f"{self} needs instructions that came with {self.arch}, and this is {arch}."
        if all(c.shared > machine.shared_limit(arch.rstrip("a")) for c in self.configs):
            least, most = min(c.shared for c in self.configs), machine.shared_limit(arch.rstrip("a"))
            return f"{self} takes {least:,} bytes of shared memory a block, and {arch} has {most:,}."
        return ""

    def config(self, arch: str = "") -> Config:
        """The sizes it has on a card of `arch`, by default this machine's. ValueError where it is not for them."""
        arch = arch or machine.here().arch
        if why := self.why_not(arch):
            raise ValueError(why)
        return next(c for c in self.configs if c.shared <= machine.shared_limit(arch.rstrip("a")))

    def sized_for(self, arch: str) -> "Rung":
        """This rung, on whatever card, with no sizes but those that a card of `arch` has the shared memory for.

        ValueError where it has none."""
        limit = machine.shared_limit(arch.rstrip("a"))
        if not (fitting := tuple(c for c in self.configs if c.shared <= limit)):
            raise ValueError(f"{self} has no sizes for the {limit:,} bytes of shared memory of {arch}.")
        return replace(self, configs=fitting)

    def options(self, arch: str = "", dtype: torch.dtype | None = None, gelu: bool = False) -> tuple[str, ...]:
        """What it is compiled with for `arch` and `dtype`, by default the first that the card has: -D BM, BN, BK,
        THREADS, those of its configuration, for tensor cores ELEMENT (__nv_bfloat16 or __half) and GELU (0 or 1)."""
        config = self.config(arch)
        macros = [f"{n}={size}" for n, size in zip(("BM", "BN", "BK"), config.tile, strict=True)]
        macros += [f"THREADS={config.threads}", *config.macros]
        if self.linear:
            dtype = dtype or (torch.float16 if _number(arch or machine.here().arch) < 80 else self.dtypes[0])
            macros += [f"ELEMENT={HALVES[dtype]}", f"GELU={int(gelu)}"]
        target = [f"-arch={self.arch}"] if self.arch.endswith("a") else [f"-arch={arch}"] if arch else []
        included = [f"-I{KERNELS}"] if '#include "' in self.code else []
        return (*(f"-D{macro}" for macro in macros), *included, *target)

    def binary(self, arch: str = "", dtype: torch.dtype | None = None, gelu: bool = False) -> cuda.Binary:
        """It compiled: PTX, SASS, registers; by default for this machine's card, or sm_90 without one."""
        return cuda.compile(self.code, options=self.options(arch, dtype, gelu))

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out=None, bias=None) -> torch.Tensor:
        """a @ b, or x @ w.T; written into `out` if there is one. ValueError for what it does not take."""
        M, N, K = self._sizes(a, b, bias)
        names = ("x", "w", "out", "bias") if self.linear else ("a", "b", "out", "bias")
        given = {n: t for n, t in zip(names, (a, b, out, bias), strict=True) if t is not None}
        self._check(given, a.dtype, M, N, K)
        if out is None:
            out = torch.empty((M, N), device=a.device, dtype=a.dtype)
        if not out.numel():
            return out
        if not K:
            return out.zero_() if bias is None else out.copy_(torch.nn.functional.gelu(bias, approximate="tanh"))
        kernel, config = self._ready(a.dtype, bias is not None)
        operands = [a, b, out]
        for i, box in enumerate(config.boxes):
            operands[i] = cuda.tensor_map(operands[i], box)
        arguments = (*operands, M, N, K) if bias is None else (*operands, M, N, K, bias)
        kernel(self.blocks(M, N), (config.threads,), arguments, shared_mem=config.shared)
        return out

    def _ready(self, dtype: torch.dtype, gelu: bool) -> tuple[cuda.Kernel, Config]:
        """The compiled kernel and its sizes here; looked up once, since a short product waits for its launch."""
        if (dtype, gelu) not in self._kernels:
            self._kernels[dtype, gelu] = _kernel(self.code, self.options(dtype=dtype, gelu=gelu)), self._here
        return self._kernels[dtype, gelu]

    @cached_property
    def _kernels(self) -> dict:
        return {}

    @cached_property
    def _here(self) -> Config:
        return self.config()

    @cached_property
    def _why_not_here(self) -> str:
        return self.why_not(machine.here().arch)

    def blocks(self, M: int, N: int) -> tuple[int, ...]:
        """The grid for a product of M x N."""
        BM, BN, _ = self._here.tile
        across, down = ceil(N / BN), ceil(M / BM)
        if self.grid == "tiles":
            return across, ceil(down / self.cluster) * self.cluster
        clusters = ceil(across * down / self.cluster)
        at_once = (machine.here().sms or clusters * self.cluster) // self.cluster
        return (ceil(clusters / ceil(clusters / at_once)) * self.cluster,)

    def _sizes(self, a: torch.Tensor, b: torch.Tensor, bias) -> tuple[int, int, int]:
        """M, N, K of operands whose shapes fit together."""
        inner = -1 if self.linear else 0
        if not all(isinstance(t, torch.Tensor) for t in (a, b)):
            raise ValueError(f"{self} takes torch tensors, not {type(a).__name__} and {type(b).__name__}.")
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[inner]:
            wanted = "x (M, K) and w (N, K)" if self.linear else "a (M, K) and b (K, N)"
            raise ValueError(f"{self} takes {wanted}, not {tuple(a.shape)} and {tuple(b.shape)}.")
        (M, K), N = a.shape, b.shape[1 + inner]
        if bias is not None and tuple(bias.shape) != (N,):
            raise ValueError(f"{self} takes a bias of {N} elements, one a column, not of shape {tuple(bias.shape)}.")
        return M, N, K

    def _check(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype, M: int, N: int, K: int) -> None:
        """Refuse, with a sentence, what would be computed wrongly or end the process."""
        if self._why_not_here:
            raise ValueError(self._why_not_here)
        out = tensors.get("out")
        if out is not None and tuple(out.shape) != (M, N):
            raise ValueError(f"{self} writes ({M}, {N}), but out is {tuple(out.shape)}.")
        if max(M * N, M * K, N * K) >= 2**31 and not self.wide:
            raise ValueError(f"{self} counts elements in 32 bits, and M, N, K = {M:,}, {N:,}, {K:,} make more.")
        device = torch.device("cuda", torch.cuda.current_device()) if machine.gpu() else torch.device("cpu")
        for name, t in tensors.items():
            if t.dtype not in self.dtypes or t.dtype != dtype:
                known = " or ".join(_short(d) for d in self.dtypes)
                raise ValueError(f"{self} takes {known}, the same for all tensors, but {name} is {_short(t.dtype)}.")
            if t.device != device:
                raise ValueError(f"{self} runs on {str(device)!r}, but {name} is on {str(t.device)!r}.")
            if not t.is_contiguous():
                raise ValueError(f"{self} takes contiguous tensors; {name} has strides {t.stride()}: .contiguous().")
            if t.data_ptr() % 16 and self.multiples[0] > 1:
                raise ValueError(f"{self} reads 16 bytes at a time, but {name} begins between them: .clone() it.")
            if out is not None and name != "out" and _overlap(t, out):
                raise ValueError(f"{self} cannot write into out while it reads {name} there: they share memory.")
        if max(M, N, K) > MOST:
            raise ValueError(f"{self} counts rows and columns in 32 bits: M, N and K are {MOST:,} at most.")
        if dtype == torch.bfloat16 and _number(machine.here().arch) < 80:
            raise ValueError(f"{machine.here().arch} has no bfloat16 on its tensor cores: pass float16.")
        for name, size, multiple in zip("KN", (K, N), self.multiples, strict=True):
            if size % multiple:
                raise ValueError(f"{self} takes {name} that are multiples of {multiple}, not {size}: pad with zeros.")
        if not machine.gpu() and not self.cpu:
            raise machine.NotReady(f"{self} is written in a GPU's own instructions, and this is CPU mode.")


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    low, start = one.data_ptr(), other.data_ptr()
    return low < start + other.nbytes and start < low + one.nbytes


@cache
def _kernel(code: str, options: tuple[str, ...]) -> cuda.Kernel:
    """A text with its options is compiled and loaded once a process."""
    return cuda.RawModule(code=code, options=options).get_function("gemm")


HALF = (torch.bfloat16, torch.float16)
RUNGS = (
    Rung(1, "naive", (Config((32, 32, 1), 1024),), wide=True),
    Rung(2, "coalesced", (Config((32, 32, 1), 1024),), wide=True),
    Rung(3, "shared", (Config((32, 32, 32), 1024),), wide=True),
    Rung(4, "register_tile_1d", (Config((64, 64, 8), 512, macros=("TM=8",)),), wide=True),
    Rung(5, "register_tile_2d", (Config((128, 128, 8), 256, macros=("TM=8", "TN=8")),), wide=True),
    Rung(6, "vector_loads", (Config((128, 128, 8), 256, macros=("TM=8", "TN=8")),), multiples=(4, 4), wide=True),
    Rung(7, "no_bank_conflicts", (Config((128, 128, 8), 256, macros=("TM=8", "TN=8")),), multiples=(4, 4), wide=True),
    Rung(8, "double_buffering", (Config((128, 128, 8), 256, macros=("TM=8", "TN=8")),), multiples=(4, 4), wide=True),
    Rung(9, "warp_tiles", (
        Config((128, 128, 16), 128, macros=("TM=8", "TN=16", "WM=64", "WN=64", "BLOCKS=2")),
    ), multiples=(4, 4), wide=True),
    Rung(10, "wmma", (
        Config((128, 128, 64), 128, 73_728, ("WM=64", "WN=64")),
        Config((128, 128, 32), 128, 40_960, ("WM=64", "WN=64")),  # sm_75
    ), HALF, multiples=(8, 1), wide=True),
    Rung(11, "mma_sync", (
        Config((128, 256, 64), 256, 196_608, ("WM=64", "WN=64", "STAGES=4", "GROUP=8")),
        Config((128, 256, 64), 256, 147_456, ("WM=64", "WN=64", "STAGES=3", "GROUP=8")),  # sm_80
        Config((128, 128, 64), 128, 98_304, ("WM=64", "WN=64", "STAGES=3", "GROUP=8")),  # sm_86, 89, 120
    ), HALF, "sm_80", multiples=(8, 1), wide=True, cpu=False, grid="persistent"),
    # From here on shared memory is a kilobyte more than the tiles, so that they can begin at a multiple of 1024.
    Rung(12, "tma_wgmma", (
        Config((64, 64, 64), 128, 17_408, boxes=((64, 64), (64, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False),
    Rung(13, "larger_tiles", (
        Config((128, 128, 64), 128, 33_792, boxes=((128, 64), (128, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False),
    Rung(14, "producer_consumer", (
        Config((128, 128, 64), 256, 164_864, ("STAGES=5",), boxes=((128, 64), (128, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False),
    Rung(15, "two_consumers", (
        Config((128, 256, 64), 384, 197_632, ("STAGES=4",), boxes=((128, 64), (256, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False),
    Rung(16, "persistent", (
        Config((128, 256, 64), 384, 197_632, ("STAGES=4", "GROUP=16"), boxes=((128, 64), (256, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False, grid="persistent"),
    Rung(17, "ptx_barriers", (
        Config((128, 256, 64), 384, 197_632, ("STAGES=4", "GROUP=16"), boxes=((128, 64), (256, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False, grid="persistent"),
    Rung(18, "cluster_multicast", (
        Config((128, 256, 64), 384, 197_632, ("STAGES=4", "GROUP=4", "CLUSTER=2"), boxes=((128, 64), (128, 64))),
    ), HALF, "sm_90a", multiples=(8, 2), wide=True, cpu=False, grid="persistent", cluster=2),
    Rung(19, "async_stores", (
        Config((128, 256, 64), 384, 230_400, ("STAGES=4", "GROUP=8", "CLUSTER=2"),
               boxes=((128, 64), (128, 64), (64, 64))),
    ), HALF, "sm_90a", multiples=(8, 8), wide=True, cpu=False, grid="persistent", cluster=2),
    Rung(20, "tile_order", (
        Config((128, 256, 64), 384, 230_400, ("STAGES=4", "GROUP=16"), boxes=((128, 64), (256, 64), (64, 64))),
        Config((128, 128, 64), 384, 164_864, ("STAGES=4", "GROUP=16"), boxes=((128, 64), (128, 64), (64, 64))),
        # the second is the best that fits sm_80's shared memory: `sized_for`
    ), HALF, "sm_90a", multiples=(8, 8), wide=True, cpu=False, grid="persistent", gelu=True),
)  # fmt: skip
FUSED = Rung(21, "pingpong", (
    Config((192, 128, 64), 384, 230_400, ("STAGES=5", "GROUP=16", "CLUSTER=2", "PIECE=96"),
           boxes=((96, 64), (128, 64), (96, 64))),
), HALF, "sm_90a", multiples=(8, 8), wide=True, cpu=False, grid="persistent", cluster=2, gelu=True)  # fmt: skip
"""What 20 becomes where the epilogue counts. Its tile is made for tall x: no step of a ladder timed on squares."""
ALL = (*RUNGS, FUSED)


def find(rung: int | str) -> Rung:
    """A rung by its number or its name. ValueError for what is none."""
    found = [r for r in ALL if rung in (r.number, r.name, str(r))]
    if not found:
        raise ValueError(f"{rung!r} is no rung: they are {', '.join(map(str, ALL))}.")
    return found[0]


def gemm(a: torch.Tensor, b: torch.Tensor, rung, out=None) -> torch.Tensor:
    """a @ b (fp32 rungs) or a @ b.T (tensor-core rungs) by one rung: its number, its name or the Rung itself."""
    return (find(rung) if isinstance(rung, int | str) else rung)(a, b, out)


def linear_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out=None) -> torch.Tensor:
    """gelu(x @ w.T + b), tanh form, for x (M, K), w (N, K), b (N,), fp16 or bf16; sums are fp32."""
    return FUSED(x, w, out, bias=b)


def compiled(rungs=RUNGS, arch: str = "") -> dict[int, cuda.Binary]:
    """The rungs that are for `arch` (by default this machine's), compiled side by side, by number."""
    arch = arch or machine.here().arch
    chosen = [r for r in rungs if not r.why_not(arch)]
    made = cuda.compile_all((r.code, arch, r.options(arch)) for r in chosen)
    return dict(zip([r.number for r in chosen], made, strict=True))
