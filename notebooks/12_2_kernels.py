"""Lesson 12_2's operators of a transformer's layer, each as PyTorch's own operators and in Triton.

Five operators make a decoder: `norm_linear`, `norm_swiglu`, `linear_add`, `prefill_attention`, `decode_attention`. What
stands here under these names, without a suffix, is the definition: PyTorch's operators on any device and in any dtype;
the eager model runs it, torch.compile gets it to compile, and it is the dispatcher's fallback. Its rivals in Triton are
of two kinds. For one token (`_row`) a product is a row times a matrix: these kernels begin while the kernel before them
runs and ask for their weights at once, as lesson 10's one-row product does, so no kernel that may still be running may
write weights, angles or the position. For many tokens (`_rows`) a product fills the card, and the kernels are what lies
around it. `OPERATORS` lists all of them for the dispatcher, with those of lessons 05, 06, 07 and 10. The definitions
say what is right for any arguments; a rival looks at what it gets, and refuses what it would misread (`fits`).

Shapes: x (tokens, width); weights (out, in); qkv (tokens, (heads + 2 · KV heads) · dim); a cache (KV heads, room, dim);
angles (2, room, dim / 2), cosines and sines by position; position (1,), int64.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import e, log2

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from helpers import cuda, dispatch, machine, source

LOG2_E = log2(e)


# --- the definitions ---------------------------------------------------------------------------------------------


def norm_linear(x, norm, w, eps):
    """RMSNorm with the weights `norm`, then @ w.T."""
    return F.linear(F.rms_norm(x, norm.shape, norm, eps), w)


def norm_swiglu(x, norm, w, eps):
    """RMSNorm, then silu(gate) * up, where w holds the gate's rows and then the up-projection's."""
    gate, up = norm_linear(x, norm, w, eps).chunk(2, -1)
    return F.silu(gate) * up


def linear_add(x, w, add):
    """Adds x @ w.T to `add`, in place: the library's product takes the addition along."""
    add.addmm_(x, w.T)


