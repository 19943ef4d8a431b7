// 17 ptx_barriers: barriers that are asked by parity need no arrivals of those who wait.
//
// The step from 16: `cuda::barrier` has a thread wait with the token that it got for arriving: hundreds of arrivals a
// step. The instruction beneath it asks for a phase by its parity, so a full barrier expects the producer
// alone, and an empty one a thread of each consumer.
// Expected: hundreds of instructions a step less, and products that begin as soon as their tiles are there.

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
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warpgroup = threadIdx.x / 128, rows_of_tiles = (M + BM - 1) / BM, columns_of_tiles = (N + BN - 1) / BN;
    const int tiles = rows_of_tiles * columns_of_tiles, steps = (K + BK - 1) / BK;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, 2);
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
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES;
                wait(empty + 8 * stage, ~(step / STAGES) & 1);  // the first round finds every stage empty
                arrive_expecting(full + 8 * stage, (BM + BN) * BK * 2);
                load(x_tiles + stage * BM * BK * 2, x, full + 8 * stage, i * BK, at.m);
                load(w_tiles + stage * BN * BK * 2, w, full + 8 * stage, i * BK, at.n);
            }
        }
    } else {
        more_registers<240>();
        float sums[BN / 2];
        const auto hand_back = [&](int step) {
            if (threadIdx.x % 128 == 0) arrive(empty + 8 * (step % STAGES));
        };
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES;
                wait(full + 8 * stage, step / STAGES & 1);
                const u64 rows = describe(x_tiles + stage * BM * BK * 2 + warpgroup * 64 * BK * 2);
                const u64 columns = describe(w_tiles + stage * BN * BK * 2);
                begin_products();
#pragma unroll
                for (int j = 0; j < BK / 16; ++j) multiply(sums, rows + 2 * j, columns + 2 * j, i || j);
                end_products();
                wait_for_products<1>();
                if (i) hand_back(step - 1);
            }
            wait_for_products<0>();
            hand_back(step - 1);
            settle(sums);
            write(sums, y, at.m + warpgroup * 64, at.n, M, N);
        }
    }
}
