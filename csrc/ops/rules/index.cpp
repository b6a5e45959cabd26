#include "ops/rules/index.h"

#include "ops/rules/view.h"

namespace kiln::ops::rules {

Metas embedding(const OpInfo&, Args args) {
  const TensorMeta &weight = tensor(args, 0), &indices = tensor(args, 1);
  if (weight.dim() != 2) shape_error("'weight' must be 2-D");
  if (indices.dtype != DType::Int64 && indices.dtype != DType::Int32)
    shape_error(
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
        "torch." +
        dtype_label(indices.dtype) + "Tensor instead (while checking arguments for embedding)");
  Ints sizes = indices.sizes;
  sizes.push_back(weight.sizes[1]);
  return one(contiguous(weight, sizes));
}

Metas embedding_backward(const OpInfo&, Args args) {
  const TensorMeta& grad = tensor(args, 0);
  return one(contiguous(grad, {args[2].to_int(), grad.sizes.empty() ? 1 : grad.sizes.back()}));
}

Metas embedding_bag(const OpInfo& info, Args args) {
  const TensorMeta &weight = tensor(args, 0), &indices = tensor(args, 1), &offsets = tensor(args, 2);
  if (weight.dim() != 2)
    shape_error("weight has to be a 2D Tensor, but got Tensor of dimension " + std::to_string(weight.dim()));
  if (indices.dim() != 1 || offsets.dim() != 1) throw Unsupported("indices or offsets of other than one dimension");
  enum Mode : int64_t { Sum, Mean, Max };
  const int64_t mode = args[4].to_int(), padding_idx = args[8].to_int();
  const bool last = args[7].to_bool(), forward_only = info.op.name() == "aten::_embedding_bag_forward_only";
  if (last && offsets.sizes[0] < 1) throw Unsupported("include_last_offset without offsets");
  const int64_t bags = offsets.sizes[0] - (last ? 1 : 0), sizes = forward_only && mode == Sum ? offsets.sizes[0] : bags;
  const bool wide = indices.dtype == DType::Int64 || offsets.dtype == DType::Int64;
  const DType whole = wide ? DType::Int64 : DType::Int32;
  // A library sums such bags without being told which bag an index belongs to.
  const bool fast =
      mode == Sum && padding_idx < 0 && weight.strides[1] == 1 &&
      (weight.dtype == DType::Float32 || weight.dtype == DType::Float16 || weight.dtype == DType::BFloat16) &&
      (!has(args, 6) || tensor(args, 6).strides[0] == 1);
  return {contiguous(weight, {bags, weight.sizes[1]}), contiguous(indices, {fast ? 0 : indices.sizes[0]}, whole),
          contiguous(indices, {sizes}, whole),
          contiguous(indices, mode == Max ? Ints{bags, weight.sizes[1]} : Ints{sizes}, whole)};
}

Metas embedding_bag_backward(const OpInfo&, Args args) {
  const TensorMeta& grad = tensor(args, 0);
  if (args[9].to_bool()) throw Unsupported("a sparse gradient");
  return one(contiguous(grad, {args[6].to_int(), grad.sizes.at(1)}));
}

Metas embedding_bag_weights_backward(const OpInfo&, Args args) {
  return one(contiguous(tensor(args, 0), {tensor(args, 2).sizes.at(0)}));
}

Metas index(const OpInfo&, Args args) {
  const TensorMeta& self = tensor(args, 0);
  const auto indices = tensor_list(args, 1);
  if (indices.size() > self.sizes.size())
    shape_error("too many indices for tensor of dimension " + std::to_string(self.dim()) + " (got " +
                    std::to_string(indices.size()) + ")",
                ShapeError::Kind::Index);
  std::vector<size_t> at;  // dims that are indexed
  Ints shape;              // of the broadcast indices
  bool any = false;
  for (size_t d = 0; d < indices.size(); ++d) {
    const TensorMeta* i = indices[d];
    if (!i) continue;
    if (i->dtype == DType::Bool || i->dtype == DType::UInt8)
      throw Unsupported("indexing by a mask: the result's size depends on data");
    if (i->dtype != DType::Int64 && i->dtype != DType::Int32)
      shape_error("tensors used as indices must be long, int, byte or bool tensors", ShapeError::Kind::Index);
    at.push_back(d);
    try {
      shape = any ? broadcast_sizes(shape, i->sizes) : i->sizes;
    } catch (const ShapeError&) {
      std::string shapes;
      for (const TensorMeta* t : indices)
        if (t) shapes += (shapes.empty() ? "" : ", ") + sizes_text(t->sizes);
      shape_error("shape mismatch: indexing tensors could not be broadcast together with shapes " + shapes,
                  ShapeError::Kind::Index);
    }
    any = true;
  }
  if (!any) return one(contiguous(self, self.sizes));
  // Indexed dims that are not adjacent move to the front first.
  std::vector<size_t> order;
  bool adjacent = true;
  for (size_t k = 1; k < at.size(); ++k) adjacent &= at[k] == at[k - 1] + 1;
  const size_t before = adjacent ? at[0] : 0;
  for (size_t d = 0; d < before; ++d) order.push_back(d);
  for (size_t d = before; d < self.sizes.size(); ++d)
    if (std::find(at.begin(), at.end(), d) == at.end()) order.push_back(d);
  // The kernel's iterator: the source with stride 0 over the indices' dims, and the indices with 1s around.
  TensorMeta source = self;
  source.sizes.clear();
  source.strides.clear();
  const auto push = [&](size_t d) {
    source.sizes.push_back(self.sizes[d]);
    source.strides.push_back(self.strides[d]);
  };
  for (size_t k = 0; k < before; ++k) push(order[k]);
  for (int64_t s : shape) {
    source.sizes.push_back(s);
    source.strides.push_back(0);
  }
  for (size_t k = before; k < order.size(); ++k) push(order[k]);
  const size_t after = order.size() - before;
  std::vector<TensorMeta> reshaped;
  for (size_t d : at) {
    const TensorMeta wide = expand_to(*indices[d], shape);
    Ints sizes(before, 1);
    sizes.insert(sizes.end(), wide.sizes.begin(), wide.sizes.end());
    sizes.insert(sizes.end(), after, 1);
    const auto strides = view_strides(wide, sizes);
    reshaped.push_back(strides ? strided(wide, sizes, *strides) : contiguous(wide, sizes));
  }
  std::vector<const TensorMeta*> inputs{&source};
  for (const TensorMeta& t : reshaped) inputs.push_back(&t);
  TensorMeta out = iterate(inputs, self.dtype);
  out.device = self.device;
  return one(out);
}

Metas preserved_self(const OpInfo&, Args args) { return one(like(tensor(args, 0))); }

Metas fresh_self(const OpInfo&, Args args) { return one(contiguous(tensor(args, 0), tensor(args, 0).sizes)); }

Metas index_select(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &index = tensor(args, 2);
  const auto d = static_cast<size_t>(wrap_dim(int_or(args, 1, 0), self.dim()));
  if (index.dim() > 1)
    shape_error("index_select(): Index is supposed to be a vector, but got dim: " + std::to_string(index.dim()) +
                    " with type: " + dtype_label(index.dtype) + " and size: " + sizes_text(index.sizes),
                ShapeError::Kind::Index);
  Ints sizes = self.sizes;
  if (!sizes.empty()) sizes[d] = index.numel();
  return one(contiguous(self, sizes));
}

Metas gather(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &index = tensor(args, 2);
  const int64_t dim = wrap_dim(int_or(args, 1, 0), self.dim());
  if (index.numel() != 0) {
    if (index.dtype != DType::Int64 && index.dtype != DType::Int32)
      shape_error("gather(): Expected dtype int32/int64 for index");
    if (std::max<int64_t>(self.dim(), 1) != std::max<int64_t>(index.dim(), 1))
      shape_error("Index tensor must have the same number of dimensions as input tensor");
    for (size_t d = 0; d < index.sizes.size() && d < self.sizes.size(); ++d)
      if (static_cast<int64_t>(d) != dim && index.sizes[d] > self.sizes[d])
        shape_error("Size does not match at dimension " + std::to_string(d) + " expected index " +
                    sizes_text(index.sizes) + " to be no larger than self " + sizes_text(self.sizes) +
                    " apart from dimension " + std::to_string(dim));
  }
  return one(contiguous(self, index.sizes));
}

Metas take(const OpInfo&, Args args) {
  const TensorMeta* index = &tensor(args, 1);
  TensorMeta out = iterate({&index, 1}, tensor(args, 0).dtype);
  out.device = tensor(args, 0).device;
  return one(out);
}

Metas masked_scatter(const OpInfo&, Args args) {
  const TensorMeta& self = tensor(args, 0);
  return one(contiguous(self, broadcast_sizes(self.sizes, tensor(args, 1).sizes)));
}

Metas data_dependent(const OpInfo& info, Args) {
  throw Unsupported("the size of " + info.op.name() + "'s result depends on data");
}

}  // namespace kiln::ops::rules
