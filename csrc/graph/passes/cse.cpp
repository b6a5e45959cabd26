#include <cstring>

#include "base/hash.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

void hash_arg(size_t& seed, const Arg& arg) {
  hash_combine(seed, arg.data.index());
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, Arg::List>) {
          for (const Arg& a : v) hash_arg(seed, a);
        } else if constexpr (std::is_same_v<T, std::complex<double>>) {
          hash_combine(seed, v.real());
        } else if constexpr (std::is_same_v<T, Value> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
          hash_combine(seed, v);
        } else if constexpr (std::is_enum_v<T>) {
          hash_combine(seed, static_cast<int>(v));
        }
      },
      arg.data);
}

// Doubles by their bits: 0.0 and -0.0 are two constants, a NaN is one.
bool same_arg(const Arg& a, const Arg& b) {
  if (a.data.index() != b.data.index()) return false;
  if (a.is<double>()) {
    const double x = a.as<double>(), y = b.as<double>();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.is_list()) {
    const Arg::List &x = a.list(), &y = b.list();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same_arg);
  }
  return a == b;
}

bool same_call(const Node& a, const Node& b) {
  return a.op == b.op && a.recomputed == b.recomputed && a.args.size() == b.args.size() &&
         std::equal(a.args.begin(), a.args.end(), b.args.begin(), same_arg) && a.results.size() == b.results.size() &&
         std::equal(a.results.begin(), a.results.end(), b.results.begin(), [](auto x, auto y) {
           x.requires_grad = y.requires_grad;
           return x == y;
         });
}

}  // namespace

bool eliminate_common_subexpressions(Graph& g) {
  const auto escapes_at_start = escaping(g);
  std::unordered_map<size_t, std::vector<Node*>> seen;
  std::unordered_map<const Node*, bool> escapes = escapes_at_start;
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  std::vector<Node*> dead;
  const auto current = [&](Value& v) {
    const auto it = v ? replaced.find(v.node) : replaced.end();
    if (it != replaced.end()) v = it->second.at(v.index);
  };
  for (const auto& node : g.nodes()) {
    Node& n = *node;
    if (n.kind == NodeKind::Placeholder || !n.kwargs.empty()) continue;
    // Arguments first, so that equal chains merge in one sweep.
    for (Arg& a : n.args) for_each_value(a, current);
    const ops::OpInfo* info = ops::lookup(n.op);
    if (!info || info->has(ops::kRandom) || info->has(ops::kMutates)) continue;
    size_t key = n.op.id();
    for (const Arg& a : n.args) hash_arg(key, a);
    Node* twin = nullptr;
    for (Node* other : seen[key])
      if (same_call(*other, n) && !(escapes.contains(other) && escapes.contains(&n) && info->kind != ops::Kind::View)) {
        twin = other;
        break;
      }
    if (!twin) {
      seen[key].push_back(&n);
      continue;
    }
    if (escapes.contains(&n)) escapes[twin] = true;
    std::vector<Value>& to = replaced[&n];
    for (uint32_t i = 0; i < n.results.size(); ++i) to.push_back(twin->out(i));
    dead.push_back(&n);
  }
  if (dead.empty()) return false;
  g.replace_uses(replaced);
  for (Node* n : dead) g.erase(n);
  return true;
}

}  // namespace kiln::graph
