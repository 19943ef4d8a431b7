"""Conformance cases in CUDA C: each is short, and each uses something of its own that the CPU runner must get right."""

from functools import lru_cache

import numpy as np
import torch
from case import BF16, F16, F32, Case, Tensors, integers, normal

from helpers import cuda, source

LADDER = [rung for rung in source.load("09_gemm", "RUNGS") if not rung.linear]


@lru_cache(maxsize=1)
def module() -> cuda.RawModule:
    return cuda.RawModule(code=SOURCE, name_expressions=("axpy<float>", "axpy<double>", "row_sums<128>", "convolve<5>"))


def launch(name: str, grid, block, args, shared_mem: int = 0) -> None:
    module().get_function(name)(grid, block, args, shared_mem=shared_mem)


SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>

extern "C" __global__ void vector_add(const float* x, const float* y, float* out, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = x[i] + y[i];
}

extern "C" __global__ void strided_copy(const float* x, float* out, int rows, int cols, long long stride) {
  int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
  if (r < rows && c < cols) out[r * cols + c] = x[r * stride + c];
}

extern "C" __global__ void transpose_naive(const float* x, float* out, int rows, int cols) {
  int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
  if (r < rows && c < cols) out[c * rows + r] = x[r * cols + c];
}

extern "C" __global__ void transpose_shared(const float* x, float* out, int rows, int cols) {
  __shared__ float tile[32][33];
  int c = blockIdx.x * 32 + threadIdx.x, r0 = blockIdx.y * 32;
  for (int k = threadIdx.y; k < 32; k += blockDim.y)
    if (r0 + k < rows && c < cols) tile[k][threadIdx.x] = x[(r0 + k) * cols + c];
  __syncthreads();
  int r = r0 + threadIdx.x;
  for (int k = threadIdx.y; k < 32; k += blockDim.y)
    if (blockIdx.x * 32 + k < cols && r < rows) out[(blockIdx.x * 32 + k) * rows + r] = tile[threadIdx.x][k];
}

extern "C" __global__ void block_sum(const float* x, float* out, int n) {
  extern __shared__ float partial[];
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  partial[t] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = partial[0];
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) row_sums(const float* x, float* out, int cols) {
  __shared__ float of_warp[THREADS / 32];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < cols; c += THREADS) sum += x[blockIdx.x * cols + c];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < THREADS / 32) {
    sum = of_warp[threadIdx.x];
    for (int d = THREADS / 64; d > 0; d /= 2) sum += __shfl_xor_sync((1u << THREADS / 32) - 1, sum, d);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
  }
}

extern "C" __global__ void histogram(const unsigned char* x, int n, int* counts) {
  __shared__ int bins[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&counts[i], bins[i]);
}

__device__ float warp_max(float v) {
  for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}
__device__ float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}

extern "C" __global__ void softmax(const float* x, float* out, int rows, int cols) {  // a warp a row
  int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float most = -INFINITY, sum = 0.0f;
  for (int c = lane; c < cols; c += 32) most = fmaxf(most, x[row * cols + c]);
  most = warp_max(most);
  for (int c = lane; c < cols; c += 32) sum += __expf(x[row * cols + c] - most);
  sum = warp_sum(sum);
  for (int c = lane; c < cols; c += 32) out[row * cols + c] = __fdividef(__expf(x[row * cols + c] - most), sum);
}

__constant__ float weights[5];
template <int TAPS>
__global__ void convolve(const float* x, float* out, int n) {
  __shared__ float line[256 + TAPS - 1];
  int base = blockIdx.x * 256 - TAPS / 2;
  for (int k = threadIdx.x; k < 256 + TAPS - 1; k += 256) line[k] = base + k >= 0 && base + k < n ? x[base + k] : 0.0f;
  __syncthreads();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  float sum = 0.0f;
  for (int k = 0; k < TAPS; k++) sum += weights[k] * line[threadIdx.x + k];
  out[i] = sum;
}

