// 02 gemv_int4: weights of four bits: LOP3 makes two of them numbers at once, tensor cores do the products.
//
// y = x @ w.T for x (1, K) in fp16 and w (N, K) of four bits with a scale for each 128 columns of a row; K a multiple
// of 128. A quarter of the bytes leaves a quarter of the time for the same products, so the instructions that a weight
// costs decide. Put under the exponent of 1024, a nibble q is the fp16 number 1024 + q; one place higher and under that
// of 64, it is 64 + q. LOP3 does both halves of a register at once, (w & mask) | exponent, and a subtraction leaves
// q - 8, exactly. The products and their fp32 sums are the tensor cores': a tile of 16 rows is mma's first operand, x
// one column of its second. Offline the weights were put into the order in which lanes need them, so that a lane loads
// 32 at once, of two rows.
// Expected: memory and instructions at the same time, neither far from its limit.
#include <cuda_device_runtime_api.h>
#include <cuda_fp16.h>

#include "bits.cuh"
#include "warp.cuh"

#ifndef WARPS
#define WARPS 16  // of a block, which share a tile of 16 rows: each has a part of K
#define AHEAD 1   // groups of 128 columns that a warp asks for at once
#endif
#ifndef EARLY
#define EARLY 1  // 0 for a late launch, which needs neither of the two instructions
#endif

__device__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ unsigned as_bits(__half2 pair) { return *reinterpret_cast<unsigned*>(&pair); }

// The sums of rows g and g + 8 of a tile (g = lane / 4) over 64 columns, added to d[0] and d[2]. w: the lane's 32
// weights; x0, x1: its 16 of the 64 columns.
__device__ void tile(float (&d)[4], uint4 w, uint4 x0, uint4 x1) {
    const unsigned low = 0x000f000f, under_1024 = 0x64006400, high = 0x00f000f0, under_64 = 0x54005400;
    const __half2 from_low = __float2half2_rn(-1032.0f), from_high = __float2half2_rn(-72.0f);
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
    const unsigned pairs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned word = words[i], upper = word >> 8;
        const unsigned a[4] = {
            as_bits(__hadd2(as_half2(keep_or(word, low, under_1024)), from_low)),
            as_bits(__hadd2(as_half2(keep_or(word, high, under_64)), from_high)),
            as_bits(__hadd2(as_half2(keep_or(upper, low, under_1024)), from_low)),
            as_bits(__hadd2(as_half2(keep_or(upper, high, under_64)), from_high)),
        };
        const unsigned b[2] = {pairs[2 * i], pairs[2 * i + 1]};  // all eight columns alike: the first is looked at
        mma(d, a, b);
    }
}

// Two blocks an SM: with as many registers a warp asks for all of its x at once. They are also as many as a product of
// 4096 rows has: more would be dealt out unevenly where the next kernel's come early. What the compiler makes of it for
// later cards does not fit so few registers.
#if __CUDA_ARCH__ < 1000
#define RESIDENT 2
#else
#define RESIDENT 1
#endif
extern "C" __global__ __launch_bounds__(WARPS * 32, RESIDENT)
void gemv_int4(const uint4* x, const uint4* w, const __half2* scales, __half* y, int N, int K) {
#if EARLY && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = K / 128;
    const int first = groups * warp / WARPS, last = groups * (warp + 1) / WARPS;
    const uint4* from_w = w + (size_t)blockIdx.x * groups * 64 + lane;
    const __half2* from_scales = scales + (size_t)blockIdx.x * groups * 8 + lane / 4;
    const uint4* from_x = x + lane % 4 * 2;
    float upper = 0.0f, lower = 0.0f;  // rows lane / 4 and lane / 4 + 8
    bool fresh = true;
    for (int g = first; g < last; g += AHEAD) {
        uint4 ahead[AHEAD][2];
        __half2 scale[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (g + i < last) {
                ahead[i][0] = __ldcs(from_w + (g + i) * 64);
                ahead[i][1] = __ldcs(from_w + (g + i) * 64 + 32);
                scale[i] = __ldcs(from_scales + (g + i) * 8);
            }
#if EARLY && __CUDA_ARCH__ >= 900
        if (fresh) cudaGridDependencySynchronize();  // from here on x is what the kernel before wrote
        fresh = false;
#endif
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (g + i < last) {
                const uint4* part = from_x + (g + i) * 16;
                const uint4 x0 = part[0], x1 = part[1], x2 = part[8], x3 = part[9];
                float even[4] = {}, odd[4] = {};
                tile(even, ahead[i][0], x0, x1);
                tile(odd, ahead[i][1], x2, x3);
                const float2 both = __half22float2(scale[i]);
                upper += both.x * (even[0] + odd[0]);
                lower += both.y * (even[2] + odd[2]);
            }
    }
    __shared__ float of_warp[WARPS][16];
    if (lane % 4 == 0) {
        of_warp[warp][lane / 4] = upper;
        of_warp[warp][lane / 4 + 8] = lower;
    }
    __syncthreads();
    const int row = blockIdx.x * 16 + threadIdx.x;
    if (threadIdx.x >= 16 || row >= N) return;
#if EARLY && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();  // a warp without columns has not waited yet
#endif
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += of_warp[i][threadIdx.x];
    y[row] = __float2half(sum);
}
