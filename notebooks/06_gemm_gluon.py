"""x @ w.T, and gelu(x @ w.T + b), with the work of a program's warps divided by hand: Gluon, for Hopper (sm_90).

In Triton a program owns a tile, and the compiler decides what its warps do: all of them do the same. Gluon is the
language one step below, with the same compiler from TTGIR on. What TTGIR holds is yours to say: which warps do what,
how a tile lies in shared memory and in registers, and when anyone waits. Here a program is persistent and has three
**partitions**, groups of warps that run different functions at the same time:

    x @ w.T                                            gelu(x @ w.T + b)
    consume   4 warps  multiply the tile's upper       lead      4 warps  the same, and asks the copy engine for
                       64 rows, have them written                         more, instead of having anything written
    consume   4 warps  the lower 64 rows               follow    4 warps  the lower 64 rows
    produce   1 warp   asks the copy engine (TMA)      activate  4 warps  adds the bias, applies GELU, has the tile
                       for tiles of x and w                               written, while the others multiply the next

Why no producer on the right? Registers: an SM has 65536, and 64 x 256 fp32 sums take 128 of each of the 128 threads
that hold them. Twelve warps with up to 168 registers fit, and warps come in fours; a thirteenth warp would not.

Partitions meet at **mbarriers**, counters in shared memory. Each has a phase that ends when the arrivals it was made
for, and the bytes it was told to expect, are complete; `wait(bar, parity)` returns when the phase of that parity is
over. A fresh barrier counts as if a phase of parity 1 had just ended. A stage of shared memory has two: `full`, ended
by the copy engine's bytes, and `empty`, ended by those who have read it.

Both operands are contiguous along K, as a linear layer holds them: x (M, K), w (N, K), fp16; sums are fp32.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
"""The tile. 128 x 256 fp32 sums are half an SM's registers; BLOCK_K fp16 are 128 bytes, the widest swizzle."""


