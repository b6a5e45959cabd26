#include "runtime/gemm/few_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

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

/// Rows of A and lines of B: `row` and `line` floats apart, `length` long.
struct Pairs {
  const float* a;
  int64_t row;
  const float* b;
  int64_t line, length;
};

/// sums[i * kCount + j]: row i of A times line j of B.
template <int kLanes, int kRows, int kCount>
KILN_INLINE void dots(const Pairs& p, float* sums) {
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
      for (int64_t q = at; q < p.length; ++q) total += p.a[i * p.row + q] * p.b[j * p.line + q];
      sums[i * kCount + j] = total;
    }
}

/// Adds to y[i * length + q] the sum over kCount lines of a[i * row + j] * b[j * line + q].
template <int kLanes, int kRows, int kCount>
KILN_INLINE void add_lines(const Pairs& p, float* y) {
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
template <Form kForm, int kLanes, int kRows, bool kMany>
KILN_INLINE void run(const Pairs& p, float* to) {
  constexpr int kCount = kMany ? lines_of(kLanes, kRows) : 1;
  if constexpr (kForm == Form::Dots)
    dots<kLanes, kRows, kCount>(p, to);
  else
    add_lines<kLanes, kRows, kCount>(p, to);
}
template <Form kForm, int kRows, bool kMany>
KILN_AVX512 void run512(const Pairs& p, float* to) {
  run<kForm, 16, kRows, kMany>(p, to);
}
template <Form kForm, int kRows, bool kMany>
KILN_AVX2 void run256(const Pairs& p, float* to) {
  run<kForm, 8, kRows, kMany>(p, to);
}

using Run = void (*)(const Pairs&, float*);
template <int kLanes, Form kForm, int kRows, bool kMany>
constexpr Run kRun = kLanes == 16 ? run512<kForm, kRows, kMany> : run256<kForm, kRows, kMany>;

/// What one vector unit does with so many rows.
struct Kernels {
  Run dots[2], add[2];  // with one line, with `lines`
  int64_t lines;
};
template <int kLanes, size_t... kRows>
constexpr std::array<Kernels, kFewRows> all_of(std::index_sequence<kRows...>) {
  return {Kernels{{kRun<kLanes, Form::Dots, kRows + 1, false>, kRun<kLanes, Form::Dots, kRows + 1, true>},
                  {kRun<kLanes, Form::AddLines, kRows + 1, false>, kRun<kLanes, Form::AddLines, kRows + 1, true>},
                  lines_of(kLanes, kRows + 1)}...};
}
constexpr std::array<Kernels, kFewRows> kKernels512 = all_of<16>(std::make_index_sequence<kFewRows>{}),
                                        kKernels256 = all_of<8>(std::make_index_sequence<kFewRows>{});

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
  const Kernels& kernels = (has_avx512() ? kKernels512 : kKernels256)[m - 1];
  const int64_t lines = kernels.lines;
  if (b.row == 1) {  // a column of C is a dot product with a line of B
    const int64_t blocks = ceil_div(n, lines), tasks = std::min<int64_t>(blocks, int64_t{4} * threads);
    return parallel(tasks, [&](int64_t task) {
      const int64_t end = std::min(n, blocks * (task + 1) / tasks * lines);
      float sums[kMostSums];
      for (int64_t j = blocks * task / tasks * lines; j < end;) {
        const int64_t count = j + lines <= end ? lines : 1;
        kernels.dots[count > 1]({a.data, a.row, b.data + j * b.col, b.col, k}, sums);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t v = 0; v < count; ++v) {
            float& at = c[i * ldc + j + v];
            at = epilogue.applied(sums[i * count + v], at, j + v);
          }
        j += count;
      }
    });
  }
  // Every line of B adds to all of C: a part of the lines to one of several copies, which are added up in their order.
  const int64_t parts = parts_of(k, threads);
  parallel(parts, [&](int64_t part) {
    float* const y = workspace + part * m * n;
    std::fill_n(y, m * n, 0.0f);
    const int64_t end = k * (part + 1) / parts;
    for (int64_t p = k * part / parts; p < end;) {
      const int64_t count = p + lines <= end ? lines : 1;
      kernels.add[count > 1]({a.data + p, a.row, b.data + p * b.row, b.row, n}, y);
      p += count;
    }
  });
  add_parts(workspace, m * n, parts, 0, m, n, c, ldc, epilogue);
}

}  // namespace kiln::runtime::gemm
