#include <vector>

#include "runtime/conv/image.h"
#include "runtime/conv/winograd_kernels.h"
#include "runtime/conv/winograd_tiles.h"
#include "runtime/gemm/scratch.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

/// Of products, back to results.
template <class Vector>
KILN_INLINE void transform_back(const Vector (&m)[4], Vector (&to)[2]) {
  const Vector sum = m[1] + m[2], difference = m[1] - m[2];
  to[0] = m[0] + sum;
  to[1] = difference - m[3];
}

/// The products of a patch, place p at `from` + p * `step`, and the four results' pixels.
struct Results {
  const float* from;
  int64_t step;
  const float* bias;
  bool accumulate;
  float* pixels[4];
};
template <int kLanes>
KILN_INLINE void transform_vector(const Results& s, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[2][4], column[4], out[2];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) load<kLanes>(s.from + (r * 4 + q) * s.step + c, column[r]);
    transform_back(column, out);
    rows[0][q] = out[0], rows[1][q] = out[1];
  }
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    transform_back(rows[r], out);
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      float* const to = s.pixels[r * 2 + q] + c;
      Vector value = out[q], more;
      if (s.accumulate) load<kLanes>(to, more), value += more;
      if (s.bias) load<kLanes>(s.bias + c, more), value += more;
      store<kLanes>(value, to);
    }
  }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

/// How the work is cut: a task has some rows of tiles, and takes so many tiles at a time that what they are transformed
/// to stays near.
struct Cut {
  /// Of the second-level cache; with many channels, transformed kernels come from behind it, and must meet so many
  /// tiles that they do not count.
  static constexpr int64_t kFloats = 3 << 16, kFewest = 48;
  int64_t at_once, tasks;
  Cut(const Shape& s, const Tiling& tiling, int threads) {
    const int64_t fitting = std::max(kFewest, kFloats / (kPlaces * (s.ci + s.co)));
    const int64_t wanted = std::max(ceil_div(tiling.tiles(), fitting), std::min<int64_t>(threads, tiling.lines));
    tasks = std::min(tiling.lines, round_up(wanted, threads));
    const int64_t most = ceil_div(tiling.lines, tasks) * tiling.columns;
    at_once = ceil_div(most, ceil_div(most, fitting));
  }
};

/// What a task transforms: for each place the tiles' rows of channels, and of products.
class TileScratch {
 public:
  TileScratch(const Shape& s, int64_t tiles)
      // One line more, so that places do not lie behind each other in a cache's way.
      : in_row(s.ci),
        out_row(round_up(s.co, 16)),
        in_place(round_up(tiles * in_row, 16) + 16),
        out_place(tiles * out_row + 16) {
    thread_local gemm::Scratch memory;
    memory.reset(kPlaces * (in_place + out_place) + out_row + round_up(s.ci, 16));
    in = memory.take(kPlaces * in_place);
    out = memory.take(kPlaces * out_place);
    nowhere = memory.take(out_row);
    zeros = memory.take(s.ci);
    std::fill_n(zeros, s.ci, 0.0f);
  }
  const int64_t in_row, out_row, in_place, out_place;
  float *in, *out;
  float* nowhere;  // for results that do not exist
  float* zeros;    // a pixel outside of the picture
};

/// Tiles [begin, end) transformed: place p of the first one to `to` + p * `step`, a row of channels for each tile.
void fill(const Shape& s, const Tiling& tiling, const float* x, int64_t begin, int64_t end, const float* zeros,
          float* to, int64_t step) {
  Patch patch{{}, to, step};
  for (int64_t tile = begin; tile < end; ++tile, patch.to += s.ci) {
    find_pixels(s, Place(tiling, tile), x, 0, zeros, patch);
    transform(patch, s.ci);
  }
}

/// So many channels are summed up in registers: the error of a sum grows with its length, and that of sums of sums with
/// the longest of them.
constexpr int64_t kSummed = 256;