def rotated(x, angles):
    """Rotary position embedding of x (tokens, heads, dim) by angles (2, tokens, dim / 2): pairs (i, i + dim / 2)."""
    cos, sin = angles[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def prefill_attention(qkv, k_cache, v_cache, angles, heads):
    """Causal attention of a prompt to itself, into an empty cache: (tokens, heads · dim). Writes the cache's first
    rows. A group of heads / KV heads queries shares a key."""
    kv_heads, _, dim = k_cache.shape
    tokens = qkv.shape[0]
    turned, v = qkv.view(tokens, -1, dim).split((heads + kv_heads, kv_heads), 1)
    q, k = rotated(turned, angles[:, :tokens]).split((heads, kv_heads), 1)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k_cache[:, :tokens] = k
    v_cache[:, :tokens] = v
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(tokens, -1)


def decode_attention(qkv, k_cache, v_cache, angles, position, heads):
    """One token's attention to the cache up to its own `position`, which it writes: (1, heads · dim).

    `position` is on the device, so that a CUDA graph holds for every one: all of the cache is read, and masked.
    """
    room = k_cache.shape[1]
    q = token_kept(qkv, k_cache, v_cache, angles, position, heads).transpose(0, 1)
    seen = (torch.arange(room, device=qkv.device) <= position).view(1, 1, 1, room)
    out = F.scaled_dot_product_attention(q[None], k_cache[None], v_cache[None], attn_mask=seen, enable_gqa=True)
    return out.reshape(1, -1)


def token_kept(qkv, k_cache, v_cache, angles, position, heads):
    """Writes one token's turned keys and its values into the cache; returns its turned queries, (1, heads, dim)."""
    kv_heads, _, dim = k_cache.shape
    turned, v = qkv.view(1, -1, dim).split((heads + kv_heads, kv_heads), 1)
    q, k = rotated(turned, angles[:, position]).split((heads, kv_heads), 1)
    k_cache.index_copy_(1, position, k.transpose(0, 1))
    v_cache.index_copy_(1, position, v.transpose(0, 1))
    return q


def decode_attention_flash(qkv, k_cache, v_cache, angles, position, heads):
    """`decode_attention` by FlashAttention-2, told on the device how much of the cache to read; fp16, on a GPU."""
    kv_heads, room, dim = k_cache.shape
    q = token_kept(qkv, k_cache, v_cache, angles, position, heads)
    k, v = k_cache.transpose(0, 1), v_cache.transpose(0, 1)
    ends = [torch.arange(0, 2 * n, n, dtype=torch.int32, device=qkv.device) for n in (1, room)]
    seen = (position + 1).int()
    return varlen_attn(q, k, v, *ends, 1, room, enable_gqa=True, seqused_k=seen).reshape(1, -1)


def decode_attention_flex(qkv, k_cache, v_cache, angles, position, heads):
    """`decode_attention` for the compiler, which makes a kernel of its own for few queries (FlexAttention): those of a
    group are given as rows of one head, since it splits the cache for groups of a power of 2 alone."""
    kv_heads, _, dim = k_cache.shape
    q = token_kept(qkv, k_cache, v_cache, angles, position, heads).view(1, kv_heads, -1, dim)

    def seen(score, batch, head, query, key):
        return torch.where(key <= position[0], score, -float("inf"))

    return flex_attention(q, k_cache[None], v_cache[None], score_mod=seen).reshape(1, -1)


def linear_add_apart(x, w, add):
    """`linear_add` for the compiler, which fuses the addition with what comes behind it."""
    add += F.linear(x, w)


# --- one token: a row times a matrix ------------------------------------------------------------------------------


@triton.jit
def row_kernel(x_ptr, norm_ptr, w_ptr, y_ptr, N, eps, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
               ADD: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row, col = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, PIECE)[None, :]
    along = col + tl.zeros((ROWS, 1), tl.int32)  # every row's lanes load x for themselves: no exchange, no barrier
    w, up, by, x = (), (), (), ()  # tuples of blocks: all weights are asked for before anything is waited for
    for first in tl.static_range(0, K, PIECE):
        inside = (row < N) & (first + col < K)
        at = w_ptr + row.to(tl.int64) * K + (first + col)
        w = w + (tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"),)
        if GATED:
            beside = w_ptr + (row.to(tl.int64) + N) * K + (first + col)
            up = up + (tl.load(beside, mask=inside, other=0.0, eviction_policy="evict_first"),)
        if NORM:
            by = by + (tl.load(norm_ptr + first + along, mask=first + along < K, other=0.0),)
    if EARLY:
        gdc_wait()  # from here on x is what the kernel before wrote
    for first in tl.static_range(0, K, PIECE):
        x = x + (tl.load(x_ptr + first + along, mask=first + along < K, other=0.0),)
    if ADD:
        add = tl.load(y_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, PIECE), tl.float32)
    up_sums = tl.zeros((ROWS, PIECE), tl.float32)
    squares = tl.zeros((ROWS, PIECE), tl.float32)
    for i in tl.static_range((K + PIECE - 1) // PIECE):
        xi = x[i].to(tl.float32)
        if NORM:
            squares += xi * xi
            xi = xi * by[i].to(tl.float32)
        sums += w[i].to(tl.float32) * xi
        if GATED:
            up_sums += up[i].to(tl.float32) * xi
    y = tl.sum(sums, 1)[:, None]
    scale = tl.full((ROWS, 1), 1.0, tl.float32)
    if NORM:  # the scale can wait until the products are summed
        scale = tl.rsqrt(tl.sum(squares, 1)[:, None] / K + eps)
    y *= scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(up_sums, 1)[:, None] * scale)
    if ADD:
        y += add
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


def early():
    """Whether kernels may begin before the one in front has ended: sm_90 and later."""
    return machine.gpu() and machine.here().capability >= (9, 0)


def on_gpu():
    """Whether tensors are on a GPU here: not where kernels are only compiled for one."""
    return machine.device() == "cuda"


def fits(*tensors):
    """Refuse, with a ValueError, what the kernels of this file would misread. tensors: (tensor, the shape due)."""
    here = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    for t, shape in tensors:
        if t.shape != shape:
            raise ValueError(f"a tensor of shape {tuple(t.shape)}, where {tuple(shape)} is due")
        if t.dtype != torch.float16 or t.device != here:
            raise ValueError(f"these kernels take fp16 on the current device, not {t.dtype} on {t.device}")
        if not t.is_contiguous() or t.data_ptr() % 16:
            raise ValueError(
                f"these kernels take contiguous tensors that begin at 16 bytes, not {tuple(t.shape)} with strides "
                f"{t.stride()} at {t.data_ptr() % 16}"
            )


def kept(make):
    """A tensor that outlives the call. While torch.compile warms up a CUDA graph, all that this thread allocates is the
    graph's own and must be gone afterwards, so another thread makes it; while one is recorded, nobody can."""
    if not on_gpu():
        return make()
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("call it once before it is recorded into a CUDA graph")
    with ThreadPoolExecutor(1) as other:
        made = other.submit(make).result()
    torch.cuda.synchronize()
    return made


def apart(written, *read):
    """Refuse to write what is read: others would read it half written."""
    first = written.data_ptr()
    for t in read:
        if first < t.data_ptr() + t.nbytes and t.data_ptr() < first + written.nbytes:
            raise ValueError("these kernels cannot write where they read: the tensors share memory")


def _row_fits(x, norm, w, y, gated):
    """(K, N) of a row times a matrix into y."""
    k, n = x.shape[1], y.shape[1]
    fits((x, (1, k)), (w, (n * (2 if gated else 1), k)), (y, (1, n)), *([] if norm is None else [(norm, (k,))]))
    if norm is None:
        apart(y, x, w)
    return k, n


def _row(x, norm, w, y, eps, cut, gated=False):
    """The launch into y (1, N), with a norm before it or a gate behind it; without a norm the product is added to y."""
    normed, (k, n) = norm is not None, _row_fits(x, norm, w, y, gated)
    if not cut:  # rows, columns and warps of a program, the best of those tried on an H200
        cut = (2, 1024, 4) if k > 1024 else (8, 256, 4) if gated else (16, 256, 4) if n > 8192 else (8, 256, 8)
    rows, piece, warps = cut
    more = {"launch_pdl": True} if early() else {}
    row_kernel[(triton.cdiv(n, rows),)](
        x, norm if normed else x, w, y, n, eps, K=k, NORM=normed, GATED=gated, ADD=not normed, ROWS=rows, PIECE=piece,
        EARLY=early(), num_warps=warps, **more,
    )  # fmt: skip
    return y


def norm_linear_row(x, norm, w, eps, cut=None):
    """`norm_linear` for one token, in one kernel."""
    return _row(x, norm, w, x.new_empty((1, w.shape[0])), eps, cut)


def norm_swiglu_row(x, norm, w, eps, cut=None):
    """`norm_swiglu` for one token, in one kernel."""
    return _row(x, norm, w, x.new_empty((1, w.shape[0] // 2)), eps, cut, gated=True)


def linear_add_row(x, w, add, cut=None):
    """`linear_add` for one token, in one kernel."""
    _row(x, None, w, add, 0.0, cut)


ROW_CUDA = r"""
// A row times a matrix as `row_kernel` does it, a warp for ROWS rows: no lane waits for another warp.
#include <cuda_device_runtime_api.h>
#include <cuda_fp16.h>

#ifndef K
#define K 768      // a multiple of 8
#define ROWS 1     // of w that a warp takes
#define NORM 1     // RMSNorm before the product
#define GATED 0    // SiLU and gate behind it
#define PLUS 0     // added to what y holds
#define EARLY 1    // 0 for a late launch, which needs neither of the two instructions
#endif
constexpr int PIECES = (K / 8 + 31) / 32, WEIGHTS = GATED ? 2 : 1;

__device__ float2 pair(const uint4& piece, int i) {
    return __half22float2(reinterpret_cast<const __half2*>(&piece)[i]);
}

__device__ float joined(float v) {
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

extern "C" __global__ __launch_bounds__(128)
void row(const uint4* x, const uint4* norm, const uint4* w, __half* y, int N, float eps) {
#if EARLY && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const int lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = warp * ROWS;
    uint4 held[WEIGHTS][ROWS][PIECES], by[PIECES], in[PIECES];
    for (int i = 0; i < PIECES; i++) {
        const int at = lane + 32 * i;
        for (int g = 0; g < WEIGHTS; g++)
            for (int r = 0; r < ROWS; r++) {  // beyond the last row the last is read again, and not written
                const uint4* from = w + (size_t)(g * N + min(first + r, N - 1)) * (K / 8);
                held[g][r][i] = at < K / 8 ? __ldcs(from + at) : uint4();
            }
        by[i] = NORM && at < K / 8 ? norm[at] : uint4();
    }
#if EARLY && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    for (int i = 0; i < PIECES; i++) in[i] = lane + 32 * i < K / 8 ? x[lane + 32 * i] : uint4();
    float sums[WEIGHTS][ROWS] = {}, squares = 0.0f, more[ROWS];
    for (int r = 0; r < ROWS; r++) more[r] = PLUS && first + r < N ? __half2float(y[first + r]) : 0.0f;
    for (int i = 0; i < PIECES; i++)
        for (int j = 0; j < 4; j++) {
            float2 v = pair(in[i], j);
            if (NORM) {
                const float2 scale = pair(by[i], j);
                squares += v.x * v.x + v.y * v.y;
                v = make_float2(v.x * scale.x, v.y * scale.y);
            }
            for (int g = 0; g < WEIGHTS; g++)
                for (int r = 0; r < ROWS; r++) {
                    const float2 weight = pair(held[g][r][i], j);
                    sums[g][r] += v.x * weight.x + v.y * weight.y;
                }
        }
    const float scale = NORM ? rsqrtf(joined(squares) / K + eps) : 1.0f;
    for (int r = 0; r < ROWS; r++) {
        float out = joined(sums[0][r]) * scale;
        if (GATED) out = out / (1.0f + __expf(-out)) * (joined(sums[WEIGHTS - 1][r]) * scale);
        if (lane == 0 && first + r < N) y[first + r] = __float2half(out + more[r]);
    }
}
"""


@cache
def _row_cuda(k, rows, normed, gated, added, begins_early):
    sizes = {"K": k, "ROWS": rows, "NORM": normed, "GATED": gated, "PLUS": added, "EARLY": begins_early}
    return cuda.RawModule(ROW_CUDA, options=[f"-D{name}={int(n)}" for name, n in sizes.items()]).get_function("row")


def _row_by_hand(x, norm, w, y, eps, rows=1, warps=4, gated=False):
    normed, (k, n) = norm is not None, _row_fits(x, norm, w, y, gated)
    if k % 8:
        raise ValueError(f"this kernel reads 8 elements at a time, so K is a multiple of 8, not {k}")
    kernel = _row_cuda(k, rows, normed, gated, not normed, early())
    grid, block = (triton.cdiv(n, rows * warps),), (32 * warps,)
    kernel(grid, block, (x, norm if normed else x, w, y, n, eps), early=early())
    return y


def norm_linear_row_cuda(x, norm, w, eps, **cut):
    """`norm_linear` for one token, in one kernel by hand."""
    return _row_by_hand(x, norm, w, x.new_empty((1, w.shape[0])), eps, **cut)


def norm_swiglu_row_cuda(x, norm, w, eps, **cut):
    """`norm_swiglu` for one token, in one kernel by hand."""
    return _row_by_hand(x, norm, w, x.new_empty((1, w.shape[0] // 2)), eps, gated=True, **cut)


def linear_add_row_cuda(x, w, add, **cut):
    """`linear_add` for one token, in one kernel by hand."""
    _row_by_hand(x, None, w, add, 0.0, **cut)


# --- one token: attention -----------------------------------------------------------------------------------------


@triton.jit
def angle(angles_ptr, sines, place, d, DIM: tl.constexpr):
    """Cosines and signed sines of position `place` for the numbers `d` of a row."""
    half: tl.constexpr = DIM // 2
    cos = tl.load(angles_ptr + place * half + d % half).to(tl.float32)
    sin = tl.load(angles_ptr + sines + place * half + d % half).to(tl.float32)
    return cos, tl.where(d < half, -sin, sin)


@triton.jit
def turn(at, d, mask, cos, sin, DIM: tl.constexpr):
    """Rows at `at`, of DIM numbers `d`, turned; fp32. Each number is loaded twice: as itself and as its partner."""
    x = tl.load(at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(at + ((d + DIM // 2) % DIM)[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def decode_kernel(qkv_ptr, k_ptr, v_ptr, angles_ptr, position_ptr, part_ptr, top_ptr, sum_ptr, done_ptr, out_ptr,
                  scale2, room, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
                  BLOCK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    split, kv, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    asked = tl.load(position_ptr)
    position = tl.minimum(tl.maximum(asked, 0), room - 1).to(tl.int32)  # outside it nothing is touched, out is NaN
    chunk = tl.cdiv(tl.cdiv(position + 1, SPLITS), BLOCK) * BLOCK
    first = split * chunk
    last = tl.minimum(first + chunk, position + 1)
    r, d, n, one = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK), tl.arange(0, 1)[:, None]
    cos, sin = angle(angles_ptr, room * (DIM // 2), position, d, DIM)
    if EARLY:
        gdc_wait()  # qkv is what the kernel before wrote
    head, real = kv * GROUP + r, (r < GROUP)[:, None]  # the query heads of a group lie side by side
    kind = k_ptr.dtype.element_ty
    q = turn(qkv_ptr + head[:, None] * DIM, d, real, cos, sin, DIM).to(kind)
    own_k = turn(qkv_ptr + (kv_heads * GROUP + kv + one) * DIM, d, one < 1, cos, sin, DIM).to(kind)
    own_v = tl.load(qkv_ptr + (kv_heads * (GROUP + 1) + kv + one) * DIM + d[None, :])
    rows = kv.to(tl.int64) * room * DIM + d[None, :]
    own = last == position + 1 and first < last  # this program has the token itself: it keeps it for the next ones
    if own and asked == position:
        tl.store(k_ptr + rows + (position + one) * DIM, own_k)
        tl.store(v_ptr + rows + (position + one) * DIM, own_v)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(first, last, BLOCK):
        at = rows + (start + n)[:, None] * DIM
        past, its = (start + n < position)[:, None], (start + n == position)[:, None]
        k = tl.where(its, own_k, tl.load(k_ptr + at, mask=past, other=0.0))
        v = tl.where(its, own_v, tl.load(v_ptr + at, mask=past, other=0.0))
        s = tl.where((start + n <= position)[None, :], tl.dot(q, k.T) * scale2, -float("inf"))
        larger = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(top - larger)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = larger
    place = (kv * SPLITS + split) * HEADS + r  # HEADS: the group, rounded up to a power of 2
    tl.store(top_ptr + place, top, mask=r < HEADS)
    tl.store(sum_ptr + place, total, mask=r < HEADS)
    tl.store(part_ptr + place[:, None] * DIM + d[None, :], acc, mask=(r < HEADS)[:, None])
    tl.debug_barrier()  # all of this program's parts are written before it says so
    if tl.atomic_add(done_ptr + kv, 1, sem="acq_rel") == SPLITS - 1:  # the last program of a KV head joins the parts
        h = tl.arange(0, HEADS)
        at = (kv * SPLITS + tl.arange(0, SPLITS))[:, None] * HEADS + h[None, :]
        tops = tl.load(top_ptr + at, cache_modifier=".cg")
        sums = tl.load(sum_ptr + at, cache_modifier=".cg")
        parts = tl.load(part_ptr + at[:, :, None] * DIM + d[None, None, :], cache_modifier=".cg")
        weight = tl.exp2(tops - tl.max(tops, 0)[None, :])
        out = tl.sum(parts * weight[:, :, None], 0) / tl.sum(sums * weight, 0)[:, None]
        out = tl.where(asked == position, out, float("nan"))
        to = out_ptr + (kv * GROUP + h)[:, None] * DIM + d[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(h < GROUP)[:, None])
        tl.store(done_ptr + kv, 0)  # for the next call


@cache
def _zeros(device, count, stream=None):
    return kept(lambda: torch.zeros(count, dtype=torch.int32, device=device))


def _counters(device, kv_heads):
    """Zeros, which each call leaves as zeros, a stream's own: calls at the same time would disturb each other's. CUDA
    graphs share some, so two of them with this kernel must not be replayed at the same time."""
    shared = _zeros(device, kv_heads)
    if not on_gpu() or torch.cuda.is_current_stream_capturing():
        return shared
    return _zeros(device, kv_heads, torch.cuda.current_stream().cuda_stream)


def _attention_fits(qkv, k_cache, v_cache, angles, heads):
    """(KV heads, room, dim) of an attention's arguments."""
    kv_heads, room, dim = k_cache.shape
    if heads % kv_heads or dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"these kernels take heads in whole groups and dim as a power of 2, not {heads} and {dim}")
    cache, tokens = (kv_heads, room, dim), qkv.shape[0]
    if tokens > room:
        raise ValueError(f"{tokens} tokens do not fit into a cache for {room}")
    fits((qkv, (tokens, (heads + 2 * kv_heads) * dim)), (k_cache, cache), (v_cache, cache),
         (angles, (2, room, dim // 2)))  # fmt: skip
    apart(k_cache, qkv, v_cache)
    apart(v_cache, qkv)
    return cache


def decode_attention_row(qkv, k_cache, v_cache, angles, position, heads, splits=32, block=64, warps=4):
    """`decode_attention` in one kernel: rotation, the cache's new row, attention in `splits` parts, and their sum."""
    kv_heads, room, dim = _attention_fits(qkv, k_cache, v_cache, angles, heads)
    if qkv.shape[0] != 1 or position.shape != (1,) or position.dtype != torch.int64 or position.device != qkv.device:
        raise ValueError("this kernel takes one token and its position, (1,), int64 on the same device")
    group = heads // kv_heads
    wide = triton.next_power_of_2(group)
    part = torch.empty((kv_heads, splits, wide, dim), dtype=torch.float32, device=qkv.device)
    top, total = torch.empty((2, kv_heads, splits, wide), dtype=torch.float32, device=qkv.device)
    out = torch.empty((1, heads * dim), dtype=qkv.dtype, device=qkv.device)
    more = {"launch_pdl": True} if early() else {}
    decode_kernel[(splits, kv_heads)](
        qkv, k_cache, v_cache, angles, position, part, top, total, _counters(qkv.device, kv_heads), out,
        dim**-0.5 * LOG2_E, room, GROUP=group, HEADS=wide, ROWS=max(16, wide), DIM=dim, BLOCK=block, SPLITS=splits,
        EARLY=early(), num_warps=warps, num_stages=2, **more,
    )  # fmt: skip
    return out


# --- many tokens: what lies around the library's products -----------------------------------------------------------


@triton.jit
def swiglu_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + 2 * row * width + col, mask=col < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (2 * row + 1) * width + col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + col, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def plus_kernel(x_ptr, to_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32) + tl.load(
        to_ptr + at, mask=at < count, other=0.0
    )
    tl.store(to_ptr + at, sum.to(to_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def rotate_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, angles_ptr, room, HEADS: tl.constexpr, KV: tl.constexpr,
                  ROWS: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:
        gdc_wait()
    token = tl.program_id(0)
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)
    at = qkv_ptr + (token.to(tl.int64) * (HEADS + 2 * KV) + r) * DIM
    cos, sin = angle(angles_ptr, room * (DIM // 2), token, d, DIM)
    x = turn(at, d, r < HEADS + KV, cos, sin, DIM)
    tl.store(q_ptr + (token.to(tl.int64) * HEADS + r) * DIM + d[None, :], x.to(q_ptr.dtype.element_ty), mask=r < HEADS)
    head, along = (r - HEADS).to(tl.int64), token * DIM + d[None, :]
    keys = k_ptr + head * room * DIM + along
    tl.store(keys, x.to(k_ptr.dtype.element_ty), mask=(r >= HEADS) & (r < HEADS + KV))
    values = (r >= HEADS + KV) & (r < HEADS + 2 * KV)
    v = tl.load(at + d[None, :], mask=values, other=0.0)
    tl.store(v_ptr + (head - KV) * room * DIM + along, v, mask=values)


taken = cache(source.load)
"""What other lessons hold; a text is read once a process."""


def product(x, w):
    """x @ w.T by lesson 06's kernel."""
    fits((x, x.shape), (w, (w.shape[0], x.shape[1])))
    return taken("06_triton_matmul", "linear_gelu")(x, w, _no_bias(w.shape[0], w.dtype, w.device), "none")


@cache
def _no_bias(n, dtype, device):
    return kept(lambda: torch.zeros(n, dtype=dtype, device=device))


def rms_norm_rows(x, norm, eps):
    """RMSNorm by lesson 05's kernel."""
    fits((x, x.shape), (norm, x.shape[1:]))
    return taken("05_rmsnorm_rows", "rmsnorm_rows")(x, norm, eps)


def swiglu(both):
    """silu(gate) * up for rows that hold a gate's numbers and then the up-projection's."""
    tokens, width = both.shape[0], both.shape[1] // 2
    fits((both, (tokens, 2 * width)))
    y = torch.empty((tokens, width), dtype=both.dtype, device=both.device)
    more = {"launch_pdl": True} if early() else {}
    swiglu_kernel[(tokens, triton.cdiv(width, 2048))](both, y, width, BLOCK=2048, EARLY=early(), num_warps=8, **more)
    return y


def plus(x, to):
    """Adds x to `to`, in place."""
    fits((x, to.shape), (to, to.shape))
    plus_kernel[(triton.cdiv(to.numel(), 2048),)](x, to, to.numel(), BLOCK=2048)


def rotate_and_keep(qkv, k_cache, v_cache, angles, heads):
    """Writes the turned keys and the values into the cache; returns the turned queries, (heads, tokens, dim)."""
    kv_heads, room, dim = _attention_fits(qkv, k_cache, v_cache, angles, heads)
    tokens = qkv.shape[0]
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    more = {"launch_pdl": True} if early() else {}
    rotate_kernel[(tokens,)](
        qkv, q, k_cache, v_cache, angles, room, HEADS=heads, KV=kv_heads,
        ROWS=triton.next_power_of_2(heads + 2 * kv_heads), DIM=dim, EARLY=early(), num_warps=4, **more,
    )  # fmt: skip
    return q.transpose(0, 1)


def prefill_attention_cudnn(*args):
    """`prefill_attention` with cuDNN's attention in place of PyTorch's choice."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return prefill_attention(*args)


def prefill_attention_rows(qkv, k_cache, v_cache, angles, heads, backend=SDPBackend.CUDNN_ATTENTION):
    """`prefill_attention`: one kernel before the library's attention, of `backend`."""
    tokens = qkv.shape[0]
    q = rotate_and_keep(qkv, k_cache, v_cache, angles, heads)
    k, v = k_cache[:, :tokens], v_cache[:, :tokens]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(tokens, -1)


def prefill_attention_07(qkv, k_cache, v_cache, angles, heads):
    """`prefill_attention`: one kernel before lesson 07's attention."""
    tokens = qkv.shape[0]
    q = rotate_and_keep(qkv, k_cache, v_cache, angles, heads).contiguous()
    k, v = k_cache[:, :tokens].contiguous(), v_cache[:, :tokens].contiguous()
    out = taken("07_triton_attention", "fast")(q[None], k[None], v[None], causal=True)
    return out[0].transpose(0, 1).reshape(tokens, -1)


# --- what the dispatcher chooses from -----------------------------------------------------------------------------


def _cuda(name):
    """A host function of lesson 10's CUDA kernels, all of them from one slice."""
    names = ("gemv", "rmsnorm")
    return getattr(source.run(source.file(source.find("10_kernels")[0], *names), "10_kernels"), name)


def _norm_linear_cuda():
    gemv, rmsnorm = _cuda("gemv"), _cuda("rmsnorm")
    return lambda x, norm, w, eps: gemv(rmsnorm(x, norm, eps), w, early=early())


def _norm_swiglu_cuda():
    both = _norm_linear_cuda()
    return lambda x, norm, w, eps: swiglu(both(x, norm, w, eps))


def _linear_add_cuda():
    gemv = _cuda("gemv")

    def run(x, w, add):
        fits((add, (1, w.shape[0])))  # `+=` would stretch
        add += gemv(x, w)

    return run


def linear_add_06(x, w, add):
    """`linear_add` by lesson 06's kernel, and one that adds."""
    fits((add, (x.shape[0], w.shape[0])))
    plus(product(x, w), add)


def _one(x, *rest):
    """One row of fp16, with weights that a program can hold: the kernels above ask for all of K at once."""
    return x.ndim == 2 and x.shape[0] == 1 and x.dtype == torch.float16 and x.shape[1] <= 4096


def _many(x, *rest):
    """Several rows, of fp16."""
    return x.ndim == 2 and x.shape[0] > 1 and x.dtype == torch.float16


def _compiles(*args):
    """On a GPU: in CPU mode compiling each operator for itself takes longer than a lesson should."""
    return machine.gpu()


def _linear(x, norm, w, eps):
    return x.shape[0], (w.shape, x.dtype)


def _one_token(qkv, *rest):
    """What a kernel for one token's attention takes."""
    return qkv.ndim == 2 and qkv.shape[0] == 1 and qkv.dtype == torch.float16


def _flash(qkv, *rest):
    """One token, where FlashAttention-2 is built: on a GPU from sm_80 on."""
    return _one_token(qkv) and machine.gpu() and machine.here().capability >= (8, 0)


def _fast(qkv, k_cache, *rest):
    """What lesson 07's fastest kernel takes, and only on sm_90."""
    hopper = not machine.gpu() or machine.here().capability[0] == 9
    return _many(qkv) and hopper and k_cache.shape[-1] in (64, 128)


_COMPILED, _MIXED = ("library", "AI compiler"), ("library", "Triton")
Way = dispatch.Implementation
OPERATORS = (
    dispatch.Operator(
        "norm_linear(Tensor x, Tensor norm, Tensor w, float eps) -> Tensor",
        lambda x, norm, w, eps: x.new_empty((x.shape[0], w.shape[0])),
        _linear,
        (
            Way("PyTorch", ("library",), lambda: norm_linear),
            Way("torch.compile", _COMPILED, lambda: torch.compile(norm_linear, dynamic=False), _compiles),
            Way("one kernel", ("Triton",), lambda: norm_linear_row, _one),
            Way("RMSNorm 05, cuBLAS", _MIXED, lambda: lambda x, norm, w, eps: F.linear(rms_norm_rows(x, norm, eps), w)),
            Way("RMSNorm 05, product 06", ("Triton",),
                lambda: lambda x, norm, w, eps: product(rms_norm_rows(x, norm, eps), w), _many),
            Way("one kernel by hand", ("CUDA",), lambda: norm_linear_row_cuda, _one),
            Way("RMSNorm 10, row 10", ("CUDA",), _norm_linear_cuda, _one),
        ),
    ),
    dispatch.Operator(
        "norm_swiglu(Tensor x, Tensor norm, Tensor w, float eps) -> Tensor",
        lambda x, norm, w, eps: x.new_empty((x.shape[0], w.shape[0] // 2)),
        _linear,
        (
            Way("PyTorch", ("library",), lambda: norm_swiglu),
            Way("torch.compile", _COMPILED, lambda: torch.compile(norm_swiglu, dynamic=False), _compiles),
            Way("one kernel", ("Triton",), lambda: norm_swiglu_row, _one),
            Way("RMSNorm 05, cuBLAS, SwiGLU", _MIXED,
                lambda: lambda x, norm, w, eps: swiglu(F.linear(rms_norm_rows(x, norm, eps), w))),
            Way("RMSNorm 05, product 06, SwiGLU", ("Triton",),
                lambda: lambda x, norm, w, eps: swiglu(product(rms_norm_rows(x, norm, eps), w)), _many),
            Way("one kernel by hand", ("CUDA",), lambda: norm_swiglu_row_cuda, _one),
            Way("RMSNorm 10, row 10, SwiGLU", ("Triton", "CUDA"), _norm_swiglu_cuda, _one),
        ),
    ),
    dispatch.Operator(
        "linear_add(Tensor x, Tensor w, Tensor(a!) add) -> ()",
        lambda x, w, add: None,
        lambda x, w, add: (x.shape[0], (w.shape, x.dtype)),
        (
            Way("PyTorch", ("library",), lambda: linear_add),
            Way("torch.compile", _COMPILED, lambda: torch.compile(linear_add, dynamic=False), _compiles),
            Way("one kernel", ("Triton",), lambda: linear_add_row, _one),
            Way("product 06, then +", ("Triton",), lambda: linear_add_06, _many),
            Way("one kernel by hand", ("CUDA",), lambda: linear_add_row_cuda, _one),
            Way("row 10, then +", ("library", "CUDA"), _linear_add_cuda, _one),
        ),
    ),
    dispatch.Operator(
        "prefill_attention(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor angles, int heads) -> Tensor",
        lambda qkv, k_cache, v_cache, angles, heads: qkv.new_empty((qkv.shape[0], heads * k_cache.shape[-1])),
        lambda qkv, k_cache, v_cache, angles, heads: (
            qkv.shape[0], (heads, k_cache.shape[0], k_cache.shape[2], qkv.dtype)),
        (
            Way("PyTorch", ("library",), lambda: prefill_attention),
            Way("torch.compile", _COMPILED, lambda: torch.compile(prefill_attention, dynamic=False), _compiles),
            Way("PyTorch, cuDNN", ("library",), lambda: prefill_attention_cudnn, _many),
            Way("one kernel, cuDNN", _MIXED, lambda: prefill_attention_rows, _many),
            Way("one kernel, FlashAttention-2", _MIXED,
                lambda: lambda *args: prefill_attention_rows(*args, SDPBackend.FLASH_ATTENTION), _many),
            Way("one kernel, attention 07", ("Triton",), lambda: prefill_attention_07, _fast),
        ),
    ),
    dispatch.Operator(
        "decode_attention(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor angles, Tensor position, "
        "int heads) -> Tensor",
        lambda qkv, k_cache, v_cache, angles, position, heads: qkv.new_empty((1, heads * k_cache.shape[-1])),
        lambda qkv, k_cache, v_cache, angles, position, heads: (
            k_cache.shape[1], (heads, k_cache.shape[0], k_cache.shape[2], qkv.dtype)),
        (
            Way("PyTorch", ("library",), lambda: decode_attention),
            Way("PyTorch, FlashAttention-2", ("library",), lambda: decode_attention_flash, _flash),
            Way("torch.compile", _COMPILED, lambda: torch.compile(decode_attention, dynamic=False), _compiles),
            Way("torch.compile, FlexAttention", _COMPILED,
                lambda: torch.compile(decode_attention_flex, dynamic=False), _compiles),
            Way("one kernel", ("Triton",), lambda: decode_attention_row, _one_token),
        ),
    ),
)  # fmt: skip
"""The definition first; the numbers are those of the lessons that the kernels stand in."""
