#include "runtime/conv/narrow.h"

#include <algorithm>
#include <vector>

#include "runtime/gemm/kernels.h"

namespace kiln::runtime::conv {
namespace {

// So many sums for each pixel that transposing the pixels counts for little.
constexpr int64_t kFewestTaps = 4, kFewestDepth = 8;
// From seven results on, panels of eight columns are better.
constexpr int64_t kMostChannels = 6;
// Products of a band at most: they stay in the second-level cache until they are added.
constexpr int64_t kBandFloats = 1 << 17;

/// Pictures of `h` x `w` pixels with `channels` floats each.
struct Pictures {
  int64_t h, w, channels;
};

/// Products of every tap with the pixels of rows [row0, row1) of one input picture: [tap, channel of the result,
/// pixel].
class TapProducts {
 public:
  /// `memory` is made as large as it takes.
  TapProducts(const float* weight, int64_t rows, const Pictures& in, std::vector<float>& memory)
      : weight_(weight), rows_(rows), in_(in), data_(memory) {}

  void fill(const float* picture, int64_t row0, int64_t row1) {
    row0_ = row0;
    const int64_t pixels = (row1 - row0) * in_.w, depth = in_.channels, mr = gemm::tile_rows();
    stride_ = round_up(pixels, 16);
    if (static_cast<int64_t>(data_.size()) < rows_ * stride_) data_.resize(rows_ * stride_);
    alignas(64) thread_local float panel[gemm::kMaxDepth * gemm::kMaxTileColumns];
    const gemm::PackedB layout(pixels);
    const float* const from = picture + row0 * in_.w * depth;
    for (int64_t p = 0; p < layout.panels(); ++p) {
      const int64_t j = layout.first_column(p), width = layout.width(p), count = layout.columns(p);
      for (const gemm::Depths::Block& block : depths_.blocks) {
        gemm::pack_panel(from + j * depth + block.k, depth, 1, count, block.depth, width, panel);
        for (int64_t r = 0; r < rows_; r += mr) {
          const int64_t height = std::min(mr, rows_ - r);
          const float* a[gemm::kMaxTileRows];
          float* c[gemm::kMaxTileRows];
          for (int64_t q = 0; q < height; ++q) {
            a[q] = weight_ + (r + q) * depth + block.k;
            c[q] = data_.data() + (r + q) * stride_ + j;
          }
          gemm::micro_for(height, width)({1, &block.depth, a, 1}, panel, {c, 0, count, nullptr, block.k > 0});
        }
      }
    }
  }
  const float* line(int64_t row_of_products, int64_t picture_row) const {
    return data_.data() + row_of_products * stride_ + (picture_row - row0_) * in_.w;
  }

 private:
  const float* weight_;
  int64_t rows_;
  Pictures in_;
  gemm::Depths depths_{1, in_.channels};
  int64_t row0_ = 0, stride_ = 0;
  std::vector<float>& data_;
};

/// Rows of the result in bands, so that a single picture keeps all threads busy. `floats`: products of a picture.
int64_t bands_of(int64_t pictures, int64_t rows, int64_t reach, int64_t floats, int threads) {
  const int64_t wanted = std::max(ceil_div(4 * static_cast<int64_t>(threads), pictures), floats / kBandFloats);
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows / std::max<int64_t>(4, 2 * reach)));
}

/// The weight as [tap, channel of the result, channel of the input].
void pack_taps(const Shape& s, const float* weight, const WeightStrides& ws, bool forward, float* to) {
  const int64_t results = forward ? s.co : s.ci, inputs = forward ? s.ci : s.co;
  const int64_t result = forward ? ws.o : ws.i, input = forward ? ws.i : ws.o;
  for (int64_t tap = 0; tap < s.taps(); ++tap)
    for (int64_t r = 0; r < results; ++r)
      for (int64_t i = 0; i < inputs; ++i)
        *to++ = weight[tap / s.kw * ws.h + tap % s.kw * ws.w + r * result + i * input];
}

/// Writes one row of the result: `channels` floats a pixel, from a line of each channel.
void write_row(const std::vector<float>& lines, const Pictures& out, const float* bias, float* to) {
  for (int64_t c = 0; c < out.channels; ++c) {
    const float shift = bias ? bias[c] : 0.0f;
    for (int64_t w = 0; w < out.w; ++w) to[w * out.channels + c] = lines[c * out.w + w] + shift;
  }
}

}  // namespace

