#include "runtime/gemm/split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/gemm/amx.h"

namespace kiln::runtime::gemm {
namespace {

using Buffer = std::unique_ptr<float[], decltype(&std::free)>;
Buffer aligned(int64_t floats) {
  return {static_cast<float*>(std::aligned_alloc(64, (std::max<int64_t>(floats, 1) * 4 + 63) / 64 * 64)), &std::free};
}

std::vector<float> numbers(int64_t n, uint32_t seed) {
  std::vector<float> v(n);
  for (float& x : v) x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
  return v;
}

struct Operands {
  int64_t m, n, k;
  std::vector<float> a, b, bias;
  Matrix ma, mb;
  Operands(int64_t m, int64_t n, int64_t k, int order)
      : m(m), n(n), k(k), a(numbers(m * k, 7)), b(numbers(k * n, 11)), bias(numbers(n, 13)) {
    ma = order & 1 ? Matrix{a.data(), 1, m} : Matrix{a.data(), k, 1};
    mb = order & 2 ? Matrix{b.data(), 1, k} : Matrix{b.data(), n, 1};
  }
  /// The exact element, and the sum of the magnitudes of its products.
  std::pair<double, double> at(int64_t i, int64_t j) const {
    double sum = 0, size = 0;
    for (int64_t p = 0; p < k; ++p) {
      const double x = double(ma.data[i * ma.row + p * ma.col]) * mb.data[p * mb.row + j * mb.col];
      sum += x, size += std::abs(x);
    }
    return {sum, size};
  }
  std::vector<float> multiply(const Epilogue& e, int64_t ldc, bool packs, int threads = 2,
                              const Parallel& parallel = serial) const {
    std::vector<float> c(m * ldc + 1, 2.0f);
    if (packs) {
      const Buffer packed = aligned(split_floats(k, n));
      pack_split(k, n, mb, packed.get(), parallel);
      multiply_split_packed(m, n, k, ma, mb, packed.get(), c.data(), ldc, e, parallel, threads);
    } else {
      const Buffer work = aligned(split_workspace_floats(n, k));
      multiply_split(m, n, k, ma, mb, c.data(), ldc, e, work.get(), parallel, threads);
    }
    return c;
  }
};

// Edges of tiles in all directions, one and several blocks of k, chunks of B, all storage orders, every epilogue.
TEST(Split, EqualsDoublePrecisionProduct) {
  if (!amx::supported()) GTEST_SKIP();
  const int64_t cases[][3] = {{1, 1, 1},     {16, 16, 32},  {17, 15, 33},    {32, 48, 256},   {33, 50, 257},
                              {64, 20, 600}, {300, 70, 40}, {48, 1030, 300}, {5, 2100, 1100}, {20, 130, 20000}};
  for (const auto& [m, n, k] : cases)
    for (int order = 0; order < 4; ++order)
      for (int mode = 0; mode < 4; ++mode) {
        const Operands o(m, n, k, order);
        const Epilogue e{mode & 1 ? o.bias.data() : nullptr, (mode & 2) != 0};
        const int64_t ldc = n + 3;
        const std::vector<float> c = o.multiply(e, ldc, mode == 1);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; j += std::max<int64_t>(1, m * n / 20000)) {
            auto [want, size] = o.at(i, j);
            want += (e.accumulate ? 2.0 : 0.0) + (e.bias ? o.bias[j] : 0.0);
            // As exact as float32 arithmetic, whatever k is.
            ASSERT_NEAR(c[i * ldc + j], want, 2e-7 * (size + 2))
                << m << 'x' << n << 'x' << k << " order " << order << " mode " << mode << " at " << i << ',' << j;
          }
          for (int64_t j = n; j < ldc; ++j) ASSERT_EQ(c[i * ldc + j], 2.0f) << "wrote past a row";
        }
      }
}

