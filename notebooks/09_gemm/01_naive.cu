// 01 naive: one thread computes one element of c, and neighbouring threads take neighbouring rows.
//
// One thread for one element of c: it walks along a row of a and down a column of b, all from global memory.
// The lanes of a warp take 32 rows of one column, as if c were stored by columns. It is not: what they read of a, and
// what they write, lies a whole row apart, so each request touches 32 sectors to use 4 bytes of each.
// Expected: correct, and far from everything. Each product costs two loads, and one of them is a scattered one.

#ifndef BM
#define BM 32  // rows of c that a block computes
#define BN 32  // and columns
#define THREADS 1024  // one for each element
#endif
static_assert(THREADS == BM * BN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    int row = blockIdx.y * BM + threadIdx.x % BM;
    int col = blockIdx.x * BN + threadIdx.x / BM;
    if (row >= M || col >= N) return;
    float sum = 0.0f;
    for (int i = 0; i < K; i++) sum += a[(size_t)row * K + i] * b[(size_t)i * N + col];
    c[(size_t)row * N + col] = sum;
}
