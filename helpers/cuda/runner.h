// What CUDA C sees when it is compiled by g++ and run on the CPU: NVIDIA's own vector and half types, and every
// built-in that needs the scheduler (runtime.cpp). Included before the reader's text.
#pragma once
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <math.h>
#include <stdlib.h>
#include <vector_types.h>
#include <vector_functions.h>
#ifdef CC_WMMA
#define CC_HALF
#define CC_BFLOAT16
#endif
#ifdef CC_HALF
#include <cuda_fp16.h>
#endif
#ifdef CC_BFLOAT16
#include <cuda_bf16.h>
#endif
#include "runtime.h"

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __constant__
#undef __align__
#undef __shared__
#undef __managed__
#undef __grid_constant__
#undef __cluster_dims__
#undef __restrict__
#undef assert
// All that a kernel calls becomes part of it: where a function that stayed apart returns a struct, such as __half, g++
// stores it without asking the sanitizer.
#define __global__ __attribute__((flatten))
#define __device__
#define __host__
#define __managed__
#define __grid_constant__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// One copy per OS thread, and an OS thread runs one block at a time. "used": else what is never written is taken for
// zero. "constinit": else g++ guards arrays of __half, and its looks at the guard are taken for the kernel's.
#ifdef CC_WMMA  // fragments are loaded from multiples of 32 bytes, and on a GPU a block's arrays begin at such
#define __shared__ __attribute__((used, aligned(32))) constinit thread_local
#else
#define __shared__ __attribute__((used)) constinit thread_local
#endif
#undef __CUDA_ARCH__
#define __CUDA_ARCH__ 900

#define threadIdx (cc::index_of(cc_thread))
#define blockIdx (cc::index_of(cc_block))
#define blockDim (cc::size_of(cc_block_size))
#define gridDim (cc::size_of(cc_grid_size))
#define warpSize 32
#define assert(...) ((__VA_ARGS__) ? (void)0 : cc_assert(#__VA_ARGS__, __LINE__))
#define printf(...) cc_printf(__VA_ARGS__)
#define malloc(n) cc_malloc(n)
#define free(p) cc_free(p)
#define __trap() cc_trap(__LINE__)
#define __syncthreads() ((void)cc_sync_block(__LINE__, 0, 0))
#define cc_syncthreads_in_if() ((void)cc_sync_block(__LINE__, 0, 1))  // so named by translate.py
#define __syncthreads_count(p) cc_sync_block(__LINE__, (p) != 0, 0)
#define __syncthreads_or(p) (cc_sync_block(__LINE__, (p) != 0, 0) != 0)
#define __syncthreads_and(p) (cc_sync_block(__LINE__, (p) == 0, 0) == 0)
#define __syncwarp(...) cc_sync_warp(0xffffffffu __VA_OPT__(& (__VA_ARGS__)), __LINE__)
#define __threadfence() cc_fence()
#define __threadfence_block() cc_fence()
#define __threadfence_system() cc_fence()
#define __activemask() cc_active(__LINE__)
#define __shfl_sync(...) cc::shuffle_at(__LINE__, cc::from_lane, __VA_ARGS__)
#define __shfl_up_sync(...) cc::shuffle_at(__LINE__, cc::from_above, __VA_ARGS__)
#define __shfl_down_sync(...) cc::shuffle_at(__LINE__, cc::from_below, __VA_ARGS__)
#define __shfl_xor_sync(...) cc::shuffle_at(__LINE__, cc::from_xor, __VA_ARGS__)
#define __ballot_sync(m, p) cc_vote(m, (p) != 0, cc::BALLOT, __LINE__)
#define __any_sync(m, p) (cc_vote(m, (p) != 0, cc::BALLOT, __LINE__) != 0)
#define __all_sync(m, p) (cc_vote(m, (p) == 0, cc::BALLOT, __LINE__) == 0)
#define __match_any_sync(m, v) cc_vote(m, cc::bits_of(v), cc::MATCH, __LINE__)
#define __match_all_sync(m, v, p) cc::match_all(m, v, p, __LINE__)
#define __reduce_add_sync(m, v) cc::reduce(m, v, cc::ADD, __LINE__)
#define __reduce_min_sync(m, v) cc::reduce_by_sign(m, v, cc::SMIN, cc::UMIN, __LINE__)
#define __reduce_max_sync(m, v) cc::reduce_by_sign(m, v, cc::SMAX, cc::UMAX, __LINE__)
#define __reduce_and_sync(m, v) cc::reduce(m, v, cc::AND, __LINE__)
#define __reduce_or_sync(m, v) cc::reduce(m, v, cc::OR, __LINE__)
#define __reduce_xor_sync(m, v) cc::reduce(m, v, cc::XOR, __LINE__)

