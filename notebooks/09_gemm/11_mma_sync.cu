// 11 mma_sync: the best of sm_80: cp.async in stages, swizzled tiles, ldmatrix and mma.sync, all at the same time.
//
// y = x @ w.T for x (M, K), w (N, K), y (M, N), all row-major; K a multiple of 8. Four ideas, none of which pays alone:
// cp.async brings tiles to shared memory STAGES - 1 slices of K ahead, without passing through registers; ldmatrix
// reads fragments from tiles whose 16-byte chunks are swizzled, so that no two rows that it reads share a bank; the
// next fragments are read while the tensor cores work on these; and a block takes one tile of y after another, in
// groups of GROUP rows of tiles that find their inputs in L2, with its copies already running ahead into the next.
// Expected: the tensor cores never wait. What limits then is the instruction, whose operands pass through registers:
// on sm_90 it cannot reach two thirds of what wgmma reads straight from shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef BM
#define BM 128  // the block's tile of y
#define BN 256
#define BK 64   // 32 or 64: the part of K in one stage
#define WM 64   // the warp's tile of y
#define WN 64
#define STAGES 4
#define GROUP 8
#define THREADS 256
#endif
#ifndef ELEMENT
#define ELEMENT __nv_bfloat16  // or __half
#endif

typedef ELEMENT T;

constexpr int WARPS_N = BN / WN;
constexpr int FM = WM / 16, FN = WN / 8, STEPS = BK / 16;  // fragments of a warp, and the times it reads them a stage
constexpr int CHUNKS = BK / 8, ROWS = THREADS / CHUNKS;    // 16-byte chunks in a row; rows copied at once
constexpr int ROW = BK * sizeof(T), STAGE = (BM + BN) * ROW;  // bytes
static_assert(BK == 32 || BK == 64, "a row of a stage is 64 or 128 bytes");
static_assert(THREADS == 32 * (BM / WM) * WARPS_N);
static_assert(BM % ROWS == 0 && BN % ROWS == 0, "all threads copy equally often");
static_assert(WM % 16 == 0 && WN % 32 == 0 && BM % WM == 0 && BN % WN == 0 && STAGES >= 2);

// 16 bytes from memory to shared memory, zeros where `inside` is false; nobody waits.
__device__ void copy_async(unsigned to, const T* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Ends a group of copies.
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest `newest` groups of copies have arrived.
template <int newest> __device__ void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(newest) : "memory"); }

