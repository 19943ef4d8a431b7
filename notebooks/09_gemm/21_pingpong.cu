// 21 pingpong: two consumers take turns at the tensor cores; one works on its sums while the other multiplies.
//
// The step from 20: there both consumers share a tile, end it at about the same time, and the tensor cores wait while
// both are busy with bias and GELU. Here each has tiles of its own, every other one, and the tensor cores alone
// for one tile: a named barrier hands them over as soon as a consumer has asked for the last of its products.
// The operands change places: A is w and B is x, so the sums are those of y's transpose, and stmatrix turns them back
// on their way to shared memory. So a thread needs four values of the bias instead of 48, and a tile can be 192 rows of
// x high: 128 x 192 sums are all that 128 threads can hold, and the larger a tile, the fewer bytes move for a product.
// Expected: the epilogue no longer stands in line with the products, which counts the more the smaller K is.

#include "hopper.cuh"

#ifndef BM
#define BM 192    // rows of x and y: wgmma's n
#define BN 128    // rows of w, columns of y: twice wgmma's m
#define BK 64     // 128 bytes: the width of the swizzle
#define STAGES 5
#define GROUP 16  // clusters, one beside the other
#define CLUSTER 2
#define PIECE 96  // rows of y that are stored at a time: while the copy engine writes them, it loads nothing
#define GELU 0
#define THREADS 384
#endif
static_assert(BN == 128 && BK == 64 && THREADS == 384, "two consumers of 2 x 64 rows of w each, and a producer");
static_assert(BM % (8 * CLUSTER) == 0, "each block's share of x begins where the swizzle begins anew");
static_assert(BM % PIECE == 0 && PIECE % 16 == 0, "stmatrix stores 16 rows of y at a time");
constexpr int SHARE = BM / CLUSTER;  // rows of x that each block asks for
constexpr int X_TILE = BM * BK * 2, W_TILE = BN * BK * 2, BUFFER = PIECE * 64 * 2;  // bytes

struct Place {
    int m, n;
};

// The first row and column of a cluster's tiles: across GROUP of them, then down a row. They share rows of x.
__device__ __forceinline__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * rows) * GROUP, within = tile % (GROUP * rows);
    const int wide = min(columns - first, GROUP);  // the last group may be narrower
    return {within / wide * BM, (first + within % wide) * CLUSTER * BN};
}

// Half of element i of the bias, of which there are N.
__device__ __forceinline__ float half_of(const u32* bias, int i, int N) {
    float even = 0, odd = 0;
    if (i < N) unpack(__ldg(bias + i / 2), even, odd);
    return 0.5f * (i % 2 ? odd : even);
}

// gelu(sum + b), tanh form, from half of b. With h = z / 2: h + h tanh(u), u = sqrt(2/pi) (z + 0.044715 z^3).
__device__ __forceinline__ float gelu(float sum, float half_b) {
    const float h = 0.5f * sum + half_b;
    return h + h * tanh_approx(h * (1.595769122f + 0.2854193f * h * h));
}

extern "C" __global__ __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
          const __grid_constant__ TensorMap y, int M, int N, int K
#if GELU
          , const u32* bias  // two elements each
#endif
) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * X_TILE, buffers = w_tiles + STAGES * W_TILE;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so the compiler knows that a warp's lanes agree
    const int thread = threadIdx.x % 128, rank = rank_in_cluster(), steps = (K + BK - 1) / BK;
    const int rows_of_tiles = (M + BM - 1) / BM, columns_of_tiles = (N + CLUSTER * BN - 1) / (CLUSTER * BN);
    const int tiles = rows_of_tiles * columns_of_tiles, first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, CLUSTER);  // a stage is read by one consumer of each block
        }
        barriers_ready();
    }
    sync_cluster();

    if (warpgroup == 2) {  // the producer
        fewer_registers<40>();
        for (int tile = first, step = 0; tile < tiles && thread == 0; tile += clusters) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES;
                wait(empty + 8 * stage, ~(step / STAGES) & 1);  // the first round finds every stage empty
                arrive_expecting(full + 8 * stage, X_TILE + W_TILE);
                load(w_tiles + stage * W_TILE, w, full + 8 * stage, i * BK, at.n + rank * BN);
                load_for_all(x_tiles + stage * X_TILE + rank * SHARE * BK * 2, x, full + 8 * stage, i * BK,
                             at.m + rank * SHARE, CLUSTER);
            }
        }
    } else {
        more_registers<232>();
        const int lane = thread % 32, warp = thread / 32, name = 3 + warpgroup;
        const u32 buffer = buffers + warpgroup * BUFFER;
        // stmatrix: the row of y that this lane addresses, and in it 16 bytes of its warp's 16 columns, swizzled
        const u32 to = buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
        const auto hand_back = [&](int step) {
            if (thread < CLUSTER) arrive_at(empty + 8 * (step % STAGES), thread);
        };
        if (warpgroup == 1) give_turn(0);
        int step = warpgroup * steps;
        for (int tile = first + warpgroup * clusters; tile < tiles; tile += 2 * clusters, step += steps) {
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
            float sums[2][BM / 2];
            take_turn(warpgroup);
#pragma unroll 1
            for (int i = 0; i < steps; ++i, ++step) {
                const int stage = step % STAGES;
                wait(full + 8 * stage, step / STAGES & 1);
                const u64 rows = describe(w_tiles + stage * W_TILE), columns = describe(x_tiles + stage * X_TILE);
                begin_products();
#pragma unroll
                for (int j = 0; j < BK / 16; ++j) {
                    multiply(sums[0], rows + 2 * j, columns + 2 * j, i || j);
                    multiply(sums[1], rows + 2 * j + (64 * BK * 2 >> 4), columns + 2 * j, i || j);
                }
                end_products();
                wait_for_products<1>();
                if (i) hand_back(step - 1);
            }
            if (tile + clusters < tiles) give_turn(1 - warpgroup);  // its products line up behind the last of these
            wait_for_products<0>();
            hand_back(step - 1);
            settle(sums[0]);
            settle(sums[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // 64 columns of y each; a thread has two, in all rows
                const int column = at.n + rank * BN + half * 64;
#if GELU
                const int own = column + warp * 16 + lane / 4;
                const float b0 = half_of(bias, own, N), b1 = half_of(bias, own + 8, N);
                const auto pair = [](float s, float t, float b) { return pack(gelu(s, b), gelu(t, b)); };
#else
                const float b0 = 0, b1 = 0;
                const auto pair = [](float s, float t, float) { return pack(s, t); };
#endif
#pragma unroll
                for (int piece = 0; piece < BM / PIECE; ++piece) {
                    if (thread == 0) stores_have_read<0>();
                    sync_warpgroup(name);
#pragma unroll
                    for (int j = 0; j < PIECE / 16; ++j) {  // 16 rows of y
                        const float* s = sums[half] + piece * PIECE / 2 + j * 8;
                        store_transposed(to + j * 16 * 128, pair(s[0], s[1], b0), pair(s[2], s[3], b1),
                                         pair(s[4], s[5], b0), pair(s[6], s[7], b1));
                    }
                    written_for_async();
                    sync_warpgroup(name);
                    if (thread == 0) store(y, buffer, column, at.m + piece * PIECE);
                }
            }
        }
        if (thread == 0) stores_have_read<0>();
    }
    sync_cluster();  // no block ends while another may still arrive at its barriers
}
