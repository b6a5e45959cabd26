#pragma once
#include <string>
#include <vector>

#include "graph/infer.h"
#include "ops/ops.h"

namespace kiln::graph {

/// Writes calls before a node that they may replace, and takes them back if they do not.
class Rewrite {
 public:
  Rewrite(Graph& g, Node& n) : g_(g), n_(n) { g_.set_insert_point(&n); }
  Node* node(const std::string& op, std::vector<Arg> args) {
    Node* added = add_inferred(g_, Op(op), std::move(args));
    added->backward = n_.backward;
    added->checkpoint = n_.checkpoint;
    added->stack = n_.stack;
    added_.push_back(added);
    return added;
  }
  Value call(const std::string& op, std::vector<Arg> args) { return node(op, std::move(args))->out(); }
  /// `v` row by row: a copy if it lies otherwise.
  Value dense(Value v) { return v.meta().is_contiguous() ? v : call("aten::clone", {v, MemoryFormat::Contiguous}); }
  /// `v` with other sizes, as a view where there is one.
  Value reshape(Value v, const std::vector<int64_t>& sizes) {
    try {
      return call("aten::view", {v, Arg::ints(sizes)});
    } catch (const ops::ShapeError&) {
      return call("aten::view", {call("aten::clone", {v, MemoryFormat::Contiguous}), Arg::ints(sizes)});
    }
  }
  void undo() {
    for (auto added = added_.rbegin(); added != added_.rend(); ++added) g_.erase(*added);
    added_.clear();
  }

 private:
  Graph& g_;
  Node& n_;
  std::vector<Node*> added_;
};

/// Clones what is to replace the results of `n` where one of the dense formats gives it their strides. False if sizes
/// or strides stay others.
inline bool take_layout(const Node& n, std::vector<Value>& results, Rewrite& to) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i]) continue;
    const TensorMeta& wanted = n.results[i];
    const MemoryFormat channels_last = wanted.dim() == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
    for (const MemoryFormat f : {MemoryFormat::Contiguous, channels_last})
      if (results[i].meta().strides != wanted.strides && wanted.dim() >= 4 &&
          strides_for(wanted.sizes, f) == wanted.strides)
        results[i] = to.call("aten::clone", {results[i], f});
    if (results[i].meta().sizes != wanted.sizes || results[i].meta().strides != wanted.strides) return false;
  }
  return true;
}

/// Has `rewrite` write what replaces each node that `takes` wants: one value per result, null where nobody may use it,
/// or nothing if the node stays. True if one was replaced.
template <class Takes, class F>
bool replace_each(Graph& g, Takes takes, F rewrite) {
  std::vector<Node*> nodes;
  for (const auto& n : g.nodes())
    if (takes(*n)) nodes.push_back(n.get());
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  for (Node* n : nodes)
    if (std::vector<Value> results = rewrite(*n); !results.empty()) replaced[n] = std::move(results);
  g.set_insert_point(nullptr);
  if (replaced.empty()) return false;
  g.replace_uses(replaced);
  for (auto n = nodes.rbegin(); n != nodes.rend(); ++n)
    if (replaced.count(*n)) g.erase(*n);
  return true;
}

}  // namespace kiln::graph
