// 09 warp_tiles: the threads of a warp stand close together in c, so that they read the same addresses.
//
// The step: in 08 a warp's pieces are 2 high and 16 wide, so its lanes read 2 different float4 of a and 16 of b. A warp
// that is nearly square, WM x WN, reads 4 and 8; lanes that read the same address are answered together.
// Expected: fewer cycles in shared memory for each product, and they bound 08.

#ifndef BM
#define BM 128  // rows of c that a block computes
#define BN 128  // and columns
#define BK 8
#define WM 32   // rows of c that a warp computes
#define WN 64   // and columns
#define TM 8    // rows of c that a thread computes
#define TN 8    // and columns
#define BLOCKS 2  // on one SM: the compiler gives each thread as many registers as that leaves
#define THREADS 256
#endif
#define ACROSS (WN / TN)  // lanes of a warp along a row; 32 / ACROSS stand below each other
#define PAD 4             // floats: the rows of tile_a stay aligned to 16 bytes

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
static_assert(THREADS == BM * BN / TM / TN && WM * WN == 32 * TM * TN && BM % WM == 0 && BN % WN == 0);
static_assert(BM * BK / 4 % THREADS == 0 && BK * BN / 4 % THREADS == 0, "all threads carry equally much");

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ alignas(16) float tile_a[2][BK][BM + PAD], tile_b[2][BK][BN];
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // neighbouring lanes share columns of b, the next but one rows of a: a float4 for each lane takes 2 passes, not 4
    int lane_y = lane % 2 + lane / (2 * ACROSS) * 2, lane_x = lane / 2 % ACROSS;
    int y = warp / (BN / WN) * WM + lane_y * 4, x = warp % (BN / WN) * WN + lane_x * 4;  // of the thread's first piece
    const int down = WM / TM * 4, right = WN / TN * 4;                                  // from one piece to the next
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
