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

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr uintptr_t STACK = 128 << 10;  // a power of two: a fiber finds itself from its stack pointer
constexpr uint32_t TURN = 1 << 20;      // accesses after which a fiber gives others a turn (spin locks)
constexpr uint64_t POISON = ~0ull;      // what uninitialised shared memory holds: NaN, -1

enum State : uint8_t { READY, AT_BLOCK, AT_WARP, AT_ACTIVE, FINISHED };

struct Worker;

struct Logged {
  uint64_t pc, address;
  uint32_t size;
  uint8_t kind, space;
  int16_t range;
};

struct Fiber {
#ifdef CC_SLOW_SWITCH
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  Worker* worker;
  U3 index;
  uint32_t linear;
  State state;
  int line, operation, source;
  unsigned mask;
  uint64_t value, result;
  uint32_t turn;
  uint32_t clock[WARP];  // for races: how far this lane knows each lane of its warp
  std::vector<Logged>* log;
};

Fiber* self() {
  auto here = (uintptr_t)__builtin_frame_address(0);
  return (Fiber*)((here | (STACK - 1)) + 1) - 1;
}

struct Stacks {  // memory for the fibers of one block, kept from launch to launch
  char* base = nullptr;
  unsigned capacity = 0;
  char* top(unsigned i) const { return base + (i + 1) * STACK; }
  Fiber* fiber(unsigned i) const { return (Fiber*)top(i) - 1; }
};

struct Window {  // addresses at which an access of up to 16 bytes is known to be allowed
  uint64_t low = 0, size = 0;
};

Window window(uint64_t low, uint64_t high) { return {low, high - low >= 16 ? high - low - 15 : 0}; }

struct Shadow;

struct Worker {
  Launch* launch;
  std::atomic<bool>* stop;
  std::mutex* failing;
  Stacks stacks;
  U3 block;
  uint64_t block_number;
  unsigned threads, live, at_block, block_operation;
  int block_line;
  bool mixed;
  unsigned total, other_total;
  unsigned waiting[WARP], active[WARP], gone[WARP];  // lanes by warp: at a warp barrier, at __activemask, finished
  uint64_t shared_low, shared_high, dynamic_low, dynamic_high, module_low, module_high;
  std::vector<char> dynamic;
  Window shared, dynamic_window, recent[2];  // recent: of the array arguments last found
  bool quick;                                // in a plain run an access within a window needs no more looking at
  Fiber* running;
#ifdef CC_SLOW_SWITCH
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  Shadow* shadow;
  std::string printed;
};

thread_local Worker* current_worker;  // only for signal handlers
std::atomic<int> launches{0};
std::atomic<bool> interrupted{false};
std::mutex pool_lock, signal_lock;
std::vector<Stacks> pool;

// ------------------------------------------------------------------------------------------------ fibers
#ifdef CC_SLOW_SWITCH
void to_worker(Fiber* f) { swapcontext(&f->context, &f->worker->context); }
void to_fiber(Worker* w, Fiber* f) {
  w->running = f;
  swapcontext(&w->context, &f->context);
}
#else
extern "C" void cc_switch(void** save, void* load);
asm(R"(.text
.globl cc_switch
.hidden cc_switch
.type cc_switch,@function
cc_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cc_switch, .-cc_switch
)");
void to_worker(Fiber* f) { cc_switch(&f->stack_pointer, f->worker->stack_pointer); }
void to_fiber(Worker* w, Fiber* f) {
  w->running = f;
  cc_switch(&w->stack_pointer, f->stack_pointer);
}
#endif

void finished(Fiber* f);

void body() {
  Fiber* f = self();
  f->worker->launch->kernel(f->worker->launch->arguments);
  finished(f);
  to_worker(f);
  __builtin_unreachable();
}

void prepare(Stacks& stacks, unsigned i) {
  Fiber* f = stacks.fiber(i);
#ifdef CC_SLOW_SWITCH
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = stacks.base + i * STACK;
  f->context.uc_stack.ss_size = STACK - sizeof(Fiber) - 64;
  f->context.uc_link = nullptr;
  makecontext(&f->context, body, 0);
#else
  auto top = (uintptr_t)f & ~(uintptr_t)63;
  auto* sp = (void**)top;
  *--sp = nullptr;        // where body would return to; keeps the stack aligned as after a call
  *--sp = (void*)body;
  for (int k = 0; k < 6; k++) *--sp = nullptr;
  f->stack_pointer = sp;
#endif
}

