// Complex numbers, whose arithmetic the graph has in real ones (graph/passes/split_complex.h): what is left are views,
// copies, and the ways between a complex tensor and its parts. A complex tensor lies in memory, as pairs of real
// numbers in a buffer of those.
#include "base/error.h"
#include "lower/lowering.h"

namespace kiln::lower {

Tensor as_real(const Tensor& t) {
  KILN_CHECK(t.strided() && is_complex(t.dtype), "complex numbers that are not in memory");
  Tensor out = t;
  out.dtype = to_real(t.dtype);
  for (int64_t& s : out.strides) s *= 2;
  out.offset *= 2;
  out.sizes.push_back(2);
  out.strides.push_back(1);
  return out;
}

Tensor part_of(const Lowering& l, const Tensor& t, int64_t part) { return without_dim(l, as_real(t), t.dim(), part); }

namespace {

bool from_parts(Lowering& l, const Node& n) {  // complex(real, imag)
  const Tensor to = l.new_buffer(n);
  std::vector<std::pair<Tensor, Tensor>> stores;
  for (int64_t i = 0; i < 2; ++i) {
    Tensor from = l.get(n.arg(static_cast<size_t>(i)));
    if (from.sizes != to.sizes)
      from = l.mapped(from, to.sizes, [sizes = from.sizes](Index p) { return broadcast_index(sizes, p); });
    stores.emplace_back(from, part_of(l, to, i));
  }
  l.store_each(stores, l.name_of(n));
  l.set(n, to);
  return true;
}

bool to_pairs(Lowering& l, const Node& n) {  // view_as_real
  l.set(n, as_real(l.get(n.arg(0))));
  return true;
}

bool from_pairs(Lowering& l, const Node& n) {  // view_as_complex
  Tensor t = l.get(n.arg(0));
  const auto fits = [](const Tensor& pairs) {
    return pairs.strided() && pairs.offset % 2 == 0 && pairs.strides.back() == 1 &&
           std::all_of(pairs.strides.begin(), pairs.strides.end() - 1, [](int64_t s) { return s % 2 == 0; });
  };
  if (!fits(t)) {
    const Tensor pairs = l.new_temp(n.name + "_pairs", t.dtype, t.sizes);
    l.store(t, pairs, n.name + "_pairs");
    t = pairs;
  }
  t.dtype = n.results[0].dtype;
  t.sizes.pop_back();
  t.strides.pop_back();
  for (int64_t& s : t.strides) s /= 2;
  t.offset /= 2;
  l.set(n, t);
  return true;
}

bool copied(Lowering& l, const Node& n) {  // clone
  const Tensor& from = l.get(n.arg(0));
  // Whole numbers are turned faster, by ATen.
  if (from.dtype != n.results[0].dtype || !same_layout(from.sizes, from.strides, n.results[0].strides)) return false;
  const Tensor to = l.new_buffer(n);
  l.store(l.get(n.arg(0)), to, l.name_of(n));
  l.set(n, to);
  return true;
}

bool source(Lowering& l, const Node& n) {  // copy(self, source)
  if (l.escapes(n) || !n.arg(1).is_value()) return false;
  const Tensor& from = l.get(n.arg(1));
  if (from.dtype != n.results[0].dtype || from.sizes != n.results[0].sizes) return false;
  l.set(n, from);
  return true;
}

/// A view that stays a window on memory: index arithmetic is for kernels.
bool window(Lowering& l, const Node& n) {
  if (!rule_of(n.op)(l, n)) return false;
  for (uint32_t i = 0; i < n.results.size(); ++i)
    if (!l.get(graph::Value{const_cast<Node*>(&n), i}).strided()) {
      l.unset(n);
      return false;
    }
  return true;
}

const RuleRow kRows[] = {
    {"aten::complex", from_parts}, {"aten::view_as_real", to_pairs}, {"aten::view_as_complex", from_pairs},
    {"aten::clone", copied},       {"aten::copy", source},
};

}  // namespace

Rule complex_rule_of(const graph::Op& op) {
  static const auto* table = [] {
    auto* t = new std::unordered_map<graph::Op, Rule>;
    for (const RuleRow& row : view_rules()) (*t)[graph::Op(row.op)] = window;
    for (const RuleRow& row : kRows) (*t)[graph::Op(row.op)] = row.rule;
    return t;
  }();
  const auto it = table->find(op);
  return it == table->end() ? nullptr : it->second;
}

}  // namespace kiln::lower
