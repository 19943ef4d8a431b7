// 09 warp_tiles: the threads of a warp stand close together in c, so that they read the same addresses.
//
// The step: in 08 a warp's pieces are 2 high and 16 wide, so its lanes read 2 different float4 of a and 16 of b. A warp
// that is nearly square, WM x WN, reads 8 and 4 for twice as many pieces; lanes that read the same address are answered
// together. A thread now has 8 x 16 elements and an SM few warps, so each reads for the next k while it multiplies.
// Expected: half of 08's cycles in shared memory, fewer waits for it, and fewer instructions that are not products.

#ifndef BM
#define BM 128      // rows of c that a block computes
#define BN 128      // and columns
#define BK 16
#define WM 64       // rows of c that a warp computes
#define WN 64       // and columns
#define TM 8        // rows of c that a thread computes
#define TN 16       // and columns
#define BLOCKS 2    // on one SM: the compiler gives each thread as many registers as that leaves
#define THREADS 128
#endif
#define ACROSS (WN / TN)         // lanes of a warp along a row; 32 / ACROSS stand below each other
#define ROWS_AT_ONCE (128 / BK)  // rows of a that a warp fetches with one instruction
constexpr int OF_A = BM * BK / 4 / THREADS, OF_B = BK * BN / 4 / THREADS;  // float4 that a thread carries
constexpr int DOWN = WM / TM * 4, RIGHT = WN / TN * 4;  // from one of a thread's pieces of 4 x 4 to the next
static_assert(THREADS == BM * BN / TM / TN && WM * WN == 32 * TM * TN && BM % WM == 0 && BN % WN == 0);
static_assert(BM * BK / 4 % THREADS == 0 && BK * BN / 4 % THREADS == 0 && BM % 32 == 0 && THREADS % (BN / 4) == 0);

// What one thread carries of the next tiles: where it reads them, the k where they end for it, and what it has read.
struct Carried {
    const float *from_a[OF_A], *from_b;
    int end_a[OF_A], end_b[OF_B];
    float4 of_a[OF_A], of_b[OF_B];
};

// Where a thread's part of the first tiles begins.
__device__ void begin(Carried& next, const float* a, const float* b, int row0, int col0, int M, int N, int K) {
#pragma unroll
    for (int i = 0; i < OF_A; i++) {
        int at = i * THREADS + threadIdx.x, row = row0 + at / (BK / 4), kk = at % (BK / 4) * 4;
        next.from_a[i] = a + (size_t)row * K + kk;
        next.end_a[i] = row < M ? K - kk : 0;
    }
    int kk = threadIdx.x / (BN / 4), col = col0 + threadIdx.x % (BN / 4) * 4;
    next.from_b = b + (size_t)kk * N + col;
#pragma unroll
    for (int i = 0; i < OF_B; i++) next.end_b[i] = col < N ? K - kk - i * (THREADS / (BN / 4)) : 0;
}

// Global memory to registers, for the tiles at k0; zeros outside the matrices.
__device__ void fetch(Carried& next, int k0, int N) {
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OF_A; i++) {
        next.of_a[i] = k0 < next.end_a[i] ? *(const float4*)next.from_a[i] : zeros;
        next.from_a[i] += BK;
    }
#pragma unroll
    for (int i = 0; i < OF_B; i++) {
        int below = i * (THREADS / (BN / 4));  // rows of b
        next.of_b[i] = k0 < next.end_b[i] ? *(const float4*)&next.from_b[(size_t)below * N] : zeros;
    }
    next.from_b += (size_t)BK * N;
}

// Where row r of a lies in row kk of tile_a: what a warp stores at once goes to different banks. The padding stays, too:
// without it ptxas finds a schedule for this loop that waits longer.
__device__ int place(int r, int kk) { return r ^ (kk / 4 * ROWS_AT_ONCE); }

// Registers to shared memory: a's part is turned on the way.
__device__ void put(const Carried& next, float (*tile_a)[BM + 4], float (*tile_b)[BN]) {
#pragma unroll
    for (int i = 0; i < OF_A; i++) {
        int at = i * THREADS + threadIdx.x, r = at / (BK / 4), kk = at % (BK / 4) * 4;
        tile_a[kk][place(r, kk)] = next.of_a[i].x;
        tile_a[kk + 1][place(r, kk)] = next.of_a[i].y;
        tile_a[kk + 2][place(r, kk)] = next.of_a[i].z;
        tile_a[kk + 3][place(r, kk)] = next.of_a[i].w;
    }
#pragma unroll
    for (int i = 0; i < OF_B; i++) {
        int at = i * THREADS + threadIdx.x;
        *(float4*)&tile_b[at / (BN / 4)][at % (BN / 4) * 4] = next.of_b[i];
    }
}

// What a thread multiplies for one k: shared memory to registers.
__device__ void read(float* from_a, float* from_b, float (*tile_a)[BM + 4], float (*tile_b)[BN], int kk, int y, int x) {
#pragma unroll
    for (int i = 0; i < TM; i += 4) *(float4*)&from_a[i] = *(float4*)&tile_a[kk][place(y + i / 4 * DOWN, kk)];
#pragma unroll
    for (int j = 0; j < TN; j += 4) *(float4*)&from_b[j] = *(float4*)&tile_b[kk][x + j / 4 * RIGHT];
}

// __restrict__: c is neither a nor b, so loads may be moved past stores; their addresses take fewer instructions.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS)
void gemm(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int M, int N, int K) {
    __shared__ alignas(16) float tile_a[2][BK][BM + 4], tile_b[2][BK][BN];
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // neighbouring lanes share columns of b, the next but one rows of a: a float4 for each lane takes 2 passes, not 4
    int lane_y = lane % 2 + lane / (2 * ACROSS) * 2, lane_x = lane / 2 % ACROSS;
    int y = warp / (BN / WN) * WM + lane_y * 4, x = warp % (BN / WN) * WN + lane_x * 4;  // of the thread's first piece
    alignas(16) float sums[TM][TN] = {}, from_a[2][TM], from_b[2][TN];
    Carried next;
    begin(next, a, b, row0, col0, M, N, K);
    fetch(next, 0, N);
    put(next, tile_a[0], tile_b[0]);
    __syncthreads();
    read(from_a[0], from_b[0], tile_a[0], tile_b[0], 0, y, x);
#pragma unroll 1
    for (int k0 = 0, now = 0; k0 < K; k0 += BK) {
        fetch(next, k0 + BK, N);  // nobody waits for it yet
#pragma unroll
        for (int kk = 0; kk < BK; kk++) {
            if (kk == BK - 1) {  // the last k of these tiles: the next one lies in the next
                put(next, tile_a[now ^ 1], tile_b[now ^ 1]);
                __syncthreads();  // the next tiles are complete, and nobody reads these any more
                now ^= 1;
            }
            int ahead = (kk + 1) % BK;
            read(from_a[ahead % 2], from_b[ahead % 2], tile_a[now], tile_b[now], ahead, y, x);
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) sums[i][j] += from_a[kk % 2][i] * from_b[kk % 2][j];
        }
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j += 4) {
            int row = row0 + y + i / 4 * DOWN + i % 4, col = col0 + x + j / 4 * RIGHT;
            if (row < M && col < N) *(float4*)&c[(size_t)row * N + col] = *(float4*)&sums[i][j];
        }
}
