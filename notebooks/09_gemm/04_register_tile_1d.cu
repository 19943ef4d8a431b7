// 04 register_tile_1d: a thread computes TM elements of a column of c and keeps their sums in registers.
//
// The step: what a thread reads of tile_b is used TM times before the next read.
// Expected: per product 1 + 1/TM loads from shared memory in place of 2, and wider reads where the compiler can
// join neighbours along k; a block's tile grows with the work of a thread, so L2 is asked for less, too.

#ifndef BM
#define BM 64   // rows of c that a block computes
#define BN 64   // and columns
#define BK 8
#define TM 8    // rows of c that a thread computes, in one column
#define THREADS 512
#endif
static_assert(THREADS == BM * BN / TM);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ float tile_a[BM][BK], tile_b[BK][BN];
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int y = threadIdx.x / BN * TM, x = threadIdx.x % BN;
    float sums[TM] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = 0; i < BM * BK; i += THREADS) {
            int r = (i + threadIdx.x) / BK, kk = (i + threadIdx.x) % BK, row = row0 + r, col = k0 + kk;
            tile_a[r][kk] = row < M && col < K ? a[(size_t)row * K + col] : 0.0f;
        }
        for (int i = 0; i < BK * BN; i += THREADS) {
            int kk = (i + threadIdx.x) / BN, s = (i + threadIdx.x) % BN, row = k0 + kk, col = col0 + s;
            tile_b[kk][s] = row < K && col < N ? b[(size_t)row * N + col] : 0.0f;
        }
        __syncthreads();
        for (int kk = 0; kk < BK; kk++) {
            float from_b = tile_b[kk][x];
            for (int i = 0; i < TM; i++) sums[i] += tile_a[y + i][kk] * from_b;
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        if (row0 + y + i < M && col0 + x < N) c[(size_t)(row0 + y + i) * N + col0 + x] = sums[i];
}
