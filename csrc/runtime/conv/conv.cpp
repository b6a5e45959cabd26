#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/conv/depthwise.h"
#include "runtime/conv/image.h"
#include "runtime/conv/narrow.h"
#include "runtime/conv/winograd.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/split.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

/// Blocks of k that have all taps hold a part of the channels: at least so many that runs are worth their start.
constexpr int64_t kMostTapsInside = gemm::kMaxDepth / 16;

struct Tap {
  int64_t h, w;
};

/// Address in packed B of index `k` (which must lie in `block`) of a panel, at its first column.
float* packed_line(float* packed, const PackedB& layout, const Depths::Block& block, int64_t panel, int64_t k) {
  return packed + layout.at(block, panel) + (k - block.k) * layout.width(panel);
}

/// Whether y = A B, all pixels by the weight, and dx = A B are made by gemm::multiply_split.
bool splits_forward(const Shape& s) { return s.split && s.is_pointwise() && gemm::splits(s.outputs(), s.co, s.ci); }
bool splits_backward(const Shape& s) { return s.split && s.is_pointwise() && gemm::splits(s.outputs(), s.ci, s.co); }
/// The weight as B of these.
gemm::Matrix forward_matrix(const float* weight, const WeightStrides& ws) { return {weight, ws.i, ws.o}; }
gemm::Matrix backward_matrix(const float* weight, const WeightStrides& ws) { return {weight, ws.o, ws.i}; }

Depths depths_of(const Shape& s) { return joins_taps(s) ? Depths(s.kh, s.kw * s.ci) : Depths(s.taps(), s.ci); }

bool is_row_major(const Shape& s, const WeightStrides& ws) {
  return ws.o == s.ci * s.taps() && ws.i == s.taps() && (s.taps() == 1 || (ws.w == 1 && ws.h == s.kw));
}

/// Packs the weight as B of y = A B: k = (tap, ci), columns co.
void pack_forward(const Shape& s, const Depths& depths, const float* weight, const WeightStrides& ws, float* packed,
                  const Parallel& parallel) {
  const PackedB layout(s.co);
  const int64_t taps = s.taps(), inner = s.ci * taps;
  // Row-major weights hold (ci, tap) contiguously, channels-last ones (tap, ci): 16 x 16 blocks of either are
  // transposed, and the lines dealt out to their places.
  const bool row_major = is_row_major(s, ws);
  const bool channels_last = ws.o == inner && ws.i == 1 && (taps == 1 || (ws.w == s.ci && ws.h == s.kw * s.ci));
  parallel(layout.panels(), [&](int64_t panel) {
    const int64_t j = layout.first_column(panel), width = layout.width(panel), count = layout.columns(panel);
    std::vector<float*> lines(inner);
    for (const Depths::Block& block : depths.blocks)
      for (int64_t k = block.k; k < block.k + block.depth; ++k)
        lines[row_major ? k % s.ci * taps + k / s.ci : k] = packed_line(packed, layout, block, panel, k);
    const int64_t squares = row_major || channels_last ? count / 16 : 0;
    alignas(64) float square[16 * 16];
    for (int64_t v = 0; v < squares * 16; v += 16) {
      const float* from = weight + (j + v) * inner;
      int64_t q = 0;
      for (; q + 16 <= inner; q += 16) {
        gemm::transpose16(from + q, inner, square, 16);
        for (int64_t r = 0; r < 16; ++r) std::memcpy(lines[q + r] + v, square + r * 16, 64);
      }
      for (; q < inner; ++q)
        for (int64_t u = 0; u < 16; ++u) lines[q][v + u] = from[u * inner + q];
    }
    if (squares * 16 == width) return;
    for (int64_t q = 0; q < inner; ++q) {
      const int64_t i = row_major ? q / taps : q % s.ci, tap = row_major ? q % taps : q / s.ci;
      const float* from = weight + i * ws.i + tap / s.kw * ws.h + tap % s.kw * ws.w;
      for (int64_t v = squares * 16; v < width; ++v) lines[q][v] = v < count ? from[(j + v) * ws.o] : 0.0f;
    }
  });
}

