#include "runtime/gemm/kernels.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning on every shuffle.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <array>
#include <utility>

#include "runtime/gemm/avx2.h"
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
KILN_AVX512 KILN_INLINE void step512(const float* const (&a)[R], int64_t at, const float* b, __m512 (&acc)[R][V]) {
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
KILN_AVX512 KILN_INLINE const float* run512(const float* const (&a)[R], int64_t length, int64_t stride, const float* b,
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
      __builtin_prefetch(s.c[i] + s.first + 16 * v, 1);
    }
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) __builtin_prefetch(s.c[i] + s.first + 16 * V - 1, 1);
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
      float* c = s.c[i] + s.first + 16 * v;
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
    __builtin_prefetch(s.c[i] + s.first, 1);
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
    if (s.accumulate) x = _mm256_add_ps(x, _mm256_maskz_loadu_ps(mask, s.c[i] + s.first));
    if (s.bias) x = _mm256_add_ps(x, bias);
    _mm256_mask_storeu_ps(s.c[i] + s.first, mask, x);
  }
}

/// sum += x * y, in its own register: GCC takes whatever form of the instruction, moves accumulators about and, having
/// none to spare, spills some.
KILN_AVX2 KILN_INLINE void add_product(__m256& sum, __m256 x, __m256 y) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
}
template <int R, int V>
KILN_AVX2 KILN_INLINE void step256(const float* const (&a)[R], int64_t at, const float* b, __m256 (&acc)[R][V]) {
  __m256 row[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) row[v] = _mm256_load_ps(b + 8 * v);
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
    const __m256 x = _mm256_broadcast_ss(a[i] + at);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) add_product(acc[i][v], x, row[v]);
  }
}

/// A vector of C, or the part of one that exists. A masked store takes AMD's cores several times as long.
struct Whole256 {
  KILN_AVX2 __m256 load(const float* from) const { return _mm256_loadu_ps(from); }
  KILN_AVX2 void store(float* to, __m256 x) const { _mm256_storeu_ps(to, x); }
};
struct Part256 {
  __m256i mask;
  KILN_AVX2 __m256 load(const float* from) const { return _mm256_maskload_ps(from, mask); }
  KILN_AVX2 void store(float* to, __m256 x) const { _mm256_maskstore_ps(to, mask, x); }
};
template <int R, int V, class Part>
KILN_AVX2 KILN_INLINE void store256(__m256 (&acc)[R][V], const Store& s, const Part (&parts)[V]) {
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const Part& part = parts[v];
    float* const* const c = s.c;
    const int64_t first = s.first + 8 * v;
    if (s.accumulate)
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) acc[i][v] = _mm256_add_ps(acc[i][v], part.load(c[i] + first));
    if (s.bias) {
      const __m256 bias = part.load(s.bias + 8 * v);
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) acc[i][v] = _mm256_add_ps(acc[i][v], bias);
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) part.store(c[i] + first, acc[i][v]);
  }
}

// R rows by V vectors of columns, whose steps lie `kWidth` floats apart. Measured on a Zen 3 beside a busy neighbour:
// 0.87 of the rate of a loop without loads with four steps unrolled and one index for all rows, 0.69 with one step.
template <int R, int V, int kWidth>
KILN_AVX2 KILN_INLINE void tile256(const Left& left, const float* panel, const Store& s) {
  const float* b = panel;
  __m256 acc[R][V];
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[i][v] = _mm256_setzero_ps();
    __builtin_prefetch(s.c[i] + s.first, 1);
    if (V > 1) __builtin_prefetch(s.c[i] + s.first + 15, 1);
  }
  for (int64_t g = 0; g < left.segments; ++g) {
    const float* a[R];
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) a[i] = left.rows[g * kMaxTileRows + i];
    if (left.starts) b = panel + left.starts[g] * kWidth;
    const int64_t step = left.step, whole = left.lengths[g] / 4 * 4 * step, end = left.lengths[g] * step;
    int64_t p = 0;
    for (; p < whole; b += 4 * kWidth) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u, p += step) {
        step256<R, V>(a, p, b + u * kWidth, acc);
        asm("" : "+r"(p));
      }
    }
    for (; p < end; p += step, b += kWidth) step256<R, V>(a, p, b, acc);
  }
  if (s.cols >= 8 * V) {
    const Whole256 whole[V];
    store256(acc, s, whole);
  } else {
    Part256 parts[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) parts[v].mask = first_lanes(s.cols - 8 * v);
    store256(acc, s, parts);
  }
}
template <int R>
KILN_AVX2 void micro256(const Left& left, const float* panel, const Store& s) {
  // Of a panel with eight columns or fewer the other half is not worth multiplying.
  s.cols > 8 ? tile256<R, 2, 16>(left, panel, s) : tile256<R, 1, 16>(left, panel, s);
}
template <int R>
KILN_AVX2 void narrow256(const Left& left, const float* panel, const Store& s) {
  tile256<R, 1, 8>(left, panel, s);
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
using Usual256 = std::make_index_sequence<kTile256.mr>;
template <size_t... kRows>
constexpr std::array<std::array<Micro, kTile256.mr + 1>, 2> rows256(std::index_sequence<kRows...>) {
  return {{{nullptr, narrow256<kRows + 1>...}, {nullptr, micro256<kRows + 1>...}}};
}
constexpr std::array<std::array<Micro, kTile256.mr + 1>, 2> kMicro256 = rows256(Usual256{});  // 8 and 16 columns

}  // namespace

