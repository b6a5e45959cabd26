#include "runtime/conv/winograd_kernels.h"

#include <algorithm>

#include "runtime/conv/image.h"
#include "runtime/conv/winograd_tiles.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

/// Of a kernel.
template <class Vector>
KILN_INLINE void transform_kernel(const Vector (&g)[3], Vector (&to)[4]) {
  const Vector ends = (g[0] + g[2]) * 0.5f, middle = g[1] * 0.5f;
  to[0] = g[0];
  to[1] = ends + middle;
  to[2] = ends - middle;
  to[3] = g[2];
}
/// Kernels side by side: tap (h, w) at `taps` + h * `step_h` + w * `step_w`.
struct Kernels {
  const float* taps;
  int64_t step_h, step_w;
  float* to;
  int64_t step;
};
template <int kLanes>
KILN_INLINE void transform_vector(const Kernels& k, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[3][4], column[3], out[4];
#pragma GCC unroll 3
  for (int h = 0; h < 3; ++h) {
#pragma GCC unroll 3
    for (int w = 0; w < 3; ++w) load<kLanes>(k.taps + h * k.step_h + w * k.step_w + c, column[w]);
    transform_kernel(column, rows[h]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 3
    for (int h = 0; h < 3; ++h) column[h] = rows[h][q];
    transform_kernel(column, out);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store<kLanes>(out[r], k.to + (r * 4 + q) * k.step + c);
  }
}

}  // namespace

KernelLines::KernelLines(const Shape& s, const float* weight, const WeightStrides& ws)
    : layout_(s.co),
      weight_(weight),
      ws_(ws),
      low_(weight + lowest_tap(s, ws)),
      end_(low_ + s.taps() * s.ci * s.co),
      taps_together_(ws.h == 3 * ws.w && (ws.w == 1 || ws.w == -1)) {}

void KernelLines::transform(int64_t panel, int64_t k0, int64_t k1, float* to, int64_t step) const {
  const int64_t width = layout_.width(panel), columns = layout_.columns(panel), j = layout_.first_column(panel);
  alignas(64) float square[16 * 16] = {};
  for (int64_t k = k0; k < k1; ++k)
    for (int64_t v = 0; v < width; v += 16) {
      const float* const from = weight_ + (j + v) * ws_.o + k * ws_.i;
      const int64_t count = std::min<int64_t>(16, columns - v);
      Kernels kernels{square, 48, 16, to + (k - k0) * width + v, step};
      const float* const first = ws_.w < 0 ? from + 8 * ws_.w : from;  // of the taps of a column
      if (count == 16 && ws_.o == 1) {
        kernels.taps = from, kernels.step_h = ws_.h, kernels.step_w = ws_.w;
      } else if (count == 16 && taps_together_ && first + 15 * ws_.o + 16 <= end_) {
        gemm::transpose16(first, ws_.o, square, 16);
        if (ws_.w < 0) kernels.taps = square + 8 * 16, kernels.step_h = -48, kernels.step_w = -16;
      } else {
        for (int64_t tap = 0; tap < 9; ++tap)
          for (int64_t c = 0; c < 16; ++c)
            square[tap * 16 + c] = c < count ? from[tap / 3 * ws_.h + tap % 3 * ws_.w + c * ws_.o] : 0.0f;
      }
      conv::transform(kernels, 16);
    }
}

gemm::Ahead KernelLines::ahead(int64_t panel, int64_t k0, int64_t k1, int64_t pieces) const {
  const int64_t columns = layout_.columns(panel);
  const float* const first = low_ + layout_.first_column(panel) * ws_.o + k0 * ws_.i;
  // Where columns are far apart, what each has of these lines is together; else the columns of a line are.
  if (ws_.o > ws_.i) return gemm::Ahead(first, columns, ws_.o, (k1 - k0) * ws_.i, pieces);
  return gemm::Ahead(first, k1 - k0, ws_.i, columns * ws_.o, pieces);
}

int64_t winograd_weight_floats(const Shape& s) { return kPlaces * gemm::packed_floats(s.ci, s.co); }

void transform_weight_winograd(const Shape& s, const float* weight, const WeightStrides& ws, float* transformed,
                               const Parallel& parallel) {
  const Depths depths(1, s.ci);
  const PackedB layout(s.co);
  const KernelLines lines(s, weight, ws);
  constexpr int64_t kPiece = 64;
  const int64_t pieces = ceil_div(depths.blocks[0].depth, kPiece), blocks = static_cast<int64_t>(depths.blocks.size());
  parallel(layout.panels() * blocks * pieces, [&](int64_t task) {
    const int64_t panel = task / pieces / blocks, piece = task % pieces;
    const Depths::Block& block = depths.blocks[task / pieces % blocks];
    const int64_t k0 = std::min(block.depth, piece * kPiece), k1 = std::min(block.depth, k0 + kPiece);
    lines.transform(panel, block.k + k0, block.k + k1, transformed + layout.at(block, panel) + k0 * layout.width(panel),
                    gemm::packed_floats(s.ci, s.co));
  });
}

}  // namespace kiln::runtime::conv
