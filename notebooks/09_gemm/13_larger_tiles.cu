// 13 larger_tiles: 128 x 128 sums a block, so that each element is used twice as often as in 64 x 64.
//
// The step from 12: the warpgroup multiplies two strips of 64 rows, each by 128 columns. A block asks for BM + BN rows
// to make BM x BN sums: half the bytes a product from L2, and fewer from shared memory.
// Expected: a good part of what is missing. Sums take 128 registers a thread, so that fewer blocks fit on an SM.

#include <cuda/barrier>

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes
#define BN 128  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define THREADS 128
#endif
static_assert(BM % 64 == 0 && BK == 64 && THREADS == 128, "one warpgroup, in strips of 64 rows");
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

    float sums[BM / 64][BN / 2];
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
        for (int strip = 0; strip < BM / 64; ++strip) {
            const u64 rows = describe(x_tile + strip * 64 * BK * 2);
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) multiply(sums[strip], rows + 2 * i, describe(w_tile) + 2 * i, k || i);
        }
        end_products();
        wait_for_products<0>();
        __syncthreads();  // all have read the tiles: they may be overwritten
    }
#pragma unroll
    for (int strip = 0; strip < BM / 64; ++strip) {
        settle(sums[strip]);
        write(sums[strip], y, m + strip * 64, n, M, N);
    }
}
