#include "ops/rules/make.h"

#include <cmath>

#include "ops/rules/view.h"

namespace kiln::ops::rules {
namespace {

// The Device among the arguments behind `from`, if one is given; layouts other than strided are refused.
std::optional<Device> device_in(Args args, size_t from) {
  std::optional<Device> found;
  for (size_t i = from; i < args.size(); ++i) {
    if (args[i].is<Device>()) found = args[i].as<Device>();
    if (args[i].is<Layout>() && args[i].as<Layout>() != Layout::Strided)
      throw Unsupported("a layout that is not strided");
  }
  return found;
}

TensorMeta fresh(Ints sizes, DType dtype, Device device) {
  for (int64_t s : sizes)
    if (s < 0)
      shape_error("Trying to create tensor with negative dimension " + std::to_string(s) + ": " + sizes_text(sizes));
  TensorMeta out;
  out.dtype = dtype;
  out.strides = contiguous_strides(sizes);
  out.sizes = std::move(sizes);
  out.device = device;
  return out;
}

DType dtype_of_number(const Arg& a) {
  if (a.is<bool>()) return DType::Bool;
  if (a.is<int64_t>()) return DType::Int64;
  if (a.is<std::complex<double>>()) return default_dtype() == DType::Float64 ? DType::Complex128 : DType::Complex64;
  return default_dtype();
}

Metas range(const Arg& start, const Arg& end, const Arg& step, size_t dtype_at, Args args) {
  const auto is_whole = [](const Arg& a) { return a.is<int64_t>() || a.is<bool>(); };
  const bool whole = is_whole(start) && is_whole(end) && is_whole(step);
  const DType dtype = dtype_or(args, dtype_at, whole ? DType::Int64 : default_dtype());
  if (dtype == DType::Bool || is_complex(dtype)) shape_error("a range is not implemented for this dtype");
  double count = 0;
  if (step.to_double() == 0) shape_error("step must be nonzero");
  const bool up = step.to_double() > 0;
  if (up ? start.to_double() > end.to_double() : start.to_double() < end.to_double())
    shape_error("upper bound and lower bound inconsistent with step sign");
  if (dtype == DType::Int64) {
    const auto as_int = [](const Arg& a) { return a.is<double>() ? static_cast<int64_t>(a.as<double>()) : a.to_int(); };
    const int64_t a = as_int(start), b = as_int(end), s = as_int(step);
    if (s == 0) shape_error("step must be nonzero");
    const int64_t sign = s > 0 ? 1 : -1;
    if (std::abs(static_cast<double>(b) - static_cast<double>(a)) > 0x1p62) throw Unsupported("a range that overflows");
    count = static_cast<double>((b - a + s - sign) / s);
  } else {
    count = std::ceil((end.to_double() - start.to_double()) / step.to_double());
  }
  return one(fresh({static_cast<int64_t>(count)}, dtype, device_in(args, dtype_at).value_or(Device{})));
}

}  // namespace

Metas factory_at(int size_at, int dtype_at, int format_at, DType absent, Args args) {
  const auto at = static_cast<size_t>(dtype_at);
  TensorMeta out = fresh(args[static_cast<size_t>(size_at)].to_ints(), dtype_or(args, at, absent),
                         device_in(args, at).value_or(Device{}));
  if (format_at >= 0 && has(args, static_cast<size_t>(format_at))) {
    const MemoryFormat f = args[static_cast<size_t>(format_at)].as<MemoryFormat>();
    if (f != MemoryFormat::Preserve) out.strides = strides_for(out.sizes, f);
  }
  return one(out);
}

Metas window_at(int dtype_at, Args args) {
  Metas out = factory_at(0, dtype_at, -1, default_dtype(), args);
  if (!is_floating(out[0].dtype)) shape_error("a window expects floating point dtypes");
  return out;
}

Metas fftfreq(const OpInfo& op, Args args) {  // (n, d, dtype, ...)
  static const Op kHalf("aten::fft_rfftfreq");
  const DType t = dtype_or(args, 2, default_dtype());
  if (!is_floating(t)) throw Unsupported("frequencies that are no floats");
  const int64_t n = args[0].to_int();
  return one(fresh({op.op == kHalf ? n / 2 + 1 : n}, t, device_in(args, 2).value_or(Device{})));
}

Metas empty_strided(const OpInfo&, Args args) {
  TensorMeta out = fresh(args[0].to_ints(), dtype_or(args, 2, default_dtype()), device_in(args, 2).value_or(Device{}));
  out.strides = args[1].to_ints();
  return one(out);
}

Metas full(const OpInfo&, Args args) {
  const DType t = dtype_or(args, 2, dtype_of_number(args[1]));
  check_fits(args[1], t);
  return one(fresh(args[0].to_ints(), t, device_in(args, 2).value_or(Device{})));
}

Metas scalar_tensor(const OpInfo&, Args args) {
  const DType t = dtype_or(args, 1, default_dtype());
  check_fits(args[0], t);
  return one(fresh({}, t, device_in(args, 1).value_or(Device{})));
}

Metas arange(const OpInfo&, Args args) { return range(Arg(0), args[0], Arg(1), 1, args); }
Metas arange_start(const OpInfo&, Args args) { return range(args[0], args[1], Arg(1), 2, args); }
Metas arange_step(const OpInfo&, Args args) { return range(args[0], args[1], args[2], 3, args); }

Metas linspace(const OpInfo&, Args args) {
  const bool complex = args[0].is<std::complex<double>>() || args[1].is<std::complex<double>>();
  const DType absent = complex ? dtype_of_number(Arg(std::complex<double>())) : default_dtype();
  // logspace has a base in front of the dtype.
  const size_t at = args.size() > 3 && args[3].is_number() ? 4 : 3;
  const DType dtype = dtype_or(args, at, absent);
  if (complex && !is_complex(dtype)) throw Unsupported("complex ends in a dtype that has no place for them");
  if (dtype == DType::Bool) shape_error("a range is not implemented for this dtype");
  return one(fresh({args[2].to_int()}, dtype, device_in(args, at).value_or(Device{})));
}

Metas eye(const OpInfo&, Args args) {
  return one(fresh({args[0].to_int(), args[0].to_int()}, dtype_or(args, 1, default_dtype()),
                   device_in(args, 1).value_or(Device{})));
}

Metas eye_m(const OpInfo&, Args args) {
  return one(fresh({args[0].to_int(), args[1].to_int()}, dtype_or(args, 2, default_dtype()),
                   device_in(args, 2).value_or(Device{})));
}

Metas triangle_indices(const OpInfo& info, Args args) {
  const int64_t rows = args[0].to_int(), cols = args[1].to_int(), offset = int_or(args, 2, 0);
  int64_t count = 0;
  const bool lower = info.op.name() == "aten::tril_indices";
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t below = std::clamp<int64_t>(r + offset + (lower ? 1 : 0), 0, cols);
    count += lower ? below : cols - below;
  }
  const DType dtype = dtype_or(args, 3, DType::Int64);
  if (dtype != DType::Int64 && dtype != DType::Int32) shape_error("indices are not implemented for this dtype");
  return one(fresh({2, count}, dtype, device_in(args, 3).value_or(Device{})));
}

