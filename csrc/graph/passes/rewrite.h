#pragma once
#include <string>
#include <vector>

#include "graph/infer.h"

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
  void undo() {
    for (auto added = added_.rbegin(); added != added_.rend(); ++added) g_.erase(*added);
    added_.clear();
  }

 private:
  Graph& g_;
  Node& n_;
  std::vector<Node*> added_;
};

/// Replaces nodes: `results` gives one value for each result of a node, null where nobody may use it.
inline bool replace_nodes(Graph& g, const std::vector<Node*>& nodes,
                          const std::unordered_map<const Node*, std::vector<Value>>& results) {
  g.set_insert_point(nullptr);
  if (results.empty()) return false;
  g.replace_uses(results);
  for (auto n = nodes.rbegin(); n != nodes.rend(); ++n)
    if (results.count(*n)) g.erase(*n);
  return true;
}

}  // namespace kiln::graph
