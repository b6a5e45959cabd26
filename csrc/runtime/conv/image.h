#pragma once
#include <algorithm>
#include <cstring>

#include "runtime/conv/conv.h"

// How the products of a convolution read its input.
namespace kiln::runtime::conv {

/// The input as products read it: a tap is a run of `channels` contiguous floats, pixels are `pixel` floats apart.
struct Image {
  const float* data;
  int64_t h, w, pixel, channels, taps_h, taps_w, pad_h, pad_w;
  int64_t taps() const { return taps_h * taps_w; }
};

/// Few channels make short runs. Then the image is copied into a frame of zeros, and all taps of a kernel row are one
/// run.
inline bool joins_taps(const Shape& s) { return s.ci < 16 && s.kw > 1 && s.dilation_w == 1; }
/// Size of that frame.
inline int64_t frame_floats(const Shape& s) {
  return joins_taps(s) ? round_up(s.n * (s.h + 2 * s.pad_h) * (s.w + 2 * s.pad_w) * s.ci, 16) : 0;
}
/// Where and how large that is, for an input or its frame at `data`.
inline Image layout_of(const Shape& s, const float* data) {
  if (!joins_taps(s)) return {data, s.h, s.w, s.ci, s.ci, s.kh, s.kw, s.pad_h, s.pad_w};
  return {data, s.h + 2 * s.pad_h, s.w + 2 * s.pad_w, s.ci, s.kw * s.ci, s.kh, 1, 0, 0};
}
inline Image image_of(const Shape& s, const float* x, float* frame, const gemm::Parallel& parallel) {
  if (!joins_taps(s)) return layout_of(s, x);
  const Image image = layout_of(s, frame);
  parallel(s.n * image.h, [&](int64_t line) {
    float* to = frame + line * image.w * s.ci;
    const int64_t from = line % image.h - s.pad_h;
    std::fill_n(to, image.w * s.ci, 0.0f);
    if (from >= 0 && from < s.h)
      std::memcpy(to + s.pad_w * s.ci, x + (line / image.h * s.h + from) * s.w * s.ci, sizeof(float) * s.w * s.ci);
  });
  return image;
}

/// Output columns [begin, end) whose input column exists in rows of `w` pixels, for the tap that reads column `dw` for
/// output column 0.
struct Columns {
  int64_t begin, end;
  Columns(const Shape& s, int64_t w, int64_t dw)
      : begin(std::min(s.ow, dw >= 0 ? 0 : ceil_div(-dw, s.stride_w))),
        end(w - dw <= 0 ? begin : std::clamp(ceil_div(w - dw, s.stride_w), begin, s.ow)) {}
};

/// A convolution with steps of one can be turned around: dx is the convolution of dy, and the gradient of the weight
/// that of this convolution when x is the gradient of its output. Its weight has inputs and outputs exchanged and the
/// taps in the opposite order, from the last on.
inline bool can_turn(const Shape& s) {
  return s.stride_h == 1 && s.stride_w == 1 && (s.kh - 1) * s.dilation_h >= s.pad_h &&
         (s.kw - 1) * s.dilation_w >= s.pad_w;
}
inline Shape turned(Shape s) {
  std::swap(s.ci, s.co), std::swap(s.h, s.oh), std::swap(s.w, s.ow);
  s.pad_h = (s.kh - 1) * s.dilation_h - s.pad_h;
  s.pad_w = (s.kw - 1) * s.dilation_w - s.pad_w;
  return s;
}
inline WeightStrides turned(const WeightStrides& ws) { return {ws.i, ws.o, -ws.h, -ws.w}; }
inline int64_t last_tap(const Shape& s, const WeightStrides& ws) { return (s.kh - 1) * ws.h + (s.kw - 1) * ws.w; }
/// Of the taps the one that lies first in memory, as strides may be negative: at most 0.
inline int64_t lowest_tap(const Shape& s, const WeightStrides& ws) {
  return (s.kh - 1) * std::min<int64_t>(0, ws.h) + (s.kw - 1) * std::min<int64_t>(0, ws.w);
}

}  // namespace kiln::runtime::conv
