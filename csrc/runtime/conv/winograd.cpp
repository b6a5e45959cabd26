#include <vector>

#include "runtime/conv/image.h"
#include "runtime/conv/winograd_tiles.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

// Transforms act on the rows of a square and then on its columns. Vectors hold channels.

/// Of a patch of the input.
template <class Vector>
KILN_INLINE void transform_input(const Vector (&d)[4], Vector (&to)[4]) {
  to[0] = d[0] - d[2];
  to[1] = d[1] + d[2];
  to[2] = d[2] - d[1];
  to[3] = d[1] - d[3];
}
template <int kLanes>
KILN_INLINE void transform_patch(const Patch& p, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[4][4], column[4], out[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) load<kLanes>(p.pixels[r * 4 + q] + c, column[q]);
    transform_input(column, rows[r]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) column[r] = rows[r][q];
    transform_input(column, out);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store<kLanes>(out[r], p.to + (r * 4 + q) * p.step + c);
  }
}

KILN_AVX512 void patch512(const Patch& p) {
  int64_t c = 0;
  for (; c + 16 <= p.channels; c += 16) transform_patch<16>(p, c);
  for (; c < p.channels; ++c) transform_patch<1>(p, c);
}
KILN_AVX2 void patch256(const Patch& p) {
  int64_t c = 0;
  for (; c + 8 <= p.channels; c += 8) transform_patch<8>(p, c);
  for (; c < p.channels; ++c) transform_patch<1>(p, c);
}
}  // namespace

void transform(const Patch& p) { gemm::has_avx512() ? patch512(p) : patch256(p); }

namespace {

/// Of a kernel.
template <class Vector>
KILN_INLINE void transform_kernel(const Vector (&g)[3], Vector (&to)[4]) {
  const Vector ends = (g[0] + g[2]) * 0.5f, middle = g[1] * 0.5f;
  to[0] = g[0];
  to[1] = ends + middle;
  to[2] = ends - middle;
  to[3] = g[2];
}
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
  int64_t step, channels;
  const gemm::Epilogue* epilogue;
  float* pixels[4];
};
template <int kLanes>
KILN_INLINE void transform_results(const Results& s, int64_t c) {
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
      if (s.epilogue->accumulate) load<kLanes>(to, more), value += more;
      if (s.epilogue->bias) load<kLanes>(s.epilogue->bias + c, more), value += more;
      store<kLanes>(value, to);
    }
  }
}

/// Sixteen columns of a kernel: tap (h, w) at `taps` + h * `step_h` + w * `step_w`.
struct Kernels {
  const float* taps;
  int64_t step_h, step_w;
  float* to;
  int64_t step;
};
template <int kLanes>
KILN_INLINE void transform_kernels(const Kernels& k) {
  using Vector = typename Lanes<kLanes>::type;
#pragma GCC unroll 2
  for (int v = 0; v < 16; v += kLanes) {
    Vector rows[3][4], column[3], out[4];
#pragma GCC unroll 3
    for (int h = 0; h < 3; ++h) {
#pragma GCC unroll 3
      for (int w = 0; w < 3; ++w) load<kLanes>(k.taps + h * k.step_h + w * k.step_w + v, column[w]);
      transform_kernel(column, rows[h]);
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 3
      for (int h = 0; h < 3; ++h) column[h] = rows[h][q];
      transform_kernel(column, out);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) store<kLanes>(out[r], k.to + (r * 4 + q) * k.step + v);
    }
  }
}

KILN_AVX512 void results512(const Results& s) {
  int64_t c = 0;
  for (; c + 16 <= s.channels; c += 16) transform_results<16>(s, c);
  for (; c < s.channels; ++c) transform_results<1>(s, c);
}
KILN_AVX2 void results256(const Results& s) {
  int64_t c = 0;
  for (; c + 8 <= s.channels; c += 8) transform_results<8>(s, c);
  for (; c < s.channels; ++c) transform_results<1>(s, c);
}
KILN_AVX512 void kernels512(const Kernels& k) { transform_kernels<16>(k); }
KILN_AVX2 void kernels256(const Kernels& k) { transform_kernels<8>(k); }

