#pragma once
#include <ATen/core/Tensor.h>

#include "graph/graph.h"

namespace kiln::aten {

/// kiln::nonzero_sized(Tensor self, int size): aten::nonzero where it is known how many elements of `self` are not
/// zero, so that its shape is known. int64 [size, self.dim()], with nonzero's strides. Throws if there are more or
/// fewer. (aten::nonzero_static has other strides, and needs ten times the time.)
at::Tensor nonzero_sized(const at::Tensor& self, int64_t size);
const graph::Op& nonzero_sized_op();

}  // namespace kiln::aten