/// A line of `width` floats: `count` elements of the weight, `step` apart, and zeros.
void copy_line(const float* from, int64_t step, int64_t count, int64_t width, float* to) {
  if (step == 1) {
    std::memcpy(to, from, sizeof(float) * count);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = from[c * step];
  }
  std::fill(to + count, to + width, 0.0f);
}

/// Packs the weight as B of dx = A B for some of the taps: k = (tap, co), columns ci.
void pack_backward(const Shape& s, const std::vector<Tap>& taps, const Depths& depths, const float* weight,
                   const WeightStrides& ws, float* packed, const Parallel& parallel) {
  const PackedB layout(s.ci);
  const int64_t pieces = std::min<int64_t>(s.co, 16);
  parallel(layout.panels() * pieces, [&](int64_t task) {
    const int64_t panel = task / pieces, piece = task % pieces;
    const int64_t j = layout.first_column(panel), width = layout.width(panel), count = layout.columns(panel);
    // All taps of an output channel together: their elements may share cache lines.
    const int64_t o0 = s.co * piece / pieces, o1 = s.co * (piece + 1) / pieces;
    for (int64_t o = o0; o < o1; ++o) {
      for (size_t t = 0; t < taps.size(); ++t) {
        const int64_t k = static_cast<int64_t>(t) * s.co + o;
        const Depths::Block& block =
            *std::prev(std::upper_bound(depths.blocks.begin(), depths.blocks.end(), k,
                                        [](int64_t at, const Depths::Block& candidate) { return at < candidate.k; }));
        copy_line(weight + o * ws.o + taps[t].h * ws.h + taps[t].w * ws.w + j * ws.i, ws.i, count, width,
                  packed_line(packed, layout, block, panel, k));
      }
    }
  });
}

/// The panels of y = A B as the weight has them, for products that pack on the way. With `taps_inside`, blocks of k are
/// Depths::taps_inside: what a block reads of a row-major weight is contiguous then.
gemm::PanelSource forward_source(const Shape& s, const Depths& depths, bool taps_inside, const float* weight,
                                 const WeightStrides& ws) {
  const PackedB layout(s.co);
  const auto pack = [&s, &depths, taps_inside, weight, &ws, layout](const Depths::Block& block, int64_t panel,
                                                                    float* to) {
    const int64_t columns = layout.columns(panel), width = layout.width(panel), taps = s.taps();
    const float* const from = weight + layout.first_column(panel) * ws.o;
    if (!taps_inside || taps == 1) {
      for (int64_t g = block.first_segment; g < block.first_segment + block.segments; ++g) {
        const Depths::Segment& segment = depths.segments[g];
        gemm::pack_panel(from + segment.offset * ws.i + segment.tap / s.kw * ws.h + segment.tap % s.kw * ws.w, ws.o,
                         ws.i, columns, segment.length, width, to + (segment.k - block.k) * width);
      }
      return;
    }
    // Lines of the weight, (channel, tap) side by side, are transposed and dealt out to their places: (tap, channel).
    const int64_t channels = block.depth / taps, first = depths.segments[block.first_segment].offset * taps;
    alignas(64) float square[16 * 16];
    for (int64_t q = 0; q < block.depth; q += 16) {
      const int64_t lines = std::min<int64_t>(16, block.depth - q);
      for (int64_t v = 0; v < width; v += 16) {
        if (lines == 16 && v + 16 <= columns)
          gemm::transpose16(from + v * ws.o + first + q, ws.o, square, 16);
        else
          for (int64_t r = 0; r < lines; ++r)
            for (int64_t u = 0; u < 16; ++u)
              square[r * 16 + u] = v + u < columns ? from[(v + u) * ws.o + first + q + r] : 0.0f;
        for (int64_t r = 0; r < lines; ++r)
          std::memcpy(to + ((q + r) % taps * channels + (q + r) / taps) * width + v, square + r * 16, 64);
      }
    }
  };
  const auto ahead = [&s, &depths, taps_inside, weight, &ws, layout](const Depths::Block& block, int64_t panel,
                                                                     int64_t pieces) {
    const Depths::Segment& segment = depths.segments[block.first_segment];
    const float* const from = weight + layout.first_column(panel) * ws.o;
    return taps_inside ? gemm::Ahead(from + segment.offset * s.taps(), layout.columns(panel), ws.o, block.depth, pieces)
                       : gemm::Ahead(from + block.k, layout.columns(panel), ws.o, block.depth, pieces);
  };
  return {pack, ahead};
}

