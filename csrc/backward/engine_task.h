#pragma once
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace kiln::backward {

using torch::autograd::edge_list;
using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = c10::intrusive_ptr<Node>;

/// A node of a backward and whether it is run; if not, only the gradients that reach it are wanted.
struct Turn {
  NodePtr node;
  bool runs = true;
};

/// The nodes of a backward, `root` first, in the order in which PyTorch's engine takes those of one CPU thread: of
/// those that are ready the one that was made last.
std::vector<Turn> execution_order(const NodePtr& root, const GraphTask& task);

/// Gradients on their way to the nodes that take them.
class Gradients {
 public:
  /// Adds `grad` to what has arrived at input `at` of `node`; undefined ones add nothing.
  void add(const torch::autograd::Edge& to, const at::Tensor& grad);
  /// What has arrived at `node`, one for each of its inputs.
  variable_list take(Node& node);

 private:
  std::unordered_map<Node*, variable_list> arrived_;
};

/// Makes the gradients that `node` returned fit what its edges lead to, as the engine does, or fails as it does.
void fit_gradients(Node& node, variable_list& grads);

/// Sees the gradients that a node returned.
using SeeGradients = std::function<void(size_t turn, Node& node, const variable_list& grads)>;

/// Runs the nodes one by one, as the engine does on one thread. Returns the gradients that the task captures.
variable_list run_in_eager(const std::vector<Turn>& turns, GraphTask& task, size_t num_outputs,
                           const SeeGradients& see = nullptr);

/// What hooks and nodes have asked the engine to call at the end of the backward.
void run_final_callbacks(GraphTask& task);

}  // namespace kiln::backward
