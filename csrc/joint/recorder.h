#pragma once
#include <unordered_map>

#include "aten/fake.h"
#include "graph/graph.h"

namespace kiln::joint {

/// Writes the ops that reach the Fake key (below functionalization) into a functional graph.
class Recorder : public aten::FakeObserver {
 public:
  explicit Recorder(graph::Graph& g) : graph_(g) {}
  void called(const aten::OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) override;

  /// Says that the fake `t` is `v`; keeps it alive, so that its address stays its own.
  void bind(const at::Tensor& t, graph::Value v);
  /// The value of a fake that was seen, or a constant node for a small tensor with data. Throws Unsupported otherwise.
  graph::Value value_of(const at::Tensor& t);
  /// A constant node for kiln::tensor_constant(numbers, sizes, dtype), and a fake bound to it.
  at::Tensor constant(std::vector<graph::Arg> args, const graph::TensorMeta& meta);

  /// A copy of the fake `t` with these strides, which are dense.
  at::Tensor laid_out(const at::Tensor& t, const std::vector<int64_t>& strides);

  /// A call of what is no operator: a Python function of this dotted name. Returns fakes for its results.
  std::vector<at::Tensor> call(graph::Op function, std::vector<graph::Arg> args, std::vector<graph::TensorMeta> results,
                               bool returns_list);

  bool in_place = false;                           // writes stay what they are: the graph is not to be functional
  bool backward = false;                           // nodes are made by the autograd engine
  bool differentiated = false;                     // the program has run the engine
  int checkpoint = 0;                              // the checkpointed call that the program is in
  std::shared_ptr<const graph::StackTrace> stack;  // of the nodes made now
  std::string module_path;

 private:
  graph::Node* add(graph::Op op, std::vector<graph::Arg> args, std::vector<graph::TensorMeta> metas);
  graph::Graph& graph_;
  std::unordered_map<const c10::TensorImpl*, graph::Value> values_;
  std::vector<at::Tensor> alive_;
};

}  // namespace kiln::joint