Metas like_at(size_t dtype_at, Args args) {
  const TensorMeta& t = tensor(args, 0);
  TensorMeta out = like(t, dtype_or(args, dtype_at, t.dtype));
  if (const auto d = device_in(args, dtype_at)) out.device = *d;
  if (has(args, dtype_at + 4)) {
    const MemoryFormat f = args[dtype_at + 4].as<MemoryFormat>();
    if (f != MemoryFormat::Preserve) out.strides = strides_for(out.sizes, f);
  }
  return one(out);
}

Metas new_at(size_t dtype_at, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(fresh(args[1].to_ints(), dtype_or(args, dtype_at, t.dtype), device_in(args, dtype_at).value_or(t.device)));
}

Metas new_empty_strided(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  TensorMeta out = fresh(args[1].to_ints(), dtype_or(args, 3, t.dtype), device_in(args, 3).value_or(t.device));
  out.strides = args[2].to_ints();
  return one(out);
}

Metas clone(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const MemoryFormat f = has(args, 1) ? args[1].as<MemoryFormat>() : MemoryFormat::Preserve;
  return one(f == MemoryFormat::Preserve ? like(t) : formatted(t, t.sizes, f));
}

Metas to_copy(const OpInfo&, Args args) {
  // As *_like, with non_blocking between pin_memory and memory_format.
  const Arg like_args[] = {arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3), arg(args, 4), arg(args, 6)};
  return like_at(1, like_args);
}

