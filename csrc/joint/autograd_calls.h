#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "graph/graph.h"

namespace kiln::joint {

/// Whether the operator is one that asks PyTorch's autograd and needs nothing but its arguments: kiln::backward,
/// kiln::autograd_grad, kiln::grad, kiln::set_grad, kiln::set_requires_grad, kiln::retain_grad; see replay().
bool is_autograd_call(const graph::Op& op);
/// Whether it runs the autograd engine.
bool differentiates(const graph::Op& op);

/// The tensor of an argument; undefined for None.
using TensorOf = std::function<at::Tensor(const graph::Arg&)>;
/// The tensors of an argument that is a list, one tensor, or None.
std::vector<at::Tensor> tensors_of(const graph::Arg& arg, const TensorOf& tensor_of);
/// Makes such a call on tensors of any kind, as eager does, without Python. Returns the node's results. Raises what
/// eager raises; throws Unsupported for a gradient that is not there.
std::vector<at::Tensor> make_autograd_call(const graph::Node& node, const TensorOf& tensor_of);

}  // namespace kiln::joint
