// 03 shared: a block brings tiles of a and b into shared memory once, and all its threads read them there.
//
// The step: the walk along k goes in pieces of BK. For each piece every thread loads one element of a and one of b,
// the block waits, and multiplies what it shares. Elements outside the matrices are zeros, which add nothing.
// Expected: a block of 32 x 32 asks global memory for 32 times fewer bytes than 02. Where L1 keeps what is loaded, as on
// an H200, it had answered the repeats already, and L2 is asked for no less. And each product still costs two loads, now
// from shared memory: less waiting, the same number of load instructions.

#ifndef BM
#define BM 32  // rows of c that a block computes
#define BN 32  // and columns
#define BK 32  // as wide as the other two here: one element of each tile for each thread
#define THREADS 1024  // one for each element
#endif
static_assert(BM == BK && BN == BK && THREADS == BM * BN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    __shared__ float tile_a[BM][BK], tile_b[BK][BN];
    int y = threadIdx.x / BN, x = threadIdx.x % BN;
    int row = blockIdx.y * BM + y, col = blockIdx.x * BN + x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += BK) {
        tile_a[y][x] = row < M && k0 + x < K ? a[(size_t)row * K + k0 + x] : 0.0f;
        tile_b[y][x] = k0 + y < K && col < N ? b[(size_t)(k0 + y) * N + col] : 0.0f;
        __syncthreads();  // the tiles are complete
        for (int i = 0; i < BK; i++) sum += tile_a[y][i] * tile_b[i][x];
        __syncthreads();  // nobody reads them any more
    }
    if (row < M && col < N) c[(size_t)row * N + col] = sum;
}
