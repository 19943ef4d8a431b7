"""Lesson 10's CUDA kernels, host side: which there are, how each is launched, and what is refused.

A kernel stands in `10_kernels/NN_name.cu` and bears the file's name; its head says the idea. Sizes are macros that come
from here. `PROGRAMS` lists the files; the functions beside them are what the lesson calls:

* `gemv(x, w)`: x @ w.T for one row x; `gemv_int4(x, packed_int4(w))`: the same with weights of 4 bits.
* `quantise_kv(x)` and `decode_kv8(q, k, v, …)`: a cache of keys or values in 8 bits, and one query's attention to it.
* `plan(mask)` and `block_sparse(q, k, v, mask)`: attention to the blocks of keys that a mask names.
* `router(logits, k)`: which experts each token goes to, and in which order an expert finds its tokens.

All tensors are contiguous, on the current GPU (on the CPU in CPU mode, for the kernels that its runner can run), and
the launch is on torch's current stream.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, e, log2
from pathlib import Path
from typing import NamedTuple

import torch

from helpers import ROOT, cuda, machine

KERNELS = ROOT / "notebooks" / "10_kernels"
LOG2_E = log2(e)
LADDER = ROOT / "notebooks" / "09_gemm"
MOST = 2**31 - 1


# --- what all kernels share --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """One file with one kernel.

    sizes: sets of macros, as {"THREADS": 256}, that the functions below launch it with: the tests compile all of them.
    arch: the least it runs on, "sm_80"; with an "a", "sm_90a", the only one. cpu: the CPU runner can run it.
    shared: the most dynamic shared memory that it is launched with, in bytes.
    """

    number: int
    name: str
    sizes: tuple[dict[str, int | str], ...] = ({},)
    arch: str = "sm_75"
    cpu: bool = True
    shared: int = 0

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

    def why_not(self, arch: str) -> str:
        """Why it is not for cards of `arch` ("sm_86"), in a sentence; "" where it is."""
        number, exact = _number(self.arch), self.arch.endswith("a")
        if exact and _number(arch) != number:
            return f"{self} is written in instructions that only {self.arch[:-1]} has, and this is {arch}."
        if _number(arch) < number:
            return f"{self} needs instructions that came with {self.arch}, and this is {arch}."
        return ""

    def options(self, sizes: dict[str, int | str], arch: str = "") -> tuple[str, ...]:
        """NVRTC's options for these macros, and for `arch` where it is given."""
        target = [f"-arch={self.arch}"] if self.arch.endswith("a") else [f"-arch={arch}"] if arch else []
        included = [f"-I{KERNELS}", f"-I{LADDER}"] if '#include "' in self.code else []
        return (*(f"-D{name}={value}" for name, value in sizes.items()), *included, *target)

    def binary(self, sizes: dict[str, int | str] | None = None, arch: str = "") -> cuda.Binary:
        """It compiled: PTX, SASS, registers; by default its first sizes, for this machine's card, or sm_90."""
        return cuda.compile(self.code, options=self.options(self.sizes[0] if sizes is None else sizes, arch))

    def kernel(self, sizes: dict[str, int | str]) -> cuda.Kernel:
        """It compiled with these macros and loaded, once a process. ValueError, NotReady where it cannot run here."""
        if why := self.why_not(machine.here().arch):
            raise ValueError(why)
        if not machine.gpu() and not self.cpu:
            raise machine.NotReady(f"{self} is written in a GPU's own instructions, and this is CPU mode.")
        return _kernel(self.code, self.options(sizes), self.name)


