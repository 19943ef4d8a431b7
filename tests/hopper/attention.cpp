// Runs the block-sparse attention KERNEL for each HEADS QUERIES KEYS DENSITY% BLOCKS of the command line and compares
// it with double sums. The first row of blocks has none, and the last block of keys counts in every other row.
#include KERNEL

#include "run.h"

int main(int count, char** words) {
    for (int i = 1; i + 4 < count; i += 5) {
        const int heads = atoi(words[i]), queries = atoi(words[i + 1]), keys = atoi(words[i + 2]);
        const int density = atoi(words[i + 3]), blocks_at_once = atoi(words[i + 4]);
        const int rows = (queries + 127) / 128, columns = (keys + 127) / 128, tiles = heads * rows;
        std::vector<uint16_t> q(heads * queries * D), k(heads * keys * D), v(k.size()), out(q.size(), 0x7fc0);
        for (auto* numbers : {&q, &k, &v})
            for (auto& bits : *numbers) bits = rounded((rand() % 17 - 8) / 4.f);
        std::vector<unsigned char> mask(tiles * columns);
        std::vector<int> order(tiles);
        for (int t = 0; t < tiles; ++t) {
            order[t] = tiles - 1 - t;
            for (int c = 0; c < columns; ++c)
                mask[t * columns + c] = t && (rand() % 100 < density || (c == columns - 1 && t % 2));
        }
        const TensorMap q_map{q.data(), queries, D, M}, k_map{k.data(), keys, D, N}, v_map{v.data(), keys, D, N};
        const TensorMap out_map{out.data(), queries, D, M};
        const float scale = 0.1f;
        gridDim = {(unsigned)blocks_at_once, 1};
        kernel = [&] {
            block_sparse(q_map, k_map, v_map, out_map, mask.data(), (long long)rows * columns, order.data(), tiles,
                         rows, columns, keys, scale);
        };
        run_cluster();
        if (tickets) fail("tickets are left");
        for (int row = 0; row < heads * queries; ++row) {
            const int head = row / queries, tile = head * rows + row % queries / 128;
            std::vector<double> weights(keys), sums(D);
            double most = -1e300, total = 0;
            for (int n = 0; n < keys; ++n) {
                if (!mask[tile * columns + n / 128]) continue;
                for (int d = 0; d < D; ++d)
                    weights[n] += (double)number(q[row * D + d]) * number(k[(head * keys + n) * D + d]);
                most = std::max(most, weights[n]);
            }
            for (int n = 0; n < keys; ++n) {
                if (!mask[tile * columns + n / 128]) continue;
                const double weight = exp2(scale * (weights[n] - most));
                total += weight;
                for (int d = 0; d < D; ++d) sums[d] += weight * number(v[(head * keys + n) * D + d]);
            }
            for (int d = 0; d < D; ++d) {
                const double want = total ? sums[d] / total : 0, got = number(out[row * D + d]);
                if (fabs(got - want) <= 0.02) continue;
                printf("%d x %d x %d: out[%d, %d] is %g, not %g\n", heads, queries, keys, row, d, got, want);
                return 1;
            }
        }
    }
}