Metas cat(const OpInfo&, Args args) {
  const auto tensors = tensor_list(args, 0);
  if (tensors.empty()) shape_error("torch.cat(): expected a non-empty list of Tensors");
  for (const TensorMeta* t : tensors)
    if (!t) throw Unsupported("cat of an undefined tensor");
  // Empty 1-d tensors are skipped, whatever the others' dims.
  const auto skipped = [](const TensorMeta* t) { return t->dim() == 1 && t->sizes[0] == 0; };
  const TensorMeta* first = nullptr;
  std::vector<Arg> operands;
  std::optional<MemoryFormat> format;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta* t = tensors[i];
    if (t->dim() == 0)
      shape_error("zero-dimensional tensor (at position " + std::to_string(i) + ") cannot be concatenated");
    operands.emplace_back(t);
    const MemoryFormat f = suggest_format(*t);
    if (!format)
      format = f;
    else if (*format != f)
      format = MemoryFormat::Contiguous;
    if (!first && !skipped(t)) first = t;
  }
  const DType dtype = result_type(operands);
  if (!first) {
    wrap_dim(int_or(args, 1, 0), 1);
    return one(contiguous(*tensors[0], {0}, dtype));
  }
  const auto d = static_cast<size_t>(wrap_dim(int_or(args, 1, 0), first->dim()));
  Ints sizes = first->sizes;
  sizes[d] = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorMeta* t = tensors[i];
    if (skipped(t)) continue;
    if (t->dim() != first->dim())
      shape_error("Tensors must have same number of dimensions: got " + std::to_string(first->dim()) + " and " +
                  std::to_string(t->dim()));
    for (size_t k = 0; k < sizes.size(); ++k)
      if (k != d && t->sizes[k] != sizes[k])
        shape_error("Sizes of tensors must match except in dimension " + std::to_string(d) + ". Expected size " +
                    std::to_string(sizes[k]) + " but got size " + std::to_string(t->sizes[k]) + " for tensor number " +
                    std::to_string(i) + " in the list.");
    sizes[d] += t->sizes[d];
  }
  TensorMeta out = formatted(*first, sizes, *format);
  out.dtype = dtype;
  return one(out);
}

Metas stack(const OpInfo& info, Args args) {
  const auto tensors = tensor_list(args, 0);
  if (tensors.empty()) shape_error("stack expects a non-empty TensorList");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]) throw Unsupported("stack of an undefined tensor");
    if (tensors[i]->sizes != tensors[0]->sizes)
      shape_error("stack expects each tensor to be equal size, but got " + sizes_text(tensors[0]->sizes) +
                  " at entry 0 and " + sizes_text(tensors[i]->sizes) + " at entry " + std::to_string(i));
  }
  const int64_t d = wrap_dim(int_or(args, 1, 0), tensors[0]->dim() + 1);
  Ints sizes = tensors[0]->sizes;
  sizes.insert(sizes.begin() + d, static_cast<int64_t>(tensors.size()));
  // Eager concatenates along the dim and cuts it in two, or concatenates unsqueezed tensors where the dim is the last.
  if (d < tensors[0]->dim() && tensors[0]->numel() != 0) {
    const TensorMeta joined = cat(info, args)[0];
    const auto strides = view_strides(joined, sizes);
    return one(strides ? strided(joined, sizes, *strides) : contiguous(joined, sizes));
  }
  std::vector<TensorMeta> wide;
  std::vector<Arg> list;
  wide.reserve(tensors.size());
  for (const TensorMeta* t : tensors) {
    wide.push_back(*t);
    const auto at = static_cast<size_t>(d);
    const int64_t stride = at >= t->sizes.size() ? 1 : t->sizes[at] * t->strides[at];
    wide.back().sizes.insert(wide.back().sizes.begin() + d, 1);
    wide.back().strides.insert(wide.back().strides.begin() + d, stride);
    list.emplace_back(&wide.back());
  }
  const Arg cat_args[] = {list, d};
  return cat(info, cat_args);
}

