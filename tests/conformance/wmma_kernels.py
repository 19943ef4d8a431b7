"""Conformance cases of tensor-core fragments (mma.h): which lane holds which element, products, sums in half."""

from functools import lru_cache

import torch
from case import F16, F32, Case, Tensors, normal

from helpers import cuda

KINDS = {"half": torch.float16, "__nv_bfloat16": torch.bfloat16, "precision::tf32": torch.float32}
PLACES = {
    f"places<{m}, {n}, {k}, {kind}, {sums}>": (m, n, k, kind, sums)
    for m, n, k, kind, sums in (
        *((m, n, 16, "half", sums) for m, n in ((16, 16), (32, 8), (8, 32)) for sums in ("float", "half")),
        *((m, n, 16, "__nv_bfloat16", "float") for m, n in ((16, 16), (32, 8), (8, 32))),
        (16, 16, 8, "precision::tf32", "float"),
    )
}


@lru_cache(maxsize=1)
def module() -> cuda.RawModule:
    return cuda.RawModule(code=SOURCE, name_expressions=tuple(PLACES))


SOURCE = r"""
#include <mma.h>
using namespace nvcuda::wmma;

template <class F>
__device__ void note(const F& rows, const F& cols, int* out) {  // row and column of each element that this lane holds
  for (int i = 0; i < 16; i++)
    out[i * 32 + threadIdx.x] = i < rows.num_elements ? (int)(float)rows.x[i] * 64 + (int)(float)cols.x[i] : -1;
}

template <int M, int N, int K, class T, class S>
__global__ void places(const typename fragment<matrix_a, M, N, K, T, row_major>::storage_element_type* row,
                       const typename fragment<matrix_a, M, N, K, T, row_major>::storage_element_type* col,
                       const S* sum_row, const S* sum_col, int* out) {  // tables of 32 x 32: each element's row, column
  fragment<matrix_a, M, N, K, T, row_major> a, a2;
  load_matrix_sync(a, row, 32);
  load_matrix_sync(a2, col, 32);
  note(a, a2, out);
  fragment<matrix_a, M, N, K, T, col_major> t, t2;
  load_matrix_sync(t, col, 32);
  load_matrix_sync(t2, row, 32);
  note(t, t2, out + 512);
  fragment<matrix_b, M, N, K, T, row_major> b, b2;
  load_matrix_sync(b, row, 32);
  load_matrix_sync(b2, col, 32);
  note(b, b2, out + 1024);
  fragment<accumulator, M, N, K, S> c, c2;
  load_matrix_sync(c, sum_row, 32, mem_row_major);
  load_matrix_sync(c2, sum_col, 32, mem_row_major);
  note(c, c2, out + 1536);
}

// c = a @ b by blocks of 32 x 64, two warps with two rows of four sums each; any m, n and k
extern "C" __global__ void gemm(const half* a, const half* b, float* c, int m, int n, int k) {
  __shared__ half left[32][24], right[16][72];
  __shared__ float out[32][68];
  int warp = threadIdx.x / 32, row = blockIdx.y * 32, col = blockIdx.x * 64;
  fragment<accumulator, 16, 16, 16, float> sums[4];
  for (auto& sum : sums) fill_fragment(sum, 0.0f);
  for (int k0 = 0; k0 < k; k0 += 16) {
    for (int i = threadIdx.x; i < 32 * 16; i += 64) {
      int r = i / 16, d = i % 16;
      left[r][d] = row + r < m && k0 + d < k ? a[(row + r) * k + k0 + d] : half(0.0f);
    }
    for (int i = threadIdx.x; i < 16 * 64; i += 64) {
      int d = i / 64, r = i % 64;
      right[d][r] = col + r < n && k0 + d < k ? b[(k0 + d) * n + col + r] : half(0.0f);
    }
    __syncthreads();
    fragment<matrix_a, 16, 16, 16, half, row_major> fa;
    fragment<matrix_b, 16, 16, 16, half, row_major> fb;
    load_matrix_sync(fa, &left[16 * warp][0], 24);
    for (int j = 0; j < 4; j++) {
      load_matrix_sync(fb, &right[0][16 * j], 72);
      mma_sync(sums[j], fa, fb, sums[j]);
    }
    __syncthreads();
  }
  for (int j = 0; j < 4; j++) store_matrix_sync(&out[16 * warp][16 * j], sums[j], 68, mem_row_major);
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * 64; i += 64)
    if (row + i / 64 < m && col + i % 64 < n) c[(row + i / 64) * n + col + i % 64] = out[i / 64][i % 64];
}

// y = (relu(x @ w.T) * scale).T from bfloat16; a warp a tile, straight from global memory
extern "C" __global__ void relu_columns(const __nv_bfloat16* x, const __nv_bfloat16* w, float* y, int m, int k,
                                        float scale) {
  fragment<matrix_a, 8, 32, 16, __nv_bfloat16, row_major> fx;
  fragment<matrix_b, 8, 32, 16, __nv_bfloat16, col_major> fw;
  fragment<accumulator, 8, 32, 16, float> sum;
  fill_fragment(sum, 0.0f);
  for (int d = 0; d < k; d += 16) {
    load_matrix_sync(fx, x + blockIdx.x * 8 * k + d, k);
    load_matrix_sync(fw, w + blockIdx.y * 32 * k + d, k);
    mma_sync(sum, fx, fw, sum);
  }
  for (int i = 0; i < sum.num_elements; i++) sum.x[i] = fmaxf(sum.x[i], 0.0f) * scale;
  store_matrix_sync(y + blockIdx.y * 32 * m + blockIdx.x * 8, sum, m, mem_col_major);
}

// c += a @ b with sums in half, and an element-wise sum of two fragments
extern "C" __global__ void half_sums(const half* a, const half* b, half* c) {
  fragment<matrix_a, 32, 8, 16, half, col_major> fa;
  fragment<matrix_b, 32, 8, 16, half, row_major> fb;
  fragment<accumulator, 32, 8, 16, half> before, sum;
  load_matrix_sync(fa, a, 32);
  load_matrix_sync(fb, b, 8);
  load_matrix_sync(before, c, 8, mem_row_major);
  fill_fragment(sum, 0.0f);
  mma_sync(sum, fa, fb, sum);
  for (int i = 0; i < sum.num_elements; i++) sum.x[i] = __hadd(sum.x[i], before.x[i]);
  store_matrix_sync(c, sum, 8, mem_row_major);
}

extern "C" __global__ void tf32_product(const float* a, const float* b, float* c) {
  fragment<matrix_a, 16, 16, 8, precision::tf32, row_major> fa;
  fragment<matrix_b, 16, 16, 8, precision::tf32, col_major> fb;
  fragment<accumulator, 16, 16, 8, float> sum;
  fill_fragment(sum, 0.0f);
  load_matrix_sync(fa, a, 8);
  load_matrix_sync(fb, b, 8);
  for (auto& x : fa.x) x = __float_to_tf32(x);
  for (auto& x : fb.x) x = __float_to_tf32(x);
  mma_sync(sum, fa, fb, sum);
  store_matrix_sync(c, sum, 16, mem_row_major);
}
"""


