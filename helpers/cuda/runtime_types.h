// What the parts of the runtime share: fibers, the OS threads that run blocks of them, windows of allowed addresses.
// Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr uintptr_t STACK = 128 << 10;  // a power of two: a fiber finds itself from its stack pointer
constexpr uint32_t TURN = 1 << 20;      // accesses after which a fiber gives others a turn (spin locks)
// What each byte of uninitialised shared memory holds, by order: NaN and -1; as comparisons, fmaxf and fminf may pass
// over a NaN, a very large number, and one far below zero: in float, and in half as well, whose 0x7f7f is a NaN.
constexpr unsigned char POISON[] = {0xff, 0x7b, 0xfb};

enum State : uint8_t { READY, AT_BLOCK, AT_WARP, AT_ACTIVE, FINISHED };

struct Worker;

struct Logged {
  uint64_t pc, address;
  uint32_t size;
  uint8_t kind, space;
  int16_t range;
  uint32_t met;  // barriers passed before, of the block and of the whole warp
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
  void (*together)(void* const*);
  const char* name;      // of the call at which it waits for its whole warp
  uint32_t turn;
  uint32_t met;          // barriers passed, of the block and of the whole warp
  uint32_t clock[WARP];  // for races: how far this lane knows each lane of its warp
  bool compares;         // for races: the atomic that begins is a compare-and-swap
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
  bool block_in_if;
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

