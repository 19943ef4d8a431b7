// Rungs 12 and up on a CPU: the functions of notebooks/09_gemm/hopper.cuh in C++, for a cluster's blocks at a time.
//
// Every CUDA thread is a fiber; the scheduler in main.cpp runs each in turn until it waits. What is asynchronous
// happens late, as a GPU may do it: a load poisons its place at once and lands some rounds later; products are made
// when they are waited for; a store reads its buffer some rounds later. So a wait too few, or a stage handed back too
// early, shows in the result, and a wait too many ends with nobody able to go on.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <vector>
using std::min;

typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct TensorMap {
    uint16_t* data;
    int rows, columns, box_rows;
};
struct Barrier64 {
    int expected, pending;
    long bytes;
    int phase;
};
struct Sync {
    int count, generation;
};
struct Block {
    std::vector<unsigned char> shared;
    std::map<u32, Barrier64> barriers;
    std::map<int, Sync> named;
    u32 row_of_lane[32][32];
    alignas(16) unsigned char of_lanes[32][32 * 16];
};
struct Store {
    std::function<void()> read;
    bool done;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    int thread, rank;
    Block* block;
    std::vector<std::function<void()>> begun;         // products of the group that is being put together
    std::deque<std::vector<std::function<void()>>> groups;  // and of those before it
    std::deque<Store> stores;
};
struct Index {
    unsigned x, y;
};
extern std::vector<Fiber*> fibers;
extern std::vector<Block*> blocks;
extern std::deque<std::function<void()>> loads;
extern Fiber* me;
extern ucontext_t scheduler;
extern Index block_index, gridDim;
extern long progress;

#define threadIdx (Index{(unsigned)me->thread, 0})
#define blockIdx (Index{block_index.x + me->rank, block_index.y})

inline void fail(const char* why) {
    puts(why);
    exit(3);
}
inline void pause() { swapcontext(&me->context, &scheduler); }
inline void meet(Sync& at, int threads, bool stay = true) {
    const int generation = at.generation;
    ++progress;
    if (++at.count == threads) {
        at.count = 0;
        ++at.generation;
    }
    while (stay && at.generation == generation) pause();
}
inline void __syncthreads() { meet(me->block->named[0], THREADS); }

// Shared memory: the first kilobyte is for barriers, tiles follow.
inline u32 shared_address(const void* p) { return (const unsigned char*)p - me->block->shared.data(); }
inline u32 aligned(const void* p) { return (shared_address(p) + 1023) & ~1023u; }
inline uint16_t& element(Block* block, u32 address) {
    address ^= (address >> 7 & 7) << 4;
    if (address + 2 > block->shared.size()) fail("beyond shared memory");
    return *(uint16_t*)(block->shared.data() + address);
}

