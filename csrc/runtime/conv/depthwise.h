#pragma once
#include <algorithm>

#include "runtime/conv/conv.h"

namespace kiln::runtime::conv {

/// Convolutions in which each output channel reads the input channel of its own (groups == ci == co): no product has
/// anything to share there, so pixels' channels lie in the vectors, and a pixel is read once for several results.
inline bool is_depthwise(const Shape& s) { return s.groups > 1 && s.groups == s.ci && s.groups == s.co; }
/// Whether results are best summed up tap by tap: for these, and for a filter of pictures of one channel.
inline bool sums_taps(const Shape& s) {
  constexpr int64_t kFewestColumns = 32;
  return is_depthwise(s) ||
         (s.ci == 1 && s.co == 1 && s.taps() > 1 && s.stride_w == 1 && std::min(s.w, s.ow) >= kFewestColumns);
}
/// The same of forward(), for which there may be a few such filters (the two of Sobel).
inline bool sums_taps_forward(const Shape& s) {
  constexpr int64_t kMostFilters = 7;
  Shape one = s;
  one.co = 1;
  return is_depthwise(s) || (s.groups == 1 && s.co <= kMostFilters && sums_taps(one));
}

/// forward() where sums_taps_forward(), backward_input() where sums_taps(), and backward_weight() of depthwise ones.
/// `workspace`: depthwise_workspace floats for the first two.
int64_t depthwise_workspace(const Shape& s);
void forward_depthwise(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
                       const gemm::Epilogue& epilogue, float* y, float* workspace, const gemm::Parallel& parallel,
                       int threads);
void backward_input_depthwise(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                              const float* bias, float* dx, float* workspace, const gemm::Parallel& parallel,
                              int threads);
void backward_weight_depthwise(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                               float* workspace, const gemm::Parallel& parallel, int threads);
int64_t backward_weight_depthwise_workspace(const Shape& s, int threads);

}  // namespace kiln::runtime::conv
