#include <algorithm>
#include <unordered_set>

#include "graph/passes/passes.h"
#include "graph/recompute.h"
#include "ops/ops.h"

namespace kiln::graph {

namespace {

// What is smaller is not worth a kernel of its own, in bytes.
constexpr int64_t kLarge = 256 << 10;
// What has so many times fewer elements than the value made of it may be kept for it.
constexpr int64_t kSmall = 8;
constexpr size_t kMostNodes = 64;

bool is_call(const Node* n) { return n->kind == NodeKind::Call; }

int64_t bytes_of(const Value& v) { return v.meta().numel() * dtype_size(v.meta().dtype); }

class Recomputer {
 public:
  explicit Recomputer(Graph& g) : g_(g) {
    const auto leaves = [&](Value v) {
      for (; v; v = is_view(v.node) ? v.node->args[0].value() : Value{}) leaves_.insert(v.node);
    };
    for (const Arg& a : g.outputs()) for_each_value(a, leaves);
    for (const Mutation& m : g.mutations()) leaves(m.value);
    for (const auto& n : g.nodes())
      for (const Arg& a : n->args)
        for_each_value(a, [&](const Value& v) {
          if (v) readers_[v.node].push_back(n.get());
        });
  }

  bool run() {
    std::unordered_set<const Node*> again;
    for (const auto& n : g_.nodes()) {
      // Views by which products read what is computed again are taken anew, too.
      if (is_view(n.get()) && again.contains(n->args[0].value().node)) again.insert(n.get());
      for (const Node* made : operand_of_products(n.get())) again.insert(made);
    }
    return recompute_for_backward(g_, [&](const Node* n) { return again.contains(n); });
  }

 private:
  static bool is_view(const Node* n) {
    return is_call(n) && ops::is_view(n->op) && n->args[0].is_value() && n->args[0].value();
  }
  static bool is_cheap(const Node* n) {
    return is_call(n) && n->results.size() == 1 && ops::recompute_cost(n->op) <= ops::Recompute::Cheap &&
           !may_raise(*n);
  }

  /// Whether what the backward reads of `n`, through views, is read by products alone. False if it reads nothing.
  bool only_products_read(const Node* n) const {
    bool any = false;
    std::vector<const Node*> todo{n};
    while (!todo.empty()) {
      const Node* from = todo.back();
      todo.pop_back();
      const auto it = readers_.find(from);
      if (it == readers_.end()) continue;
      for (const Node* r : it->second) {
        if (is_view(r)) {
          todo.push_back(r);
        } else if (r->backward) {
          if (ops::recompute_cost(r->op) != ops::Recompute::Never) return false;
          any = true;
        }
      }
    }
    return any;
  }

  /// Whether a backward node that stays reads `n` anyway.
  bool is_kept(const Node* n) const {
    if (!is_call(n)) return true;
    const auto it = readers_.find(n);
    return it != readers_.end() && std::any_of(it->second.begin(), it->second.end(),
                                               [&](const Node* r) { return is_view(r) ? is_kept(r) : r->backward; });
  }

  /// If `n` is worth computing again: the nodes that do it.
  std::vector<Node*> operand_of_products(Node* n) const {
    if (n->backward || !is_cheap(n) || is_view(n) || bytes_of(n->out()) < kLarge || leaves_.contains(n)) return {};
    if (!only_products_read(n)) return {};
    const int64_t size = n->results[0].numel();
    std::vector<Node*> todo{n}, nodes;
    std::unordered_set<const Node*> seen{n};
    bool ok = true;
    while (!todo.empty() && ok) {
      Node* at = todo.back();
      todo.pop_back();
      nodes.push_back(at);
      ok = nodes.size() <= kMostNodes;
      for (const Arg& a : at->args)
        for_each_value(a, [&](const Value& v) {
          if (!v || seen.contains(v.node)) return;
          const bool cheap = is_cheap(v.node);
          if (v.meta().numel() * kSmall <= size || (is_kept(v.node) && !(cheap && only_products_read(v.node)))) return;
          ok &= cheap;
          if (seen.insert(v.node).second) todo.push_back(v.node);
        });
    }
    return ok ? nodes : std::vector<Node*>();
  }

  Graph& g_;
  std::unordered_map<const Node*, std::vector<Node*>> readers_;
  std::unordered_set<const Node*> leaves_;  // what leaves the graph
};

}  // namespace

bool recompute_operands(Graph& g) {
  if (std::none_of(g.nodes().begin(), g.nodes().end(), [](const auto& n) { return n->backward; })) return false;
  return Recomputer(g).run();
}

}  // namespace kiln::graph
