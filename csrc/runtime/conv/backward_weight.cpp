#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/conv/depthwise.h"
#include "runtime/conv/image.h"
#include "runtime/conv/weight_rows.h"
#include "runtime/conv/winograd.h"
#include "runtime/gemm/ahead.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/scratch.h"
#include "runtime/gemm/split.h"

// The gradient of a convolution's weight: for each tap the product of the input, shifted, with the gradient of the
// output, summed over all output pixels.
namespace kiln::runtime::conv {
namespace {

using gemm::Depths;
using gemm::PackedB;
using gemm::Parallel;

/// Output pixels one after the other, and the first pixel that a tap reads for them; the others follow in steps of the
/// stride.
struct Run {
  int64_t start, length, pixel;
};

/// Whether the first tap reads the pixels one by one: output pixel i meets input pixel i.
bool meets_all(const Shape& s, const Image& image) {
  return s.stride_h == 1 && s.stride_w == 1 && image.pad_h == 0 && image.pad_w == 0 && s.oh == image.h &&
         s.ow == image.w;
}

/// The output pixels [begin, begin + depth) for which a tap reads inside of the image; starts count from begin.
void find_runs(const Shape& s, const Image& image, int64_t tap, int64_t begin, int64_t depth, std::vector<Run>& runs) {
  runs.clear();
  if (image.taps() == 1 && meets_all(s, image)) return runs.push_back({0, depth, begin});
  const int64_t dh = tap / image.taps_w * s.dilation_h - image.pad_h,
                dw = tap % image.taps_w * s.dilation_w - image.pad_w;
  const Columns columns(s, image.w, dw);
  for (int64_t i = begin; i < begin + depth;) {
    const int64_t n = i / (s.oh * s.ow), line = i - i % s.ow, h = i / s.ow % s.oh * s.stride_h + dh;
    const int64_t next = std::min(begin + depth, line + s.ow);
    const int64_t first = std::clamp(line + columns.begin, i, next), last = std::clamp(line + columns.end, first, next);
    if (h >= 0 && h < image.h && first < last) {
      const int64_t pixel = (n * image.h + h) * image.w + (first - line) * s.stride_w + dw;
      if (!runs.empty() && runs.back().start + runs.back().length == first - begin &&
          runs.back().pixel + runs.back().length * s.stride_w == pixel)
        runs.back().length += last - first;
      else
        runs.push_back({first - begin, last - first, pixel});
    }
    i = next;
  }
}

/// The input of some tiles of channels for a block of output pixels, as left operands of products.
class Tiles {
 public:
  /// Long runs are read from one copy of the pixels that any tap reads. Short ones are copied tap by tap, with zeros
  /// where a tap reads outside of the image: one run for the product.
  static bool shares(const Shape& s, const Image& image) { return image.taps() > 1 && s.ow >= 8; }
  /// Floats for one tile of channels and all taps, about.
  static int64_t floats(const Shape& s, const Image& image) {
    const int64_t mr = gemm::tile_rows();
    if (!shares(s, image)) return image.taps() * gemm::kMaxDepth * mr;
    const int64_t around = (image.taps_h - 1) * s.dilation_h * image.w + (image.taps_w - 1) * s.dilation_w;
    return (gemm::kMaxDepth * s.stride_h * s.stride_w + around) * mr;
  }

  /// `memory` is made as large as it takes.
  Tiles(const Shape& s, const Image& image, int64_t c0, int64_t channels, std::vector<float>& memory)
      : s_(s), image_(image), c0_(c0), channels_(channels), memory_(memory), runs_(image.taps()) {}

  /// Copies what the output pixels [begin, begin + depth) need.
  void fill(int64_t begin, int64_t depth) {
    const int64_t mr = gemm::tile_rows(), tiles = ceil_div(channels_, mr);
    rows_of_each_ = 0;
    for (int64_t tap = 0; tap < image_.taps(); ++tap) find_runs(s_, image_, tap, begin, depth, runs_[tap]);
    if (shares(s_, image_)) {
      lo_ = INT64_MAX;
      int64_t end = 0;
      for (const std::vector<Run>& runs : runs_)
        for (const Run& run : runs) {
          lo_ = std::min(lo_, run.pixel);
          end = std::max(end, run.pixel + (run.length - 1) * s_.stride_w + 1);
        }
      lines_ = std::max<int64_t>(0, end - lo_);
      grow(tiles * lines_ * mr);
      if (lines_) copy(memory_.data(), 0, lines_, lo_, 1);
      return;
    }
    lines_ = depth;
    grow(image_.taps() * tiles * depth * mr);
    for (int64_t tap = 0; tap < image_.taps(); ++tap) {
      float* const to = memory_.data() + tap * tiles * depth * mr;
      int64_t done = 0;
      for (const Run& run : runs_[tap]) {
        clear(to, done, run.start);
        copy(to, run.start, run.length, run.pixel, s_.stride_w);
        done = run.start + run.length;
      }
      clear(to, done, depth);
    }
  }

