#include "runtime/gemm/few_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/half.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

namespace kiln::runtime::gemm {
namespace {

// Lines of B at a time: so many streams the hardware's prefetchers follow, each load of A serves as many, and the sums
// have registers.
constexpr int kMostSums = 24;  // rows times lines
constexpr int lines_of(int lanes, int rows) {
  return lanes == 16 ? std::min(8, kMostSums / rows) : std::max(1, std::min(4, 12 / rows));
}

template <int kLanes>
KILN_INLINE const typename Lanes<kLanes>::type& load(const float* from) {
  return *reinterpret_cast<const typename Lanes<kLanes>::type*>(from);
}

template <int kLanes>
struct Words {
  typedef uint16_t narrow __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  typedef uint32_t wide __attribute__((vector_size(kLanes * 4), may_alias));
};
/// Elements of B that are no floats, by their bits.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
template <int kLanes>
KILN_INLINE typename Words<kLanes>::wide words(const void* from) {
  return __builtin_convertvector(*static_cast<const typename Words<kLanes>::narrow*>(from),
                                 typename Words<kLanes>::wide);
}
template <int kLanes>
KILN_INLINE typename Lanes<kLanes>::type load(const Brain* from) {
  const auto bits = words<kLanes>(from) << 16;
  typename Lanes<kLanes>::type v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}
/// The instruction by name: GCC makes one conversion for each number of it. Whoever has AVX2 has it.
template <int kLanes>
KILN_INLINE typename Lanes<kLanes>::type load(const Half* from) {
  typename Lanes<kLanes>::type v;
  asm("vcvtph2ps %1, %0" : "=v"(v) : "m"(*reinterpret_cast<const typename Words<kLanes>::narrow*>(from)));
  return v;
}
KILN_INLINE float number(const float* from) { return *from; }
KILN_INLINE float number(const Brain* from) { return bf16_to_float(from->bits); }
KILN_INLINE float number(const Half* from) { return half_to_float(from->bits); }

template <int kLanes>
KILN_INLINE float sum_of(const typename Lanes<kLanes>::type& v) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    typename Lanes<kLanes / 2>::type low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return sum_of<kLanes / 2>(low + high);
  }
}

/// Rows of A and lines of B: `row` and `line` elements apart, `length` long.
template <class T = float>
struct Pairs {
  const float* a;
  int64_t row;
  const T* b;
  int64_t line, length;
};

/// sums[i * kCount + j]: row i of A times line j of B.
template <int kLanes, int kRows, int kCount, class T>
KILN_INLINE void dots(const Pairs<T>& p, float* sums) {
  typename Lanes<kLanes>::type sum[kRows][kCount] = {};
  int64_t at = 0;
  for (; at + kLanes <= p.length; at += kLanes) {
    typename Lanes<kLanes>::type x[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) x[i] = load<kLanes>(p.a + i * p.row + at);
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      const auto w = load<kLanes>(p.b + j * p.line + at);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i][j] += x[i] * w;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      float total = sum_of<kLanes>(sum[i][j]);
      for (int64_t q = at; q < p.length; ++q) total += p.a[i * p.row + q] * number(p.b + j * p.line + q);
      sums[i * kCount + j] = total;
    }
}

/// Adds to y[i * length + q] the sum over kCount lines of a[i * row + j] * b[j * line + q].
template <int kLanes, int kRows, int kCount>
KILN_INLINE void add_lines(const Pairs<>& p, float* y) {
  using Vector = typename Lanes<kLanes>::type;
  int64_t q = 0;
  for (; q + kLanes <= p.length; q += kLanes) {
    Vector sum[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) sum[i] = load<kLanes>(y + i * p.length + q);
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      const Vector w = load<kLanes>(p.b + j * p.line + q);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i] += p.a[i * p.row + j] * w;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) *reinterpret_cast<Vector*>(y + i * p.length + q) = sum[i];
  }
  for (; q < p.length; ++q)
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kCount; ++j) y[i * p.length + q] += p.a[i * p.row + j] * p.b[j * p.line + q];
}

/// One of the two, with lines_of() lines of B or with one.
enum class Form { Dots, AddLines };
template <Form kForm, int kLanes, int kRows, bool kMany, class T>
KILN_INLINE void run(const Pairs<T>& p, float* to) {
  constexpr int kCount = kMany ? lines_of(kLanes, kRows) : 1;
  if constexpr (kForm == Form::Dots)
    dots<kLanes, kRows, kCount>(p, to);
  else
    add_lines<kLanes, kRows, kCount>(p, to);
}
template <Form kForm, int kRows, bool kMany, class T>
KILN_AVX512 void run512(const Pairs<T>& p, float* to) {
  run<kForm, 16, kRows, kMany>(p, to);
}
template <Form kForm, int kRows, bool kMany, class T>
KILN_AVX2 void run256(const Pairs<T>& p, float* to) {
  run<kForm, 8, kRows, kMany>(p, to);
}

template <class T>
using Run = void (*)(const Pairs<T>&, float*);
template <int kLanes, Form kForm, int kRows, bool kMany, class T>
constexpr Run<T> kRun = kLanes == 16 ? run512<kForm, kRows, kMany, T> : run256<kForm, kRows, kMany, T>;

