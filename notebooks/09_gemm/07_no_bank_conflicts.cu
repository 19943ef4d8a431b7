// 07 no_bank_conflicts: what a warp reads or writes at once lies in different banks of shared memory.
//
// The step, twice. Stores: the lanes of a warp write 16 rows of a for two columns of tile_a at a time, and columns BM
// floats apart begin in the same bank; four floats of padding turn them apart. Loads: at 8 columns a thread, lanes that
// read float4 stand 32 bytes apart, and every second one meets the bank of another; so a thread's tile is cut in pieces
// of 4 x 4, and in each piece neighbouring threads read neighbouring float4.
// Expected: half the cycles in shared memory for what 06 did twice.

#ifndef BM
#define BM 128  // rows of c that a block computes
#define BN 128  // and columns
#define BK 8
#define TM 8    // rows of c that a thread computes
#define TN 8    // and columns
#define THREADS 256
#endif
#define PAD 4   // floats: the rows of tile_a stay aligned to 16 bytes
static_assert(THREADS == BM * BN / TM / TN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ alignas(16) float tile_a[BK][BM + PAD], tile_b[BK][BN];
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int y = threadIdx.x / (BN / TN) * 4, x = threadIdx.x % (BN / TN) * 4;  // of the first of the thread's pieces
    const int down = BM / TM * 4, right = BN / TN * 4;                     // from one piece to the next
    alignas(16) float sums[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = 0; i < BM * BK / 4; i += THREADS) {
            int r = (i + threadIdx.x) / (BK / 4), kk = (i + threadIdx.x) % (BK / 4) * 4;
            bool inside = row0 + r < M && k0 + kk < K;
            float4 four = inside ? *(const float4*)&a[(size_t)(row0 + r) * K + k0 + kk] : zeros;
            tile_a[kk][r] = four.x;
            tile_a[kk + 1][r] = four.y;
            tile_a[kk + 2][r] = four.z;
            tile_a[kk + 3][r] = four.w;
        }
        for (int i = 0; i < BK * BN / 4; i += THREADS) {
            int kk = (i + threadIdx.x) / (BN / 4), s = (i + threadIdx.x) % (BN / 4) * 4;
            bool inside = k0 + kk < K && col0 + s < N;
            *(float4*)&tile_b[kk][s] = inside ? *(const float4*)&b[(size_t)(k0 + kk) * N + col0 + s] : zeros;
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < BK; kk++) {
            alignas(16) float from_a[TM], from_b[TN];
            for (int i = 0; i < TM; i += 4) *(float4*)&from_a[i] = *(float4*)&tile_a[kk][y + i / 4 * down];
            for (int j = 0; j < TN; j += 4) *(float4*)&from_b[j] = *(float4*)&tile_b[kk][x + j / 4 * right];
            for (int i = 0; i < TM; i++)
                for (int j = 0; j < TN; j++) sums[i][j] += from_a[i] * from_b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j += 4) {
            int row = row0 + y + i / 4 * down + i % 4, col = col0 + x + j / 4 * right;
            if (row < M && col < N) *(float4*)&c[(size_t)row * N + col] = *(float4*)&sums[i][j];
        }
}