Metas constant_pad(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints pad = args[1].to_ints();
  if (pad.size() % 2) shape_error("Length of pad must be even but instead it equals " + std::to_string(pad.size()));
  const size_t n = t.sizes.size(), m = pad.size() / 2;
  if (m > n)
    shape_error("Length of pad should be no more than twice the number of dimensions of the input. Pad length is " +
                std::to_string(pad.size()) + "while the input has " + std::to_string(n) + " dimensions.");
  Ints sizes = t.sizes;
  bool only_cuts = true;
  for (size_t i = 0; i < m; ++i) {
    const int64_t size = sizes[n - 1 - i] + pad[2 * i] + pad[2 * i + 1];
    if (size < 0)
      shape_error("The input size " + std::to_string(sizes[n - 1 - i]) + ", plus negative padding " +
                  std::to_string(pad[2 * i]) + " and " + std::to_string(pad[2 * i + 1]) +
                  " resulted in a negative output size, which is invalid. Check dimension " +
                  std::to_string(n - 1 - i) + " of your input.");
    sizes[n - 1 - i] = size;
    only_cuts &= pad[2 * i] <= 0 && pad[2 * i + 1] <= 0;
  }
  if (only_cuts) {  // a clone of a narrowed view
    TensorMeta narrowed = t;
    narrowed.sizes = sizes;
    return one(like(narrowed));
  }
  return one(formatted(t, sizes, suggest_format(t)));
}

Metas flip(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  wrap_dims(args[1].to_ints(), t.dim());
  return one(like(t));
}

// ATen puts two parts together, dim after dim, which keeps channels-last; where nothing moves it makes a contiguous
// copy.
Metas roll(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints shifts = args[1].to_ints(), dims = ints_or(args, 2, {});
  if (dims.empty() || t.dim() == 0) return one(contiguous(t, t.sizes));  // a number has a dim to name only
  MemoryFormat format = suggest_format(t);
  for (size_t i = 0; i < dims.size() && i < shifts.size(); ++i) {
    const int64_t size = t.sizes[static_cast<size_t>(wrap_dim(dims[i], t.dim()))];
    if (size == 0 || shifts[i] % size == 0) format = MemoryFormat::Contiguous;
  }
  return one(formatted(t, t.sizes, format));
}

Metas repeat(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints times = args[1].to_ints();
  if (times.size() < t.sizes.size())
    shape_error("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor");
  Ints sizes = times;
  const size_t offset = times.size() - t.sizes.size();
  for (size_t d = 0; d < t.sizes.size(); ++d) sizes[d + offset] *= t.sizes[d];
  for (int64_t s : sizes)
    if (s < 0)
      shape_error("Trying to create tensor with negative dimension " + std::to_string(s) + ": " + sizes_text(sizes));
  return one(contiguous(t, sizes));
}

Metas triangle(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  if (t.dim() < 2) shape_error("tril/triu: input tensor must have at least 2 dimensions");
  return one(contiguous(t, t.sizes));
}

Metas rot90(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints dims = ints_or(args, 2, {0, 1});
  const auto a = static_cast<size_t>(wrap_dim(dims.at(0), t.dim())),
             b = static_cast<size_t>(wrap_dim(dims.at(1), t.dim()));
  const int64_t k = ((int_or(args, 1, 1) % 4) + 4) % 4;
  TensorMeta source = t;
  if (k == 1 || k == 3) {  // a flip, then a transposed view cloned row-major
    Ints sizes = t.sizes;
    std::swap(sizes[a], sizes[b]);
    const TensorMeta flipped = like(t);
    Ints strides = flipped.strides;
    std::swap(strides[a], strides[b]);
    return one(strided(t, sizes, strides));
  }
  return one(k == 0 ? contiguous(t, t.sizes) : like(t));
}

