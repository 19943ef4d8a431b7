// 12 tma_wgmma: the copy engine brings the tiles, and four warps multiply them with one instruction.
//
// The step from 11: no thread loads, and no fragment passes through registers. One thread asks the copy engine (TMA)
// for a tile, swizzled on its way; an mbarrier says when its bytes are there; wgmma reads both from shared memory.
// Expected: the tools are better than 11's, what is made of them is not. Load, wait, multiply, wait: each is idle while
// the other works, and only other blocks on the same SM fill the gaps.

#include <cuda/barrier>

#include "hopper.cuh"

#ifndef BM
#define BM 64  // rows of x and y that a block computes
#define BN 64  // rows of w, columns of y
#define BK 64  // 128 bytes: the width of the swizzle
#define THREADS 128
#endif
static_assert(BM == 64 && BK == 64 && THREADS == 128, "one warpgroup, which has 64 rows");
using Barrier = cuda::barrier<cuda::thread_scope_block>;

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u32* y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier loaded;
    const u32 x_tile = aligned(memory), w_tile = x_tile + BM * BK * 2;
    const int m = blockIdx.y * BM, n = blockIdx.x * BN;
    if (threadIdx.x == 0) {
        init(&loaded, THREADS);
        barriers_ready();
    }
    __syncthreads();

    float sums[BN / 2];
    for (int k = 0; k < K; k += BK) {
        Barrier::arrival_token token;
        if (threadIdx.x == 0) {
            const u32 barrier = shared_address(cuda::device::barrier_native_handle(loaded));
            token = cuda::device::barrier_arrive_tx(loaded, 1, (BM + BN) * BK * 2);
            load(x_tile, x, barrier, k, m);
            load(w_tile, w, barrier, k, n);
        } else {
            token = loaded.arrive();
        }
        loaded.wait(cuda::std::move(token));

        begin_products();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) multiply(sums, describe(x_tile) + 2 * i, describe(w_tile) + 2 * i, k || i);
        end_products();
        wait_for_products<0>();
        __syncthreads();  // all have read the tiles: they may be overwritten
    }
    settle(sums);
    write(sums, y, m, n, M, N);
}
