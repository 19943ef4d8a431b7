// Runs a kernel of the ladder, KERNEL, for each M N K BLOCKS of the command line and compares it with double sums.
#include KERNEL

std::vector<Fiber*> fibers;
std::vector<Block*> blocks;
std::deque<std::function<void()>> loads;
Fiber* me;
ucontext_t scheduler;
Index block_index, gridDim;
long progress;
static std::function<void()> kernel;

static void entry() {
    kernel();
    me->done = true;
    ++progress;
    pause();
}

static void run_cluster() {
    fibers.clear(), blocks.clear();
    for (int rank = 0; rank < CLUSTER_BLOCKS; ++rank) {
        blocks.push_back(new Block());
        blocks[rank]->shared.resize(1024 + SHARED);
        for (int thread = 0; thread < THREADS; ++thread) {
            Fiber* f = new Fiber();
            f->stack.resize(64 << 10);
            f->thread = thread, f->rank = rank, f->block = blocks[rank];
            getcontext(&f->context);
            f->context.uc_stack.ss_sp = f->stack.data();
            f->context.uc_stack.ss_size = f->stack.size();
            makecontext(&f->context, entry, 0);
            fibers.push_back(f);
        }
    }
    for (int idle = 0; std::any_of(fibers.begin(), fibers.end(), [](Fiber* f) { return !f->done; });) {
        const long before = progress;
        for (Fiber* f : fibers) {
            if (!f->done) me = f, swapcontext(&scheduler, &f->context);
            for (Store& s : f->stores)
                if (!s.done && rand() % 4 == 0) s.read(), s.done = true;
        }
        for (size_t n = loads.size(); n--; loads.pop_front())  // in any order
            rand() % 4 ? loads.push_back(loads.front()) : loads.front()();
        idle = progress == before && loads.empty() ? idle + 1 : 0;
        if (idle > 2) fail("nobody can go on");
    }
    for (Fiber* f : fibers) {
        for (Store& s : f->stores)
            if (!s.done) s.read();
        delete f;
    }
    for (Block* b : blocks) delete b;
}

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
