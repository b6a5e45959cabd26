#include "runtime/conv/depthwise.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/conv/image.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

namespace kiln::runtime::conv {
namespace {

using gemm::Lanes;
using gemm::Parallel;

// --- sums over taps --------------------------------------------------------------------------------------------------

/// One of the inputs that a result sums up: so many floats from the result's place in the input, times `weight`, one a
/// channel. In pictures, it is `column` pixels to the right.
struct Near {
  int64_t away, column;
  const float* weight;
};

/// kPixels results in a row, `to_step` floats apart, from inputs `from_step` floats apart.
struct Sums {
  int64_t channels;
  const Near* taps;
  int64_t count;
  const float* from;
  int64_t from_step;
  const float* bias;
  float* to;
  int64_t to_step;
};

/// Vectors of channels from `c` on.
template <int kLanes, int kVectors, int kPixels>
KILN_INLINE void sum_vectors(const Sums& s, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector sum[kPixels][kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Vector first = s.bias ? *reinterpret_cast<const Vector*>(s.bias + c + v * kLanes) : Vector{};
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) sum[p][v] = first;
  }
  for (int64_t t = 0; t < s.count; ++t) {
    const float *weight = s.taps[t].weight + c, *from = s.from + s.taps[t].away + c;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vector w = *reinterpret_cast<const Vector*>(weight + v * kLanes);
#pragma GCC unroll 4
      for (int p = 0; p < kPixels; ++p)
        sum[p][v] += w * *reinterpret_cast<const Vector*>(from + p * s.from_step + v * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPixels; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(s.to + p * s.to_step + c + v * kLanes) = sum[p][v];
}
template <int kLanes, int kPixels>
KILN_INLINE void sum_channels(const Sums& s) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= s.channels; c += 2 * kLanes) sum_vectors<kLanes, 2, kPixels>(s, c);
  for (; c + kLanes <= s.channels; c += kLanes) sum_vectors<kLanes, 1, kPixels>(s, c);
  for (; c + 8 <= s.channels; c += 8) sum_vectors<8, 1, kPixels>(s, c);
  for (; c < s.channels; ++c) sum_vectors<1, 1, kPixels>(s, c);
}
template <int kPixels>
KILN_AVX512 void sum512(const Sums& s) {
  sum_channels<16, kPixels>(s);
}
template <int kPixels>
KILN_AVX2 void sum256(const Sums& s) {
  sum_channels<8, kPixels>(s);
}
template <int kPixels>
void sum(const Sums& s) {
  gemm::has_avx512() ? sum512<kPixels>(s) : sum256<kPixels>(s);
}

/// The same for kTaps inputs side by side, from each of `count` taps on: their weights are `weight_step` floats apart.
/// An input is loaded once for all results that it goes to.
template <int kLanes, int kTaps, int kPixels>
KILN_INLINE void sum_runs(const Sums& s, int64_t weight_step, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  const Vector first = s.bias ? *reinterpret_cast<const Vector*>(s.bias + c) : Vector{};
  Vector sum[kPixels];
#pragma GCC unroll 8
  for (int p = 0; p < kPixels; ++p) sum[p] = first;
  for (int64_t t = 0; t < s.count; ++t) {
    const float *weight = s.taps[t].weight + c, *from = s.from + s.taps[t].away + c;
    Vector w[kTaps];
#pragma GCC unroll 7
    for (int k = 0; k < kTaps; ++k) w[k] = *reinterpret_cast<const Vector*>(weight + k * weight_step);
#pragma GCC unroll 14
    for (int q = 0; q < kPixels + kTaps - 1; ++q) {
      const Vector x = *reinterpret_cast<const Vector*>(from + q * s.from_step);
#pragma GCC unroll 7
      for (int k = 0; k < kTaps; ++k)
        if (q - k >= 0 && q - k < kPixels) sum[q - k] += x * w[k];
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPixels; ++p) *reinterpret_cast<Vector*>(s.to + p * s.to_step + c) = sum[p];
}
template <int kLanes, int kTaps, int kPixels>
KILN_INLINE void sum_channels_of_runs(const Sums& s, int64_t weight_step) {
  int64_t c = 0;
  for (; c + kLanes <= s.channels; c += kLanes) sum_runs<kLanes, kTaps, kPixels>(s, weight_step, c);
  for (; c + 8 <= s.channels; c += 8) sum_runs<8, kTaps, kPixels>(s, weight_step, c);
  for (; c < s.channels; ++c) sum_runs<1, kTaps, kPixels>(s, weight_step, c);
}
// As many results as registers hold beside the weights.
constexpr int kPixels512 = 8, kPixels256 = 4;
template <int kTaps>
KILN_AVX512 void sum_runs512(const Sums& s, int64_t weight_step) {
  sum_channels_of_runs<16, kTaps, kPixels512>(s, weight_step);
}
template <int kTaps>
KILN_AVX2 void sum_runs256(const Sums& s, int64_t weight_step) {
  sum_channels_of_runs<8, kTaps, kPixels256>(s, weight_step);
}
using SumRuns = void (*)(const Sums&, int64_t weight_step);
/// For so many taps side by side; null if there is none.
SumRuns sum_runs_of(int64_t taps) {
  const bool wide = gemm::has_avx512();
  if (taps == 3) return wide ? sum_runs512<3> : sum_runs256<3>;
  if (taps == 5) return wide ? sum_runs512<5> : sum_runs256<5>;
  if (taps == 7) return wide ? sum_runs512<7> : sum_runs256<7>;
  return nullptr;
}

/// Copies of the input's rows with zeros around them: `left` before the first pixel, `slots` rows at a time. No pixels
/// where the input's own rows do.
struct Frame {
  int64_t left = 0, row_pixels = 0, slots = 0;
};
/// What a task needs besides: the inputs of a row's results, and such rows.
struct Scratch {
  std::vector<Near> near;
  Frame frame;
  std::vector<float> rows;
  std::vector<int64_t> held;  // which row each of them is, of all pictures

  void start(const Frame& of, int64_t channels) {
    frame = of;
    if (of.row_pixels == 0) return;
    held.assign(of.slots, -1);
    rows.assign(of.slots * of.row_pixels * channels, 0.0f);
  }
};

/// Results on a grid over each picture: (i, j) sums up the input's pixels (i * step_h + tap.h, j * step_w + tap.w), and
/// is written to pixel first + i * row + j * column of the result's picture.
struct Grid {
  struct Tap {
    int64_t h, w;
    const float* weight;
  };
  const float* in;
  int64_t channels, in_h, in_w, step_h, step_w;
  float* out;
  int64_t columns, picture, first, row, column;  // picture: pixels of one
  const float* bias;
  std::vector<Tap> taps;
  int64_t run;  // so many taps after each other lie side by side, in this order or the opposite one; 0: none
  /// Few channels do not fill a vector: then so many pixels side by side are taken as one with all their channels, and
  /// weights and bias are repeated as often. 0: not so.
  int64_t together = 0;
  bool one_input = false;  // channel, which all of them read; only where pixels are taken together

  /// Row i of picture n.
  void write_row(int64_t n, int64_t i, Scratch& scratch) const {
    if (together && columns >= together) return write_together(n, i, scratch);
    std::vector<Near>& memory = scratch.near;
    memory.clear();
    int64_t begin = 0, end = columns;  // where all taps read inside of the picture
    for (const Tap& tap : taps) {
      const int64_t h = i * step_h + tap.h;
      if (h < 0 || h >= in_h) continue;
      memory.push_back({((n * in_h + h) * in_w + tap.w) * channels, tap.w, tap.weight});
      begin = std::max(begin, tap.w >= 0 ? 0 : ceil_div(-tap.w, step_w));
      end = std::min(end, in_w - tap.w <= 0 ? 0 : ceil_div(in_w - tap.w, step_w));
    }
    const size_t count = memory.size();
    begin = std::min(begin, columns), end = std::max(begin, end);
    const auto sums = [&](int64_t j, size_t from, size_t how_many) {
      return Sums{channels,
                  memory.data() + from,
                  static_cast<int64_t>(how_many),
                  in + j * step_w * channels,
                  step_w * channels,
                  bias,
                  out + (n * picture + first + i * row + j * column) * channels,
                  column * channels};
    };
    const auto border = [&](int64_t j) {
      memory.resize(count);
      for (size_t t = 0; t < count; ++t)
        if (const int64_t w = j * step_w + memory[t].column; w >= 0 && w < in_w) memory.push_back(memory[t]);
      sum<1>(sums(j, count, memory.size() - count));
    };
    for (int64_t j = 0; j < begin; ++j) border(j);
    int64_t j = begin;
    if (const SumRuns sum_runs = count ? sum_runs_of(run) : nullptr) {
      const bool backwards = memory[1].column < memory[0].column;
      memory.resize(count);
      for (size_t t = 0; t < count; t += run) memory.push_back(memory[backwards ? t + run - 1 : t]);
      const int64_t away = std::max<int64_t>(1, together) * channels, weight_step = backwards ? -away : away;
      const int64_t at_once = gemm::has_avx512() ? kPixels512 : kPixels256;
      for (; j + at_once <= end; j += at_once) sum_runs(sums(j, count, memory.size() - count), weight_step);
    }
    for (; j + 4 <= end; j += 4) sum<4>(sums(j, 0, count));
    for (; j < end; ++j) sum<1>(sums(j, 0, count));
    for (; j < columns; ++j) border(j);
  }

 private:
  Frame frame() const {
    // Pixels outside of the picture; and the rows that taps are in, if there are any.
    int64_t left = 0, right = 0, top = taps.empty() ? 0 : INT64_MAX, bottom = taps.empty() ? 0 : INT64_MIN;
    for (const Tap& tap : taps) {
      left = std::max(left, -tap.w), right = std::max(right, columns + tap.w - in_w);
      top = std::min(top, tap.h), bottom = std::max(bottom, tap.h);
    }
    const bool copies = left + right > 0 || one_input;
    return {left, copies ? left + in_w + right : 0, bottom - top + 1};
  }
  void copy_line(int64_t line, float* to) const {
    if (!one_input) {
      std::copy_n(in + line * in_w * channels, in_w * channels, to);
      return;
    }
    for (int64_t w = 0; w < in_w; ++w) to = std::fill_n(to, channels, in[line * in_w + w]);
  }
  void write_together(int64_t n, int64_t i, Scratch& scratch) const {
    if (scratch.frame.slots == 0) scratch.start(frame(), channels);
    const auto [left, row_pixels, slots] = scratch.frame;
    const bool copies = !scratch.held.empty();
    const int64_t row_floats = row_pixels * channels;
    const float* const base = copies ? scratch.rows.data() : in;
    scratch.near.clear();
    for (const Tap& tap : taps) {
      const int64_t h = i * step_h + tap.h;
      if (h < 0 || h >= in_h) continue;
      const int64_t line = n * in_h + h;
      int64_t away = (line * in_w + tap.w) * channels;
      if (copies) {
        const int64_t slot = line % slots;
        if (std::exchange(scratch.held[slot], line) != line)
          copy_line(line, scratch.rows.data() + slot * row_floats + left * channels);
        away = slot * row_floats + (left + tap.w) * channels;
      }
      scratch.near.push_back({away, 0, tap.weight});
    }
    const int64_t step = together * channels;
    const auto sums = [&](int64_t j) {
      return Sums{step,
                  scratch.near.data(),
                  static_cast<int64_t>(scratch.near.size()),
                  base + j * channels,
                  step,
                  bias,
                  out + (n * picture + first + i * row + j) * channels,
                  step};
    };
    int64_t j = 0;
    for (; j + 4 * together <= columns; j += 4 * together) sum<4>(sums(j));
    for (; j + together <= columns; j += together) sum<1>(sums(j));
    if (j < columns) sum<1>(sums(columns - together));  // some of them again
  }
};

/// Grid::together of either pass.
int64_t pixels_together(const Shape& s) {
  constexpr int64_t kMostChannels = 128, kFewestFloats = 32;
  if (s.co % 8 == 0 || s.co > kMostChannels || s.stride_w != 1) return 0;
  int64_t pixels = 16 / std::gcd(int64_t{16}, s.co);
  while (pixels * s.co < kFewestFloats) pixels *= 2;
  return pixels;
}
/// How often weights and bias are repeated in the workspace.
int64_t repeats(const Shape& s) { return std::max<int64_t>(1, pixels_together(s)); }

/// How many tasks `lines` rows of pixels are cut into.
int64_t bands(const Shape& s, int64_t lines, int threads) {
  constexpr int64_t kFewest = 1 << 15;  // multiplications that are worth waking a thread
  const int64_t work = s.outputs() * s.taps() * s.co;
  return std::clamp<int64_t>(std::min<int64_t>(4 * threads, work / kFewest), 1, std::max<int64_t>(1, lines));
}

/// Grid::run of either pass.
int64_t taps_side_by_side(const Shape& s) { return s.stride_w == 1 && s.dilation_w == 1 ? s.kw : 0; }

/// The weight as [tap, pixels that are taken together, channel] and the bias as [pixels, channel] behind it, which is
/// given back (null without one).
const float* pack(const Shape& s, const float* weight, const WeightStrides& ws, const float* bias, float* to) {
  for (int64_t tap = 0; tap < s.taps(); ++tap)
    for (int64_t p = 0; p < repeats(s); ++p)
      for (int64_t c = 0; c < s.co; ++c) *to++ = weight[c * ws.o + tap / s.kw * ws.h + tap % s.kw * ws.w];
  for (int64_t p = 0; bias && p < repeats(s); ++p) std::copy_n(bias, s.co, to + p * s.co);
  return bias ? to : nullptr;
}

// --- sums over pixels ------------------------------------------------------------------------------------------------

constexpr int kMostTaps = 8;

/// Products of two rows of pixels, summed up: of `b`, and of `a` for some taps, which begin at a + away[t]. Steps are
/// from pixel to pixel, in floats; sums of tap t are added to to + t * channels.
struct Products {
  int64_t channels;
  const float* a;
  const int64_t* away;
  int64_t a_step;
  const float* b;
  int64_t b_step, count;
  float* to;
};
template <int kLanes, int kVectors, int kTaps>
KILN_INLINE void add_products(const Products& p, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector sum[kTaps][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTaps; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      sum[t][v] = *reinterpret_cast<const Vector*>(p.to + t * p.channels + c + v * kLanes);
  const float* a[kTaps];
#pragma GCC unroll 8
  for (int t = 0; t < kTaps; ++t) a[t] = p.a + p.away[t] + c;
  const float* b = p.b + c;
  for (int64_t j = 0; j < p.count; ++j, b += p.b_step)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector y = *reinterpret_cast<const Vector*>(b + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kTaps; ++t)
        sum[t][v] += y * *reinterpret_cast<const Vector*>(a[t] + j * p.a_step + v * kLanes);
    }
#pragma GCC unroll 8
  for (int t = 0; t < kTaps; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(p.to + t * p.channels + c + v * kLanes) = sum[t][v];
}
/// Channels [c, c + width): two vectors of kLanes, or what there is.
template <int kLanes, int kTaps>
KILN_INLINE void add_channels(const Products& p, int64_t c, int64_t width) {
  const int64_t end = c + width;
  if (width == 2 * kLanes) return add_products<kLanes, 2, kTaps>(p, c);
  for (; c + kLanes <= end; c += kLanes) add_products<kLanes, 1, kTaps>(p, c);
  for (; c + 8 <= end; c += 8) add_products<8, 1, kTaps>(p, c);
  for (; c < end; ++c) add_products<1, 1, kTaps>(p, c);
}
template <int kTaps>
KILN_AVX512 void add512(const Products& p, int64_t c, int64_t width) {
  add_channels<16, kTaps>(p, c, width);
}
template <int kTaps>
KILN_AVX2 void add256(const Products& p, int64_t c, int64_t width) {
  add_channels<8, kTaps>(p, c, width);
}
using Add = void (*)(const Products&, int64_t, int64_t);
constexpr Add kAdd512[] = {add512<1>, add512<2>, add512<3>, add512<4>, add512<5>, add512<6>, add512<7>, add512<8>};
constexpr Add kAdd256[] = {add256<1>, add256<2>, add256<3>, add256<4>, add256<5>, add256<6>, add256<7>, add256<8>};
void add(int64_t taps, const Products& p, int64_t c, int64_t width) {
  (gemm::has_avx512() ? kAdd512 : kAdd256)[taps - 1](p, c, width);
}

/// Adds to `sums`, [tap, pixels that are taken together, channel], what row `line` of dy and the row of x that kernel
/// row `kh` reads for it give, of [c, c + width) of the last two.
void add_line(const Shape& s, const float* x, const float* dy, int64_t line, int64_t kh, int64_t c, int64_t width,
              float* sums) {
  const int64_t h = line % s.oh * s.stride_h + kh * s.dilation_h - s.pad_h, channels = s.ci;
  if (h < 0 || h >= s.h) return;
  const float* const row = x + (line / s.oh * s.h + h) * s.w * channels;
  const int64_t together = repeats(s), step = together * channels;
  const auto reads = [&](int64_t kw) { return Columns(s, s.w, kw * s.dilation_w - s.pad_w); };
  const auto add_taps = [&](int64_t kw, int64_t taps, int64_t from, int64_t to) {
    if (from >= to) return;
    int64_t away[kMostTaps];
    for (int64_t t = 0; t < taps; ++t) away[t] = ((kw + t) * s.dilation_w - s.pad_w) * channels;
    const auto products = [&](int64_t first, int64_t pixels, int64_t count) {
      return Products{step,
                      row + first * s.stride_w * channels,
                      away,
                      pixels * s.stride_w * channels,
                      dy + (line * s.ow + first) * channels,
                      pixels * channels,
                      count,
                      sums + (kh * s.kw + kw) * step};
    };
    const int64_t count = (to - from) / together, rest = from + count * together;
    if (count > 0) add(taps, products(from, together, count), c, width);
    if (rest < to && c == 0) add(taps, products(rest, 1, to - rest), 0, channels);
  };
  for (int64_t kw = 0; kw < s.kw; kw += kMostTaps) {
    const int64_t taps = std::min<int64_t>(kMostTaps, s.kw - kw);
    // Columns for which all of these taps read inside of the picture; and the others, tap by tap.
    int64_t low = 0, high = s.ow;
    for (int64_t t = 0; t < taps; ++t) {
      const auto [begin, end] = reads(kw + t);
      low = std::max(low, begin), high = std::min(high, end);
    }
    high = std::max(low, high);
    add_taps(kw, taps, low, high);
    for (int64_t t = 0; t < taps; ++t) {
      const auto [begin, end] = reads(kw + t);
      add_taps(kw + t, 1, begin, std::min(low, end));
      add_taps(kw + t, 1, std::max(high, begin), end);
    }
  }
}

}  // namespace

void forward_depthwise(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
                       const gemm::Epilogue& epilogue, float* y, float* workspace, const Parallel& parallel,
                       int threads) {
  const float* const bias = pack(s, weight, ws, epilogue.bias, workspace);
  const int64_t weight_step = repeats(s) * s.co;
  Grid grid{x,    s.co, s.h,  s.w, s.stride_h,           s.stride_w,         y,          s.ow, s.oh * s.ow, 0,
            s.ow, 1,    bias, {},  taps_side_by_side(s), pixels_together(s), s.ci < s.co};
  for (int64_t tap = 0; tap < s.taps(); ++tap)
    grid.taps.push_back(
        {tap / s.kw * s.dilation_h - s.pad_h, tap % s.kw * s.dilation_w - s.pad_w, workspace + tap * weight_step});
  // Rows that wait for whoever takes them stay in the caches.
  const int64_t lines = s.n * s.oh, tasks = bands(s, lines, threads), at_once = ceil_div(1 << 15, s.ow * s.co);
  parallel(tasks, [&](int64_t task) {
    Scratch memory;
    for (int64_t line = lines * task / tasks, end = lines * (task + 1) / tasks; line < end;) {
      const int64_t begin = line, next = std::min(end, line + at_once);
      for (; line < next; ++line) grid.write_row(line / s.oh, line % s.oh, memory);
      if (const gemm::RowsDone* done = epilogue.rows_done) done->operator()(begin * s.ow, line * s.ow);
    }
  });
}

void backward_input_depthwise(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                              const float* bias, float* dx, float* workspace, const Parallel& parallel, int threads) {
  const float* const repeated = pack(s, weight, ws, bias, workspace);
  const int64_t weight_step = repeats(s) * s.ci;
  // Inputs whose coordinates are equal modulo the stride meet the same taps.
  std::vector<Grid> grids;
  for (int64_t ch = 0; ch < s.stride_h; ++ch)
    for (int64_t cw = 0; cw < s.stride_w; ++cw) {
      const int64_t columns = std::max<int64_t>(0, ceil_div(s.w - cw, s.stride_w));
      Grid grid{dy,
                s.ci,
                s.oh,
                s.ow,
                1,
                1,
                dx,
                columns,
                s.h * s.w,
                ch * s.w + cw,
                s.stride_h * s.w,
                s.stride_w,
                repeated,
                {},
                taps_side_by_side(s),
                pixels_together(s)};
      for (int64_t tap = 0; tap < s.taps(); ++tap) {
        const int64_t h = ch + s.pad_h - tap / s.kw * s.dilation_h, w = cw + s.pad_w - tap % s.kw * s.dilation_w;
        if (h % s.stride_h == 0 && w % s.stride_w == 0)
          grid.taps.push_back({h / s.stride_h, w / s.stride_w, workspace + tap * weight_step});
      }
      grids.push_back(std::move(grid));
    }
  const int64_t lines = s.n * s.h, tasks = bands(s, lines, threads);
  parallel(tasks, [&](int64_t task) {
    std::vector<Scratch> memory(grids.size());
    for (int64_t line = lines * task / tasks; line < lines * (task + 1) / tasks; ++line)
      for (int64_t cw = 0; cw < s.stride_w; ++cw) {
        const int64_t grid = line % s.h % s.stride_h * s.stride_w + cw;
        grids[grid].write_row(line / s.h, line % s.h / s.stride_h, memory[grid]);
      }
  });
}

int64_t depthwise_workspace(const Shape& s) { return (s.taps() + 1) * repeats(s) * s.co; }

int64_t backward_weight_depthwise_workspace(const Shape& s, int threads) {
  return bands(s, s.n * s.oh, threads) * s.taps() * repeats(s) * s.ci;
}

void backward_weight_depthwise(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                               float* workspace, const Parallel& parallel, int threads) {
  const int64_t lines = s.n * s.oh, tasks = bands(s, lines, threads), channels = s.ci;
  const int64_t step = repeats(s) * channels, size = s.taps() * step;
  // So many rows of both pictures stay in the second-level cache while their channels are gone through.
  const int64_t row_floats = std::max<int64_t>(1, (s.w * s.stride_h + s.ow) * channels);
  const int64_t at_once = std::max<int64_t>(1, (1 << 16) / row_floats), at_a_time = gemm::has_avx512() ? 32 : 16;
  parallel(tasks, [&](int64_t task) {
    float* const sums = workspace + task * size;  // [tap, pixels that are taken together, channel]
    std::fill_n(sums, size, 0.0f);
    const int64_t begin = lines * task / tasks, end = lines * (task + 1) / tasks;
    for (int64_t first = begin; first < end; first += at_once)
      for (int64_t c = 0; c < step; c += at_a_time)
        for (int64_t kh = 0; kh < s.kh; ++kh)
          for (int64_t line = first; line < std::min(end, first + at_once); ++line)
            add_line(s, x, dy, line, kh, c, std::min(at_a_time, step - c), sums);
  });
  for (int64_t tap = 0; tap < s.taps(); ++tap)
    for (int64_t c = 0; c < channels; ++c) {
      float sum = 0;
      for (int64_t task = 0; task < tasks; ++task)
        for (int64_t at = c; at < step; at += channels) sum += workspace[task * size + tap * step + at];
      dweight[c * ws.o + tap / s.kw * ws.h + tap % s.kw * ws.w] = sum;
    }
}

}  // namespace kiln::runtime::conv
