#include "graph/passes/lift_convolutions.h"

#include "graph/convolution.h"
#include "graph/passes/rewrite.h"

namespace kiln::graph {
namespace {

bool is_line_convolution(const Node& n) {
  return is_float_convolution(n, 3) && (groups_of(n) == 1 || is_depthwise(n)) && has_elements(n);
}

/// One value per result, null where it is undefined; nothing if a result would have other strides.
std::vector<Value> lifted(Graph& g, Node& n) {
  Rewrite to(g, n);
  const size_t at = first_setting(n);
  std::vector<Arg> args = n.args;
  for (size_t i = 0; i < operands(n); ++i) args[i] = to.call("aten::unsqueeze", {args[i], Arg(int64_t{2})});
  const int64_t neutral[] = {1, 0, 1, 0, 0};
  for (const size_t i : {0, 1, 2, 4}) args[at + i] = Arg::ints({neutral[i], args[at + i].to_ints().at(0)});
  Node* const convolution = to.node(n.op.name(), std::move(args));
  std::vector<Value> results;
  for (uint32_t i = 0; i < n.results.size(); ++i) {
    const TensorMeta& wanted = n.results[i];
    Value v{convolution, i};
    if (!wanted.defined) {
      results.push_back({});
      continue;
    }
    if (wanted.dim() == 3) v = to.call("aten::squeeze.dim", {v, Arg(int64_t{2})});
    if (v.meta().sizes != wanted.sizes || v.meta().strides != wanted.strides) {
      to.undo();
      return {};
    }
    results.push_back(v);
  }
  return results;
}

}  // namespace

bool lift_convolutions(Graph& g) {
  return replace_each(g, is_line_convolution, [&](Node& n) { return lifted(g, n); });
}

}  // namespace kiln::graph