@cache
def _kernel(code: str, options: tuple[str, ...], name: str) -> cuda.Kernel:
    return cuda.RawModule(code=code, options=options).get_function(name)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(who: str, tensors: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]], written=()) -> None:
    """Refuse, with a sentence, tensors that the kernel of `who` would misread.

    tensors: by name, each with the shape and the dtype that it must have. written: names of those the kernel writes.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if machine.gpu() else torch.device("cpu")
    for name, (t, shape, dtype) in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"{who} takes torch tensors, but {name} is of type {type(t).__name__}.")
        if tuple(t.shape) != tuple(shape):
            raise ValueError(f"{who} takes {name} of shape {tuple(shape)} here, not {tuple(t.shape)}.")
        if t.dtype != dtype:
            raise ValueError(f"{who} takes {name} in {_short(dtype)} here, not {_short(t.dtype)}.")
        if t.device != device:
            raise ValueError(f"{who} runs on {str(device)!r}, but {name} is on {str(t.device)!r}.")
        if not t.is_contiguous():
            raise ValueError(f"{who} takes contiguous tensors; {name} has strides {t.stride()}: .contiguous().")
        if t.data_ptr() % 16:
            raise ValueError(f"{who} moves 16 bytes at a time, but {name} begins between them: .clone() it.")
    for out in written:
        for name, (t, *_) in tensors.items():
            if name != out and _overlap(t, tensors[out][0]):
                raise ValueError(f"{who} cannot write {out} while it reads {name} there: they share memory.")


def _matrices(who: str, **tensors: torch.Tensor) -> None:
    """Refuse what is no matrix, so that shapes can be read from it."""
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor) or t.ndim != 2:
            what = f"{t.ndim} dimensions" if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
            raise ValueError(f"{who} takes {name} as a matrix, a tensor of 2 dimensions, but it is {what}.")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    low, start = one.data_ptr(), other.data_ptr()
    return low < start + other.nbytes and start < low + one.nbytes


# --- one row times a matrix --------------------------------------------------------------------------------------

GEMV = Program(1, "gemv", (
    {"THREADS": 256, "LANES": 256, "ROWS": 4, "AHEAD": 1},
    {"THREADS": 256, "LANES": 256, "ROWS": 1, "AHEAD": 4},
    {"THREADS": 128, "LANES": 32, "ROWS": 2, "AHEAD": 4},
    {"THREADS": 256, "LANES": 16, "ROWS": 2, "AHEAD": 2},
    {"THREADS": 256, "LANES": 8, "ROWS": 2, "AHEAD": 2},
))  # fmt: skip
"""From long rows to short ones, which fewer threads share; the second is for long rows of which there are few."""


def _gemv_sizes(N: int, K: int) -> dict[str, int | str]:
    many, few, middle, short, shortest = GEMV.sizes
    if K >= 2048:
        return many if N >= 1024 else few
    return middle if K >= 512 else short if K > 128 else shortest


def gemv(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, early: bool = False) -> torch.Tensor:
    """x @ w.T for x (1, K), w (N, K), fp16 -> (1, N); sums are fp32. K is a multiple of 8.

    Written into `out` if there is one. early: begin while the kernel before this one on the stream still runs (sm_90
    and later), and read w at once: only where no kernel that may still be running writes w; x may be its result.
    ValueError for what it does not take.
    """
    _matrices("gemv", x=x, w=w)
    N, K = w.shape
    out = torch.empty((1, N), device=x.device, dtype=torch.float16) if out is None else out
    tensors = {"x": (x, (1, K), torch.float16), "w": (w, (N, K), torch.float16), "out": (out, (1, N), torch.float16)}
    _check("gemv", tensors, written=("out",))
    if K % 8:
        raise ValueError(f"gemv reads 8 elements at a time, so K is a multiple of 8, not {K}: pad with zeros.")
    if max(N, K) > MOST // 2:
        raise ValueError(f"gemv counts rows and columns in 32 bits: {MOST // 2:,} at most.")
    if not out.numel() or not K:
        return out.zero_()
    sizes = _gemv_sizes(N, K)
    rows = sizes["THREADS"] // sizes["LANES"] * sizes["ROWS"]
    kernel = GEMV.kernel(sizes | {"EARLY": int(early)})
    kernel((ceil(N / rows),), (sizes["THREADS"],), (x, w, out, N, K), early=early)
    return out


# --- the same with weights of 4 bits -----------------------------------------------------------------------------

GROUP = 128
TILE = 16
GEMV_INT4 = Program(2, "gemv_int4", ({"WARPS": 16, "AHEAD": 1},), arch="sm_80")


class Int4(NamedTuple):
    """A weight (N, K) in 4 bits, in the order in which `gemv_int4` reads it: `packed_int4` makes it.

    words: int32, (N / 16 rounded up, K / 64, 32, 4): of 16 rows and 64 columns, the 16 bytes that each lane loads.
    scales: fp16, (N / 16 rounded up, K / 128, 8, 2): of 16 rows and a group, the two that each quad of lanes needs.
    rows: N.
    """

    words: torch.Tensor
    scales: torch.Tensor
    rows: int


def packed_int4(w: torch.Tensor, group: int = GROUP) -> Int4:
    """w (N, K), fp16, rounded to 16 levels and reshuffled, once and offline, into the order that lanes read.

    In each group of columns of a row the step is the largest magnitude over 7; a group of zeros has the step 0.
    ValueError for groups that do not divide K or that the kernel does not know, and for what is not finite.
    """
    _matrices("packed_int4", w=w)
    N, K = w.shape
    if group < 1 or K % group:
        raise ValueError(f"packed_int4 scales groups of {group} columns, and they do not divide the {K} of w.")
    if group != GROUP:
        raise ValueError(f"packed_int4 packs groups of {GROUP} columns, a multiple of what mma takes, not of {group}.")
    if not w.isfinite().all():
        raise ValueError("packed_int4 rounds finite numbers, but w holds infinities or NaN.")
    tiles = ceil(N / TILE)
    w = torch.nn.functional.pad(w.float(), (0, 0, 0, tiles * TILE - N)).view(tiles * TILE, K // GROUP, GROUP)
    scales = (w.abs().amax(-1) / 7).half()
    step = scales.float().unsqueeze(-1)
    levels = (torch.where(step > 0, w / step, 0.0).round().clamp(-8, 7) + 8).int()
    words = (levels.view(_parts(tiles, K)) << _nibbles(w.device)).sum((1, 6, 7), dtype=torch.int32)
    words = words.permute(0, 2, 1, 3, 4).reshape(tiles, K // 64, 32, 4).contiguous()
    return Int4(words, scales.view(tiles, 2, 8, K // GROUP).permute(0, 3, 2, 1).contiguous(), N)


def unpacked_int4(w: Int4) -> torch.Tensor:
    """What the four bits stand for: (N, K), fp32."""
    tiles, steps = w.words.shape[:2]
    parts = w.words.view(tiles, steps, 8, 4, 4).permute(0, 2, 1, 3, 4)[:, None, ..., None, None]
    levels = (parts >> _nibbles(w.words.device) & 15).reshape(tiles * TILE, steps // 2, GROUP)
    scales = w.scales.permute(0, 3, 2, 1).reshape(tiles * TILE, steps // 2, 1)
    return ((levels - 8) * scales.float()).view(tiles * TILE, 64 * steps)[: w.rows]


def _parts(tiles: int, K: int) -> tuple[int, ...]:
    """Sides of (N, K): row 16 * tile + 8 * lower + g, column 64 * step + 16 * q + 4 * word + 2 * pair + odd."""
    return tiles, 2, 8, K // 64, 4, 4, 2, 2


def _nibbles(device: torch.device) -> torch.Tensor:
    """The place of each of those weights in word `word` of lane 4 * g + q, in bits.

    One mask then finds both halves of a register of mma's operand: a word holds four of them, of two rows.
    """
    lower, pair, odd = (torch.arange(2, device=device) for _ in range(3))
    return 4 * (4 * odd + 2 * pair[:, None] + lower.view(2, *[1] * 6))


def gemv_int4(x: torch.Tensor, w: Int4, out: torch.Tensor | None = None, early: bool = False) -> torch.Tensor:
    """x @ w.T for x (1, K), fp16, and w in 4 bits, as `packed_int4` made it -> (1, N), fp16; sums are fp32.

    Written into `out` if there is one. early: as for `gemv`. ValueError for what it does not take.
    """
    _matrices("gemv_int4", x=x)
    words, scales, N = w
    tiles, K = ceil(N / TILE), x.shape[1]
    if K % GROUP:
        raise ValueError(f"gemv_int4 has a scale for each {GROUP} columns, and they do not divide the {K} of x.")
    out = torch.empty((1, N), device=x.device, dtype=torch.float16) if out is None else out
    _check("gemv_int4", {
        "x": (x, (1, K), torch.float16), "w.words": (words, (tiles, K // 64, 32, 4), torch.int32),
        "w.scales": (scales, (tiles, K // GROUP, 8, 2), torch.float16), "out": (out, (1, N), torch.float16),
    }, written=("out",))  # fmt: skip
    if not out.numel() or not K:
        return out.zero_()
    sizes = GEMV_INT4.sizes[0]
    kernel = GEMV_INT4.kernel(sizes | {"EARLY": int(early)})
    kernel((tiles,), (32 * sizes["WARPS"],), (x, words, scales, out, N, K), early=early)
    return out


# --- one query and a cache of 8 bits -----------------------------------------------------------------------------

KV_DECODE = Program(
    5, "kv_decode", tuple({"FP8": fp8, "WARPS": 4, "BLOCKS": 4, "KEYS": 16} for fp8 in (0, 1)), arch="sm_80"
)
KV_COMBINE = Program(6, "kv_combine")
DIM = 128
"""The head dimension that kernels of attention are written for."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise_kv(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values x (batch, kv_heads, tokens, 128) in 8 bits, and a scale for each head of each sequence.

    dtype: int8 or float8_e4m3fn. The scale (batch, kv_heads), float32, makes the largest magnitude of the head the
    largest of the dtype: x is about values * scale. A head of zeros, or of no tokens, has a scale of 0.
    ValueError for other dtypes, shapes, and for x that is not floating point.
    """
    if dtype not in LARGEST:
        raise ValueError(f"A cache of 8 bits is {' or '.join(map(_short, LARGEST))}, not {_short(dtype)}.")
    if x.ndim != 4 or x.shape[3] != DIM or not x.is_floating_point():
        raise ValueError(
            f"quantise_kv takes (batch, kv_heads, tokens, {DIM}) of floats, not {tuple(x.shape)}, {x.dtype}."
        )
    if not x.shape[2]:
        return x.to(dtype), x.new_zeros(x.shape[:2], dtype=torch.float32)
    scale = x.abs().amax((2, 3)).float() / LARGEST[dtype]
    values = x.float() / torch.where(scale > 0, scale, 1.0)[:, :, None, None]
    return (values.round_() if dtype == torch.int8 else values).to(dtype), scale


def decode_kv8(q, k, v, k_scale, v_scale, lengths, splits: int | None = None) -> torch.Tensor:
    """One token's attention to a cache of 8 bits -> (batch, heads, 128), fp16.

    q (batch, heads, 128) fp16; k, v (batch, kv_heads, tokens, 128), both int8 or both float8_e4m3fn; k_scale, v_scale
    (batch, kv_heads) float32, what they are multiplied by, 0 or more; lengths (batch) int32: how many of `tokens` each
    sequence has, 0 included, whose output is 0. heads is a multiple of kv_heads, 8 times it at most. splits: into how
    many parts a cache is cut, by default enough to fill the card. ValueError for what it does not take.
    """
    if not all(isinstance(t, torch.Tensor) for t in (q, k)) or q.ndim != 3 or k.ndim != 4 or k.dtype not in LARGEST:
        raise ValueError(
            f"decode_kv8 takes q (batch, heads, {DIM}) and k, v (batch, kv_heads, tokens, {DIM}) in int8 or fp8."
        )
    batch, kv_heads, tokens, _ = k.shape
    heads = q.shape[1]
    if not kv_heads or heads % kv_heads or not 1 <= heads // kv_heads <= 8:
        raise ValueError(f"decode_kv8 takes 1 to 8 query heads for a head of the cache, not {heads} for {kv_heads}.")
    tensors = {
        "q": (q, (batch, heads, DIM), torch.float16),
        "k": (k, (batch, kv_heads, tokens, DIM), k.dtype),
        "v": (v, (batch, kv_heads, tokens, DIM), k.dtype),
        "k_scale": (k_scale, (batch, kv_heads), torch.float32),
        "v_scale": (v_scale, (batch, kv_heads), torch.float32),
        "lengths": (lengths, (batch,), torch.int32),
    }
    _check("decode_kv8", tensors)
    if tokens > MOST // 2:
        raise ValueError(f"decode_kv8 counts tokens in 32 bits: {MOST // 2:,} at most.")
    if batch * kv_heads > 65535:
        raise ValueError(
            f"decode_kv8 launches a row of blocks for each of 65,535 caches at most, not {batch * kv_heads:,}."
        )
    out = torch.empty_like(q)
    if not (batch and tokens):
        return out.zero_()
    sizes = KV_DECODE.sizes[k.dtype != torch.int8]
    splits = splits or max(1, min(tokens // 512, 8 * (machine.here().sms or 1) // (batch * kv_heads)))
    part = torch.empty((batch * heads, splits, DIM), dtype=torch.float32, device=q.device)
    state = torch.empty((batch * heads, splits, 2), dtype=torch.float32, device=q.device)
    KV_DECODE.kernel(sizes)(
        (splits, batch * kv_heads), (32 * sizes["WARPS"],),
        (q, k, v, k_scale, v_scale, lengths, part, state, tokens, kv_heads, heads // kv_heads, LOG2_E * DIM**-0.5),
    )  # fmt: skip
    KV_COMBINE.kernel({})((batch * heads,), (DIM,), (part, state, out, splits))
    return out


# --- attention to some blocks of keys ----------------------------------------------------------------------------

BLOCK = 128
"""Queries and keys of a block of the mask."""
STAGES = 5
BLOCK_SPARSE = Program(
    7,
    "block_sparse",
    ({"ELEMENT": "__half", "STAGES": STAGES, "THREADS": 384},),
    "sm_90a",
    cpu=False,
    shared=1024 + (2 + STAGES) * BLOCK * DIM * 2,  # queries and results of a tile, and the ring
)
MOST_COLUMNS = 1024
"""Blocks of keys: a warp's lanes keep a row of the mask, 32 bits each."""


