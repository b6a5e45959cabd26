#include "runtime/silent_edges.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "aten/pch.h"

namespace kiln::runtime {
namespace {

using torch::autograd::Edge;
using torch::autograd::GraphTask;
using torch::autograd::Node;

/// The backward that runs on this thread, or null. The engine gives out the addresses of two of its members.
GraphTask* current_task() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (!info) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const char* begin = reinterpret_cast<const char*>(info) - offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  auto* task = reinterpret_cast<GraphTask*>(const_cast<char*>(begin));
  return &task->nodes_in_graph_ == torch::autograd::get_current_graph_task_nodes_in_graph() ? task : nullptr;
}

/// What becomes of the engine's counts when one edge is taken out.
class Withdrawal {
 public:
  explicit Withdrawal(GraphTask& task) : task_(task) {}

  /// False if the engine would have to start a node.
  bool take(Node* first) {
    std::vector<Node*> todo{first};
    while (!todo.empty()) {
      Node* node = todo.back();
      todo.pop_back();
      const auto counted = task_.dependencies_.find(node);
      if (counted == task_.dependencies_.end()) return false;
      if (--left_.try_emplace(node, counted->second).first->second > 0) continue;
      if (const auto waiting = task_.not_ready_.find(node); waiting != task_.not_ready_.end()) {
        const auto& got = waiting->second.buffer;
        if (std::any_of(got.begin(), got.end(), [](const at::Tensor& t) { return t.defined(); })) return false;
      }
      for (const Edge& e : node->next_edges())
        if (e.is_valid()) todo.push_back(e.function.get());
    }
    return true;
  }

  void commit() {
    for (const auto& [node, left] : left_) {
      if (left > 0) {
        task_.dependencies_[node] = left;
      } else {
        task_.dependencies_.erase(node);
        task_.not_ready_.erase(node);
      }
    }
  }

 private:
  GraphTask& task_;
  std::unordered_map<Node*, int> left_;
};

}  // namespace

TakenEdges take_silent_edges(torch::autograd::edge_list& edges, const torch::autograd::variable_list& gradients,
                             c10::function_ref<bool(size_t)> passes) {
  TakenEdges taken;
  GraphTask* task = nullptr;
  std::unique_lock<std::mutex> lock;
  for (size_t i = 0; i < edges.size() && i < gradients.size(); ++i) {
    if (gradients[i].defined() || !edges[i].is_valid() || passes(i)) continue;
    if (!task) {
      task = current_task();
      if (!task) break;
      lock = std::unique_lock<std::mutex>(task->mutex_);
    }
    Withdrawal withdrawal(*task);
    if (!withdrawal.take(edges[i].function.get())) continue;
    withdrawal.commit();
    taken.emplace_back(i, std::exchange(edges[i], Edge()));
  }
  return taken;
}

}  // namespace kiln::runtime