bool has_avx512() {
  static const bool yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("fma");
  return yes;
}

Tile tile() { return has_avx512() ? kTile512 : kTile256; }
int64_t tile_rows_for(int64_t width) { return has_avx512() && width <= kTallColumns512 ? kTallRows512 : tile().mr; }

Micro micro_for(int64_t rows, int64_t width) {
  if (!has_avx512()) return kMicro256[width / 8 - 1][rows];
  return width == kNarrowWidth ? kMicro8[rows] : kMicro512[width / 16 - 1][rows];
}

namespace {

KILN_AVX2 KILN_INLINE void transpose8(const float* src, int64_t src_row, float* dst, int64_t dst_row) {
  for (int half = 0; half < 8; half += 4, src += 4, dst += 4 * dst_row) {
    __m256 r[4];  // row i beside row i + 4
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(src + i * src_row)),
                                  _mm_loadu_ps(src + (i + 4) * src_row), 1);
    const __m256 low01 = _mm256_unpacklo_ps(r[0], r[1]), high01 = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 low23 = _mm256_unpacklo_ps(r[2], r[3]), high23 = _mm256_unpackhi_ps(r[2], r[3]);
    _mm256_storeu_ps(dst, _mm256_shuffle_ps(low01, low23, 0x44));
    _mm256_storeu_ps(dst + dst_row, _mm256_shuffle_ps(low01, low23, 0xee));
    _mm256_storeu_ps(dst + 2 * dst_row, _mm256_shuffle_ps(high01, high23, 0x44));
    _mm256_storeu_ps(dst + 3 * dst_row, _mm256_shuffle_ps(high01, high23, 0xee));
  }
}

KILN_AVX2 void transpose256(const float* src, int64_t src_row, float* dst, int64_t dst_row) {
  for (int64_t i = 0; i < 16; i += 8)
    for (int64_t j = 0; j < 16; j += 8) transpose8(src + i * src_row + j, src_row, dst + j * dst_row + i, dst_row);
}

KILN_AVX512 void transpose512(const float* src, int64_t src_row, float* dst, int64_t dst_row) {
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

}  // namespace

void transpose16(const float* src, int64_t src_row, float* dst, int64_t dst_row) {
  (has_avx512() ? transpose512 : transpose256)(src, src_row, dst, dst_row);
}

KILN_AVX2 void pack_sixes(const float* src, int64_t step, int64_t lines, int64_t tiles, int64_t depth, bool more,
                          float* dst) {
  static_assert(kTile512.mr == 6 && kTile256.mr == 6);
  const __m256i six = first_lanes(6);
  constexpr int64_t kTogether = 8;
  const int64_t fours = step >= 6 ? lines / 4 * 4 : 0;  // nothing before or behind the lines is read then
  for (int64_t t0 = 0; t0 < tiles; t0 += kTogether) {
    const int64_t t1 = t0 + kTogether < tiles ? t0 + kTogether : tiles;
    for (int64_t p = 0; p < fours; p += 4)  // four lines of a tile are three vectors
      for (int64_t t = t0; t < t1; ++t) {
        const float *r0 = src + p * step + t * 6, *r1 = r0 + step, *r2 = r1 + step, *r3 = r2 + step;
        float* const to = dst + (t * depth + p) * 6;
        _mm256_storeu_ps(to, _mm256_blend_ps(_mm256_loadu_ps(r0), _mm256_loadu_ps(r1 - 6), 0xc0));
        _mm256_storeu_ps(to + 8, _mm256_blend_ps(_mm256_loadu_ps(r1 + 2), _mm256_loadu_ps(r2 - 4), 0xf0));
        _mm256_storeu_ps(to + 16, _mm256_blend_ps(_mm256_loadu_ps(r2 + 4), _mm256_loadu_ps(r3 - 2), 0xfc));
      }
    for (int64_t p = fours; p + (more ? 0 : 1) < lines; ++p)
      for (int64_t t = t0; t < t1; ++t)
        _mm256_storeu_ps(dst + (t * depth + p) * 6, _mm256_loadu_ps(src + p * step + t * 6));
    if (more || fours == lines) continue;
    for (int64_t t = t0; t < t1; ++t)
      _mm256_maskstore_ps(dst + (t * depth + lines - 1) * 6, six,
                          _mm256_maskload_ps(src + (lines - 1) * step + t * 6, six));
  }
}

}  // namespace kiln::runtime::gemm
#pragma GCC diagnostic pop