def plan(mask: torch.Tensor) -> torch.Tensor:
    """The order in which rows of blocks are taken: head by head, in each head the longest first.

    mask (…, rows, columns) bool: whether a block of 128 queries and 128 keys counts. -> int32, as many as there are
    rows: row + rows * head. It depends on the mask alone: make it once where the mask stays.
    """
    counts = mask.flatten(0, -3).sum(-1)
    heads, rows = counts.shape
    order = counts.argsort(dim=-1, descending=True, stable=True)
    return (order + rows * torch.arange(heads, device=mask.device)[:, None]).flatten().int()


def block_sparse(q, k, v, mask, order=None) -> torch.Tensor:
    """softmax(q kᵀ / √128) v over the blocks of keys that the mask names, on a Hopper GPU -> (B, H, T, 128).

    q (B, H, T, 128), k and v (B, H, S, 128), fp16, contiguous, any T and S; mask (B, H, ⌈T / 128⌉, ⌈S / 128⌉) bool,
    contiguous. Queries whose row of blocks names none get 0. order: what `plan(mask)` gives; made anew without it.
    ValueError for anything else.
    """
    if why := BLOCK_SPARSE.why_not(machine.here().arch):
        raise ValueError(why)
    if not all(isinstance(t, torch.Tensor) and t.ndim == 4 for t in (q, k, v, mask)):
        raise ValueError("block_sparse takes q (B, H, T, 128), k and v (B, H, S, 128) and mask (B, H, rows, columns).")
    B, H, T, _ = q.shape
    S = k.shape[2]
    rows, columns = ceil(T / BLOCK), ceil(S / BLOCK)
    tensors = {name: (t, (B, H, n, DIM), torch.float16) for name, t, n in (("q", q, T), ("k", k, S), ("v", v, S))}
    _check("block_sparse", tensors | {"mask": (mask, (B, H, rows, columns), torch.bool)})
    if columns > MOST_COLUMNS:
        raise ValueError(f"block_sparse takes {MOST_COLUMNS * BLOCK:,} keys at most, not {S:,}.")
    tiles = B * H * rows
    if tiles > MOST // 2:
        raise ValueError(f"block_sparse counts rows of blocks in 32 bits: {MOST // 2:,} at most, not {tiles:,}.")
    if not tiles or not S:
        return torch.zeros_like(q)
    if order is None:
        order = plan(mask)
    _check("block_sparse", {"order": (order, (tiles,), torch.int32)})
    out, half = torch.empty_like(q), BLOCK // 2

    def tiles_of(x, height):
        return cuda.tensor_map(x.view(B * H, -1, 2, 64).transpose(1, 2), (1, 2, height, 64))

    kernel = BLOCK_SPARSE.kernel(BLOCK_SPARSE.sizes[0])
    kernel(
        (min(tiles, machine.here().sms),), (384,),
        (tiles_of(q, half), tiles_of(k, BLOCK), tiles_of(v, BLOCK), tiles_of(out, half), mask, rows * columns, order,
         tiles, rows, columns, S, LOG2_E * DIM**-0.5),
        shared_mem=BLOCK_SPARSE.shared,
    )  # fmt: skip
    return out