Stacks borrow(unsigned threads) {
  {
    std::lock_guard hold(pool_lock);
    for (size_t i = 0; i < pool.size(); i++)
      if (pool[i].capacity >= threads) {
        Stacks found = pool[i];
        pool.erase(pool.begin() + i);
        return found;
      }
  }
  unsigned capacity = std::min(MOST_THREADS, (threads + 255) / 256 * 256);
  size_t size = (capacity + 1) * STACK;
  auto* raw = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return {};
  Stacks made{(char*)(((uintptr_t)raw + STACK - 1) & ~(STACK - 1)), capacity};
  for (unsigned i = 0; i < capacity; i++) mprotect(made.base + i * STACK, 4096, PROT_NONE);  // overflow is caught
  return made;
}

void give_back(Stacks stacks) {
  std::lock_guard hold(pool_lock);
  pool.push_back(stacks);
}

// ------------------------------------------------------------------------------------------------ failing
uint64_t in_library(Launch* launch, uint64_t pc) {
  Dl_info info;
  if (!pc || !dladdr((void*)launch->kernel, &info)) return 0;
  return pc - (uint64_t)info.dli_fbase;
}

Failure* first_failure(Worker* w, Fiber* f, Fault fault) {  // null when something failed before
  std::lock_guard hold(*w->failing);
  if (w->launch->failure.fault != OK) return nullptr;
  Failure& out = w->launch->failure;
  out.fault = fault;
  out.block = w->block;
  out.range = -1;
  if (f) out.thread = f->index;
  w->stop->store(true);
  return &out;
}

[[noreturn]] void abandon(Fiber* f) {  // the scheduler sees `stop` and never comes back
  f->state = FINISHED;
  to_worker(f);
  __builtin_unreachable();
}

[[noreturn]] void fail_at_line(Fiber* f, Fault fault, int line, const char* text = "", int other = 0) {
  if (Failure* out = first_failure(f->worker, f, fault)) {
    out->line = line;
    out->other_line = other;
    snprintf(out->text, sizeof out->text, "%s", text);
  }
  abandon(f);
}

[[noreturn]] void fail_at_address(Fiber* f, Fault fault, uint64_t pc, uint64_t address, size_t size, unsigned kind) {
  Launch* l = f->worker->launch;
  if (Failure* out = first_failure(f->worker, f, fault)) {
    out->pc = in_library(l, pc);
    out->address = address;
    out->size = size;
    out->kind = kind;
    uint64_t best = ~0ull;
    for (uint32_t i = 0; i < l->range_count; i++) {
      uint64_t low = l->ranges[i].low, high = l->ranges[i].high;
      uint64_t far = address < low ? low - address : address >= high ? address - high : 0;
      if (low != high && far < best) best = far, out->range = i;
    }
  }
  abandon(f);
}

void catch_fault(int number, siginfo_t* info, void* where);

struct Handlers {  // SIGSEGV, SIGFPE and SIGINT are ours while a kernel runs
  struct sigaction segv, bus, fpe, interrupt;
  int users = 0;
} handlers;

void catch_interrupt(int) { interrupted = true; }

void take_signals() {
  std::lock_guard hold(signal_lock);
  if (handlers.users++) return;
  struct sigaction ours {};
  ours.sa_sigaction = catch_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &handlers.segv);
  sigaction(SIGBUS, &ours, &handlers.bus);
  sigaction(SIGFPE, &ours, &handlers.fpe);
  interrupted = false;
  struct sigaction stop {};
  stop.sa_handler = catch_interrupt;
  sigaction(SIGINT, &stop, &handlers.interrupt);
}

void restore_signals() {
  std::lock_guard hold(signal_lock);
  if (--handlers.users) return;
  sigaction(SIGSEGV, &handlers.segv, nullptr);
  sigaction(SIGBUS, &handlers.bus, nullptr);
  sigaction(SIGFPE, &handlers.fpe, nullptr);
  sigaction(SIGINT, &handlers.interrupt, nullptr);
}