/// Likewise of dx = A B.
gemm::PanelSource backward_source(const Shape& s, const std::vector<Tap>& taps, const Depths& depths, bool taps_inside,
                                  const float* weight, const WeightStrides& ws) {
  const PackedB layout(s.ci);
  const auto pack = [&s, &taps, &depths, taps_inside, weight, &ws, layout](const Depths::Block& block, int64_t panel,
                                                                           float* to) {
    const int64_t columns = layout.columns(panel), width = layout.width(panel), j = layout.first_column(panel);
    if (taps_inside) {
      const Depths::Segment& segment = depths.segments[block.first_segment];
      for (int64_t o = 0; o < segment.length; ++o)
        for (size_t t = 0; t < taps.size(); ++t)
          copy_line(weight + (segment.offset + o) * ws.o + taps[t].h * ws.h + taps[t].w * ws.w + j * ws.i, ws.i,
                    columns, width, to + (static_cast<int64_t>(t) * segment.length + o) * width);
      return;
    }
    for (int64_t g = block.first_segment; g < block.first_segment + block.segments; ++g) {
      const Depths::Segment& segment = depths.segments[g];
      const Tap& tap = taps[segment.tap];
      gemm::pack_panel(weight + segment.offset * ws.o + tap.h * ws.h + tap.w * ws.w + j * ws.i, ws.i, ws.o, columns,
                       segment.length, width, to + (segment.k - block.k) * width);
    }
  };
  const auto ahead = [&s, &depths, taps_inside, weight, &ws, layout](const Depths::Block& block, int64_t panel,
                                                                     int64_t pieces) {
    const Depths::Segment& segment = depths.segments[block.first_segment];
    const float* const from = weight + segment.offset * ws.o + layout.first_column(panel) * ws.i;
    return gemm::Ahead(from, segment.length, ws.o, layout.columns(panel) * (taps_inside ? s.taps() : 1), pieces);
  };
  return {pack, ahead};
}

}  // namespace

bool supported(const Shape& s) { return gemm::supported() && (s.groups == 1 || is_depthwise(s)); }

int64_t packed_weight_floats(const Shape& s) {
  if (splits_forward(s)) return gemm::split_floats(s.ci, s.co);
  return prefers_winograd(s, Weight::Kept) ? winograd_weight_floats(s) : gemm::packed_floats(s.taps() * s.ci, s.co);
}
bool worth_packing(const Shape& s) { return s.groups == 1 && !sums_taps_forward(s) && !narrow_forward(s); }
void pack_weight(const Shape& s, const float* weight, const WeightStrides& ws, float* packed,
                 const Parallel& parallel) {
  if (splits_forward(s)) return gemm::pack_split(s.ci, s.co, forward_matrix(weight, ws), packed, parallel);
  if (prefers_winograd(s, Weight::Kept)) return transform_weight_winograd(s, weight, ws, packed, parallel);
  pack_forward(s, depths_of(s), weight, ws, packed, parallel);
}

std::string packed_weight_form(const Shape& s, const WeightStrides& ws) {
  std::string form = splits_forward(s)                   ? "split"
                     : prefers_winograd(s, Weight::Kept) ? "winograd"
                     : joins_taps(s)                     ? "joined taps"
                                                         : "taps";
  for (int64_t n : {s.kh, s.kw, s.ci, s.co, ws.o, ws.i, ws.h, ws.w}) form += " " + std::to_string(n);
  return form;
}

