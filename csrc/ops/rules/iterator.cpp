#include "ops/rules/iterator.h"

#include <numeric>

namespace kiln::ops {
namespace {

// Undefined dtype in promotions.
using Maybe = std::optional<DType>;

Maybe promote_known(Maybe a, Maybe b) {
  if (!a) return b;
  if (!b) return a;
  return promote_types(*a, *b);
}

DType to_complex(DType t) {
  switch (t) {
    case DType::Float64:
    case DType::Complex128:
      return DType::Complex128;
    case DType::Float16:
      throw Unsupported("complex numbers of half precision");
    default:
      return DType::Complex64;
  }
}

// `higher` decides the category; within one category `lower` has no say.
Maybe combine_categories(Maybe higher, Maybe lower) {
  if (higher && is_complex(*higher)) return higher;
  if (higher && is_floating(*higher)) return lower && is_complex(*lower) ? to_complex(*higher) : *higher;
  if ((higher && *higher == DType::Bool) || (lower && (is_floating(*lower) || is_complex(*lower))))
    return promote_known(higher, lower);
  return higher ? higher : lower;
}

// should_swap of TensorIterator over the inputs' strides (0 where broadcast): > 0 if dim0 must lie outside of dim1.
int compare_dims(const std::vector<std::vector<int64_t>>& strides, const std::vector<int64_t>& shape, size_t dim0,
                 size_t dim1) {
  for (const auto& s : strides) {
    const int64_t s0 = s[dim0], s1 = s[dim1];
    if (s0 == 0 || s1 == 0) continue;
    if (s0 < s1) return -1;
    if (s0 > s1) return 1;
    if (shape[dim0] > shape[dim1]) return 1;
  }
  return 0;
}

}  // namespace

DType result_type(std::span<const Arg> operands) {
  Maybe dim, zero, wrapped;
  for (const Arg& a : operands) {
    if (a.is_value()) {
      const TensorMeta* t = a.value();
      if (!t) continue;
      if (t->dtype == DType::Opaque) throw Unsupported("a dtype that is only passed on");
      Maybe& slot = t->dim() > 0 ? dim : zero;
      slot = promote_known(slot, t->dtype);
    } else if (a.is<bool>()) {
      wrapped = promote_known(wrapped, DType::Bool);
    } else if (a.is<int64_t>()) {
      wrapped = promote_known(wrapped, DType::Int64);
    } else if (a.is<double>()) {
      wrapped = promote_known(wrapped, default_dtype());
    } else if (a.is<std::complex<double>>()) {
      wrapped = promote_known(wrapped, to_complex(default_dtype()));
    }
  }
  const Maybe result = combine_categories(dim, combine_categories(zero, wrapped));
  KILN_CHECK(result.has_value(), "no operand to promote");
  return *result;
}

std::vector<int64_t> broadcast_sizes(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const size_t n = std::max(a.size(), b.size());
  std::vector<int64_t> out(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t x = i < n - a.size() ? 1 : a[i - (n - a.size())];
    const int64_t y = i < n - b.size() ? 1 : b[i - (n - b.size())];
    if (x != y && x != 1 && y != 1)
      throw ShapeError("The size of tensor a (" + std::to_string(x) + ") must match the size of tensor b (" +
                       std::to_string(y) + ") at non-singleton dimension " + std::to_string(i));
    out[i] = x == 1 ? y : x;
  }
  return out;
}

TensorMeta iterate(std::span<const TensorMeta* const> inputs, DType result, const DType* common) {
  TensorMeta out;
  out.dtype = result;
  bool first = true, scalars = false, tensors = false, same = true;
  const TensorMeta* any = nullptr;
  for (const TensorMeta* t : inputs) {
    if (!t) {
      scalars = true;
      continue;
    }
    (t->dim() == 0 ? scalars : tensors) = true;
    if (first) {
      out.sizes = t->sizes;
      first = false;
    } else if (t->sizes != out.sizes) {
      same = false;
      out.sizes = broadcast_sizes(out.sizes, t->sizes);
    }
    if (!any || (any->dim() == 0 && t->dim() != 0)) any = t;
  }
  if (any) {
    // A 0-dim CPU tensor may meet tensors of another device; the result is on the other one.
    out.device = any->device;
  }
  if (scalars && tensors) same = false;
  const size_t n = out.sizes.size();

  // Inputs as the kernel sees them: cast ones are fresh copies.
  std::vector<TensorMeta> cast;
  cast.reserve(inputs.size());
  std::vector<const TensorMeta*> seen;
  for (const TensorMeta* t : inputs) {
    if (!t) continue;
    if (common && t->dtype != *common && !t->is_non_overlapping_and_dense()) {
      cast.push_back(*t);
      cast.back().strides = preserved_strides(*t);
      seen.push_back(&cast.back());
    } else {
      seen.push_back(t);
    }
  }

  if (same && !seen.empty()) {
    const auto all = [&](auto&& f) { return std::all_of(seen.begin(), seen.end(), f); };
    if (all([](const TensorMeta* t) { return t->is_contiguous(); })) {
      out.strides = contiguous_strides(out.sizes);
      return out;
    }
    if (all([](const TensorMeta* t) { return t->is_contiguous(MemoryFormat::ChannelsLast); })) {
      out.strides = strides_for(out.sizes, MemoryFormat::ChannelsLast);
      return out;
    }
    if (all([&](const TensorMeta* t) {
          return t->is_non_overlapping_and_dense() && t->strides == seen.front()->strides;
        })) {
      out.strides = seen.front()->strides;
      return out;
    }
  }

  if (n <= 1) {
    out.strides.assign(n, 1);
    return out;
  }
  std::vector<std::vector<int64_t>> strides;
  for (const TensorMeta* t : seen) {
    std::vector<int64_t>& s = strides.emplace_back(n, 0);
    const size_t offset = n - t->sizes.size();
    for (size_t d = 0; d < t->sizes.size(); ++d)
      s[d + offset] = t->sizes[d] == 1 && out.sizes[d + offset] != 1 ? 0 : t->strides[d];
  }
  // Insertion sort of dims, innermost first, with an order that may be undecided between two dims.
  std::vector<size_t> perm(n);
  for (size_t i = 0; i < n; ++i) perm[i] = n - 1 - i;
  for (size_t i = 1; i < n; ++i) {
    size_t dim1 = i;
    for (size_t dim0 = i; dim0-- > 0;) {
      const int c = compare_dims(strides, out.sizes, perm[dim0], perm[dim1]);
      if (c > 0) {
        std::swap(perm[dim0], perm[dim1]);
        dim1 = dim0;
      } else if (c < 0) {
        break;
      }
    }
  }
  bool row_major = true;
  for (size_t i = 0; i < n; ++i) row_major &= perm[i] == n - 1 - i;
  if (row_major) {
    out.strides = contiguous_strides(out.sizes);
    return out;
  }
  out.strides.resize(n);
  int64_t step = 1;
  for (size_t d : perm) {
    out.strides[d] = step;
    step *= out.sizes[d];
  }
  return out;
}

std::vector<int64_t> dense_strides_like(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const size_t n = sizes.size();
  if (n == 0) return {};
  std::vector<size_t> perm(n);
  for (size_t i = 0; i < n; ++i) perm[i] = n - 1 - i;
  const auto should_swap = [&](size_t dim0, size_t dim1) {
    const int64_t s0 = strides[dim0], s1 = strides[dim1];
    if (s0 == 0 || s1 == 0) return 0;
    if (s0 < s1) return -1;
    if (s0 > s1) return 1;
    return sizes[dim0] > sizes[dim1] ? 1 : 0;
  };
  for (size_t i = 1; i < n; ++i) {
    size_t dim1 = i;
    for (size_t dim0 = i; dim0-- > 0;) {
      const int c = should_swap(perm[dim0], perm[dim1]);
      if (c > 0) {
        std::swap(perm[dim0], perm[dim1]);
        dim1 = dim0;
      } else if (c < 0) {
        break;
      }
    }
  }
  std::vector<int64_t> out(n);
  int64_t step = 1;
  for (size_t d : perm) {
    out[d] = step;
    if (sizes[d] > 1) step *= sizes[d];
  }
  return out;
}

std::vector<int64_t> preserved_strides(const TensorMeta& t) {
  return t.is_non_overlapping_and_dense() ? t.strides : dense_strides_like(t.sizes, t.strides);
}

}  // namespace kiln::ops
