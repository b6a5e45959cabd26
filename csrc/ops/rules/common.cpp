#include "ops/rules/common.h"

#include <cfloat>
#include <cmath>

namespace kiln::ops::rules {

std::vector<const TensorMeta*> tensor_list(Args a, size_t i) {
  if (i >= a.size() || !a[i].is_list())
    throw Unsupported("argument " + std::to_string(i) + " is not a list of tensors");
  std::vector<const TensorMeta*> out;
  out.reserve(a[i].list().size());
  for (const Arg& x : a[i].list()) {
    const bool ok = x.is_value() && x.value() && x.value()->defined;
    out.push_back(ok ? x.value() : nullptr);
  }
  return out;
}

int64_t wrap_dim(int64_t d, int64_t ndim, bool scalar_ok) {
  int64_t n = ndim;
  if (n <= 0) {
    if (!scalar_ok)
      shape_error("Dimension specified as " + std::to_string(d) + " but tensor has no dimensions",
                  ShapeError::Kind::Index);
    n = 1;
  }
  if (d < -n || d >= n)
    shape_error("Dimension out of range (expected to be in range of [" + std::to_string(-n) + ", " +
                    std::to_string(n - 1) + "], but got " + std::to_string(d) + ")",
                ShapeError::Kind::Index);
  return d < 0 ? d + n : d;
}

Ints wrap_dims(const Ints& dims, int64_t ndim) {
  Ints out;
  std::vector<bool> seen(static_cast<size_t>(std::max<int64_t>(ndim, 1)), false);
  for (int64_t d : dims) {
    const int64_t w = wrap_dim(d, ndim);
    if (seen[static_cast<size_t>(w)])
      shape_error("dim " + std::to_string(w) + " appears multiple times in the list of dims");
    seen[static_cast<size_t>(w)] = true;
    out.push_back(w);
  }
  return out;
}

std::string dtype_label(DType t) {
  switch (t) {
    case DType::Bool:
      return "Bool";
    case DType::UInt8:
      return "Byte";
    case DType::Int8:
      return "Char";
    case DType::Int16:
      return "Short";
    case DType::Int32:
      return "Int";
    case DType::Int64:
      return "Long";
    case DType::Float16:
      return "Half";
    case DType::BFloat16:
      return "BFloat16";
    case DType::Float32:
      return "Float";
    case DType::Float64:
      return "Double";
    case DType::Complex64:
      return "ComplexFloat";
    case DType::Complex128:
      return "ComplexDouble";
    default:
      return "Undefined";
  }
}

void check_fits(const Arg& number, DType t) {
  static const std::unordered_map<DType, std::pair<double, const char*>> kLargest{
      {DType::UInt8, {UINT8_MAX, "uint8_t"}},
      {DType::Int8, {INT8_MAX, "int8_t"}},
      {DType::Int16, {INT16_MAX, "int16_t"}},
      {DType::Int32, {INT32_MAX, "int"}},
      {DType::Int64, {0x1p63, "int64_t"}},
      {DType::Float16, {65504, "at::Half"}},
      {DType::BFloat16, {0x1.fep127, "at::BFloat16"}},
      {DType::Float32, {FLT_MAX, "float"}},
  };
  if (number.is<std::complex<double>>() && number.as<std::complex<double>>().imag() != 0 && t != DType::Bool &&
      !is_complex(t))
    shape_error("value cannot be converted to this dtype without overflow");
  const auto largest = kLargest.find(t);
  if (largest == kLargest.end() || !number.is_number() || number.is<std::complex<double>>()) return;
  const double v = number.to_double(), most = largest->second.first;
  bool fits;
  if (is_floating(t))
    fits = !std::isfinite(v) || std::abs(v) <= most;
  else if (t == DType::UInt8)
    fits = v <= most && v >= (number.is<double>() ? 0 : -most);
  else
    fits = v <= most && v >= -most - (t == DType::Int64 ? 0 : 1);
  if (!fits)
    shape_error("value cannot be converted to type " + std::string(largest->second.second) + " without overflow");
}

std::string sizes_text(const Ints& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i) out += ", ";
    out += std::to_string(sizes[i]);
  }
  return out + "]";
}

TensorMeta contiguous(const TensorMeta& t, Ints sizes) { return contiguous(t, std::move(sizes), t.dtype); }

TensorMeta contiguous(const TensorMeta& t, Ints sizes, DType dtype) {
  TensorMeta out;
  out.dtype = dtype;
  out.strides = contiguous_strides(sizes);
  out.sizes = std::move(sizes);
  out.device = t.device;
  return out;
}

TensorMeta formatted(const TensorMeta& t, Ints sizes, MemoryFormat format) {
  TensorMeta out;
  out.dtype = t.dtype;
  out.strides = strides_for(sizes, format);
  out.sizes = std::move(sizes);
  out.device = t.device;
  return out;
}

TensorMeta strided(const TensorMeta& t, Ints sizes, Ints strides) {
  TensorMeta out;
  out.dtype = t.dtype;
  out.sizes = std::move(sizes);
  out.strides = std::move(strides);
  out.device = t.device;
  return out;
}

TensorMeta view_of(const TensorMeta& t, Ints sizes, Ints strides, int64_t offset) {
  TensorMeta out = strided(t, std::move(sizes), std::move(strides));
  out.offset = t.offset + offset;
  return out;
}

TensorMeta like(const TensorMeta& t) { return like(t, t.dtype); }

TensorMeta like(const TensorMeta& t, DType dtype) {
  TensorMeta out = strided(t, t.sizes, preserved_strides(t));
  out.dtype = dtype;
  return out;
}

namespace {

// Strides of a channels-last tensor as ATen tells them apart where sizes of 1 leave a choice: going from the innermost
// dim (channels) outwards, each stride must be at least the extent so far; a 1 x C x 1 x 1 tensor in NCHW order is not
// one.
bool channels_last_strides(const TensorMeta& t, std::initializer_list<size_t> order) {
  if (t.sizes.size() != order.size()) return false;
  int64_t min = 0;
  if (t.strides[1] == 0) return false;
  for (size_t d : order) {
    if (t.sizes[d] == 0) return false;
    if (t.strides[d] < min) return false;
    // N111 (all of C, H, W are 1) is taken for contiguous.
    if (d == 0 && min == t.strides[1]) return false;
    min = t.strides[d];
    if (t.sizes[d] > 1) min *= t.sizes[d];
  }
  return true;
}

}  // namespace

MemoryFormat suggest_format(const TensorMeta& t) {
  if (channels_last_strides(t, {1, 3, 2, 0})) return MemoryFormat::ChannelsLast;
  if (channels_last_strides(t, {1, 4, 3, 2, 0})) return MemoryFormat::ChannelsLast3d;
  return MemoryFormat::Contiguous;
}

int64_t product(const Ints& v, size_t from) {
  int64_t p = 1;
  for (size_t i = from; i < v.size(); ++i) p *= v[i];
  return p;
}

Ints expand_param(const Arg& a, size_t n, const Ints& absent) {
  Ints v = a.is_none() ? absent : a.to_ints();
  if (v.empty()) v = absent;
  if (v.size() == 1) v.assign(n, v[0]);
  if (v.size() != n) throw Unsupported("a window parameter has " + std::to_string(v.size()) + " entries");
  return v;
}

}  // namespace kiln::ops::rules
