// Runs CUDA kernels on the CPU. Each CUDA thread is a fiber; the fibers of a block take turns on one OS thread and
// change only where CUDA lets threads wait for each other, so results do not depend on timing. Blocks are spread over
// OS threads. Kernels are compiled with g++'s -fsanitize=thread, whose calls before every access (__tsan_read4 and so
// on) end here: bounds, the address trace and the search for races are built on them. No sanitizer library is used.
#include "runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#if !defined(__x86_64__) || defined(CC_UCONTEXT)
#include <ucontext.h>
#define CC_SLOW_SWITCH 1
#endif

using namespace cc;

namespace {

#include "runtime_types.h"

thread_local Worker* current_worker;  // only for signal handlers
std::atomic<int> launches{0};
std::atomic<bool> interrupted{false};
std::mutex pool_lock, signal_lock;
std::vector<Stacks> pool;

#include "runtime_fibers.h"
#include "runtime_failing.h"
#include "runtime_barriers.h"
#include "runtime_races.h"

// ------------------------------------------------------------------------------------------------ accesses
[[gnu::noinline]] void look(Fiber* f, uint64_t address, size_t size, Kind kind, uint64_t pc, bool aligned) {
  Worker* w = f->worker;
  Launch* l = w->launch;
  if (f->turn == 0) {
    f->turn = TURN;
    if (!w->stop->load() && interrupted) first_failure(w, f, INTERRUPTED);
    if (w->stop->load()) abandon(f);
    to_worker(f);
  }
  Space space = OTHER;
  int range = -1;
  auto within = [&](uint64_t low, uint64_t high) { return address >= low && address + size <= high; };
  if (within(w->shared_low, w->shared_high) || within(w->dynamic_low, w->dynamic_high)) space = SHARED;
  else if (within(w->module_low, w->module_high)) space = MODULE;
  for (uint32_t i = 0; space == OTHER && i < l->range_count; i++)
    if (within(l->ranges[i].low, l->ranges[i].high)) {
      space = ARRAY, range = i;
      w->recent[1] = w->recent[0];
      w->recent[0] = window(l->ranges[i].low, l->ranges[i].high);
    }
  if (space == OTHER && l->strict) fail_at_address(f, OUT_OF_BOUNDS, pc, address, size, kind);
  if (aligned && (address & (size - 1))) fail_at_address(f, MISALIGNED, pc, address, size, kind);
  if (l->mode == TRACE) f->log->push_back({pc, address, (uint32_t)size, (uint8_t)kind, (uint8_t)space, (int16_t)range, f->met});
  if (l->mode == RACES) search_races(w, f, address, size, kind, pc, space, range);
}

[[gnu::always_inline]] inline void touch(const void* p, size_t size, Kind kind, void* return_address, bool aligned) {
  if (launches.load(std::memory_order_relaxed) == 0) return;  // a static initialiser, while the library is loaded
  Fiber* f = self();
  auto address = (uint64_t)p;
  if (((address ^ (uint64_t)f) & ~(STACK - 1)) == 0) return;  // a local variable
  Worker* w = f->worker;
  bool known = address - w->recent[0].low < w->recent[0].size || address - w->shared.low < w->shared.size ||
               address - w->recent[1].low < w->recent[1].size || address - w->dynamic_window.low < w->dynamic_window.size;
  if (--f->turn && known && w->quick && !(aligned && (address & (size - 1)))) return;
  look(f, address, size, kind, (uint64_t)return_address, aligned);
}

#include "runtime_trace.h"

// ------------------------------------------------------------------------------------------------ blocks
struct Module {
  void* kernel;
  uint64_t base, low, high, shared_low, shared_size;
};

int find_module(dl_phdr_info* info, size_t, void* out) {
  auto* m = (Module*)out;
  if (info->dlpi_addr != m->base) return 0;
  m->low = ~0ull, m->high = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    auto& p = info->dlpi_phdr[i];
    if (p.p_type == PT_LOAD) {
      m->low = std::min(m->low, info->dlpi_addr + p.p_vaddr);
      m->high = std::max(m->high, info->dlpi_addr + p.p_vaddr + p.p_memsz);
    }
    if (p.p_type == PT_TLS) m->shared_low = (uint64_t)info->dlpi_tls_data, m->shared_size = p.p_memsz;
  }
  return 1;
}

