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

Metas integers_only(const OpInfo& info, Args args) {
  Metas out = args.size() == 1 ? unary(info, args) : pointwise_over(Out::Promote, {0, 1}, args);
  const DType t = out.at(0).dtype;
  if (out[0].device.type != DeviceType::CPU || t == DType::Opaque) return out;
  if (info.functional && !can_cast(t, tensor(args, 0).dtype)) return out;  // in_place refuses it first
  std::string name = info.op.name().substr(std::string_view("aten::").size());
  name = name.substr(0, name.find('.'));
  const bool bits = name.starts_with("bitwise_") && name.find("shift") == std::string::npos;
  if (is_integral(t) && (bits || t != DType::Bool)) return out;
  if (name.find("left_shift") != std::string::npos || name.find("lshift") != std::string::npos)
    name = "lshift";
  else if (name.find("shift") != std::string::npos)
    name = "rshift";
  else if (name.ends_with('_'))
    name.pop_back();
  shape_error("\"" + name + "_cpu\" not implemented for '" + dtype_label(t) + "'", ShapeError::Kind::NotImplemented);
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
  return one(contiguous(self, broadcast_sizes(self.sizes, mask.sizes)));
}

Metas pointwise_loss(const OpInfo& info, Args args) {
  const bool none = int_or(args, 2, 1) == 0;
  Metas out = pointwise_over(Out::Promote, {0, 1}, args);
  if (!none) {
    out[0].sizes.clear();
    out[0].strides.clear();
  }
  static const Op kHuber("aten::huber_loss");
  if (info.op == kHuber) out[0].dtype = tensor(args, 0).dtype;  // of its first operand, whatever the other's
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

Metas logits_loss(const OpInfo&, Args args) {
  // Eager's steps are partly in place, so that each operand decides on some of them.
  for (size_t i = 1; i < 4; ++i)
    if (const TensorMeta* t = maybe_tensor(args, i); t && t->dtype != tensor(args, 0).dtype)
      throw Unsupported("a loss of unlike dtypes");
  Metas out = pointwise_over(Out::Promote, {0, 1, 2, 3}, args);
  if (int_or(args, 4, 1) != 0) {
    out[0].sizes.clear();
    out[0].strides.clear();
  }
  return out;
}

Metas membership(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(contiguous(t, t.sizes, DType::Bool));
}

Metas multinomial(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() != 1 && t.dim() != 2) shape_error("prob_dist must be 1 or 2 dim");
  Ints sizes = t.sizes;
  sizes.back() = args[1].to_int();
  return one(contiguous(t, sizes, DType::Int64));
}

Metas loss_backward(const OpInfo&, Args args) { return pointwise_over(Out::Promote, {1, 2, 0}, args); }

Metas clamp_upper(const OpInfo& info, Args args) { return clamp(info, args); }

Metas divide_with_mode(const OpInfo&, Args args) {
  return pointwise_over(has(args, 2) ? Out::Promote : Out::Float, {0, 1}, args);
}

Metas log_sigmoid_forward(const OpInfo&, Args args) {
  const TensorMeta* t = &tensor(args, 0);
  const TensorMeta out = contiguous(*t, t->sizes);
  return many(out, out);
}

Metas contiguous_float(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(contiguous(t, t.sizes, to_float(t.dtype)));
}

Metas power_of_number(const OpInfo&, Args args) {
  const TensorMeta& exponent = tensor(args, 1);
  return one(contiguous(exponent, exponent.sizes, result_type(args.first(2))));
}

Metas normal_of_std(const OpInfo&, Args args) { return one(contiguous(tensor(args, 1), tensor(args, 1).sizes)); }

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
  // Of complex numbers it is computed in complex, and then copied.
  if (is_complex(t->dtype)) return one(contiguous(*t, t->sizes, to_real(t->dtype)));
  return one(iterate({&t, 1}, to_float(t->dtype)));
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
