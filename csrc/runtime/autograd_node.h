#pragma once
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

#include "runtime/compiled_function.h"
#include "runtime/random/generator_state.h"

namespace kiln::runtime {

/// What a call changes, as it was before: CompiledParts::copied, and where the random numbers go on.
struct CallState {
  std::optional<GeneratorState> generator;
  std::vector<at::Tensor> copies;
};

/// The backward of a compiled function. Inputs: one gradient per differentiable forward output; outputs: one per entry
/// of grad_of. In eager each output has a graph of its own: a gradient that no defined one reaches is undefined, and
/// outputs that have no node with saved tensors in common can be differentiated one after another.
/// Tensors are kept as SavedVariables, so that saved-tensor hooks, version checks and "backward a second time" are
/// autograd's own.
class CompiledBackward : public torch::autograd::Node {
  friend void attach_results(const c10::intrusive_ptr<CompiledBackward>& node, const CompiledParts& parts,
                             const std::vector<at::Tensor>& results, c10::function_ref<at::Tensor(size_t)> view,
                             c10::function_ref<torch::autograd::Edge(size_t)> write);

 public:
  explicit CompiledBackward(std::shared_ptr<CompiledParts> parts)
      : parts_(std::move(parts)), zeros_(parts_->no_tangents()), used_up_(parts_->no_tangents()) {}
  std::string name() const override { return "CompiledBackward"; }
  void release_variables() override;
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(const torch::autograd::variable_list& grads,
                                                  torch::autograd::SwapSavedVariables& fakes) override;

  std::vector<torch::autograd::SavedVariable> saved;
  /// Keeps what the call was given, for a second differentiation.
  void keep_inputs(const std::vector<at::Tensor>& inputs, CallState before);
  /// After a backward of these outputs, by tangent, without retain_graph. Where it ran as part of a larger graph, who
  /// ran that says so.
  void use_up(const joint::TangentSet& defined);
  /// What the gradient `grad` of tangent `of` contributes to the gradients of the results in `cut`, in order. The
  /// backward that runs takes those as the whole gradients then.
  torch::autograd::variable_list contributions(size_t of, const joint::TangentSet& cut, const at::Tensor& grad);
  /// Where a backward arrives at the result of `tangent` with no gradient: zeros if a custom function makes some of it,
  /// which the next backward pass takes for that; else undefined.
  at::Tensor zeros_for(size_t tangent);
  /// Whether a gradient of `tangent` contributes to output `i`.
  bool reached(size_t i, size_t tangent) const { return parts_->reached_from[i].test(tangent); }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

 private:
  /// `given`: gets the tangents whose gradients there were.
  torch::autograd::variable_list gradients(torch::autograd::variable_list&& grads, joint::TangentSet& given);
  using WeakNode = c10::weak_intrusive_ptr<torch::autograd::Node>;
  static void refuse_hooks(const at::Tensor& again, const WeakNode& result);
  at::Tensor copy_of_input(size_t i);
  torch::autograd::variable_list apply_in_eager(const joint::Part& part, const torch::autograd::variable_list& grads);
  torch::autograd::variable_list run(const joint::Part& part, torch::autograd::variable_list&& grads, bool keep_graph);
  /// The gradients by the operators of the backward graph, one by one: what is saved are fakes (compiled autograd), or
  /// only operators know what is in the gradients.
  torch::autograd::variable_list replay(const joint::Part& part, const torch::autograd::variable_list& grads);
  /// The same of all that are defined.
  torch::autograd::variable_list trace(const torch::autograd::variable_list& grads);
  /// Gives up what only the outputs that are used up need.
  void release();
  std::shared_ptr<CompiledParts> parts_;
  std::vector<at::Tensor> inputs_;
  std::vector<uint32_t> versions_;            // of inputs_ at the call
  std::optional<GeneratorState> drawn_from_;  // the generator before the call, if it draws
  joint::TangentSet zeros_;                   // of the next backward pass: the tangents that zeros_for() gave
  joint::TangentSet used_up_;                 // outputs that cannot be differentiated again, by tangent
  std::vector<WeakNode> results_;             // grad_fn of each of several results, by tangent
  int cut_in_ = -1;                           // the engine's task in which `cut_` holds
  joint::TangentSet cut_;
};

/// Whether a hook on a gradient calls anything. What PyTorch keeps Python's hooks in stays when the last is removed;
/// only the Python layer can look inside. Without it every hook counts.
using CallsSomething = bool (*)(const torch::autograd::FunctionPreHook&);
void set_calls_something(CallsSomething look);

/// Makes `node`, or nodes of their own that come before it, the grad_fn of `results`, which are the forward outputs,
/// and of the views that have tangents. `view` makes such a one: the program's output of that position. `write` writes
/// a forward output to the input whose new value it is, for autograd to see, and gives the edge of the input then; none
/// if it is no such value.
void attach_results(const c10::intrusive_ptr<CompiledBackward>& node, const CompiledParts& parts,
                    const std::vector<at::Tensor>& results, c10::function_ref<at::Tensor(size_t)> view,
                    c10::function_ref<torch::autograd::Edge(size_t)> write);

/// The grad_fn of outputs whose graph a backward() inside the compiled program has used up.
class FreedBackward : public torch::autograd::Node {
 public:
  std::string name() const override { return "FreedBackward"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
};

}  // namespace kiln::runtime
