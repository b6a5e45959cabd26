#include "runtime/gemm/gemm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "runtime/gemm/kernels.h"

namespace kiln::runtime::gemm {
namespace {

using Buffer = std::unique_ptr<float[], decltype(&std::free)>;
Buffer aligned(int64_t floats) {
  return {static_cast<float*>(std::aligned_alloc(64, (std::max<int64_t>(floats, 1) * 4 + 63) / 64 * 64)), &std::free};
}

struct Case {
  int64_t m, n, k;
};

// Every edge of the tile in both directions, depths around the block's, and all four storage orders.
TEST(Gemm, EqualsDoublePrecisionProduct) {
  if (!supported()) GTEST_SKIP();
  const Case cases[] = {{1, 1, 1},        {1, 33, 70},  {2, 70, 33},     {3, 17, 200},   {4, 29, 50},   {5, 14, 77},
                        {6, 31, 66},      {7, 23, 90},  {8, 40, 40},     {8, 48, 16},    {7, 47, 33},   {9, 49, 5},
                        {17, 16, 511},    {5, 33, 513}, {64, 100, 1030}, {3, 97, 2},     {40, 15, 100}, {0, 4, 3},
                        {4, 3, 0},        {29, 8, 70},  {26, 5, 600},    {50, 261, 520},  // packed panel by panel
                        {130, 261, 520},   // the same, in pieces of its rows
                        {100, 256, 2100},  // the same, too deep for pieces
                        {1030, 260, 520},  // the same, with a large A
                        {600, 70, 130},    // many blocks of rows, an own copy of B
                        {300, 20, 500},    // the same, with A packed
                        {300, 40, 1801}};  // cut along k, each part in steps
  for (const Case& s : cases)
    for (int order = 0; order < 4; ++order)
      for (int mode = 0; mode < 4; ++mode) {
        const auto [m, n, k] = s;
        std::vector<float> a(m * k + 1), b(k * n + 1), bias(n + 1);
        uint32_t seed = 7;
        auto fill = [&](std::vector<float>& v) {
          for (float& x : v) x = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
        };
        fill(a), fill(b), fill(bias);
        const Matrix ma = order & 1 ? Matrix{a.data(), 1, m} : Matrix{a.data(), k, 1};
        const Matrix mb = order & 2 ? Matrix{b.data(), 1, k} : Matrix{b.data(), n, 1};
        const int64_t ldc = n + 3;
        std::vector<float> c(m * ldc + 1, 2.0f);
        const Epilogue e{mode & 1 ? bias.data() : nullptr, (mode & 2) != 0};
        const bool packs = mode == 1;
        const Buffer work = aligned(packs ? packed_a_floats(m, n, k, ma, 2) : workspace_floats(m, n, k, ma, mb, 2));
        const Buffer packed = aligned(packed_floats(k, n));
        if (packs) {
          pack(k, n, mb, packed.get(), serial);
          multiply_packed(m, n, k, ma, packed.get(), c.data(), ldc, e, work.get(), serial, 2);
        } else {
          multiply(m, n, k, ma, mb, c.data(), ldc, e, work.get(), serial, 2);
        }
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double want = (e.accumulate ? 2.0 : 0.0) + (e.bias ? bias[j] : 0.0);
            for (int64_t p = 0; p < k; ++p)
              want += double(ma.data[i * ma.row + p * ma.col]) * mb.data[p * mb.row + j * mb.col];
            ASSERT_NEAR(c[i * ldc + j], want, 1e-6 * (4 + k)) << m << 'x' << n << 'x' << k << " at " << i << ',' << j;
          }
          for (int64_t j = n; j < ldc; ++j) ASSERT_EQ(c[i * ldc + j], 2.0f) << "wrote past a row";
        }
      }
}

// Lines that begin right behind memory that may not be read and end right before such.
TEST(Gemm, PackingReadsNoFurtherThanItsLines) {
  if (!supported()) GTEST_SKIP();
  const int64_t page = sysconf(_SC_PAGESIZE), floats = page / 4;
  char* const memory =
      static_cast<char*>(mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  float* const middle = reinterpret_cast<float*>(memory + page);
  for (int64_t i = 0; i < floats; ++i) middle[i] = static_cast<float>(i);
  ASSERT_EQ(mprotect(memory, page, PROT_NONE), 0);
  ASSERT_EQ(mprotect(memory + 2 * page, page, PROT_NONE), 0);
  for (const int64_t tiles : {1, 3})
    for (const int64_t step : {int64_t{3}, int64_t{6}, 6 * tiles, 6 * tiles + 5})
      for (const int64_t lines : {1, 3, 4, 5, 8, 11})
        for (const bool last : {false, true}) {
          const float* const src = last ? middle + floats - (lines - 1) * step - 6 * tiles : middle;
          std::vector<float> to(tiles * lines * 6 + 1, -1.0f);
          pack_sixes(src, step, lines, tiles, lines, false, to.data());
          for (int64_t t = 0; t < tiles; ++t)
            for (int64_t l = 0; l < lines; ++l)
              for (int64_t i = 0; i < 6; ++i) ASSERT_EQ(to[(t * lines + l) * 6 + i], src[l * step + t * 6 + i]);
          EXPECT_EQ(to.back(), -1.0f);
        }
  munmap(memory, 3 * page);
}

// Of a matrix whose rows or columns are all the same line of memory nothing behind that line may be read.
TEST(Gemm, ExpandedOperands) {
  if (!supported()) GTEST_SKIP();
  for (const auto& [m, n, k] : {Case{12, 32, 40}, Case{12, 32, 600}, Case{12, 300, 500}}) {
    const std::vector<float> line(std::max(n, k), 1.0f);
    for (const Matrix& a : {Matrix{line.data(), 1, 0}, Matrix{line.data(), 0, 1}, Matrix{line.data(), 0, 0}})
      for (const Matrix& b : {Matrix{line.data(), 1, 0}, Matrix{line.data(), 0, 1}}) {
        std::vector<float> c(m * n);
        const Buffer work = aligned(workspace_floats(m, n, k, a, b, 2));
        multiply(m, n, k, a, b, c.data(), n, Epilogue{}, work.get(), serial, 2);
        for (float x : c) ASSERT_EQ(x, static_cast<float>(k));
      }
  }
}

}  // namespace
}  // namespace kiln::runtime::gemm
