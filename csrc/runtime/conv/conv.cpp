#include "runtime/conv/conv.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/gemm/kernels.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

struct Tap {
  int64_t h, w;
};

/// Address in packed B of index `k` (which must lie in `block`) of a panel, at its first column.
float* packed_line(float* packed, const PackedB& layout, const Depths::Block& block, int64_t panel, int64_t k) {
  return packed + layout.at(block, panel) + (k - block.k) * layout.width(panel);
}

/// The input as products read it: a tap is a run of `channels` contiguous floats, pixels are `pixel` floats apart.
struct Image {
  const float* data;
  int64_t h, w, pixel, channels, taps_h, taps_w, pad_h, pad_w;
};

/// Few channels make short runs. Then the image is copied into a frame of zeros, and all taps of a kernel row are one
/// run.
bool joins_taps(const Shape& s) { return s.ci < 8 && s.kw > 1 && s.dilation_w == 1; }
int64_t frame_floats(const Shape& s) {
  return joins_taps(s) ? round_up(s.n * (s.h + 2 * s.pad_h) * (s.w + 2 * s.pad_w) * s.ci, 16) : 0;
}
Image image_of(const Shape& s, const float* x, float* frame, const Parallel& parallel) {
  if (!joins_taps(s)) return {x, s.h, s.w, s.ci, s.ci, s.kh, s.kw, s.pad_h, s.pad_w};
  const int64_t h = s.h + 2 * s.pad_h, w = s.w + 2 * s.pad_w;
  parallel(s.n * h, [&](int64_t line) {
    float* to = frame + line * w * s.ci;
    const int64_t from = line % h - s.pad_h;
    std::fill_n(to, w * s.ci, 0.0f);
    if (from >= 0 && from < s.h)
      std::memcpy(to + s.pad_w * s.ci, x + (line / h * s.h + from) * s.w * s.ci, sizeof(float) * s.w * s.ci);
  });
  return {frame, h, w, s.ci, s.kw * s.ci, s.kh, 1, 0, 0};
}
Depths depths_of(const Shape& s) { return joins_taps(s) ? Depths(s.kh, s.kw * s.ci) : Depths(s.taps(), s.ci); }

