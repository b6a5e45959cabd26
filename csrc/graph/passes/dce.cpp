#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {

bool eliminate_dead_code(Graph& g) {
  auto uses = g.use_counts();
  std::vector<Node*> dead;
  for (auto it = g.nodes().rbegin(); it != g.nodes().rend(); ++it) {
    Node& n = **it;
    if (n.kind == NodeKind::Placeholder || uses[&n] > 0) continue;
    const ops::OpInfo* info = ops::lookup(n.op);
    if (!info || info->has(ops::kRandom) || info->has(ops::kMutates)) continue;
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
