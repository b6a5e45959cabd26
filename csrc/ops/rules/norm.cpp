#include "ops/rules/nn.h"

namespace kiln::ops::rules {
namespace {

// Statistics of half-precision inputs are kept in float32 where the parameters are.
DType stat_dtype(const TensorMeta& input, const TensorMeta* parameter) {
  return parameter ? parameter->dtype : input.dtype;
}

/// The first format that the input lies in, dims of size 1 aside: what is contiguous stays so where its strides look
/// like channels-last too (one pixel, one channel). ATen asks for the strides of those dims only where it lies in none.
TensorMeta batch_normed(const TensorMeta& t) {
  for (MemoryFormat f : {MemoryFormat::Contiguous, MemoryFormat::ChannelsLast, MemoryFormat::ChannelsLast3d})
    if (t.is_contiguous(f)) return formatted(t, t.sizes, f);
  return formatted(t, t.sizes, suggest_format(t));
}

Metas batch_norm_of(const TensorMeta& t, const TensorMeta* weight, const TensorMeta* mean, bool training) {
  const int64_t channels = t.sizes.at(1);
  const TensorMeta stat = contiguous(t, {training ? channels : 0}, stat_dtype(t, weight ? weight : mean));
  return many(batch_normed(t), stat, stat);
}

Ints leading(const TensorMeta& t, size_t normalized, bool ones) {
  if (normalized > t.sizes.size()) throw Unsupported("a normalized shape longer than the input's");
  Ints out(t.sizes.begin(), t.sizes.end() - static_cast<int64_t>(normalized));
  if (ones) out.insert(out.end(), normalized, 1);
  return out;
}

void check_normalized(const TensorMeta& t, const Ints& shape) {
  const size_t n = shape.size();
  const bool ok =
      n >= 1 && t.sizes.size() >= n && std::equal(shape.begin(), shape.end(), t.sizes.end() - static_cast<int64_t>(n));
  if (n < 1)
    shape_error(
        "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
        "normalized_shape = " +
        sizes_text(shape));
  if (ok) return;
  std::string stars = "[*";
  for (int64_t s : shape) stars += ", " + std::to_string(s);
  shape_error("Given normalized_shape=" + sizes_text(shape) + ", expected input with shape " + stars +
              "], but got input of size" + sizes_text(t.sizes));
}

TensorMeta masked(bool wanted, TensorMeta t) { return wanted ? std::move(t) : undefined_meta(); }

}  // namespace

Metas batch_norm(const OpInfo&, Args args) {
  return batch_norm_of(tensor(args, 0), maybe_tensor(args, 1), maybe_tensor(args, 3), bool_or(args, 5, false));
}

Metas batch_norm_no_stats(const OpInfo&, Args args) {
  return batch_norm_of(tensor(args, 0), maybe_tensor(args, 1), nullptr, bool_or(args, 3, true));
}

Metas batch_norm_functional(const OpInfo& info, Args args) {
  Metas out = batch_norm(info, args);
  out.push_back(like(tensor(args, 3)));
  out.push_back(like(tensor(args, 4)));
  return out;
}

Metas batch_norm_update(const OpInfo&, Args args) {
  Metas out = batch_norm_of(tensor(args, 0), maybe_tensor(args, 1), maybe_tensor(args, 3), true);
  out.push_back(contiguous(tensor(args, 0), {0}, DType::UInt8));
  return out;
}

Metas batch_norm_update_functional(const OpInfo& info, Args args) {
  Metas out = batch_norm_update(info, args);
  out.push_back(like(tensor(args, 3)));
  out.push_back(like(tensor(args, 4)));
  return out;
}

Metas batch_norm_no_update(const OpInfo&, Args args) {
  Metas out = batch_norm_of(tensor(args, 0), maybe_tensor(args, 1), maybe_tensor(args, 3), false);
  out.push_back(contiguous(tensor(args, 0), {0}, DType::UInt8));
  return out;
}

Metas batch_norm_inference(const OpInfo&, Args args) {
  return batch_norm_of(tensor(args, 0), maybe_tensor(args, 1), maybe_tensor(args, 3), false);
}

Metas batch_norm_backward(const OpInfo&, Args args) {
  const TensorMeta &t = tensor(args, 1), *weight = maybe_tensor(args, 2);
  const auto mask = args[9].to_ints();
  const TensorMeta parameter = contiguous(t, {t.sizes.at(1)}, stat_dtype(t, weight));
  return many(masked(mask[0], formatted(t, t.sizes, suggest_format(t))), masked(mask[1], parameter),
              masked(mask[2], parameter));
}

Metas batch_norm_backward_reserve(const OpInfo& info, Args args) { return batch_norm_backward(info, args.first(10)); }

Metas layer_norm(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints shape = args[1].to_ints();
  check_normalized(t, shape);
  const TensorMeta stat = contiguous(t, leading(t, shape.size(), true), stat_dtype(t, maybe_tensor(args, 2)));
  return many(contiguous(t, t.sizes), stat, stat);
}

Metas layer_norm_backward(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 1);
  const auto mask = args[7].to_ints();
  const TensorMeta *weight = maybe_tensor(args, 5), *bias = maybe_tensor(args, 6);
  return many(masked(mask[0], contiguous(t, t.sizes)),
              mask[1] && weight ? contiguous(*weight, weight->sizes) : undefined_meta(),
              mask[2] && bias     ? contiguous(*bias, bias->sizes)
              : mask[2] && weight ? contiguous(*weight, weight->sizes)
                                  : undefined_meta());
}

