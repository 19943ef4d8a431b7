// 10 wmma: a warp multiplies 16x16 matrices on tensor cores, through the fragments of nvcuda::wmma.
//
// y = x @ w.T for x (M, K), w (N, K), y (M, N), all row-major; K a multiple of 8. A fragment is a matrix spread over a
// warp's lanes, in a way that C++ does not tell. A warp sums WM x WN of y in fragments of float, so that each fragment
// that it reads from shared memory serves several products. Rows of the tiles are padded by 16 bytes, or rows that are
// read together would share banks; the next slice of K waits in registers while this one is multiplied.
// Expected: several times the best of the CUDA cores, and well below cuBLAS: fragments are read and then multiplied,
// in turn, and every tile passes through registers on its way to shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#ifndef BM
#define BM 128  // the block's tile of y
#define BN 128
#define BK 64   // the part of K in shared memory at a time
#define WM 64   // the warp's tile of y
#define WN 64
#define THREADS 128
#endif
#ifndef ELEMENT
#define ELEMENT __nv_bfloat16  // or __half
#endif

using namespace nvcuda;
typedef ELEMENT T;

constexpr int WARPS_N = BN / WN;
constexpr int PITCH = BK + 8;                            // elements from row to row
constexpr int CHUNKS = BK / 8, ROWS = THREADS / CHUNKS;  // 16-byte chunks in a row; rows copied at once
constexpr int COPIES = (BM + BN) / ROWS;                 // chunks a thread copies
constexpr int PATCH = 20;                                // floats from row to row of the patch that a warp writes out
static_assert(THREADS == 32 * (BM / WM) * WARPS_N);
static_assert(BM % ROWS == 0 && BN % ROWS == 0, "all threads copy equally often");
static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0 && BK % 16 == 0);
static_assert(THREADS / 32 * 16 * PATCH * sizeof(float) <= 2 * (BM + BN) * PITCH * sizeof(T));

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, int M, int N, int K) {
    extern __shared__ __align__(128) char shared[];
    T(*tiles)[BM + BN][PITCH] = (T(*)[BM + BN][PITCH])shared;  // two, each x's rows and then w's
    const int m = blockIdx.y * BM, n = blockIdx.x * BN;
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS * 8;

    // A row beyond the last reads the last one again: what comes of it is never stored.
    uint4 held[COPIES];
    auto fetch = [&](int k) {
        for (int i = 0; i < COPIES; ++i) {
            const int r = row + i * ROWS;
            const T* from = r < BM ? x + (size_t)min(m + r, M - 1) * K
                                   : w + (size_t)min(n + r - BM, N - 1) * K;
            held[i] = make_uint4(0, 0, 0, 0);
            if (k + chunk < K) held[i] = *reinterpret_cast<const uint4*>(from + k + chunk);
        }
    };
    auto keep = [&](int tile) {
        for (int i = 0; i < COPIES; ++i) *reinterpret_cast<uint4*>(&tiles[tile][row + i * ROWS][chunk]) = held[i];
    };

    const int warp = threadIdx.x / 32, warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c[WM / 16][WN / 16];
    for (int i = 0; i < WM / 16; ++i)
        for (int j = 0; j < WN / 16; ++j) wmma::fill_fragment(c[i][j], 0.0f);

    fetch(0);
    keep(0);
    __syncthreads();
    for (int k = 0, tile = 0; k < K; k += BK, tile ^= 1) {
        if (k + BK < K) fetch(k + BK);
#pragma unroll
        for (int s = 0; s < BK; s += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a[WM / 16];
            for (int i = 0; i < WM / 16; ++i) wmma::load_matrix_sync(a[i], &tiles[tile][warp_m + i * 16][s], PITCH);
#pragma unroll
            for (int j = 0; j < WN / 16; ++j) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> b;  // w.T: its columns are w's rows
                wmma::load_matrix_sync(b, &tiles[tile][BM + warp_n + j * 16][s], PITCH);
                for (int i = 0; i < WM / 16; ++i) wmma::mma_sync(c[i][j], a[i], b, c[i][j]);
            }
        }
        if (k + BK < K) keep(tile ^ 1);  // nobody reads that one: all passed the barrier that ended its slice
        __syncthreads();
    }

    // Fragments of float go to shared memory, where their layout is known, and from there to y, 16 bytes a lane.
    float* patch = (float*)shared + warp * 16 * PATCH;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i)
#pragma unroll
        for (int j = 0; j < WN / 16; ++j) {
            wmma::store_matrix_sync(patch, c[i][j], PATCH, wmma::mem_row_major);
            __syncwarp();
            const int to_m = m + warp_m + i * 16 + lane / 2, to_n = n + warp_n + j * 16 + lane % 2 * 8;
            alignas(16) T out[8];
            for (int q = 0; q < 8; ++q) out[q] = static_cast<T>(patch[lane / 2 * PATCH + lane % 2 * 8 + q]);
            T* to = y + (size_t)to_m * N + to_n;
            if (to_m < M && N % 8 == 0) {
                if (to_n < N) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4*>(out);
            } else if (to_m < M) {
                for (int q = 0; q < 8 && to_n + q < N; ++q) to[q] = out[q];
            }
            __syncwarp();
        }
}
