#pragma once
#include "decompose/decompose.h"
#include "graph/infer.h"

// What rules write with: calls whose metadata come from the op table.
namespace kiln::decompose {

using graph::Arg;
using graph::Node;
using graph::TensorMeta;
using graph::Value;
using Sizes = std::vector<int64_t>;

class Builder {
 public:
  explicit Builder(graph::Graph& g) : g_(g) {}
  Node* node(const char* op, std::vector<Arg> args) {
    Node* n = graph::add_inferred(g_, graph::Op(op), std::move(args));
    added.push_back(n);
    return n;
  }
  /// A call whose result the rule knows itself: ops of kiln's own, views of values.
  Node* raw_node(const char* op, std::vector<Arg> args, std::vector<TensorMeta> results) {
    Node* n = g_.add_call(graph::Op(op), std::move(args), std::move(results));
    added.push_back(n);
    return n;
  }
  Value raw(const char* op, std::vector<Arg> args, TensorMeta result) {
    return raw_node(op, std::move(args), {std::move(result)})->out();
  }
  Value call(const char* op, std::vector<Arg> args) { return node(op, std::move(args))->out(); }
  std::vector<Node*> added;  // in order

  Value add(Arg a, Arg b) { return call("aten::add.Tensor", {a, b, Arg(1)}); }
  Value sub(Arg a, Arg b) { return call("aten::sub.Tensor", {a, b, Arg(1)}); }
  Value mul(Arg a, Arg b) { return call("aten::mul.Tensor", {a, b}); }
  Value div(Arg a, Arg b) { return call("aten::div.Tensor", {a, b}); }
  Value neg(Value a) { return call("aten::neg", {a}); }
  Value exp(Value a) { return call("aten::exp", {a}); }
  Value log(Value a) { return call("aten::log", {a}); }
  Value rsqrt(Value a) { return call("aten::rsqrt", {a}); }
  Value sigmoid(Value a) { return call("aten::sigmoid", {a}); }
  Value where(Value c, Arg a, Arg b);
  Value eq(Value a, Arg b) { return b.is_value() ? call("aten::eq.Tensor", {a, b}) : call("aten::eq.Scalar", {a, b}); }
  Value ne(Value a, Arg b) { return b.is_value() ? call("aten::ne.Tensor", {a, b}) : call("aten::ne.Scalar", {a, b}); }
  /// Sum over dims; dims of {} give a itself.
  Value sum(Value a, const Sizes& dims, bool keepdim);
  Value sum_all(Value a) { return call("aten::sum", {a, Arg()}); }
  Value mean_all(Value a) { return call("aten::mean", {a, Arg()}); }
  Value view(Value a, const Sizes& sizes);
  Value expand(Value a, const Sizes& sizes) { return call("aten::expand", {a, Arg::ints(sizes), Arg(false)}); }
  Value unsqueeze(Value a, int64_t dim) { return call("aten::unsqueeze", {a, Arg(dim)}); }
  /// a in dtype t; a itself if it has it.
  Value to(Value a, DType t);
  /// a in the dtype in which ATen computes it: float32 for half types.
  Value up(Value a);
  Value full(const Sizes& sizes, Arg value, DType t);
  Value arange(int64_t n);
  /// Whether anything reads this result of a node of the graph.
  bool is_used(const Node& n, size_t result) const;

 private:
  graph::Graph& g_;
};

/// Writes the node's replacement before it and fills `out`, one value per result (null: undefined, or nobody may use
/// it). False: these arguments are outside the rule; nothing may have been written then that matters.
using Rule = bool (*)(Builder& b, const Node& n, std::vector<Value>& out);
struct RuleRow {
  const char* op;
  Rule rule;
};
std::span<const RuleRow> attention_rules();
std::span<const RuleRow> linear_rules();
std::span<const RuleRow> norm_rules();
std::span<const RuleRow> loss_rules();
std::span<const RuleRow> misc_rules();
/// Lists of tensors are spelled apart by one function: _foreach_add.List -> add.Tensor for each.
bool foreach_rule(Builder& b, const Node& n, std::vector<Value>& out);

using graph::wrap;
bool has(const Node& n, size_t arg);  // a tensor argument that is given

}  // namespace kiln::decompose