/// The products of a task's tiles with the whole weight.
void multiply_places(int64_t tiles, const Depths& depths, const PackedB& layout, const float* transformed,
                     int64_t weight_step, const TileScratch& scratch) {
  for (int64_t place = 0; place < kPlaces; ++place)
    for (const Depths::Block& block : depths.blocks)
      for (int64_t panel = 0; panel < layout.panels(); ++panel) {
        const int64_t width = layout.width(panel), columns = layout.columns(panel);
        const float* const b = transformed + place * weight_step + layout.at(block, panel);
        for (int64_t k = 0; k < block.depth; k += kSummed)
          multiply(
              {scratch.in + place * scratch.in_place + block.k + k, scratch.in_row, 1, b + k * width,
               std::min(kSummed, block.depth - k), width, columns,
               scratch.out + place * scratch.out_place + layout.first_column(panel), scratch.out_row, block.k + k > 0},
              tiles, [] {});
      }
}

/// Some columns of products, rows of which are `row` floats apart and places `step`.
struct Products {
  const float* data;
  int64_t row, step, first_column, columns;
};
/// Tiles [begin, end) of y from their products. `nowhere`: memory for results that do not exist.
void write(const Shape& s, const Tiling& tiling, const Products& products, const gemm::Epilogue& epilogue,
           int64_t begin, int64_t end, float* nowhere, float* y) {
  const int64_t j = products.first_column;
  Results results{products.data, products.step, epilogue.bias ? epilogue.bias + j : nullptr, epilogue.accumulate, {}};
  for (int64_t tile = begin; tile < end; ++tile, results.from += products.row) {
    const Place at(tiling, tile);
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t q = 0; q < 2; ++q)
        results.pixels[r * 2 + q] =
            at.h + r < s.oh && at.w + q < s.ow ? y + ((at.n * s.oh + at.h + r) * s.ow + at.w + q) * s.co + j : nowhere;
    transform(results, products.columns);
  }
}

/// A weight whose transformed copy would go through the caches, and tiles so few that this counts.
bool is_large_for_tiles(const Shape& s) { return s.ci * s.co >= (1 << 16) && Tiling(s).tiles() <= 160; }

}  // namespace

bool prefers_winograd(const Shape& s, Weight weight) {
  if (!s.winograd || s.groups != 1 || s.kh != 3 || s.kw != 3 || s.stride_h != 1 || s.stride_w != 1 ||
      s.dilation_h != 1 || s.dilation_w != 1)
    return false;
  // The transforms of pixels are work for each channel, the multiplications they save for each pair of channels; that
  // of the weight is for each pair as well, and must be made up for by the number of tiles. Tiles that reach over the
  // border have results that are not wanted.
  constexpr int64_t kFewestChannels = 16, kFewestTiles = 12, kFewestWithTransform = 48;
  const int64_t tiles = Tiling(s).tiles();
  return std::min(s.ci, s.co) >= kFewestChannels &&
         tiles >= (weight == Weight::Given && !is_large_for_tiles(s) ? kFewestWithTransform : kFewestTiles) &&
         4 * kPlaces * tiles <= 3 * s.taps() * s.outputs();
}

void forward_winograd(const Shape& s, const float* x, const float* transformed, const gemm::Epilogue& epilogue,
                      float* y, const Parallel& parallel, int threads) {
  const Tiling tiling(s);
  const Cut cut(s, tiling, threads);
  const Depths depths(1, s.ci);
  const PackedB layout(s.co);
  parallel(cut.tasks, [&](int64_t task) {
    const int64_t line0 = task * tiling.lines / cut.tasks, line1 = (task + 1) * tiling.lines / cut.tasks;
    const TileScratch scratch(s, cut.at_once);
    for (int64_t begin = line0 * tiling.columns; begin < line1 * tiling.columns; begin += cut.at_once) {
      const int64_t end = std::min(begin + cut.at_once, line1 * tiling.columns);
      fill(s, tiling, x, begin, end, scratch.zeros, scratch.in, scratch.in_place);
      multiply_places(end - begin, depths, layout, transformed, gemm::packed_floats(s.ci, s.co), scratch);
      write(s, tiling, {scratch.out, scratch.out_row, scratch.out_place, 0, s.co}, epilogue, begin, end,
            scratch.nowhere, y);
    }
    if (epilogue.rows_done)
      (*epilogue.rows_done)(tiling.first_pixel_row(s, line0) * s.ow, tiling.first_pixel_row(s, line1) * s.ow);
  });
}

