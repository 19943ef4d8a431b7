// 21 pingpong: two consumers take turns at the tensor cores; one works on its sums while the other multiplies.
//
// The step from 20: there both consumers share a tile, end it at about the same time, and the tensor cores wait while both
// are busy with bias, GELU and stores. Here each has tiles of its own, every other one, and the tensor cores alone for one
// tile after the other: a named barrier hands them over as soon as a consumer has asked for its last products.
// The roles of x and w are exchanged: A is w and B is x, so the sums are those of y's transpose, and stmatrix turns them back
// on their way to shared memory. A thread then needs four values of the bias instead of 48; and the tile can be 192 rows of x
// high: 128 x 192 sums are all that 128 threads can hold, and the larger the tile, the fewer bytes move for a product.
// Expected: the epilogue is gone from the critical path, the more so the smaller K is.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hopper.cuh"

#ifndef BM
#define BM 192  // rows of x and y: wgmma's n
#define BN 128  // rows of w, columns of y: twice wgmma's m
#define BK 64   // 128 bytes: the width of the swizzle
#define STAGES 4
#define GROUP 16  // clusters, one beside the other
#define CLUSTER 2
#define THREADS 384
#define GELU 1
#endif
static_assert(BN == 128 && BK == 64 && THREADS == 384, "two consumers, each 2 x 64 rows of w, and a producer");
static_assert(BM % (8 * CLUSTER) == 0, "each block's share of x begins where the swizzle begins anew");
constexpr int SHARE = BM / CLUSTER;   // rows of x that each block asks for
constexpr int X_TILE = BM * BK * 2, W_TILE = BN * BK * 2, BUFFER = BM * 64 * 2;  // bytes; BUFFER: 64 columns of y

struct Place {
    int m, n;
};

// The first row and column of a cluster's tiles: across GROUP of them, then one row down. All need the same rows of x.
__device__ __forceinline__ Place place(int tile, int rows, int columns) {
    const int first = tile / (GROUP * rows) * GROUP, within = tile % (GROUP * rows);
    const int wide = min(columns - first, GROUP);  // the last group may be narrower
    return {within / wide * BM, (first + within % wide) * CLUSTER * BN};
}

// gelu(sum + b), tanh form, from half of b. With h = z / 2 it is h + h tanh(u), u = sqrt(2 / pi) (z + 0.044715 z^3).
__device__ __forceinline__ float gelu(float sum, float half_b) {
    const float h = 0.5f * sum + half_b;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h * (1.5957691216f + 0.2854191644f * h * h)));
    return h + h * t;
}

// Four 8 x 8 matrices, transposed, to shared memory: each lane gives the address of a row of y, a column of sums.
__device__ __forceinline__ void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A named barrier of both consumers: the one whose turn it is waits, the other arrives and goes on.
__device__ __forceinline__ void take_turn(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ __forceinline__ void give_turn(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }

extern "C" __global__ __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER)
void gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
          const __grid_constant__ TensorMap y, int M, int N, int K
#if GELU
          , const ELEMENT* bias
#endif
) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 x_tiles = aligned(memory), w_tiles = x_tiles + STAGES * X_TILE, buffers = w_tiles + STAGES * W_TILE;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // said so that the compiler knows: the same in all lanes
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
        int step = 0;
        for (int tile = first; tile < tiles && thread == 0; tile += clusters) {
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
        const int lane = thread % 32, warp = thread / 32;
        const u32 buffer = buffers + warpgroup * BUFFER;
        // stmatrix: this lane's row of y, and in it the 16 bytes that its warp's 16 columns begin with, swizzled
        const u32 to = buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
        const int turn = 1 + warpgroup, others_turn = 2 - warpgroup, own = 3 + warpgroup;  // named barriers
        const auto hand_back = [&](int step) {
            if (thread < CLUSTER) arrive_at(empty + 8 * (step % STAGES), thread);
        };
        if (warpgroup == 1) give_turn(others_turn);  // the first consumer begins
        for (int tile = first + warpgroup * clusters, step = warpgroup * steps; tile < tiles;
             tile += 2 * clusters, step += steps) {  // and the other's steps are between
            const Place at = place(tile, rows_of_tiles, columns_of_tiles);
            float sums[2][BM / 2];
            take_turn(turn);
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
                if (i) {
                    wait_for_products<1>();
                    hand_back(step - 1);
                }
            }
            if (tile + clusters < tiles) give_turn(others_turn);  // its products queue behind the last of these
            wait_for_products<0>();
            hand_back(step - 1);
            settle(sums[0]);
            settle(sums[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // 64 columns of y
                const int column = at.n + rank * BN + half * 64;
#if GELU
                const int mine = column + warp * 16 + lane / 4;  // the column of y of a row of sums, and 8 on another
                const float b0 = mine < N ? 0.5f * (float)bias[mine] : 0.0f;
                const float b1 = mine + 8 < N ? 0.5f * (float)bias[mine + 8] : 0.0f;
                const auto pair = [](float a, float c, float b) { return pack(gelu(a, b), gelu(c, b)); };
#else
                const float b0 = 0.0f, b1 = 0.0f;  // no bias: the sums as they are
                const auto pair = [](float a, float c, float) { return pack(a, c); };
#endif
                if (thread == 0) stores_have_read<0>();
                sync_warpgroup(own);
#pragma unroll
                for (int j = 0; j < BM / 16; ++j) {  // 16 rows of y
                    const float* s = sums[half] + 8 * j;
                    store_transposed(to + j * 16 * 128, pair(s[0], s[1], b0), pair(s[2], s[3], b1), pair(s[4], s[5], b0),
                                     pair(s[6], s[7], b1));
                }
                written_for_async();
                sync_warpgroup(own);
                if (thread == 0) store(y, buffer, column, at.m);
            }
        }
        if (thread == 0) stores_have_read<0>();
    }
    sync_cluster();  // no block ends while another may still arrive at its barriers
}
