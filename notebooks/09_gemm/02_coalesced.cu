// 02 coalesced: neighbouring threads take neighbouring columns, so that a warp reads and writes along rows.
//
// The step: row and column change places. A warp's loads of b and its stores to c are now 32 neighbours, 4 sectors a
// request, and its load of a is one address for all lanes.
// Expected: several times 01, since a request that fetched 32 sectors now fetches 4 or 1. Nothing is saved otherwise:
// each product still costs two loads, so the load units are busy and the arithmetic waits.

#ifndef BM
#define BM 32  // rows of c that a block computes
#define BN 32  // and columns
#define THREADS 1024  // one for each element
#endif
static_assert(THREADS == BM * BN);

extern "C" __global__ __launch_bounds__(THREADS)
void gemm(const float* a, const float* b, float* c, int M, int N, int K) {
    int row = blockIdx.y * BM + threadIdx.x / BN;
    int col = blockIdx.x * BN + threadIdx.x % BN;
    if (row >= M || col >= N) return;
    float sum = 0.0f;
    for (int i = 0; i < K; i++) sum += a[(size_t)row * K + i] * b[(size_t)i * N + col];
    c[(size_t)row * N + col] = sum;
}