/// What one vector unit does with so many rows: with one line, with `lines`.
template <class T>
struct Dots {
  Run<T> run[2];
  int64_t lines;
};
template <int kLanes, class T, size_t... kRows>
constexpr std::array<Dots<T>, kFewRows> all_dots(std::index_sequence<kRows...>) {
  return {Dots<T>{{kRun<kLanes, Form::Dots, kRows + 1, false, T>, kRun<kLanes, Form::Dots, kRows + 1, true, T>},
                  lines_of(kLanes, kRows + 1)}...};
}
template <class T>
const Dots<T>& dots_of(int64_t rows) {
  static constexpr auto k512 = all_dots<16, T>(std::make_index_sequence<kFewRows>{}),
                        k256 = all_dots<8, T>(std::make_index_sequence<kFewRows>{});
  return (has_avx512() ? k512 : k256)[rows - 1];
}
template <int kLanes, size_t... kRows>
constexpr std::array<std::array<Run<float>, 2>, kFewRows> all_adds(std::index_sequence<kRows...>) {
  return {std::array<Run<float>, 2>{kRun<kLanes, Form::AddLines, kRows + 1, false, float>,
                                    kRun<kLanes, Form::AddLines, kRows + 1, true, float>}...};
}
constexpr auto kAdds512 = all_adds<16>(std::make_index_sequence<kFewRows>{}),
               kAdds256 = all_adds<8>(std::make_index_sequence<kFewRows>{});

/// A column of C is a dot product with a line of B: done(i, j, sum) for each.
template <class T, class F>
void dot_lines(int64_t m, int64_t n, const Pairs<T>& all, const Parallel& parallel, int threads, const F& done) {
  const Dots<T>& kernels = dots_of<T>(m);
  const int64_t lines = kernels.lines, blocks = ceil_div(n, lines);
  const int64_t tasks = std::min<int64_t>(blocks, int64_t{4} * threads);
  parallel(tasks, [&](int64_t task) {
    const int64_t end = std::min(n, blocks * (task + 1) / tasks * lines);
    float sums[kMostSums];
    for (int64_t j = blocks * task / tasks * lines; j < end;) {
      const int64_t count = j + lines <= end ? lines : 1;
      kernels.run[count > 1]({all.a, all.row, all.b + j * all.line, all.line, all.length}, sums);
      for (int64_t i = 0; i < m; ++i)
        for (int64_t v = 0; v < count; ++v) done(i, j + v, sums[i * count + v]);
      j += count;
    }
  });
}

uint16_t rounded(float v, Brain) { return float_to_bf16(v); }
uint16_t rounded(float v, Half) { return float_to_half(v); }

template <class T>
void multiply_few(int64_t m, int64_t n, int64_t k, const HalfProduct& p, float* workspace, const Parallel& parallel,
                  int threads) {
  const auto at = [](const uint16_t* from) { return number(reinterpret_cast<const T*>(from)); };
  for (int64_t i = 0; i < m; ++i)
    for (int64_t q = 0; q < k; ++q) workspace[i * k + q] = at(p.a + i * p.row + q);
  const Pairs<T> all{workspace, k, reinterpret_cast<const T*>(p.b), p.line, k};
  dot_lines(m, n, all, parallel, threads, [&](int64_t i, int64_t j, float sum) {
    p.c[i * p.ldc + j] = rounded(p.bias ? sum + at(p.bias + j) : sum, T{});
  });
}

int64_t parts_of(int64_t k, int threads) { return std::clamp<int64_t>(k / 32, 1, int64_t{4} * threads); }

}  // namespace

bool has_few_rows(int64_t m, const Matrix& a, const Matrix& b) {
  return m <= kFewRows && a.col == 1 && (b.row == 1 || b.col == 1);
}

int64_t few_rows_floats(int64_t m, int64_t n, int64_t k, const Matrix& b, int threads) {
  return b.row == 1 ? 0 : parts_of(k, threads) * m * n;
}

void multiply_few_rows(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                       const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads) {
  if (b.row == 1)
    return dot_lines(m, n, Pairs<>{a.data, a.row, b.data, b.col, k}, parallel, threads,
                     [&](int64_t i, int64_t j, float sum) {
                       float& at = c[i * ldc + j];
                       at = epilogue.applied(sum, at, j);
                     });
  const auto& adds = (has_avx512() ? kAdds512 : kAdds256)[static_cast<size_t>(m - 1)];
  const int64_t lines = lines_of(has_avx512() ? 16 : 8, static_cast<int>(m));
  // Every line of B adds to all of C: a part of the lines to one of several copies, which are added up in their order.
  const int64_t parts = parts_of(k, threads);
  parallel(parts, [&](int64_t part) {
    float* const y = workspace + part * m * n;
    std::fill_n(y, m * n, 0.0f);
    const int64_t end = k * (part + 1) / parts;
    for (int64_t p = k * part / parts; p < end;) {
      const int64_t count = p + lines <= end ? lines : 1;
      adds[count > 1]({a.data + p, a.row, b.data + p * b.row, b.row, n}, y);
      p += count;
    }
  });
  add_parts(workspace, m * n, parts, 0, m, n, c, ldc, epilogue);
}

void multiply_few_half_rows(bool brain, int64_t m, int64_t n, int64_t k, const HalfProduct& product, float* workspace,
                            const Parallel& parallel, int threads) {
  (brain ? multiply_few<Brain> : multiply_few<Half>)(m, n, k, product, workspace, parallel, threads);
}

}  // namespace kiln::runtime::gemm
