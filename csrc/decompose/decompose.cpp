#include "decompose/decompose.h"

#include <algorithm>

#include "base/error.h"
#include "decompose/builder.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::decompose {

Value Builder::where(Value c, Arg a, Arg b) {
  const char* op = a.is_value() ? (b.is_value() ? "aten::where.self" : "aten::where.ScalarOther")
                                : (b.is_value() ? "aten::where.ScalarSelf" : "aten::where.Scalar");
  return call(op, {c, a, b});
}
Value Builder::sum(Value a, const Sizes& dims, bool keepdim) {
  return dims.empty() ? a : call("aten::sum.dim_IntList", {a, Arg::ints(dims), Arg(keepdim), Arg()});
}
Value Builder::view(Value a, const Sizes& sizes) {
  // Values only: strides do not matter inside, so a view is always possible.
  if (a.meta().sizes == sizes) return a;
  TensorMeta m = a.meta();
  m.sizes = sizes;
  m.strides = graph::contiguous_strides(sizes);
  return raw("aten::_unsafe_view", {a, Arg::ints(sizes)}, std::move(m));
}
Value Builder::to(Value a, DType t) {
  if (a.meta().dtype == t) return a;
  return call("aten::_to_copy", {a, Arg(t), Arg(), Arg(), Arg(), Arg(false), Arg()});
}
Value Builder::up(Value a) {
  const DType t = a.meta().dtype;
  return t == DType::Float16 || t == DType::BFloat16 ? to(a, DType::Float32) : a;
}
Value Builder::full(const Sizes& sizes, Arg value, DType t) {
  return call("aten::full", {Arg::ints(sizes), value, Arg(t), Arg(), Arg(graph::Device{}), Arg()});
}
Value Builder::arange(int64_t n) {
  return call("aten::arange.start_step",
              {Arg(0), Arg(n), Arg(1), Arg(DType::Int64), Arg(), Arg(graph::Device{}), Arg()});
}

bool Builder::is_used(const Node& n, size_t result) const {
  bool used = false;
  const auto look = [&](const Arg& a) {
    graph::for_each_value(a, [&](Value v) { used = used || (v.node == &n && v.index == result); });
  };
  for (const auto& node : g_.nodes())
    for (const Arg& a : node->args) look(a);
  for (const Arg& a : g_.outputs()) look(a);
  return used;
}

bool has(const Node& n, size_t arg) { return arg < n.args.size() && n.args[arg].is_value() && n.args[arg].value(); }

namespace {

const std::unordered_map<graph::Op, Rule>& table() {
  static const auto* rules = [] {
    auto* t = new std::unordered_map<graph::Op, Rule>;
    for (auto rows : {attention_rules(), linear_rules(), norm_rules(), loss_rules(), misc_rules()})
      for (const RuleRow& row : rows) (*t)[graph::Op(row.op)] = row.rule;
    return t;
  }();
  return *rules;
}

Rule find(const graph::Op& op) {
  const auto it = table().find(op);
  if (it != table().end()) return it->second;
  return op.name().starts_with("aten::_foreach_") ? &foreach_rule : nullptr;
}

bool plain(const Node& n) {
  bool ok = true;
  auto check = [&](const TensorMeta& m) {
    if (m.defined && (m.device.type != graph::DeviceType::CPU || m.dtype == DType::Opaque || is_complex(m.dtype)))
      ok = false;
  };
  for (const TensorMeta& m : n.results) check(m);
  for (const Arg& a : n.args)
    graph::for_each_value(a, [&](Value v) {
      if (v) check(v.meta());
    });
  return ok;
}

/// `v` channels-last if the node that it replaces was: a convolution that reads it asks for that. Other layouts are
/// free.
Value in_layout(Builder& b, Value v, const TensorMeta& wanted) {
  const TensorMeta& m = v.meta();
  if (m.strides == wanted.strides || m.sizes != wanted.sizes || wanted.dim() != 4 || wanted.is_contiguous() ||
      !wanted.is_contiguous(graph::MemoryFormat::ChannelsLast))
    return v;
  return b.call("aten::clone", {v, graph::MemoryFormat::ChannelsLast});
}

}  // namespace

bool has_rule(const graph::Op& op) { return find(op) != nullptr; }

