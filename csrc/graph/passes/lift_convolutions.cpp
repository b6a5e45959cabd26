#include "graph/passes/lift_convolutions.h"

#include "graph/convolution.h"
#include "graph/infer.h"

namespace kiln::graph {
namespace {

bool is_line_convolution(const Node& n) {
  if (!is_float_convolution(n, 3) || groups_of(n) != 1) return false;
  for (size_t i = 0; i < operands(n); ++i)
    if (n.arg(i).value().meta().numel() == 0) return false;
  return true;
}

class Lifter {
 public:
  Lifter(Graph& g, Node& n) : g_(g), n_(n) { g_.set_insert_point(&n); }

  /// One value per result, null where it is undefined; nothing if the result would have other strides.
  std::vector<Value> run() {
    const size_t at = first_setting(n_);
    std::vector<Arg> args = n_.args;
    for (size_t i = 0; i < operands(n_); ++i) args[i] = add("aten::unsqueeze", {args[i], Arg(int64_t{2})})->out();
    const int64_t neutral[] = {1, 0, 1, 0, 0};
    for (const size_t i : {0, 1, 2, 4}) args[at + i] = Arg::ints({neutral[i], args[at + i].to_ints().at(0)});
    Node* const lifted = add(n_.op.name(), std::move(args));
    std::vector<Value> results;
    for (uint32_t i = 0; i < n_.results.size(); ++i) {
      const TensorMeta& wanted = n_.results[i];
      Value v{lifted, i};
      if (!wanted.defined) {
        results.push_back({});
        continue;
      }
      if (wanted.dim() == 3) v = add("aten::squeeze.dim", {v, Arg(int64_t{2})})->out();
      if (v.meta().sizes != wanted.sizes || v.meta().strides != wanted.strides) {
        for (auto node = added_.rbegin(); node != added_.rend(); ++node) g_.erase(*node);
        return {};
      }
      results.push_back(v);
    }
    return results;
  }

 private:
  Node* add(const std::string& op, std::vector<Arg> args) {
    Node* n = add_inferred(g_, Op(op), std::move(args));
    n->backward = n_.backward;
    n->checkpoint = n_.checkpoint;
    n->stack = n_.stack;
    added_.push_back(n);
    return n;
  }

  Graph& g_;
  Node& n_;
  std::vector<Node*> added_;
};

}  // namespace

bool lift_convolutions(Graph& g) {
  std::vector<Node*> found;
  for (const auto& n : g.nodes())
    if (is_line_convolution(*n)) found.push_back(n.get());
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  for (Node* n : found) {
    std::vector<Value> results = Lifter(g, *n).run();
    if (!results.empty()) replaced[n] = std::move(results);
  }
  g.set_insert_point(nullptr);
  if (replaced.empty()) return false;
  g.replace_uses(replaced);
  for (auto n = found.rbegin(); n != found.rend(); ++n)
    if (replaced.count(*n)) g.erase(*n);
  return true;
}

}  // namespace kiln::graph