int64_t forward_packed_workspace(const Shape& s) { return frame_floats(s); }
int64_t forward_workspace(const Shape& s) {
  if (sums_taps_forward(s)) return depthwise_workspace(s);
  if (splits_forward(s)) return gemm::split_workspace_floats(s.co, s.ci);
  if (prefers_winograd(s, Weight::Given)) return std::max(winograd_weight_floats(s), winograd_by_panel_floats(s));
  return frame_floats(s) + gemm::packed_floats(s.taps() * s.ci, s.co);
}

namespace {
/// How the rows of a product, pixels of a grid of `rows` x `columns` in each of n pictures, read another picture: the
/// one at (row * step_h + tap.h, column * step_w + tap.w), or zeros where that is outside of its `h` x `w` pixels.
struct Reading {
  const float* data;
  int64_t rows, columns, step_h, step_w, h, w, pixel;
  std::vector<Tap> taps;  // where each tap reads for the grid's first pixel
};

/// Smallest and largest coordinate of some pixels.
struct Span {
  int64_t low = INT64_MAX, high = INT64_MIN;
  void add(int64_t at) { low = std::min(low, at), high = std::max(high, at); }
  /// Whether all of them are in [0, size) when moved by `by`.
  bool inside(int64_t by, int64_t size) const { return low + by >= 0 && high + by < size; }
};

gemm::RowPointers row_pointers(Reading reading) {
  return [m = std::move(reading)](int64_t i, int64_t count, const Depths::Segment* segments, int64_t how_many,
                                  const float** out, int64_t* which) {
    int64_t hs[gemm::kMaxTileRows], ws[gemm::kMaxTileRows];
    const float* pixels[gemm::kMaxTileRows];
    int64_t column = i % m.columns, row = i / m.columns % m.rows, n = i / (m.columns * m.rows);
    Span h, w;
    for (int64_t r = 0; r < count; ++r) {
      h.add(hs[r] = row * m.step_h), w.add(ws[r] = column * m.step_w);
      pixels[r] = m.data + ((n * m.h + hs[r]) * m.w + ws[r]) * m.pixel;
      if (++column < m.columns) continue;
      column = 0;
      if (++row == m.rows) row = 0, ++n;
    }
    const float* const zero = gemm::zeros();
    int64_t kept = 0;
    for (int64_t g = 0; g < how_many; ++g) {
      const Tap tap = m.taps[segments[g].tap];
      const int64_t away = (tap.h * m.w + tap.w) * m.pixel + segments[g].offset;
      for (int64_t r = 0; r < count; ++r) out[r] = pixels[r] + away;
      bool used = true;
      if (!h.inside(tap.h, m.h) || !w.inside(tap.w, m.w)) {
        used = false;
        for (int64_t r = 0; r < count; ++r) {
          const bool outside = static_cast<uint64_t>(hs[r] + tap.h) >= static_cast<uint64_t>(m.h) ||
                               static_cast<uint64_t>(ws[r] + tap.w) >= static_cast<uint64_t>(m.w);
          used |= !outside;
          if (outside) out[r] = zero;
        }
      }
      if (!used) continue;
      which[kept++] = g;
      out += gemm::kMaxTileRows;
    }
    return kept;
  };
}

/// The rows of y.
gemm::RowsOfC pixels_of(float* y, int64_t step) {
  return [y, step](int64_t i, int64_t count, float** out) {
    for (int64_t r = 0; r < count; ++r) out[r] = y + (i + r) * step;
  };
}

gemm::RowPointers forward_rows(const Shape& s, const Image& image) {
  Reading reading{image.data, s.oh, s.ow, s.stride_h, s.stride_w, image.h, image.w, image.pixel, {}};
  for (int64_t tap = 0; tap < image.taps(); ++tap)
    reading.taps.push_back(
        {tap / image.taps_w * s.dilation_h - image.pad_h, tap % image.taps_w * s.dilation_w - image.pad_w});
  return row_pointers(std::move(reading));
}

/// y = A B over all taps, B from pack_forward.
void multiply_taps(const Shape& s, const float* x, const float* packed, const gemm::Epilogue& epilogue, float* y,
                   float* frame, const Parallel& parallel, int threads) {
  const Image image = image_of(s, x, frame, parallel);
  gemm::multiply_indirect(s.outputs(), depths_of(s), forward_rows(s, image), PackedB(s.co), packed, pixels_of(y, s.co),
                          epilogue, parallel, threads);
}
}  // namespace

