#include "aten/own_meta.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Operators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>

namespace kiln::aten::own {
namespace {

using Dims = std::vector<int64_t>;

at::Tensor contiguous(at::IntArrayRef sizes, const at::Tensor& like) { return at::empty(sizes, like.options()); }

/// Among equals (dims of one element) by the same algorithm as in ATen.
void by_stride(const at::Tensor& t, Dims::iterator first, Dims::iterator last) {
  std::sort(first, last, [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
}

/// The layout of a transform over `dims` by MKL (aten/src/ATen/native/mkl/SpectralOps.cpp): the other dims outside, in
/// the order of the input's strides, then `dims` as given.
at::Tensor transformed(const at::Tensor& self, const Dims& sizes, const Dims& dims, c10::ScalarType type) {
  const auto options = self.options().dtype(type);
  if (!at::hasMKL()) return at::empty(sizes, options);
  Dims order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto others = std::partition(order.begin(), order.end(),
                                     [&](int64_t d) { return std::find(dims.begin(), dims.end(), d) == dims.end(); });
  by_stride(self, order.begin(), others);
  std::copy(dims.begin(), dims.end(), others);
  Dims strides(sizes.size());
  int64_t stride = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[static_cast<size_t>(*d)] = stride;
    stride *= sizes[static_cast<size_t>(*d)];
  }
  return at::empty_strided(sizes, strides, options);
}

}  // namespace

at::Tensor fft_c2c(const at::Tensor& self, c10::SymIntArrayRef dim, int64_t normalization, bool forward) {
  Dims dims;
  for (const c10::SymInt& d : dim) dims.push_back(d.expect_int());
  if (dims.empty() || !self.is_complex() || self.numel() == 0)
    return at::_ops::_fft_c2c::call(self, dim, normalization, forward);
  by_stride(self, dims.begin(), dims.end());
  return transformed(self, self.sizes().vec(), dims, self.scalar_type());
}

at::Tensor fft_r2c(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, bool onesided) {
  if (dim.empty() || !self.is_floating_point() || self.numel() == 0)
    return at::_ops::_fft_r2c::call(self, dim, normalization, onesided);
  Dims dims = dim.vec(), sizes = self.sizes().vec();
  if (onesided) sizes[static_cast<size_t>(dim.back())] = sizes[static_cast<size_t>(dim.back())] / 2 + 1;
  by_stride(self, dims.begin(), dims.end() - 1);
  return transformed(self, sizes, dims, c10::toComplexType(self.scalar_type()));
}

at::Tensor fft_c2r(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, c10::SymInt last_dim_size) {
  if (dim.empty() || !self.is_complex() || self.numel() == 0)
    return at::_ops::_fft_c2r::call(self, dim, normalization, last_dim_size);
  // All but the last dim by a complex transform.
  at::Tensor input = self;
  if (dim.size() > 1) {
    std::vector<c10::SymInt> first;
    for (int64_t d : dim.slice(0, dim.size() - 1)) first.emplace_back(d);
    input = fft_c2c(self, first, normalization, false);
  }
  Dims sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim.back())] = last_dim_size.expect_int();
  return transformed(input, sizes, {dim.back()}, c10::toRealValueType(self.scalar_type()));
}

namespace {
/// The sizes that the batches of `a` and `b` have together, and then `rest`.
Dims batched(const at::Tensor& a, const at::Tensor& b, std::initializer_list<int64_t> rest) {
  Dims sizes = at::infer_size(a.sizes().slice(0, static_cast<size_t>(a.dim() - 2)),
                              b.sizes().slice(0, static_cast<size_t>(b.dim() - 2)));
  sizes.insert(sizes.end(), rest);
  return sizes;
}
}  // namespace

at::Tensor cdist_forward(const at::Tensor& x1, const at::Tensor& x2, double p, std::optional<int64_t> compute_mode) {
  if (x1.dim() < 2 || x2.dim() < 2 || x1.size(-1) != x2.size(-1) || p < 0 || !x1.is_floating_point() ||
      !x2.is_floating_point())
    return at::_ops::_cdist_forward::call(x1, x2, p, compute_mode);
  return contiguous(batched(x1, x2, {x1.size(-2), x2.size(-2)}), x1);
}

