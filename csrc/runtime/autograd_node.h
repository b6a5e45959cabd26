#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "runtime/compiled_function.h"

namespace kiln::runtime {

/// The grad_fn of a compiled function's outputs. Inputs: one gradient per differentiable forward output; outputs: one
/// per entry of grad_of. In eager each output has a graph of its own: a gradient that no defined one reaches is
/// undefined, and outputs that have no node with saved tensors in common can be differentiated one after another.
/// Tensors are kept as SavedVariables, so that saved-tensor hooks, version checks and "backward a second time" are
/// autograd's own.
class CompiledBackward : public torch::autograd::Node {
 public:
  explicit CompiledBackward(std::shared_ptr<CompiledParts> parts)
      : parts_(std::move(parts)), used_up_(parts_->tangent_of.size()) {}
  std::string name() const override { return "CompiledBackward"; }
  void release_variables() override;

  std::vector<torch::autograd::SavedVariable> saved;
  /// Keeps the call's inputs, for a second differentiation.
  void keep_inputs(const std::vector<at::Tensor>& inputs);

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

 private:
  torch::autograd::variable_list apply_in_eager(const torch::autograd::variable_list& grads);
  /// After a backward of these outputs without retain_graph.
  void use_up(const joint::TangentSet& defined);
  /// Gives up what only the outputs that are used up need.
  void release();
  std::shared_ptr<CompiledParts> parts_;
  std::vector<at::Tensor> inputs_;
  std::vector<uint32_t> versions_;  // of inputs_ at the call
  joint::TangentSet used_up_;       // outputs that cannot be differentiated again, by tangent
};

/// The grad_fn of outputs whose graph a backward() inside the compiled program has used up.
class FreedBackward : public torch::autograd::Node {
 public:
  std::string name() const override { return "FreedBackward"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
};

}  // namespace kiln::runtime
