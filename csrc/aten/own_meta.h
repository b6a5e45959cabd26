#pragma once
#include <ATen/core/Tensor.h>

// Meta kernels of kiln's own, for operators whose only one in the dispatcher is a Python function: importing and
// running it takes a good part of a second the first time. Tensors are meta tensors; the results' strides are those of
// eager's CPU kernels. What eager refuses goes on to the dispatcher's kernel, which says so.
namespace kiln::aten::own {

at::Tensor fft_c2c(const at::Tensor& self, c10::SymIntArrayRef dim, int64_t normalization, bool forward);
at::Tensor fft_r2c(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, bool onesided);
at::Tensor fft_c2r(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, c10::SymInt last_dim_size);
at::Tensor cdist_forward(const at::Tensor& x1, const at::Tensor& x2, double p, std::optional<int64_t> compute_mode);
at::Tensor cdist_backward(const at::Tensor& grad, const at::Tensor& x1, const at::Tensor& x2, double p,
                          const at::Tensor& cdist);
at::Tensor pdist_forward(const at::Tensor& self, double p);
at::Tensor pdist_backward(const at::Tensor& grad, const at::Tensor& self, double p, const at::Tensor& pdist);
at::Tensor solve_triangular(const at::Tensor& self, const at::Tensor& b, bool upper, bool left, bool unitriangular);
at::Tensor pinv(const at::Tensor& self, const std::optional<at::Tensor>& atol, const std::optional<at::Tensor>& rtol,
                bool hermitian);
at::Tensor max_unpool2d(const at::Tensor& self, const at::Tensor& indices, c10::SymIntArrayRef output_size);
at::Tensor matrix_exp(const at::Tensor& self);
at::Tensor trilinear(const at::Tensor& i1, const at::Tensor& i2, const at::Tensor& i3, at::IntArrayRef expand1,
                     at::IntArrayRef expand2, at::IntArrayRef expand3, at::IntArrayRef sumdim, int64_t unroll_dim);

}  // namespace kiln::aten::own
