// 07 block_sparse: attention that visits only the blocks of its mask, at the rate of dense attention on Hopper.
//
// A mask says of each block of 128 queries x 128 keys whether it counts. A kernel that loads 50% of the blocks should
// take 50% of the time; what stands against it are the ends of a row of blocks, which weigh the more the shorter it is,
// and rows of very different lengths.
//   - The producer warp loads the row's part of the mask, 32 blocks at a time, a byte a lane; a ballot turns it into a
//     word, and the lanes keep the words. Set bits are found from the top down (`clz`), one a block to load: a block
//     that does not count costs nothing.
//   - It fills a ring of tiles, K a block ahead of V, and runs on into the next row of blocks while the consumers end
//     this one: Q has barriers of its own, and results leave through the copy engine.
//   - Blocks take rows by a ticket, longest rows of a head first (`order`), heads one after the other, so that the rows
//     at work share K and V in L2, and the last to end are short ones.
//   - Two consumers of 64 queries: one is at its softmax while the other's products keep the tensor cores busy. They
//     need not be told to take turns, as in rung 21: on an H200 that changed nothing. Each asks for the scores of a
//     block and for the outputs of the block before it in one go, and works on the scores when the outputs are still
//     being made. Products with V take the weights from registers.

#include "attention.cuh"

#ifndef STAGES
#define STAGES 5
#define THREADS 384  // two consumers and a producer
#endif
constexpr int M = 64, N = 128, D = 128;  // queries of a consumer, keys of a block, head dimension
constexpr int Q_TILE = M * D * 2, KV_TILE = N * D * 2;  // bytes: two halves of 64 columns, one after the other
constexpr float NEVER = -1e30f;

