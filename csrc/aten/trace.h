#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "aten/fake.h"
#include "aten/sizes.h"
#include "graph/graph.h"

// The recorder: while a trace is active on a thread, every operator call that reaches the dispatcher is written into
// the trace's graph, above autograd and autocast, and then goes on to autograd and the Fake key's shape rules.
namespace kiln::aten {

class Trace {
 public:
  Trace() : graph_(std::make_shared<graph::Graph>()) {}
  Trace(const Trace&) = delete;

  graph::Graph& graph() { return *graph_; }
  std::shared_ptr<graph::Graph> share() { return graph_; }

  /// Says that `t` holds `v`. Its address stays its own; the tensor itself is not kept alive, since PyTorch treats a
  /// tensor that has one owner as its own to reuse (make_variable).
  void bind(const at::Tensor& t, graph::Value v);
  /// From now on `t`, which is bound, holds `v`.
  void rebind(const at::Tensor& t, graph::Value v) { values_.at(t.unsafeGetTensorImpl()) = v; }
  /// The value of `t`; asks `on_unknown` for tensors never seen, null if that knows none either.
  graph::Value value_of(const at::Tensor& t);
  /// The value if `t` is bound, null otherwise.
  graph::Value find(const at::Tensor& t) const;
  /// Appends a node that no dispatcher call stands for ("kiln::grad"); its results are bound to `results`.
  graph::Node* record(graph::Op op, std::vector<graph::Arg> args, const std::vector<at::Tensor>& results,
                      const std::string& name_hint = "");

  /// Makes a value for a tensor that was never seen (a graph input), or returns null: the call then fails.
  std::function<graph::Value(const at::Tensor&)> on_unknown;
  /// The value of a tensor of one element that C++ code asks for, if the trace's calls alone make it what it is or it
  /// is cheap to compute.
  std::function<std::optional<at::Scalar>(const at::Tensor&)> known_value;
  /// Called before a call is recorded: true if it put the results on the stack itself, made by calls that are recorded
  /// in its place.
  std::function<bool(const c10::OperatorHandle& op, torch::jit::Stack& stack)> replace;
  /// Called with each recorded operator, its arguments and its results. While it is set, composites are recorded in
  /// their parts, as code below autograd sees them.
  std::function<void(graph::Node&, const c10::OperatorHandle& op, torch::jit::Stack args, torch::jit::Stack results)>
      on_operator;
  /// Called after each appended node.
  std::function<void(graph::Node&)> on_node;
  /// Where the node comes from; shared by the nodes of one instruction.
  std::function<std::shared_ptr<const graph::StackTrace>()> stack_trace;

  /// Why the last call failed, if kiln (not the user's program) made it fail. Exceptions lose their type on their way
  /// through PyTorch's bindings; this does not.
  struct Failure {
    std::string id;  // of graph_breaks.def
    std::string cause;
  };
  std::optional<Failure> failure;
  int64_t num_nodes = 0;
  /// Which sizes are left open, and what was asked of them; null if none are.
  std::shared_ptr<Sizes> sizes;
  /// The open number that a wrapped number stands for: PyTorch's bindings have no number for a symbolic one, and put
  /// kSizeStandIn, or a NaN, where an operator takes a tensor. None if it is a number.
  std::function<std::optional<symbolic::Number>(const at::Tensor&)> number_behind;
  static constexpr int64_t kSizeStandIn = 7777777;
  /// The node of a symbolic float among a call's arguments: PyTorch's bindings wrap it.
  std::function<c10::SymNode(const c10::SymNode&)> unwrap;

 private:
  std::shared_ptr<graph::Graph> graph_;
  std::unordered_map<const c10::TensorImpl*, graph::Value> values_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> seen_;
};

/// The thread's active trace, null if none records (none active, or paused, or inside an operator).
Trace* active_trace();

/// Whether the numbers of `t`, a real tensor, may stand in the program: a plain CPU tensor of at most 4096 elements.
bool can_be_constant(const at::Tensor& t);
/// The metadata of a kiln::tensor_constant of t's numbers: row by row, without a history.
graph::TensorMeta constant_meta(const at::Tensor& t);
/// The arguments of a kiln::tensor_constant of such a tensor's numbers, as numbers_of() has them.
std::vector<graph::Arg> constant_args(graph::Arg numbers, const graph::TensorMeta& meta);
/// Records a kiln::tensor_constant of t's numbers; returns its fake.
at::Tensor record_constant(Trace& trace, const at::Tensor& t);

/// Makes `trace` the thread's active one.
class Recording {
 public:
  explicit Recording(Trace& trace);
  ~Recording();
  Recording(const Recording&) = delete;

 private:
  Trace* outer_;
  bool was_included_;
};

/// Pauses recording on this thread; calls run as if no trace were active.
class RecordingPaused {
 public:
  RecordingPaused();
  ~RecordingPaused();
  RecordingPaused(const RecordingPaused&) = delete;

 private:
  bool was_excluded_;
};

/// Records again within a RecordingPaused, FakeModeGuard and ShapesOnly: in a hook that the autograd engine calls.
class RecordingResumed {
 public:
  RecordingResumed();
  ~RecordingResumed();
  RecordingResumed(const RecordingResumed&) = delete;

 private:
  bool was_excluded_, were_fakes_;
  ShapesOnly shapes_{false};
};

/// True while an operator of a recorded call runs on this thread: Python code that it reaches is its implementation,
/// not the user's program.
bool inside_operator();

}  // namespace kiln::aten
