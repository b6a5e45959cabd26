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
/// function;
/// kiln::ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool
/// zero_infinity) -> (Tensor, Tensor): aten::_ctc_loss of lengths in tensors (int64 or int32 [N]), which reads them
/// when it runs. float32 or float64 [T, N, C] and targets [N, S] give [N] and what the backward needs, [N, T, 2 * S +
/// 1]; nothing for targets in one line, whose longest nobody knows before. Throws as aten::_ctc_loss does;
/// kiln::ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,
/// Tensor loss, Tensor kept, int blank, bool zero_infinity) -> Tensor: the gradient of log_probs.
bool is_own_op(const graph::Op& op);

}  // namespace kiln::aten
