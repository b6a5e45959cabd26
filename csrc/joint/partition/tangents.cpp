#include "joint/partition/tangents.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "graph/infer.h"
#include "ops/ops.h"

namespace kiln::joint {

using graph::Arg;
using graph::Graph;
using graph::Node;
using graph::NodeKind;
using graph::Value;

namespace {

using Dependencies = std::unordered_map<const Node*, TangentSet>;

/// By node: the tangents that it depends on.
Dependencies dependencies(const Graph& g, size_t num_saved) {
  const TangentSet none(g.inputs().size() - num_saved);
  Dependencies out;
  for (size_t i = num_saved; i < g.inputs().size(); ++i)
    out.emplace(g.inputs()[i], none).first->second.set(i - num_saved);
  for (const auto& n : g.nodes()) {
    TangentSet own = none;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](Value v) {
        if (v) own |= out.at(v.node);
      });
    out.emplace(n.get(), std::move(own));
  }
  return out;
}

class Narrowing {
 public:
  Narrowing(Graph& g, size_t num_saved, const TangentSet& defined)
      : g_(g), defined_(defined), depends_on_(dependencies(g, num_saved)) {
    for (const auto& n : g.nodes())
      if (n->kind == NodeKind::Call) {
        first_ = n.get();
        break;
      }
  }

  bool undefined(Value v) const {
    const auto it = depends_on_.find(v.node);
    return it != depends_on_.end() && it->second.any() && !it->second.intersects(defined_);
  }

  void run() {
    std::vector<Node*> nodes;
    for (const auto& n : g_.nodes())
      if (n->kind == NodeKind::Call && !undefined(n->out())) nodes.push_back(n.get());
    std::unordered_map<const Node*, std::vector<Value>> sums;
    for (Node* n : nodes) {
      for (Arg& a : n->args)
        graph::for_each_value(a, [&](Value& v) {
          if (const auto it = v ? sums.find(v.node) : sums.end(); it != sums.end()) v = it->second[0];
        });
      if (const Value rest = summand(*n); rest && rest.meta() == n->results[0]) {
        sums[n] = {rest};
        continue;
      }
      define_args(*n);
    }
    g_.replace_uses(sums);
  }

  /// What `sum`, which nothing but an output reads, is where only one of its summands is defined: with that one's
  /// strides, as eager has them, not those of the sum.
  Value without_undefined(Value sum) const {
    for (Value rest; (rest = summand(*sum.node)) && rest.meta().dtype == sum.meta().dtype;) sum = rest;
    return sum;
  }

  /// Removes what no output needs. Random ops whose gradient is there draw their numbers in eager too.
  void remove_unused() {
    std::unordered_set<const Node*> live;
    std::vector<Node*> todo, dead;
    for (Arg& a : g_.outputs())
      graph::for_each_value(a, [&](Value v) {
        if (v) todo.push_back(v.node);
      });
    for (const auto& n : g_.nodes())
      if (n->kind == NodeKind::Call && ops::is_random(n->op) && !undefined(n->out())) todo.push_back(n.get());
    while (!todo.empty()) {
      Node* n = todo.back();
      todo.pop_back();
      if (!live.insert(n).second) continue;
      for (const Arg& a : n->args)
        graph::for_each_value(a, [&](Value v) {
          if (v) todo.push_back(v.node);
        });
    }
    for (const auto& n : g_.nodes())
      if (!live.count(n.get())) dead.push_back(n.get());
    for (auto it = dead.rbegin(); it != dead.rend(); ++it) g_.erase(*it);
  }

 private:
  /// Of a sum `a + b` of one shape, where only one is defined, that one.
  Value summand(const Node& n) const {
    static const graph::Op kAdd("aten::add.Tensor");
    if (n.op != kAdd || !n.arg(0).is_value() || !n.arg(1).is_value() || !n.arg(0).value() || !n.arg(1).value())
      return {};
    const bool first = undefined(n.arg(0).value()), second = undefined(n.arg(1).value());
    if (first == second || !n.arg(2).is_number() || n.arg(2).to_double() != 1) return {};
    const Value rest = n.arg(first ? 1 : 0).value();
    return rest.meta().sizes == n.results[0].sizes ? rest : Value{};
  }

  void define_args(Node& n) {
    for (Arg& a : n.args)
      graph::for_each_value(a, [&](Value& v) {
        if (v && undefined(v)) v = zeros(v);
      });
  }

  /// Zeros like the undefined `v`.
  Value zeros(Value v) {
    static const graph::Op kFull("aten::full"), kPermute("aten::permute");
    if (v.node->kind == NodeKind::Call && ops::is_view(v.node->op)) {  // a view of zeros
      if (views_.insert(v.node).second) define_args(*v.node);
      return v;
    }
    const auto [it, fresh] = zeros_.try_emplace(v);
    if (!fresh) return it->second;
    const graph::TensorMeta& meta = v.meta();
    std::vector<int64_t> order(meta.sizes.size()), back(order.size()), sizes;
    std::iota(order.begin(), order.end(), 0);
    const auto at = [](const std::vector<int64_t>& l, int64_t i) { return l[static_cast<size_t>(i)]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return at(meta.strides, a) > at(meta.strides, b); });
    for (size_t i = 0; i < order.size(); ++i) {
      back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      sizes.push_back(at(meta.sizes, order[i]));
    }
    g_.set_insert_point(first_);
    Value made =
        graph::add_inferred(g_, kFull, {Arg::ints(sizes), Arg(0.0), Arg(meta.dtype), Arg(), Arg(meta.device), Arg()},
                            v.node->name + "_zeros")
            ->out();
    if (!std::is_sorted(order.begin(), order.end()))
      made = graph::add_inferred(g_, kPermute, {Arg(made), Arg::ints(back)})->out();
    g_.set_insert_point(nullptr);
    return it->second = made;
  }

  Graph& g_;
  const TangentSet& defined_;
  const Dependencies depends_on_;
  Node* first_ = nullptr;
  std::unordered_set<const Node*> views_;
  std::unordered_map<Value, Value> zeros_;
};