namespace cc {
enum Op { SHUFFLE_OP, BALLOT, MATCH, ADD, SMIN, SMAX, UMIN, UMAX, AND, OR, XOR };

#define CC_INLINE __attribute__((always_inline)) inline
CC_INLINE uint3 index_of(unsigned (*of)(int)) { return {of(0), of(1), of(2)}; }
CC_INLINE dim3 size_of(unsigned (*of)(int)) { return dim3(of(0), of(1), of(2)); }

template <class T>
struct DynamicShared {  // `extern __shared__ T name[]` outside a function
  operator T*() const { return (T*)cc_dynamic_shared(); }
};

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8, "a warp exchanges values of at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T value_of(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// Where a lane reads from, as PTX defines shfl: `width` splits the warp into segments; out of its segment a lane keeps
// its own value.
inline int from_lane(int lane, int argument, int width) { return (lane & ~(width - 1)) | (argument & (width - 1)); }
inline int from_above(int lane, int argument, int width) {
  int source = lane - argument;
  return source < (lane & ~(width - 1)) ? lane : source;
}
inline int from_below(int lane, int argument, int width) {
  int source = lane + argument;
  return source > (lane | (width - 1)) ? lane : source;
}
inline int from_xor(int lane, int argument, int width) {
  int source = lane ^ argument;
  return source > (lane | (width - 1)) ? lane : source;
}

template <class T>
T shuffle_at(int line, int (*source)(int, int, int), unsigned mask, T value, int argument, int width = 32) {
  int from = source(cc_lane(), argument, width);
  return value_of<T>(cc_exchange(mask, bits_of(value), from, SHUFFLE_OP, line));
}

template <class T>
unsigned match_all(unsigned mask, T value, int* same, int line) {
  *same = (cc_vote(mask, bits_of(value), MATCH, line) & mask) == mask;
  return *same ? mask : 0;
}

template <class T>
T reduce(unsigned mask, T value, Op op, int line) {
  static_assert(sizeof(T) == 4, "__reduce_*_sync take int or unsigned");
  return value_of<T>(cc_exchange(mask, bits_of(value), 0, op, line));
}

template <class T>
T reduce_by_sign(unsigned mask, T value, Op of_signed, Op of_unsigned, int line) {
  return reduce(mask, value, std::is_signed_v<T> ? of_signed : of_unsigned, line);
}

// Atomics: not instrumented themselves (they would look like a plain read and a plain write), but told to the runtime.
#define CC_ATOMIC __attribute__((noinline, no_sanitize("thread")))

template <size_t N> struct Bits;
template <> struct Bits<2> { using type = uint16_t; };
template <> struct Bits<4> { using type = uint32_t; };
template <> struct Bits<8> { using type = uint64_t; };

enum Rmw { RMW_ADD, RMW_SUB, RMW_MAX, RMW_MIN, RMW_EXCH, RMW_AND, RMW_OR, RMW_XOR, RMW_INC, RMW_DEC };

template <Rmw op, class T>
__attribute__((always_inline, no_sanitize("thread"))) inline T step(T old, T v) {
  if constexpr (op == RMW_ADD) return old + v;
  else if constexpr (op == RMW_SUB) return old - v;
  else if constexpr (op == RMW_MAX) return old < v ? v : old;
  else if constexpr (op == RMW_MIN) return v < old ? v : old;
  else if constexpr (op == RMW_EXCH) return v;
  else if constexpr (op == RMW_AND) return old & v;
  else if constexpr (op == RMW_OR) return old | v;
  else if constexpr (op == RMW_XOR) return old ^ v;
  else if constexpr (op == RMW_INC) return old >= v ? T(0) : T(old + 1);
  else return (old == 0 || old > v) ? v : T(old - 1);
}

template <Rmw op, class T>
CC_ATOMIC T rmw(T* p, T v, void* pc) {
  using B = typename Bits<sizeof(T)>::type;
  cc_atomic(p, sizeof(T), pc);
  B old = __atomic_load_n((B*)p, __ATOMIC_RELAXED);
  for (;;) {
    T before;
    __builtin_memcpy((void*)&before, &old, sizeof(T));
    T after = step<op, T>(before, v);
    B next;
    __builtin_memcpy(&next, (void*)&after, sizeof(T));
    if (__atomic_compare_exchange_n((B*)p, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return before;
  }
}
}  // namespace cc

#define CC_RMW(name, op)                                                     \
  template <class T, class U>                                                \
  CC_ATOMIC T name(T* p, U v) {                                              \
    return cc::rmw<cc::op, T>(p, (T)v, __builtin_return_address(0));         \
  }                                                                          \
  template <class T, class U>                                                \
  CC_ATOMIC T name##_block(T* p, U v) {                                      \
    return cc::rmw<cc::op, T>(p, (T)v, __builtin_return_address(0));         \
  }                                                                          \
  template <class T, class U>                                                \
  CC_ATOMIC T name##_system(T* p, U v) {                                     \
    return cc::rmw<cc::op, T>(p, (T)v, __builtin_return_address(0));         \
  }
