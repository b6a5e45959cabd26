#include "runtime/attention/rows.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

namespace kiln::runtime::attention {
namespace {

// e^x by range reduction by ln 2 in two parts and a polynomial of degree 5 (Cephes' expf coefficients).
constexpr float kLowest = -104.0f, kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExp[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                          4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

namespace avx512 {
#define KILN_UNIT KILN_AVX512
#define KILN_STEP KILN_UNIT static inline __attribute__((always_inline))
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
  KILN_STEP Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  KILN_STEP Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  KILN_STEP Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  KILN_STEP Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  KILN_STEP Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
  KILN_STEP Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  KILN_STEP Flags none() { return 0; }
  KILN_STEP Flags is_nan(Vector x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  KILN_STEP Flags either(Flags a, Flags b) { return a | b; }
  KILN_STEP bool any(Flags f) { return f != 0; }
  KILN_STEP float sum(Vector x) { return _mm512_reduce_add_ps(x); }
  KILN_STEP float highest(Vector x) { return _mm512_reduce_max_ps(x); }
  KILN_STEP Vector exp(Vector x) {
    const Vector clamped = max(all(kLowest), x);  // x where that is NaN
    const Vector n = _mm512_roundscale_ps(multiply(clamped, all(kLog2E)), 8);
    Vector r = _mm512_fnmadd_ps(n, all(kLn2High), clamped);
    r = _mm512_fnmadd_ps(n, all(kLn2Low), r);
    Vector y = all(kExp[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) y = multiply_add(y, r, all(kExp[i]));
    return _mm512_scalef_ps(multiply_add(y, multiply(r, r), add(r, all(1.0f))), n);
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
  KILN_STEP Mask first(int64_t n) {
    alignas(32) static constexpr int32_t kLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLanes + 8 - std::clamp<int64_t>(n, 0, 8)));
  }
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
  KILN_STEP Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  KILN_STEP Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  KILN_STEP Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
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
  KILN_STEP Vector exp(Vector x) {
    const Vector clamped = max(all(kLowest), x);  // x where that is NaN
    const __m256i k = _mm256_cvtps_epi32(multiply(clamped, all(kLog2E)));
    const Vector n = _mm256_cvtepi32_ps(k);
    Vector r = _mm256_fnmadd_ps(n, all(kLn2High), clamped);
    r = _mm256_fnmadd_ps(n, all(kLn2Low), r);
    Vector y = all(kExp[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) y = multiply_add(y, r, all(kExp[i]));
    y = multiply_add(y, multiply(r, r), add(r, all(1.0f)));
    // 2^k in two factors, as k goes down to -150. NaN has any k, and stays NaN.
    const __m256i half = _mm256_srai_epi32(k, 1);
    return multiply(multiply(y, power(half)), power(_mm256_sub_epi32(k, half)));
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