void forward_packed(const Shape& s, const float* x, const float* weight, const WeightStrides& ws, const float* packed,
                    const gemm::Epilogue& epilogue, float* y, float* workspace, const Parallel& parallel, int threads) {
  if (s.outputs() == 0 || s.co == 0) return;
  if (splits_forward(s))
    return gemm::multiply_split_packed(s.outputs(), s.co, s.ci, {x, s.ci, 1}, forward_matrix(weight, ws), packed, y,
                                       s.co, epilogue, parallel, threads);
  if (prefers_winograd(s, Weight::Kept)) return forward_winograd(s, x, packed, epilogue, y, parallel, threads);
  multiply_taps(s, x, packed, epilogue, y, workspace, parallel, threads);
}

void forward(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
             const gemm::Epilogue& epilogue, float* y, float* workspace, const Parallel& parallel, int threads) {
  if (s.outputs() == 0 || s.co == 0) return;
  if (sums_taps_forward(s)) return forward_depthwise(s, x, weight, ws, epilogue, y, workspace, parallel, threads);
  if (splits_forward(s))
    return gemm::multiply_split(s.outputs(), s.co, s.ci, {x, s.ci, 1}, forward_matrix(weight, ws), y, s.co, epilogue,
                                workspace, parallel, threads);
  if (narrow_forward(s)) return forward_narrow(s, x, weight, ws, epilogue.bias, y, workspace, parallel, threads);
  if (prefers_winograd(s, Weight::Given)) {
    if (winograd_packs_by_panel(s, threads))
      return forward_winograd_by_panel(s, x, weight, ws, epilogue, y, workspace, parallel);
    transform_weight_winograd(s, weight, ws, workspace, parallel);
    return forward_winograd(s, x, workspace, epilogue, y, parallel, threads);
  }
  if (joins_taps(s) || !gemm::packs_by_panel(s.co, s.taps() * s.ci, s.n * s.h * s.w * s.ci, threads)) {
    float* const packed = workspace + frame_floats(s);
    pack_forward(s, depths_of(s), weight, ws, packed, parallel);
    return multiply_taps(s, x, packed, epilogue, y, workspace, parallel, threads);
  }
  const bool taps_inside = is_row_major(s, ws) && s.taps() <= kMostTapsInside;
  const Depths depths = taps_inside ? Depths::taps_inside(s.taps(), s.ci) : depths_of(s);
  gemm::multiply_by_panel(s.outputs(), depths, forward_rows(s, layout_of(s, x)), PackedB(s.co),
                          forward_source(s, depths, taps_inside, weight, ws), pixels_of(y, s.co), epilogue, parallel,
                          threads);
}

namespace {
/// Few output channels are short runs, one for each tap, which forward() joins; or it has another form.
bool is_turned(const Shape& s) {
  return can_turn(s) && (joins_taps(turned(s)) || prefers_winograd(turned(s), Weight::Given));
}
}  // namespace

int64_t backward_input_workspace(const Shape& s) {
  if (sums_taps(s)) return depthwise_workspace(s);
  if (splits_backward(s)) return gemm::split_workspace_floats(s.ci, s.co);
  return is_turned(s) ? forward_workspace(turned(s)) : gemm::packed_floats(s.taps() * s.co, s.ci);
}