/// Packs the weight as B of y = A B: k = (tap, ci), columns co.
void pack_forward(const Shape& s, const Depths& depths, const float* weight, const WeightStrides& ws, float* packed,
                  const Parallel& parallel) {
  const PackedB layout(s.co);
  const int64_t taps = s.taps(), inner = s.ci * taps;
  // Row-major weights hold (ci, tap) contiguously, channels-last ones (tap, ci): 16 x 16 blocks of either are
  // transposed, and the lines dealt out to their places.
  const bool row_major = ws.o == inner && ws.i == taps && (taps == 1 || (ws.w == 1 && ws.h == s.kw));
  const bool channels_last = ws.o == inner && ws.i == 1 && (taps == 1 || (ws.w == s.ci && ws.h == s.kw * s.ci));
  parallel(layout.panels(), [&](int64_t panel) {
    const int64_t j = layout.first_column(panel), width = layout.width(panel), count = std::min(width, s.co - j);
    std::vector<float*> lines(inner);
    for (const Depths::Block& block : depths.blocks)
      for (int64_t k = block.k; k < block.k + block.depth; ++k)
        lines[row_major ? k % s.ci * taps + k / s.ci : k] = packed_line(packed, layout, block, panel, k);
    const int64_t squares = gemm::has_avx512() && (row_major || channels_last) ? count / 16 : 0;
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

/// Packs the weight as B of dx = A B for some of the taps: k = (tap, co), columns ci.
void pack_backward(const Shape& s, const std::vector<Tap>& taps, const Depths& depths, const float* weight,
                   const WeightStrides& ws, float* packed, const Parallel& parallel) {
  const PackedB layout(s.ci);
  const int64_t pieces = std::min<int64_t>(depths.k, 16);
  parallel(layout.panels() * pieces, [&](int64_t task) {
    const int64_t panel = task / pieces, piece = task % pieces;
    const int64_t j = layout.first_column(panel), width = layout.width(panel), count = std::min(width, s.ci - j);
    for (const Depths::Block& block : depths.blocks) {
      const int64_t k0 = block.k + block.depth * piece / pieces, k1 = block.k + block.depth * (piece + 1) / pieces;
      for (int64_t k = k0; k < k1; ++k) {
        const Tap& tap = taps[k / s.co];
        const float* from = weight + k % s.co * ws.o + tap.h * ws.h + tap.w * ws.w + j * ws.i;
        float* to = packed_line(packed, layout, block, panel, k);
        if (ws.i == 1) {
          std::memcpy(to, from, sizeof(float) * count);
        } else {
          for (int64_t c = 0; c < count; ++c) to[c] = from[c * ws.i];
        }
        std::fill(to + count, to + width, 0.0f);
      }
    }
  });
}

}  // namespace

int64_t packed_weight_floats(const Shape& s) { return gemm::packed_floats(s.taps() * s.ci, s.co); }
void pack_weight(const Shape& s, const float* weight, const WeightStrides& ws, float* packed,
                 const Parallel& parallel) {
  pack_forward(s, depths_of(s), weight, ws, packed, parallel);
}

int64_t forward_workspace(const Shape& s) { return frame_floats(s); }

void forward(const Shape& s, const float* x, const float* packed, const gemm::Epilogue& epilogue, float* y,
             float* workspace, const Parallel& parallel, int threads) {
  if (s.outputs() == 0 || s.co == 0) return;
  const Depths depths = depths_of(s);
  const Image image = image_of(s, x, workspace, parallel);
  const gemm::RowPointers rows = [&](int64_t i, int64_t count, const Depths::Segment& g, const float** out) {
    const int64_t dh = g.tap / image.taps_w * s.dilation_h - image.pad_h;
    const int64_t dw = g.tap % image.taps_w * s.dilation_w - image.pad_w;
    int64_t ow = i % s.ow, oh = i / s.ow % s.oh, n = i / (s.ow * s.oh);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t h = oh * s.stride_h + dh, w = ow * s.stride_w + dw;
      const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w;
      out[r] = inside ? image.data + ((n * image.h + h) * image.w + w) * image.pixel + g.offset : gemm::zeros();
      if (++ow == s.ow) {
        ow = 0;
        if (++oh == s.oh) oh = 0, ++n;
      }
    }
  };
  gemm::multiply_indirect(
      s.outputs(), depths, rows, PackedB(s.co), packed, y, [&](int64_t i) { return i * s.co; }, epilogue, parallel,
      threads);
}

int64_t backward_input_workspace(const Shape& s) { return gemm::packed_floats(s.taps() * s.co, s.ci); }

void backward_input(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws, float* dx,
                    float* workspace, const Parallel& parallel, int threads) {
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
      const auto pixel = [&](int64_t i) {
        const int64_t w = i % rows_w * s.stride_w + cw, h = i / rows_w % rows_h * s.stride_h + ch;
        return (i / (rows_w * rows_h) * s.h + h) * s.w + w;
      };
      if (taps.empty() || s.co == 0) {
        parallel(m, [&](int64_t i) { std::fill_n(dx + pixel(i) * s.ci, s.ci, 0.0f); });
        continue;
      }
      const Depths depths(static_cast<int64_t>(taps.size()), s.co);
      pack_backward(s, taps, depths, weight, ws, workspace, parallel);
      const gemm::RowPointers rows = [&](int64_t i, int64_t count, const Depths::Segment& g, const float** out) {
        // Both divisions are exact: the class was made so.
        const int64_t dh = (ch + s.pad_h - taps[g.tap].h * s.dilation_h) / s.stride_h;
        const int64_t dw = (cw + s.pad_w - taps[g.tap].w * s.dilation_w) / s.stride_w;
        int64_t w = i % rows_w, h = i / rows_w % rows_h, n = i / (rows_w * rows_h);
        for (int64_t r = 0; r < count; ++r) {
          const int64_t oh = h + dh, ow = w + dw;
          const bool inside = oh >= 0 && ow >= 0 && oh < s.oh && ow < s.ow;
          out[r] = inside ? dy + ((n * s.oh + oh) * s.ow + ow) * s.co + g.offset : gemm::zeros();
          if (++w == rows_w) {
            w = 0;
            if (++h == rows_h) h = 0, ++n;
          }
        }
      };
      gemm::multiply_indirect(
          m, depths, rows, PackedB(s.ci), workspace, dx, [&](int64_t i) { return pixel(i) * s.ci; }, {}, parallel,
          threads);
    }
}

