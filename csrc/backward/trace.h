#pragma once
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "backward/call.h"
#include "graph/graph.h"
#include "joint/joint.h"
#include "joint/recorder.h"

namespace kiln::backward {

/// The functions of kiln.compiled_autograd that stand in a traced backward for what is no operator. A hook is given by
/// its place among the call's hooks.
inline constexpr const char* kTensorHook = "kiln.compiled_autograd.call_tensor_hook";     // hook, grad
inline constexpr const char* kNodePreHook = "kiln.compiled_autograd.call_node_pre_hook";  // hook, grads
inline constexpr const char* kNodeHook = "kiln.compiled_autograd.call_node_hook";         // hook, outputs, inputs
inline constexpr const char* kFunction = "kiln.compiled_autograd.call_function";          // ctx, results, saved, grads
inline constexpr const char* kAccumulate = "kiln.compiled_autograd.accumulate";           // variable, grad, strides
inline constexpr const char* kAccumulated = "kiln.compiled_autograd.call_accumulated_hook";  // hook, variable

/// Which gradients the functions of Python in a backward return, by turn: true for those that are tensors.
using ReturnedByTurn = std::unordered_map<size_t, std::vector<bool>>;
/// By turn, for the backwards of compiled functions: the results whose gradients arrive there.
using DifferentiatedByTurn = std::unordered_map<size_t, joint::TangentSet>;

/// A backward as a graph: its nodes' formulas and what hooks and leaves do, in the order in which they run, writes in
/// place included. Each formula runs once, on fakes, with the fakes of what its node has saved in their place.
class Tracer {
 public:
  Tracer(Call& call, const ReturnedByTurn& returned);
  /// Placeholders: the call's tensors, of which those that are numbers are used as such. Outputs: the captured
  /// gradients. Throws Unsupported, NeedsData, c10::Error. `compiler`: the Python object whose methods PyTorch's nodes
  /// call (proxy_call_backward, post_acc_grad_hook).
  std::unique_ptr<graph::Graph> run(const std::vector<Turn>& turns, size_t num_outputs, PyObject* compiler);
  const DifferentiatedByTurn& differentiated() const { return differentiated_; }

  /// For the compiler's methods: the gradients that a torch.autograd.Function returns, one for each input; `metas` of
  /// those that are tensors.
  variable_list call_function(size_t context, const variable_list& saved, const variable_list& grads,
                              const std::vector<std::optional<graph::TensorMeta>>& metas);
  void call_accumulated_hook(const at::Tensor& variable, size_t hook);
  /// Ends the trace with an error, once PyTorch's code is behind. These methods throw nothing themselves.
  void fail(std::exception_ptr why);

 private:
  class Interface;
  graph::Arg arg(const at::Tensor& t);
  graph::Arg args(const variable_list& list);
  /// Records `function` with results like `like`, where those are defined.
  variable_list record(const char* function, std::vector<graph::Arg> arguments, const variable_list& like);
  variable_list before_node(const torch::dynamo::autograd::NodeCall& node, variable_list grads);
  variable_list run_node(torch::dynamo::autograd::NodeCall& node, const variable_list& grads);
  void note_accumulation(const at::Tensor& variable, const at::Tensor& grad);
  void make_inputs();
  void find_owned();
  void check_numbers();

  Call& call_;
  PyObject* compiler_ = nullptr;
  const ReturnedByTurn& returned_;
  std::unique_ptr<graph::Graph> graph_;
  joint::Recorder recorder_;
  torch::dynamo::autograd::TraceState state_;
  DifferentiatedByTurn differentiated_;
  size_t turn_ = 0;
  Node* node_ = nullptr;
  /// What a formula threw: it may not pass through PyTorch's code while a node holds fakes.
  std::exception_ptr failure_;
};

}  // namespace kiln::backward
