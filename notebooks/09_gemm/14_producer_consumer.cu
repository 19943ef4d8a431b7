// 14 producer_consumer: one warpgroup asks for tiles, another multiplies, and a ring of stages lies between them.
//
// The step from 13: loads no longer wait for products. The producer runs ahead through STAGES pairs of tiles. Each has
// a barrier `full`, whose phase ends with its bytes, and a barrier `empty`, for when the consumer has read it. Nor do
// products wait for products: a stage is handed back a step late, when the next ones are already under way.
// Expected: the copy engine and the tensor cores work at the same time, and the latency of memory is paid once.

#include <cuda/barrier>

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes
#define BN 128  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 5
#define THREADS 256
#endif
static_assert(BM % 64 == 0 && BK == 64 && THREADS == 256, "a producer, and a consumer with strips of 64 rows");
using Barrier = cuda::barrier<cuda::thread_scope_block>;

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u32* y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier full[STAGES], empty[STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const int m = blockIdx.y * BM, n = blockIdx.x * BN;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(&full[stage], 1 + 128);  // one thread that asks, all that multiply
            init(&empty[stage], 1 + 128);
        }
        barriers_ready();
    }
    __syncthreads();

    if (threadIdx.x >= 128) {  // the producer; one thread of it does all
        if (threadIdx.x > 128) return;
        for (int k = 0, step = 0; k < K; k += BK, ++step) {
            const int stage = step % STAGES;
            empty[stage].wait(empty[stage].arrive());
            const u32 barrier = shared_address(cuda::device::barrier_native_handle(full[stage]));
            auto token = cuda::device::barrier_arrive_tx(full[stage], 1, (BM + BN) * BK * 2);
            load(x_tiles + stage * BM * BK * 2, x, barrier, k, m);
            load(w_tiles + stage * BN * BK * 2, w, barrier, k, n);
        }
        return;
    }

    for (int stage = 0; stage < STAGES; ++stage) auto token = empty[stage].arrive();  // all stages are empty
    float sums[BM / 64][BN / 2];
    for (int k = 0, step = 0; k < K; k += BK, ++step) {
        const int stage = step % STAGES;
        full[stage].wait(full[stage].arrive());
        begin_products();
#pragma unroll
        for (int strip = 0; strip < BM / 64; ++strip) {
            const u64 rows = describe(x_tiles + stage * BM * BK * 2 + strip * 64 * BK * 2);
            const u64 columns = describe(w_tiles + stage * BN * BK * 2);
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) multiply(sums[strip], rows + 2 * i, columns + 2 * i, k || i);
        }
        end_products();
        wait_for_products<1>();  // these run; those of the step before are done, and their stage may be filled again
        if (step) auto token = empty[(step - 1) % STAGES].arrive();
    }
    wait_for_products<0>();
#pragma unroll
    for (int strip = 0; strip < BM / 64; ++strip) {
        settle(sums[strip]);
        write(sums[strip], y, m + strip * 64, n, M, N);
    }
}
