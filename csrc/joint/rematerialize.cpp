#include "joint/rematerialize.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "graph/infer.h"
#include "graph/passes/passes.h"
#include "graph/recompute.h"
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
    const auto again = [&](const Node* n) { return n->kind == NodeKind::Call && n->checkpoint && !kept_.contains(n); };
    return graph::recompute_for_backward(
        g_, again, [&](Value v, Node* before) { return v.node->checkpoint ? draw(v, before) : v; });
  }

 private:
  void find_kept() {
    const auto keep = [&](Value v) {
      if (v) kept_.insert({v.node, graph::storage_root(v).node});
    };
    for (const Arg& a : g_.outputs()) graph::for_each_value(a, keep);
    for (const graph::Mutation& m : g_.mutations()) keep(m.value);
    for (Node* n : order_) {
      for (const Arg& a : n->args)
        graph::for_each_value(a, [&](Value v) {
          if (v && !n->backward && std::abs(n->checkpoint) != std::abs(v.node->checkpoint)) keep(v);
        });
      if (n->checkpoint < 0)
        for (uint32_t i = 0; i < n->results.size(); ++i) keep(n->out(i));
      if (!ops::lookup(n->op) || ops::is_random(n->op)) kept_.insert(n);
    }
  }

  /// A kept value; of one that is 0 or 1 a byte is kept, and made a number again.
  Value draw(Value v, Node* before) {
    if (!v.node->op.name().starts_with("aten::bernoulli") || v.meta().dtype == DType::Bool) return v;
    Node*& copy = draws_[v.node];
    if (!copy) {
      const size_t next = place_.at(v.node) + 1;
      g_.set_insert_point(next < order_.size() ? order_[next] : nullptr);
      const Value bits = graph::add_inferred(g_, graph::Op("aten::ne.Scalar"), {Arg(v), Arg(0)})->out();
      g_.set_insert_point(before);
      copy = graph::add_inferred(g_, graph::Op("aten::_to_copy"),
                                 {Arg(bits), Arg(v.meta().dtype), Arg(), Arg(), Arg(), Arg(false), Arg()});
      copy->backward = copy->recomputed = true;
    }
    return copy->out();
  }

  graph::Graph& g_;
  std::vector<Node*> order_;
  std::unordered_map<const Node*, size_t> place_;
  std::unordered_set<const Node*> kept_;
  std::unordered_map<const Node*, Node*> draws_;  // kept as bools: what makes numbers of them
};

}  // namespace

bool rematerialize(graph::Graph& g) {
  if (std::none_of(g.nodes().begin(), g.nodes().end(), [](const auto& n) { return n->checkpoint != 0; })) return false;
  return Rematerializer(g).run();
}

}  // namespace kiln::joint