@gluon.jit
def tile_at(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Tile number -> its first row and column, in groups of GROUP_M rows of tiles (see `grouped`, lesson 06)."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    within = tile % in_group
    return (first + within % rows) * BLOCK_M, within // rows * BLOCK_N


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers whose phases end after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def ask(x_desc, w_desc, x_bufs, w_bufs, full, stage, m, n, k, wanted):
    """Have the copy engine fill a stage with x[m:, k:] and w[n:, k:]; nothing where `wanted` is false."""
    bar = full.index(stage)
    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(x_desc, [m, k], bar, x_bufs.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [n, k], bar, w_bufs.index(stage), pred=wanted)


@gluon.jit
def produce(x_desc, w_desc, x_bufs, w_bufs, full, empty, M, N, K, GROUP_M: gl.constexpr):
    """Fill stage after stage, tile after tile: the producer never waits for a tile to end."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    STAGES: gl.constexpr = x_bufs.type.shape[0]
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)  # the first round finds every stage empty
            ask(x_desc, w_desc, x_bufs, w_bufs, full, stage, m, n, k, True)
            step += 1


@gluon.jit
def multiply(HALF: gl.constexpr, step, x_bufs, w_bufs, full, empty, K):
    """One tile's 64 x BLOCK_N sums, of rows 64 HALF and on: (step after the last, sums)."""
    BLOCK_N: gl.constexpr = w_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = w_bufs.type.shape[2]
    STAGES: gl.constexpr = w_bufs.type.shape[0]
    # wgmma's own layout of sums: 4 warps of 16 rows each, one instruction as wide as the tile
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums = gl.zeros((64, BLOCK_N), gl.float32, layout)
    for k in range(0, K, BLOCK_K):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = x_bufs.index(stage).slice(64 * HALF, 64)
        w = w_bufs.index(stage).permute((1, 0))
        sums = warpgroup_mma(x, w, sums, use_acc=k > 0, is_async=True)
        # let this one run; the one before it is then over, and its stage may be filled again
        sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return step, sums


# --- x @ w.T -----------------------------------------------------------------------------------------------------
@gluon.jit
def consume(HALF: gl.constexpr, out_desc, out_bufs, x_bufs, w_bufs, full, empty, M, N, K, BLOCK_M: gl.constexpr,
            GROUP_M: gl.constexpr):  # fmt: skip
    """Multiply and write rows 64 HALF and on of each tile. The copy engine writes while the next tile begins."""
    BLOCK_N: gl.constexpr = w_bufs.type.shape[1]
    out_buf = out_bufs.index(HALF)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        step, sums = multiply(HALF, step, x_bufs, w_bufs, full, empty, K)
        tma.store_wait(0)  # the copy engine has read the last tile
        out_buf.store(sums.to(out_desc.dtype))
        fence_async_shared()  # what the warps wrote, the copy engine must see
        tma.async_copy_shared_to_global(out_desc, [m + 64 * HALF, n], out_buf)
    tma.store_wait(0)


@gluon.jit
def matmul_kernel(x_desc, w_desc, out_desc, M, N, K, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    # The first partition runs in the kernel's own warps; the others get theirs, and registers a thread, from the lists
    gl.warp_specialize(
        [
            (consume, (0, out_desc, out_bufs, x_bufs, w_bufs, full, empty, M, N, K, BLOCK_M, GROUP_M)),
            (consume, (1, out_desc, out_bufs, x_bufs, w_bufs, full, empty, M, N, K, BLOCK_M, GROUP_M)),
            (produce, (x_desc, w_desc, x_bufs, w_bufs, full, empty, M, N, K, GROUP_M)),
        ],
        [4, 1],
        [232, 40],
    )


# --- gelu(x @ w.T + b) -------------------------------------------------------------------------------------------
@gluon.jit
def gelu(z):
    """GELU, tanh form, z fp32: 0.5 z (1 + tanh u) = z / (1 + 2**t), t = -2u log2(e), u = sqrt(2/pi) (z + 0.044715 z^3).

    2**t and 1/x as the special-function unit gives them, about two units in the last place off; Triton's own exp2 and
    division add several instructions for subnormal numbers, which fp16 results do not see."""
    t = z * (-2.302208198 - 0.1029432397 * z * z)
    e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
    one = 1.0 + e
    return z * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [one], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def hand_over(sums, buf, ready, free, parity):
    """Leave a tile's sums in shared memory for `activate`, as soon as it has done with the last ones."""
    mbarrier.wait(free, parity ^ 1)
    buf.store(sums.to(buf.dtype))
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def follow(bufs, ready, free, x_bufs, w_bufs, full, empty, M, N, K, BLOCK_M: gl.constexpr):
    """Multiply the lower 64 rows of each tile and hand the sums over."""
    BLOCK_N: gl.constexpr = w_bufs.type.shape[1]
    step = 0
    parity = 0
    for _ in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        step, sums = multiply(1, step, x_bufs, w_bufs, full, empty, K)
        hand_over(sums, bufs.index(1), ready.index(1), free.index(1), parity)
        parity ^= 1


@gluon.jit
def step_after(tile, m, n, k, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
               GROUP_M: gl.constexpr):  # fmt: skip
    """What this program multiplies after x[m:, k:] and w[n:, k:] of `tile`: further along K, or the next tile."""
    k += BLOCK_K
    if k >= K:
        k = 0
        tile += gl.num_programs(0)
        m, n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    return tile, m, n, k


@gluon.jit
def refill(step, tile, m, n, k, x_desc, w_desc, x_bufs, w_bufs, full, empty, M, N, K, GROUP_M: gl.constexpr):
    """Once the other half has read the stage of `step` as well, ask for x[m:, k:] and w[n:, k:] in its place.

    Returns what to ask for next."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    STAGES: gl.constexpr = x_bufs.type.shape[0]
    stage = step % STAGES
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    mbarrier.wait(empty.index(stage), step // STAGES & 1)
    ask(x_desc, w_desc, x_bufs, w_bufs, full, stage, m, n, k, tile < tiles)
    return step_after(tile, m, n, k, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)


@gluon.jit
def lead(bufs, ready, free, x_desc, w_desc, x_bufs, w_bufs, full, empty, M, N, K, GROUP_M: gl.constexpr):
    """Multiply the upper 64 rows of each tile, hand the sums over, and refill every stage that both have read."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    STAGES: gl.constexpr = x_bufs.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    # what to ask for next, STAGES steps ahead of the step that is multiplied (q: queued)
    q_tile, q_k = gl.program_id(0), 0
    q_m, q_n = tile_at(q_tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    for first in gl.static_range(STAGES):
        ask(x_desc, w_desc, x_bufs, w_bufs, full, first, q_m, q_n, q_k, q_tile < tiles)
        q_tile, q_m, q_n, q_k = step_after(q_tile, q_m, q_n, q_k, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
    step = 0
    parity = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros((64, BLOCK_N), gl.float32, layout)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_bufs.index(stage).slice(0, 64)
            w = w_bufs.index(stage).permute((1, 0))
            sums = warpgroup_mma(x, w, sums, use_acc=k > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            if k > 0:  # this one runs, so the one before it is over
                q_tile, q_m, q_n, q_k = refill(step - 1, q_tile, q_m, q_n, q_k, x_desc, w_desc, x_bufs, w_bufs,
                                               full, empty, M, N, K, GROUP_M)  # fmt: skip
            step += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        q_tile, q_m, q_n, q_k = refill(step - 1, q_tile, q_m, q_n, q_k, x_desc, w_desc, x_bufs, w_bufs,
                                       full, empty, M, N, K, GROUP_M)  # fmt: skip
        hand_over(sums, bufs.index(0), ready.index(0), free.index(0), parity)
        parity ^= 1


@gluon.jit
def biases(bias_ptr, n, N, layout: gl.constexpr):
    """b[n : n + 64] in fp32, as the columns of `layout`; 0 beyond N."""
    column = n + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    return gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)


@gluon.jit
def activate(bias_ptr, out_desc, bufs, ready, free, M, N, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr):
    """Bias and GELU in place, 64 x 64 elements at a time, while the others multiply the next tile."""
    BLOCK_N: gl.constexpr = out_desc.block_type.shape[1]
    gl.static_assert(BLOCK_N == 256, "four pieces of 64 columns")
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 16 bytes a thread, 8 threads a row
    parity = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        # loaded before the wait, so that nobody waits for them
        bias = (biases(bias_ptr, n, N, layout), biases(bias_ptr, n + 64, N, layout),
                biases(bias_ptr, n + 128, N, layout), biases(bias_ptr, n + 192, N, layout))  # fmt: skip
        for half in gl.static_range(2):
            buf = bufs.index(half)
            mbarrier.wait(ready.index(half), parity)
            for piece in gl.static_range(4):
                part = buf.slice(64 * piece, 64, dim=1)
                z = part.load(layout).to(gl.float32) + bias[piece][None, :]
                part.store(gelu(z).to(out_desc.dtype))
            if half == 1:  # by now the copy engine has read the upper half
                tma.store_wait(0)
                mbarrier.arrive(free.index(0), count=1)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [m + 64 * half, n], buf)
        tma.store_wait(0)
        mbarrier.arrive(free.index(1), count=1)
        parity ^= 1


@gluon.jit
def linear_gelu_kernel(x_desc, w_desc, out_desc, bias_ptr, M, N, K, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    bufs = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 1)
    ready, free = barriers(2, 1), barriers(2, 1)
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    gl.warp_specialize(
        [
            (lead, (bufs, ready, free, x_desc, w_desc, x_bufs, w_bufs, full, empty, M, N, K, GROUP_M)),
            (follow, (bufs, ready, free, x_bufs, w_bufs, full, empty, M, N, K, BLOCK_M)),
            (activate, (bias_ptr, out_desc, bufs, ready, free, M, N, BLOCK_M, GROUP_M)),
        ],
        [4, 4],
        [200, 104],
    )


# --- wrappers ----------------------------------------------------------------------------------------------------
def descriptors(x, w, out):
    """The tiles as the copy engine sees them: of x, of w, and of half an output tile; swizzled in shared memory."""
    shapes = ([BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K], [64, BLOCK_N])
    layouts = (gl.NVMMASharedLayout.get_default_for(shape, gl.float16) for shape in shapes)
    return [TensorDescriptor.from_tensor(*each) for each in zip((x, w, out), shapes, layouts, strict=True)]


def output(x, w):
    """A new (M, N) tensor and M, N, K. ValueError for what these kernels do not take."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x (M, K) and w (N, K) must share K, not {tuple(x.shape)} and {tuple(w.shape)}")
    if x.dtype != torch.float16 or w.dtype != torch.float16:
        raise ValueError(f"both float16, not {x.dtype} and {w.dtype}")
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError("these kernels use wgmma, which only GPUs of compute capability 9.0 have")
    out = torch.empty((x.shape[0], w.shape[0]), device=x.device, dtype=x.dtype)
    for t in (x, w, out):
        if not t.numel() or t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16:
            raise ValueError("the copy engine wants rows that are contiguous, not empty, and 16-byte aligned")
    return out, (*out.shape, x.shape[1])


def programs(out):
    """One program an SM, or one a tile where there are fewer."""
    tiles = triton.cdiv(out.shape[0], BLOCK_M) * triton.cdiv(out.shape[1], BLOCK_N)
    return (min(tiles, torch.cuda.get_device_properties(out.device).multi_processor_count),)


def matmul(x, w, group_m=16, stages=3):
    """x @ w.T for float16 x (M, K) and w (N, K): a new float16 (M, N) tensor. ValueError for what it does not take."""
    out, sizes = output(x, w)
    matmul_kernel[programs(out)](*descriptors(x, w, out), *sizes, group_m, stages, num_warps=4)
    return out


def linear_gelu(x, w, b, group_m=32, stages=3):
    """gelu(x @ w.T + b), tanh form, for float16 x (M, K), w (N, K), b (N,): a new float16 (M, N) tensor.

    The sums are fp32; they are rounded to fp16 once before the bias is added, as a separate product would round them.
    ValueError for what it does not take."""
    out, sizes = output(x, w)
    if b.shape != (w.shape[0],) or b.dtype != x.dtype or not b.is_contiguous():
        raise ValueError(f"b must be a contiguous float16 vector of {w.shape[0]}")
    linear_gelu_kernel[programs(out)](*descriptors(x, w, out), b, *sizes, group_m, stages, num_warps=4)
    return out