# --- a mixture of experts' router --------------------------------------------------------------------------------

ROUTER = Program(8, "router", ({"EXPERTS": 64, "TOP_K": 8},), arch="sm_80")
MOST_EXPERTS = 512


class Routing(NamedTuple):
    """weights (tokens, k) float32: the largest of the softmax over experts, in falling order; experts (tokens, k)
    int32: whose they are; order (tokens * k) int32: the choices, as token * k + place, that go to expert 0, in the
    order of tokens, then those that go to expert 1, and so on; counts (experts) int32: how many go to each."""

    weights: torch.Tensor
    experts: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor


def router(logits: torch.Tensor, k: int) -> Routing:
    """Softmax, the k largest, counts and permutation of logits (tokens, experts) float32, in one kernel.

    Of equal logits the expert of the lower number comes first; -0 equals 0; NaN is larger than all, and its row's
    weights are NaN. 1 to 512 experts, k up to all of them and 32. One call at a time on a GPU: its blocks wait for one
    another. ValueError for what it does not take.
    """
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise ValueError("router takes a matrix of logits (tokens, experts).")
    tokens, experts = logits.shape
    _check("router", {"logits": (logits, (tokens, experts), torch.float32)})
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"router takes 1 to {MOST_EXPERTS} experts, not {experts}.")
    if not 1 <= k <= min(experts, 32):
        raise ValueError(f"router chooses 1 to {min(experts, 32)} of {experts} experts, not {k}.")
    if tokens * k > MOST // 2:
        raise ValueError(f"router counts choices in 32 bits: {MOST // 2:,} at most, not {tokens * k:,}.")
    blocks = min(ceil(tokens / 32), machine.here().sms or 1)  # all of them run at once
    integers = {"dtype": torch.int32, "device": logits.device}
    made = Routing(
        torch.empty((tokens, k), device=logits.device),
        *(torch.empty(shape, **integers) for shape in ((tokens, k), (tokens * k,))),
        torch.empty(experts, **integers) if tokens else torch.zeros(experts, **integers),
    )
    if tokens:
        kernel = ROUTER.kernel({"EXPERTS": experts, "TOP_K": k})
        kernel((blocks,), (1024,), (logits, *made, torch.empty((blocks, experts), **integers), tokens))
    return made


