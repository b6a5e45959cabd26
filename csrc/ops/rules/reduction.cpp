#include "ops/rules/reduction.h"

namespace kiln::ops::rules {
namespace {

DType accumulated(Acc acc, DType t) {
  switch (acc) {
    case Acc::Same:
    case Acc::Float:
      return t;
    case Acc::ToFloat:
      return to_float(t);
    case Acc::Sum:
      return is_integral(t) ? DType::Int64 : t;
    case Acc::Bool:
      return t == DType::UInt8 ? DType::UInt8 : DType::Bool;
    case Acc::Real:
      return to_real(t);
    case Acc::Index:
      return DType::Int64;
  }
  return t;
}

void check_nonempty(const TensorMeta& t, int64_t dim, const std::string& name) {
  if (t.dim() > 0 && t.sizes[static_cast<size_t>(dim)] == 0)
    shape_error(name + ": Expected reduction dim " + std::to_string(dim) + " to have non-zero size.",
                ShapeError::Kind::Index);
}

std::string base_name(const OpInfo& info) {
  std::string name = info.op.name();
  if (const size_t start = name.find("::"); start != std::string::npos) name = name.substr(start + 2);
  return name.substr(0, name.find('.'));
}

}  // namespace

Ints reduced_sizes(const TensorMeta& t, const Ints& dims, bool keepdim, bool empty_is_all) {
  std::vector<bool> folded(t.sizes.size(), dims.empty() && empty_is_all);
  for (int64_t d : wrap_dims(dims, t.dim()))
    if (static_cast<size_t>(d) < folded.size()) folded[static_cast<size_t>(d)] = true;
  Ints out;
  for (size_t d = 0; d < t.sizes.size(); ++d) {
    if (!folded[d])
      out.push_back(t.sizes[d]);
    else if (keepdim)
      out.push_back(1);
  }
  return out;
}

Metas reduce(Acc acc, int dim_at, int keep_at, int dtype_at, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints dims = dim_at < 0 ? Ints{} : ints_or(args, static_cast<size_t>(dim_at), {});
  const bool keep = keep_at >= 0 && bool_or(args, static_cast<size_t>(keep_at), false);
  DType dtype = dtype_at >= 0 && has(args, static_cast<size_t>(dtype_at))
                    ? dtype_or(args, static_cast<size_t>(dtype_at), t.dtype)
                    : accumulated(acc, t.dtype);
  if (acc == Acc::Float && !is_floating(dtype) && !is_complex(dtype))
    shape_error(
        "mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: " +
        dtype_label(t.dtype));
  // all() and any() fold nothing for dim=[], the others fold everything.
  const bool empty_is_all = acc != Acc::Bool || dim_at < 0 || !has(args, static_cast<size_t>(dim_at));
  return one(contiguous(t, reduced_sizes(t, dims, keep, empty_is_all), dtype));
}

Metas extremum(const OpInfo& info, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints dims = ints_or(args, 1, {});
  if (t.numel() == 0) {
    if (dims.empty())
      shape_error(base_name(info) +
                  ": Expected reduction dim to be specified for input.numel() == 0. Specify the "
                  "reduction dim with the 'dim' argument.");
    for (int64_t d : dims) check_nonempty(t, wrap_dim(d, t.dim()), base_name(info));
  }
  return one(contiguous(t, reduced_sizes(t, dims, bool_or(args, 2, false))));
}

Metas select_with_index_at(size_t dim_at, size_t keep_at, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints sizes = reduced_sizes(t, {int_or(args, dim_at, -1)}, bool_or(args, keep_at, false));
  return many(contiguous(t, sizes), contiguous(t, sizes, DType::Int64));
}

Metas aminmax(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const TensorMeta out = contiguous(t, reduced_sizes(t, ints_or(args, 1, {}), bool_or(args, 2, false)));
  return many(out, out);
}

Metas var_mean(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints sizes = reduced_sizes(t, ints_or(args, 1, {}), bool_or(args, 3, false));
  return many(contiguous(t, sizes, to_real(t.dtype)), contiguous(t, sizes));
}

Metas norm_with_dtype(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(contiguous(t, reduced_sizes(t, ints_or(args, 2, {}), bool_or(args, 3, false)),
                        to_real(dtype_or(args, 4, t.dtype))));
}

Metas scan(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  wrap_dim(int_or(args, 1, 0), t.dim());
  return one(contiguous(t, t.sizes, dtype_or(args, 2, is_integral(t.dtype) ? DType::Int64 : t.dtype)));
}

Metas scan_with_index(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  wrap_dim(int_or(args, 1, 0), t.dim());
  return many(contiguous(t, t.sizes), contiguous(t, t.sizes, DType::Int64));
}

Metas softmax(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  wrap_dim(int_or(args, 1, 0), t.dim());
  return one(contiguous(t, t.sizes, bool_or(args, 2, false) ? DType::Float32 : t.dtype));
}

Metas safe_softmax(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(contiguous(t, t.sizes, dtype_or(args, 2, t.dtype)));
}

Metas softmax_backward(const OpInfo&, Args args) {
  const TensorMeta& grad = tensor(args, 0);
  return one(contiguous(grad, grad.sizes, dtype_or(args, 3, grad.dtype)));
}

Metas nll_loss_forward(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &target = tensor(args, 1);
  const int64_t reduction = int_or(args, 3, 1);
  if (self.dim() == 0 || self.dim() > 2) shape_error("input tensor should be 1D or 2D");
  if (target.dim() > 1) shape_error("0D or 1D target tensor expected, multi-target not supported");
  if (!(self.dim() == 1 && target.dim() == 0) && self.sizes[0] != (target.dim() ? target.sizes[0] : 1))
    shape_error("size mismatch (got input: " + sizes_text(self.sizes) + ", target: " + sizes_text(target.sizes) + ")");
  const Ints sizes = reduction == 0 && self.dim() == 2 ? Ints{self.sizes[0]} : Ints{};
  return many(contiguous(self, sizes), contiguous(self, {}));
}

Metas nll_loss2d_forward(const OpInfo&, Args args) {
  const TensorMeta &self = tensor(args, 0), &target = tensor(args, 1);
  if (self.dim() != 4)
    shape_error("only batches of spatial inputs supported (4D tensors), but got input of dimension: " +
                std::to_string(self.dim()));
  const Ints sizes = int_or(args, 3, 1) == 0 ? Ints{self.sizes[0], self.sizes[2], self.sizes[3]} : Ints{};
  if (target.dim() != 3)
    shape_error("only batches of spatial targets supported (3D tensors) but got targets of dimension: " +
                std::to_string(target.dim()));
  return many(contiguous(self, sizes), contiguous(self, {}));
}

Metas contiguous_like_second(const OpInfo&, Args args) {
  return one(contiguous(tensor(args, 1), tensor(args, 1).sizes));
}

namespace {
Metas sorted(const TensorMeta& t) { return many(like(t), like(t, DType::Int64)); }
}  // namespace

Metas sort(const OpInfo&, Args args) {
  wrap_dim(int_or(args, 1, -1), tensor(args, 0).dim());
  return sorted(tensor(args, 0));
}

Metas sort_stable(const OpInfo&, Args args) {
  wrap_dim(int_or(args, 2, -1), tensor(args, 0).dim());
  return sorted(tensor(args, 0));
}

Metas argsort(const OpInfo&, Args args) { return one(like(tensor(args, 0), DType::Int64)); }

Metas topk(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t k = int_or(args, 1, 1), d = wrap_dim(int_or(args, 2, -1), t.dim());
  Ints sizes = t.sizes;
  if (k < 0 || k > (sizes.empty() ? 1 : sizes[static_cast<size_t>(d)])) shape_error("selected index k out of range");
  if (!sizes.empty()) sizes[static_cast<size_t>(d)] = k;
  return many(contiguous(t, sizes), contiguous(t, sizes, DType::Int64));
}

Metas bucketize(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(contiguous(t, t.sizes, bool_or(args, 2, false) ? DType::Int32 : DType::Int64));
}

Metas searchsorted(const OpInfo&, Args args) {
  const DType dtype = bool_or(args, 2, false) ? DType::Int32 : DType::Int64;
  if (const TensorMeta* t = maybe_tensor(args, 1)) return one(contiguous(*t, t->sizes, dtype));
  return one(contiguous(tensor(args, 0), {}, dtype));
}

Metas histc(const OpInfo&, Args args) { return one(contiguous(tensor(args, 0), {int_or(args, 1, 100)})); }

Metas scalar_of(const OpInfo&, Args args) { return one(contiguous(tensor(args, 0), {})); }

Metas trace(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() != 2) shape_error("trace: expected a matrix, but got tensor with dim " + std::to_string(t.dim()));
  return one(contiguous(t, {}, is_integral(t.dtype) ? DType::Int64 : t.dtype));
}

Metas margin_loss(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t reduction = int_or(args, args.size() - 1, 1);
  return one(contiguous(t, reduction == 0 && t.dim() == 2 ? Ints{t.sizes[0]} : Ints{}));
}

}  // namespace kiln::ops::rules