def run_places(t: Tensors) -> Tensors:
    out = {}
    for name, (_, _, _, kind, sums) in PLACES.items():
        operands, types = KINDS[kind], {"float": torch.float32, "half": torch.float16}[sums]
        tables = (t["row"].to(operands), t["col"].to(operands), t["row"].to(types), t["col"].to(types))
        out[name] = torch.empty(4, 16, 32, dtype=torch.int32, device=t["row"].device)
        module().get_function(name)((1,), (32,), (*tables, out[name]))
    return out


def places_reference(t: Tensors) -> Tensors:
    """The layouts of the PTX manual's mma instructions for each piece of 8 x 8 (tf32: 8 x 4), and their order."""
    lane, i = torch.arange(32), torch.arange(16)[:, None]
    orders = {  # by rows and columns of pieces: of an operand (left or right) and of a sum
        "left": {(1, 2): "00 01", (2, 2): "00 10 01 11", (4, 2): "00 10 01 11 20 30 21 31"},
        "right": {(2, 1): "00 10", (2, 2): "00 10 01 11", (2, 4): "00 01 10 11 02 03 12 13"},
        "sum": {(1, 4): "00 01 02 03", (2, 2): "00 10 01 11", (4, 1): "00 10 20 30"},
    }

    def of(which: str, rows: int, cols: int, wide: int, held: int) -> torch.Tensor:
        turned = which == "right" or (which == "sum" and rows == 8)
        high, broad = (4 * wide, 8) if turned else (8, 4 * wide)
        order = torch.tensor([[int(c) for c in p] for p in orders[which][rows // high, cols // broad].split()])
        e = i % (rows * cols // 32)
        along, across = lane % 4 * wide + e % wide, (lane // 4).expand(16, 32)
        row, col = (along, across) if turned else (across, along)
        piece = order[e[:, 0] // wide]
        row, col = row + high * piece[:, :1], col + broad * piece[:, 1:]
        return torch.where(i < held, row * 64 + col, -1).to(torch.int32)

    out = {}
    for name, (m, n, k, kind, _) in PLACES.items():
        wide = 1 if kind == "precision::tf32" else 2
        twice = 16 if kind == "half" else 0  # operands of half are held twice where they are few
        a = of("left", m, k, wide, max(twice, m * k // 32))
        b = of("right", k, n, wide, max(twice, k * n // 32))
        out[name] = torch.stack([a, a, b, of("sum", m, n, 2, 8)])
    return out


def run_gemm(t: Tensors) -> Tensors:
    (m, k), n = t["a"].shape, t["b"].shape[1]
    out = torch.empty(m, n, device=t["a"].device)
    grid = (-(-n // 64), -(-m // 32))
    module().get_function("gemm")(grid, (64,), (t["a"], t["b"], out, m, n, k))
    return {"out": out}


def run_relu_columns(t: Tensors) -> Tensors:
    (m, k), n = t["x"].shape, t["w"].shape[0]
    out = torch.empty(n, m, device=t["x"].device)
    module().get_function("relu_columns")((m // 8, n // 32), (32,), (t["x"], t["w"], out, m, k, 0.125))
    return {"out": out}


def run_half_sums(t: Tensors) -> Tensors:
    out = t["c"].clone()
    module().get_function("half_sums")((1,), (32,), (t["a"], t["b"], out))
    return {"out": out}


def run_tf32(t: Tensors) -> Tensors:
    out = torch.empty(16, 16, device=t["a"].device)
    module().get_function("tf32_product")((1,), (32,), (t["a"], t["b"], out))
    return {"out": out}


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32).double()


CASES = [
    Case(
        "cuda.wmma_places",
        "cuda",
        lambda g: {
            "row": torch.arange(32)[:, None].expand(32, 32).contiguous(),
            "col": torch.arange(32).expand(32, 32).contiguous(),
        },
        run_places,
        places_reference,
        0,
    ),
    Case(
        "cuda.wmma_gemm",
        "cuda",
        lambda g: {"a": normal(g, 45, 70, dtype=torch.float16), "b": normal(g, 70, 101, dtype=torch.float16)},
        run_gemm,
        lambda t: {"out": t["a"].double() @ t["b"].double()},
        F32,
    ),
    Case(
        "cuda.wmma_relu_columns",
        "cuda",
        lambda g: {"x": normal(g, 24, 64, dtype=torch.bfloat16), "w": normal(g, 64, 64, dtype=torch.bfloat16)},
        run_relu_columns,
        lambda t: {"out": (t["x"].double() @ t["w"].double().T).relu().T / 8},
        F32,
    ),
    Case(
        "cuda.wmma_half_sums",
        "cuda",
        lambda g: {
            "a": normal(g, 16, 32, dtype=torch.float16),
            "b": normal(g, 16, 8, dtype=torch.float16),
            "c": normal(g, 32, 8, dtype=torch.float16),
        },
        run_half_sums,
        lambda t: {"out": t["a"].double().T @ t["b"].double() + t["c"].double()},
        F16,
    ),
    Case(
        "cuda.wmma_tf32",
        "cuda",
        lambda g: {"a": normal(g, 16, 8), "b": normal(g, 16, 8)},
        run_tf32,
        lambda t: {"out": as_tf32(t["a"]) @ as_tf32(t["b"]).T},
        F32,
    ),
]
