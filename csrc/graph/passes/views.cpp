#include "base/error.h"
#include "graph/infer.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

bool is_view_call(const Node* n) {
  return n->kind == NodeKind::Call && ops::is_view(n->op) && n->results.size() == 1 && !n->returns_list &&
         !n->args.empty() && n->args[0].is_value() && n->args[0].value();
}

const Op kView("aten::view"), kUnsafeView("aten::_unsafe_view"), kReshape("aten::reshape"), kPermute("aten::permute"),
    kT("aten::t"), kTranspose("aten::transpose.int");

bool reshapes(const Node* n) { return n->op == kView || n->op == kUnsafeView; }

// The permutation that a call makes: result dim d is argument dim p[d].
std::optional<std::vector<int64_t>> permutation(const Node* n) {
  const int64_t dims = n->args[0].value().meta().dim();
  std::vector<int64_t> p(static_cast<size_t>(dims));
  for (int64_t d = 0; d < dims; ++d) p[static_cast<size_t>(d)] = d;
  const auto wrap = [&](int64_t d) { return static_cast<size_t>(d < 0 ? d + std::max<int64_t>(dims, 1) : d); };
  if (n->op == kT) {
    std::reverse(p.begin(), p.end());
  } else if (n->op == kTranspose) {
    if (dims > 0) std::swap(p[wrap(n->args[1].to_int())], p[wrap(n->args[2].to_int())]);
  } else if (n->op == kPermute) {
    const auto order = n->args[1].to_ints();
    for (size_t d = 0; d < p.size(); ++d) p[d] = static_cast<int64_t>(wrap(order.at(d)));
  } else {
    return std::nullopt;
  }
  return p;
}

bool same_place(const TensorMeta& a, const TensorMeta& b) {
  return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides && a.offset == b.offset;
}

/// Whether what the views between `earlier` and `v` say of their results is so: an argument that was replaced by one of
/// another layout leaves it behind.
bool is_exact(Value v, Value earlier) {
  try {
    for (; v != earlier; v = v.node->args[0].value())
      if (!same_place(infer(v.node->op, v.node->args).at(0), v.meta())) return false;
    return true;
  } catch (const ops::ShapeError&) {
    return false;
  } catch (const Unsupported&) {
    return false;
  }
}

}  // namespace

bool simplify_views(Graph& g) {
  const auto escapes = escaping(g);
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  bool changed = false;
  const auto current = [&](Value& v) {
    const auto it = v ? replaced.find(v.node) : replaced.end();
    if (it != replaced.end()) v = it->second.at(v.index);
  };
  for (const auto& node : g.nodes()) {
    Node* n = node.get();
    for (Arg& a : n->args) for_each_value(a, current);
    if (!is_view_call(n)) continue;
    // An earlier member of the chain that lies at the same place in the same storage.
    Value earlier = n->args[0].value();
    while (!same_place(earlier.meta(), n->results[0]) || !may_replace(n->out(), earlier, escapes)) {
      if (!is_view_call(earlier.node)) {
        earlier = Value();
        break;
      }
      earlier = earlier.node->args[0].value();
    }
    if (earlier && is_exact(n->out(), earlier)) {
      replaced[n] = {earlier};
      changed = true;
    }
    if (replaced.contains(n)) continue;
    const Node* before = n->args[0].value().node;
    if (!is_view_call(before)) continue;
    if (reshapes(n) && reshapes(before)) {
      // One view of the source, if it has these strides by itself.
      const Value source = before->args[0].value();
      const ops::Arg args[] = {&source.meta(), ops::Arg::ints(n->results[0].sizes)};
      try {
        if (!same_place(ops::infer(kView, args).at(0), n->results[0])) continue;
      } catch (const ops::ShapeError&) {
        continue;
      }
      n->op = kView;
      n->args = {source, Arg::ints(n->results[0].sizes)};
      changed = true;
    } else if (const auto outer = permutation(n)) {
      const auto inner = permutation(before);
      if (!inner) continue;
      std::vector<int64_t> both;
      for (int64_t d : *outer) both.push_back(inner->at(static_cast<size_t>(d)));
      n->op = kPermute;
      n->args = {before->args[0], Arg::ints(both)};
      changed = true;
    }
  }
  if (!replaced.empty()) g.replace_uses(replaced);
  return changed;
}

}  // namespace kiln::graph
