#pragma once
#include "runtime/conv/winograd.h"
#include "runtime/gemm/ahead.h"

namespace kiln::runtime::conv {

/// The weight of a convolution as lines of the products' right sides: line k holds the kernels of input channel k, a
/// column for each output channel, in panels of gemm::PackedB.
class KernelLines {
 public:
  KernelLines(const Shape& s, const float* weight, const WeightStrides& ws);
  /// Transforms lines [k0, k1) of a panel: those of place p to `to` + p * `step`, one behind the other.
  void transform(int64_t panel, int64_t k0, int64_t k1, float* to, int64_t step) const;
  /// What that will read, in so many pieces.
  gemm::Ahead ahead(int64_t panel, int64_t k0, int64_t k1, int64_t pieces) const;

 private:
  gemm::PackedB layout_;
  const float* weight_;
  WeightStrides ws_;
  const float *low_, *end_;  // the weight's memory
  bool taps_together_;       // the nine elements of a kernel, in their order or from the last on
};

}  // namespace kiln::runtime::conv