// What three bfloat16 do not hold, or the unit takes for zero, is multiplied as floats are.
TEST(Split, NumbersThatDoNotSplit) {
  if (!amx::supported()) GTEST_SKIP();
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float special : {kInf, -kInf, kNan, 3.4e38f, 1e-40f, 1e-30f, 1e-29f})
    for (int order = 0; order < 4; ++order)
      for (const bool right : {false, true}) {
        Operands o(40, 40, 300, order);
        if (std::isfinite(special)) {  // all of them: units of another scale
          for (float& x : right ? o.b : o.a) x *= special;
          if (special > 1)
            for (float& x : right ? o.a : o.b) x *= 1e-30f;
        } else {
          (right ? o.b : o.a)[5] = special;
        }
        const std::vector<float> c = o.multiply({}, o.n, false);
        for (int64_t i = 0; i < o.m; ++i)
          for (int64_t j = 0; j < o.n; ++j) {
            const auto [want, size] = o.at(i, j);
            const float got = c[i * o.n + j];
            if (std::isnan(want))
              ASSERT_TRUE(std::isnan(got)) << special;
            else if (std::isinf(want))
              ASSERT_EQ(got, want) << special;
            else
              ASSERT_NEAR(got, want, 1e-6 * size + 1.5e-45 * o.k) << special;
          }
      }
}

TEST(Split, TheSameNumbersWhateverTheTasks) {
  if (!amx::supported()) GTEST_SKIP();
  const Operands o(200, 700, 520, 2);
  const std::vector<float> want = o.multiply({o.bias.data()}, o.n, false, 1);
  for (const int threads : {2, 3, 16})
    for (const bool packs : {false, true}) EXPECT_EQ(o.multiply({o.bias.data()}, o.n, packs, threads), want);
}

TEST(Split, RowsAreDoneOnceAndFinal) {
  if (!amx::supported()) GTEST_SKIP();
  const Parallel threads = [](int64_t tasks, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> all;
    for (int64_t t = 0; t < tasks; ++t) all.emplace_back([&, t] { body(t); });
    for (std::thread& t : all) t.join();
  };
  for (const int64_t m : {50, 64, 400}) {
    const Operands o(m, 200, 300, 0);
    const std::vector<float> want = o.multiply({}, o.n, false);
    std::vector<float> c(o.m * o.n);
    std::vector<int> told(o.m);
    std::mutex mutex;
    const RowsDone done = [&](int64_t begin, int64_t end) {
      const std::lock_guard lock(mutex);
      for (int64_t i = begin; i < end; ++i) {
        ++told[i];
        for (int64_t j = 0; j < o.n; ++j) ASSERT_EQ(c[i * o.n + j], want[i * o.n + j]);
      }
    };
    const Buffer work = aligned(split_workspace_floats(o.n, o.k));
    multiply_split(o.m, o.n, o.k, o.ma, o.mb, c.data(), o.n, {nullptr, false, &done}, work.get(), threads, 4);
    EXPECT_EQ(told, std::vector<int>(o.m, 1));
  }
}

// Of a matrix whose rows or columns are all the same line of memory nothing behind that line may be read.
TEST(Split, ExpandedOperands) {
  if (!amx::supported()) GTEST_SKIP();
  constexpr int64_t m = 40, n = 50, k = 300;
  const Buffer line = aligned(k);
  std::fill(line.get(), line.get() + k, 1.0f);
  for (const Matrix& a : {Matrix{line.get(), 1, 0}, Matrix{line.get(), 0, 1}, Matrix{line.get(), 0, 0}})
    for (const Matrix& b : {Matrix{line.get(), 1, 0}, Matrix{line.get(), 0, 1}}) {
      std::vector<float> c(m * n);
      const Buffer work = aligned(split_workspace_floats(n, k));
      multiply_split(m, n, k, a, b, c.data(), n, Epilogue{}, work.get(), serial, 2);
      for (float x : c) ASSERT_EQ(x, static_cast<float>(k));
    }
}

// Who had configured the tiles finds them as they were.
TEST(Split, TilesComeBackAsTheyWere) {
  if (!amx::supported()) GTEST_SKIP();
  alignas(64) uint8_t theirs[64] = {1}, now[64];
  theirs[16] = 32, theirs[48] = 7;
  asm volatile("ldtilecfg %0" ::"m"(theirs) : "memory");
  {
    const amx::Tiles ours;
  }
  asm volatile("sttilecfg %0" : "=m"(now)::"memory");
  asm volatile("tilerelease" ::: "memory");
  for (int i = 0; i < 64; ++i) EXPECT_EQ(now[i], theirs[i]);
}

}  // namespace
}  // namespace kiln::runtime::gemm
