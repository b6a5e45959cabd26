#pragma once
#include <cstdint>
#include <string>

#include "runtime/gemm/gemm.h"

// Two-dimensional convolution of float32 channels-last data and its two gradients, as indirect matrix products
// (gemm::multiply_indirect): no im2col buffer, no reordering of activations. Kernels of 3 x 3 with steps of one take
// fewer multiplications (winograd.h), channels of their own and few results other forms (depthwise.h, narrow.h).
namespace kiln::runtime::conv {

/// x: [n, h, w, ci], y: [n, oh, ow, co], dense (the memory of a channels-last NCHW tensor).
struct Shape {
  int64_t n, ci, h, w, co, kh, kw, oh, ow;
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t groups = 1;
  bool winograd = true;  // whether that form may serve, which rounds otherwise
  bool split = true;     // likewise gemm::multiply_split
  int64_t taps() const { return kh * kw; }
  /// Whether it is the product of all pixels, as they lie, and a matrix.
  bool is_pointwise() const {
    return kh * kw * groups == 1 && stride_h * stride_w == 1 && pad_h == 0 && pad_w == 0 && oh == h && ow == w;
  }
  int64_t outputs() const { return n * oh * ow; }
};

/// Whether there is a kernel: for one group, and for a group for each channel.
bool supported(const Shape& s);

/// A weight [co, ci / groups, kh, kw] (or its gradient) in any dense layout; strides in elements.
struct WeightStrides {
  int64_t o, i, h, w;
};

/// A weight packed once for many forward_packed(): packed_weight_floats floats, 64-byte aligned.
int64_t packed_weight_floats(const Shape& s);
/// Whether that is better than forward() with the weight as it is.
bool worth_packing(const Shape& s);
void pack_weight(const Shape& s, const float* weight, const WeightStrides& ws, float* packed,
                 const gemm::Parallel& parallel);
/// What decides what pack_weight writes, but for the weight: one packed weight serves pictures of any size that need it
/// in the same form.
std::string packed_weight_form(const Shape& s, const WeightStrides& ws);
/// y = conv(x, weight) (+ epilogue.bias[co]), from the packed weight (and the weight itself, where gemm::multiply_split
/// reads it); a row of the epilogue is a pixel. `workspace`: forward_packed_workspace floats, 64-byte aligned.
void forward_packed(const Shape& s, const float* x, const float* weight, const WeightStrides& ws, const float* packed,
                    const gemm::Epilogue& epilogue, float* y, float* workspace, const gemm::Parallel& parallel,
                    int threads);
int64_t forward_packed_workspace(const Shape& s);
/// The same from a weight as it is; `workspace`: forward_workspace floats.
void forward(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
             const gemm::Epilogue& epilogue, float* y, float* workspace, const gemm::Parallel& parallel, int threads);
int64_t forward_workspace(const Shape& s);

/// dx from dy and weight (+ epilogue.bias[ci]; epilogue.rows_done is not for this). It is the transposed convolution of
/// dy, whose gradients are forward(), for its input, and backward_weight() with x and dy in each other's places.
void backward_input(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                    const gemm::Epilogue& epilogue, float* dx, float* workspace, const gemm::Parallel& parallel,
                    int threads);
int64_t backward_input_workspace(const Shape& s);

/// dweight (with strides `ws`) from x and dy. `workspace`: as many floats for the same number of threads.
void backward_weight(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                     float* workspace, const gemm::Parallel& parallel, int threads);
int64_t backward_weight_workspace(const Shape& s, int threads);

}  // namespace kiln::runtime::conv
