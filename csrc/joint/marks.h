#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "joint/autograd_calls.h"

namespace kiln::joint {

/// Whether the node tells the joint trace what autograd is to run, and when: kiln::custom_function,
/// kiln::register_hook, kiln::gradient_hook and their like; see replay().
bool is_mark(const graph::Op& op);

/// grad_fn of what a custom function returned, on fakes: its gradients have metadata and nothing else.
class FakeCustomFunction : public torch::autograd::Node {
 public:
  std::string name() const override { return "CustomFunction"; }
  /// Gives `outputs` this history; what the backward is given: fakes like the outputs.
  std::vector<at::Tensor> begin(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs);
  /// What the backward gave, and for each the given gradients that it is computed from, by position. From what else it
  /// is computed its own history says.
  void end(const std::vector<at::Tensor>& grads, std::vector<std::vector<size_t>> given = {});
  /// Lets go of the gradients' histories, which may lead back here. No backward with create_graph=True follows.
  void forget();

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;

 private:
  std::vector<graph::TensorMeta> grads_;  // undefined where there is none
  std::vector<std::vector<size_t>> given_;
  torch::autograd::edge_list histories_;
};

/// Does what marks do on fakes that a traced graph is run on in order: gives the tensors that they bring in. Bodies of
/// custom functions and hooks are run where they stand, and nothing but shapes is expected of a backward.
class MarksOnFakes {
 public:
  /// Whether `n` is a mark, or a gradient that is looked at from a hook, before there is one.
  bool takes(const graph::Node& n) const;
  /// The node's results.
  std::vector<at::Tensor> make(const graph::Node& n, const TensorOf& tensor_of);

 private:
  c10::intrusive_ptr<FakeCustomFunction> function_;  // whose body is being run
  bool in_hook_ = false;
};

}  // namespace kiln::joint
