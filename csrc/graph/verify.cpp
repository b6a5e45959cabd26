#include "graph/graph.h"
#include "ops/ops.h"

namespace kiln::graph {
void verify(const Graph& g, bool functional) {
  std::unordered_set<const Node*> seen;
  std::unordered_set<std::string_view> names;
  auto check_value = [&](const Value& v, const std::string& user) {
    if (!v) return;
    KILN_CHECK(seen.contains(v.node), user + " uses a value that is not defined before it in this graph");
    KILN_CHECK(v.index < v.node->results.size(), user + " uses result " + std::to_string(v.index) + " of " +
                                                     v.node->name + ", which has " +
                                                     std::to_string(v.node->results.size()));
  };
  size_t inputs = 0;
  for (const auto& node : g.nodes()) {
    const Node& n = *node;
    for (const Arg& a : n.args) for_each_value(a, [&](const Value& v) { check_value(v, n.name); });
    for (const auto& [key, a] : n.kwargs) for_each_value(a, [&](const Value& v) { check_value(v, n.name); });
    KILN_CHECK(!n.name.empty() && names.insert(n.name).second, "the name '" + n.name + "' is empty or taken twice");
    for (const TensorMeta& t : n.results) {
      KILN_CHECK(t.sizes.size() == t.strides.size(), n.name + " has another number of strides than of sizes");
      for (int64_t s : t.sizes) KILN_CHECK(s >= 0, n.name + " has a negative size");
    }
    if (n.kind == NodeKind::Placeholder) {
      KILN_CHECK(n.results.size() == 1 && n.args.empty(),
                 "placeholder " + n.name + " must have one result, no argument");
      KILN_CHECK(inputs < g.inputs().size() && g.inputs()[inputs] == &n, "placeholder " + n.name + " is out of order");
      ++inputs;
    } else {
      KILN_CHECK(n.op.id() != 0, n.name + " has no operator");
      if (functional) KILN_CHECK(!ops::mutates(n.op), n.op.name() + " mutates in a functional graph");
    }
    seen.insert(&n);
  }
  KILN_CHECK(inputs == g.inputs().size(), "the list of inputs names nodes that are not in the graph");
  for (const Arg& a : g.outputs()) for_each_value(a, [&](const Value& v) { check_value(v, "return"); });
  if (g.asked) {
    KILN_CHECK(*g.asked < g.outputs().size() && g.outputs()[*g.asked].is_value(), "ask names no output");
    const TensorMeta& meta = g.outputs()[*g.asked].value().meta();
    KILN_CHECK(meta.dtype == DType::Bool && meta.sizes.empty(), "ask needs one bool");
  }
  for (const Mutation& m : g.mutations()) {
    KILN_CHECK(m.input && m.value, "a mutation needs an input and a value");
    check_value(m.input, "mutate");
    check_value(m.value, "mutate");
    KILN_CHECK(m.input.node->kind == NodeKind::Placeholder,
               "mutate changes " + m.input.node->name + ", no placeholder");
    KILN_CHECK(m.input.meta().sizes == m.value.meta().sizes && m.input.meta().dtype == m.value.meta().dtype,
               "mutate of " + m.input.node->name + " changes its shape or dtype");
  }
}

}  // namespace kiln::graph
