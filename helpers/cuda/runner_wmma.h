// Tensor-core fragments (mma.h) on the CPU. A warp's lanes meet at each load, store and product, as on a GPU.
//
// Which lane holds which element is what an H200 does: tests/conformance compares the two. CUDA leaves it open, so in
// the other orders of threads other lanes hold it, and a kernel that counts on one of them gives other results. Memory
// is accessed as NVIDIA's compiler does it for sm_75 and later: half and bfloat16 operands in pieces of 8 x 8 elements,
// each one request of 4 bytes a lane (what LDSM does for one of its matrices); accumulators in requests of two
// neighbouring elements a lane, or of one where neighbours in a row do not lie side by side; tf32 operands of one.
// A product's sum is exact here and rounded once; a GPU rounds it in steps.
#pragma once

namespace nvcuda {
namespace wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
namespace precision {
struct tf32;
}
enum layout_t { mem_row_major, mem_col_major };

inline float __float_to_tf32(float x) {  // 10 bits of fraction; ties go away from zero
  auto bits = cc::value_of<uint32_t>(cc::bits_of(x));
  if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0x1000) & 0xffffe000;
  return cc::value_of<float>(bits);
}

#define CC_PLAIN_INLINE __attribute__((always_inline, no_sanitize("thread"))) inline
template <class T>
struct cc_element {  // what a fragment stores of it, and how it is multiplied
  using type = T;
  CC_PLAIN_INLINE static float number(T x) { return (float)x; }
};
template <>
struct cc_element<precision::tf32> {
  using type = float;
  CC_PLAIN_INLINE static float number(float x) {  // the tensor core does not look at the other bits
    return cc::value_of<float>(cc::bits_of(x) & 0xffffe000);
  }
};

template <class Use, int m, int n, int k, class T, class Layout = void>
struct fragment {
  static constexpr bool is_a = std::is_same_v<Use, matrix_a>, is_b = std::is_same_v<Use, matrix_b>;
  static constexpr bool is_sum = std::is_same_v<Use, accumulator>;
  static constexpr bool is_tf32 = std::is_same_v<T, precision::tf32>, is_half = std::is_same_v<T, __half>;
  static_assert((k == 16 && ((m == 16 && n == 16) || (m == 32 && n == 8) || (m == 8 && n == 32))) ||
                    (k == 8 && m == 16 && n == 16 && (is_tf32 || std::is_same_v<T, float>)),
                "fragments are 16x16x16, 32x8x16 or 8x32x16 (of tf32 16x16x8)");
  static_assert(is_sum ? is_half || std::is_same_v<T, float>
                       : is_half || std::is_same_v<T, __nv_bfloat16> || (is_tf32 && k == 8),
                "the CPU runner has fragments of __half, __nv_bfloat16 and tf32, with sums in float or __half");
  static_assert(is_sum == std::is_void_v<Layout>, "matrix_a and matrix_b have a layout, an accumulator has none");
  static constexpr int rows = is_b ? k : m, cols = is_a ? k : n;
  static constexpr int unique = rows * cols / 32;                       // elements a lane that are different ones
  static constexpr int num_elements = !is_sum && is_half ? 16 : unique;  // of half operands, a GPU keeps some twice
  static constexpr int num_storage_elements = num_elements;
  static constexpr bool is_row_major = std::is_same_v<Layout, row_major>;
  using element_type = T;
  using storage_element_type = typename cc_element<T>::type;
  storage_element_type x[num_elements];

  fragment() { __builtin_memset((void*)x, cc_poison(), sizeof x); }

