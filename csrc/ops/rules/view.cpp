#include "ops/rules/view.h"

namespace kiln::ops::rules {

std::optional<Ints> view_strides(const TensorMeta& t, const Ints& sizes) {
  const int64_t numel = t.numel();
  if (numel == 0 && t.sizes == sizes) return t.strides;
  Ints strides(sizes.size());
  if (numel == 0) {
    for (size_t d = sizes.size(); d-- > 0;)
      strides[d] = d + 1 == sizes.size() ? 1 : std::max<int64_t>(sizes[d + 1], 1) * strides[d + 1];
    return strides;
  }
  if (t.sizes.empty()) {
    std::fill(strides.begin(), strides.end(), 1);
    return strides;
  }
  // Runs of old dims that lie one behind the other in memory are cut anew into new dims.
  auto view_d = static_cast<int64_t>(sizes.size()) - 1;
  int64_t chunk_stride = t.strides.back();
  int64_t tensor_numel = 1, view_numel = 1;
  for (auto d = t.dim() - 1; d >= 0; --d) {
    const auto u = static_cast<size_t>(d);
    tensor_numel *= t.sizes[u];
    if (d == 0 || (t.sizes[u - 1] != 1 && t.strides[u - 1] != tensor_numel * chunk_stride)) {
      while (view_d >= 0 && (view_numel < tensor_numel || sizes[static_cast<size_t>(view_d)] == 1)) {
        strides[static_cast<size_t>(view_d)] = view_numel * chunk_stride;
        view_numel *= sizes[static_cast<size_t>(view_d)];
        --view_d;
      }
      if (view_numel != tensor_numel) return std::nullopt;
      if (d > 0) {
        chunk_stride = t.strides[u - 1];
        tensor_numel = 1;
        view_numel = 1;
      }
    }
  }
  if (view_d != -1) return std::nullopt;
  return strides;
}

Ints infer_size(Ints sizes, int64_t numel) {
  const std::string text = sizes_text(sizes);
  int64_t known = 1;
  std::optional<size_t> open;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == -1) {
      if (open) shape_error("only one dimension can be inferred");
      open = d;
    } else if (sizes[d] >= 0) {
      known *= sizes[d];
    } else {
      shape_error("invalid shape dimension " + std::to_string(sizes[d]) + " at index " + std::to_string(d) +
                  " of shape " + text);
    }
  }
  if (numel == known || (open && known > 0 && numel % known == 0)) {
    if (open) {
      if (known == 0)
        shape_error("cannot reshape tensor of 0 elements into shape " + text +
                    " because the unspecified dimension size -1 can be any value and is ambiguous");
      sizes[*open] = numel / known;
    }
    return sizes;
  }
  shape_error("shape '" + text + "' is invalid for input of size " + std::to_string(numel));
}

TensorMeta expand_to(const TensorMeta& t, const Ints& sizes) {
  const size_t n = sizes.size(), m = t.sizes.size();
  if (n < m)
    shape_error("expand(" + dtype_label(t.dtype) + "Tensor{" + sizes_text(t.sizes) + "}, size=" + sizes_text(sizes) +
                "): the number of sizes provided (" + std::to_string(n) +
                ") must be greater or equal to the number of dimensions in the tensor (" + std::to_string(m) + ")");
  Ints out(n), strides(n);
  if (m == 0) {  // a 0-dim tensor: stride 0 everywhere, over sizes of 1 too
    for (size_t k = 0; k < n; ++k)
      if (sizes[k] < 0)
        shape_error("The expanded size of the tensor (" + std::to_string(sizes[k]) +
                    ") isn't allowed in a leading, non-existing dimension " + std::to_string(k));
    return view_of(t, sizes, strides);
  }
  for (size_t k = n; k-- > 0;) {
    const bool old = k >= n - m;
    const size_t d = old ? k - (n - m) : 0;
    int64_t size = old ? t.sizes[d] : 1;
    int64_t stride = old ? t.strides[d] : k + 1 < n ? out[k + 1] * strides[k + 1] : 1;
    int64_t target = sizes[k];
    if (target == -1) {
      if (!old)
        shape_error("The expanded size of the tensor (" + std::to_string(target) +
                    ") isn't allowed in a leading, non-existing dimension " + std::to_string(k));
      target = size;
    }
    if (size != target) {
      if (size != 1)
        shape_error("The expanded size of the tensor (" + std::to_string(target) + ") must match the existing size (" +
                    std::to_string(size) + ") at non-singleton dimension " + std::to_string(k) +
                    ".  Target sizes: " + sizes_text(sizes) + ".  Tensor sizes: " + sizes_text(t.sizes));
      size = target;
      stride = 0;
    }
    out[k] = size;
    strides[k] = stride;
  }
  return view_of(t, out, strides);
}

