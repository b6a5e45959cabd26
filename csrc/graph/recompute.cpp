#include "graph/recompute.h"

#include <algorithm>
#include <unordered_set>

namespace kiln::graph {

bool recompute_for_backward(Graph& g, const std::function<bool(const Node*)>& again,
                            const std::function<Value(Value v, Node* before)>& kept) {
  std::vector<Node*> order;
  std::unordered_map<const Node*, size_t> place;
  for (const auto& n : g.nodes()) {
    place[n.get()] = order.size();
    order.push_back(n.get());
  }
  std::unordered_map<const Node*, Node*> copies;
  const auto copy_of = [&](Value v, Node* before) {
    if (!v || !again(v.node)) return v && kept ? kept(v, before) : v;
    // What it takes and is not there yet, in the order of the graph.
    std::vector<Node*> todo{v.node}, needed;
    std::unordered_set<const Node*> seen{v.node};
    while (!todo.empty()) {
      Node* n = todo.back();
      todo.pop_back();
      if (copies.contains(n)) continue;
      needed.push_back(n);
      for (const Arg& a : n->args)
        for_each_value(a, [&](const Value& x) {
          if (x && again(x.node) && seen.insert(x.node).second) todo.push_back(x.node);
        });
    }
    std::sort(needed.begin(), needed.end(), [&](Node* a, Node* b) { return place.at(a) < place.at(b); });
    for (Node* n : needed) {
      std::vector<Arg> args = n->args;
      for (Arg& a : args)
        for_each_value(a, [&](Value& x) {
          if (!x) return;
          const auto made = copies.find(x.node);
          if (made != copies.end())
            x.node = made->second;
          else if (kept)
            x = kept(x, before);
        });
      g.set_insert_point(before);
      Node* copy = g.add_copy(*n, std::move(args));
      copy->checkpoint = 0;
      copy->backward = copy->recomputed = true;
      copies[n] = copy;
    }
    return Value{copies.at(v.node), v.index};
  };
  bool changed = false;
  for (Node* n : order) {
    if (!n->backward || again(n)) continue;
    for (Arg& a : n->args)
      for_each_value(a, [&](Value& v) {
        const Value other = copy_of(v, n);
        changed |= other != v;
        v = other;
      });
  }
  g.set_insert_point(nullptr);
  return changed;
}

}  // namespace kiln::graph
