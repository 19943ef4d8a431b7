// 15 two_consumers: 128 x 256 sums a block for two warpgroups, with registers taken from the producer.
//
// The step from 14: each consumer has 64 rows of x and all 256 columns, the widest wgmma there is. When one waits, at a
// barrier or for its products, the other keeps the tensor cores busy. With 128 sums a thread and all that goes with
// them, 168 registers, the equal share of 384 threads, are few: the producer gives most of its own away (setmaxnreg).
// Expected: a quarter fewer bytes a product from L2, and fewer gaps.

#include <cuda/barrier>

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes, 64 a consumer
#define BN 256  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define THREADS 384
#endif
static_assert(BM == 128 && BK == 64 && THREADS == 384, "two consumers of 64 rows each, and a producer");
using Barrier = cuda::barrier<cuda::thread_scope_block>;

extern "C" __global__ __launch_bounds__(THREADS, 1)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u32* y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier full[STAGES], empty[STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const int warpgroup = threadIdx.x / 128, m = blockIdx.y * BM, n = blockIdx.x * BN;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(&full[stage], 1 + 256);  // one thread that asks, all that multiply
            init(&empty[stage], 1 + 256);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warpgroup == 2) {  // the producer
        fewer_registers<24>();
        if (threadIdx.x % 128 > 0) return;
#pragma unroll 1
        for (int k = 0, step = 0; k < K; k += BK, ++step) {
            const int stage = step % STAGES;
            empty[stage].wait(empty[stage].arrive());
            const u32 barrier = shared_address(cuda::device::barrier_native_handle(full[stage]));
            auto token = cuda::device::barrier_arrive_tx(full[stage], 1, (BM + BN) * BK * 2);
            load(x_tiles + stage * BM * BK * 2, x, barrier, k, m);
            load(w_tiles + stage * BN * BK * 2, w, barrier, k, n);
        }
    } else {
        more_registers<240>();
        for (int stage = 0; stage < STAGES; ++stage) auto token = empty[stage].arrive();  // all stages are empty
        float sums[BN / 2];
        for (int k = 0, step = 0; k < K; k += BK, ++step) {
            const int stage = step % STAGES;
            full[stage].wait(full[stage].arrive());
            const u64 rows = describe(x_tiles + stage * BM * BK * 2 + warpgroup * 64 * BK * 2);
            const u64 columns = describe(w_tiles + stage * BN * BK * 2);
            begin_products();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) multiply(sums, rows + 2 * i, columns + 2 * i, k || i);
            end_products();
            wait_for_products<1>();
            if (step) auto token = empty[(step - 1) % STAGES].arrive();
        }
        wait_for_products<0>();
        settle(sums);
        write(sums, y, m + warpgroup * 64, n, M, N);
    }
}