extern "C" __global__ void scan(const int* x, int* out, int n) {  // inclusive; one block
  __shared__ int of_warp[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int v = threadIdx.x < n ? x[threadIdx.x] : 0;
  for (int d = 1; d < 32; d *= 2) {
    int before = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += before;
  }
  if (lane == 31) of_warp[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int w = lane < blockDim.x / 32 ? of_warp[lane] : 0;
    for (int d = 1; d < 32; d *= 2) {
      int before = __shfl_up_sync(~0u, w, d);
      if (lane >= d) w += before;
    }
    of_warp[lane] = w;
  }
  __syncthreads();
  if (threadIdx.x < n) out[threadIdx.x] = v + (warp ? of_warp[warp - 1] : 0);
}

template <class T>
__global__ void axpy(T a, const T* __restrict__ x, T* __restrict__ y, size_t n) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void half2_poly(const __half2* x, const __half2* y, __half2* out, int pairs) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  __half2 v = __hfma2(x[i], y[i], __float2half2_rn(0.5f));
  v = __hmul2(__hadd2(v, __low2half2(x[i])), __h2div(y[i], __hadd2(__habs2(y[i]), __float2half2_rn(1.0f))));
  float2 f = __half22float2(__hmax2(v, h2exp(x[i])));
  out[i] = __floats2half2_rn(f.x, -f.y);
}

using bf162 = __nv_bfloat162;
extern "C" __global__ void rmsnorm_bf16(const bf162* x, const bf162* w, bf162* out, int pairs) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < pairs; i += 32) {
    float2 v = __bfloat1622float2(x[blockIdx.x * pairs + i]);
    sum += v.x * v.x + v.y * v.y;
  }
  float scale = rsqrtf(warp_sum(sum) / (2 * pairs) + 1e-6f);
  for (int i = threadIdx.x; i < pairs; i += 32) {
    float2 v = __bfloat1622float2(x[blockIdx.x * pairs + i]), k = __bfloat1622float2(w[i]);
    out[blockIdx.x * pairs + i] = __floats2bfloat162_rn(v.x * scale * k.x, v.y * scale * k.y);
  }
}

extern "C" __global__ void bf16_mix(const __nv_bfloat16* x, const __nv_bfloat16* y, __nv_bfloat16* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = __hfma(x[i], y[i], __hadd(x[i], __float2bfloat16(0.25f)));
}

extern "C" __global__ void reverse_large(const float* x, float* out, int n) {  // 4n = 80,000 bytes of shared
  extern __shared__ __align__(16) float staged[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) staged[i] = x[blockIdx.x * n + i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[blockIdx.x * n + i] = staged[n - 1 - i];
}

struct Affine { int n; float scale; double shift; };
extern "C" __global__ void affine(Affine p, const float* x, double* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) out[i] = p.scale * (double)x[i] + p.shift;
}

extern "C" __global__ void compact(const int* x, int n, int* out, int* counts) {  // a region a warp
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
  bool keep = i < n && x[i] % 3 == 0;
  unsigned kept = __ballot_sync(0xffffffffu, keep);
  if (keep) out[i - lane + __popc(kept & ((1u << lane) - 1))] = x[i];
  if (lane == 0) counts[i / 32] = __popc(kept);
}

extern "C" __global__ void gelu_float4(const float4* x, float4* out, int n4) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n4) return;
  float4 v = __ldg(x + i);
  auto gelu = [](float a) { return 0.5f * a * (1.0f + tanhf(0.7978845608f * (a + 0.044715f * a * a * a))); };
  __stcs(out + i, make_float4(gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w)));
}

