#include "ops/rules/pointwise.h"

namespace kiln::ops::rules {
namespace {

// c10::canCast.
bool can_cast(DType from, DType to) {
  if (is_complex(from) && !is_complex(to)) return false;
  if (is_floating(from) && is_integral(to)) return false;
  return from == DType::Bool || to != DType::Bool;
}

}  // namespace

Metas pointwise_over(Out out, std::initializer_list<size_t> indices, Args args) {
  std::vector<const TensorMeta*> inputs;
  std::vector<Arg> operands;
  inputs.reserve(indices.size());
  operands.reserve(indices.size());
  for (size_t i : indices) {
    if (!has(args, i)) continue;
    operands.push_back(args[i]);
    inputs.push_back(args[i].is_value() ? args[i].value() : nullptr);
  }
  DType common = result_type(operands);
  DType result = common;
  switch (out) {
    case Out::Promote:
      break;
    case Out::Float:
      result = common = to_float(common);
      break;
    case Out::Bool:
      result = DType::Bool;
      break;
    case Out::Real:
      result = to_real(common);
      break;
  }
  return one(iterate(inputs, result, &common));
}

Metas unary(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  return one(iterate({&t, 1}, t->dtype));
}

Metas unary_with_numbers(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  const DType common = result_type(args.first(std::min<size_t>(args.size(), 2)));
  return one(iterate({&t, 1}, common, &common));
}

Metas clamp(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  if (!has(args, 1) && !has(args, 2)) shape_error("torch.clamp: At least one of 'min' or 'max' must not be None");
  DType common = t->dtype;
  if (is_integral(common)) common = result_type(args.first(std::min<size_t>(args.size(), 3)));
  return one(iterate({&t, 1}, common, &common));
}

Metas where(const OpInfo&, Args args) {
  const TensorMeta* condition = &tensor(args, 0);
  const DType common = result_type(args.subspan(1, 2));
  const TensorMeta* inputs[3] = {condition, maybe_tensor(args, 1), maybe_tensor(args, 2)};
  // Both branches are cast before the iterator is built; the condition is not.
  TensorMeta cast[2];
  for (size_t i = 1; i < 3; ++i)
    if (inputs[i] && inputs[i]->dtype != common) {
      cast[i - 1] = like(*inputs[i], common);
      inputs[i] = &cast[i - 1];
    }
  return one(iterate(inputs, common));
}

Metas masked_fill(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &mask = tensor(args, 1);
  // The mask and self are expanded to one shape; self's copy keeps the expanded strides' order.
  TensorMeta wide = self;
  wide.sizes = broadcast_sizes(self.sizes, mask.sizes);
  if (wide.sizes == self.sizes) return one(like(self));
  wide.strides.assign(wide.sizes.size(), 0);
  const size_t offset = wide.sizes.size() - self.sizes.size();
  for (size_t d = 0; d < self.sizes.size(); ++d)
    wide.strides[d + offset] = self.sizes[d] == 1 && wide.sizes[d + offset] != 1 ? 0 : self.strides[d];
  // A new leading dim of size 1 gets the stride that expand gives it.
  for (size_t d = offset; d-- > 0;)
    if (wide.sizes[d] == 1) wide.strides[d] = d + 1 < wide.sizes.size() ? wide.sizes[d + 1] * wide.strides[d + 1] : 1;
  return one(like(wide));
}

Metas pointwise_loss(const OpInfo&, Args args) {
  const bool none = int_or(args, 2, 1) == 0;
  Metas out = pointwise_over(Out::Promote, {0, 1}, args);
  if (!none) {
    out[0].sizes.clear();
    out[0].strides.clear();
  }
  return out;
}

Metas weighted_loss(const OpInfo&, Args args) {
  TensorMeta out = contiguous(tensor(args, 0), tensor(args, 0).sizes);
  if (int_or(args, 3, 1) != 0) {
    out.sizes.clear();
    out.strides.clear();
  } else {
    const TensorMeta* t = &tensor(args, 0);
    out = like(*t);
  }
  return one(out);
}

Metas loss_backward(const OpInfo&, Args args) { return pointwise_over(Out::Promote, {1, 2, 0}, args); }

Metas clamp_upper(const OpInfo& info, Args args) { return clamp(info, args); }

Metas divide_with_mode(const OpInfo&, Args args) {
  return pointwise_over(has(args, 2) ? Out::Promote : Out::Float, {0, 1}, args);
}

Metas log_sigmoid_forward(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  const TensorMeta out = iterate({&t, 1}, t->dtype);
  return many(out, out);
}

Metas normal_of_std(const OpInfo&, Args args) { return one(like(tensor(args, 1))); }

Metas normal_of_both(const OpInfo&, Args args) {
  return one(contiguous(tensor(args, 0), broadcast_sizes(tensor(args, 0).sizes, tensor(args, 1).sizes)));
}

Metas native_dropout(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return many(like(t), like(t, DType::Bool));
}

Metas rrelu_functional(const OpInfo&, Args args) {
  return many(contiguous(tensor(args, 0), tensor(args, 0).sizes), like(tensor(args, 1)));
}

Metas contiguous_self(const OpInfo&, Args args) { return one(contiguous(tensor(args, 0), tensor(args, 0).sizes)); }

Metas foreach_norm_same(const OpInfo&, Args args) {
  Metas out;
  for (const TensorMeta* t : tensor_list(args, 0)) out.push_back(contiguous(*t, {}));
  return out;
}

Metas predicate(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  return one(iterate({&t, 1}, DType::Bool));
}

Metas copy(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &source = tensor(args, 1);
  if (broadcast_sizes(self.sizes, source.sizes) != self.sizes)
    shape_error("output with shape " + sizes_text(self.sizes) + " doesn't match the broadcast shape " +
                sizes_text(broadcast_sizes(self.sizes, source.sizes)));
  return one(strided(self, self.sizes, self.strides));
}

Metas like_self(const OpInfo&, Args args) { return one(like(tensor(args, 0))); }

Metas frexp(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  return many(iterate({&t, 1}, t->dtype), iterate({&t, 1}, DType::Int32));
}

Metas complex_of(const OpInfo&, Args args) {
  const TensorMeta* inputs[2] = {&tensor(args, 0), &tensor(args, 1)};
  return one(iterate(inputs, inputs[0]->dtype == DType::Float64 ? DType::Complex128 : DType::Complex64));
}

Metas polar_angle(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  return one(iterate({&t, 1}, to_real(to_float(t->dtype))));
}

Metas in_place(const OpInfo& info, Args args) {
  Metas out = info.functional->rule(info, args);
  if (info.has(kMultiple)) return {};
  if (info.kind == Kind::View) return out;
  const TensorMeta& self = tensor(args, 0);
  if (!out.empty() && out[0].sizes != self.sizes)
    shape_error("output with shape " + sizes_text(self.sizes) + " doesn't match the broadcast shape " +
                sizes_text(out[0].sizes));
  if (info.kind == Kind::Pointwise && !out.empty() && !can_cast(out[0].dtype, self.dtype))
    shape_error("result type " + dtype_label(out[0].dtype) + " can't be cast to the desired output type " +
                dtype_label(self.dtype));
  TensorMeta same = self;
  same.requires_grad = false;
  return one(std::move(same));
}

Metas foreach_norm(const OpInfo&, Args args) {
  Metas out;
  for (const TensorMeta* t : tensor_list(args, 0))
    out.push_back(contiguous(*t, {}, dtype_or(args, 2, to_real(t->dtype))));
  return out;
}

Metas foreach_copy(const OpInfo& info, Args args) { return foreach_of<copy>(info, args); }

}  // namespace kiln::ops::rules
