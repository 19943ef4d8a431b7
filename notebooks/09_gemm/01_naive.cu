// 01 naive: one thread computes one element of c, and neighbouring threads take neighbouring rows.
//
// Every thread reads a row of a and a column of b for itself. The 32 threads of a warp stand in 32 rows, so that each
// of their loads of a touches 32 sectors for 32 numbers. Expected: a small part of cuBLAS, and waiting for memory.
#ifndef BM
#define BM 32
#define BN 32
#endif

extern "C" __global__ void __launch_bounds__(BM * BN) gemm(const float* __restrict__ a, const float* __restrict__ b,
                                                           float* __restrict__ c, int M, int N, int K) {
  int row = blockIdx.y * BM + threadIdx.x % BM;
  int column = blockIdx.x * BN + threadIdx.x / BM;
  if (row >= M || column >= N) return;
  float sum = 0;
  for (int k = 0; k < K; ++k) sum += a[(size_t)row * K + k] * b[(size_t)k * N + column];
  c[(size_t)row * N + column] = sum;
}
