#include "joint/autograd_calls.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "aten/pch.h"
#include "base/error.h"
#include "joint/state.h"

namespace kiln::joint {

using graph::Arg;
using graph::Node;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

namespace {
struct Ops {
  graph::Op backward{"kiln::backward"}, grads{"kiln::autograd_grad"}, grad{"kiln::grad"}, set_grad{"kiln::set_grad"},
      set_requires_grad{"kiln::set_requires_grad"}, retain_grad{"kiln::retain_grad"};
};
const Ops& ops() {
  static const Ops ops;
  return ops;
}

variable_list differentiate(const variable_list& of, const variable_list& tangents, bool keep, bool create,
                            bool accumulate, const variable_list& inputs) {
  edge_list roots, targets;
  variable_list seeds;
  for (size_t i = 0; i < of.size(); ++i) {
    TORCH_CHECK(of[i].requires_grad(), "element ", i, " of tensors does not require grad and does not have a grad_fn");
    roots.push_back(torch::autograd::impl::gradient_edge(of[i]));
    at::Tensor seed = i < tangents.size() ? tangents[i] : at::Tensor();
    if (!seed.defined()) {
      TORCH_CHECK(of[i].numel() == 1, "grad can be implicitly created only for scalar outputs");
      seed = at::ones_like(of[i], c10::MemoryFormat::Preserve);
    }
    seeds.push_back(std::move(seed));
  }
  for (const at::Tensor& t : inputs) {
    TORCH_CHECK(t.requires_grad(), "One of the differentiated Tensors does not require grad");
    targets.push_back(torch::autograd::impl::gradient_edge(t));
  }
  const TraceState::BackwardScope scope;
  // The base engine: Python's own wants to release the GIL, and runs the same code.
  return Engine::get_base_engine().execute(roots, seeds, keep, create, accumulate, targets);
}
}  // namespace

bool differentiates(const graph::Op& op) { return op == ops().backward || op == ops().grads; }

bool is_autograd_call(const graph::Op& op) {
  return differentiates(op) || op == ops().grad || op == ops().set_grad || op == ops().set_requires_grad ||
         op == ops().retain_grad;
}

variable_list tensors_of(const Arg& a, const TensorOf& tensor_of) {
  if (a.is_none()) return {};
  if (a.is_value()) return {tensor_of(a)};
  variable_list out;
  for (const Arg& item : a.list()) out.push_back(tensor_of(item));
  return out;
}

std::vector<at::Tensor> make_autograd_call(const Node& node, const TensorOf& tensor_of) {
  const auto tensor = [&](size_t i) { return tensor_of(node.arg(i)); };
  const auto list = [&](size_t i) { return tensors_of(node.arg(i), tensor_of); };
  const auto flag = [&](size_t i) { return node.arg(i).to_bool(); };
  if (node.op == ops().backward) {
    differentiate(list(0), list(1), flag(2), flag(3), true, node.args.size() > 4 ? list(4) : variable_list());
    return {};
  }
  if (node.op == ops().grads) {
    variable_list grads = differentiate(list(0), list(1), flag(3), flag(4), false, list(2));
    const bool allow_unused = flag(5);
    for (const at::Tensor& grad : grads)
      TORCH_CHECK(allow_unused || grad.defined(),
                  "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                  "if this is the desired behavior.");
    return grads;
  }
  if (node.op == ops().grad) {
    const at::Tensor grad = tensor(0).mutable_grad();
    if (!grad.defined()) throw Unsupported("kiln::grad of a tensor that has none");
    return {grad};
  }
  if (node.op == ops().set_grad) {
    tensor(0).mutable_grad() = tensor(1);
    return {};
  }
  if (node.op == ops().set_requires_grad) {
    const at::Tensor t = tensor(0);
    TraceState::set_requires_grad(t, flag(1));
    return node.results.empty() ? variable_list() : variable_list{t};
  }
  KILN_CHECK(node.op == ops().retain_grad, "not a call of autograd: " + node.op.name());
  tensor(0).retain_grad();
  return {};
}

}  // namespace kiln::joint
