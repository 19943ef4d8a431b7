// 18 cluster_multicast: blocks on neighbouring SMs share their rows of w, each loading a part of them for all.
//
// The step from 17: the CLUSTER blocks of a cluster start together and reach each other's shared memory. Their tiles
// lie one below the other, so all need the same rows of w: each asks for a share of them, and the copy engine brings it
// to all. A stage may be filled again when the consumers of every block have read it, so they arrive at every block.
// Expected: a third fewer bytes asked of L2 for two blocks, half for four. That helps as far as nothing else has joined
// requests for the same bytes: on an H200 those of 17 were joined on their way to L2, which looked up as much as before,
// and the gain was small.

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes, 64 a consumer
#define BN 256  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define GROUP 4  // clusters, one below the other
#define CLUSTER 2
#define THREADS 384
#endif
static_assert(BM == 128 && BK == 64 && THREADS == 384, "two consumers of 64 rows each, and a producer");
static_assert(BN % (8 * CLUSTER) == 0, "each block's share of w begins where the swizzle begins anew");
constexpr int SHARE = BN / CLUSTER;  // rows of w that each block asks for

struct Place {
    int m, n;
};

// The first row and column of a cluster's tiles: down GROUP rows of them, then one column to the right.
__device__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * columns) * GROUP, within = tile % (GROUP * columns);
    const int high = min(rows - first, GROUP);  // the last group may have fewer rows
    return {(first + within % high) * CLUSTER * BM, within / high * BN};
}

extern "C" __global__ __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u32* y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warpgroup = threadIdx.x / 128, rank = rank_in_cluster(), steps = (K + BK - 1) / BK;
    const int rows_of_tiles = (M + CLUSTER * BM - 1) / (CLUSTER * BM), columns_of_tiles = (N + BN - 1) / BN;
    const int tiles = rows_of_tiles * columns_of_tiles, first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, 2 * CLUSTER);
        }
        barriers_ready();
    }
    sync_cluster();

    int step = 0;  // counts on from tile to tile
    if (warpgroup == 2) {  // the producer
        fewer_registers<24>();
        for (int tile = first; tile < tiles && threadIdx.x % 128 == 0; tile += clusters) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES;
                wait(empty + 8 * stage, ~(step / STAGES) & 1);  // the first round finds every stage empty
                arrive_expecting(full + 8 * stage, (BM + BN) * BK * 2);
                load(x_tiles + stage * BM * BK * 2, x, full + 8 * stage, i * BK, at.m + rank * BM);
                load_for_all(w_tiles + stage * BN * BK * 2 + rank * SHARE * BK * 2, w, full + 8 * stage, i * BK,
                             at.n + rank * SHARE, CLUSTER);
            }
        }
    } else {
        more_registers<240>();
        float sums[BN / 2];
        const auto hand_back = [&](int step) {
            if (threadIdx.x % 128 < CLUSTER) arrive_at(empty + 8 * (step % STAGES), threadIdx.x % 128);
        };
        for (int tile = first; tile < tiles; tile += clusters) {
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
            write(sums, y, at.m + rank * BM + warpgroup * 64, at.n, M, N);
        }
    }
    sync_cluster();  // no block ends while another may still arrive at its barriers
}
