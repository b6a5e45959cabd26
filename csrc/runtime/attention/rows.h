#pragma once
#include <cstdint>

namespace kiln::runtime::attention {

/// What attention does with a row of scores beside the products, for one vector unit. NaN is passed on.
struct Rows {
  /// row[0, n) = exp(scale * row - shift); returns the sum. row[n, to) = 0. An error below 1 ulp for exponents up to 0
  /// or so; -inf gives 0.
  float (*exponentiate)(float* row, int64_t n, int64_t to, float scale, float shift);
  /// NaN if there is one.
  float (*highest)(const float* row, int64_t n);
  /// row[0, n) = scale * row + mask; the mask's elements are `step` (0 or 1) apart.
  void (*mask)(float* row, int64_t n, float scale, const float* mask, int64_t step);
  void (*scale)(float* row, int64_t n, float by);
  float (*dot)(const float* a, const float* b, int64_t n);
  /// ds[0, n) = p * (dp - delta) * scale, in place in dp; dp[n, to) = 0.
  void (*score_gradient)(const float* p, float* dp, int64_t n, int64_t to, float delta, float scale);
};

/// For the host's vector unit. Needs gemm::supported().
const Rows& row_functions();

}  // namespace kiln::runtime::attention