namespace {

/// How the gradient of the weight is cut: ranges of (tap, channel tile) rows, and where these are few, ranges of pixels
/// with a product of their own each, added up at the end.
struct WeightCut {
  int64_t tiles, tiles_each, row_tasks, blocks_each, splits;
  WeightCut(int64_t tiles_, int64_t blocks, int threads) : tiles(tiles_) {
    tiles_each = std::min<int64_t>(tiles, 8);  // each pass over a block of dy serves this many tiles
    row_tasks = ceil_div(tiles, tiles_each);
    const int64_t wanted = std::clamp<int64_t>(ceil_div(threads * 3, row_tasks), 1, std::max<int64_t>(1, blocks / 2));
    blocks_each = std::max<int64_t>(1, ceil_div(blocks, wanted));
    splits = std::max<int64_t>(1, ceil_div(blocks, blocks_each));
  }
};
// The workspace's size must not depend on the number of threads that happen to run.
constexpr int kPlannedThreads = 16;

int64_t product_floats(const Shape& s) { return round_up(s.taps() * s.ci * s.co, 16); }

WeightCut cut_of(const Shape& s, int threads) {
  const int64_t channels = joins_taps(s) ? s.kw * s.ci : s.ci, taps = joins_taps(s) ? s.kh : s.taps();
  return WeightCut(taps * ceil_div(channels, gemm::tile_rows()),
                   static_cast<int64_t>(Depths(1, s.outputs()).blocks.size()), std::min(threads, kPlannedThreads));
}

/// One run of output pixels of a block that a tap can serve: a piece of an image row.
struct Run {
  int64_t start, length;
  const float* from;
};

/// The runs of [begin, end), relative to begin, for one tap.
void find_runs(const Shape& s, const Image& image, int64_t tap, int64_t begin, int64_t end, std::vector<Run>& runs) {
  const int64_t dh = tap / image.taps_w * s.dilation_h - image.pad_h,
                dw = tap % image.taps_w * s.dilation_w - image.pad_w;
  // Output columns whose input column exists.
  const int64_t ow0 = std::min(s.ow, dw >= 0 ? 0 : ceil_div(-dw, s.stride_w));
  const int64_t ow1 = image.w - dw <= 0 ? ow0 : std::clamp(ceil_div(image.w - dw, s.stride_w), ow0, s.ow);
  runs.clear();
  for (int64_t i = begin; i < end;) {
    const int64_t n = i / (s.oh * s.ow), oh = i / s.ow % s.oh, line = i - i % s.ow;
    const int64_t next = std::min(end, line + s.ow), from = std::max(i, line + ow0), to = std::min(next, line + ow1);
    const int64_t h = oh * s.stride_h + dh;
    if (h >= 0 && h < image.h && from < to)
      runs.push_back({from - begin, to - from,
                      image.data + ((n * image.h + h) * image.w + (from - line) * s.stride_w + dw) * image.pixel});
    i = next;
  }
}

}  // namespace

int64_t backward_weight_workspace(const Shape& s) {
  return product_floats(s) * cut_of(s, kPlannedThreads).splits + frame_floats(s);
}

