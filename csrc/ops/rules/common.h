#pragma once
#include <optional>

#include "ops/ops.h"
#include "ops/rules/iterator.h"

// What all rules read their arguments with, and build their results with.
namespace kiln::ops::rules {

using Args = std::span<const Arg>;
using Metas = std::vector<TensorMeta>;
using Ints = std::vector<int64_t>;

[[noreturn]] inline void shape_error(const std::string& message, ShapeError::Kind kind = ShapeError::Kind::Runtime) {
  throw ShapeError(message, kind);
}

inline const TensorMeta* maybe_tensor(Args a, size_t i) {
  if (i >= a.size() || !a[i].is_value()) return nullptr;
  const TensorMeta* t = a[i].value();
  return t && t->defined ? t : nullptr;
}
inline const TensorMeta& tensor(Args a, size_t i) {
  const TensorMeta* t = maybe_tensor(a, i);
  if (!t) throw Unsupported("argument " + std::to_string(i) + " is not a tensor");
  return *t;
}
inline const Arg& arg(Args a, size_t i) {
  static const Arg none;
  return i < a.size() ? a[i] : none;
}
inline bool has(Args a, size_t i) { return i < a.size() && !a[i].is_none() && !(a[i].is_value() && !a[i].value()); }
inline int64_t int_or(Args a, size_t i, int64_t value) { return has(a, i) ? a[i].to_int() : value; }
inline bool bool_or(Args a, size_t i, bool value) { return has(a, i) ? a[i].to_bool() : value; }
inline DType dtype_or(Args a, size_t i, DType value) { return has(a, i) ? a[i].as<DType>() : value; }
inline Ints ints_or(Args a, size_t i, Ints value) { return has(a, i) ? a[i].to_ints() : value; }
std::vector<const TensorMeta*> tensor_list(Args a, size_t i);

/// Dim `d` counted from the front. Throws eager's IndexError; a 0-dim tensor has one dim here.
int64_t wrap_dim(int64_t d, int64_t ndim, bool scalar_ok = true);
/// Wrapped, checked for repeats. An empty or absent list means all dims if `empty_is_all`.
Ints wrap_dims(const Ints& dims, int64_t ndim);

/// "Float", "Long", ...: as eager's messages name dtypes.
std::string dtype_label(DType t);
/// Raises eager's error where a number is no value of the dtype. A fraction is cut off, and an unsigned dtype takes
/// negative integers, as c10::overflows has it.
void check_fits(const Arg& number, DType t);
/// "[2, 3]".
std::string sizes_text(const Ints& sizes);

/// A tensor like `t` with other sizes, row-major.
TensorMeta contiguous(const TensorMeta& t, Ints sizes);
TensorMeta contiguous(const TensorMeta& t, Ints sizes, DType dtype);
TensorMeta formatted(const TensorMeta& t, Ints sizes, MemoryFormat format);
TensorMeta strided(const TensorMeta& t, Ints sizes, Ints strides);
/// A view: same dtype, device; offset moved by `offset`.
TensorMeta view_of(const TensorMeta& t, Ints sizes, Ints strides, int64_t offset = 0);
/// empty_like under preserve_format.
TensorMeta like(const TensorMeta& t);
TensorMeta like(const TensorMeta& t, DType dtype);
/// Tensor::suggest_memory_format: channels-last if the strides say so, else contiguous.
MemoryFormat suggest_format(const TensorMeta& t);
int64_t product(const Ints& v, size_t from = 0);
/// One int for each of n spatial dims, from a list of one or n ints.
Ints expand_param(const Arg& a, size_t n, const Ints& absent = {});

/// Strides, kernel sizes and the like, which rules divide by: what is not positive, or of which two have a product that
/// wraps, is left to eager, which refuses it.
inline void decline_unless_usable(const Ints& values) {
  constexpr int64_t kMost = int64_t{1} << 31;
  for (int64_t v : values)
    if (v <= 0 || v > kMost) throw Unsupported("a stride, dilation or size of " + std::to_string(v));
}

inline Metas one(TensorMeta t) {
  Metas m;
  m.push_back(std::move(t));
  return m;
}
template <class... T>
Metas many(T... t) {
  Metas m;
  (m.push_back(std::move(t)), ...);
  return m;
}

}  // namespace kiln::ops::rules