Metas pad_nd(size_t spatial, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints pad = args[1].to_ints();
  Ints sizes = t.sizes;
  if (sizes.size() < spatial || pad.size() != 2 * spatial) throw Unsupported("padding of another rank");
  for (size_t i = 0; i < spatial; ++i) sizes[sizes.size() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
  for (int64_t s : sizes)
    if (s < 0) throw Unsupported("padding that leaves a negative size");
  const MemoryFormat f = spatial > 1 ? suggest_format(t) : MemoryFormat::Contiguous;
  return one(formatted(t, sizes, f));
}

Metas formatted_like_second(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 1);
  return one(formatted(t, t.sizes, suggest_format(t)));
}

Metas zeros_of_sizes(const OpInfo&, Args args) { return one(contiguous(tensor(args, 0), args[1].to_ints())); }

Metas scatter_into(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (t.strides[d] == 0 && t.sizes[d] > 1) return one(like(t));
  // The whole storage is copied, gaps included.
  return one(view_of(t, t.sizes, t.strides));
}

Metas pixel_shuffle(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t r = args[1].to_int();
  Ints sizes = t.sizes;
  const size_t n = sizes.size();
  if (n < 3)
    shape_error("pixel_shuffle expects input to have at least 3 dimensions, but got input with " + std::to_string(n) +
                " dimension(s)");
  decline_unless_usable({r});
  if (sizes[n - 3] % (r * r)) throw Unsupported("pixel_shuffle with a factor that does not divide the channels");
  sizes[n - 3] /= r * r;
  sizes[n - 2] *= r;
  sizes[n - 1] *= r;
  return one(formatted(t, sizes, suggest_format(t)));
}

Metas pixel_unshuffle(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t r = args[1].to_int();
  Ints sizes = t.sizes;
  const size_t n = sizes.size();
  decline_unless_usable({r});
  if (n < 3 || sizes[n - 2] % r || sizes[n - 1] % r) throw Unsupported("pixel_unshuffle of these sizes");
  sizes[n - 3] *= r * r;
  sizes[n - 2] /= r;
  sizes[n - 1] /= r;
  return one(formatted(t, sizes, suggest_format(t)));
}

Metas channel_shuffle(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  return one(formatted(t, t.sizes, suggest_format(t)));
}

Metas diag_embed(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const int64_t offset = int_or(args, 1, 0);
  const int64_t n = t.dim() + 1;
  const auto a = static_cast<size_t>(wrap_dim(int_or(args, 2, -2), n)),
             b = static_cast<size_t>(wrap_dim(int_or(args, 3, -1), n));
  if (a == b || t.dim() == 0) throw Unsupported("diag_embed into one dim");
  const int64_t length = t.sizes.back() + std::abs(offset);
  Ints sizes(t.sizes.begin(), t.sizes.end() - 1);
  sizes.insert(sizes.begin() + static_cast<int64_t>(std::min(a, b)), length);
  sizes.insert(sizes.begin() + static_cast<int64_t>(std::max(a, b)), length);
  return one(contiguous(t, sizes));
}

Metas block_diag(const OpInfo&, Args args) {
  const auto tensors = tensor_list(args, 0);
  int64_t rows = 0, cols = 0;
  std::vector<Arg> operands;
  if (tensors.empty()) throw Unsupported("block_diag of nothing");
  for (const TensorMeta* t : tensors) {
    if (!t || t->dim() > 2) throw Unsupported("block_diag of a tensor with more than 2 dims");
    rows += t->dim() == 2 ? t->sizes[0] : 1;
    cols += t->dim() == 0 ? 1 : t->sizes.back();
    operands.emplace_back(t);
  }
  return one(contiguous(*tensors[0], {rows, cols}, result_type(operands)));
}

}  // namespace kiln::ops::rules