bool decompose(graph::Graph& g) {
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  std::vector<Node*> dead;
  // A rule's own calls may have rules, too: nodes written before `n` are visited with it.
  std::vector<Node*> order;
  for (const auto& n : g.nodes()) order.push_back(n.get());
  struct Kept {
    Value value;
    TensorMeta meta;
    bool is_view;
  };
  std::vector<Kept> kept;
  for (const Arg& a : g.outputs())
    if (a.is_value() && a.value()) kept.push_back({a.value(), a.value().meta(), ops::is_view(a.value().node->op)});
  const std::vector<Arg> old_outputs = g.outputs();

  auto expand = [&](auto&& self, Node* n) -> void {
    if (n->kind != graph::NodeKind::Call) return;
    const Rule rule = find(n->op);
    if (!rule || !plain(*n)) return;
    g.set_insert_point(n);
    Builder b(g);
    std::vector<Value> out;
    bool done = false;
    try {
      done = rule(b, *n, out);
    } catch (const Unsupported&) {
      done = false;  // an op without a shape rule: the node stays whole
    }
    if (done)
      for (size_t i = 0; i < std::min(out.size(), n->results.size()); ++i)
        if (out[i]) out[i] = in_layout(b, out[i], n->results[i]);
    const std::vector<Node*> added = std::move(b.added);
    for (Node* m : added) {
      m->stack = n->stack;
      m->module_path = n->module_path;
      m->backward = n->backward;
      m->recomputed = n->recomputed;
    }
    if (done) {
      KILN_CHECK(out.size() == n->results.size(), "decomposition of " + n->op.name() + " gave too few results");
      for (size_t i = 0; i < out.size(); ++i) {
        if (!out[i]) continue;
        const TensorMeta &m = out[i].meta(), &want = n->results[i];
        KILN_CHECK(m.sizes == want.sizes, "decomposition of " + n->op.name() + " gave another shape");
        // Operands of unlike dtypes: what eager makes of them, it alone knows.
        if (m.dtype != want.dtype) done = false;
      }
    }
    if (done) {
      replaced[n] = out;
      dead.push_back(n);
      for (Node* m : added) self(self, m);
    } else {
      for (auto m = added.rbegin(); m != added.rend(); ++m) g.erase(*m);
    }
  };
  for (Node* n : order) expand(expand, n);
  if (dead.empty()) return false;
  // Eager draws in the order of memory: what random numbers are drawn like keeps its strides, also behind views.
  for (Node* n : order) {
    if (!ops::is_random(n->op) || replaced.contains(n)) continue;
    g.set_insert_point(n);
    for (Arg& a : n->args)
      graph::for_each_value(a, [&](Value& v) {
        const Value root = v ? graph::storage_root(v) : v;
        const auto it = root ? replaced.find(root.node) : replaced.end();
        if (it == replaced.end() || !it->second[root.index] || !v.meta().is_non_overlapping_and_dense()) return;
        if (it->second[root.index].meta().strides == root.meta().strides) return;
        TensorMeta m = v.meta();
        m.offset = 0;
        v = g.add_call(graph::Op("aten::clone"), {v, Arg()}, {m})->out();
      });
  }
  g.set_insert_point(nullptr);
  g.replace_uses(replaced);
  for (Node* n : dead) g.erase(n);
  // What the caller sees keeps its strides, and is its own memory where it was; inside, layouts are free.
  for (size_t i = 0; i < g.outputs().size(); ++i) {
    Arg& a = g.outputs()[i];
    if (!a.is_value() || !a.value() || a == old_outputs[i]) continue;
    const Value v = a.value();
    const auto before =
        std::find_if(kept.begin(), kept.end(), [&](const Kept& k) { return Arg(k.value) == old_outputs[i]; });
    if (before == kept.end()) continue;
    const bool became_view = !before->is_view && graph::storage_root(v).node->kind == graph::NodeKind::Placeholder;
    if (before->meta.strides == v.meta().strides && !became_view) continue;
    TensorMeta m = before->meta;
    m.offset = 0;
    a = g.add_call(graph::Op("aten::clone"), {v, Arg()}, {m})->out();
  }
  return true;
}

}  // namespace kiln::decompose
