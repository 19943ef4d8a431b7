"""Attention for Hopper in Gluon: what tile-level Triton cannot say, said.

The arithmetic is the lesson's online softmax. The rest keeps the tensor cores busy while exponentials, which they
cannot compute, are computed. Triton's compiler chooses layouts, shared memory and order, and gives every warp the
same program; in Gluon all of it is written down:

* **One program, three roles.** Two consumer warpgroups (four warps each; three of them for head dimension 64) own 64
  query rows each. One more warp, the producer, only starts copies: 24 registers a thread are enough for it, and the
  consumers get what it leaves.
* **A ring of tiles.** The copy engine (TMA) writes K and V tiles into a ring in shared memory and ticks an mbarrier
  when a tile has landed; the consumers tick another when it may be overwritten. The producer runs ahead as far as the
  ring is long, also into the next tile of rows, for the grid is persistent. The engine fills zeros beyond the last
  key.
* **Two products at a time.** A warpgroup issues S = Q Kᵀ of block j+1 and, behind it, O += P V of block j. Neither
  needs the other, so the tensor cores go from one to the next without a pause.
* **Taking turns.** Named barriers let one warpgroup at a time issue its two products; while they run, the others
  compute maxima and exponentials. Without turns nothing keeps them from computing exponentials at the same time.
* **P stays in registers.** The layout of S as an accumulator is that of P as an operand, once it is rounded.
* **Little arithmetic an element.** The softmax works in base 2 with the scale folded in, one multiply-add an element;
  row sums stay spread over four threads until the end.
* **Causal.** Blocks beyond the diagonal are never loaded. Blocks are taken from the last to the first, so only the
  first one needs a mask, and the loop has none.

Tried on an H200, and slower: one role of eight warps instead of two of four (both warpgroups compute exponentials at
the same time); no turns; a program for each tile instead of a persistent grid; keeping the exponentials between the
two waits against the assembler's wish; leaving out the rescaling of O where no maximum rises; a polynomial for a
share of the exponentials; three warpgroups with 64 keys a tile for head dimension 128, four for 64.
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

ROWS = gl.constexpr(64)  # query rows of a warpgroup: the M of one wgmma instruction


@gluon.jit
def _turn(turn, tiles, rows, CAUSAL: gl.constexpr):
    """The tile of this program's `turn`: is there one, its head, its block of rows.

    Causal: the blocks of rows with the most keys come first, and odd turns run through the programs backwards, so that
    the program with the longest tile of one turn gets the shortest of the next.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if CAUSAL and turn % 2 == 1:
        place = programs - 1 - place
    tile = turn * programs + place
    if CAUSAL:
        heads = tiles // rows
        head = tile % heads
        row = rows - 1 - tile // heads
    else:
        head = tile // rows
        row = tile % rows
    return tile < tiles, head, row


@gluon.jit
def _blocks(row, keys, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    blocks = gl.cdiv(keys, N)
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv((row + 1) * M, N))
    return blocks


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The slot after `slot`; a barrier's phase is a bit that flips each time the ring comes round."""
    wrap = slot == STAGES - 1
    return gl.where(wrap, 0, slot + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _fetch(desc, head, start, ring, full, free, slot, phase):
    mbarrier.wait(free.index(slot), phase)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [head, start, 0], full.index(slot), ring.index(slot))
    return _next(slot, phase, ring.shape[0])


@gluon.jit
def _produce(q, k, v, shared, barriers, shape, CAUSAL: gl.constexpr):
    """One warp: copies Q, and K and V in the order in which the consumers use them, K one block ahead of V."""
    queries_in, ring, results = shared
    q_full, q_free, full, free = barriers
    tiles, rows, queries, keys = shape
    WGS: gl.constexpr = queries_in.shape[0]
    N: gl.constexpr = ring.shape[2]
    slot = 0
    phase = 1  # the ring starts free: a wait for the phase before the first returns at once
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        live, head, row = _turn(turn, tiles, rows, CAUSAL)
        if live:
            last = _blocks(row, keys, WGS * ROWS, N, CAUSAL) - 1
            slot, phase = _fetch(k, head, last * N, ring, full, free, slot, phase)
            for i in gl.static_range(WGS):
                mbarrier.wait(q_free.index(i), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(i), q.block_type.nbytes)
                at = (row * WGS + i) * ROWS
                tma.async_copy_global_to_shared(q, [head, at, 0], q_full.index(i), queries_in.index(i))
            for j in range(last):
                slot, phase = _fetch(k, head, (last - 1 - j) * N, ring, full, free, slot, phase)
                slot, phase = _fetch(v, head, (last - j) * N, ring, full, free, slot, phase)
            slot, phase = _fetch(v, head, 0, ring, full, free, slot, phase)


# Named barriers 8, 9, 10, one for each warpgroup; Gluon itself uses the low numbers. 256: the one that waits and the
# one that lets it go. `bar.arrive` does not wait.
@gluon.jit
def _wait_turn(who: gl.constexpr):
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [8 + who], gl.int32, False, 1)