  /// Of one tap and `rows` channels from channel `c` on; valid until fill(), or a call with another number of rows.
  gemm::Left left(int64_t tap, int64_t c, int64_t rows) {
    if (rows != rows_of_each_) find_all(rows);
    const int64_t q = tap * ceil_div(channels_, rows) + c / rows, first = first_[q];
    return {first_[q + 1] - first, lengths_.data() + first, rows_.data() + first * gemm::kMaxTileRows, step_,
            starts_.data() + first};
  }

 private:
  /// The operands of all taps and channels, which every panel meets.
  void find_all(int64_t rows) {
    const int64_t mr = gemm::tile_rows(), tiles = ceil_div(channels_, mr);
    const bool shared = shares(s_, image_);
    rows_of_each_ = rows, step_ = shared ? mr * s_.stride_w : mr;
    first_.clear(), starts_.clear(), lengths_.clear(), rows_.clear();
    for (int64_t tap = 0; tap < image_.taps(); ++tap)
      for (int64_t tile = 0; tile < tiles; tile += rows / mr) {
        first_.push_back(static_cast<int64_t>(starts_.size()));
        const auto add = [&](const Run& run, const float* from) {
          starts_.push_back(run.start), lengths_.push_back(run.length);
          rows_.resize(rows_.size() + gemm::kMaxTileRows);
          const float** to = rows_.data() + rows_.size() - gemm::kMaxTileRows;
          for (int64_t r = 0; r < rows; r += mr, from += lines_ * mr)
            for (int64_t q = 0; q < mr; ++q) *to++ = from + q;
        };
        if (!shared)
          add({0, lines_, 0}, memory_.data() + (tap * tiles + tile) * lines_ * mr);
        else
          for (const Run& run : runs_[tap]) add(run, memory_.data() + (tile * lines_ + run.pixel - lo_) * mr);
      }
    first_.push_back(static_cast<int64_t>(starts_.size()));
  }
  void grow(int64_t floats) {
    if (static_cast<int64_t>(memory_.size()) < floats) memory_.resize(floats);
  }
  /// `lines` pixels from `pixel` on, `step` apart, to lines at.. of all tiles.
  void copy(float* to, int64_t at, int64_t lines, int64_t pixel, int64_t step) const {
    const int64_t mr = gemm::tile_rows(), whole = channels_ / mr;
    const float* const from = image_.data + pixel * image_.pixel + c0_;
    gemm::pack_sixes(from, step * image_.pixel, lines, whole, lines_, false, to + at * mr);
    for (int64_t c = whole * mr; c < channels_; c += mr)
      gemm::pack_panel(from + c, 1, step * image_.pixel, std::min(mr, channels_ - c), lines, mr,
                       to + c * lines_ + at * mr);
  }
  void clear(float* to, int64_t begin, int64_t end) const {
    const int64_t mr = gemm::tile_rows();
    for (int64_t c = 0; c < channels_ && begin < end; c += mr)
      std::fill_n(to + c * lines_ + begin * mr, (end - begin) * mr, 0.0f);
  }

  const Shape& s_;
  const Image& image_;
  int64_t c0_, channels_, lines_ = 0, lo_ = 0;  // lines: of each copy of a tile; lo: pixel of the first
  std::vector<float>& memory_;
  std::vector<std::vector<Run>> runs_;  // by tap
  // Operands: those of one tap and some rows are runs [first, next one's first).
  int64_t rows_of_each_ = 0, step_ = 0;
  std::vector<int64_t> first_, starts_, lengths_;
  std::vector<const float*> rows_;
};

/// How the work is cut: ranges of input channels, all taps of each; ranges of output channels; and where these are few,
/// ranges of pixels, whose sums are added up at the end.
struct Cut {
  /// Tiles, one for each tap, that meet a panel of the output's gradient: so many that copying it counts for little,
  /// and so few that their input stays in the second-level cache beside it.
  static constexpr int64_t kTiles = 36, kTileFloats = 3 << 15;
  static constexpr int64_t kColumns = 256;  // that meet a copy of the input
  int64_t channel_tiles, row_tasks, panels, column_tasks, blocks, splits;

