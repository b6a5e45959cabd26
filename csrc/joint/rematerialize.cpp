#include "joint/rematerialize.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "graph/infer.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::joint {
namespace {

using graph::Arg;
using graph::Node;
using graph::NodeKind;
using graph::Value;

class Rematerializer {
 public:
  explicit Rematerializer(graph::Graph& g) : g_(g) {
    for (const auto& n : g.nodes()) {
      place_[n.get()] = order_.size();
      order_.push_back(n.get());
    }
    find_kept();
  }

  bool run() {
    bool changed = false;
    for (Node* n : order_) {
      if (!n->backward) continue;
      for (Arg& a : n->args)
        graph::for_each_value(a, [&](Value& v) {
          const Value other = again(v, n);
          changed |= other != v;
          v = other;
        });
    }
    g_.set_insert_point(nullptr);
    return changed;
  }

 private:
  void find_kept() {
    const auto keep = [&](Value v) {
      if (v) kept_.insert({v.node, graph::storage_root(v).node});
    };
    for (const Arg& a : g_.outputs()) graph::for_each_value(a, keep);
    for (const graph::Mutation& m : g_.mutations()) keep(m.value);
    for (const Node* n : order_) {
      for (const Arg& a : n->args)
        graph::for_each_value(a, [&](Value v) {
          if (v && !n->backward && n->checkpoint != v.node->checkpoint) keep(v);
        });
      if (!ops::lookup(n->op) || ops::is_random(n->op)) kept_.insert(n);
    }
  }

  bool is_recomputed(Value v) const {
    return v && v.node->kind == NodeKind::Call && v.node->checkpoint && !kept_.contains(v.node);
  }

  /// What a backward node reads in place of `v`. New nodes go before `before`.
  Value again(Value v, Node* before) {
    if (!is_recomputed(v)) return v && v.node->checkpoint ? draw(v, before) : v;
    // What it takes and is not there yet, in the order of the graph.
    std::vector<Node*> todo{v.node}, needed;
    std::unordered_set<const Node*> seen{v.node};
    while (!todo.empty()) {
      Node* n = todo.back();
      todo.pop_back();
      if (copies_.contains(n)) continue;
      needed.push_back(n);
      for (const Arg& a : n->args)
        graph::for_each_value(a, [&](Value x) {
          if (is_recomputed(x) && seen.insert(x.node).second) todo.push_back(x.node);
        });
    }
    std::sort(needed.begin(), needed.end(), [&](Node* a, Node* b) { return place_.at(a) < place_.at(b); });
    for (Node* n : needed) {
      std::vector<Arg> args = n->args;
      for (Arg& a : args)
        graph::for_each_value(a, [&](Value& x) {
          x = is_recomputed(x) ? Value{copies_.at(x.node), x.index} : x && x.node->checkpoint ? draw(x, before) : x;
        });
      g_.set_insert_point(before);
      Node* copy = g_.add_copy(*n, std::move(args));
      copies_[n] = marked(copy);
    }
    return {copies_.at(v.node), v.index};
  }

  static Node* marked(Node* n) {
    n->checkpoint = 0;
    n->backward = n->recomputed = true;
    return n;
  }

  /// A kept value; of one that is 0 or 1 a byte is kept, and made a number again.
  Value draw(Value v, Node* before) {
    if (!v.node->op.name().starts_with("aten::bernoulli") || v.meta().dtype == DType::Bool) return v;
    Node*& copy = copies_[v.node];
    if (!copy) {
      const size_t next = place_.at(v.node) + 1;
      g_.set_insert_point(next < order_.size() ? order_[next] : nullptr);
      const Value bits = graph::add_inferred(g_, graph::Op("aten::ne.Scalar"), {Arg(v), Arg(0)})->out();
      g_.set_insert_point(before);
      copy = marked(graph::add_inferred(g_, graph::Op("aten::_to_copy"),
                                        {Arg(bits), Arg(v.meta().dtype), Arg(), Arg(), Arg(), Arg(false), Arg()}));
    }
    return copy->out();
  }

  graph::Graph& g_;
  std::vector<Node*> order_;
  std::unordered_map<const Node*, size_t> place_;
  std::unordered_set<const Node*> kept_;
  std::unordered_map<const Node*, Node*> copies_;
};

}  // namespace

bool rematerialize(graph::Graph& g) {
  if (std::none_of(g.nodes().begin(), g.nodes().end(), [](const auto& n) { return n->checkpoint != 0; })) return false;
  return Rematerializer(g).run();
}

}  // namespace kiln::joint
