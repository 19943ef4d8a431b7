// What ptx.py writes for instructions that are more than one operator of C++. Registers are plain bits, as in PTX:
// uint16_t, uint32_t and uint64_t; shared memory is one array, and an address in it is an offset.
#pragma once

namespace ptx {
template <class To, class From>
CC_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  __builtin_memcpy(&out, &value, sizeof(To));
  return out;
}

struct f16 {  // arithmetic in fp32, rounded to fp16: the same as in fp16 for one operation
  uint16_t raw;
  f16() = default;
  explicit f16(float value) : raw(__half_as_ushort(__float2half_rn(value))) {}
  operator float() const { return __half2float(__ushort_as_half(raw)); }
};

template <class T>
struct alignas(2 * sizeof(T)) V2 {
  T at[2];
};
template <class T>
struct alignas(4 * sizeof(T)) V4 {
  T at[4];
};

template <class T>
CC_INLINE T high(T a, T b) {
  using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return (T)(((W)a * (W)b) >> (8 * sizeof(T)));
}

// PTX's min and max give the number where one side is NaN.
CC_INLINE float least(float a, float b) { return __builtin_fminf(a, b); }
CC_INLINE float largest(float a, float b) { return __builtin_fmaxf(a, b); }
template <class T>
CC_INLINE T least(T a, T b) { return b < a ? b : a; }
template <class T>
CC_INLINE T largest(T a, T b) { return a < b ? b : a; }

// fma.rm: rounded down. NVIDIA's expf takes a floor with it. The product is exact in fp64.
CC_INLINE float fused_down(float a, float b, float c) {
  double exact = (double)a * b + c;
  float out = (float)exact;
  return out > exact ? __builtin_nextafterf(out, -__builtin_inff()) : out;
}

// A shift by the width of the type or more leaves no bit, or for a signed type its sign.
template <class T>
CC_INLINE T left(T a, uint32_t n) { return n < 8 * sizeof(T) ? (T)(a << n) : (T)0; }
template <class T>
CC_INLINE T right(T a, uint32_t n) { return n < 8 * sizeof(T) ? (T)(a >> n) : (T)(a < 0 ? -1 : 0); }

// Where a lane reads from in shfl, and whether that lane is inside its segment: else it keeps its own value.
#define PTX_LANE(name, lane_of, compare)                                         \
  CC_INLINE int lane_##name(uint32_t b, uint32_t clamp, bool& inside) {          \
    int lane = cc_lane(), segment = clamp >> 8 & 31, offset = b & 31;            \
    int limit = (lane & segment) | (clamp & 31 & ~segment), source = lane_of;    \
    inside = source compare limit;                                               \
    return inside ? source : lane;                                               \
  }
PTX_LANE(up, lane - offset, >=)
PTX_LANE(down, lane + offset, <=)
PTX_LANE(bfly, lane ^ offset, <=)
PTX_LANE(idx, (lane & segment) | (offset & ~segment), <=)
#undef PTX_LANE

// Each lane gives the address of one row of 16 bytes, and gets two elements of row lane / 4 of every matrix.
template <int N>
void ldmatrix(char* shared, uint32_t (&out)[N], uint32_t address, int line) {
  for (int i = 0; i < N; ++i) {
    uint32_t row = cc::shuffle_at(line, cc::from_lane, ~0u, address, 8 * i + cc_lane() / 4);
    out[i] = *(uint32_t*)(shared + row + 4 * (cc_lane() % 4));
  }
}

// m16n8k16, row times column, fp16 to fp32. What a lane holds of each matrix: the PTX manual's figures for this shape.
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4], int line) {
  int group = cc_lane() / 4, pair = cc_lane() % 4;
  auto both = [](uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; };
  auto from = [&](uint64_t value, int lane) { return cc::shuffle_at(line, cc::from_lane, ~0u, value, lane); };
  auto dot = [](uint32_t x, uint32_t y) {
    return (float)bits<f16>((uint16_t)x) * (float)bits<f16>((uint16_t)y) +
           (float)bits<f16>((uint16_t)(x >> 16)) * (float)bits<f16>((uint16_t)(y >> 16));
  };
  float sum[4] = {c[0], c[1], c[2], c[3]};
  for (int i = 0; i < 4; ++i) {
    uint64_t near = from(both(a[0], a[1]), 4 * group + i), far = from(both(a[2], a[3]), 4 * group + i);
    for (int column = 0; column < 2; ++column) {
      uint64_t of_b = from(both(b[0], b[1]), 4 * (2 * pair + column) + i);
      for (int row = 0; row < 2; ++row)
        sum[2 * row + column] += dot(near >> 32 * row, of_b) + dot(far >> 32 * row, of_b >> 32);
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}
}  // namespace ptx