bool narrow_forward(const Shape& s) {
  return s.co <= kMostChannels && s.ci >= kFewestDepth && s.taps() >= kFewestTaps * s.stride_h * s.stride_w;
}
bool narrow_backward_input(const Shape& s) {
  return s.ci <= kMostChannels && s.co >= kFewestDepth && s.taps() >= kFewestTaps;
}

void forward_narrow(const Shape& s, const float* x, const float* weight, const WeightStrides& ws, const float* bias,
                    float* y, float* workspace, const gemm::Parallel& parallel, int threads) {
  const Pictures in{s.h, s.w, s.ci}, out{s.oh, s.ow, s.co};
  pack_taps(s, weight, ws, true, workspace);
  const int64_t reach = (s.kh - 1) * s.dilation_h,
                bands = bands_of(s.n, s.oh, reach / s.stride_h, s.taps() * s.co * s.h * s.w, threads);
  parallel(s.n * bands, [&](int64_t task) {
    const int64_t n = task / bands, begin = task % bands * s.oh / bands, end = (task % bands + 1) * s.oh / bands;
    thread_local std::vector<float> memory;
    TapProducts products(workspace, s.taps() * s.co, in, memory);
    const int64_t row0 = std::clamp<int64_t>(begin * s.stride_h - s.pad_h, 0, s.h);
    products.fill(x + n * s.h * s.w * s.ci, row0, std::clamp((end - 1) * s.stride_h - s.pad_h + reach + 1, row0, s.h));
    std::vector<float> lines(s.co * s.ow);
    for (int64_t oh = begin; oh < end; ++oh) {
      std::fill(lines.begin(), lines.end(), 0.0f);
      for (int64_t tap = 0; tap < s.taps(); ++tap) {
        const int64_t h = oh * s.stride_h + tap / s.kw * s.dilation_h - s.pad_h;
        const int64_t dw = tap % s.kw * s.dilation_w - s.pad_w;
        if (h < 0 || h >= s.h) continue;
        const auto [first, last] = Columns(s, s.w, dw);
        for (int64_t c = 0; c < s.co; ++c) {
          const float* const from = products.line(tap * s.co + c, h) + dw;
          float* const to = lines.data() + c * s.ow;
          if (s.stride_w == 1)
            for (int64_t w = first; w < last; ++w) to[w] += from[w];
          else
            for (int64_t w = first; w < last; ++w) to[w] += from[w * s.stride_w];
        }
      }
      write_row(lines, out, bias, y + (n * s.oh + oh) * s.ow * s.co);
    }
  });
}

void backward_input_narrow(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                           const float* bias, float* dx, float* workspace, const gemm::Parallel& parallel,
                           int threads) {
  const Pictures in{s.oh, s.ow, s.co}, out{s.h, s.w, s.ci};
  pack_taps(s, weight, ws, false, workspace);
  const int64_t reach = (s.kh - 1) * s.dilation_h,
                bands = bands_of(s.n, s.h, reach, s.taps() * s.ci * s.oh * s.ow, threads);
  parallel(s.n * bands, [&](int64_t task) {
    const int64_t n = task / bands, begin = task % bands * s.h / bands, end = (task % bands + 1) * s.h / bands;
    thread_local std::vector<float> memory;
    TapProducts products(workspace, s.taps() * s.ci, in, memory);
    const int64_t row0 = std::min(s.oh, ceil_div(std::max<int64_t>(0, begin + s.pad_h - reach), s.stride_h));
    products.fill(dy + n * s.oh * s.ow * s.co, row0, std::clamp((end - 1 + s.pad_h) / s.stride_h + 1, row0, s.oh));
    std::vector<float> lines(s.ci * s.w);
    for (int64_t h = begin; h < end; ++h) {
      std::fill(lines.begin(), lines.end(), 0.0f);
      for (int64_t tap = 0; tap < s.taps(); ++tap) {
        const int64_t at = h + s.pad_h - tap / s.kw * s.dilation_h, dw = tap % s.kw * s.dilation_w - s.pad_w;
        if (at < 0 || at % s.stride_h != 0 || at / s.stride_h >= s.oh) continue;
        const auto [first, last] = Columns(s, s.w, dw);
        for (int64_t c = 0; c < s.ci; ++c) {
          const float* const from = products.line(tap * s.ci + c, at / s.stride_h);
          float* const to = lines.data() + c * s.w + dw;
          if (s.stride_w == 1)
            for (int64_t w = first; w < last; ++w) to[w] += from[w];
          else
            for (int64_t w = first; w < last; ++w) to[w * s.stride_w] += from[w];
        }
      }
      write_row(lines, out, bias, dx + (n * s.h + h) * s.w * s.ci);
    }
  });
}

}  // namespace kiln::runtime::conv
