#include <vector>

#include "runtime/conv/image.h"
#include "runtime/conv/weight_rows.h"
#include "runtime/conv/winograd_tiles.h"
#include "runtime/gemm/ahead.h"
#include "runtime/gemm/scratch.h"

// The gradient of a weight in Winograd's form, the adjoint of the forward one: with the gradient of the output
// transformed as products are transformed back, for each place of a patch the sum over tiles of input times gradient is
// a plain product; and these sums are transformed as kernels are, the other way.
namespace kiln::runtime::conv {
namespace {

using gemm::PackedB;
using gemm::Parallel;

/// Of a square of the output's gradient.
template <class Vector>
KILN_INLINE void transform_gradient(const Vector (&y)[2], Vector (&to)[4]) {
  to[0] = y[0];
  to[1] = y[0] + y[1];
  to[2] = y[0] - y[1];
  to[3] = -y[1];
}
/// Of sums, back to a kernel.
template <class Vector>
KILN_INLINE void transform_sums(const Vector (&u)[4], Vector (&to)[3]) {
  const Vector plus = (u[1] + u[2]) * 0.5f, minus = (u[1] - u[2]) * 0.5f;
  to[0] = u[0] + plus;
  to[1] = minus;
  to[2] = plus + u[3];
}

/// Four pixels of the output's gradient, and where their transform goes: place p to `to` + p * `step`.
struct Square {
  const float* pixels[4];
  float* to;
  int64_t step;
};
template <int kLanes>
KILN_INLINE void transform_vector(const Square& s, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[2][4], pair[2], out[4];
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    load<kLanes>(s.pixels[r * 2] + c, pair[0]), load<kLanes>(s.pixels[r * 2 + 1] + c, pair[1]);
    transform_gradient(pair, rows[r]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    pair[0] = rows[0][q], pair[1] = rows[1][q];
    transform_gradient(pair, out);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store<kLanes>(out[r], s.to + (r * 4 + q) * s.step + c);
  }
}
/// Sums, place p at `from` + p * `step`, and the nine taps' sums: tap t to `to` + t * `to_step`.
struct Sums {
  const float* from;
  int64_t step;
  float* to;
  int64_t to_step;
};
template <int kLanes>
KILN_INLINE void transform_vector(const Sums& s, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[3][4], column[4], out[3];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) load<kLanes>(s.from + (r * 4 + q) * s.step + c, column[r]);
    transform_sums(column, out);
#pragma GCC unroll 3
    for (int h = 0; h < 3; ++h) rows[h][q] = out[h];
  }
#pragma GCC unroll 3
  for (int h = 0; h < 3; ++h) {
    transform_sums(rows[h], out);
#pragma GCC unroll 3
    for (int w = 0; w < 3; ++w) store<kLanes>(out[w], s.to + (h * 3 + w) * s.to_step + c);
  }
}

/// How the work is cut: ranges of input channels; of panels of output channels; and where these are few, of tiles,
/// whose sums are added up at the end.
struct Cut {
  /// The sums of all places stay in the second-level cache, beside what `kAtOnce` tiles are transformed to.
  static constexpr int64_t kChannels = 66, kAtOnce = 48;
  int64_t channel_tiles, row_tasks, panels, splits, tiles;
  Cut(const Shape& s, int threads) : tiles(Tiling(s).tiles()) {
    channel_tiles = ceil_div(s.ci, gemm::tile_rows());
    row_tasks = ceil_div(channel_tiles, kChannels / gemm::tile_rows());
    panels = PackedB(s.co).panels();
    splits = std::clamp<int64_t>(ceil_div(4 * static_cast<int64_t>(threads), row_tasks * panels), 1,
                                 std::max<int64_t>(1, tiles / (2 * kAtOnce)));
  }
  int64_t tasks() const { return row_tasks * panels * splits; }
  int64_t first_channel(int64_t row_task) const { return row_task * channel_tiles / row_tasks * gemm::tile_rows(); }
};

/// One task's part of the sums.
class Task {
 public:
  Task(const Shape& s, const float* x, const float* dy, int64_t c0, int64_t channels, int64_t panel)
      : s_(s),
        tiling_(s),
        x_(x),
        dy_(dy),
        c0_(c0),
        channels_(channels),
        j0_(PackedB(s.co).first_column(panel)),
        cols_(PackedB(s.co).columns(panel)),
        width_(PackedB(s.co).width(panel)),
        in_step_(round_up(Cut::kAtOnce * channels, 16) + 16),
        out_step_(Cut::kAtOnce * width_ + 16),
        sum_step_(round_up(channels * width_, 16)) {
    thread_local gemm::Scratch memory;
    const int64_t longest = std::max(channels, width_);
    memory.reset(kPlaces * (in_step_ + out_step_ + sum_step_) + s.taps() * sum_step_ + round_up(longest, 16));
    in_ = memory.take(kPlaces * in_step_);
    out_ = memory.take(kPlaces * out_step_);
    sums_ = memory.take(kPlaces * sum_step_);
    taps_ = memory.take(s.taps() * sum_step_);
    zeros_ = memory.take(longest);
    std::fill_n(zeros_, longest, 0.0f);
    // Columns that do not exist.
    if (cols_ < width_) std::fill_n(out_, kPlaces * out_step_, 0.0f);
  }

