// 04 rmsnorm: a row in registers: read once, summed by its threads, scaled and written.
//
// y = x / sqrt(mean(x * x) + eps) * w by rows: x, y (rows, cols), w (cols) in fp16, cols a multiple of 8. LANES threads
// share a row and hold PIECES pieces of 16 bytes each; all loads are under way before the first sum, those of w too
// where there are registers for them.
// Expected: a copy's speed, and nothing that a compiler could not do: with this kind of kernel Triton should be level.
#include <cuda_fp16.h>

#ifndef LANES
#define LANES 256  // threads that share a row: a power of 2, at least 32
#define ROWS 1     // rows of a block
#define PIECES 2   // of 16 bytes, that a thread holds of its row
#endif
static_assert(LANES >= 32 && (LANES & (LANES - 1)) == 0 && LANES * ROWS <= 1024);

union Piece {
    uint4 all;
    __half2 pair[4];
    __device__ Piece() {}
};

// The sum of v over the LANES threads of a row; all of them get it.
__device__ float row_sum(float v) {
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (LANES == 32) return v;
    __shared__ float of_warp[ROWS * LANES / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
    for (int i = 0; i < LANES / 32; i++) v += of_warp[threadIdx.x / LANES * (LANES / 32) + i];
    return v;
}

extern "C" __global__ __launch_bounds__(LANES * ROWS)
void rmsnorm(const uint4* x, const uint4* w, uint4* y, int rows, int cols, float eps) {
    const int lane = threadIdx.x % LANES, row = blockIdx.x * ROWS + threadIdx.x / LANES, chunks = cols / 8;
    const size_t start = (size_t)row * chunks;
    constexpr bool early = PIECES <= 4;
    Piece held[PIECES], weights[early ? PIECES : 1];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int c = lane + i * LANES;
        held[i].all = row < rows && c < chunks ? __ldcs(x + start + c) : uint4();
        if (early) weights[i].all = c < chunks ? w[c] : uint4();
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 v = __half22float2(held[i].pair[j]);
            squares += v.x * v.x;
            squares += v.y * v.y;
        }
    const float scale = rsqrtf(row_sum(squares) / cols + eps);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int c = lane + i * LANES;
        Piece weight;
        weight.all = early ? weights[early ? i : 0].all : c < chunks ? w[c] : uint4();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 v = __half22float2(held[i].pair[j]), by = __half22float2(weight.pair[j]);
            held[i].pair[j] = __floats2half2_rn(v.x * scale * by.x, v.y * scale * by.y);
        }
        if (row < rows && c < chunks) __stcs(y + start + c, held[i].all);
    }
}