void transform(const Results& s) { gemm::has_avx512() ? results512(s) : results256(s); }
void transform(const Kernels& k) { gemm::has_avx512() ? kernels512(k) : kernels256(k); }

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
class Scratch {
 public:
  Scratch(const Shape& s, int64_t tiles)
      // One line more, so that places do not lie behind each other in a cache's way.
      : in_row(s.ci),
        out_row(round_up(s.co, 16)),
        in_place(round_up(tiles * in_row, 16) + 16),
        out_place(tiles * out_row + 16) {
    const int64_t need = kPlaces * (in_place + out_place) + round_up(s.ci, 16) + out_row + 16;
    if (static_cast<int64_t>(memory.size()) < need) memory.resize(need);
    in = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
    out = in + kPlaces * in_place;
    nowhere = out + kPlaces * out_place;
    zeros = nowhere + out_row;
    std::fill_n(zeros, s.ci, 0.0f);
  }
  const int64_t in_row, out_row, in_place, out_place;
  float *in, *out;
  float* nowhere;  // for results that do not exist
  float* zeros;    // a pixel outside of the picture

 private:
  static thread_local std::vector<float> memory;
};
thread_local std::vector<float> Scratch::memory;

void fill(const Shape& s, const Tiling& tiling, const float* x, int64_t begin, int64_t end, const Scratch& scratch) {
  Patch patch{{}, s.ci, nullptr, scratch.in_place};
  for (int64_t tile = begin; tile < end; ++tile) {
    find_pixels(s, Place(tiling, tile), x, 0, scratch.zeros, patch);
    patch.to = scratch.in + (tile - begin) * scratch.in_row;
    transform(patch);
  }
}

/// So many channels are summed up in registers: the error of a sum grows with its length, and that of sums of sums with
/// the longest of them.
constexpr int64_t kSummed = 256;

void multiply(int64_t tiles, const Depths& depths, const PackedB& layout, const float* transformed, int64_t weight_step,
              const Scratch& scratch) {
  for (int64_t place = 0; place < kPlaces; ++place)
    for (const Depths::Block& block : depths.blocks)
      for (int64_t panel = 0; panel < layout.panels(); ++panel) {
        const int64_t width = layout.width(panel), columns = layout.columns(panel), mr = gemm::tile_rows_for(width);
        const float* const b = transformed + place * weight_step + layout.at(block, panel);
        for (int64_t k = 0; k < block.depth; k += kSummed) {
          const int64_t depth = std::min(kSummed, block.depth - k);
          const float* a = scratch.in + place * scratch.in_place + block.k + k;
          float* c = scratch.out + place * scratch.out_place + layout.first_column(panel);
          for (int64_t left = tiles; left > 0; left -= mr) {
            const int64_t rows = std::min(mr, left);
            const float* a_rows[gemm::kMaxTileRows];
            float* c_rows[gemm::kMaxTileRows];
            for (int64_t r = 0; r < rows; ++r, a += scratch.in_row, c += scratch.out_row) a_rows[r] = a, c_rows[r] = c;
            gemm::micro_for(rows, width)({1, &depth, a_rows, 1}, b + k * width,
                                         {c_rows, columns, nullptr, block.k + k > 0});
          }
        }
      }
}

void write(const Shape& s, const Tiling& tiling, const Scratch& scratch, const gemm::Epilogue& epilogue, int64_t begin,
           int64_t end, float* y) {
  Results results{nullptr, scratch.out_place, s.co, &epilogue, {}};
  for (int64_t tile = begin; tile < end; ++tile) {
    const Place at(tiling, tile);
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t q = 0; q < 2; ++q)
        results.pixels[r * 2 + q] = at.h + r < s.oh && at.w + q < s.ow
                                        ? y + ((at.n * s.oh + at.h + r) * s.ow + at.w + q) * s.co
                                        : scratch.nowhere;
    results.from = scratch.out + (tile - begin) * scratch.out_row;
    transform(results);
  }
}

}  // namespace

bool prefers_winograd(const Shape& s, Weight weight) {
  if (!s.winograd || s.groups != 1 || s.kh != 3 || s.kw != 3 || s.stride_h != 1 || s.stride_w != 1 ||
      s.dilation_h != 1 || s.dilation_w != 1)
    return false;
  // The transforms of pixels are work for each channel, the multiplications they save for each pair of channels; that
  // of the weight is for each pair as well, and must be made up for by the number of tiles. Tiles that reach over the
  // border have results that are not wanted.
  constexpr int64_t kFewestChannels = 16;
  const int64_t fewest_tiles = weight == Weight::Kept    ? 12
                               : weight == Weight::Given ? 48
                                                         : 16,
                tiles = Tiling(s).tiles();
  return std::min(s.ci, s.co) >= kFewestChannels && tiles >= fewest_tiles &&
         4 * kPlaces * tiles <= 3 * s.taps() * s.outputs();
}