/// Finds where the gradient of a result comes together: from its tangent on, sums of which each is read once.
class Sums {
 public:
  explicit Sums(Graph& g) {
    const auto note = [&](Node* user, const Arg& arg) {
      graph::for_each_value(arg, [&](Value v) {
        if (!v) return;
        ++uses_[v];
        if (user) user_[v] = user;
      });
    };
    for (const auto& n : g.nodes())
      for (const Arg& a : n->args) note(n.get(), a);
    for (const Arg& a : g.outputs()) note(nullptr, a);
  }

  /// The value where all contributions to `tangent` have been added; none if others read the tangent or a part of the
  /// sum. `own` becomes the tangent as the first sum reads it.
  Value whole(Value tangent, Value& own) const {
    static const graph::Op kAdd("aten::add.Tensor"), kClone("aten::clone");
    Value at = own = tangent;
    bool summed = false;
    while (uses_.at(at) == 1) {
      const auto it = user_.find(at);
      if (it == user_.end() || !(it->second->op == kAdd || it->second->op == kClone)) break;
      if (it->second->op == kAdd && !std::exchange(summed, true)) own = at;
      at = it->second->out();
    }
    return summed ? at : Value{};
  }

 private:
  std::unordered_map<Value, int> uses_;
  std::unordered_map<Value, Node*> user_;
};

/// Lets what reads the whole gradients of the tangents in `cut` read the tangents alone. Returns the whole gradients;
/// none if the graph does not show them.
std::optional<std::vector<Value>> take_apart(Graph& g, size_t num_saved, const TangentSet& cut) {
  const Sums sums(g);
  std::vector<Value> totals;
  std::unordered_map<Value, Value> instead;
  for (size_t k = cut.find_first(); k != TangentSet::npos; k = cut.find_next(k)) {
    Value own;
    const Value total = sums.whole(g.inputs()[num_saved + k]->out(), own);
    if (!total) return std::nullopt;
    if (own.meta() != total.meta()) return std::nullopt;
    totals.push_back(total);
    instead[total] = own;
  }
  const auto redirect = [&](Arg& a) {
    graph::for_each_value(a, [&](Value& v) {
      if (const auto it = v ? instead.find(v) : instead.end(); it != instead.end()) v = it->second;
    });
  };
  for (const auto& n : g.nodes())
    for (Arg& a : n->args) redirect(a);
  for (Arg& a : g.outputs()) redirect(a);
  return totals;
}

}  // namespace

std::vector<TangentSet> readers_of_saved(const Graph& backward, size_t num_saved,
                                         const std::vector<TangentSet>& reached_from) {
  const Dependencies depends_on = dependencies(backward, num_saved);
  std::unordered_map<const Node*, TangentSet> readers;
  const TangentSet none(backward.inputs().size() - num_saved);
  const auto note = [&](const Arg& arg, const TangentSet& by) {
    graph::for_each_value(arg, [&](Value v) {
      if (v) readers.try_emplace(v.node, none).first->second |= by;
    });
  };
  for (size_t i = 0; i < backward.outputs().size(); ++i) note(backward.outputs()[i], reached_from.at(i));
  for (auto it = backward.nodes().rbegin(); it != backward.nodes().rend(); ++it) {
    const TangentSet& own = depends_on.at(it->get());
    const TangentSet by = own.any() ? own : readers.try_emplace(it->get(), none).first->second;
    for (const Arg& a : (*it)->args) note(a, by);
  }
  std::vector<TangentSet> out;
  for (size_t i = 0; i < num_saved; ++i) out.push_back(readers.try_emplace(backward.inputs()[i], none).first->second);
  return out;
}

Narrowed narrow(const Graph& backward, size_t num_saved, const Part& part, const std::vector<TangentSet>& reached_from,
                size_t num_grads) {
  Narrowed out;
  out.graph = backward.clone();
  Graph& g = *out.graph;
  const auto totals = take_apart(g, num_saved, part.cut);
  if (!totals) return {};
  std::vector<TangentSet> from(reached_from.begin(), reached_from.begin() + static_cast<std::ptrdiff_t>(num_grads));
  g.outputs().resize(num_grads);
  if (part.contributions) {
    from.assign(totals->size(), part.defined);
    g.outputs().assign(totals->begin(), totals->end());
  }
  Narrowing narrowing(g, num_saved, part.defined);
  for (size_t i = 0; i < g.outputs().size(); ++i) {
    Arg& a = g.outputs()[i];
    if (!a.is_value() || !a.value()) continue;
    if (narrowing.undefined(a.value()) || !from[i].intersects(part.defined))
      a = Arg();
    else if (part.contributions)
      a = Arg(narrowing.without_undefined(a.value()));
  }
  narrowing.run();
  std::unordered_map<const Node*, size_t> place;
  for (size_t i = 0; i < g.inputs().size(); ++i) place[g.inputs()[i]] = i;
  narrowing.remove_unused();
  for (const Node* n : g.inputs()) out.inputs.push_back(place.at(n));
  return out;
}

}  // namespace kiln::joint