at::Tensor cdist_backward(const at::Tensor& grad, const at::Tensor& x1, const at::Tensor& x2, double p,
                          const at::Tensor& cdist) {
  if (x1.numel() == 0 || x2.numel() == 0) return at::_ops::_cdist_backward::call(grad, x1, x2, p, cdist);
  return contiguous(batched(x1, x2, {x1.size(-2), x1.size(-1)}), x1);
}

at::Tensor pdist_forward(const at::Tensor& self, double p) {
  if (self.dim() != 2 || !self.is_contiguous()) return at::_ops::_pdist_forward::call(self, p);
  const int64_t n = self.size(0);
  return contiguous({n * (n - 1) / 2}, self);
}

at::Tensor pdist_backward(const at::Tensor& grad, const at::Tensor& self, double p, const at::Tensor& pdist) {
  if (!self.is_contiguous() || !pdist.is_contiguous()) return at::_ops::_pdist_backward::call(grad, self, p, pdist);
  return contiguous(self.sizes(), self);
}

at::Tensor solve_triangular(const at::Tensor& self, const at::Tensor& b, bool upper, bool left, bool unitriangular) {
  const bool plain = self.dim() >= 2 && b.dim() >= 2 && self.size(-1) == self.size(-2) &&
                     b.size(left ? -2 : -1) == self.size(-1) && self.is_floating_point() &&
                     self.scalar_type() == b.scalar_type();
  if (!plain) return at::_ops::linalg_solve_triangular::call(self, b, upper, left, unitriangular);
  return contiguous(batched(self, b, {b.size(-1), b.size(-2)}), self).transpose(-2, -1);
}

at::Tensor pinv(const at::Tensor& self, const std::optional<at::Tensor>& atol, const std::optional<at::Tensor>& rtol,
                bool hermitian) {
  if (self.dim() < 2 || !(self.is_floating_point() || self.is_complex()) ||
      (hermitian && self.size(-1) != self.size(-2)))
    return at::_ops::linalg_pinv_atol_rtol_tensor::call(self, atol, rtol, hermitian);
  Dims sizes = self.sizes().vec();
  std::swap(sizes.back(), sizes[sizes.size() - 2]);
  return contiguous(sizes, self);
}

at::Tensor max_unpool2d(const at::Tensor& self, const at::Tensor& indices, c10::SymIntArrayRef output_size) {
  if ((self.dim() != 3 && self.dim() != 4) || self.sizes() != indices.sizes() || indices.scalar_type() != at::kLong ||
      output_size.size() != 2 || self.numel() == 0)
    return at::_ops::max_unpool2d::call(self, indices, output_size);
  Dims sizes = self.sizes().vec();
  for (size_t i = 0; i < 2; ++i) sizes[sizes.size() - 2 + i] = output_size[i].expect_int();
  return at::empty(sizes, self.options().memory_format(self.suggest_memory_format()));
}

at::Tensor matrix_exp(const at::Tensor& self) {
  if (self.dim() < 2 || self.size(-1) != self.size(-2) || !(self.is_floating_point() || self.is_complex()))
    return at::_ops::linalg_matrix_exp::call(self);
  return contiguous(self.sizes(), self);
}

at::Tensor trilinear(const at::Tensor& i1, const at::Tensor& i2, const at::Tensor& i3, at::IntArrayRef expand1,
                     at::IntArrayRef expand2, at::IntArrayRef expand3, at::IntArrayRef sumdim, int64_t unroll_dim) {
  const auto expanded = [](const at::Tensor& t, at::IntArrayRef dims) {
    Dims sizes = t.sizes().vec();
    for (int64_t d : dims) sizes.insert(sizes.begin() + d, 1);
    return sizes;
  };
  Dims all = at::infer_size(at::infer_size(expanded(i1, expand1), expanded(i2, expand2)), expanded(i3, expand3)), left;
  for (int64_t d = 0; d < static_cast<int64_t>(all.size()); ++d)
    if (std::find(sumdim.begin(), sumdim.end(), d) == sumdim.end()) left.push_back(all[static_cast<size_t>(d)]);
  return contiguous(left, i1);
}

}  // namespace kiln::aten::own
