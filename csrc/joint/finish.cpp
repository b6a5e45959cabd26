#include "joint/finish.h"

#include <unordered_set>

#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::joint {

using graph::Arg;
using graph::Node;
using graph::NodeKind;
using graph::Value;

bool remove_dead(graph::Graph& g) {
  std::unordered_set<const Node*> live;
  std::vector<const Node*> todo;
  auto use = [&](Value v) {
    if (v) todo.push_back(v.node);
  };
  for (const Arg& a : g.outputs()) graph::for_each_value(a, use);
  for (const graph::Mutation& m : g.mutations()) use(m.value);
  for (const auto& n : g.nodes())
    if (n->backward ? n->kind == NodeKind::Call && ops::is_random(n->op) : graph::runs_unused(*n))
      todo.push_back(n.get());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (!live.insert(n).second) continue;
    for (const Arg& a : n->args) graph::for_each_value(a, use);
  }
  std::vector<Node*> dead;
  for (const auto& n : g.nodes())
    if (n->kind == NodeKind::Call && !live.count(n.get())) dead.push_back(n.get());
  for (auto it = dead.rbegin(); it != dead.rend(); ++it) g.erase(*it);
  return !dead.empty();
}

bool separate_outputs(Joint& joint) {
  static const graph::Op kConstant("kiln::tensor_constant"), kClone("aten::clone");
  graph::Graph& g = *joint.graph;
  std::unordered_set<Value> taken;
  for (const graph::Mutation& m : g.mutations())
    if (m.value) taken.insert(graph::storage_root(m.value));
  bool changed = false;
  for (size_t i = 0; i < joint.num_forward; ++i) {
    Arg& out = g.outputs()[i];
    if (!out.is_value() || !out.value()) continue;
    const Value v = out.value();
    const Value root = graph::storage_root(v);
    const bool own = root.node->kind == NodeKind::Call && root.node->op != kConstant;
    if (own && taken.insert(root).second) continue;
    graph::TensorMeta meta = v.meta();
    meta.offset = 0;
    meta.requires_grad = false;
    if (!meta.is_non_overlapping_and_dense()) meta.strides = graph::contiguous_strides(meta.sizes);
    out = Arg(g.add_call(kClone, {Arg(v), Arg()}, {meta}, v.node->name + "_own")->out());
    changed = true;
  }
  return changed;
}

}  // namespace kiln::joint
