#pragma once
#include "runtime/conv/image.h"

namespace kiln::runtime::conv {

/// Results of few channels would fill a small part of each vector. For them the products of all taps with each pixel
/// are computed, pixels side by side in the vectors, and then added where they belong: the sum that col2im makes.
/// Whether that is better for forward(), or backward_input().
bool narrow_forward(const Shape& s);
bool narrow_backward_input(const Shape& s);

/// forward() and backward_input() in that way. `workspace`: as many floats as the weight has.
void forward_narrow(const Shape& s, const float* x, const float* weight, const WeightStrides& ws, const float* bias,
                    float* y, float* workspace, const gemm::Parallel& parallel, int threads);
void backward_input_narrow(const Shape& s, const float* dy, const float* weight, const WeightStrides& ws,
                           const float* bias, float* dx, float* workspace, const gemm::Parallel& parallel, int threads);

}  // namespace kiln::runtime::conv
