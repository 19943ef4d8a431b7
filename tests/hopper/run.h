// Runs the blocks of a cluster: each CUDA thread is a fiber. Included after the kernel, once in a program.
#pragma once

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