extern "C" __global__ void layernorm(const float* x, const float* w, const float* b, float* out, int cols) {
  __shared__ float2 of_warp[8];
  const float* row = x + blockIdx.x * cols;
  float sum = 0.0f, squares = 0.0f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += row[c], squares += row[c] * row[c];
  sum = warp_sum(sum), squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = make_float2(sum, squares);
  __syncthreads();
  sum = squares = 0.0f;
  for (int k = 0; k < blockDim.x / 32; k++) sum += of_warp[k].x, squares += of_warp[k].y;
  float mean = sum / cols, scale = rsqrtf(squares / cols - mean * mean + 1e-5f);
  for (int c = threadIdx.x; c < cols; c += blockDim.x)
    out[blockIdx.x * cols + c] = (row[c] - mean) * scale * w[c] + b[c];
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float ta[16][16], tb[16][16];
  int row = blockIdx.y * 16 + threadIdx.y, col = blockIdx.x * 16 + threadIdx.x;
  float sum = 0.0f;
  for (int k0 = 0; k0 < k; k0 += 16) {
    ta[threadIdx.y][threadIdx.x] = row < m && k0 + threadIdx.x < k ? a[row * k + k0 + threadIdx.x] : 0.0f;
    tb[threadIdx.y][threadIdx.x] = k0 + threadIdx.y < k && col < n ? b[(k0 + threadIdx.y) * n + col] : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[threadIdx.y][i] * tb[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && col < n) c[row * n + col] = sum;
}

extern "C" __global__ void group_sums(const int* key, const int* value, int* out) {  // sum of the lanes with my key
  int i = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
  unsigned peers = __match_any_sync(0xffffffffu, key[i]);
  for (int lane = 0; lane < 32; lane++) {
    int v = __shfl_sync(0xffffffffu, value[i], lane);
    if (peers >> lane & 1) sum += v;
  }
  out[i] = sum * 1000 + __reduce_max_sync(0xffffffffu, value[i]);
}

__device__ float atomic_max(float* address, float value) {
  int* bits = (int*)address, old = *bits, seen;
  do {
    seen = old;
    old = atomicCAS(bits, seen, __float_as_int(fmaxf(value, __int_as_float(seen))));
  } while (old != seen);
  return __int_as_float(old);
}
using u64 = unsigned long long;
extern "C" __global__ void atomics(const float* x, int n, float* most, int* ints, u64* sum, double* total) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomic_max(most, x[i]);
  atomicMin(&ints[0], (int)(x[i] * 1000));
  atomicOr((unsigned*)&ints[1], 1u << (i % 31));
  atomicXor(&ints[2], i);
  atomicSub(&ints[3], 2);
  atomicAdd(sum, (u64)i << 20);
  atomicAdd(total, (double)(i % 7));
  if (__syncthreads_count(x[i] > 0) && threadIdx.x == 0) atomicAdd(&ints[4], 1);
}

