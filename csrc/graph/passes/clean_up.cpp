#include "base/pass.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {

Value storage_root(Value v) {
  while (v.node->kind == NodeKind::Call && ops::is_view(v.node->op) && !v.node->args.empty() &&
         v.node->arg(0).is_value() && v.node->arg(0).value())
    v = v.node->arg(0).value();
  return v;
}

std::unordered_map<const Node*, bool> escaping(const Graph& g) {
  std::unordered_map<const Node*, bool> out;
  const auto mark = [&](const Value& v) {
    if (v) out[v.node] = true;
  };
  for (const Arg& a : g.outputs()) for_each_value(a, mark);
  for (const Mutation& m : g.mutations()) mark(m.value);
  // as_strided counts from where memory begins, which an input may begin behind.
  for (const auto& n : g.nodes())
    if (n->kind == NodeKind::Call && n->op.name().starts_with("aten::as_strided") && n->args[0].is_value())
      mark(n->args[0].value());
  for (auto it = g.nodes().rbegin(); it != g.nodes().rend(); ++it) {
    const Node& n = **it;
    if (n.kind == NodeKind::Call && out.contains(&n) && ops::is_view(n.op) && !n.args.empty() && n.args[0].is_value())
      if (const Value source = n.args[0].value()) out.emplace(source.node, false);
  }
  return out;
}

bool may_replace(const Value& old, const Value& v, const std::unordered_map<const Node*, bool>& escapes) {
  const TensorMeta &a = old.meta(), &b = v.meta();
  if (a.dtype != b.dtype || a.sizes != b.sizes || a.strides != b.strides || !(a.device == b.device)) return false;
  if (!escapes.contains(old.node)) return true;
  // What is returned stays a tensor object of its own.
  const auto it = escapes.find(v.node);
  if (v.node->kind == NodeKind::Placeholder || (it != escapes.end() && it->second)) return false;
  // Where the two share storage already, nothing else changes; else v's storage must be fresh and stay inside
  // otherwise.
  const Node* root = storage_root(v).node;
  if (root == storage_root(old).node) return true;
  return root->kind == NodeKind::Call && !escapes.contains(root) && it == escapes.end();
}

bool clean_up(Graph& g) {
  const PassHooks hooks{[&] { return print(g); }, [&] { verify(g, true); }};
  const auto run = [&](const char* name, bool (*pass)(Graph&)) {
    return run_pass(name, hooks, [&] { return pass(g); });
  };
  bool changed = false;
  changed |= run("graph.dce", eliminate_dead_code);
  changed |= run("graph.views", simplify_views);
  changed |= run("graph.copies", remove_redundant_copies);
  changed |= run("graph.fold", fold_constants);
  changed |= run("graph.cse", eliminate_common_subexpressions);
  if (changed) run("graph.dce", eliminate_dead_code);
  return changed;
}

}  // namespace kiln::graph
