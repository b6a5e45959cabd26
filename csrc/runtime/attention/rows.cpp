#include "runtime/attention/rows.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "runtime/gemm/avx2.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

namespace kiln::runtime::attention {
namespace {

namespace avx512 {
#define KILN_UNIT KILN_AVX512
#define KILN_STEP KILN_UNIT static KILN_INLINE
struct Unit {
  using Vector = __m512;
  using Mask = __mmask16;
  using Flags = __mmask16;
  static constexpr int64_t kLanes = 16;
  KILN_STEP Mask first(int64_t n) { return static_cast<Mask>((1u << std::clamp<int64_t>(n, 0, 16)) - 1); }
  KILN_STEP Vector all(float x) { return _mm512_set1_ps(x); }
  KILN_STEP Vector load(const float* p) { return _mm512_loadu_ps(p); }
  KILN_STEP Vector load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
  KILN_STEP Vector load_over(Vector x, const float* p, Mask m) { return _mm512_mask_loadu_ps(x, m, p); }
  KILN_STEP void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
  KILN_STEP void store(float* p, Vector x, Mask m) { _mm512_mask_storeu_ps(p, m, x); }
  KILN_STEP Vector kept(Vector x, Mask m) { return _mm512_maskz_mov_ps(m, x); }
  KILN_STEP Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  KILN_STEP Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
  KILN_STEP Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  KILN_STEP Flags none() { return 0; }
  KILN_STEP Flags is_nan(Vector x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  KILN_STEP Flags either(Flags a, Flags b) { return a | b; }
  KILN_STEP bool any(Flags f) { return f != 0; }
  KILN_STEP float sum(Vector x) { return _mm512_reduce_add_ps(x); }
  KILN_STEP float highest(Vector x) { return _mm512_reduce_max_ps(x); }
  KILN_STEP Vector subtract_product(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(b, c, a); }
  KILN_STEP Vector nearest(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  KILN_STEP Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }
  /// `y`, or 0 where x is below the limit.
  KILN_STEP Vector zero_below(Vector limit, Vector x, Vector y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
  }
};
#include "runtime/attention/rows.inc"
#undef KILN_UNIT
}  // namespace avx512

namespace avx2 {
#define KILN_UNIT KILN_AVX2
struct Unit {
  using Vector = __m256;
  using Mask = __m256i;
  using Flags = __m256;
  static constexpr int64_t kLanes = 8;
  KILN_STEP Mask first(int64_t n) { return gemm::first_lanes(n); }
  KILN_STEP Vector all(float x) { return _mm256_set1_ps(x); }
  KILN_STEP Vector load(const float* p) { return _mm256_loadu_ps(p); }
  KILN_STEP Vector load(const float* p, Mask m) { return _mm256_maskload_ps(p, m); }
  KILN_STEP Vector load_over(Vector x, const float* p, Mask m) {
    return _mm256_blendv_ps(x, _mm256_maskload_ps(p, m), _mm256_castsi256_ps(m));
  }
  KILN_STEP void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
  KILN_STEP void store(float* p, Vector x, Mask m) {
    if (_mm256_movemask_ps(_mm256_castsi256_ps(m)) == 0xff)  // a masked store takes AMD's cores several times as long
      _mm256_storeu_ps(p, x);
    else
      _mm256_maskstore_ps(p, m, x);
  }
  KILN_STEP Vector kept(Vector x, Mask m) { return _mm256_and_ps(x, _mm256_castsi256_ps(m)); }
  KILN_STEP Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  KILN_STEP Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
  KILN_STEP Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  KILN_STEP Flags none() { return _mm256_setzero_ps(); }
  KILN_STEP Flags is_nan(Vector x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
  KILN_STEP Flags either(Flags a, Flags b) { return _mm256_or_ps(a, b); }
  KILN_STEP bool any(Flags f) { return _mm256_movemask_ps(f) != 0; }
  KILN_STEP float sum(Vector x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  KILN_STEP float highest(Vector x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  KILN_STEP Vector subtract_product(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(b, c, a); }
  KILN_STEP Vector nearest(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  KILN_STEP Vector times_power(Vector x, Vector n) {
    // In two factors, as n goes down to -150. NaN has any n, and stays NaN.
    const __m256i k = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(k, 1);
    return x * power(half) * power(_mm256_sub_epi32(k, half));
  }
  KILN_STEP Vector zero_below(Vector limit, Vector x, Vector y) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
  }

 private:
  KILN_STEP Vector power(__m256i k) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23));
  }
};
#include "runtime/attention/rows.inc"
#undef KILN_STEP
#undef KILN_UNIT
}  // namespace avx2

}  // namespace

const Rows& row_functions() { return gemm::has_avx512() ? avx512::kRows : avx2::kRows; }

}  // namespace kiln::runtime::attention
#pragma GCC diagnostic pop
