// Runs a kernel of the ladder, KERNEL, for each M N K BLOCKS of the command line and compares it with double sums.
#include KERNEL

#include "run.h"

int main(int count, char** words) {
    for (int i = 1; i + 3 < count; i += 4) {
        const int M = atoi(words[i]), N = atoi(words[i + 1]), K = atoi(words[i + 2]), most = atoi(words[i + 3]);
        std::vector<uint16_t> x(M * K), w(N * K), y(M * N, 0x7fc0), bias(N);
        for (auto* numbers : {&x, &w, &bias})
            for (auto& bits : *numbers) bits = rounded((rand() % 17 - 8) / 4.f);
        const TensorMap x_map{x.data(), M, K, X_ROWS}, w_map{w.data(), N, K, W_ROWS}, y_map{y.data(), M, N, Y_ROWS};
        const int down = (M + BM - 1) / BM, across = (N + BN - 1) / BN;
        const int wanted = (down * across + CLUSTER_BLOCKS - 1) / CLUSTER_BLOCKS * CLUSTER_BLOCKS;
        gridDim = most ? Index{(unsigned)min(wanted, most), 1} : Index{(unsigned)across, (unsigned)down};
        kernel = [&] {
#if Y_ROWS && GELU
            gemm(x_map, w_map, y_map, M, N, K, (const u32*)bias.data());
#elif Y_ROWS
            gemm(x_map, w_map, y_map, M, N, K);
#else
            gemm(x_map, w_map, (u32*)y.data(), M, N, K);
#endif
        };
        for (block_index.y = 0; block_index.y < gridDim.y; ++block_index.y)
            for (block_index.x = 0; block_index.x < gridDim.x; block_index.x += CLUSTER_BLOCKS) run_cluster();
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) {
                double sum = 0;
                for (int k = 0; k < K; ++k) sum += (double)number(x[m * K + k]) * number(w[n * K + k]);
                if (GELU) {
                    sum += number(bias[n]);
                    sum *= 0.5 * (1 + tanh(0.7978845608 * (sum + 0.044715 * sum * sum * sum)));
                }
                if (fabs(number(y[m * N + n]) - sum) <= fabs(sum) / 128 + 1e-3) continue;
                printf("%d x %d x %d: y[%d, %d] is %g, not %g\n", M, N, K, m, n, number(y[m * N + n]), sum);
                return 1;
            }
    }
}
