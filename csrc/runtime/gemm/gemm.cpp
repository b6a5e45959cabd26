#include "runtime/gemm/gemm.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning on every shuffle.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace kiln::runtime::gemm {
namespace {

// k is cut into blocks so that one panel of B stays in the second-level cache; a block's partial sums go through C.
constexpr int64_t kMaxBlockK = 512;

/// Shape of the register tile: `mr` rows of A by `nr` columns of B.
struct Tile {
  int64_t mr, nr;
};
constexpr Tile kTile512{8, 48};  // 24 accumulators, 3 of B, 1 broadcast: 28 of 32 registers
constexpr Tile kTile256{6, 16};  // 12 accumulators, 2 of B, 1 broadcast: 15 of 16 registers

bool has_avx512() {
  static const bool yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return yes;
}
Tile tile() { return has_avx512() ? kTile512 : kTile256; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- packing -----------------------------------------------------------------------------------------------------
// Packed A: panels of mr rows; within a panel k-major, mr values a step. Packed B: likewise with nr columns.
// A panel that the matrix does not fill is padded with zeros, so that the micro-kernel has one shape.

__attribute__((target("avx512f"))) inline void transpose16(const float* src, int64_t ld, float* dst, int64_t dst_ld) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(src + i * ld);
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
    _mm512_storeu_ps(dst + i * dst_ld, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(dst + (i + 8) * dst_ld, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_ps(dst + (i + 4) * dst_ld, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_ps(dst + (i + 12) * dst_ld, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

/// Packs `count` (<= width) vectors of length k: element (v, p) from src[v * vec + p * step] to dst[p * width + v].
void pack_panel(const float* src, int64_t vec, int64_t step, int64_t count, int64_t k, int64_t width, float* dst) {
  if (count < width) std::memset(dst, 0, sizeof(float) * width * k);
  if (vec == 1) {
    for (int64_t p = 0; p < k; ++p) {
      const float* s = src + p * step;
      float* d = dst + p * width;
      for (int64_t v = 0; v < count; ++v) d[v] = s[v];
    }
    return;
  }
  int64_t v = 0;
  if (step == 1 && has_avx512()) {
    for (; v + 16 <= count; v += 16) {
      int64_t p = 0;
      for (; p + 16 <= k; p += 16) transpose16(src + v * vec + p, vec, dst + p * width + v, width);
      for (; p < k; ++p)
        for (int64_t u = v; u < v + 16; ++u) dst[p * width + u] = src[u * vec + p];
    }
  }
  // Four vectors at a time keep the reads in few streams and the writes in one line.
  for (; v + 4 <= count; v += 4) {
    const float* s = src + v * vec;
    float* d = dst + v;
    for (int64_t p = 0; p < k; ++p, d += width, s += step) {
      d[0] = s[0];
      d[1] = s[vec];
      d[2] = s[2 * vec];
      d[3] = s[3 * vec];
    }
  }
  for (; v < count; ++v)
    for (int64_t p = 0; p < k; ++p) dst[p * width + v] = src[v * vec + p * step];
}

// --- micro-kernels
// ----------------------------------------------------------------------------------------------------

struct Store {
  float* c;
  int64_t ldc;
  int64_t rows, cols;  // of the tile that exist
  const float* bias;   // at the tile's first column, or null
  bool accumulate;
};

// R rows by V vectors of columns; both are template parameters so that every accumulator is a register.
template <int R, int V>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) void micro512(int64_t k, const float* __restrict a,
                                                                            const float* __restrict b, const Store& s) {
  constexpr int kAhead = 8;  // steps of k between a prefetch and its use; measured
  __m512 acc[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) acc[i][v] = _mm512_setzero_ps();
  for (int64_t p = 0; p < k; ++p) {
    __m512 row[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      row[v] = _mm512_load_ps(b + 16 * v);
      _mm_prefetch(reinterpret_cast<const char*>(b + 16 * (V * kAhead + v)), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const __m512 x = _mm512_set1_ps(a[i]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) acc[i][v] = _mm512_fmadd_ps(x, row[v], acc[i][v]);
    }
    a += kTile512.mr;
    b += 16 * V;
  }
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    const int64_t left = s.cols - 16 * v;
    const __mmask16 mask = left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
    const __m512 bias = s.bias ? _mm512_maskz_loadu_ps(mask, s.bias + 16 * v) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      float* c = s.c + i * s.ldc + 16 * v;
      __m512 x = acc[i][v];
      if (s.accumulate) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, c));
      if (s.bias) x = _mm512_add_ps(x, bias);
      _mm512_mask_storeu_ps(c, mask, x);
    }
  }
}

using Micro = void (*)(int64_t, const float*, const float*, const Store&);

template <int V>
constexpr std::array<Micro, 9> rows512() {
  return {nullptr,        micro512<1, V>, micro512<2, V>, micro512<3, V>, micro512<4, V>,
          micro512<5, V>, micro512<6, V>, micro512<7, V>, micro512<8, V>};
}
// Tiles at the lower and right edge cost what their rows and vectors cost, not a whole tile's.
constexpr std::array<std::array<Micro, 9>, 3> kMicro512 = {rows512<1>(), rows512<2>(), rows512<3>()};

__attribute__((target("avx2,fma"))) void micro256(int64_t k, const float* a, const float* b, const Store& s) {
  __m256 acc0[6], acc1[6];
#pragma GCC unroll 6
  for (int i = 0; i < 6; ++i) acc0[i] = acc1[i] = _mm256_setzero_ps();
  for (int64_t p = 0; p < k; ++p) {
    const __m256 b0 = _mm256_load_ps(b), b1 = _mm256_load_ps(b + 8);
#pragma GCC unroll 6
    for (int i = 0; i < 6; ++i) {
      const __m256 x = _mm256_broadcast_ss(a + i);
      acc0[i] = _mm256_fmadd_ps(x, b0, acc0[i]);
      acc1[i] = _mm256_fmadd_ps(x, b1, acc1[i]);
    }
    a += 6;
    b += 16;
  }
  alignas(32) float row[16];
#pragma GCC unroll 6
  for (int i = 0; i < 6; ++i) {
    if (i >= s.rows) break;
    _mm256_store_ps(row, acc0[i]);
    _mm256_store_ps(row + 8, acc1[i]);
    float* c = s.c + i * s.ldc;
    for (int64_t j = 0; j < s.cols; ++j) {
      float x = row[j];
      if (s.accumulate) x += c[j];
      c[j] = s.bias ? x + s.bias[j] : x;
    }
  }
}

Micro micro_for(int64_t rows, int64_t panel_width) {
  return has_avx512() ? kMicro512[panel_width / 16 - 1][rows] : micro256;
}

int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

/// Blocks of k of nearly equal depth, at most kMaxBlockK.
int64_t block_depth(int64_t k) { return ceil_div(k, std::max<int64_t>(1, ceil_div(k, kMaxBlockK))); }

/// Where the panels of packed B lie: for each block of k, for each panel, depth * width floats; all panels are nr wide
/// but the last, which is as wide as its columns need (a multiple of 16).
struct PackedB {
  int64_t k, n, nr, depth;
  PackedB(int64_t k, int64_t n) : k(k), n(n), nr(tile().nr), depth(block_depth(k)) {}
  int64_t panels() const { return ceil_div(n, nr); }
  int64_t width(int64_t panel) const { return std::min(nr, round_up(n - panel * nr, 16)); }
  int64_t at(int64_t k0, int64_t panel) const { return k0 * round_up(n, 16) + panel * nr * std::min(depth, k - k0); }
};

void pack_b_panel(const PackedB& layout, Matrix b, float* packed, int64_t panel) {
  const int64_t j = panel * layout.nr;
  for (int64_t k0 = 0; k0 < layout.k; k0 += layout.depth)
    pack_panel(b.data + k0 * b.row + j * b.col, b.col, b.row, std::min(layout.nr, layout.n - j),
               std::min(layout.depth, layout.k - k0), layout.width(panel), packed + layout.at(k0, panel));
}

void zero_product(int64_t m, int64_t n, float* c, int64_t ldc, const Epilogue& e) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      c[i * ldc + j] = (e.accumulate ? c[i * ldc + j] : 0.0f) + (e.bias ? e.bias[j] : 0.0f);
}

int64_t packed_a_floats(int64_t m, int64_t k) { return round_up(round_up(m, tile().mr) * block_depth(k), 16); }

/// Rows of A that one task packs and multiplies: a multiple of mr whose packed block fits beside a panel of B in L2.
int64_t rows_per_task(int64_t m, int64_t depth, int64_t mr, int threads) {
  const int64_t fitting = std::max<int64_t>(1, 128 * 1024 / depth / mr) * mr;
  // Enough tasks that one busy core does not stall the rest.
  const int64_t wanted = round_up(ceil_div(m, std::max(1, threads * 4)), mr);
  return std::clamp(std::min(fitting, wanted), mr, round_up(m, mr));
}

}  // namespace