TensorMeta slice_of(const TensorMeta& t, int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end,
                    int64_t step) {
  if (t.dim() == 0) shape_error("slice() cannot be applied to a 0-dim tensor.");
  const auto d = static_cast<size_t>(wrap_dim(dim, t.dim()));
  if (step <= 0) shape_error("slice step must be positive");
  const int64_t size = t.sizes[d];
  int64_t a = start.value_or(0), b = end.value_or(size);
  if (a < 0) a += size;
  if (b < 0) b += size;
  a = std::clamp<int64_t>(a, 0, size);
  b = std::clamp<int64_t>(b, a, size);
  Ints sizes = t.sizes, strides = t.strides;
  sizes[d] = (b - a + step - 1) / step;
  strides[d] *= step;
  return view_of(t, sizes, strides, a * t.strides[d]);
}

namespace {
std::optional<int64_t> optional_int(Args args, size_t i) {
  if (!has(args, i)) return std::nullopt;
  return args[i].to_int();
}
}  // namespace

Metas view(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints sizes = infer_size(args[1].to_ints(), t.numel());
  const auto strides = view_strides(t, sizes);
  if (!strides)
    shape_error(
        "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
        "two contiguous subspaces). Use .reshape(...) instead.");
  return one(view_of(t, sizes, *strides));
}

Metas reshape(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints sizes = infer_size(args[1].to_ints(), t.numel());
  if (const auto strides = view_strides(t, sizes)) return one(view_of(t, sizes, *strides));
  return one(contiguous(t, sizes));
}

Metas reshape_alias(const OpInfo&, Args args) {
  return one(view_of(tensor(args, 0), args[1].to_ints(), args[2].to_ints()));
}

Metas view_dtype(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const DType to = dtype_or(args, 1, t.dtype);
  TensorMeta out = view_of(t, t.sizes, t.strides);
  out.dtype = to;
  const int64_t a = dtype_size(t.dtype), b = dtype_size(to);
  if (a == b) return one(out);
  if (t.dim() == 0)
    shape_error("self.dim() cannot be 0 to view " + dtype_label(t.dtype) + " as " + dtype_label(to) +
                " (different element sizes)");
  if (a > b) {
    const int64_t ratio = a / b;
    if (out.strides.back() != 1)
      shape_error("self.stride(-1) must be 1 to view " + dtype_label(t.dtype) + " as " + dtype_label(to) +
                  " (different element sizes), but got " + std::to_string(out.strides.back()));
    for (int64_t& s : out.strides) s *= ratio;
    out.strides.back() = 1;
    out.sizes.back() *= ratio;
    out.offset *= ratio;
  } else {
    const int64_t ratio = b / a;
    if (out.sizes.back() % ratio != 0)
      shape_error("self.size(-1) must be divisible by " + std::to_string(ratio) + " to view " + dtype_label(t.dtype) +
                  " as " + dtype_label(to) + " (different element sizes), but got " + std::to_string(out.sizes.back()));
    for (int64_t& s : out.strides) s /= ratio;
    out.strides.back() = 1;
    out.sizes.back() /= ratio;
    out.offset /= ratio;
  }
  return one(out);
}

Metas view_as_real(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  Ints sizes = t.sizes, strides = t.strides;
  for (int64_t& s : strides) s *= 2;
  sizes.push_back(2);
  strides.push_back(1);
  TensorMeta out = view_of(t, sizes, strides);
  out.offset = t.offset * 2;
  out.dtype = to_real(t.dtype);
  return one(out);
}

Metas view_as_complex(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() == 0) shape_error("Input tensor must have one or more dimensions");
  if (t.sizes.back() != 2) shape_error("Tensor must have a last dimension of size 2");
  Ints sizes(t.sizes.begin(), t.sizes.end() - 1), strides(t.strides.begin(), t.strides.end() - 1);
  for (int64_t& s : strides) {
    if (s % 2) shape_error("Tensor must have a stride divisible by 2 for all but last dimension");
    s /= 2;
  }
  TensorMeta out = view_of(t, sizes, strides);
  out.offset = t.offset / 2;
  out.dtype = t.dtype == DType::Float64 ? DType::Complex128 : DType::Complex64;
  return one(out);
}

