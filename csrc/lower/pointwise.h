#pragma once
#include "lower/lowering.h"

// Pointwise rules: F(ops, node, values...) computes one element from the elements of the tensor arguments at the same
// place (broadcast), in the dtype in which ATen computes; the result is rounded to the result's dtype.
namespace kiln::lower {

/// Type promotion over the node's arguments at `args`, as torch.result_type (0-dim tensors and numbers count less).
DType result_type(const Node& n, std::initializer_list<int> args);

/// Some arguments of a node: tensors and numbers.
class Operands {
 public:
  /// False if an argument is neither a tensor nor a real number.
  static bool make(const Lowering& l, const Node& n, std::initializer_list<int> args, Operands& out);
  /// The k-th at point p, in `promoted` (rounded to it) and then in `compute`, which holds all values of that.
  Val value(size_t k, Ops& ops, Index p, DType promoted, DType compute) const;
  Val value(size_t k, Ops& ops, Index p, DType t) const { return value(k, ops, p, t, t); }
  /// A number, or a tensor of one element.
  bool is_single(size_t k) const { return !list_[k].is_tensor || list_[k].tensor.numel() == 1; }
  std::vector<Tensor> tensors() const;

 private:
  struct One {
    bool is_tensor = false;
    Tensor tensor;
    Arg number;
  };
  std::vector<One> list_;
};
Val number(Ops& ops, const Arg& a, DType t);

enum class In : uint8_t {
  Result,   // operands in the result's dtype, computed in its compute type
  Promote,  // operands in their common dtype, computed in its compute type; F gives bool or that type
  Scaled,   // as Result, but a second operand of one element is not rounded to a half type: ATen's mul and div
};

template <auto F, In Types, bool BoolToo, int Weight, int... Args>
bool pointwise_rule(Lowering& l, const Node& n) {
  Operands operands;
  if (!Operands::make(l, n, {Args...}, operands)) return false;
  const DType out = n.results.at(0).dtype;
  const DType promoted = Types == In::Promote ? result_type(n, {Args...}) : out, compute = compute_type(promoted);
  if (compute == DType::Bool && !BoolToo) return false;
  const Node* node = &n;
  const auto value = [operands, promoted, compute](size_t k, Ops& ops, Index p) {
    const bool exact = Types == In::Scaled && k == 1 && operands.is_single(k);
    return operands.value(k, ops, p, exact ? compute : promoted, compute);
  };
  l.set(n, l.lazy(
               out, n.results[0].sizes,
               [value, out, node](Ops& ops, Index p) {
                 size_t k = 0;
                 // Braces keep the order of evaluation.
                 const std::array<Val, sizeof...(Args)> v{(static_cast<void>(Args), value(k++, ops, p))...};
                 return cast_to(ops, std::apply([&](auto... x) { return F(ops, *node, x...); }, v), out);
               },
               operands.tensors(), Weight));
  return true;
}

/// One operand; Weight: what it costs against an addition.
template <auto F, int Weight = 1>
constexpr Rule unary = &pointwise_rule<F, In::Result, false, Weight, 0>;
template <auto F, int Weight = 1>
constexpr Rule binary = &pointwise_rule<F, In::Result, false, Weight, 0, 1>;
template <auto F, int Weight = 1>
constexpr Rule scaled = &pointwise_rule<F, In::Scaled, true, Weight, 0, 1>;
template <auto F>
constexpr Rule compare = &pointwise_rule<F, In::Promote, true, 1, 0, 1>;

}  // namespace kiln::lower
