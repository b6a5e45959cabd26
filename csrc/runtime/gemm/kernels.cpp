#include "runtime/gemm/kernels.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning on every shuffle.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <array>
#include <utility>

#include "runtime/gemm/target.h"

namespace kiln::runtime::gemm {
namespace {

// 24 accumulators, 4 of B, 1 broadcast: 29 of 32 registers. Of the tiles with so many accumulators it has the fewest
// loads for a multiplication, 10 for 24 (8 x 48: 11), and a neighbour on the core leaves about one load a cycle.
constexpr Tile kTile512{6, 64};
constexpr Tile kTile256{6, 16};  // 12 accumulators, 2 of B, 1 broadcast: 15 of 16 registers
// With one or two vectors of columns, six rows are too few accumulators to hide the latency of an addition, and what a
// tile costs beside its multiplications counts for more.
constexpr int64_t kTallRows512 = 12, kTallColumns512 = 32;
static_assert(kTallRows512 == kMaxTileRows);

// R rows by V vectors of columns; both are template parameters so that every accumulator is a register. Four steps
// are unrolled and no operand is prefetched: where a neighbour on the core's other hardware thread takes issue slots,
// each instruction that multiplies nothing costs; measured 1.3 times faster there than a plain loop, and as fast alone.
template <int R, int V>
KILN_AVX512 inline __attribute__((always_inline)) void step512(const float* const (&a)[R], int64_t at, const float* b,
                                                               __m512 (&acc)[R][V]) {
  __m512 row[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) row[v] = _mm512_load_ps(b + 16 * v);
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    const __m512 x = _mm512_set1_ps(a[i][at]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[i][v] = _mm512_fmadd_ps(x, row[v], acc[i][v]);
  }
}

/// `length` steps; kStep is the stride of a step in A if that is known, else 0.
template <int R, int V, int kStep>
KILN_AVX512 inline __attribute__((always_inline)) const float* run512(const float* const (&a)[R], int64_t length,
                                                                      int64_t stride, const float* b,
                                                                      __m512 (&acc)[R][V]) {
  const int64_t step = kStep ? kStep : stride, whole = length / 4 * 4 * step, end = length * step;
  int64_t p = 0;
  for (; p < whole; b += 4 * 16 * V) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u, p += step) {
      step512<R, V>(a, p, b + u * 16 * V, acc);
      if constexpr (R > kTile512.mr) asm("" : "+r"(p));  // one index for all steps: registers for it are scarce
    }
  }
  for (; p < end; p += step, b += 16 * V) step512<R, V>(a, p, b, acc);
  return b;
}

// A tile's rows of C are asked for, with the right to write, before its steps begin: the wait for them, which is long
// where C is large or just allocated, passes meanwhile. 1.6 times faster on a product with 50257 columns.
template <int R, int V>
KILN_AVX512 void micro512(const Left& left, const float* panel, const Store& s) {
  const float* b = panel;
  __m512 acc[R][V];
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      acc[i][v] = _mm512_setzero_ps();
      __builtin_prefetch(s.c[i] + 16 * v, 1);
    }
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) __builtin_prefetch(s.c[i] + 16 * V - 1, 1);
  for (int64_t g = 0; g < left.segments; ++g) {
    const float* a[R];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) a[i] = left.rows[g * kMaxTileRows + i];
    if (left.starts) b = panel + left.starts[g] * 16 * V;
    b = left.step == 1 ? run512<R, V, 1>(a, left.lengths[g], 1, b, acc)
                       : run512<R, V, 0>(a, left.lengths[g], left.step, b, acc);
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const int64_t rest = s.cols - 16 * v;
    const __mmask16 mask = rest >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << rest) - 1);
    const __m512 bias = s.bias ? _mm512_maskz_loadu_ps(mask, s.bias + 16 * v) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
      float* c = s.c[i] + 16 * v;
      __m512 x = acc[i][v];
      if (s.accumulate) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, c));
      if (s.bias) x = _mm512_add_ps(x, bias);
      _mm512_mask_storeu_ps(c, mask, x);
    }
  }
}

// Of up to eight columns. Half a vector: where a core multiplies 16 floats a cycle, as two halves or one whole, the
// other half would be lost.
template <int R>
KILN_AVX512 void micro8(const Left& left, const float* panel, const Store& s) {
  const float* b = panel;
  __m256 acc[R];
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    acc[i] = _mm256_setzero_ps();
    __builtin_prefetch(s.c[i], 1);
  }
  for (int64_t g = 0; g < left.segments; ++g) {
    const float* a[R];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) a[i] = left.rows[g * kMaxTileRows + i];
    if (left.starts) b = panel + left.starts[g] * 8;
    for (int64_t k = 0, p = 0; k < left.lengths[g]; ++k, p += left.step, b += 8) {
      const __m256 row = _mm256_load_ps(b);
#pragma GCC unroll 12
      for (int i = 0; i < R; ++i) acc[i] = _mm256_fmadd_ps(_mm256_set1_ps(a[i][p]), row, acc[i]);
    }
  }
  const auto mask = static_cast<__mmask8>(s.cols >= 8 ? 0xff : (1u << s.cols) - 1);
  const __m256 bias = s.bias ? _mm256_maskz_loadu_ps(mask, s.bias) : _mm256_setzero_ps();
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    __m256 x = acc[i];
    if (s.accumulate) x = _mm256_add_ps(x, _mm256_maskz_loadu_ps(mask, s.c[i]));
    if (s.bias) x = _mm256_add_ps(x, bias);
    _mm256_mask_storeu_ps(s.c[i], mask, x);
  }
}

