// 01 gemv: one row times a matrix: nothing counts but how many bytes of w are under way.
//
// y = x @ w.T for x (1, K), w (N, K), y (1, N) in fp16; K a multiple of 8. Every byte of w is used once, so the time is
// that of reading it. LANES threads share ROWS rows, and each asks for ROWS * AHEAD pieces of 16 bytes before it uses
// the first. x is the same for all: it comes from the L1 cache, once for ROWS rows. The reading of w need not wait for
// the kernel that makes x: launched early, it begins while that one ends.
// Expected: the speed of a kernel that only reads.
#include <cuda_device_runtime_api.h>
#include <cuda_fp16.h>

#ifndef THREADS
#define THREADS 256
#define LANES 256  // that share their rows: a power of 2
#define ROWS 4     // a power of 2
#define AHEAD 1    // pieces of each row that a thread asks for at once
#endif
#ifndef EARLY
#define EARLY 1  // 0 for a late launch, which needs neither of the two instructions
#endif
constexpr int GROUPS = THREADS / LANES, WIDTH = LANES < 32 ? LANES : 32, WARPS = LANES / WIDTH;  // of a group
static_assert(THREADS % 32 == 0 && THREADS % LANES == 0 && (LANES & (LANES - 1)) == 0 && (ROWS & (ROWS - 1)) == 0);

// sum plus the products of eight elements of w with eight of x.
__device__ float products(float sum, uint4 w, uint4 x) {
    const __half2* a = reinterpret_cast<const __half2*>(&w);
    const __half2* b = reinterpret_cast<const __half2*>(&x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 left = __half22float2(a[i]), right = __half22float2(b[i]);
        sum += left.x * right.x;
        sum += left.y * right.y;
    }
    return sum;
}

// Sums over the WIDTH lanes of a group, dealt out: an exchange halves the rows that a lane still has sums of, as long
// as it has several. What it keeps lies in sums[0] and on; the number of its first row is returned.
__device__ int deal(float* sums) {
    int first = 0, left = ROWS;
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) {
        if (left > 1) {
            const bool upper = threadIdx.x & d;
            left /= 2;
            first += upper ? left : 0;
#pragma unroll
            for (int i = 0; i < left; i++) {
                const float given = upper ? sums[i] : sums[i + left], kept = upper ? sums[i + left] : sums[i];
                sums[i] = kept + __shfl_xor_sync(~0u, given, d);
            }
        } else {
            sums[0] += __shfl_xor_sync(~0u, sums[0], d);
        }
    }
    return first;
}

extern "C" __global__ __launch_bounds__(THREADS)
void gemv(const uint4* x, const uint4* w, __half* y, int N, int K) {
#if EARLY && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();  // the next kernel may begin when all blocks of this one have
#endif
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, pieces = K / 8;
    const int first = (blockIdx.x * GROUPS + group) * ROWS;
    const uint4* from[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)  // beyond the last row the last is read again, and not written
        from[r] = w + (size_t)min(first + r, N - 1) * pieces + lane;
    float sums[ROWS] = {};
    for (int c = 0; c < pieces; c += AHEAD * LANES) {
        uint4 ahead[AHEAD][ROWS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                ahead[i][r] = c + i * LANES + lane < pieces ? __ldcs(from[r] + c + i * LANES) : uint4();
#if EARLY && __CUDA_ARCH__ >= 900
        if (c == 0) cudaGridDependencySynchronize();  // from here on x is what the kernel before wrote
#endif
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = c + i * LANES + lane;
            const uint4 part = at < pieces ? x[at] : uint4();
#pragma unroll
            for (int r = 0; r < ROWS; r++) sums[r] = products(sums[r], ahead[i][r], part);
        }
    }
    const int mine = deal(sums);
    constexpr int KEPT = ROWS > WIDTH ? ROWS / WIDTH : 1, APART = ROWS > WIDTH ? 1 : WIDTH / ROWS;
    const bool holds = lane % APART == 0;
    if (WARPS == 1) {
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (holds && first + mine + i < N) y[first + mine + i] = __float2half(sums[i]);
        return;
    }
    __shared__ float of_warp[GROUPS * ROWS][WARPS];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (holds) of_warp[group * ROWS + mine + i][lane / 32] = sums[i];
    __syncthreads();
    const int row = blockIdx.x * GROUPS * ROWS + threadIdx.x;
    if (threadIdx.x >= GROUPS * ROWS || row >= N) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += of_warp[threadIdx.x][i];
    y[row] = __float2half(sum);
}
