// 05 register_tile_2d: a thread computes TM x TN elements of c, an outer product for each k.
//
// The step: for each k a thread reads TM numbers of a and TN of b, and each is used for a whole row or
// column of its tile: an outer product.
// Expected: 16 reads from shared memory for 64 products at 8 x 8, so 1/4 a product in place of 04's 9/8. The sums alone
// are 64 registers: fewer threads fit on an SM, and each must find in itself what it can do while it waits.

#ifndef BM
#define BM 128  // rows of c that a block computes
#define BN 128  // and columns
#define BK 8
#define TM 8    // rows of c that a thread computes
#define TN 8    // and columns
#define THREADS 256
#endif
static_assert(THREADS == BM * BN / TM / TN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ float tile_a[BM][BK], tile_b[BK][BN];
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int y = threadIdx.x / (BN / TN) * TM, x = threadIdx.x % (BN / TN) * TN;
    float sums[TM][TN] = {};
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
            float from_a[TM], from_b[TN];
            for (int i = 0; i < TM; i++) from_a[i] = tile_a[y + i][kk];
            for (int j = 0; j < TN; j++) from_b[j] = tile_b[kk][x + j];
            for (int i = 0; i < TM; i++)
                for (int j = 0; j < TN; j++) sums[i][j] += from_a[i] * from_b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j++)
            if (row0 + y + i < M && col0 + x + j < N) c[(size_t)(row0 + y + i) * N + col0 + x + j] = sums[i][j];
}
