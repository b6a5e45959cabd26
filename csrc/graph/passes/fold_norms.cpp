#include "graph/convolution.h"
#include "graph/infer.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

bool is_there(const Arg& a) { return a.is_value() && a.value(); }
bool is_frozen(const Arg& a) {
  static const Op kUnsqueeze("aten::unsqueeze");
  if (!is_there(a)) return false;
  const Node& n = *a.value().node;
  return n.kind == NodeKind::Call && n.op == kUnsqueeze ? is_frozen(n.arg(0)) : n.frozen;
}
bool is_frozen_or_none(const Arg& a) { return !is_there(a) || is_frozen(a); }

/// scale = weight / sqrt(var + eps);  norm(conv(x, w, b)) = conv(x, w * scale, (b - mean) * scale + bias)
void fold(Graph& g, Node& conv, Node& norm) {
  g.set_insert_point(&conv);
  const auto call = [&](const char* op, std::vector<Arg> args) {
    Node* n = add_inferred(g, Op(op), std::move(args), norm.name + "_folded");
    n->stack = norm.stack;
    return Arg(n->out());
  };
  const Arg &gamma = norm.arg(1), &beta = norm.arg(2), &mean = norm.arg(3), &var = norm.arg(4), &eps = norm.arg(6);
  const Arg weight = conv.arg(1), bias = conv.arg(2);
  Arg scale = call("aten::rsqrt", {call("aten::add.Scalar", {var, eps, Arg(int64_t{1})})});
  if (is_there(gamma)) scale = call("aten::mul.Tensor", {scale, gamma});
  std::vector<int64_t> shape(weight.value().meta().sizes.size(), 1);
  shape[0] = weight.value().meta().sizes[0];
  conv.args[1] = call("aten::mul.Tensor", {weight, call("aten::view", {scale, Arg::ints(shape)})});
  const Arg centered =
      is_there(bias) ? call("aten::sub.Tensor", {bias, mean, Arg(int64_t{1})}) : call("aten::neg", {mean});
  Arg shift = call("aten::mul.Tensor", {centered, scale});
  if (is_there(beta)) shift = call("aten::add.Tensor", {shift, beta, Arg(int64_t{1})});
  conv.args[2] = shift;
  g.set_insert_point(nullptr);
}

}  // namespace

bool fold_norms(Graph& g) {
  static const Op kConvolution("aten::convolution"), kNorm("aten::_native_batch_norm_legit_no_training");
  static const Op kSqueeze("aten::squeeze.dim");
  const std::unordered_map<const Node*, int> uses = g.use_counts();
  std::vector<Node*> norms;
  for (const auto& n : g.nodes())
    if (n->kind == NodeKind::Call && n->op == kNorm && is_there(n->arg(0))) norms.push_back(n.get());
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  for (Node* norm : norms) {
    const Value in = norm->arg(0).value();
    // A convolution along a line is one of pictures with one row.
    const bool lifted = in.node->kind == NodeKind::Call && in.node->op == kSqueeze && uses.at(in.node) == 1;
    Node& conv = lifted ? *in.node->arg(0).value().node : *in.node;
    if (conv.kind != NodeKind::Call || conv.op != kConvolution || is_transposed(conv) || uses.at(&conv) != 1) continue;
    const TensorMeta &before = in.meta(), &after = norm->results.at(0);
    const bool same = before.strides == after.strides;
    if (before.dtype != after.dtype || !(same || (lifted && after.is_contiguous())) || !is_floating(before.dtype))
      continue;
    bool frozen = is_frozen(conv.arg(1)) && is_frozen_or_none(conv.arg(2)) && is_frozen_or_none(norm->arg(1)) &&
                  is_frozen_or_none(norm->arg(2)) && is_frozen(norm->arg(3)) && is_frozen(norm->arg(4));
    // Statistics in a wider type than the weight's would change the result's.
    for (const Arg* a : {&conv.arg(1), &norm->arg(3), &norm->arg(4)})
      frozen = frozen && a->value().meta().dtype == before.dtype;
    if (!frozen) continue;
    fold(g, conv, *norm);
    Value result = in;
    if (!same) {  // channels-last pictures, whose norm would have laid the line out anew
      g.set_insert_point(norm);
      result = add_inferred(g, Op("aten::clone"), {in, MemoryFormat::Contiguous}, norm->name + "_layout")->out();
      g.set_insert_point(nullptr);
    }
    replaced[norm] = {result, Value{norm, 1}, Value{norm, 2}};
  }
  if (replaced.empty()) return false;
  g.replace_uses(replaced);
  eliminate_dead_code(g);
  return true;
}

}  // namespace kiln::graph
