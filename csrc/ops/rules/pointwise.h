#pragma once
#include "ops/rules/common.h"

// Rules of element-wise ops, all over one model of TensorIterator.
namespace kiln::ops::rules {

enum class Out : uint8_t {
  Promote,  // the common dtype of the operands
  Float,    // the same, integers become the default float
  Bool,     // comparisons
  Real,     // abs: complex becomes its real type
};

/// `indices`: which arguments are operands, in the order in which the kernel's iterator holds them.
Metas pointwise_over(Out out, std::initializer_list<size_t> indices, Args args);

/// The rule of an op whose operands are arguments I..., in the iterator's order.
template <Out R, size_t... I>
Metas pointwise(const OpInfo&, Args args) {
  return pointwise_over(R, {I...}, args);
}

/// Unary ops that keep the dtype; scalars among the arguments do not promote (relu, leaky_relu, hardtanh).
Metas unary(const OpInfo& info, Args args);
/// Result dtype from argument 0 with the numbers among arguments 1 and 2, layout from argument 0 alone (clamp, pow by a
/// number).
Metas unary_with_numbers(const OpInfo& info, Args args);
/// Bits, shifts and divisors: one operand or two, promoted. ATen has no kernel for numbers that are no integers.
Metas integers_only(const OpInfo& info, Args args);
/// clamp: only integers promote by the bounds.
Metas clamp(const OpInfo& info, Args args);
Metas where(const OpInfo& info, Args args);
Metas masked_fill(const OpInfo& info, Args args);
/// Losses with a reduction argument at index 2: pointwise if it is 0 (none), else 0-dim.
Metas pointwise_loss(const OpInfo& info, Args args);
/// The same with a weight at index 2 and the reduction at index 3.
Metas weighted_loss(const OpInfo& info, Args args);
/// Gradients (grad_output, self, target, ...) of such losses.
Metas loss_backward(const OpInfo& info, Args args);
Metas logits_loss(const OpInfo& info, Args args);
Metas membership(const OpInfo& info, Args args);
Metas multinomial(const OpInfo& info, Args args);
/// clamp_max: the bound alone.
Metas clamp_upper(const OpInfo& info, Args args);
/// div with a rounding mode: integers stay integers under "trunc" and "floor".
/// Row-major results: mvlgamma, and a number to the power of a tensor.
Metas contiguous_float(const OpInfo& info, Args args);
Metas power_of_number(const OpInfo& info, Args args);
Metas divide_with_mode(const OpInfo& info, Args args);
Metas log_sigmoid_forward(const OpInfo& info, Args args);
Metas normal_of_std(const OpInfo& info, Args args);
Metas normal_of_both(const OpInfo& info, Args args);
Metas native_dropout(const OpInfo& info, Args args);
Metas rrelu_functional(const OpInfo& info, Args args);
Metas contiguous_self(const OpInfo& info, Args args);
/// bool results of one operand (isnan, signbit, logical_not).
Metas predicate(const OpInfo& info, Args args);
Metas copy(const OpInfo& info, Args args);
/// fill, zero, uniform...: like argument 0 under preserve_format.
Metas like_self(const OpInfo& info, Args args);
Metas frexp(const OpInfo& info, Args args);
Metas complex_of(const OpInfo& info, Args args);
Metas polar_angle(const OpInfo& info, Args args);
/// An in-place op: its functional rule, checked against argument 0.
Metas in_place(const OpInfo& info, Args args);

template <Rule R>
Metas foreach_of(const OpInfo& info, Args args) {
  Metas out;
  const size_t n = args[0].list().size();
  std::vector<Arg> one(args.begin(), args.end());
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < args.size(); ++k)
      if (args[k].is_list()) {
        if (args[k].list().size() != n)
          shape_error("Tensor lists must have the same number of tensors, got " + std::to_string(n) + " and " +
                      std::to_string(args[k].list().size()));
        one[k] = args[k].list()[i];
      }
    for (TensorMeta& t : R(info, one)) out.push_back(std::move(t));
  }
  return out;
}
/// The first N lists of tensors, each changed to a new one of the same layout.
template <size_t N>
Metas fused_optimizer(const OpInfo&, Args args) {
  Metas out;
  for (size_t i = 0; i < N; ++i)
    for (const TensorMeta* t : tensor_list(args, i)) out.push_back(t ? like(*t) : undefined_meta());
  return out;
}
Metas foreach_norm(const OpInfo& info, Args args);
Metas foreach_norm_same(const OpInfo& info, Args args);
Metas foreach_copy(const OpInfo& info, Args args);

}  // namespace kiln::ops::rules