@gluon.jit
def _give_turn(who: gl.constexpr):
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [8 + who], gl.int32, False, 1)


@gluon.jit
def _row_max(s, N: gl.constexpr):
    """Within a thread first, as two chains a row; the last step crosses the four threads that share a row."""
    return gl.max(gl.max(s.reshape([ROWS, N // 8, 8]), 1), 1)


@gluon.jit
def _partial_sum(p, N: gl.constexpr):
    """(ROWS, 8): the part of a row's sum that needs no exchange between threads."""
    return gl.sum(p.reshape([ROWS, N // 8, 8]), 1)


@gluon.jit
def _consume(out, scale, shared, barriers, shape, ME: gl.constexpr, ENGINE: gl.constexpr, CAUSAL: gl.constexpr):
    """Warpgroup ME: 64 query rows of each tile against all keys."""
    queries_in, ring, results = shared
    q_full, q_free, full, free = barriers
    tiles, rows, queries, keys = shape
    WGS: gl.constexpr = queries_in.shape[0]
    STAGES: gl.constexpr = ring.shape[0]
    N: gl.constexpr = ring.shape[2]
    D: gl.constexpr = ring.shape[3]
    dtype: gl.constexpr = ring.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = gl.full([ROWS, N], 0.0, gl.float32, s_layout)
    q = queries_in.index(ME).reshape([ROWS, D])
    slot = 0
    phase = 0
    if ME == WGS - 1:
        _give_turn(0)
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        live, head, row = _turn(turn, tiles, rows, CAUSAL)
        if live:
            blocks = _blocks(row, keys, WGS * ROWS, N, CAUSAL)
            at = (row * WGS + ME) * ROWS
            r = at + gl.arange(0, ROWS, s_row)
            c = (blocks - 1) * N + gl.arange(0, N, gl.SliceLayout(0, s_layout))

            # the last block, the one that may need a mask: every row keeps at least one key of it
            mbarrier.wait(q_full.index(ME), turn & 1)
            mbarrier.wait(full.index(slot), phase)
            _wait_turn(ME)
            s = warpgroup_mma(q, ring.index(slot).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            _give_turn((ME + 1) % WGS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(free.index(slot), count=1)
            slot, phase = _next(slot, phase, STAGES)
            keep = (c < keys)[None, :]
            if CAUSAL:
                keep = keep & (c[None, :] <= r[:, None])
            s = gl.where(keep, s, float("-inf"))
            top = gl.convert_layout(_row_max(s, N), s_row)
            p = gl.exp2(s * scale - (top * scale)[:, None])
            total = _partial_sum(p, N)
            part: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            weights = gl.convert_layout(p.to(dtype), p_layout)
            o = gl.full([ROWS, D], 0.0, gl.float32, o_layout)

            for _ in range(1, blocks):
                # S of this block and P V of the block before it, both queued while this warpgroup has its turn
                k_slot = slot
                mbarrier.wait(full.index(k_slot), phase)
                slot, phase = _next(slot, phase, STAGES)
                mbarrier.wait(full.index(slot), phase)
                _wait_turn(ME)
                k = ring.index(k_slot).reshape([N, D]).permute((1, 0))
                s_later = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                o_later = warpgroup_mma(weights, ring.index(slot).reshape([N, D]), o, is_async=True)
                _give_turn((ME + 1) % WGS)
                s = warpgroup_mma_wait(1, deps=[s_later])
                mbarrier.arrive(free.index(k_slot), count=1)

                higher = gl.maximum(top, gl.convert_layout(_row_max(s, N), s_row))
                shrink = gl.exp2((top - higher) * scale)
                top = higher
                p = gl.exp2(s * scale - (top * scale)[:, None])
                total = total * gl.convert_layout(shrink, part)[:, None] + _partial_sum(p, N)

                o = warpgroup_mma_wait(0, deps=[o_later])
                mbarrier.arrive(free.index(slot), count=1)
                slot, phase = _next(slot, phase, STAGES)
                weights = gl.convert_layout(p.to(dtype), p_layout)
                o = o * gl.convert_layout(shrink, o_row)[:, None]

            mbarrier.arrive(q_free.index(ME), count=1)
            mbarrier.wait(full.index(slot), phase)
            _wait_turn(ME)
            o = warpgroup_mma(weights, ring.index(slot).reshape([N, D]), o, is_async=True)
            _give_turn((ME + 1) % WGS)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(free.index(slot), count=1)
            slot, phase = _next(slot, phase, STAGES)
            o = o * gl.convert_layout(1.0 / gl.sum(total, 1), o_row)[:, None]
            if ENGINE:
                tma.store_wait(0)  # the last tile's rows have left the buffer
                results.index(ME).reshape([ROWS, D]).store(o.to(dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [head, at, 0], results.index(ME))
            else:
                to = at + gl.arange(0, ROWS, o_row)
                columns = gl.arange(0, D, gl.SliceLayout(0, o_layout))
                start = out + head.to(gl.int64) * queries * D
                gl.store(start + to[:, None] * D + columns[None, :], o.to(dtype), mask=(to < queries)[:, None])
    if ENGINE:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "rows", "queries", "keys"])  # one compilation for all lengths
def attention_gluon_kernel(q, k, v, out, tiles, rows, queries, keys, scale, WGS: gl.constexpr, STAGES: gl.constexpr,
                           REGISTERS: gl.constexpr, ENGINE: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """q, k, v: descriptors of (batch * heads, tokens, D), out too with ENGINE, else a pointer; tiles: heads * rows."""
    queries_in = gl.allocate_shared_memory(q.dtype, [WGS] + q.block_type.shape, q.layout)
    ring = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WGS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=WGS)
    if ENGINE:
        shared = (queries_in, ring, gl.allocate_shared_memory(q.dtype, [WGS] + q.block_type.shape, q.layout))
    else:
        shared = (queries_in, ring, queries_in)
    barriers = (q_full, q_free, full, free)
    shape = (tiles, rows, queries, keys)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, scale, shared, barriers, shape, 0, ENGINE, CAUSAL)),
                (_consume, (out, scale, shared, barriers, shape, 1, ENGINE, CAUSAL)),
                (_produce, (q, k, v, shared, barriers, shape, CAUSAL)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (out, scale, shared, barriers, shape, 0, ENGINE, CAUSAL)),
                (_consume, (out, scale, shared, barriers, shape, 1, ENGINE, CAUSAL)),
                (_consume, (out, scale, shared, barriers, shape, 2, ENGINE, CAUSAL)),
                (_produce, (q, k, v, shared, barriers, shape, CAUSAL)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[REGISTERS, REGISTERS, 24],
        )


# By head dimension and mask: warpgroups, keys in a tile, tiles in the ring, registers of a consumer's thread, and
# whether the copy engine stores results: on an H200 that is faster for 128, and storing from registers for 64. Causal
# needs a tile of 64 * WGS rows no taller than a tile of keys, so that no row of the first block is masked whole.
GLUON_CONFIGS = {
    (128, False): {"WGS": 2, "N": 128, "STAGES": 4, "REGISTERS": 240, "ENGINE": True},
    (128, True): {"WGS": 2, "N": 128, "STAGES": 4, "REGISTERS": 240, "ENGINE": True},
    (64, False): {"WGS": 3, "N": 128, "STAGES": 6, "REGISTERS": 160, "ENGINE": False},
    (64, True): {"WGS": 2, "N": 128, "STAGES": 6, "REGISTERS": 240, "ENGINE": False},
}


def attention_gluon(q, k, v, causal=False):
    """softmax(q kᵀ / √D) v, forward only, on a Hopper GPU (sm_90).

    q (B, H, T, D), k and v (B, H, S, D): float16 or bfloat16, contiguous, D 64 or 128, any T and S; causal needs
    T == S. Returns (B, H, T, D) in the same dtype. Raises ValueError, with a sentence, for anything else.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must all be float16 or all bfloat16, not {q.dtype}, {k.dtype}, {v.dtype}.")
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"Wanted q (B, H, T, D) and k, v (B, H, S, D); got {[tuple(x.shape) for x in (q, k, v)]}.")
    B, H, T, D = q.shape
    S = k.shape[2]
    if D not in (64, 128):
        raise ValueError(f"The head dimension must be 64 or 128, not {D}.")
    if 0 in (B, H, T, S):
        raise ValueError(f"There must be at least one head, query and key; got q {tuple(q.shape)}, k {tuple(k.shape)}.")
    if causal and T != S:
        raise ValueError(f"Causal attention needs as many queries as keys; got {T} and {S}.")
    if {k.device, v.device} != {q.device}:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}.")
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v)):
        mend = "x.clone(memory_format=torch.contiguous_format)"
        raise ValueError(f"q, k and v must be contiguous and start at a multiple of 16 bytes; {mend} makes x so.")
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(f"This kernel is written for Hopper GPUs (sm_90) alone; q is on {q.device}.")
    config = dict(GLUON_CONFIGS[D, bool(causal)])
    keys_a_tile = config.pop("N")
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    out = torch.empty_like(q)
    q3, k3, v3, out3 = (
        TensorDescriptor.from_tensor(x.view(B * H, -1, D), [1, height, D], layout)
        for x, height in ((q, ROWS.value), (k, keys_a_tile), (v, keys_a_tile), (out, ROWS.value))
    )
    to = out3 if config["ENGINE"] else out
    rows = triton.cdiv(T, ROWS.value * config["WGS"])
    tiles = B * H * rows
    grid = (min(tiles, torch.cuda.get_device_properties(q.device).multi_processor_count),)
    scale = 1.4426950408889634 / D**0.5  # log2(e): exp(x) is exp2(x * log2(e))
    with torch.cuda.device(q.device):
        attention_gluon_kernel[grid](q3, k3, v3, to, tiles, rows, T, S, scale, CAUSAL=bool(causal), **config)
    return out
