// 08 double_buffering: while a block multiplies one pair of tiles, the next pair is on its way.
//
// The step: two buffers in shared memory. Loads for the next tiles are issued before the products and wait in
// registers; after the products they are stored to the buffer that nobody reads, so that one barrier a tile is enough.
// Expected: the way from HBM or L2, hundreds of cycles, is hidden behind the products of one tile, where 07 left that
// to the other block on the SM. It costs registers for the tiles under way, and twice the shared memory.

#ifndef BM
#define BM 128  // rows of c that a block computes
#define BN 128  // and columns
#define BK 8
#define TM 8    // rows of c that a thread computes
#define TN 8    // and columns
#define THREADS 256
#endif
#define PAD 4   // floats: the rows of tile_a stay aligned to 16 bytes

// What one thread carries of the next tiles.
struct Carried {
    float4 of_a[BM * BK / 4 / THREADS], of_b[BK * BN / 4 / THREADS];
};

// Global memory to registers; zeros outside the matrices.
__device__ void fetch(Carried& next, const float* a, const float* b, int row0, int col0, int k0, int M, int N, int K) {
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < BM * BK / 4 / THREADS; i++) {
        int at = i * THREADS + threadIdx.x, row = row0 + at / (BK / 4), kk = k0 + at % (BK / 4) * 4;
        next.of_a[i] = row < M && kk < K ? *(const float4*)&a[(size_t)row * K + kk] : zeros;
    }
#pragma unroll
    for (int i = 0; i < BK * BN / 4 / THREADS; i++) {
        int at = i * THREADS + threadIdx.x, kk = k0 + at / (BN / 4), col = col0 + at % (BN / 4) * 4;
        next.of_b[i] = kk < K && col < N ? *(const float4*)&b[(size_t)kk * N + col] : zeros;
    }
}

// Registers to shared memory: a's part is turned on the way.
__device__ void put(const Carried& next, float (*tile_a)[BM + PAD], float (*tile_b)[BN]) {
#pragma unroll
    for (int i = 0; i < BM * BK / 4 / THREADS; i++) {
        int at = i * THREADS + threadIdx.x, r = at / (BK / 4), kk = at % (BK / 4) * 4;
        tile_a[kk][r] = next.of_a[i].x;
        tile_a[kk + 1][r] = next.of_a[i].y;
        tile_a[kk + 2][r] = next.of_a[i].z;
        tile_a[kk + 3][r] = next.of_a[i].w;
    }
#pragma unroll
    for (int i = 0; i < BK * BN / 4 / THREADS; i++) {
        int at = i * THREADS + threadIdx.x;
        *(float4*)&tile_b[at / (BN / 4)][at % (BN / 4) * 4] = next.of_b[i];
    }
}
static_assert(THREADS == BM * BN / TM / TN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ alignas(16) float tile_a[2][BK][BM + PAD], tile_b[2][BK][BN];
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int y = threadIdx.x / (BN / TN) * 4, x = threadIdx.x % (BN / TN) * 4;  // of the first of the thread's pieces
    const int down = BM / TM * 4, right = BN / TN * 4;                     // from one piece to the next
    alignas(16) float sums[TM][TN] = {};
    Carried next;
    fetch(next, a, b, row0, col0, 0, M, N, K);
    put(next, tile_a[0], tile_b[0]);
    __syncthreads();
    for (int k0 = 0, now = 0; k0 < K; k0 += BK, now ^= 1) {
        fetch(next, a, b, row0, col0, k0 + BK, M, N, K);  // nobody waits for it yet
#pragma unroll
        for (int kk = 0; kk < BK; kk++) {
            alignas(16) float from_a[TM], from_b[TN];
            for (int i = 0; i < TM; i += 4) *(float4*)&from_a[i] = *(float4*)&tile_a[now][kk][y + i / 4 * down];
            for (int j = 0; j < TN; j += 4) *(float4*)&from_b[j] = *(float4*)&tile_b[now][kk][x + j / 4 * right];
            for (int i = 0; i < TM; i++)
                for (int j = 0; j < TN; j++) sums[i][j] += from_a[i] * from_b[j];
        }
        put(next, tile_a[now ^ 1], tile_b[now ^ 1]);
        __syncthreads();  // the next tiles are complete, and nobody reads these any more
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j += 4) {
            int row = row0 + y + i / 4 * down + i % 4, col = col0 + x + j / 4 * right;
            if (row < M && col < N) *(float4*)&c[(size_t)row * N + col] = *(float4*)&sums[i][j];
        }
}