Metas permute(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints dims = args[1].to_ints();
  if (dims.size() != t.sizes.size())
    shape_error(
        "permute(sparse_coo): number of dimensions in the tensor input does not match the length of the desired "
        "ordering of dimensions i.e. input.dim() = " +
        std::to_string(t.dim()) + " is not equal to len(dims) = " + std::to_string(dims.size()));
  Ints sizes, strides;
  std::vector<bool> seen(dims.size(), false);
  for (int64_t d : dims) {
    const auto w = static_cast<size_t>(wrap_dim(d, t.dim()));
    if (seen[w]) shape_error("permute(): duplicate dims are not allowed.");
    seen[w] = true;
    sizes.push_back(t.sizes[w]);
    strides.push_back(t.strides[w]);
  }
  return one(view_of(t, sizes, strides));
}

Metas transpose(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const auto a = static_cast<size_t>(wrap_dim(int_or(args, 1, 0), t.dim()));
  const auto b = static_cast<size_t>(wrap_dim(int_or(args, 2, 1), t.dim()));
  Ints sizes = t.sizes, strides = t.strides;
  if (!sizes.empty()) {
    std::swap(sizes[a], sizes[b]);
    std::swap(strides[a], strides[b]);
  }
  return one(view_of(t, sizes, strides));
}

Metas t(const OpInfo&, Args args) {
  const TensorMeta& x = tensor(args, 0);
  if (x.dim() > 2)
    shape_error("t() expects a tensor with <= 2 dimensions, but self is " + std::to_string(x.dim()) + "D");
  Ints sizes = x.sizes, strides = x.strides;
  std::reverse(sizes.begin(), sizes.end());
  std::reverse(strides.begin(), strides.end());
  return one(view_of(x, sizes, strides));
}

Metas expand(const OpInfo&, Args args) { return one(expand_to(tensor(args, 0), args[1].to_ints())); }

Metas slice(const OpInfo&, Args args) {
  return one(
      slice_of(tensor(args, 0), int_or(args, 1, 0), optional_int(args, 2), optional_int(args, 3), int_or(args, 4, 1)));
}

Metas select(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() == 0) shape_error("select() cannot be applied to a 0-dim tensor.", ShapeError::Kind::Index);
  const auto d = static_cast<size_t>(wrap_dim(int_or(args, 1, 0), t.dim()));
  int64_t index = int_or(args, 2, 0);
  const int64_t size = t.sizes[d];
  if (index < -size || index >= size)
    shape_error("select(): index " + std::to_string(index) + " out of range for tensor of size " + sizes_text(t.sizes) +
                    " at dimension " + std::to_string(d),
                ShapeError::Kind::Index);
  if (index < 0) index += size;
  Ints sizes = t.sizes, strides = t.strides;
  const int64_t offset = index * strides[d];
  sizes.erase(sizes.begin() + static_cast<int64_t>(d));
  strides.erase(strides.begin() + static_cast<int64_t>(d));
  return one(view_of(t, sizes, strides, offset));
}

Metas squeeze(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  std::vector<bool> chosen(t.sizes.size(), args.size() < 2);
  if (args.size() >= 2)
    for (int64_t d : wrap_dims(args[1].to_ints(), t.dim()))
      if (static_cast<size_t>(d) < chosen.size()) chosen[static_cast<size_t>(d)] = true;
  Ints sizes, strides;
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (!chosen[d] || t.sizes[d] != 1) {
      sizes.push_back(t.sizes[d]);
      strides.push_back(t.strides[d]);
    }
  return one(view_of(t, sizes, strides));
}

Metas unsqueeze(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const auto d = static_cast<size_t>(wrap_dim(int_or(args, 1, 0), t.dim() + 1));
  Ints sizes = t.sizes, strides = t.strides;
  const int64_t stride = d >= sizes.size() ? 1 : sizes[d] * strides[d];
  sizes.insert(sizes.begin() + static_cast<int64_t>(d), 1);
  strides.insert(strides.begin() + static_cast<int64_t>(d), stride);
  return one(view_of(t, sizes, strides));
}

Metas as_strided(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  TensorMeta out = strided(t, args[1].to_ints(), args[2].to_ints());
  if (out.sizes.size() != out.strides.size()) shape_error("mismatch in length of strides and shape");
  out.offset = int_or(args, 3, t.offset);
  return one(out);
}