void catch_fault(int number, siginfo_t* info, void* where) {
  Worker* w = current_worker;
  if (number == SIGBUS && interrupted) {  // sent by cc_launch; harmless between fibers
    if (!w || !w->running) return;
    first_failure(w, w->running, INTERRUPTED);
    abandon(w->running);
  }
  if (!w || !w->running) {  // not a kernel's fault: as if we had never been here
    sigaction(number, number == SIGFPE ? &handlers.fpe : number == SIGBUS ? &handlers.bus : &handlers.segv, nullptr);
    return;
  }
  uint64_t pc = 0;
#if defined(__x86_64__)
  pc = ((ucontext_t*)where)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  pc = ((ucontext_t*)where)->uc_mcontext.pc;
#endif
  Fiber* f = w->running;
  auto address = (uint64_t)info->si_addr;
  fail_at_address(f, number == SIGFPE ? DIVISION : SEGMENTATION, pc + 1, address, 0, READ);
}

// ------------------------------------------------------------------------------------------------ barriers
unsigned lane_of(const Fiber* f) { return f->linear % WARP; }

unsigned exists(const Worker* w, unsigned warp) {  // lanes that the block has in this warp
  unsigned n = std::min(WARP, w->threads - warp * WARP);
  return n == WARP ? ~0u : (1u << n) - 1;
}

struct Races;
void warp_met(Worker* w, unsigned warp, unsigned lanes);
void block_met(Worker* w);

void release_block(Worker* w) {
  for (unsigned i = 0; i < w->threads; i++) {
    Fiber* f = w->stacks.fiber(i);
    if (f->state == AT_BLOCK) f->state = READY, f->result = w->total;
  }
  w->at_block = w->total = 0;
  block_met(w);
}

enum Op { SHUFFLE_OP, BALLOT, MATCH, ADD, SMIN, SMAX, UMIN, UMAX, AND, OR, XOR, SYNC };

uint64_t combine(int op, uint64_t a, uint64_t b) {
  auto x = (uint32_t)a, y = (uint32_t)b;
  switch (op) {
    case ADD: return uint32_t(x + y);
    case SMIN: return (uint32_t)std::min((int32_t)x, (int32_t)y);
    case SMAX: return (uint32_t)std::max((int32_t)x, (int32_t)y);
    case UMIN: return std::min(x, y);
    case UMAX: return std::max(x, y);
    case AND: return x & y;
    case OR: return x | y;
    default: return x ^ y;
  }
}

// If every lane of `mask` that still runs has arrived, work out what each gets and let them go on.
bool try_warp(Worker* w, unsigned warp, unsigned mask) {
  unsigned arrived = w->waiting[warp], gone = w->gone[warp] | ~exists(w, warp);
  if (((arrived | gone) & mask) != mask) return false;
  unsigned lanes = mask & arrived & ~gone;
  Fiber* first = w->stacks.fiber(warp * WARP + __builtin_ctz(lanes));
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    if (f->mask != mask) return false;
    if (f->operation != first->operation || (f->line != first->line && f->operation != SYNC))
      fail_at_line(w->running, MIXED_BARRIERS, first->line, "warp", f->line);
  }
  uint64_t all = 0;
  bool begun = false;
  for (unsigned m = lanes; m; m &= m - 1) {
    unsigned lane = __builtin_ctz(m);
    Fiber* f = w->stacks.fiber(warp * WARP + lane);
    if (f->operation == BALLOT) all |= (uint64_t)(f->value != 0) << lane;
    else if (f->operation >= ADD && f->operation <= XOR) all = begun ? combine(f->operation, all, f->value) : f->value;
    begun = true;
  }
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    f->result = all;
    if (f->operation == SHUFFLE_OP) {
      bool there = f->source >= 0 && f->source < (int)WARP && (lanes >> f->source & 1);
      f->result = there ? w->stacks.fiber(warp * WARP + f->source)->value : POISON;
    } else if (f->operation == MATCH) {
      f->result = 0;
      for (unsigned o = lanes; o; o &= o - 1) {
        unsigned lane = __builtin_ctz(o);
        f->result |= (uint64_t)(w->stacks.fiber(warp * WARP + lane)->value == f->value) << lane;
      }
    }
  }
  for (unsigned m = lanes; m; m &= m - 1) w->stacks.fiber(warp * WARP + __builtin_ctz(m))->state = READY;
  w->waiting[warp] &= ~lanes;
  warp_met(w, warp, lanes);
  return true;
}