  struct Place {
    int row, col;
  };
  // An operand of 32 rows or columns is two of 16, and one of 32 columns lies as if it were the left one.
  static CC_PLAIN_INLINE Place piece(int p) {
    if (is_sum) return m == 8 ? Place{0, p} : Place{p % (rows / 8), p / (rows / 8)};
    if (is_b && cols < 32) return {p % 2, p / 2};
    int side = is_b || rows > 8 ? 2 : 1, high = p / (2 * side) * side + p % side, deep = p / side % 2;
    return is_b ? Place{deep, high} : Place{high, deep};
  }
  static CC_PLAIN_INLINE Place place(int lane, int i) {  // of element i
    constexpr int wide = is_tf32 ? 1 : 2;                // neighbours that a lane holds
    auto at = piece(i % unique / wide);
    int along = lane % 4 * wide + i % wide, across = lane / 4;
    if (is_b || (is_sum && m == 8)) return {along + 4 * wide * at.row, across + 8 * at.col};
    return {across + 8 * at.row, along + 4 * wide * at.col};
  }
};

CC_PLAIN_INLINE int cc_holder(int lane) { return lane ^ 5 * cc_order(); }  // whose place in a fragment is its own

struct cc_memory {  // one lane's call of a load or store
  const void* at;
  unsigned pitch;
  bool row_major;
  int bytes;
  const char* name;
  int line;
};

CC_PLAIN inline void cc_same(void* const* of_lanes) {  // what every lane of a warp must agree on, and CUDA asks for
  cc_memory first;
  __builtin_memcpy(&first, of_lanes[0], sizeof first);
  for (int lane = 1; lane < 32; lane++) {
    cc_memory other;
    __builtin_memcpy(&other, of_lanes[lane], sizeof other);
    if (other.at != first.at || other.pitch != first.pitch || other.row_major != first.row_major)
      cc_misuse(first.line,
                "%s: lanes of one warp give different addresses, leading dimensions or layouts; all 32 name one tile",
                first.name);
  }
  int step = 16 / first.bytes;
  if (first.pitch % step)
    cc_misuse(first.line, "%s: the leading dimension is %u; for elements of %d bytes it must be a multiple of %d",
              first.name, first.pitch, first.bytes, step);
  if ((uintptr_t)first.at % 32)
    cc_misuse(first.line, "%s: the tile begins %d bytes past a multiple of 32; its address must be one (256 bits)",
              first.name, int((uintptr_t)first.at % 32));
}

template <class F, class P>
CC_PLAIN void cc_move(F& f, P* at, unsigned pitch, bool row_major, bool store, const char* name, int line, void* pc) {
  using T = typename F::storage_element_type;
  static_assert(std::is_same_v<std::remove_const_t<P>, T>, "the pointer's type is that of the fragment's elements");
  cc_memory mine{at, pitch, row_major, sizeof(T), name, line};
  cc_together(&mine, cc_same, line, name);
  int lane = cc_lane(), holder = cc_holder(lane);
  auto address = [&](int row, int col) __attribute__((no_sanitize("thread"))) {
    return (char*)at + sizeof(T) * (row_major ? (uint64_t)row * pitch + col : (uint64_t)col * pitch + row);
  };
  if constexpr (!F::is_sum && sizeof(T) == 2) {
    for (int i = 0; i < F::unique; i += 2) {  // the piece's row in memory that this lane fetches 4 bytes of
      auto corner = F::place(0, i);
      int across = lane / 4, along = lane % 4 * 2;
      int row = row_major ? across : along, col = row_major ? along : across;
      cc_touch(address(corner.row + row, corner.col + col), 4, store, pc);
    }
  } else {
    for (int i = 0; i < F::unique; i++) {
      auto here = F::place(holder, i), next = F::place(holder, i + 1);
      bool beside = address(next.row, next.col) == address(here.row, here.col) + sizeof(T);
      bool pair = beside && i % 2 == 0 && i + 1 < F::unique;
      cc_touch(address(here.row, here.col), sizeof(T) << pair, store, pc);
      i += pair;
    }
  }
  for (int i = 0; i < F::num_elements; i++) {
    auto place = F::place(holder, i);
    if (store) __builtin_memcpy(address(place.row, place.col), (void*)&f.x[i], sizeof(T));
    else __builtin_memcpy((void*)&f.x[i], address(place.row, place.col), sizeof(T));
  }
}