bool supported() { return has_avx512() || (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")); }

int64_t packed_floats(int64_t k, int64_t n) { return round_up(n, 16) * k; }

int64_t workspace_floats(int64_t m, int64_t n, int64_t k) { return packed_a_floats(m, k) + packed_floats(k, n); }

void pack(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel) {
  const PackedB layout(k, n);
  parallel(layout.panels(), [&](int64_t panel) { pack_b_panel(layout, b, packed, panel); });
}

void multiply_packed(int64_t m, int64_t n, int64_t k, Matrix a, const float* packed, float* c, int64_t ldc,
                     const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads) {
  if (m == 0 || n == 0) return;
  if (k == 0) return zero_product(m, n, c, ldc, epilogue);
  const PackedB layout(k, n);
  const int64_t mr = tile().mr;
  for (int64_t k0 = 0; k0 < k; k0 += layout.depth) {
    const int64_t depth = std::min(layout.depth, k - k0);
    const bool first = k0 == 0, last = k0 + depth == k;
    // With few rows the columns are cut too, or one core would do all the work.
    const int64_t rows = rows_per_task(m, depth, mr, threads), row_tasks = ceil_div(m, rows);
    const int64_t column_tasks = std::min(layout.panels(), std::max<int64_t>(1, threads * 4 / row_tasks));
    const int64_t panels_each = ceil_div(layout.panels(), column_tasks);
    if (column_tasks > 1)
      parallel(ceil_div(m, mr), [&](int64_t p) {
        const int64_t i = p * mr;
        pack_panel(a.data + i * a.row + k0 * a.col, a.row, a.col, std::min(mr, m - i), depth, mr,
                   workspace + i * depth);
      });
    parallel(row_tasks * column_tasks, [&](int64_t task) {
      const int64_t i0 = task / column_tasks * rows, i1 = std::min(m, i0 + rows);
      const int64_t first_panel = task % column_tasks * panels_each;
      const float* block = workspace + i0 * depth;
      if (column_tasks == 1)
        for (int64_t i = i0; i < i1; i += mr)
          pack_panel(a.data + i * a.row + k0 * a.col, a.row, a.col, std::min(mr, i1 - i), depth, mr,
                     workspace + i * depth);
      for (int64_t panel = first_panel; panel < std::min(layout.panels(), first_panel + panels_each); ++panel) {
        const float* bp = packed + layout.at(k0, panel);
        const int64_t j = panel * layout.nr;
        for (int64_t i = i0; i < i1; i += mr) {
          const Store s{c + i * ldc + j,
                        ldc,
                        std::min(mr, i1 - i),
                        std::min(layout.nr, n - j),
                        last && epilogue.bias ? epilogue.bias + j : nullptr,
                        !first || epilogue.accumulate};
          micro_for(s.rows, layout.width(panel))(depth, block + (i - i0) * depth, bp, s);
        }
      }
    });
  }
}

void multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc, const Epilogue& epilogue,
              float* workspace, const Parallel& parallel, int threads) {
  if (m == 0 || n == 0) return;
  if (k == 0) return zero_product(m, n, c, ldc, epilogue);
  float* packed = workspace;
  pack(k, n, b, packed, parallel);
  multiply_packed(m, n, k, a, packed, c, ldc, epilogue, workspace + packed_floats(k, n), parallel, threads);
}

}  // namespace kiln::runtime::gemm
#pragma GCC diagnostic pop