inline void arrive_on(Block* block, u32 barrier, int bytes, int arrivals = 1) {
    if (!block->barriers.count(barrier)) fail("no barrier there");
    Barrier64& b = block->barriers[barrier];
    b.bytes += bytes;
    b.pending -= arrivals;
    ++progress;
    if (b.pending < 0) fail("more arrivals than the barrier expects");
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.expected;
}
inline void init_barrier(u32 barrier, int arrivals) { me->block->barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void barriers_ready() {}
inline void arrive(u32 barrier) { arrive_on(me->block, barrier, 0); }
inline void arrive_at(u32 barrier, int block) { arrive_on(blocks[block], barrier, 0); }
inline void arrive_expecting(u32 barrier, int bytes) { arrive_on(me->block, barrier, bytes); }
inline void wait(u32 barrier, int parity) {
    while (me->block->barriers.at(barrier).phase == parity) pause();
    ++progress;
}

inline void load_to(Block* block, u32 to, const TensorMap& map, u32 barrier, int column, int row) {
    if (to % 1024) fail("a tile that begins between multiples of 1024");
    for (int i = 0; i < map.box_rows * 64; ++i) element(block, to + 2 * i) = 0x7fc0;
    loads.push_back([=] {
        for (int r = 0; r < map.box_rows; ++r)
            for (int c = 0; c < 64; ++c)
                element(block, to + r * 128 + c * 2) = row + r < map.rows && column + c < map.columns
                                                           ? map.data[(size_t)(row + r) * map.columns + column + c]
                                                           : 0;
        arrive_on(block, barrier, -map.box_rows * 128, 0);
    });
}
inline void load(u32 to, const TensorMap& map, u32 barrier, int column, int row) {
    load_to(me->block, to, map, barrier, column, row);
}
inline void load_for_all(u32 to, const TensorMap& map, u32 barrier, int column, int row, int count) {
    for (int i = 0; i < count; ++i) load_to(blocks[i], to, map, barrier, column, row);
}
inline void store(const TensorMap& map, u32 from, int column, int row) {
    Block* block = me->block;
    me->stores.push_back({[=] {
                              for (int r = 0; r < map.box_rows && row + r < map.rows; ++r)
                                  for (int c = 0; c < 64 && column + c < map.columns; ++c)
                                      map.data[(size_t)(row + r) * map.columns + column + c] =
                                          element(block, from + r * 128 + c * 2);
                          },
                          false});
}
template <int N>
void stores_have_read() {
    for (; (int)me->stores.size() > N; me->stores.pop_front())
        if (!me->stores.front().done) me->stores.front().read();
}
inline void written_for_async() {}

inline u64 describe(u32 tile) { return (tile & 0x3ffff) >> 4; }
inline float number(uint16_t bits) {
    const u32 wide = (u32)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}
inline void begin_products() {}
inline void end_products() {
    me->groups.push_back(me->begun);
    me->begun.clear();
}
template <int N>
void wait_for_products() {
    ++progress;
    pause();
    for (; (int)me->groups.size() > N; me->groups.pop_front())
        for (auto& product : me->groups.front()) product();
}
template <int R>
void multiply(float (&d)[R], u64 a, u64 b, bool add) {  // a thread makes its own sums: two rows, two of eight columns
    float* sums = d;
    Block* block = me->block;
    const int row = me->thread % 128 / 32 * 16 + me->thread % 32 / 4, column = me->thread % 4 * 2;
    me->begun.push_back([=] {
        for (int i = 0; i < R; ++i) {
            const u32 x = (u32)a * 16 + (row + i % 4 / 2 * 8) * 128;
            const u32 w = (u32)b * 16 + (i / 4 * 8 + column + i % 2) * 128;
            float sum = add ? sums[i] : 0;
            for (int k = 0; k < 16; ++k) sum += number(element(block, x + 2 * k)) * number(element(block, w + 2 * k));
            sums[i] = sum;
        }
    });
}
template <class T, int R>
void settle(T (&)[R]) {}

inline uint16_t rounded(float f) {
    u32 wide;
    memcpy(&wide, &f, 4);
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
inline u32 pack(float first, float second) { return rounded(first) | (u32)rounded(second) << 16; }
inline void unpack(u32 pair, float& first, float& second) {
    first = number(pair & 0xffff);
    second = number(pair >> 16);
}
inline u32 __ldg(const u32* p) { return *p; }
inline float tanh_approx(float x) { return tanhf(x); }
template <int R>
void write(const float (&sums)[R], u32* y, int row, int column, int M, int N) {
    for (int i = 0; i < R; ++i) {
        const int r = row + me->thread % 128 / 32 * 16 + me->thread % 32 / 4 + i % 4 / 2 * 8;
        const int c = column + i / 4 * 8 + me->thread % 4 * 2 + i % 2;
        if (r < M && c < N) ((uint16_t*)y)[(size_t)r * N + c] = rounded(sums[i]);
    }
}
inline void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d, bool transposed = false) {
    const int warp = me->thread / 32, lane = me->thread % 32;
    me->block->row_of_lane[warp][lane] = to;
    const u32 parts[] = {a, b, c, d};
    meet(me->block->named[100 + warp], 32);
    for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {  // a lane has two elements of row lane / 4
            const int across = lane / 4, along = lane % 4 * 2 + half;
            const int row = transposed ? along : across, column = transposed ? across : along;
            const u32 at = me->block->row_of_lane[warp][i * 8 + row];
            if (at % 16) fail("a row of a matrix that begins between multiples of 16");
            *(uint16_t*)(me->block->shared.data() + at + column * 2) = parts[i] >> 16 * half;
        }
    }
    meet(me->block->named[100 + warp], 32);
}

inline void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) { store_matrices(to, a, b, c, d, true); }

template <class T, class F>
auto with_warp(T mine, F make) {  // what `make` makes of the 32 lanes' values, for each lane
    const int warp = me->thread / 32;
    T* values = (T*)me->block->of_lanes[warp];
    values[me->thread % 32] = mine;
    meet(me->block->named[200 + warp], 32);
    const auto made = make(values);
    meet(me->block->named[200 + warp], 32);
    return made;
}
template <class T>
T __shfl_sync(u32, T value, int lane) {
    return with_warp(value, [=](T* of) { return of[lane]; });
}
inline void take_turn(int mine) { meet(me->block->named[1 + mine], 256); }
inline void give_turn(int it) { meet(me->block->named[1 + it], 256, false); }
inline void sync_warpgroup(int name) { meet(me->block->named[name], 128); }
template <int N>
void more_registers() {}
template <int N>
void fewer_registers() {}
inline int rank_in_cluster() { return me->rank; }
inline void sync_cluster() { meet(blocks[0]->named[99], fibers.size()); }