template <int R>
KILN_AVX2 void micro256(const Left& left, const float* panel, const Store& s) {
  const float* b = panel;
  __m256 acc[R][2];
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    __builtin_prefetch(s.c[i], 1);
    __builtin_prefetch(s.c[i] + 15, 1);
  }
  for (int64_t g = 0; g < left.segments; ++g) {
    const float* a[R];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) a[i] = left.rows[g * kMaxTileRows + i];
    if (left.starts) b = panel + left.starts[g] * 16;
    const int64_t end = left.lengths[g] * left.step;
    for (int64_t p = 0; p < end; p += left.step) {
      const __m256 b0 = _mm256_load_ps(b), b1 = _mm256_load_ps(b + 8);
#pragma GCC unroll 12
      for (int i = 0; i < R; ++i) {
        const __m256 x = _mm256_broadcast_ss(a[i] + p);
        acc[i][0] = _mm256_fmadd_ps(x, b0, acc[i][0]);
        acc[i][1] = _mm256_fmadd_ps(x, b1, acc[i][1]);
      }
      b += 16;
    }
  }
  alignas(32) float row[16];
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    _mm256_store_ps(row, acc[i][0]);
    _mm256_store_ps(row + 8, acc[i][1]);
    float* c = s.c[i];
    for (int64_t j = 0; j < s.cols && j < 16; ++j) {
      float x = row[j];
      if (s.accumulate) x += c[j];
      c[j] = s.bias ? x + s.bias[j] : x;
    }
  }
}

// By the number of rows: 1 .. sizeof...(kRows).
template <int V, size_t... kRows>
constexpr std::array<Micro, kMaxTileRows + 1> rows512(std::index_sequence<kRows...>) {
  return {nullptr, micro512<kRows + 1, V>...};
}
using Tall = std::make_index_sequence<kTallRows512>;
using Usual = std::make_index_sequence<kTile512.mr>;
// Tiles at the lower and right edge cost what their rows and vectors cost, not a whole tile's.
constexpr std::array<std::array<Micro, kMaxTileRows + 1>, 4> kMicro512 = {rows512<1>(Tall{}), rows512<2>(Tall{}),
                                                                          rows512<3>(Usual{}), rows512<4>(Usual{})};
template <size_t... kRows>
constexpr std::array<Micro, kMaxTileRows + 1> rows8(std::index_sequence<kRows...>) {
  return {nullptr, micro8<kRows + 1>...};
}
constexpr std::array<Micro, kMaxTileRows + 1> kMicro8 = rows8(Tall{});
constexpr std::array<Micro, 7> kMicro256 = {nullptr,     micro256<1>, micro256<2>, micro256<3>,
                                            micro256<4>, micro256<5>, micro256<6>};

}  // namespace

bool has_avx512() {
  static const bool yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("fma");
  return yes;
}

Tile tile() { return has_avx512() ? kTile512 : kTile256; }
int64_t tile_rows_for(int64_t width) { return has_avx512() && width <= kTallColumns512 ? kTallRows512 : tile().mr; }

int64_t narrow_width() { return has_avx512() ? 8 : 16; }

Micro micro_for(int64_t rows, int64_t width) {
  if (width == 8) return kMicro8[rows];
  return has_avx512() ? kMicro512[width / 16 - 1][rows] : kMicro256[rows];
}

KILN_AVX512 void transpose16(const float* src, int64_t src_row, float* dst, int64_t dst_row) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(src + i * src_row);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_ps(dst + i * dst_row, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(dst + (i + 8) * dst_row, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_ps(dst + (i + 4) * dst_row, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_ps(dst + (i + 12) * dst_row, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

KILN_AVX512 void pack_sixes(const float* src, int64_t step, int64_t lines, int64_t tiles, int64_t depth, bool more,
                            float* dst) {
  static_assert(kTile512.mr == 6);
  constexpr int64_t kTogether = 8;
  for (int64_t t0 = 0; t0 < tiles; t0 += kTogether) {
    const int64_t t1 = t0 + kTogether < tiles ? t0 + kTogether : tiles;
    for (int64_t p = 0; p + (more ? 0 : 1) < lines; ++p)
      for (int64_t t = t0; t < t1; ++t)
        _mm256_storeu_ps(dst + (t * depth + p) * 6, _mm256_loadu_ps(src + p * step + t * 6));
    if (more || lines == 0) continue;
    for (int64_t t = t0; t < t1; ++t)
      _mm256_mask_storeu_ps(dst + (t * depth + lines - 1) * 6, 0x3f,
                            _mm256_maskz_loadu_ps(0x3f, src + (lines - 1) * step + t * 6));
  }
}

}  // namespace kiln::runtime::gemm
#pragma GCC diagnostic pop