void backward_input(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                    const gemm::Epilogue& epilogue, float* dx, float* workspace, const Parallel& parallel,
                    int threads) {
  if (sums_taps(s)) return backward_input_depthwise(s, dy, weight, ws, epilogue.bias, dx, workspace, parallel, threads);
  if (splits_backward(s))
    return gemm::multiply_split(s.outputs(), s.ci, s.co, {dy, s.co, 1}, backward_matrix(weight, ws), dx, s.ci, epilogue,
                                workspace, parallel, threads);
  if (narrow_backward_input(s) && s.outputs() > 0)
    return backward_input_narrow(s, dy, weight, ws, epilogue.bias, dx, workspace, parallel, threads);
  if (is_turned(s) && s.outputs() > 0)
    return forward(turned(s), dy, weight + last_tap(s, ws), turned(ws), epilogue, dx, workspace, parallel, threads);
  // Inputs whose coordinates are equal modulo the stride meet the same taps: each class is a product of its own.
  for (int64_t ch = 0; ch < std::min(s.stride_h, s.h); ++ch)
    for (int64_t cw = 0; cw < std::min(s.stride_w, s.w); ++cw) {
      std::vector<Tap> taps;
      for (int64_t kh = 0; kh < s.kh; ++kh)
        for (int64_t kw = 0; kw < s.kw; ++kw)
          if ((ch + s.pad_h - kh * s.dilation_h) % s.stride_h == 0 &&
              (cw + s.pad_w - kw * s.dilation_w) % s.stride_w == 0)
            taps.push_back({kh, kw});
      const int64_t rows_h = ceil_div(s.h - ch, s.stride_h), rows_w = ceil_div(s.w - cw, s.stride_w);
      const int64_t m = s.n * rows_h * rows_w;
      const auto pixels = [&](int64_t i, int64_t count, float** out) {
        int64_t column = i % rows_w, row = i / rows_w % rows_h, n = i / (rows_w * rows_h);
        for (int64_t r = 0; r < count; ++r) {
          out[r] = dx + ((n * s.h + row * s.stride_h + ch) * s.w + column * s.stride_w + cw) * s.ci;
          if (++column < rows_w) continue;
          column = 0;
          if (++row == rows_h) row = 0, ++n;
        }
      };
      if (taps.empty() || s.co == 0) {
        parallel(m, [&](int64_t i) {
          float* to;
          pixels(i, 1, &to);
          if (epilogue.bias)
            std::copy_n(epilogue.bias, s.ci, to);
          else
            std::fill_n(to, s.ci, 0.0f);
        });
        continue;
      }
      const int64_t count = static_cast<int64_t>(taps.size());
      const bool by_panel = gemm::packs_by_panel(s.ci, count * s.co, s.outputs() * s.co, threads);
      const bool taps_inside = by_panel && is_row_major(s, ws) && s.taps() > 1 && count <= kMostTapsInside;
      const Depths depths = taps_inside ? Depths::taps_inside(count, s.co) : Depths(count, s.co);
      Reading reading{dy, rows_h, rows_w, 1, 1, s.oh, s.ow, s.co, {}};
      for (const Tap& tap : taps)  // both divisions are exact: the class was made so
        reading.taps.push_back(
            {(ch + s.pad_h - tap.h * s.dilation_h) / s.stride_h, (cw + s.pad_w - tap.w * s.dilation_w) / s.stride_w});
      const gemm::RowPointers rows = row_pointers(std::move(reading));
      if (by_panel) {
        gemm::multiply_by_panel(m, depths, rows, PackedB(s.ci),
                                backward_source(s, taps, depths, taps_inside, weight, ws), pixels, epilogue, parallel,
                                threads);
        continue;
      }
      pack_backward(s, taps, depths, weight, ws, workspace, parallel);
      gemm::multiply_indirect(m, depths, rows, PackedB(s.ci), workspace, pixels, epilogue, parallel, threads);
    }
}

}  // namespace kiln::runtime::conv