CC_RMW(atomicAdd, RMW_ADD)
CC_RMW(atomicSub, RMW_SUB)
CC_RMW(atomicMax, RMW_MAX)
CC_RMW(atomicMin, RMW_MIN)
CC_RMW(atomicExch, RMW_EXCH)
CC_RMW(atomicAnd, RMW_AND)
CC_RMW(atomicOr, RMW_OR)
CC_RMW(atomicXor, RMW_XOR)
CC_RMW(atomicInc, RMW_INC)
CC_RMW(atomicDec, RMW_DEC)
#undef CC_RMW

template <class T, class U, class V>
CC_ATOMIC T atomicCAS(T* p, U compare, V value) {
  using B = typename cc::Bits<sizeof(T)>::type;
  cc_atomic(p, sizeof(T), __builtin_return_address(0), true);
  T c = (T)compare, v = (T)value;
  B expected, wanted;
  __builtin_memcpy(&expected, &c, sizeof(T));
  __builtin_memcpy(&wanted, &v, sizeof(T));
  __atomic_compare_exchange_n((B*)p, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  __builtin_memcpy(&c, &expected, sizeof(T));
  return c;
}

// Loads and stores with a cache hint: plain ones here.
#define CC_LOAD(name)                              \
  template <class T>                               \
  __attribute__((always_inline)) inline T name(const T* p) { return *p; }
CC_LOAD(__ldg)
CC_LOAD(__ldca)
CC_LOAD(__ldcg)
CC_LOAD(__ldcs)
CC_LOAD(__ldlu)
CC_LOAD(__ldcv)
#undef CC_LOAD
#define CC_STORE(name)                             \
  template <class T, class U>                      \
  __attribute__((always_inline)) inline void name(T* p, U v) { *p = v; }
CC_STORE(__stwb)
CC_STORE(__stcg)
CC_STORE(__stcs)
CC_STORE(__stwt)
#undef CC_STORE

inline long long clock64() { return cc_clock(); }
#define clock() ((clock_t)cc_clock())
inline void __nanosleep(unsigned) {}
inline void __prof_trigger(int) {}
inline void __brkpt() {}
inline void cudaGridDependencySynchronize() {}  // no launch begins here before the one before it has ended
inline void cudaTriggerProgrammaticLaunchCompletion() {}

#include "runner_math.h"

#define CC_PLAIN __attribute__((no_sanitize("thread")))  // its accesses are the launch's, not the kernel's
namespace cc {
// One entry a kernel: unpacks pointers to the arguments, as cuLaunchKernel does.
template <class... P, size_t... I>
CC_PLAIN void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<P>*)arguments[I]...);
}
template <class... P>
CC_PLAIN void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}
}  // namespace cc
#ifdef CC_WMMA
#include "runner_wmma.h"
#endif
#define CC_EXPORT __attribute__((visibility("default")))
#define CC_ENTRY(number, ...) \
  extern "C" CC_EXPORT CC_PLAIN void cc_entry_##number(void** arguments) { cc::call(__VA_ARGS__, arguments); }
#define CC_VARIABLE(name)                                                              \
  extern "C" CC_EXPORT void* cc_address_##name() { return (void*)&name; }             \
  extern "C" CC_EXPORT size_t cc_size_##name() { return sizeof(name); }