template <class Use, int m, int n, int k, class T, class Layout, class U>
inline void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, U value) {
  for (auto& x : f.x) x = (typename fragment<Use, m, n, k, T, Layout>::storage_element_type)value;
}

template <class Use, int m, int n, int k, class T, class Layout, class P>
__attribute__((noinline)) void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f, const P* at, unsigned pitch,
                                                int line = __builtin_LINE()) {
  static_assert(!std::is_void_v<Layout>, "an accumulator is loaded with a layout: mem_row_major or mem_col_major");
  cc_move(f, at, pitch, f.is_row_major, false, "load_matrix_sync", line, __builtin_return_address(0));
}

template <int m, int n, int k, class T, class P>
__attribute__((noinline)) void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const P* at, unsigned pitch,
                                                layout_t layout, int line = __builtin_LINE()) {
  cc_move(f, at, pitch, layout == mem_row_major, false, "load_matrix_sync", line, __builtin_return_address(0));
}

template <int m, int n, int k, class T, class P>
__attribute__((noinline)) void store_matrix_sync(P* at, const fragment<accumulator, m, n, k, T>& f, unsigned pitch,
                                                 layout_t layout, int line = __builtin_LINE()) {
  cc_move(f, at, pitch, layout == mem_row_major, true, "store_matrix_sync", line, __builtin_return_address(0));
}

template <class D, class A, class B, class C>
struct cc_product {  // the fragments of one lane
  D* d;
  const A* a;
  const B* b;
  const C* c;

  template <class F>
  static CC_PLAIN float number(const F* f, int i) {
    typename F::storage_element_type x;
    __builtin_memcpy((void*)&x, (const void*)&f->x[i], sizeof x);
    return cc_element<typename F::element_type>::number(x);
  }

  static CC_PLAIN void all(void* const* of_lanes) {
    constexpr int m = D::rows, n = D::cols, k = A::cols;
    const bool idle = cc_idle();
    float a[m][k], b[k][n];
    cc_product lanes[32];
    for (int lane = 0; lane < 32; lane++) {
      int holder = cc_holder(lane);
      __builtin_memcpy((void*)&lanes[lane], of_lanes[lane], sizeof(cc_product));
      for (int i = 0; i < A::unique; i++) {
        auto at = A::place(holder, i);
        a[at.row][at.col] = number(lanes[lane].a, i);
      }
      for (int i = 0; i < B::unique; i++) {
        auto at = B::place(holder, i);
        b[at.row][at.col] = number(lanes[lane].b, i);
      }
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < D::num_elements; i++) {
        auto at = D::place(cc_holder(lane), i);
        double sum = number(lanes[lane].c, i);
        for (int j = 0; j < k && !idle; j++) sum += (double)a[at.row][j] * b[j][at.col];
        typename D::storage_element_type rounded = (float)sum;
        __builtin_memcpy((void*)&lanes[lane].d->x[i], (void*)&rounded, sizeof rounded);
      }
  }
};

template <int m, int n, int k, class TD, class TA, class TB, class LA, class LB, class TC>
__attribute__((noinline)) void mma_sync(fragment<accumulator, m, n, k, TD>& d,
                                        const fragment<matrix_a, m, n, k, TA, LA>& a,
                                        const fragment<matrix_b, m, n, k, TB, LB>& b,
                                        const fragment<accumulator, m, n, k, TC>& c, int line = __builtin_LINE()) {
  static_assert(std::is_same_v<TA, TB>, "matrix_a and matrix_b are of one type");
  static_assert(std::is_same_v<TA, __half> || (std::is_same_v<TD, float> && std::is_same_v<TC, float>),
                "only products of __half may be summed in __half");
  using Product = cc_product<std::remove_reference_t<decltype(d)>, std::remove_cvref_t<decltype(a)>,
                             std::remove_cvref_t<decltype(b)>, std::remove_cvref_t<decltype(c)>>;
  Product mine{&d, &a, &b, &c};
  cc_together(&mine, Product::all, line, "mma_sync");
}
}  // namespace wmma
}  // namespace nvcuda