  void run(int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile += Cut::kAtOnce) {
      const int64_t count = std::min(Cut::kAtOnce, end - tile);
      fill(tile, count);
      multiply_places(count, tile > begin, tile + count, std::min(Cut::kAtOnce, end - tile - count));
    }
    for (int64_t c = 0; c < channels_; ++c)
      transform(Sums{sums_ + c * width_, sum_step_, taps_ + c * width_, sum_step_}, width_);
  }
  /// The gradient's part to the place of its first element, which is that of `low` taps before the first one.
  void write(const WeightStrides& ws, int64_t low, float* to) const {
    std::vector<SumRow> rows;
    rows.reserve(s_.taps() * channels_);
    for (int64_t tap = 0; tap < s_.taps(); ++tap)
      for (int64_t c = 0; c < channels_; ++c)
        rows.push_back(
            {(c0_ + c) * ws.i + tap / 3 * ws.h + tap % 3 * ws.w - low, taps_ + tap * sum_step_ + c * width_});
    write_columns(rows, cols_, to + j0_ * ws.o, ws.o);
  }

 private:
  void fill(int64_t first, int64_t count) {
    Patch patch{{}, nullptr, in_step_};
    Square square{{}, nullptr, out_step_};
    for (int64_t t = 0; t < count; ++t) {
      const Place at(tiling_, first + t);
      find_pixels(s_, at, x_, c0_, zeros_, patch);
      patch.to = in_ + t * channels_;
      transform(patch, channels_);
      for (int64_t r = 0; r < 2; ++r)
        for (int64_t q = 0; q < 2; ++q)
          square.pixels[r * 2 + q] = at.h + r < s_.oh && at.w + q < s_.ow
                                         ? dy_ + ((at.n * s_.oh + at.h + r) * s_.ow + at.w + q) * s_.co + j0_
                                         : zeros_;
      square.to = out_ + t * width_;
      transform(square, cols_);
    }
  }
  /// Meanwhile asks for what the `next` tiles are made of.
  void multiply_places(int64_t count, bool accumulate, int64_t first_next, int64_t next) {
    const int64_t pieces = kPlaces * ceil_div(channels_, gemm::tile_rows_for(width_));
    gemm::Ahead input, output;
    if (next > 0) {
      const Place from(tiling_, first_next), to(tiling_, first_next + next - 1);
      const auto rows = [&](int64_t height, int64_t pad, int64_t reach) {
        const int64_t first = from.n * height + std::clamp<int64_t>(from.h - pad, 0, height);
        return std::pair(first, to.n * height + std::clamp<int64_t>(to.h - pad + reach, 0, height) - first);
      };
      const auto [x_row, x_rows] = rows(s_.h, s_.pad_h, 4);
      const auto [y_row, y_rows] = rows(s_.oh, 0, 2);
      input = gemm::Ahead(x_ + x_row * s_.w * s_.ci + c0_, x_rows * s_.w, s_.ci, channels_, pieces);
      output = gemm::Ahead(dy_ + y_row * s_.ow * s_.co + j0_, y_rows * s_.ow, s_.co, cols_, pieces);
    }
    // The input's rows of channels are read across: a row of the product is a channel.
    for (int64_t place = 0; place < kPlaces; ++place)
      multiply({in_ + place * in_step_, 1, channels_, out_ + place * out_step_, count, width_, width_,
                sums_ + place * sum_step_, width_, accumulate},
               channels_, [&] { input.ask(), output.ask(); });
  }

  const Shape& s_;
  const Tiling tiling_;
  const float *x_, *dy_;
  const int64_t c0_, channels_, j0_, cols_, width_, in_step_, out_step_, sum_step_;
  float *in_, *out_, *sums_, *taps_, *zeros_;
};

}  // namespace

int64_t backward_weight_winograd_workspace(const Shape& s, int threads) {
  return partial_floats(s) * (Cut(s, threads).splits - 1);
}

void backward_weight_winograd(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                              float* workspace, const Parallel& parallel, int threads) {
  const Cut cut(s, threads);
  // Strides of taps may be negative: places count from the first element in memory.
  const int64_t low = lowest_tap(s, ws);
  dweight += low;
  parallel(cut.tasks(), [&](int64_t index) {
    const int64_t split = index % cut.splits, panel = index / cut.splits % cut.panels;
    const int64_t row_task = index / cut.splits / cut.panels, c0 = cut.first_channel(row_task);
    Task task(s, x, dy, c0, std::min(s.ci, cut.first_channel(row_task + 1)) - c0, panel);
    task.run(split * cut.tiles / cut.splits, (split + 1) * cut.tiles / cut.splits);
    task.write(ws, low, split == 0 ? dweight : workspace + (split - 1) * partial_floats(s));
  });
  add_partials(s, workspace, cut.splits, dweight, parallel);
}

}  // namespace kiln::runtime::conv