int64_t winograd_weight_floats(const Shape& s) { return kPlaces * gemm::packed_floats(s.ci, s.co); }

void transform_weight_winograd(const Shape& s, const float* weight, const WeightStrides& ws, float* transformed,
                               const Parallel& parallel) {
  const Depths depths(1, s.ci);
  const PackedB layout(s.co);
  const int64_t step = gemm::packed_floats(s.ci, s.co), pieces = std::min<int64_t>(s.ci, 8);
  // The weight's memory; strides of taps may be negative.
  const float* const low = weight + 2 * std::min<int64_t>(0, ws.h) + 2 * std::min<int64_t>(0, ws.w);
  const float* const end = low + s.taps() * s.ci * s.co;
  const bool taps_together = ws.h == 3 * ws.w && (ws.w == 1 || ws.w == -1);
  parallel(layout.panels() * pieces, [&](int64_t task) {
    const int64_t panel = task / pieces, piece = task % pieces;
    const int64_t width = layout.width(panel), columns = layout.columns(panel);
    alignas(64) float square[16 * 16] = {};
    for (int64_t k = s.ci * piece / pieces; k < s.ci * (piece + 1) / pieces; ++k) {
      const Depths::Block& block =
          *std::prev(std::upper_bound(depths.blocks.begin(), depths.blocks.end(), k,
                                      [](int64_t at, const Depths::Block& candidate) { return at < candidate.k; }));
      for (int64_t v = 0; v < width; v += 16) {
        const float* const from = weight + (layout.first_column(panel) + v) * ws.o + k * ws.i;
        const int64_t count = std::min<int64_t>(16, columns - v);
        Kernels kernels{square, 48, 16, transformed + layout.at(block, panel) + (k - block.k) * width + v, step};
        const float* const first = ws.w < 0 ? from + 8 * ws.w : from;  // of the taps of a column
        if (count == 16 && ws.o == 1) {
          kernels.taps = from, kernels.step_h = ws.h, kernels.step_w = ws.w;
        } else if (count == 16 && taps_together && gemm::has_avx512() && first + 15 * ws.o + 16 <= end) {
          gemm::transpose16(first, ws.o, square, 16);
          if (ws.w < 0) kernels.taps = square + 8 * 16, kernels.step_h = -48, kernels.step_w = -16;
        } else {
          for (int64_t tap = 0; tap < 9; ++tap)
            for (int64_t c = 0; c < 16; ++c)
              square[tap * 16 + c] = c < count ? from[tap / 3 * ws.h + tap % 3 * ws.w + c * ws.o] : 0.0f;
        }
        transform(kernels);
      }
    }
  });
}

void forward_winograd(const Shape& s, const float* x, const float* transformed, const gemm::Epilogue& epilogue,
                      float* y, const Parallel& parallel, int threads) {
  const Tiling tiling(s);
  const Cut cut(s, tiling, threads);
  const Depths depths(1, s.ci);
  const PackedB layout(s.co);
  parallel(cut.tasks, [&](int64_t task) {
    const int64_t line0 = task * tiling.lines / cut.tasks, line1 = (task + 1) * tiling.lines / cut.tasks;
    const Scratch scratch(s, cut.at_once);
    for (int64_t begin = line0 * tiling.columns; begin < line1 * tiling.columns; begin += cut.at_once) {
      const int64_t end = std::min(begin + cut.at_once, line1 * tiling.columns);
      fill(s, tiling, x, begin, end, scratch);
      multiply(end - begin, depths, layout, transformed, gemm::packed_floats(s.ci, s.co), scratch);
      write(s, tiling, scratch, epilogue, begin, end, y);
    }
    if (epilogue.rows_done)
      (*epilogue.rows_done)(tiling.first_pixel_row(s, line0) * s.ow, tiling.first_pixel_row(s, line1) * s.ow);
  });
}

}  // namespace kiln::runtime::conv