void deadlock(Worker* w) {
  Failure* out = first_failure(w, nullptr, DEADLOCK);
  if (!out) return;
  Fiber *at_warp = nullptr, *at_block = nullptr;
  for (unsigned i = 0; i < w->threads; i++) {
    Fiber* f = w->stacks.fiber(i);
    if (f->state == AT_WARP && !at_warp) at_warp = f;
    if (f->state == AT_BLOCK && !at_block) at_block = f;
    out->waiting += f->state == AT_BLOCK;
  }
  out->live = w->live;
  Fiber* f = at_warp ? at_warp : at_block;  // all at the block's barrier would have been let go
  if (!f) return;
  out->thread = f->index;
  out->line = f->line;
  if (at_warp && at_warp->operation == TOGETHER) 
    snprintf(out->text, sizeof out->text, "%s for the 32 lanes of its warp, and some never come", at_warp->name);
  if (at_warp && at_block) out->other_line = at_block->line;
}

void run_block(Worker* w, const std::vector<unsigned>& order) {
  Launch* l = w->launch;
  unsigned n = w->threads;
  w->live = n;
  w->at_block = w->total = 0;
  memset(w->waiting, 0, sizeof w->waiting);
  memset(w->active, 0, sizeof w->active);
  memset(w->gone, 0, sizeof w->gone);
  if (w->shared_high > w->shared_low) memset((void*)w->shared_low, POISON[l->order], w->shared_high - w->shared_low);
  if (l->shared_bytes) memset((void*)w->dynamic_low, POISON[l->order], l->shared_bytes);
  U3 b = l->block;
  for (unsigned i = 0; i < n; i++) {
    Fiber* f = w->stacks.fiber(i);
    auto* log = l->mode == TRACE ? (f->worker == w && f->log ? f->log : new std::vector<Logged>) : nullptr;
    memset((void*)f, 0, sizeof *f);
    f->worker = w;
    f->log = log;
    f->linear = i;
    f->index = {i % b.x, i / b.x % b.y, i / (b.x * b.y)};
    f->turn = TURN;
    prepare(w->stacks, i);
  }
  if (Shadow* s = w->shadow) {
    s->epoch = 0;
    s->shared.clear();
    s->threads.clear();
    s->block = {};
    s->fenced.assign(n, 0);
  }
  while (w->live && !w->stop->load(std::memory_order_relaxed)) {
    bool ran = false;
    for (unsigned i : order) {
      Fiber* f = w->stacks.fiber(i);
      if (f->state != READY) continue;
      ran = true;
      to_fiber(w, f);
      w->running = nullptr;
      if (w->stop->load(std::memory_order_relaxed)) return;
    }
    if (interrupted && !ran) first_failure(w, nullptr, INTERRUPTED);
    if (!ran && !release_active(w)) {
      deadlock(w);
      return;
    }
  }
}

