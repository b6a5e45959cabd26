#pragma once
#include "runtime/conv/conv.h"

// Convolutions with kernels of 3 x 3 and steps of one by Winograd's minimal filtering: four results that lie in a
// square take 16 multiplications rather than 36. Their input, a patch of 4 x 4 pixels, and the kernel are transformed,
// by additions almost alone; for each of the 16 places of a patch the results are a plain product over channels; and
// these are transformed back. F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
// arXiv:1509.09308, 2015. Rounding is that of a direct sum or less: sums are shorter by the factor of nine, and no
// factor is larger than one. Larger squares would save more, and lose digits. A result depends on the pixels of its
// window alone, NaNs included; but the sum of infinite ones may be NaN where the direct sum is infinite.
namespace kiln::runtime::conv {

/// What becomes of the weight: it is transformed once for many calls, or in each call, or is the result.
enum class Weight : uint8_t { Kept, Given, Wanted };
/// Whether that is better than products over all taps.
bool prefers_winograd(const Shape& s, Weight weight);

/// The transformed weight, as pack_weight's: so many floats, 64-byte aligned.
int64_t winograd_weight_floats(const Shape& s);
void transform_weight_winograd(const Shape& s, const float* weight, const WeightStrides& ws, float* transformed,
                               const gemm::Parallel& parallel);
/// As forward_packed, without a workspace.
void forward_winograd(const Shape& s, const float* x, const float* transformed, const gemm::Epilogue& epilogue,
                      float* y, const gemm::Parallel& parallel, int threads);

/// The same from a weight as it is, each panel of which is transformed by the task that multiplies it: whether that is
/// better, as it is for large weights and few tiles, and with `patches` of so many floats, 64-byte aligned. The
/// epilogue's rows_done is not called.
bool winograd_packs_by_panel(const Shape& s, int threads);
int64_t winograd_by_panel_floats(const Shape& s);
void forward_winograd_by_panel(const Shape& s, const float* x, const float* weight, const WeightStrides& ws,
                               const gemm::Epilogue& epilogue, float* y, float* patches,
                               const gemm::Parallel& parallel);

/// As backward_weight.
void backward_weight_winograd(const Shape& s, const float* x, const float* dy, float* dweight, const WeightStrides& ws,
                              float* workspace, const gemm::Parallel& parallel, int threads);
int64_t backward_weight_winograd_workspace(const Shape& s, int threads);

}  // namespace kiln::runtime::conv