namespace {

/// Place p's rows of channels, of all tiles, are so many floats behind place 0's.
int64_t patches_step(const Shape& s) { return round_up(Tiling(s).tiles() * s.ci, 16) + 16; }

/// One task's memory: a part of a panel of transformed kernels, and the products of all tiles with that panel. Both
/// stay in the second-level cache.
class PanelScratch {
 public:
  static constexpr int64_t kFloats = 3 << 16;
  PanelScratch(int64_t tiles, int64_t width)
      : depth(std::clamp<int64_t>((kFloats / kPlaces - tiles * width) / width / 16 * 16, 32, 128)),
        kernels_step(depth * width + 16),
        products_step(tiles * width + 16) {
    thread_local gemm::Scratch memory;
    memory.reset(kPlaces * (kernels_step + products_step) + width);
    kernels = memory.take(kPlaces * kernels_step);
    products = memory.take(kPlaces * products_step);
    nowhere = memory.take(width);
  }
  const int64_t depth, kernels_step, products_step;
  float *kernels, *products, *nowhere;
};

}  // namespace

int64_t winograd_by_panel_floats(const Shape& s) { return is_large_for_tiles(s) ? kPlaces * patches_step(s) : 0; }

bool winograd_packs_by_panel(const Shape& s, int threads) {
  return is_large_for_tiles(s) && PackedB(s.co).panels() >= 2 * threads;
}

void forward_winograd_by_panel(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
                               const gemm::Epilogue& epilogue, float* y, float* patches, const Parallel& parallel) {
  const Tiling tiling(s);
  const PackedB layout(s.co);
  const KernelLines lines(s, weight, ws);
  const int64_t tiles = tiling.tiles(), step = patches_step(s);
  parallel(ceil_div(tiles, 8), [&](int64_t task) {
    thread_local std::vector<float> zeros;
    if (static_cast<int64_t>(zeros.size()) < s.ci) zeros.resize(s.ci);
    fill(s, tiling, x, task * 8, std::min(tiles, task * 8 + 8), zeros.data(), patches + task * 8 * s.ci, step);
  });
  parallel(layout.panels(), [&](int64_t panel) {
    const int64_t width = layout.width(panel);
    const PanelScratch scratch(tiles, width);
    for (int64_t k = 0; k < s.ci; k += scratch.depth) {
      const int64_t depth = std::min(scratch.depth, s.ci - k), next = std::min(scratch.depth, s.ci - k - depth);
      const int64_t pieces = kPlaces * ceil_div(tiles, gemm::tile_rows_for(width));
      gemm::Ahead ahead;
      if (next > 0)
        ahead = lines.ahead(panel, k + depth, k + depth + next, pieces);
      else if (panel + 1 < layout.panels())
        ahead = lines.ahead(panel + 1, 0, scratch.depth, pieces);
      lines.transform(panel, k, k + depth, scratch.kernels, scratch.kernels_step);
      for (int64_t place = 0; place < kPlaces; ++place)
        multiply({patches + place * step + k, s.ci, 1, scratch.kernels + place * scratch.kernels_step, depth, width,
                  width, scratch.products + place * scratch.products_step, width, k > 0},
                 tiles, [&] { ahead.ask(); });
    }
    write(s, tiling,
          {scratch.products, width, scratch.products_step, layout.first_column(panel), layout.columns(panel)}, epilogue,
          0, tiles, scratch.nowhere, y);
  });
}

}  // namespace kiln::runtime::conv