// Four 8x8 matrices: lanes 8i to 8i + 7 give the addresses of matrix i's rows; each lane receives two elements of each.
__device__ void ldmatrix(unsigned* r, unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// c (16, 8) += a (16, 16) @ b (16, 8), spread over the registers of a warp. `T` is told by its pointer's type.
#define MMA(type)                                                                     \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ void mma(float* c, const unsigned* a, const unsigned* b, __nv_bfloat16*) { MMA("bf16"); }
__device__ void mma(float* c, const unsigned* a, const unsigned* b, __half*) { MMA("f16"); }

// The byte at which chunk `c` of row `r` lies in a tile. Eight rows that follow each other hold it in eight different
// groups of four banks, which is what ldmatrix reads at once.
__device__ int place(int r, int c) { return r * ROW + (c ^ (BK == 64 ? r & 7 : r >> 1 & 3)) * 16; }

// The row of w that row `r` of its tile holds. mma leaves a lane with columns 2q and 2q + 1 of every 8; with the rows
// of w dealt out like this, those of four fragments are eight neighbours of y: one store of 16 bytes.
__device__ int dealt(int r) { return (r & ~31) | (r & 6) << 2 | (r >> 2 & 6) | (r & 1); }

__device__ unsigned pack(float low, float high) {
    T both[2] = {T(low), T(high)};
    return *reinterpret_cast<unsigned*>(both);
}

// First row and column of an output tile: down GROUP rows of tiles, then one column on.
__device__ int2 corner(int tile, int tiles_m, int tiles_n) {
    const int first = tile / (GROUP * tiles_n) * GROUP, inside = tile % (GROUP * tiles_n);
    const int height = min(tiles_m - first, GROUP);
    return make_int2((first + inside % height) * BM, inside / height * BN);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, int M, int N, int K) {
    extern __shared__ __align__(128) char shared[];
    const unsigned stages = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN, tiles = tiles_m * tiles_n;
    const int slices = (K + BK - 1) / BK;

    // Copies a part of the next slice of K, of this output tile or of the block's next one, into the next stage. A row
    // beyond the last reads the last one again: what comes of it is never stored.
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    int next_tile = blockIdx.x, next_k = 0, next_stage = 0;
    int2 next = corner(next_tile, tiles_m, tiles_n);
    auto fetch = [&](int part, int parts) {
        const unsigned to = stages + next_stage * STAGE + place(row, chunk);
        const int k = next_k * BK + chunk * 8;
        const bool inside = k < K && next_tile < tiles;
#pragma unroll
        for (int i = 0; i < (BM + BN) / ROWS; ++i) {
            const int r = i * ROWS;
            if (i % parts != part) continue;
            if (r < BM)
                copy_async(to + r * ROW, x + (size_t)min(next.x + row + r, M - 1) * K + k, inside);
            else
                copy_async(to + r * ROW, w + (size_t)min(next.y + dealt(row + r - BM), N - 1) * K + k, inside);
        }
    };
    auto advance = [&] {
        next_stage = next_stage + 1 < STAGES ? next_stage + 1 : 0;
        if (++next_k < slices) return;
        next_k = 0;
        next_tile += gridDim.x;
        if (next_tile < tiles) next = corner(next_tile, tiles_m, tiles_n);
    };

    // Reads the warp's fragments for one of the STEPS of a stage.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    const int a_at = place(warp_m + lane % 16, lane / 16);
    const int b_at = place(BM + warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    unsigned a[2][FM][4], b[2][FN / 2][4];  // of this step and of the next
    auto read = [&](int half, int stage, int step) {
        const unsigned from = stages + stage * STAGE;
        for (int i = 0; i < FM; ++i) ldmatrix(a[half][i], from + (a_at ^ step * 32) + i * 16 * ROW);
        for (int j = 0; j < FN / 2; ++j) ldmatrix(b[half][j], from + (b_at ^ step * 32) + j * 16 * ROW);
    };

    for (int s = 0; s < STAGES - 1; ++s) {
        fetch(0, 1);
        commit();
        advance();
    }
    arrived<STAGES - 2>();
    __syncthreads();
    int stage = 0;
    read(0, stage, 0);

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[FM][FN][4] = {};
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step == STEPS - 1) {  // the next fragments stand in the next stage
                    commit();
                    arrived<STAGES - 2>();
                    __syncthreads();
                    stage = stage + 1 < STAGES ? stage + 1 : 0;
                }
                read((step + 1) % 2, stage, (step + 1) % STEPS);
                if (step < STEPS - 1) fetch(step, STEPS - 1);  // into the stage that all warps have left
                for (int i = 0; i < FM; ++i)
                    for (int j = 0; j < FN; ++j) {
                        const int turn = i % 2 ? FN - 1 - j : j;  // to and fro: b's registers are used twice running
                        mma(c[i][turn], a[step % 2][i], b[step % 2][turn / 2] + turn % 2 * 2, (T*)0);
                    }
            }
            advance();
        }

        const int2 at = corner(tile, tiles_m, tiles_n);
#pragma unroll
        for (int i = 0; i < 2 * FM; ++i) {
            const int m = at.x + warp_m + i * 8 + lane / 4;
#pragma unroll
            for (int j = 0; j < FN; j += 4) {
                const int n = at.y + warp_n + j * 8 + lane % 4 * 8;
                unsigned out[4];
                for (int q = 0; q < 4; ++q) out[q] = pack(c[i / 2][j + q][i % 2 * 2], c[i / 2][j + q][i % 2 * 2 + 1]);
                T* to = y + (size_t)m * N + n;
                if (m >= M) continue;
                if (N % 8 == 0) {
                    if (n < N) *reinterpret_cast<uint4*>(to) = make_uint4(out[0], out[1], out[2], out[3]);
                } else {
                    for (int q = 0; q < 8; ++q)
                        if (n + q < N) to[q] = reinterpret_cast<T*>(out)[q];
                }
            }
        }
    }
}