uint64_t meet(unsigned mask, uint64_t value, int source, int op, int line) {
  Fiber* f = self();
  Worker* w = f->worker;
  unsigned warp = f->linear / WARP, lane = lane_of(f);
  if (!(mask >> lane & 1)) fail_at_line(f, NOT_IN_MASK, line);
  f->line = line, f->mask = mask, f->operation = op, f->value = value, f->source = source;
  f->state = AT_WARP;
  w->waiting[warp] |= 1u << lane;
  if (!try_warp(w, warp, mask)) to_worker(f);
  return f->result;
}

void finished(Fiber* f) {
  Worker* w = f->worker;
  unsigned warp = f->linear / WARP;
  f->state = FINISHED;
  w->live--;
  w->gone[warp] |= 1u << lane_of(f);
  for (unsigned m = w->waiting[warp]; m;) {  // a lane that has returned no longer keeps others waiting
    unsigned mask = w->stacks.fiber(warp * WARP + __builtin_ctz(m))->mask;
    try_warp(w, warp, mask);
    m &= ~mask;
  }
  if (w->live && w->at_block == w->live) release_block(w);
}

bool release_active(Worker* w) {  // lanes at __activemask() that no other lane of their warp can still join
  bool any = false;
  for (unsigned warp = 0; warp * WARP < w->threads; warp++) {
    unsigned lanes = w->active[warp];
    if (!lanes) continue;
    int line = w->stacks.fiber(warp * WARP + __builtin_ctz(lanes))->line;
    unsigned group = 0;
    for (unsigned m = lanes; m; m &= m - 1) {
      Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
      if (f->line == line) group |= 1u << __builtin_ctz(m);
    }
    for (unsigned m = group; m; m &= m - 1) {
      Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
      f->result = group, f->state = READY;
    }
    w->active[warp] &= ~group;
    any = true;
  }
  return any;
}

// ------------------------------------------------------------------------------------------------ races
// Two accesses to a byte by different threads race when at least one writes, not both are atomic, and nothing orders
// them: no block barrier between them, no warp barrier that both lanes pass, and no chain of fence and atomic.
struct Stamp {  // when and by whom an address was touched
  uint64_t block;
  uint32_t thread, epoch, clock;  // epoch: block barriers passed; clock: warp barriers passed by this lane
  uint64_t pc;
  uint8_t kind, bytes;            // bytes: which of the word's four
};

struct Known {  // what a thread has learned of other blocks through atomics after fences
  std::unordered_map<uint64_t, uint32_t> epochs;    // block -> everything before this epoch
  std::unordered_map<uint64_t, uint64_t> clocks;    // block*1024+thread -> everything before epoch<<32|clock
  void learn(const Known& other) {
    for (auto& [k, v] : other.epochs) epochs[k] = std::max(epochs[k], v);
    for (auto& [k, v] : other.clocks) clocks[k] = std::max(clocks[k], v);
  }
};

using Cell = std::vector<Stamp>;  // of one 4-byte word: its last writer, and a few of its readers since
constexpr size_t READERS = 8;

struct Shadow {
  std::unordered_map<uint64_t, Cell> cells;               // by address of each 4-byte word (global memory)
  std::unordered_map<uint64_t, Cell> shared;              // of the running block's shared memory
  std::unordered_map<uint64_t, Known> released;           // by address of an atomic
  std::unordered_map<uint32_t, Known> threads;            // of the running block
  Known block;                                            // what every thread of the running block knows
  std::map<std::pair<uint64_t, uint64_t>, Race> races;    // by the two instructions
  uint32_t epoch = 0;
  std::vector<uint8_t> fenced;
};

void block_met(Worker* w) {
  if (Shadow* s = w->shadow) {
    s->epoch++;
    for (auto& [thread, known] : s->threads) s->block.learn(known);
    s->threads.clear();
  }
}

