#pragma once
#include <ATen/core/Tensor.h>

#include "graph/graph.h"

namespace kiln::aten {

/// kiln::nonzero_sized(Tensor self, int size): aten::nonzero where it is known how many elements of `self` are not
/// zero, so that its shape is known. int64 [size, self.dim()], with nonzero's strides. Throws if there are more or
/// fewer. (aten::nonzero_static has other strides, and needs ten times the time.)
at::Tensor nonzero_sized(const at::Tensor& self, int64_t size);

/// Whether the dispatcher has an operator of kiln's under this name, which computes its result from its arguments as
/// ATen's do: nonzero_sized, and
/// kiln::c_math(Tensor self, str function): each element of a float64 tensor through a function of the C library
/// ("exp", "cos", ...), which Python's math module calls, too; ATen's differ in the last bit. Throws for an unknown
/// function.
bool is_own_op(const graph::Op& op);

}  // namespace kiln::aten
