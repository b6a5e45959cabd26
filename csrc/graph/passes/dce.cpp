#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {

bool may_raise(const Node& n) {
  if (n.backward) return false;  // a gradient's indices are those of the forward pass
  const ops::OpInfo* info = ops::lookup(n.op);
  if (!info || !info->has(ops::kMayRaise)) return false;
  if (info->kind != ops::Kind::Pointwise) return true;
  const bool by_number = n.args.size() > 1 && n.args[1].is_number() && n.args[1].to_double() != 0;
  return !n.results.empty() && is_integral(n.results[0].dtype) && !by_number;
}

bool runs_unused(const Node& n) {
  return n.kind == NodeKind::Call && ((n.results.empty() && !n.returns_list) || ops::is_random(n.op) || may_raise(n));
}

bool eliminate_dead_code(Graph& g) {
  auto uses = g.use_counts();
  std::vector<Node*> dead;
  for (auto it = g.nodes().rbegin(); it != g.nodes().rend(); ++it) {
    Node& n = **it;
    if (n.kind == NodeKind::Placeholder || uses[&n] > 0) continue;
    const ops::OpInfo* info = ops::lookup(n.op);
    if (!info || info->has(ops::kMutates) || runs_unused(n)) continue;
    const auto release = [&](const Value& v) {
      if (v) --uses[v.node];
    };
    for (const Arg& a : n.args) for_each_value(a, release);
    for (const auto& [key, a] : n.kwargs) for_each_value(a, release);
    dead.push_back(&n);
  }
  for (Node* n : dead) g.erase(n);
  return !dead.empty();
}

}  // namespace kiln::graph