void work(Launch* l, std::atomic<uint64_t>* next, std::atomic<bool>* stop, Worker* w, Module module,
          std::map<std::tuple<uint64_t, int, int, int>, Access>* totals, std::atomic<unsigned>* finished) {
  std::vector<char> alternate(64 << 10);
  stack_t signal_stack{};
  signal_stack.ss_sp = alternate.data(), signal_stack.ss_size = alternate.size();
  sigaltstack(&signal_stack, nullptr);
  l->anchor();  // makes this OS thread's copy of the __shared__ arrays
  dl_iterate_phdr(find_module, &module);
  w->shared_low = module.shared_low, w->shared_high = module.shared_low + module.shared_size;
  w->module_low = module.low, w->module_high = module.high;
  w->dynamic.resize(l->shared_bytes + 1024);
  w->dynamic_low = ((uint64_t)w->dynamic.data() + 1023) & ~1023ull;
  w->dynamic_high = w->dynamic_low + l->shared_bytes;
  w->shared = window(w->shared_low, w->shared_high);
  w->dynamic_window = window(w->dynamic_low, w->dynamic_high);
  w->quick = l->mode == RUN;
  current_worker = w;
  std::vector<unsigned> order(w->threads);
  for (unsigned i = 0; i < w->threads; i++) order[i] = l->order == REVERSE ? w->threads - 1 - i : i;
  U3 g = l->grid;
  for (uint64_t i; (i = next->fetch_add(1)) < l->blocks && !stop->load();) {
    uint64_t number = l->order == REVERSE ? l->blocks - 1 - i : i;
    w->block_number = number;
    w->block = {uint32_t(number % g.x), uint32_t(number / g.x % g.y), uint32_t(number / ((uint64_t)g.x * g.y))};
    if (l->order == SHUFFLE) std::shuffle(order.begin(), order.end(), std::mt19937(l->seed + i));
    run_block(w, order);
    if (w->shadow) settle_all(w->shadow);
    if (totals && !stop->load()) summarise(w, *totals);
  }
  current_worker = nullptr;
  for (unsigned i = 0; i < w->threads; i++) {
    Fiber* f = w->stacks.fiber(i);
    if (f->worker == w && f->log) delete f->log;
    f->worker = nullptr, f->log = nullptr;
  }
  signal_stack.ss_flags = SS_DISABLE;
  sigaltstack(&signal_stack, nullptr);
  ++*finished;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ for Python
int cc_launch(Launch* l) {
  Dl_info info;
  l->failure = {};
  if (!dladdr((void*)l->kernel, &info)) return -1;
  Module module{(void*)l->kernel, (uint64_t)info.dli_fbase, 0, 0, 0, 0};
  uint64_t blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z;
  l->blocks = l->blocks ? std::min(l->blocks, blocks) : blocks;
  unsigned threads = l->block.x * l->block.y * l->block.z;
  unsigned count = l->mode == RUN ? std::max<uint64_t>(1, std::min<uint64_t>(l->workers, l->blocks)) : 1;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::atomic<unsigned> finished{0};
  std::mutex failing;
  std::map<std::tuple<uint64_t, int, int, int>, Access> totals;
  Shadow shadow;
  std::vector<std::unique_ptr<Worker>> workers;
  for (unsigned i = 0; i < count; i++) {
    auto w = std::make_unique<Worker>();
    w->launch = l, w->stop = &stop, w->failing = &failing, w->threads = threads;
    w->stacks = borrow(threads);
    w->shadow = l->mode == RACES ? &shadow : nullptr;
    if (!w->stacks.base) break;
    workers.push_back(std::move(w));
  }
  if (workers.empty()) return -2;
  launches++;
  take_signals();
  {
    std::vector<std::thread> running;
    for (auto& w : workers)
      running.emplace_back(work, l, &next, &stop, w.get(), module, l->mode == TRACE ? &totals : nullptr, &finished);
    // Ctrl-C stops kernels at their next access; one that loops without any is stopped where it is.
    int pause = 20;
    for (int waited = 0; finished < count; waited += interrupted) {
      std::this_thread::sleep_for(std::chrono::microseconds(interrupted ? 10000 : pause));
      pause = std::min(1000, pause * 5 / 4);
      if (waited > 0 && waited % 50 == 0)
        for (auto& t : running) pthread_kill(t.native_handle(), SIGBUS);
    }
    for (auto& t : running) t.join();
  }
  bool stopped = interrupted;
  restore_signals();
  launches--;
  std::string text;
  for (auto& w : workers) text += w->printed, give_back(w->stacks);
  if (stopped && l->failure.fault == OK) l->failure.fault = INTERRUPTED;
  l->printed_bytes = text.size();
  l->printed = (char*)malloc(text.size() + 1);
  memcpy(l->printed, text.data(), text.size());
  l->access_count = totals.size();
  l->accesses = (Access*)calloc(totals.size() + 1, sizeof(Access));
  size_t i = 0;
  for (auto& [key, total] : totals) l->accesses[i++] = total;
  l->race_count = shadow.races.size();
  l->races = (Race*)calloc(shadow.races.size() + 1, sizeof(Race));
  i = 0;
  for (auto& [key, race] : shadow.races) l->races[i++] = race;
  return l->failure.fault;
}

void cc_release(Launch* l) {
  free(l->printed), free(l->accesses), free(l->races);
  l->printed = nullptr, l->accesses = nullptr, l->races = nullptr;
}

// ------------------------------------------------------------------------------------------------ for kernels
unsigned cc_thread(int axis) { return (&self()->index.x)[axis]; }
unsigned cc_block(int axis) { return (&self()->worker->block.x)[axis]; }
unsigned cc_block_size(int axis) { return (&self()->worker->launch->block.x)[axis]; }
unsigned cc_grid_size(int axis) { return (&self()->worker->launch->grid.x)[axis]; }
int cc_lane() { return lane_of(self()); }
void* cc_dynamic_shared() { return (void*)self()->worker->dynamic_low; }

int cc_sync_block(int line, int value, int in_if) {
  Fiber* f = self();
  Worker* w = f->worker;
  f->line = line;
  if (w->at_block && w->block_line != line) fail_at_line(f, MIXED_BARRIERS, w->block_line, "block", line);
  w->block_line = line, w->block_in_if = in_if;
  w->total += value;
  f->state = AT_BLOCK;
  if (++w->at_block == w->live) release_block(w);
  else to_worker(f);
  if (w->stop->load(std::memory_order_relaxed)) abandon(f);
  return f->result;
}

void cc_sync_warp(unsigned mask, int line) { meet(mask, 0, 0, SYNC, line); }
uint64_t cc_exchange(unsigned mask, uint64_t value, int source, int op, int line) {
  return meet(mask, value, source, op, line);
}
unsigned cc_vote(unsigned mask, uint64_t value, int op, int line) { return meet(mask, value, 0, op, line); }

unsigned cc_active(int line) {
  Fiber* f = self();
  f->line = line;
  f->state = AT_ACTIVE;
  f->worker->active[f->linear / WARP] |= 1u << lane_of(f);
  to_worker(f);
  return f->result;
}

void cc_together(void* mine, void (*all)(void* const*), int line, const char* name) {
  Fiber* f = self();
  f->together = all, f->name = name;
  meet(~0u, (uint64_t)mine, 0, TOGETHER, line);
}
void cc_touch(void* address, size_t size, bool store, void* pc) { touch(address, size, store ? WRITE : READ, pc, true); }
void cc_misuse(int line, const char* format, ...) {
  char text[sizeof Failure::text];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail_at_line(self(), MISUSE, line, text);
}
int cc_order() { return launches ? self()->worker->launch->order : 0; }
int cc_idle() { return launches ? self()->worker->launch->idle : 0; }
unsigned char cc_poison() { return POISON[cc_order()]; }

void cc_atomic(void* address, size_t size, void* pc, bool compares) {
  if (launches) self()->compares = compares;
  touch(address, size, ATOMIC, pc, true);
}
void cc_fence() {
  Fiber* f = self();
  if (Shadow* s = f->worker->shadow) s->fenced[f->linear] = (uint64_t)s->epoch << 32 | ++f->clock[lane_of(f)];
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
void cc_assert(const char* text, int line) { fail_at_line(self(), ASSERTION, line, text); }
void cc_trap(int line) { fail_at_line(self(), TRAP, line); }

int cc_printf(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  auto& out = self()->worker->printed;
  if (out.size() < 1 << 20) out += text;  // a GPU's buffer holds 1 MiB too
  return n;
}

long long cc_clock() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
void* cc_malloc(size_t n) { return malloc(n); }
void cc_free(void* p) { free(p); }

// Calls that g++ -fsanitize=thread puts before every access.
#define HOOKS(size)                                                                                               \
  void __tsan_read##size(void* p) { touch(p, size, READ, __builtin_return_address(0), true); }                    \
  void __tsan_write##size(void* p) { touch(p, size, WRITE, __builtin_return_address(0), true); }                  \
  void __tsan_unaligned_read##size(void* p) { touch(p, size, READ, __builtin_return_address(0), false); }         \
  void __tsan_unaligned_write##size(void* p) { touch(p, size, WRITE, __builtin_return_address(0), false); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t n) { touch(p, n, READ, __builtin_return_address(0), false); }
void __tsan_write_range(void* p, size_t n) { touch(p, n, WRITE, __builtin_return_address(0), false); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