# --- a kernel that a compiler writes as well ---------------------------------------------------------------------

RMSNORM = Program(4, "rmsnorm", tuple(
    {"LANES": lanes, "ROWS": rows, "PIECES": pieces}
    for lanes, rows, pieces in ((32, 4, 1), (32, 4, 2), (32, 4, 4), (128, 1, 2), (128, 1, 4), (256, 1, 4), (512, 1, 4),
                                (1024, 1, 4), (1024, 1, 8))
))  # fmt: skip


def rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * w by rows: x (rows, cols), w (cols,), fp16 -> (rows, cols).

    cols is a multiple of 8, 65,536 at most: a row is held in registers. Written into `out` if there is one.
    ValueError for what it does not take.
    """
    _matrices("rmsnorm", x=x)
    rows, cols = x.shape
    out = torch.empty_like(x) if out is None else out
    half = torch.float16
    _check(
        "rmsnorm", {"x": (x, (rows, cols), half), "w": (w, (cols,), half), "out": (out, (rows, cols), half)}, ("out",)
    )
    fitting = [sizes for sizes in RMSNORM.sizes if 8 * sizes["LANES"] * sizes["PIECES"] >= cols]
    if cols % 8 or not fitting:
        raise ValueError(f"rmsnorm holds a row in registers, in pieces of 8: a multiple of 8 up to 65,536, not {cols}.")
    if rows > MOST:
        raise ValueError(f"rmsnorm counts rows in 32 bits: {MOST:,} at most.")
    if out.numel():
        block = fitting[0]["LANES"] * fitting[0]["ROWS"]
        RMSNORM.kernel(fitting[0])((ceil(rows / fitting[0]["ROWS"]),), (block,), (x, w, out, rows, cols, float(eps)))
    return out


PROGRAMS = (GEMV, GEMV_INT4, RMSNORM, KV_DECODE, KV_COMBINE, BLOCK_SPARSE, ROUTER)
"""All kernels; the tests compile each, with all its sizes, for every card it is for."""


def find(name: int | str) -> Program:
    """A program by its number or its name. ValueError for what is none."""
    found = [p for p in PROGRAMS if name in (p.number, p.name, str(p))]
    if not found:
        raise ValueError(f"{name!r} is no kernel of this lesson: they are {', '.join(map(str, PROGRAMS))}.")
    return found[0]
