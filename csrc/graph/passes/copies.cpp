#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

const Op kClone("aten::clone"), kToCopy("aten::_to_copy");

bool is_copy(const Node* n) { return n->kind == NodeKind::Call && (n->op == kClone || n->op == kToCopy); }

// Every value of `from` is one of `to`.
bool widens(DType from, DType to) {
  if (from == to) return true;
  switch (from) {
    case DType::Bool:
      return true;
    case DType::Float16:
    case DType::BFloat16:
      return to == DType::Float32 || to == DType::Float64;
    case DType::Float32:
      return to == DType::Float64;
    case DType::UInt8:
      return to == DType::Int16 || to == DType::Int32 || to == DType::Int64 || to == DType::Float32 ||
             to == DType::Float64;
    case DType::Int8:
    case DType::Int16:
      return (is_integral(to) && to != DType::UInt8 && to != DType::Bool && dtype_size(to) > dtype_size(from)) ||
             to == DType::Float32 || to == DType::Float64;
    case DType::Int32:
      return to == DType::Int64 || to == DType::Float64;
    default:
      return false;
  }
}

}  // namespace

bool remove_redundant_copies(Graph& g) {
  const auto escapes = escaping(g);
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  for (const auto& node : g.nodes()) {
    Node* n = node.get();
    for (Arg& a : n->args)
      for_each_value(a, [&](Value& v) {
        const auto it = v ? replaced.find(v.node) : replaced.end();
        if (it != replaced.end()) v = it->second.at(v.index);
      });
    if (!is_copy(n)) continue;
    // Down the chain of copies to the first value with this dtype and layout, while no step loses anything.
    Value source = n->args[0].value();
    std::optional<Value> found;
    for (;;) {
      if (may_replace(n->out(), source, escapes)) found = source;
      if (found || !is_copy(source.node)) break;
      const Value deeper = source.node->args[0].value();
      if (!widens(deeper.meta().dtype, source.meta().dtype)) break;
      source = deeper;
    }
    if (found) replaced[n] = {*found};
  }
  if (replaced.empty()) return false;
  g.replace_uses(replaced);
  return true;
}

}  // namespace kiln::graph
