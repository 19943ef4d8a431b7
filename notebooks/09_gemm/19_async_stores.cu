// 19 async_stores: the copy engine writes a tile, piece by piece, behind the products of the next one.
//
// The step from 18: `write` stored four bytes a lane and waited for room on the way to memory. Now, when a tile ends,
// its sums only become elements, in registers of their own, and the next products begin. Behind each of the first of
// these, stmatrix lays 64 columns, swizzled, into one of two buffers of each consumer, and one thread has the copy
// engine write them, clipped at the edges of y. A consumer waits only where the buffer before last is not yet read.
// Expected: whole lines written in place of pieces of 16 bytes, and tensor cores that hardly wait between tiles.

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes, 64 a consumer
#define BN 256  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define GROUP 8  // clusters, one below the other
#define CLUSTER 2
#define THREADS 384
#endif
static_assert(BM == 128 && BK == 64 && THREADS == 384, "two consumers of 64 rows each, and a producer");
static_assert(BN % (8 * CLUSTER) == 0, "each block's share of w begins where the swizzle begins anew");
constexpr int SHARE = BN / CLUSTER;  // rows of w that each block asks for
constexpr int BUFFER = 64 * 64 * 2;  // bytes of a piece of y: 64 rows of 128 bytes

struct Place {
    int m, n;
};

// The first row and column of a cluster's tiles: down GROUP rows of them, then one column to the right.
__device__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * columns) * GROUP, within = tile % (GROUP * columns);
    const int high = min(rows - first, GROUP);  // the last group may have fewer rows
    return {(first + within % high) * CLUSTER * BM, within / high * BN};
}

// 64 columns of a warpgroup's tile, two elements a number, to y[row:, column:], through a buffer of shared memory.
__device__ __forceinline__ void write_async(const u32* pairs, const TensorMap& y, u32 buffer, int row, int column,
                                            int name) {
    const int lane = threadIdx.x % 32, leader = threadIdx.x % 128 == 0;
    const u32 to = buffer + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128;  // the row that this lane addresses
    if (leader) stores_have_read<1>();  // of two buffers this is the one before last
    sync_warpgroup(name);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns: two 16-byte places of eight in a row, swizzled by its number
        const u32* d = pairs + j * 4;
        store_matrices(to + ((2 * j + lane / 16) ^ lane % 8) * 16, d[0], d[1], d[2], d[3]);
    }
    written_for_async();
    sync_warpgroup(name);
    if (leader) store(y, buffer, column, row);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
          const __grid_constant__ TensorMap y, int M, int N, int K) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const u32 buffers = w_tiles + STAGES * BN * BK * 2;
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
        u32 pairs[BN / 4];  // the tile before, as elements
        Place at;           // and where it belongs
        const auto multiply_step = [&](int i) {
            const int stage = step % STAGES;
            wait(full + 8 * stage, step / STAGES & 1);
            const u64 rows = describe(x_tiles + stage * BM * BK * 2 + warpgroup * 64 * BK * 2);
            const u64 columns = describe(w_tiles + stage * BN * BK * 2);
            begin_products();
#pragma unroll
            for (int j = 0; j < BK / 16; ++j) multiply(sums, rows + 2 * j, columns + 2 * j, i || j);
            end_products();
        };
        const auto hand_back = [&](int step) {
            if (threadIdx.x % 128 < CLUSTER) arrive_at(empty + 8 * (step % STAGES), threadIdx.x % 128);
        };
        const auto write_piece = [&](int piece) {
            write_async(pairs + piece * 16, y, buffers + (2 * warpgroup + piece % 2) * BUFFER,
                        at.m + rank * BM + warpgroup * 64, at.n + piece * 64, 1 + warpgroup);
        };
        for (int tile = first; tile < tiles; tile += clusters) {
            int i = 0;
#pragma unroll
            for (int piece = 0; piece < BN / 64; ++piece) {  // one behind the products of each of the first steps
                const bool more = i < steps;
                if (more) multiply_step(i);
                if (tile != first) write_piece(piece);
                if (more) {
                    wait_for_products<1>();
                    if (i) hand_back(step - 1);
                    ++i, ++step;
                }
            }
            at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (; i < steps; ++i, ++step) {
                multiply_step(i);
                wait_for_products<1>();
                hand_back(step - 1);
            }
            wait_for_products<0>();
            hand_back(step - 1);
            settle(sums);
#pragma unroll
            for (int j = 0; j < BN / 4; ++j) pairs[j] = pack(sums[2 * j], sums[2 * j + 1]);
        }
#pragma unroll
        for (int piece = 0; piece < BN / 64 && first < tiles; ++piece) write_piece(piece);
        if (threadIdx.x % 128 == 0) stores_have_read<0>();
    }
    sync_cluster();  // no block ends while another may still arrive at its barriers
}