  Cut(const Shape& s, int threads) {
    const Image image = layout_of(s, nullptr);
    const int64_t wanted = 4 * static_cast<int64_t>(threads);
    channel_tiles = ceil_div(image.channels, gemm::tile_rows());
    const int64_t together = std::min(kTiles / image.taps(), kTileFloats / Tiles::floats(s, image));
    row_tasks = ceil_div(channel_tiles, std::max<int64_t>(1, together));
    panels = PackedB(s.co).panels();
    column_tasks = std::min(panels, std::max(ceil_div(s.co, kColumns), ceil_div(wanted, row_tasks)));
    blocks = static_cast<int64_t>(Depths(1, s.outputs()).blocks.size());
    splits = std::clamp<int64_t>(ceil_div(wanted, row_tasks * column_tasks), 1, std::max<int64_t>(1, blocks / 2));
  }
  int64_t tasks() const { return row_tasks * column_tasks * splits; }
  int64_t first_tile(int64_t row_task) const { return row_task * channel_tiles / row_tasks; }
  int64_t first_panel(int64_t column_task) const { return column_task * panels / column_tasks; }
  int64_t first_block(int64_t split) const { return split * blocks / splits; }
};

/// Kernels of one element, with a gradient that is large for the pixels that it sums up: the plain product
/// transposed(dy) x, or its transpose, is that in place. With many pixels, copying dy for that costs more than it wins,
/// unless narrow panels meet the copy often.
bool is_product(const Shape& s) {
  return s.taps() == 1 && s.pad_h == 0 && s.pad_w == 0 &&
         (s.ci * s.co >= 8 * s.outputs() || s.co < gemm::kMaxTileColumns / 4 || !gemm::has_avx512());
}
/// Whether it is made by gemm::multiply_split, as transposed(dy) x or its transpose.
bool splits(const Shape& s) { return s.split && s.is_pointwise() && gemm::splits(s.co, s.ci, s.outputs()); }

/// Of the pixels that such a kernel meets, where it leaves some out.
int64_t input_floats(const Shape& s) {
  return meets_all(s, layout_of(s, nullptr)) ? 0 : round_up(s.outputs() * s.ci, 16);
}

/// Few output channels would fill a small part of each vector.
bool is_turned(const Shape& s) { return s.co < 8 && s.ci > s.co && s.taps() > 1 && can_turn(s); }

}  // namespace

int64_t backward_weight_workspace(const Shape& s, int threads) {
  if (is_depthwise(s)) return backward_weight_depthwise_workspace(s, threads);
  if (splits(s))
    return std::max(gemm::split_workspace_floats(s.ci, s.outputs()), gemm::split_workspace_floats(s.co, s.outputs()));
  if (is_turned(s)) return backward_weight_workspace(turned(s), threads);
  if (prefers_winograd(s, Weight::Wanted)) return backward_weight_winograd_workspace(s, threads);
  if (is_product(s))
    return input_floats(s) +
           std::max(gemm::workspace_floats(s.co, s.ci, s.outputs(), {nullptr, 1, s.co}, {nullptr, s.ci, 1}, threads),
                    gemm::workspace_floats(s.ci, s.co, s.outputs(), {nullptr, 1, s.ci}, {nullptr, s.co, 1}, threads));
  return frame_floats(s) + partial_floats(s) * (Cut(s, threads).splits - 1);
}

void backward_weight(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                     float* workspace, const Parallel& parallel, int threads) {
  if (is_depthwise(s)) return backward_weight_depthwise(s, x, dy, dweight, ws, workspace, parallel, threads);
  const int64_t size = s.taps() * s.ci * s.co, mr = gemm::tile_rows();
  if (size == 0) return;
  if (s.outputs() == 0) {
    std::fill_n(dweight, size, 0.0f);
    return;
  }
  if (splits(s)) {
    if (ws.i == 1 || s.ci == 1)
      gemm::multiply_split(s.co, s.ci, s.outputs(), {dy, 1, s.co}, {x, s.ci, 1}, dweight, ws.o, {}, workspace, parallel,
                           threads);
    else
      gemm::multiply_split(s.ci, s.co, s.outputs(), {x, 1, s.ci}, {dy, s.co, 1}, dweight, ws.i, {}, workspace, parallel,
                           threads);
    return;
  }
  if (is_turned(s))
    return backward_weight(turned(s), dy, x, dweight + last_tap(s, ws), turned(ws), workspace, parallel, threads);
  if (prefers_winograd(s, Weight::Wanted))
    return backward_weight_winograd(s, x, dy, dweight, ws, workspace, parallel, threads);
  if (is_product(s)) {
    float* const input = workspace;
    if (input_floats(s)) {
      parallel(s.n * s.oh, [&](int64_t line) {
        const float* from = x + (line / s.oh * s.h + line % s.oh * s.stride_h) * s.w * s.ci;
        for (int64_t i = 0; i < s.ow; ++i)
          std::memcpy(input + (line * s.ow + i) * s.ci, from + i * s.stride_w * s.ci, sizeof(float) * s.ci);
      });
      x = input;
    }
    float* const work = workspace + input_floats(s);
    const gemm::Matrix inputs{x, s.ci, 1}, outputs{dy, s.co, 1};
    if (ws.i == 1 || s.ci == 1)
      gemm::multiply(s.co, s.ci, s.outputs(), {dy, 1, s.co}, inputs, dweight, ws.o, {}, work, parallel, threads);
    else
      gemm::multiply(s.ci, s.co, s.outputs(), {x, 1, s.ci}, outputs, dweight, ws.i, {}, work, parallel, threads);
    return;
  }
  const Cut cut(s, threads);
  // Strides of taps may be negative: places count from the first element in memory.
  const int64_t low = lowest_tap(s, ws);
  dweight += low;
  // The sums of all ranges of pixels but the first, each laid out as the gradient is.
  float* const partial = workspace + frame_floats(s);
  const Image image = image_of(s, x, workspace, parallel);
  const Depths depths(1, s.outputs());
  const PackedB layout(s.co);
  const bool packed_already =
      layout.panels() == 1 && layout.width(0) == s.co && reinterpret_cast<uintptr_t>(dy) % 64 == 0;
  parallel(cut.tasks(), [&](int64_t task) {
    const int64_t split = task % cut.splits, column_task = task / cut.splits % cut.column_tasks;
    const int64_t row_task = task / cut.splits / cut.column_tasks;
    const int64_t tile0 = cut.first_tile(row_task), tiles = cut.first_tile(row_task + 1) - tile0;
    const int64_t panel0 = cut.first_panel(column_task), panel1 = cut.first_panel(column_task + 1);
    const int64_t block0 = cut.first_block(split), block1 = cut.first_block(split + 1);
    const int64_t j0 = layout.first_column(panel0), cols = std::min(s.co, layout.first_column(panel1)) - j0;
    const int64_t c0 = tile0 * mr, channels = std::min(tiles * mr, image.channels - c0);
    const int64_t ld = round_up(cols, 16), taps = image.taps();
    thread_local gemm::Scratch storage;
    thread_local std::vector<float> inputs;
    const int64_t b_floats = gemm::kMaxDepth * gemm::kMaxTileColumns, sum_floats = taps * channels * ld;
    storage.reset(b_floats + sum_floats);
    float *const b_copy = storage.take(b_floats), *const sums =
                                                      storage.take(sum_floats);  // sums: [tap, channel, column]
    Tiles left(s, image, c0, channels, inputs);
    for (int64_t bi = block0; bi < block1; ++bi) {
      const Depths::Block& block = depths.blocks[bi];
      left.fill(block.k, block.depth);
      for (int64_t panel = panel0; panel < panel1; ++panel) {
        const int64_t j = layout.first_column(panel), width = layout.width(panel), count = layout.columns(panel);
        const float* b = dy + block.k * s.co;
        if (!packed_already) {
          gemm::pack_panel(b + j, 1, s.co, count, block.depth, width, b_copy);
          b = b_copy;
        }
        // What is copied next: the next panel, or the first one of the next block.
        const bool last = panel + 1 == panel1;
        gemm::Ahead ahead;
        if (!packed_already && (!last || bi + 1 < block1))
          ahead = gemm::Ahead(last ? dy + (block.k + block.depth) * s.co + j0 : dy + block.k * s.co + j + width,
                              block.depth, s.co, width, taps * tiles);
        const int64_t rows = gemm::tile_rows_for(width);
        for (int64_t tap = 0; tap < taps; ++tap)
          for (int64_t c = 0; c < channels; c += rows) {
            ahead.ask();
            const int64_t height = std::min(rows, channels - c);
            float* c_rows[gemm::kMaxTileRows];
            for (int64_t r = 0; r < height; ++r) c_rows[r] = sums + (tap * channels + c + r) * ld;
            gemm::micro_for(height, width)(left.left(tap, c, rows), b, {c_rows, j - j0, count, nullptr, bi != block0});
          }
      }
    }
    std::vector<SumRow> rows;
    rows.reserve(taps * channels);
    for (int64_t tap = 0; tap < taps; ++tap)
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t i = (c0 + c) % s.ci;  // joined taps are channels of one tap
        const int64_t kh = tap / image.taps_w, kw = tap % image.taps_w + (c0 + c) / s.ci;
        rows.push_back({i * ws.i + kh * ws.h + kw * ws.w - low, sums + (tap * channels + c) * ld});
      }
    float* const to = split == 0 ? dweight : partial + (split - 1) * partial_floats(s);
    write_columns(rows, cols, to + j0 * ws.o, ws.o);
  });
  add_partials(s, partial, cut.splits, dweight, parallel);
}

}  // namespace kiln::runtime::conv