void warp_met(Worker* w, unsigned warp, unsigned lanes) {
  if (!w->shadow) return;
  uint32_t joint[WARP] = {};
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    for (unsigned l = 0; l < WARP; l++) joint[l] = std::max(joint[l], f->clock[l]);
  }
  for (unsigned m = lanes; m; m &= m - 1) joint[__builtin_ctz(m)]++;  // what came before is known, what follows is not
  Shadow* s = w->shadow;
  Known together;
  bool any = false;
  for (unsigned m = lanes; m; m &= m - 1)
    if (auto it = s->threads.find(warp * WARP + __builtin_ctz(m)); it != s->threads.end()) together.learn(it->second), any = true;
  for (unsigned m = lanes; m; m &= m - 1) {
    unsigned lane = __builtin_ctz(m);
    Fiber* f = w->stacks.fiber(warp * WARP + lane);
    for (unsigned l = 0; l < WARP; l++) f->clock[l] = joint[l];
    if (any) s->threads[warp * WARP + lane].learn(together);
  }
}

bool ordered(Worker* w, Fiber* f, const Stamp& before) {
  Shadow* s = w->shadow;
  if (before.block == w->block_number) {
    if (before.thread == f->linear || before.epoch < s->epoch) return true;
    if (before.thread / WARP == f->linear / WARP && f->clock[before.thread % WARP] > before.clock) return true;
  }
  uint64_t key = before.block * MOST_THREADS + before.thread, when = (uint64_t)before.epoch << 32 | before.clock;
  auto knows = [&](const Known& k) {
    auto e = k.epochs.find(before.block);
    if (e != k.epochs.end() && before.epoch < e->second) return true;
    auto c = k.clocks.find(key);
    return c != k.clocks.end() && when < c->second;
  };
  if (knows(s->block)) return true;
  auto own = s->threads.find(f->linear);
  return own != s->threads.end() && knows(own->second);
}

void note_race(Worker* w, Fiber* f, const Stamp& before, const Stamp& now, uint64_t address, Space space, int range) {
  Launch* l = w->launch;
  uint64_t pc = in_library(l, now.pc), other = in_library(l, before.pc);
  Race& r = w->shadow->races[{std::min(pc, other), std::max(pc, other)}];
  if (r.count++) return;
  auto index = [&](uint64_t n) {
    U3 g = l->grid;
    return U3{uint32_t(n % g.x), uint32_t(n / g.x % g.y), uint32_t(n / ((uint64_t)g.x * g.y))};
  };
  r.pc = pc, r.other_pc = other;
  r.kind = now.kind, r.other_kind = before.kind;
  r.space = space, r.range = range, r.address = address;
  r.block = w->block, r.other_block = index(before.block);
  r.thread = f->linear, r.other_thread = before.thread;
}

void search_races(Worker* w, Fiber* f, uint64_t address, size_t size, Kind kind, uint64_t pc, Space space, int range) {
  Shadow* s = w->shadow;
  Stamp now{w->block_number, f->linear, s->epoch, f->clock[lane_of(f)], pc, (uint8_t)kind, 0};
  auto& cells = space == SHARED ? s->shared : s->cells;
  for (uint64_t word = address / 4; word <= (address + size - 1) / 4; word++) {
    uint64_t from = std::max(address, word * 4) - word * 4, to = std::min(address + size, word * 4 + 4) - word * 4;
    now.bytes = uint8_t((1u << to) - (1u << from));
    Cell& cell = cells[word];
    size_t readers = 0;
    for (auto& before : cell) {
      readers += before.kind == READ;
      bool harmless = (kind == READ && before.kind == READ) || (kind == ATOMIC && before.kind == ATOMIC);
      if ((before.bytes & now.bytes) && !harmless && !ordered(w, f, before)) note_race(w, f, before, now, address, space, range);
    }
    auto superseded = [&](Stamp& before) {
      bool mine = before.block == now.block && before.thread == now.thread && before.kind == READ;
      if (kind != READ || mine) before.bytes &= ~now.bytes;
      return before.bytes == 0;
    };
    cell.erase(std::remove_if(cell.begin(), cell.end(), superseded), cell.end());
    if (kind == READ && readers >= READERS) {  // forget the oldest reader
      auto oldest = std::find_if(cell.begin(), cell.end(), [](const Stamp& r) { return r.kind == READ; });
      if (oldest != cell.end()) cell.erase(oldest);
    }
    cell.push_back(now);
  }
  if (kind == ATOMIC) {  // acquire what was released here, and release what this thread has done before its fence
    Known& here = s->released[address];
    Known& mine = s->threads[f->linear];
    mine.learn(here);
    if (s->fenced[f->linear]) {
      here.learn(mine);
      here.learn(s->block);
      here.epochs[w->block_number] = std::max(here.epochs[w->block_number], s->epoch);
      here.clocks[w->block_number * MOST_THREADS + f->linear] = (uint64_t)s->epoch << 32 | (now.clock + 1);
      f->clock[lane_of(f)]++;
    }
  }
}

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
  if (l->mode == TRACE) f->log->push_back({pc, address, (uint32_t)size, (uint8_t)kind, (uint8_t)space, (int16_t)range});
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

