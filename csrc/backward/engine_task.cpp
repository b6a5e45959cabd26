#include "backward/engine_task.h"

#include <torch/csrc/autograd/anomaly_mode.h>

#include <queue>

#include "aten/pch.h"

namespace kiln::backward {

using torch::autograd::Edge;

namespace {

void check_for_nan(Node& node, const variable_list& grads) {
  at::AutoGradMode no_grad(false);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined() || !at::isnan(grads[i]).any().item<bool>()) continue;
    TORCH_CHECK(false, "Function '", node.name(), "' returned nan values in its ", i, "th output.");
  }
}

}  // namespace

std::vector<Turn> execution_order(const NodePtr& root, const GraphTask& task) {
  const auto later = [](const Turn& a, const Turn& b) { return a.node->sequence_nr() < b.node->sequence_nr(); };
  std::priority_queue<Turn, std::vector<Turn>, decltype(later)> ready(later);
  std::unordered_map<Node*, int> missing = task.dependencies_;
  std::vector<Turn> turns;
  ready.push({root, true});
  while (!ready.empty()) {
    turns.push_back(ready.top());
    ready.pop();
    if (!turns.back().runs) continue;
    const NodePtr node = turns.back().node;
    for (const Edge& next : node->next_edges()) {
      if (!next.is_valid()) continue;
      const auto count = missing.find(next.function.get());
      const bool last = count != missing.end() && --count->second == 0;
      bool runs = true;
      if (!task.exec_info_.empty()) {
        const auto info = task.exec_info_.find(next.function.get());
        if (info == task.exec_info_.end() || !info->second.should_execute()) continue;
        runs = info->second.needed_;
      }
      if (last) ready.push({next.function, runs});
    }
  }
  return turns;
}

void Gradients::add(const Edge& to, const at::Tensor& grad) {
  if (!to.is_valid() || !grad.defined()) return;
  variable_list& grads = arrived_.try_emplace(to.function.get(), to.function->num_inputs()).first->second;
  at::Tensor& sum = grads.at(to.input_nr);
  // A sparse gradient first: PyTorch adds dense ones to it, not it to dense ones.
  sum = !sum.defined()                                      ? grad
        : sum.layout() == grad.layout() || !sum.is_sparse() ? at::add(sum, grad)
                                                            : at::add(grad, sum);
}

variable_list Gradients::take(Node& node) {
  const auto it = arrived_.find(&node);
  if (it == arrived_.end()) return variable_list(node.num_inputs());
  variable_list grads = std::move(it->second);
  arrived_.erase(it);
  return grads;
}

void fit_gradients(Node& node, variable_list& grads) {
  torch::autograd::validate_outputs(node.next_edges(), grads, [&](const std::string& message) {
    return "Function " + node.name() + " returned an " + message;
  });
}

variable_list run_in_eager(const std::vector<Turn>& turns, GraphTask& task, size_t num_outputs,
                           const SeeGradients& see) {
  const at::ThreadLocalStateGuard modes(task.thread_locals_);
  Gradients gradients;
  variable_list captured(num_outputs);
  for (size_t i = 0; i < turns.size(); ++i) {
    Node& node = *turns[i].node;
    variable_list inputs = gradients.take(node);
    for (const auto& hook : node.tensor_pre_hooks()) inputs = (*hook)(inputs);
    for (const auto& [input, hook] : node.retains_grad_hooks()) inputs = (*hook)(inputs);
    if (const auto info = task.exec_info_.find(&node); info != task.exec_info_.end() && info->second.captures_)
      for (const auto& capture : *info->second.captures_) {
        at::Tensor grad = inputs[static_cast<size_t>(capture.input_idx_)];
        for (const auto& hook : capture.DO_NOT_USE_DEPRECATED_get_capture_hooks()) grad = (*hook)(grad);
        captured.at(static_cast<size_t>(capture.output_idx_)) = std::move(grad);
      }
    if (!turns[i].runs) continue;
    for (const auto& hook : node.pre_hooks()) inputs = (*hook)(inputs);
    if (!task.keep_graph_) node.will_release_variables();
    const bool observed = !node.post_hooks().empty();
    variable_list outputs = observed ? node(variable_list(inputs)) : node(std::move(inputs));
    fit_gradients(node, outputs);
    for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, inputs);
    if (!task.keep_graph_) node.release_variables();
    if (torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan())
      check_for_nan(node, outputs);
    if (see) see(i, node, outputs);
    const edge_list& edges = node.next_edges();
    for (size_t k = 0; k < edges.size() && k < outputs.size(); ++k) gradients.add(edges[k], outputs[k]);
  }
  run_final_callbacks(task);
  return captured;
}

void run_final_callbacks(GraphTask& task) {
  // A callback may ask for another one.
  std::unique_lock<std::mutex> lock(task.final_callbacks_lock_);
  for (size_t i = 0; i < task.final_callbacks_.size(); ++i) {
    const std::function<void()> callback = std::move(task.final_callbacks_[i]);
    lock.unlock();
    callback();
    lock.lock();
  }
  task.final_callbacks_.clear();
}

}  // namespace kiln::backward
