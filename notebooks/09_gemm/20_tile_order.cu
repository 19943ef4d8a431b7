// 20 tile_order: tiles and K in serpentines, and no clusters; with GELU=1, bias and GELU on the way out.
//
// The step from 19: groups of tiles are walked forth and back, and tiles through K alike: what was used last, and still
// lies in L2, is used first. And clusters are given up again: with and without them, all else alike, the kernel without
// was the faster one on an H200. Of single blocks' requests for the same bytes so many were joined on their way that
// fewer were looked up in L2 than with clusters, which ask for less.
// Expected: about a percent, and a kernel without a cluster's rules. What paid two rungs ago need not pay for ever.

#include "hopper.cuh"

#ifndef BM
#define BM 128  // rows of x and y that a block computes, 64 a consumer
#define BN 256  // rows of w, columns of y
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define GROUP 16
#define GELU 0
#define THREADS 384
#endif
static_assert(BM == 128 && BK == 64 && THREADS == 384, "two consumers of 64 rows each, and a producer");
constexpr int BUFFER = 64 * 64 * 2;  // bytes of a piece of y: 64 rows of 128 bytes

struct Place {
    int m, n;
};

// The first row and column of a tile: down GROUP rows of tiles, then one column on: to the right, or back to the left.
__device__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * columns) * GROUP, within = tile % (GROUP * columns);
    const int high = min(rows - first, GROUP);  // the last group may have fewer rows
    const int column = first / GROUP % 2 ? columns - 1 - within / high : within / high;
    return {(first + within % high) * BM, column * BN};
}

// GELU, tanh form: 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), with h = z / 2 in place of z.
__device__ __forceinline__ float gelu(float z) {
    const float h = 0.5f * z;
    return h + h * tanh_approx(h * (1.595769122f + 0.2854193f * h * h));
}

// gelu(sums + bias), in place; a thread has two columns of each eight.
__device__ __forceinline__ void activate(float (&sums)[BN / 2], const u32* bias, int column, int N) {
    column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        float first = 0, second = 0;
        if (column + 8 * j < N) unpack(__ldg(bias + column / 2 + 4 * j), first, second);
        for (int i = 0; i < 4; i += 2) {
            sums[4 * j + i] = gelu(sums[4 * j + i] + first);
            sums[4 * j + i + 1] = gelu(sums[4 * j + i + 1] + second);
        }
    }
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

extern "C" __global__ __launch_bounds__(THREADS, 1)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
          const __grid_constant__ TensorMap y, int M, int N, int K
#if GELU
          , const u32* bias  // two elements each
#endif
) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * BM * BK * 2;
    const u32 buffers = w_tiles + STAGES * BN * BK * 2;
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
        bool back = false;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, back = !back) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES, k = (back ? steps - 1 - i : i) * BK;
                wait(empty + 8 * stage, ~(step / STAGES) & 1);  // the first round finds every stage empty
                arrive_expecting(full + 8 * stage, (BM + BN) * BK * 2);
                load(x_tiles + stage * BM * BK * 2, x, full + 8 * stage, k, at.m);
                load(w_tiles + stage * BN * BK * 2, w, full + 8 * stage, k, at.n);
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
            if (threadIdx.x % 128 == 0) arrive(empty + 8 * (step % STAGES));
        };
        const auto write_piece = [&](int piece) {
            write_async(pairs + piece * 16, y, buffers + (2 * warpgroup + piece % 2) * BUFFER,
                        at.m + warpgroup * 64, at.n + piece * 64, 1 + warpgroup);
        };
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int i = 0;
#pragma unroll
            for (int piece = 0; piece < BN / 64; ++piece) {  // one behind the products of each of the first steps
                const bool more = i < steps;
                if (more) multiply_step(i);
                if (tile != blockIdx.x) write_piece(piece);
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
#if GELU
            activate(sums, bias, at.n, N);
#endif
#pragma unroll
            for (int j = 0; j < BN / 4; ++j) pairs[j] = pack(sums[2 * j], sums[2 * j + 1]);
        }
#pragma unroll
        for (int piece = 0; piece < BN / 64 && blockIdx.x < tiles; ++piece) write_piece(piece);
        if (threadIdx.x % 128 == 0) stores_have_read<0>();
    }
}