// ------------------------------------------------------------------------------------------------ trace
// A request is one instruction executed by the lanes of a warp together: the k-th time that each lane comes to it.
void summarise(Worker* w, std::map<std::tuple<uint64_t, int, int, int>, Access>& totals) {
  struct Lane {
    uint64_t address;
    uint32_t size;
  };
  for (unsigned warp = 0; warp * WARP < w->threads; warp++) {
    std::map<std::tuple<uint64_t, int, int, int>, std::vector<std::vector<Lane>>> requests;
    for (unsigned i = warp * WARP; i < std::min(w->threads, (warp + 1) * WARP); i++) {
      std::unordered_map<uint64_t, uint32_t> times;
      auto& log = *w->stacks.fiber(i)->log;
      for (auto& e : log) {
        auto& all = requests[{e.pc, e.kind, e.space, e.range}];
        uint32_t k = times[e.pc * 4 + e.kind]++;
        if (all.size() <= k) all.resize(k + 1);
        all[k].push_back({e.address, e.size});
      }
      log.clear();
    }
    for (auto& [key, all] : requests) {
      Access& total = totals[key];
      total.pc = in_library(w->launch, std::get<0>(key));
      total.kind = std::get<1>(key), total.space = std::get<2>(key), total.range = std::get<3>(key);
      for (auto& lanes : all) {
        if (lanes.empty()) continue;
        total.requests++;
        std::set<uint64_t> sectors;
        uint32_t widest = 0;
        for (auto& x : lanes) {
          total.lanes++, total.bytes += x.size, widest = std::max(widest, x.size);
          for (uint64_t s = x.address / 32; s <= (x.address + x.size - 1) / 32; s++) sectors.insert(s);
        }
        total.size = widest;
        total.sectors += sectors.size();
        // Shared memory serves 32 banks of 4 bytes at a time: a warp's 8-byte accesses go in two halves, 16-byte ones
        // in four quarters; within each, distinct words of one bank need a pass each.
        unsigned group = widest >= 16 ? 8 : widest >= 8 ? 16 : 32;
        for (size_t from = 0; from < lanes.size(); from += group) {
          std::set<uint64_t> words[WARP];
          size_t most = 0;
          for (size_t i = from; i < std::min(lanes.size(), from + group); i++)
            for (uint64_t word = lanes[i].address / 4; word <= (lanes[i].address + lanes[i].size - 1) / 4; word++)
              words[word % WARP].insert(word);
          for (auto& bank : words) most = std::max(most, bank.size());
          total.passes += most, total.least_passes++;
        }
      }
    }
  }
}

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
  if (w->shared_high > w->shared_low) memset((void*)w->shared_low, 0xff, w->shared_high - w->shared_low);
  if (l->shared_bytes) memset((void*)w->dynamic_low, 0xff, l->shared_bytes);
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

int cc_sync_block(int line, int value, int) {
  Fiber* f = self();
  Worker* w = f->worker;
  f->line = line;
  if (w->at_block && w->block_line != line) fail_at_line(f, MIXED_BARRIERS, w->block_line, "block", line);
  w->block_line = line;
  w->total += value;
  f->state = AT_BLOCK;
  if (++w->at_block == w->live) release_block(w);
  else to_worker(f);
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

void cc_atomic(void* address, size_t size, void* pc) { touch(address, size, ATOMIC, pc, true); }
void cc_fence() {
  Fiber* f = self();
  if (Shadow* s = f->worker->shadow) s->fenced[f->linear] = 1;
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