extern "C" __global__ void bits(const unsigned* x, unsigned* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned v = x[i];
  out[i] = __brev(v) ^ __clz(v) ^ (__ffs(v) << 8) ^ __funnelshift_l(v, v, 7) ^ __umulhi(v, 2654435761u)
         ^ __byte_perm(v, ~v, 0x3715) ^ __float_as_uint((float)(v & 0xffff)) ^ (unsigned)__dp4a((int)v, 0x01020304, 5);
}
"""


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def run_vector_add(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("vector_add", (3,), (128,), (t["x"], t["y"], out, out.numel()))
    return {"out": out}


def run_strided_copy(t: Tensors) -> Tensors:
    x = t["x"][:, 3:-4]
    out = torch.empty(x.shape, device=x.device)
    launch("strided_copy", (2, 5), (32, 8), (x, out, x.shape[0], x.shape[1], x.stride(0)))
    return {"out": out}


def transpose(kernel: str, threads: tuple[int, int]):
    def run(t: Tensors) -> Tensors:
        rows, cols = t["x"].shape
        out = torch.empty(cols, rows, device=t["x"].device)
        launch(kernel, (blocks(cols, 32), blocks(rows, 32)), threads, (t["x"], out, rows, cols))
        return {"out": out}

    return run


def run_block_sum(t: Tensors) -> Tensors:
    n = t["x"].numel()
    out = torch.empty(blocks(n, 256), device=t["x"].device)
    launch("block_sum", (out.numel(),), (256,), (t["x"], out, n), shared_mem=256 * 4)
    return {"out": out}


def run_row_sums(t: Tensors) -> Tensors:
    out = torch.empty(t["x"].shape[0], device=t["x"].device)
    launch("row_sums<128>", (out.numel(),), (128,), (t["x"], out, t["x"].shape[1]))
    return {"out": out}


def run_histogram(t: Tensors) -> Tensors:
    out = torch.zeros(256, dtype=torch.int32, device=t["x"].device)
    launch("histogram", (4,), (128,), (t["x"], t["x"].numel(), out))
    return {"counts": out}


def run_softmax(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    rows, cols = out.shape
    launch("softmax", (blocks(rows, 4),), (128,), (t["x"], out, rows, cols))
    return {"out": out}


def run_convolve(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    module().get_global("weights").view(torch.float32).copy_(t["weights"])
    launch("convolve<5>", (blocks(out.numel(), 256),), (256,), (t["x"], out, out.numel()))
    return {"out": out}


def run_scan(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("scan", (1,), (1024,), (t["x"], out, out.numel()))
    return {"out": out}


def axpy(kind: str):
    def run(t: Tensors) -> Tensors:
        y = t["y"].clone()
        launch(f"axpy<{kind}>", (blocks(y.numel(), 64),), (64,), (1.7, t["x"], y, y.numel()))
        return {"y": y}

    return run


def run_half2(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("half2_poly", (blocks(out.numel() // 2, 64),), (64,), (t["x"], t["y"], out, out.numel() // 2))
    return {"out": out}


def half2_reference(t: Tensors) -> Tensors:
    x, y = t["x"].double(), t["y"].double()
    low = x.view(-1, 2)[:, :1].expand(-1, 2).reshape(-1)
    v = torch.maximum((x * y + 0.5 + low) * (y / (y.abs() + 1)), x.exp())
    return {"out": v * torch.tensor([1.0, -1.0]).repeat(v.numel() // 2)}


def run_rmsnorm(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("rmsnorm_bf16", (out.shape[0],), (32,), (t["x"], t["w"], out, out.shape[1] // 2))
    return {"out": out}


def rmsnorm_reference(t: Tensors) -> Tensors:
    x = t["x"].double()
    return {"out": x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * t["w"].double()}


def run_bf16_mix(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("bf16_mix", (blocks(out.numel(), 64),), (64,), (t["x"], t["y"], out, out.numel()))
    return {"out": out}


def run_reverse_large(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    n = out.shape[1]
    launch("reverse_large", (out.shape[0],), (256,), (t["x"], out, n), shared_mem=4 * n)
    return {"out": out}


def run_affine(t: Tensors) -> Tensors:
    n = t["x"].numel()
    out = torch.empty(n, dtype=torch.float64, device=t["x"].device)
    layout = np.dtype([("n", "i4"), ("scale", "f4"), ("shift", "f8")])
    launch("affine", (blocks(n, 128),), (128,), (np.array([(n, 2.5, -0.125)], layout), t["x"], out))
    return {"out": out}


def run_compact(t: Tensors) -> Tensors:
    n = t["x"].numel()
    out, counts = (
        torch.full_like(t["x"], -1),
        torch.zeros(blocks(n, 32), dtype=torch.int32, device=t["x"].device),
    )
    launch("compact", (blocks(n, 128),), (128,), (t["x"], n, out, counts))
    return {"out": out, "counts": counts}


def compact_reference(t: Tensors) -> Tensors:
    out, counts = torch.full_like(t["x"], -1), []
    for i, part in enumerate(t["x"].split(32)):
        kept = part[part % 3 == 0]
        out[32 * i : 32 * i + kept.numel()] = kept
        counts.append(kept.numel())
    return {"out": out, "counts": torch.tensor(counts)}


def run_gelu(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("gelu_float4", (blocks(out.numel() // 4, 128),), (128,), (t["x"], out, out.numel() // 4))
    return {"out": out}


def run_layernorm(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("layernorm", (out.shape[0],), (256,), (t["x"], t["w"], t["b"], out, out.shape[1]))
    return {"out": out}


def run_matmul(t: Tensors) -> Tensors:
    (m, k), n = t["a"].shape, t["b"].shape[1]
    out = torch.empty(m, n, device=t["a"].device)
    launch("matmul", (blocks(n, 16), blocks(m, 16)), (16, 16), (t["a"], t["b"], out, m, n, k))
    return {"out": out}


def run_rung(rung):
    return lambda t: {"out": rung(t["a"], t["b"])}


def run_group_sums(t: Tensors) -> Tensors:
    out = torch.empty_like(t["key"])
    launch("group_sums", (out.numel() // 64,), (64,), (t["key"], t["value"], out))
    return {"out": out}


def group_sums_reference(t: Tensors) -> Tensors:
    key, value = t["key"].view(-1, 32), t["value"].view(-1, 32)
    sums = ((key[:, :, None] == key[:, None, :]) * value[:, None, :]).sum(2)
    return {"out": (sums * 1000 + value.max(1, keepdim=True).values).reshape(-1)}


def run_atomics(t: Tensors) -> Tensors:
    device, n = t["x"].device, t["x"].numel()
    most = torch.full((1,), -1e30, device=device)
    ints = torch.zeros(5, dtype=torch.int32, device=device)
    total, real = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    launch("atomics", (blocks(n, 64),), (64,), (t["x"], n, most, ints, total, real))
    return {"most": most, "ints": ints, "sum": total, "total": real}


def atomics_reference(t: Tensors) -> Tensors:
    x, i = t["x"], torch.arange(t["x"].numel())
    xor = int(np.bitwise_xor.reduce(i.numpy()))
    positive = sum(bool((part > 0).any()) for part in x.split(64))
    ints = torch.tensor([min(0, int((x * 1000).int().min())), 2**31 - 1, xor, -2 * i.numel(), positive])
    return {
        "most": x.max()[None],
        "ints": ints,
        "sum": (i << 20).sum()[None],
        "total": (i % 7).double().sum()[None],
    }


def run_bits(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    launch("bits", (blocks(out.numel(), 128),), (128,), (t["x"], out, out.numel()))
    return {"out": out}


def bits_reference(t: Tensors) -> Tensors:
    def one(v: int) -> int:
        whole = v | ((~v & 0xFFFFFFFF) << 32)
        permuted = sum(((whole >> 8 * ((0x3715 >> 4 * k) & 7)) & 0xFF) << 8 * k for k in range(4))
        signed = [b - 256 if b > 127 else b for b in v.to_bytes(4, "little")]
        dot = sum(b * (4 - k) for k, b in enumerate(signed)) + 5
        real = int(np.float32(v & 0xFFFF).view(np.uint32))
        shifted = (v << 7 | v >> 25) & 0xFFFFFFFF
        parts = [int(f"{v:032b}"[::-1], 2), 32 - v.bit_length(), ((v & -v).bit_length()) << 8, shifted]
        parts += [v * 2654435761 >> 32, permuted, real, dot & 0xFFFFFFFF]
        return int(np.bitwise_xor.reduce(np.array(parts, np.uint64)))

    values = np.array([one(int(v) & 0xFFFFFFFF) for v in t["x"]], np.uint32)
    return {"out": torch.from_numpy(values.view(np.int32))}


def bf16_mix_reference(t: Tensors) -> Tensors:
    return {"out": t["x"].double() * t["y"].double() + t["x"].double() + 0.25}


def convolve_reference(t: Tensors) -> Tensors:
    x, w = t["x"].double(), t["weights"].double()
    return {"out": torch.nn.functional.conv1d(x[None, None], w[None, None], padding=2)[0, 0]}


def layernorm_reference(t: Tensors) -> Tensors:
    d = {k: v.double() for k, v in t.items()}
    return {"out": torch.nn.functional.layer_norm(d["x"], d["x"].shape[1:], d["w"], d["b"])}


def pair(n: int, dtype: torch.dtype = torch.float32):
    return lambda g: {"x": normal(g, n, dtype=dtype), "y": normal(g, n, dtype=dtype)}


def one(*shape: int):
    return lambda g: {"x": normal(g, *shape)}


CASES = [
    Case("cuda.vector_add", "cuda", pair(1000), run_vector_add, lambda t: {"out": t["x"] + t["y"]}, 0),
    Case("cuda.strided_copy", "cuda", one(37, 64), run_strided_copy, lambda t: {"out": t["x"][:, 3:-4]}, 0),
    Case(
        "cuda.transpose_naive",
        "cuda",
        one(45, 70),
        transpose("transpose_naive", (32, 32)),
        lambda t: {"out": t["x"].T},
        0,
    ),
    Case(
        "cuda.transpose_shared",
        "cuda",
        one(70, 45),
        transpose("transpose_shared", (32, 8)),
        lambda t: {"out": t["x"].T},
        0,
    ),
    Case(
        "cuda.block_sum",
        "cuda",
        one(3000),
        run_block_sum,
        lambda t: {"out": torch.stack([p.double().sum() for p in t["x"].split(256)])},
        F32,
    ),
    Case("cuda.row_sums", "cuda", one(33, 777), run_row_sums, lambda t: {"out": t["x"].double().sum(1)}, F32),
    Case(
        "cuda.histogram",
        "cuda",
        lambda g: {"x": integers(g, 251, 20000, dtype=torch.uint8)},
        run_histogram,
        lambda t: {"counts": torch.bincount(t["x"].long(), minlength=256)},
        0,
    ),
    Case("cuda.softmax", "cuda", one(19, 200), run_softmax, lambda t: {"out": t["x"].double().softmax(1)}, F32),
    Case(
        "cuda.convolve",
        "cuda",
        lambda g: {"x": normal(g, 2000), "weights": normal(g, 5)},
        run_convolve,
        convolve_reference,
        F32,
    ),
    Case(
        "cuda.scan",
        "cuda",
        lambda g: {"x": integers(g, 99, 1000)},
        run_scan,
        lambda t: {"out": t["x"].cumsum(0)},
        0,
    ),
    Case(
        "cuda.axpy_float",
        "cuda",
        pair(777),
        axpy("float"),
        lambda t: {"y": 1.7 * t["x"].double() + t["y"]},
        F32,
    ),
    Case(
        "cuda.axpy_double",
        "cuda",
        pair(777, torch.float64),
        axpy("double"),
        lambda t: {"y": 1.7 * t["x"] + t["y"]},
        1e-15,
    ),
    Case("cuda.half2_poly", "cuda", pair(1000, torch.float16), run_half2, half2_reference, F16),
    Case(
        "cuda.rmsnorm_bf16",
        "cuda",
        lambda g: {"x": normal(g, 9, 320, dtype=torch.bfloat16), "w": normal(g, 320, dtype=torch.bfloat16)},
        run_rmsnorm,
        rmsnorm_reference,
        BF16,
    ),
    Case("cuda.bf16_mix", "cuda", pair(1000, torch.bfloat16), run_bf16_mix, bf16_mix_reference, BF16),
    Case("cuda.reverse_large", "cuda", one(2, 20000), run_reverse_large, lambda t: {"out": t["x"].flip(1)}, 0),
    Case(
        "cuda.affine",
        "cuda",
        one(500),
        run_affine,
        lambda t: {"out": 2.5 * t["x"].double() - 0.125},
        1e-15,
    ),
    Case("cuda.compact", "cuda", lambda g: {"x": integers(g, 100, 1000)}, run_compact, compact_reference, 0),
    Case(
        "cuda.gelu_float4",
        "cuda",
        one(4000),
        run_gelu,
        lambda t: {"out": torch.nn.functional.gelu(t["x"].double(), approximate="tanh")},
        F32,
    ),
    Case(
        "cuda.layernorm",
        "cuda",
        lambda g: {"x": normal(g, 11, 300), "w": normal(g, 300), "b": normal(g, 300)},
        run_layernorm,
        layernorm_reference,
        F32,
    ),
    Case(
        "cuda.matmul",
        "cuda",
        lambda g: {"a": normal(g, 50, 70), "b": normal(g, 70, 45)},
        run_matmul,
        lambda t: {"out": t["a"].double() @ t["b"].double()},
        F32,
    ),
    Case(
        "cuda.group_sums",
        "cuda",
        lambda g: {"key": integers(g, 5, 256), "value": integers(g, 50, 256)},
        run_group_sums,
        group_sums_reference,
        0,
    ),
    Case("cuda.atomics", "cuda", one(640), run_atomics, atomics_reference, 0),
    Case("cuda.bits", "cuda", lambda g: {"x": integers(g, 2**31, 500)}, run_bits, bits_reference, 0),
    *(
        Case(
            f"cuda.gemm_{rung.number:02}_{rung.name}",
            "cuda",
            lambda g: {"a": normal(g, 131, 36), "b": normal(g, 36, 136)},
            run_rung(rung),
            lambda t: {"out": t["a"].double() @ t["b"].double()},
            F32,
        )
        for rung in LADDER
    ),
]