struct Ring {  // where in the ring one is; the phase of its barriers flips each time round
    int slot = 0, phase = 0;
    __device__ __forceinline__ void step() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

struct Row {  // of blocks: what the producer tells the consumers of the tile that they do next
    int tile, blocks, first;  // head * rows + row or -1: no more; how many blocks count; the number of the first
};

__device__ unsigned tickets;  // how many were drawn; 0 again when the last block has drawn its last

// mask: a byte a block, of head h from h * mask_stride; order: the tiles in the order in which they are taken.
extern "C" __global__ __launch_bounds__(THREADS, 1)
void block_sparse(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,
                  const unsigned char* mask, long long mask_stride, const int* order, int tiles, int rows, int columns,
                  int keys, float scale) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES + 4];
    __shared__ Row of_consumer[2];
    const u32 q_tiles = aligned(memory), ring = q_tiles + 2 * Q_TILE, results = ring + STAGES * KV_TILE;
    const u32 full = shared_address(barriers), free = full + 8 * STAGES;
    const u32 q_full = free + 8 * STAGES, q_free = q_full + 16;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_barrier(full + 8 * i, 1), init_barrier(free + 8 * i, 2);
        for (int i = 0; i < 2; ++i) init_barrier(q_full + 8 * i, 1), init_barrier(q_free + 8 * i, 1);
        barriers_ready();
    }
    __syncthreads();

    if (warpgroup == 2) {  // the producer
        fewer_registers<40>();
        if (thread >= 32) return;
        Ring at;
        const auto fetch = [&](const TensorMap& map, int block, int head) {
            wait(free + 8 * at.slot, at.phase ^ 1);
            if (thread == 0) {
                arrive_expecting(full + 8 * at.slot, KV_TILE);
                load_tile(ring + at.slot * KV_TILE, map, full + 8 * at.slot, block * N, head);
            }
            __syncwarp();
            at.step();
        };
        for (int turn = 0;; ++turn) {
            int tile = -1;
            if (thread == 0) {
                const unsigned ticket = atomicInc(&tickets, tiles + gridDim.x - 1);
                if (ticket < tiles) tile = order[ticket];
            }
            tile = __shfl_sync(~0u, tile, 0);
            const int head = tile / rows, row = tile % rows;
            u32 words = 0;  // of lane i: blocks 32 i to 32 i + 31
            if (tile >= 0) {
                const unsigned char* own = mask + head * mask_stride + (long long)row * columns;
#pragma unroll 4
                for (int i = 0; i * 32 < columns; ++i) {
                    const u32 word = __ballot_sync(~0u, i * 32 + thread < columns && own[i * 32 + thread]);
                    if (thread == i) words = word;
                }
            }
            const int blocks = __reduce_add_sync(~0u, __popc(words));
            const int first = __reduce_max_sync(~0u, words ? thread * 32 + 31 - __clz(words) : -1);
            const auto begin = [&] {  // the consumers' turn: Q, and what they need to know
                for (int i = 0; i < 2; ++i) {
                    wait(q_free + 8 * i, (turn & 1) ^ 1);
                    if (thread == 0) {
                        of_consumer[i] = {tile, blocks, first};
                        if (blocks) {
                            arrive_expecting(q_full + 8 * i, Q_TILE);
                            load_tile(q_tiles + i * Q_TILE, q, q_full + 8 * i, (row * 2 + i) * M, head);
                        } else {
                            arrive(q_full + 8 * i);
                        }
                    }
                    __syncwarp();
                }
            };
            if (!blocks) begin();
            if (tile < 0) break;
            int last = -1;
#pragma unroll 1
            for (int i = first / 32; i >= 0 && blocks; --i) {
                u32 word = __shfl_sync(~0u, words, i);
#pragma unroll 1
                for (int bit; word; word ^= 1u << bit) {
                    bit = 31 - __clz(word);
                    fetch(k, i * 32 + bit, head);
                    if (last >= 0) {
                        fetch(v, last, head);
                    } else {
                        begin();
                    }
                    last = i * 32 + bit;
                }
            }
            if (blocks) fetch(v, last, head);
        }
    } else {
        more_registers<232>();
        const int me = warpgroup, lane = thread % 32;
        const u32 queries = q_tiles + me * Q_TILE, result = results + me * Q_TILE;
        const u32 to = result + (thread / 32 * 16 + lane % 16) * 128;  // stmatrix: the row that this lane addresses
        Ring at;
        float s[N / 2], o[D / 2], high[2], total[2];
        u32 weights[N / 4];
        const auto hand_back = [&](int slot) {
            if (thread == 0) arrive(free + 8 * slot);
        };
        const auto scores = [&](int slot) {
            const u64 a = describe(queries), b = describe(ring + slot * KV_TILE);
#pragma unroll
            for (int i = 0; i < D / 16; ++i)
                multiply(s, a + i / 4 * (M * 128 >> 4) + i % 4 * 2, b + i / 4 * (N * 128 >> 4) + i % 4 * 2, i > 0);
            end_products();
        };
        const auto outputs = [&](int slot, bool add) {
            const u64 b = describe_rows(ring + slot * KV_TILE);
#pragma unroll
            for (int i = 0; i < N / 16; ++i) multiply_rows(o, weights + 4 * i, b + i * (16 * 128 >> 4), add || i > 0);
            end_products();
        };
        // s becomes 2^(scale (s - maximum)); what the older sums must shrink by is returned
        const auto soften = [&](float (&shrink)[2]) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float one = fmaxf(s[2 * r], s[2 * r + 1]), two = fmaxf(s[4 + 2 * r], s[5 + 2 * r]);
#pragma unroll
                for (int j = 2; j < N / 8; j += 2) {
                    one = fmaxf(one, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
                    two = fmaxf(two, fmaxf(s[4 * j + 4 + 2 * r], s[4 * j + 5 + 2 * r]));
                }
                float most = fmaxf(one, two);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                most = fmaxf(most, high[r]);
                shrink[r] = exp2_approx((high[r] - most) * scale);
                high[r] = most;
                const float minus = -most * scale;
                float sums[2] = {0, 0};
#pragma unroll
                for (int j = 0; j < N / 8; ++j)
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; ++i) {
                        s[4 * j + i] = exp2_approx(fmaf(s[4 * j + i], scale, minus));
                        sums[i % 2] += s[4 * j + i];
                    }
                total[r] = total[r] * shrink[r] + sums[0] + sums[1];
            }
        };
        const auto round = [&] {
#pragma unroll
            for (int i = 0; i < N / 4; ++i) weights[i] = pack(s[2 * i], s[2 * i + 1]);
        };
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            wait(q_full + 8 * me, turn & 1);
            const Row row = of_consumer[me];
            if (row.tile < 0) break;
            const int head = row.tile / rows, query = (row.tile % rows * 2 + me) * M;
            high[0] = high[1] = NEVER, total[0] = total[1] = 0;
            if (row.blocks) {
                float shrink[2];
                wait(full + 8 * at.slot, at.phase);
                begin_products();
                scores(at.slot);
                wait_for_products<0>();
                settle(s);
                hand_back(at.slot);
                at.step();
                if (row.first * N + N > keys) {  // the block in which keys end comes first
#pragma unroll
                    for (int i = 0; i < N / 2; ++i)
                        if (row.first * N + i / 4 * 8 + lane % 4 * 2 + i % 2 >= keys) s[i] = NEVER;
                }
                soften(shrink);
                round();
#pragma unroll 1
                for (int i = 1; i < row.blocks; ++i) {
                    const int k_slot = at.slot;  // scores of this block, and outputs of the one before it
                    wait(full + 8 * at.slot, at.phase);
                    at.step();
                    wait(full + 8 * at.slot, at.phase);
                    settle(weights);
                    settle(o);
                    begin_products();
                    scores(k_slot);
                    outputs(at.slot, i > 1);
                    wait_for_products<1>();
                    settle(s);
                    hand_back(k_slot);
                    soften(shrink);
                    wait_for_products<0>();
                    settle(o);
                    hand_back(at.slot);
                    at.step();
                    round();
#pragma unroll
                    for (int j = 0; j < D / 2; ++j) o[j] *= shrink[j / 2 % 2];
                }
                if (thread == 0) arrive(q_free + 8 * me);
                wait(full + 8 * at.slot, at.phase);
                settle(weights);
                settle(o);
                begin_products();
                outputs(at.slot, row.blocks > 1);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    total[r] += __shfl_xor_sync(~0u, total[r], 1);
                    total[r] += __shfl_xor_sync(~0u, total[r], 2);
                    total[r] = 1 / total[r];
                }
                wait_for_products<0>();
                settle(o);
                hand_back(at.slot);
                at.step();
            } else {
                sync_warpgroup(3 + me);  // all have read the row
                if (thread == 0) arrive(q_free + 8 * me);
#pragma unroll
                for (int j = 0; j < D / 2; ++j) o[j] = 0;
            }
            if (thread == 0) stores_have_read<0>();
            sync_warpgroup(3 + me);
#pragma unroll
            for (int j = 0; j < D / 16; ++j) {  // 16 columns: two 16-byte places of eight in a row, swizzled by it
                const float* d = o + 8 * j;
                store_matrices(to + j / 4 * (M * 128) + ((j % 4 * 2 + lane / 16) ^ lane % 8) * 16,
                               pack(d[0] * total[0], d[1] * total[0]), pack(d[2] * total[1], d[3] * total[1]),
                               pack(d[4] * total[0], d[5] * total[0]), pack(d[6] * total[1], d[7] * total[1]));
            }
            written_for_async();
            sync_warpgroup(3 + me);
            if (thread == 0) store_tile(out, result, query, head);
        }
        if (thread == 0) stores_have_read<0>();
    }
}
