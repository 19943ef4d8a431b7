// The border between three parties: kernels compiled for the CPU (runner.h), the scheduler (runtime.cpp) and
// Python (cpu.py, through ctypes). Plain C types only; field order matters to Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cc {

struct U3 {
  uint32_t x, y, z;
};

struct Range {  // memory that the kernel may touch: one array argument
  uint64_t low, high;
};

enum Kind : uint32_t { READ = 0, WRITE = 1, ATOMIC = 2 };
enum Space : uint32_t { ARRAY, SHARED, MODULE, OTHER };

enum Fault : int32_t {
  OK = 0,
  OUT_OF_BOUNDS,
  MISALIGNED,
  DEADLOCK,
  MIXED_BARRIERS,   // threads of one block or warp met at different barriers
  NOT_IN_MASK,
  ASSERTION,
  TRAP,
  DIVISION,
  SEGMENTATION,
  INTERRUPTED,
  MISUSE,           // of a fragment: `text` says how
};

enum Nearest : int32_t { NOTHING = -1, DYNAMIC_SHARED = -2, STATIC_SHARED = -3 };

struct Failure {  // the first thing that went wrong
  int32_t fault;
  int32_t line, other_line;  // from __LINE__ where the runtime was told one, else 0
  uint64_t pc;               // offset in the kernel's library, 0 where there is none
  uint64_t address;
  uint32_t size, kind;
  int32_t range;             // the array argument nearest to the address, or one of Nearest
  U3 block, thread;
  uint32_t waiting, live;    // threads at the barrier, threads not yet finished
  char text[512];
};

struct Access {  // one line of the trace: all requests of one instruction to one array
  uint64_t pc;
  uint32_t kind, space;
  int32_t range;
  uint32_t size;             // bytes a lane
  uint64_t requests, lanes, bytes, sectors, passes, least_passes;
};

struct Race {
  uint64_t pc, other_pc;     // this access, and the earlier one
  uint32_t kind, other_kind, space;
  int32_t range;
  uint64_t address;
  U3 block, other_block;
  uint32_t thread, other_thread;
  uint64_t count;
};

enum Mode : uint32_t { RUN, TRACE, RACES };
enum Order : uint32_t { FORWARD, REVERSE, SHUFFLE };

struct Launch {
  void (*kernel)(void**);
  void* (*anchor)();         // touches the library's thread-local storage, where __shared__ arrays live
  void** arguments;
  Range* ranges;
  uint32_t range_count, strict;  // strict: an address outside every range is an error
  U3 grid, block;
  uint64_t shared_bytes;
  uint32_t workers, mode, order, seed;
  uint64_t blocks;           // run only the first so many
  uint64_t idle;             // products of fragments are left out
  Failure failure;
  Access* accesses;
  uint64_t access_count;
  Race* races;
  uint64_t race_count;
  char* printed;
  uint64_t printed_bytes;
};

}  // namespace cc

extern "C" {
int cc_launch(cc::Launch*);
void cc_release(cc::Launch*);  // frees what a launch allocated

// what a kernel calls
// (the same for a fiber's whole life, so the compiler may ask once; axis 0, 1, 2 are x, y, z)
__attribute__((const)) unsigned cc_thread(int axis);
__attribute__((const)) unsigned cc_block(int axis);
__attribute__((const)) unsigned cc_block_size(int axis);
__attribute__((const)) unsigned cc_grid_size(int axis);
__attribute__((const)) int cc_lane();
__attribute__((const)) void* cc_dynamic_shared();
int cc_sync_block(int line, int value, int in_if);
void cc_sync_warp(unsigned mask, int line);
uint64_t cc_exchange(unsigned mask, uint64_t value, int source, int op, int line);
unsigned cc_vote(unsigned mask, uint64_t value, int op, int line);
unsigned cc_active(int line);
// waits for the warp's 32 lanes; when the last has come, `all` sees what each gave as `mine`, once
void cc_together(void* mine, void (*all)(void* const* of_lanes), int line, const char* name);
void cc_touch(void* address, size_t size, bool store, void* pc);
[[noreturn]] void cc_misuse(int line, const char* format, ...) __attribute__((format(printf, 2, 3)));
unsigned char cc_poison();
int cc_order();
int cc_idle();
void cc_atomic(void* address, size_t size, void* pc, bool compares = false);
void cc_fence();
void cc_assert(const char* text, int line);
void cc_trap(int line);
int cc_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
long long cc_clock();
void* cc_malloc(size_t);
void cc_free(void*);
}
