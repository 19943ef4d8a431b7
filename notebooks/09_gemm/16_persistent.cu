// 16 persistent: one block an SM takes tile after tile, in an order that L2 likes.
//
// The step from 15: a block does not end with its tile. While the consumers write one, the producer already loads the
// next. Tiles are taken in groups of GROUP rows of tiles: those that run at one time form a rectangle, not a strip, and
// share their rows of x and of w in L2.
// Expected: no more starts and ends of blocks, and fewer bytes from DRAM.

#include <cuda/barrier>

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes, 64 a consumer
#define BN 256  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define GROUP 16
#define THREADS 384
#endif
static_assert(BM == 128 && BK == 64 && THREADS == 384, "two consumers of 64 rows each, and a producer");
using Barrier = cuda::barrier<cuda::thread_scope_block>;

struct Place {
    int m, n;
};

// The first row and column of a tile: down GROUP rows of tiles, then one column to the right.
__device__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * columns) * GROUP, within = tile % (GROUP * columns);
    const int high = min(rows - first, GROUP);  // the last group may have fewer rows
    return {(first + within % high) * BM, within / high * BN};
}

extern "C" __global__ __launch_bounds__(THREADS, 1)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u32* y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier full[STAGES], empty[STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const int warpgroup = threadIdx.x / 128, rows_of_tiles = (M + BM - 1) / BM, columns_of_tiles = (N + BN - 1) / BN;
    const int tiles = rows_of_tiles * columns_of_tiles;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(&full[stage], 1 + 256);  // one thread that asks, all that multiply
            init(&empty[stage], 1 + 256);
        }
        barriers_ready();
    }
    __syncthreads();

    int step = 0;  // counts on from tile to tile
    if (warpgroup == 2) {  // the producer
        fewer_registers<24>();
        if (threadIdx.x % 128 > 0) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (int k = 0; k < K; k += BK, ++step) {
                const int stage = step % STAGES;
                empty[stage].wait(empty[stage].arrive());
                const u32 barrier = shared_address(cuda::device::barrier_native_handle(full[stage]));
                auto token = cuda::device::barrier_arrive_tx(full[stage], 1, (BM + BN) * BK * 2);
                load(x_tiles + stage * BM * BK * 2, x, barrier, k, at.m);
                load(w_tiles + stage * BN * BK * 2, w, barrier, k, at.n);
            }
        }
    } else {
        more_registers<240>();
        for (int stage = 0; stage < STAGES; ++stage) auto token = empty[stage].arrive();  // all stages are empty
        float sums[BN / 2];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
            for (int k = 0; k < K; k += BK, ++step) {
                const int stage = step % STAGES;
                full[stage].wait(full[stage].arrive());
                const u64 rows = describe(x_tiles + stage * BM * BK * 2 + warpgroup * 64 * BK * 2);
                const u64 columns = describe(w_tiles + stage * BN * BK * 2);
                begin_products();
#pragma unroll
                for (int i = 0; i < BK / 16; ++i) multiply(sums, rows + 2 * i, columns + 2 * i, k || i);
                end_products();
                wait_for_products<1>();
                if (k) auto token = empty[(step - 1) % STAGES].arrive();
            }
            wait_for_products<0>();
            auto token = empty[(step - 1) % STAGES].arrive();
            settle(sums);
            write(sums, y, at.m + warpgroup * 64, at.n, M, N);
        }
    }
}
