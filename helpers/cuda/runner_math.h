// CUDA's arithmetic by its CUDA names: intrinsics, conversions, bit operations, and the half and bfloat16 functions
// that NVIDIA's headers define for a GPU only. Fast-math functions are the accurate ones here.
#pragma once

#define CC_F inline float
#define CC_D inline double
#define CC_I inline int
#define CC_U inline unsigned

// Names that a C library may come to define itself are macros, so that they never clash.
#define rsqrtf(x) cc::rsqrt_(float(x))
#define rsqrt(x) cc::rsqrt_(x)
#define rcbrtf(x) (1.0f / cbrtf(x))
#define exp10f(x) cc::exp10_(float(x))
#define normcdff(x) (0.5f * erfcf(-(x) * 0.70710678118654752f))
#define normcdf(x) (0.5 * erfc(-(x) * 0.70710678118654752))
#define sinpif(x) sinf(3.14159265358979f * (x))
#define cospif(x) cosf(3.14159265358979f * (x))
#define norm3df(a, b, c) sqrtf((a) * (a) + (b) * (b) + (c) * (c))
#define rhypotf(a, b) (1.0f / hypotf(a, b))

namespace cc {
CC_F rsqrt_(float x) { return 1.0f / ::sqrtf(x); }
CC_D rsqrt_(double x) { return 1.0 / ::sqrt(x); }
CC_F exp10_(float x) { return ::powf(10.0f, x); }

// max and min take mixed types in CUDA; of a NaN and a number they give the number
template <class A, class B>
constexpr auto larger(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return T(::fmax(T(a), T(b)));
  else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
constexpr auto smaller(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return T(::fmin(T(a), T(b)));
  else return T(b) < T(a) ? T(b) : T(a);
}
template <class To, class From>
To saturating(From x) {
  if (x != x) return 0;
  if (x >= (From)std::numeric_limits<To>::max()) return std::numeric_limits<To>::max();
  if (x <= (From)std::numeric_limits<To>::min()) return std::numeric_limits<To>::min();
  return (To)x;
}
}  // namespace cc
template <class A, class B> constexpr auto max(A a, B b) { return cc::larger(a, b); }
template <class A, class B> constexpr auto min(A a, B b) { return cc::smaller(a, b); }
CC_U umax(unsigned a, unsigned b) { return a < b ? b : a; }
CC_U umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline long long llmax(long long a, long long b) { return a < b ? b : a; }
inline long long llmin(long long a, long long b) { return a < b ? a : b; }
using std::abs;

// fast-math names
CC_F __expf(float x) { return expf(x); }
CC_F __exp10f(float x) { return cc::exp10_(x); }
CC_F __logf(float x) { return logf(x); }
CC_F __log2f(float x) { return log2f(x); }
CC_F __log10f(float x) { return log10f(x); }
CC_F __sinf(float x) { return sinf(x); }
CC_F __cosf(float x) { return cosf(x); }
CC_F __tanf(float x) { return tanf(x); }
CC_F __tanhf(float x) { return tanhf(x); }
CC_F __powf(float x, float y) { return powf(x, y); }
CC_F __fdividef(float a, float b) { return a / b; }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
CC_F __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
CC_F __frsqrt_rn(float x) { return cc::rsqrt_(x); }
CC_F __frcp_rn(float x) { return 1.0f / x; }
CC_F __fsqrt_rn(float x) { return sqrtf(x); }
CC_F __fadd_rn(float a, float b) { return a + b; }
CC_F __fsub_rn(float a, float b) { return a - b; }
CC_F __fmul_rn(float a, float b) { return a * b; }
CC_F __fdiv_rn(float a, float b) { return a / b; }
CC_F __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
CC_D __dadd_rn(double a, double b) { return a + b; }
CC_D __dmul_rn(double a, double b) { return a * b; }
CC_D __ddiv_rn(double a, double b) { return a / b; }
CC_D __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// conversions; out of range a GPU saturates
CC_I __float2int_rn(float x) { return cc::saturating<int>(nearbyintf(x)); }
CC_I __float2int_rz(float x) { return cc::saturating<int>(truncf(x)); }
CC_I __float2int_rd(float x) { return cc::saturating<int>(floorf(x)); }
CC_I __float2int_ru(float x) { return cc::saturating<int>(ceilf(x)); }
CC_U __float2uint_rn(float x) { return cc::saturating<unsigned>(nearbyintf(x)); }
CC_U __float2uint_rz(float x) { return cc::saturating<unsigned>(truncf(x)); }
CC_U __float2uint_rd(float x) { return cc::saturating<unsigned>(floorf(x)); }
CC_U __float2uint_ru(float x) { return cc::saturating<unsigned>(ceilf(x)); }
inline long long __float2ll_rn(float x) { return cc::saturating<long long>(nearbyintf(x)); }
inline long long __float2ll_rz(float x) { return cc::saturating<long long>(truncf(x)); }
CC_I __double2int_rn(double x) { return cc::saturating<int>(nearbyint(x)); }
CC_I __double2int_rz(double x) { return cc::saturating<int>(trunc(x)); }
CC_F __int2float_rn(int x) { return (float)x; }
CC_F __uint2float_rn(unsigned x) { return (float)x; }
CC_F __ll2float_rn(long long x) { return (float)x; }
CC_F __ull2float_rn(unsigned long long x) { return (float)x; }
CC_D __int2double_rn(int x) { return x; }
CC_F __double2float_rn(double x) { return (float)x; }
CC_F __int_as_float(int x) { return __builtin_bit_cast(float, x); }
CC_I __float_as_int(float x) { return __builtin_bit_cast(int, x); }
CC_F __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
CC_U __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
CC_D __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }

// bits
CC_I __popc(unsigned x) { return __builtin_popcount(x); }
CC_I __popcll(unsigned long long x) { return __builtin_popcountll(x); }
CC_I __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
CC_I __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
CC_I __ffs(int x) { return __builtin_ffs(x); }
CC_I __ffsll(long long x) { return __builtin_ffsll(x); }
CC_U __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
CC_U __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned choice = s >> 4 * i & 0xf, byte = both >> 8 * (choice & 7) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << 8 * i;
  }
  return r;
}
CC_U __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return (((unsigned long long)hi << 32 | lo) << (n & 31)) >> 32;
}
CC_U __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return ((unsigned long long)hi << 32 | lo) >> (n & 31); }
CC_I __mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
CC_U __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
CC_I __mulhi(int a, int b) { return (long long)a * b >> 32; }
CC_U __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline long long __mul64hi(long long a, long long b) { return (__int128)a * b >> 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
CC_U __sad(int a, int b, unsigned c) { return (a > b ? a - b : b - a) + c; }
CC_U __usad(unsigned a, unsigned b, unsigned c) { return (a > b ? a - b : b - a) + c; }
CC_I __hadd(int a, int b) { return ((long long)a + b) >> 1; }
CC_I __rhadd(int a, int b) { return ((long long)a + b + 1) >> 1; }
CC_I __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return c;
}
CC_U __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; i++) c += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
  return c;
}

// Half and bfloat16: NVIDIA's headers give hosts the types, conversions, comparisons and + - * /; these are the rest.
// Each is computed in float (fma in double, whose product is exact) and rounded once.
#define CC_HALF_FUNCTIONS(H, H2, to, from, pair)                                                              \
  inline H __hfma(H a, H b, H c) { return from((float)((double)to(a) * to(b) + to(c))); }                     \
  inline H __hfma_sat(H a, H b, H c) { return from(__saturatef(to(__hfma(a, b, c)))); }                       \
  inline H __hfma_relu(H a, H b, H c) { return from(fmaxf(to(__hfma(a, b, c)), 0.0f)); }                      \
  inline H2 __hfma2(H2 a, H2 b, H2 c) { return pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }          \
  inline H2 __hfma2_sat(H2 a, H2 b, H2 c) { return pair(__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y)); } \
  inline H2 __hfma2_relu(H2 a, H2 b, H2 c) { return pair(__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)); } \
  CC_HALF_MAP(H, H2, to, from, pair, sqrt, sqrtf(x))                                                          \
  CC_HALF_MAP(H, H2, to, from, pair, rsqrt, 1.0f / sqrtf(x))                                                  \
  CC_HALF_MAP(H, H2, to, from, pair, rcp, 1.0f / x)                                                           \
  CC_HALF_MAP(H, H2, to, from, pair, log, logf(x))                                                            \
  CC_HALF_MAP(H, H2, to, from, pair, log2, log2f(x))                                                          \
  CC_HALF_MAP(H, H2, to, from, pair, log10, log10f(x))                                                        \
  CC_HALF_MAP(H, H2, to, from, pair, exp, expf(x))                                                            \
  CC_HALF_MAP(H, H2, to, from, pair, exp2, exp2f(x))                                                          \
  CC_HALF_MAP(H, H2, to, from, pair, exp10, powf(10.0f, x))                                                   \
  CC_HALF_MAP(H, H2, to, from, pair, cos, cosf(x))                                                            \
  CC_HALF_MAP(H, H2, to, from, pair, sin, sinf(x))                                                            \
  CC_HALF_MAP(H, H2, to, from, pair, tanh, tanhf(x))                                                          \
  CC_HALF_MAP(H, H2, to, from, pair, tanh_approx, tanhf(x))                                                   \
  CC_HALF_MAP(H, H2, to, from, pair, trunc, truncf(x))                                                        \
  CC_HALF_MAP(H, H2, to, from, pair, ceil, ceilf(x))                                                          \
  CC_HALF_MAP(H, H2, to, from, pair, floor, floorf(x))                                                        \
  CC_HALF_MAP(H, H2, to, from, pair, rint, nearbyintf(x))
#define CC_HALF_MAP(H, H2, to, from, pair, name, formula)                                                     \
  inline H h##name(H value) { float x = to(value); return from(formula); }                                    \
  inline H2 h2##name(H2 value) { return pair(h##name(value.x), h##name(value.y)); }
#ifdef CC_HALF
CC_HALF_FUNCTIONS(__half, __half2, __half2float, __float2half, __halves2half2)
CC_I __half2int_rn(__half h) { return __float2int_rn(__half2float(h)); }
CC_I __half2int_rd(__half h) { return __float2int_rd(__half2float(h)); }
CC_I __half2int_ru(__half h) { return __float2int_ru(__half2float(h)); }
CC_U __half2uint_rn(__half h) { return __float2uint_rn(__half2float(h)); }
#endif
#ifdef CC_BFLOAT16
CC_HALF_FUNCTIONS(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16, __halves2bfloat162)
CC_I __bfloat162int_rn(__nv_bfloat16 h) { return __float2int_rn(__bfloat162float(h)); }
#endif
