// Products with something added or reshaped around: the product stays a library call, the rest fuses with neighbours.
#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

// beta*self + alpha*product.
Value combine(Builder& b, Value self, Value product, const Arg& beta, const Arg& alpha) {
  if (alpha.to_double() != 1) product = b.mul(product, alpha);
  if (beta.to_double() == 0) return product;
  if (beta.to_double() != 1) self = b.mul(self, beta);
  return b.add(product, self);
}

bool rounds(const Node& n) {
  // Half products keep their sum in float32 until the end inside the library.
  const DType t = n.results[0].dtype;
  return t == DType::Float16 || t == DType::BFloat16 || !is_floating(t);
}

// A bias that is one row is added by the product's own kernel.
bool is_row(const Node& n) {
  return n.arg(0).value().meta().dim() == 1 && n.arg(3).to_double() == 1 && n.arg(4).to_double() == 1;
}

bool addmm(Builder& b, const Node& n, std::vector<Value>& out) {
  if (rounds(n) || is_row(n)) return false;
  out = {combine(b, n.arg(0).value(), b.call("aten::mm", {n.arg(1), n.arg(2)}), n.arg(3), n.arg(4))};
  return true;
}
bool baddbmm(Builder& b, const Node& n, std::vector<Value>& out) {
  if (rounds(n)) return false;
  out = {combine(b, n.arg(0).value(), b.call("aten::bmm", {n.arg(1), n.arg(2)}), n.arg(3), n.arg(4))};
  return true;
}

const RuleRow kRows[] = {
    {"aten::addmm", addmm},
    {"aten::baddbmm", baddbmm},
};

}  // namespace

std::span<const RuleRow> linear_rules() { return kRows; }

}  // namespace kiln::decompose