void backward_weight(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                     float* workspace, const Parallel& parallel, int threads) {
  const int64_t taps = s.taps(), m = s.outputs(), mr = gemm::tile_rows();
  if (taps * s.ci * s.co == 0) return;
  const WeightCut cut = cut_of(s, threads);
  const int64_t product_size = product_floats(s);
  float* product = workspace;  // [split, tap, ci, co]
  const Image image = image_of(s, x, workspace + product_size * cut_of(s, kPlannedThreads).splits, parallel);
  const int64_t tiles_per_tap = ceil_div(image.channels, mr);
  const Depths depths(1, m);
  const PackedB layout(s.co);
  if (m == 0) std::fill_n(product, product_size, 0.0f);
  parallel(m == 0 ? 0 : cut.row_tasks * cut.splits, [&](int64_t task) {
    const int64_t split = task % cut.splits;
    const int64_t tile0 = task / cut.splits * cut.tiles_each, tile1 = std::min(cut.tiles, tile0 + cut.tiles_each);
    const int64_t block0 = split * cut.blocks_each;
    const int64_t block1 = std::min<int64_t>(depths.blocks.size(), block0 + cut.blocks_each);
    float* out = product + split * product_size;
    // Both operands of a block are copied to where they stay in the second-level cache; dy's copy serves all tiles.
    thread_local std::vector<float> storage;
    storage.resize(gemm::kMaxDepth * (gemm::kMaxTileColumns + gemm::kMaxTileRows * cut.tiles_each) + 16);
    float* const b_copy = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) & ~uintptr_t{63});
    float* const a_copy = b_copy + gemm::kMaxDepth * gemm::kMaxTileColumns;
    std::vector<std::vector<Run>> runs(tile1 - tile0);
    std::vector<int64_t> starts, lengths;
    std::vector<const float*> rows;
    for (int64_t bi = block0; bi < block1; ++bi) {
      const Depths::Block& block = depths.blocks[bi];
      for (int64_t t = tile0; t < tile1; ++t) {
        const int64_t tap = t / tiles_per_tap, c = t % tiles_per_tap * mr, count = std::min(mr, image.channels - c);
        std::vector<Run>& mine = runs[t - tile0];
        if (t > tile0 && (t - 1) / tiles_per_tap == tap)
          mine = runs[t - 1 - tile0];
        else
          find_runs(s, image, tap, block.k, block.k + block.depth, mine);
        float* to = a_copy + (t - tile0) * gemm::kMaxDepth * mr;
        for (const Run& run : mine)
          gemm::pack_panel(run.from + c, 1, image.pixel * s.stride_w, count, run.length, mr, to + run.start * mr);
      }
      for (int64_t panel = 0; panel < layout.panels(); ++panel) {
        const int64_t j = layout.first_column(panel), width = layout.width(panel), cols = std::min(width, s.co - j);
        gemm::pack_panel(dy + block.k * s.co + j, 1, s.co, cols, block.depth, width, b_copy);
        for (int64_t t = tile0; t < tile1; ++t) {
          const int64_t tap = t / tiles_per_tap, c = t % tiles_per_tap * mr, count = std::min(mr, image.channels - c);
          const std::vector<Run>& mine = runs[t - tile0];
          starts.clear(), lengths.clear(), rows.clear();
          for (const Run& run : mine) {
            // Runs that meet without a gap are one.
            if (!starts.empty() && starts.back() + lengths.back() == run.start) {
              lengths.back() += run.length;
              continue;
            }
            starts.push_back(run.start), lengths.push_back(run.length);
            for (int64_t r = 0; r < gemm::kMaxTileRows; ++r)
              rows.push_back(a_copy + (t - tile0) * gemm::kMaxDepth * mr + run.start * mr + r);
          }
          const gemm::Left left{static_cast<int64_t>(starts.size()), lengths.data(), rows.data(), mr, starts.data()};
          float* c_rows[gemm::kMaxTileRows];
          for (int64_t r = 0; r < count; ++r) c_rows[r] = out + (tap * image.channels + c + r) * s.co + j;
          gemm::micro_for(count, width)(left, b_copy, {c_rows, cols, nullptr, bi != block0});
        }
      }
    }
  });
  if (cut.splits > 1)
    parallel(ceil_div(product_size, 4096), [&](int64_t piece) {
      const int64_t end = std::min(product_size, (piece + 1) * 4096);
      for (int64_t split = 1; split < cut.splits; ++split)
        for (int64_t q = piece * 4096; q < end; ++q) product[q] += product[split * product_size + q];
    });
  // [tap, ci, co] -> the weight's own layout.
  parallel(ceil_div(s.co, 16), [&](int64_t task) {
    const int64_t o0 = task * 16, count = std::min<int64_t>(16, s.co - o0);
    if (ws.i == 1 || taps == 1) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        float* to = dweight + o0 * ws.o + tap / s.kw * ws.h + tap % s.kw * ws.w;
        const float* from = product + tap * s.ci * s.co + o0;
        if (ws.i == 1) {
          gemm::transpose(from, s.co, s.ci, count, to, ws.o);
        } else {
          for (int64_t i = 0; i < s.ci; ++i)
            for (int64_t o = 0; o < count; ++o) to[o * ws.o + i * ws.i] = from[i * s.co + o];
        }
      }
      return;
    }
    for (int64_t i = 0; i < s.ci; ++i)
      for (int64_t tap = 0; tap < taps; ++tap) {
        const float* from = product + (tap * s.ci + i) * s.co + o0;
        float* to = dweight + o0 * ws.o + i * ws.i + tap / s.kw * ws.h + tap % s.kw * ws.w;
        for (int64_t o = 0; o < count; ++o) to[o * ws.o] = from[o];
      }
  });
}

}  // namespace kiln::runtime::conv