Metas unfold(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t d = wrap_dim(int_or(args, 1, 0), t.dim());
  const int64_t size = int_or(args, 2, 1), step = int_or(args, 3, 1);
  const auto u = static_cast<size_t>(d);
  const int64_t max_size = t.dim() == 0 ? 1 : t.sizes[u];
  if (size > max_size)
    shape_error("maximum size for tensor at dimension " + std::to_string(d) + " is " + std::to_string(max_size) +
                " but size is " + std::to_string(size));
  if (step <= 0) shape_error("step is " + std::to_string(step) + " but must be > 0");
  Ints sizes = t.sizes, strides = t.strides;
  sizes.push_back(size);
  strides.push_back(t.dim() == 0 ? 1 : t.strides[u]);
  if (t.dim() > 0) {
    sizes[u] = (t.sizes[u] - size) / step + 1;
    strides[u] = step * t.strides[u];
  }
  return one(view_of(t, sizes, strides));
}

Metas diagonal(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t offset = int_or(args, 1, 0);
  const auto a = static_cast<size_t>(wrap_dim(int_or(args, 2, 0), t.dim()));
  const auto b = static_cast<size_t>(wrap_dim(int_or(args, 3, 1), t.dim()));
  if (a == b)
    shape_error("diagonal dimensions cannot be identical " + std::to_string(int_or(args, 2, 0)) + ", " +
                std::to_string(int_or(args, 3, 1)));
  const int64_t length = offset >= 0 ? std::max<int64_t>(std::min(t.sizes[a], t.sizes[b] - offset), 0)
                                     : std::max<int64_t>(std::min(t.sizes[a] + offset, t.sizes[b]), 0);
  int64_t moved = 0;
  if (length > 0) moved = offset >= 0 ? offset * t.strides[b] : -offset * t.strides[a];
  Ints sizes, strides;
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (d != a && d != b) {
      sizes.push_back(t.sizes[d]);
      strides.push_back(t.strides[d]);
    }
  sizes.push_back(length);
  strides.push_back(t.strides[a] + t.strides[b]);
  return one(view_of(t, sizes, strides, moved));
}

Metas alias(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(view_of(t, t.sizes, t.strides));
}

Metas split(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t chunk = int_or(args, 1, 1), dim = int_or(args, 2, 0);
  if (t.dim() == 0) shape_error("split expects at least a 1-dimensional tensor");
  const int64_t size = t.sizes[static_cast<size_t>(wrap_dim(dim, t.dim()))];
  if (chunk < 0) shape_error("split expects split_size be non-negative, but got split_size=" + std::to_string(chunk));
  if (chunk == 0 && size != 0)
    shape_error("split_size can only be 0 if dimension size is 0, but got dimension size of " + std::to_string(size));
  const int64_t pieces = chunk == 0 ? 1 : std::max<int64_t>((size + chunk - 1) / chunk, 1);
  Metas out;
  for (int64_t i = 0; i < pieces; ++i) out.push_back(slice_of(t, dim, i * chunk, std::min((i + 1) * chunk, size), 1));
  return out;
}

Metas split_with_sizes(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints parts = args[1].to_ints();
  const int64_t dim = int_or(args, 2, 0);
  if (t.dim() == 0) shape_error("split_with_sizes expects at least a 1-dimensional tensor");
  const auto d = static_cast<size_t>(wrap_dim(dim, t.dim()));
  Metas out;
  int64_t at = 0;
  for (int64_t p : parts) {
    if (p < 0)
      shape_error("split_with_sizes expects split_sizes have only non-negative entries, but got split_sizes=" +
                  sizes_text(parts));
    Ints sizes = t.sizes;
    sizes[d] = p;
    // A part's offset is exact even where it is empty.
    out.push_back(view_of(t, sizes, t.strides, std::min(at, t.sizes[d]) * t.strides[d]));
    at += p;
  }
  if (at != t.sizes[d])
    shape_error("split_with_sizes expects split_sizes to sum exactly to " + std::to_string(t.sizes[d]) +
                " (input tensor's size at dimension " + std::to_string(dim) +
                "), but got split_sizes=" + sizes_text(parts));
  return out;
}

Metas unbind(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t dim = wrap_dim(int_or(args, 1, 0), t.dim());
  if (t.dim() == 0) shape_error("Dimension specified as 0 but tensor has no dimensions", ShapeError::Kind::Index);
  Ints sizes = t.sizes, strides = t.strides;
  sizes.erase(sizes.begin() + dim);
  strides.erase(strides.begin() + dim);
  Metas out;
  for (int64_t i = 0; i < t.sizes[static_cast<size_t>(dim)]; ++i)
    out.push_back(view_of(t, sizes, strides, i * t.strides[static_cast<size_t>(dim)]));
  return out;
}

}  // namespace kiln::ops::rules