Metas group_norm(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  decline_unless_usable({args[6].to_int()});
  const TensorMeta stat = contiguous(t, {args[3].to_int(), args[6].to_int()}, stat_dtype(t, maybe_tensor(args, 1)));
  return many(formatted(t, t.sizes, suggest_format(t)), stat, stat);
}

Metas group_norm_backward(const OpInfo&, Args args) {
  const TensorMeta &t = tensor(args, 1), *weight = maybe_tensor(args, 4);
  const auto mask = args[9].to_ints();
  const TensorMeta parameter = contiguous(t, {args[6].to_int()}, stat_dtype(t, weight));
  return many(masked(mask[0], formatted(t, t.sizes, suggest_format(t))), masked(mask[1], parameter),
              masked(mask[2], parameter));
}

// (v, g, dim): the first or the last dim's slices, each to the length that g gives.
Metas weight_norm(const OpInfo&, Args args) {
  const TensorMeta &v = tensor(args, 0), &g = tensor(args, 1);
  const int64_t dim = wrap_dim(args[2].to_int(), v.dim());
  Ints sizes(v.sizes.size(), 1);
  sizes[static_cast<size_t>(dim)] = v.sizes[static_cast<size_t>(dim)];
  if (v.numel() == 0 || g.sizes != sizes || g.dtype != v.dtype || (dim != 0 && dim != v.dim() - 1))
    throw Unsupported("weight normalization of other sizes or dtypes");
  const bool half = v.dtype == DType::BFloat16 || v.dtype == DType::Float16;
  return many(contiguous(v, v.sizes), contiguous(v, sizes, half ? DType::Float32 : v.dtype));
}

// (grad_w, v, g, norms, dim)
Metas weight_norm_backward(const OpInfo&, Args args) {
  const TensorMeta &v = tensor(args, 1), &g = tensor(args, 2);
  return many(contiguous(v, v.sizes), contiguous(g, g.sizes));
}

Metas rms_norm(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints shape = args[1].to_ints();
  check_normalized(t, shape);
  return many(contiguous(t, t.sizes), contiguous(t, leading(t, shape.size(), true)));
}

Metas rms_norm_backward(const OpInfo&, Args args) {
  const TensorMeta &t = tensor(args, 1), *weight = maybe_tensor(args, 4);
  const auto mask = args[5].to_ints();
  return many(masked(mask[0], contiguous(t, t.sizes)),
              mask[1] && weight ? contiguous(*weight, weight->sizes) : undefined_meta());
}

// The result is laid out as the query; the kernel's own arrays (logsumexp, gradients) are transposed views of
// (batch, sequence, head, ...) ones.
Metas flash_attention(const OpInfo&, Args args) {
  const TensorMeta& q = tensor(args, 0);
  if (q.dim() != 4) throw Unsupported("attention over another rank than 4");
  const int64_t b = q.sizes[0], h = q.sizes[1], n = q.sizes[2];
  TensorMeta lse = strided(q, {b, h, n}, {n * h, 1, h});
  if (q.dtype != DType::Float64) lse.dtype = DType::Float32;
  return many(like(q), lse);
}

Metas flash_attention_backward(const OpInfo&, Args args) {
  Metas out;
  for (size_t i = 1; i <= 3; ++i) {
    const TensorMeta& t = tensor(args, i);
    const int64_t h = t.sizes.at(1), n = t.sizes.at(2), e = t.sizes.at(3);
    out.push_back(strided(t, t.sizes, {n * h * e, e, h * e, 1}));
  }
  return out;
}

Metas glu(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() == 0) shape_error("glu does not support 0-dimensional tensors");
  const int64_t dim = wrap_dim(int_or(args, 1, -1), t.dim());
  Ints sizes = t.sizes;
  int64_t& size = sizes[static_cast<size_t>(dim)];
  if (size % 2)
    shape_error("Halving dimension must be even, but dimension " + std::to_string(dim) + " is size " +
                std::to_string(size));
  size /= 2;
  // The iterator runs over the two halves, views of the input.
  const TensorMeta half = strided(t, sizes, t.strides);
  const TensorMeta* inputs[] = {&half, &half};
  return one(iterate(inputs, t.dtype));
}

Metas glu_backward(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 1);
  return one(contiguous(t, t.sizes));
}

Metas prelu_backward(const OpInfo&, Args args) {
  const TensorMeta* inputs[] = {&tensor(args, 1), &tensor(args, 2), &tensor(args, 0)};
  const TensorMeta out = iterate(inputs, inputs[0]->dtype);
  return many(out, out);
}

Metas encoder_layer(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.numel() == 0) throw Unsupported("an encoder layer of no elements");  // it is cloned
  return one(contiguous(t, t.sizes));
}

Metas cross(const OpInfo&, Args args) {
  const TensorMeta &a = tensor(args, 0), &b = tensor(args, 1);
  return one(contiguous(a, broadcast_sizes(a.sizes, b.sizes)));
}

}  // namespace kiln::ops::rules
