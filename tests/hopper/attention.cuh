// What notebooks/10_kernels/attention.cuh has beyond hopper.cuh, and more of what a warp does together, on a CPU.
#pragma once
#include "hopper.cuh"
using std::max;

template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
    return with_warp(value, [=](T* of) { return of[me->thread % 32 ^ mask]; });
}
inline u32 __ballot_sync(u32, bool vote) {
    return with_warp((u32)vote, [](u32* of) {
        u32 all = 0;
        for (int i = 0; i < 32; ++i) all |= of[i] << i;
        return all;
    });
}
inline int __reduce_add_sync(u32, int value) {
    return with_warp(value, [](int* of) { return std::accumulate(of, of + 32, 0); });
}
inline int __reduce_max_sync(u32, int value) {
    return with_warp(value, [](int* of) { return *std::max_element(of, of + 32); });
}
inline void __syncwarp() { with_warp(0, [](int*) { return 0; }); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 atomicInc(u32* p, u32 most) {
    const u32 old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}

// A map of (heads, rows, 128): a tile is two halves of 64 columns, rows beyond the head's are zeros.
inline void tile_of(Block* block, u32 at, const TensorMap& map, int row, int head,
                    const std::function<void(uint16_t&, uint16_t*)>& each) {
    for (int r = 0; r < map.box_rows; ++r)
        for (int c = 0; c < 128; ++c)
            each(element(block, at + c / 64 * map.box_rows * 128 + r * 128 + c % 64 * 2),
                 row + r < map.rows ? map.data + ((size_t)head * map.rows + row + r) * 128 + c : nullptr);
}
inline void load_tile(u32 to, const TensorMap& map, u32 barrier, int row, int head) {
    if (to % 1024) fail("a tile that begins between multiples of 1024");
    Block* block = me->block;
    tile_of(block, to, map, row, head, [](uint16_t& here, uint16_t*) { here = 0x7fc0; });
    loads.push_back([=] {
        tile_of(block, to, map, row, head, [](uint16_t& here, uint16_t* there) { here = there ? *there : 0; });
        arrive_on(block, barrier, -map.box_rows * 256, 0);
    });
}
inline void store_tile(const TensorMap& map, u32 from, int row, int head) {
    Block* block = me->block;
    me->stores.push_back({[=] {
        tile_of(block, from, map, row, head, [](uint16_t& here, uint16_t* there) { if (there) *there = here; });
    }, false});
}

inline u64 describe_rows(u32 tile) { return describe(tile); }
template <int R>
void multiply_rows(float (&d)[R], const u32* a, u64 b, bool add) {
    struct Fragment {
        u32 of[4];
    };
    struct Quad {
        Fragment of[4];
    };
    const Fragment own = {a[0], a[1], a[2], a[3]};
    const Quad rows = with_warp(own, [](Fragment* of) {
        Quad quad;
        std::copy_n(of + me->thread % 32 / 4 * 4, 4, quad.of);
        return quad;
    });
    float* sums = d;
    Block* block = me->block;
    const int column = me->thread % 4 * 2;
    me->begun.push_back([=] {
        if (memcmp(a, &own, sizeof own)) fail("an operand in registers is changed while products read it");
        for (int i = 0; i < R; ++i) {
            const int n = i / 4 * 8 + column + i % 2;
            float sum = add ? sums[i] : 0;
            for (int k = 0; k < 16; ++k) {
                const u32 pair = rows.of[k % 8 / 2].of[k / 8 * 2 + i % 4 / 2];
                const u32 other = (u32)b * 16 + n / 64 * 16384 + k * 128 + n % 64 * 2;
                sum += number(pair >> 16 * (k % 2)) * number(element(block, other));
            }
            sums[i] = sum;
        }
    });
}
inline float exp2_approx(float x) { return exp2f(x); }
