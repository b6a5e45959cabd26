#pragma once
#include "ops/rules/common.h"

// Products, convolutions, pooling, resampling, norms, attention.
namespace kiln::ops::rules {

Metas mm(const OpInfo& info, Args args);
Metas addmm(const OpInfo& info, Args args);
Metas bmm(const OpInfo& info, Args args);
Metas baddbmm(const OpInfo& info, Args args);
Metas addbmm(const OpInfo& info, Args args);
Metas mv(const OpInfo& info, Args args);
Metas addmv(const OpInfo& info, Args args);
Metas dot(const OpInfo& info, Args args);
Metas addr(const OpInfo& info, Args args);

Metas convolution(const OpInfo& info, Args args);
Metas convolution_backward(const OpInfo& info, Args args);

/// Pooling over `spatial` dims; Max: (self, kernel, stride, padding, dilation, ceil_mode).
Metas max_pool_nd(size_t spatial, Args args);
Metas avg_pool_nd(size_t spatial, Args args);
Metas adaptive_pool_nd(size_t spatial, bool indices, Args args);
template <size_t N>
Metas max_pool(const OpInfo&, Args args) {
  return max_pool_nd(N, args);
}
template <size_t N>
Metas avg_pool(const OpInfo&, Args args) {
  return avg_pool_nd(N, args);
}
template <size_t N, bool Indices>
Metas adaptive_pool(const OpInfo&, Args args) {
  return adaptive_pool_nd(N, Indices, args);
}
/// Like argument 1 in its suggested format if it has `spatial` + 2 dims, else row-major.
Metas pool_backward_nd(size_t spatial, Args args);
template <size_t N>
Metas pool_backward(const OpInfo&, Args args) {
  return pool_backward_nd(N, args);
}
Metas upsample_nd(size_t spatial, Args args);
Metas upsample_backward_nd(size_t spatial, Args args);
template <size_t N>
Metas upsample(const OpInfo&, Args args) {
  return upsample_nd(N, args);
}
template <size_t N>
Metas upsample_backward(const OpInfo&, Args args) {
  return upsample_backward_nd(N, args);
}
Metas contiguous_pool_backward(const OpInfo& info, Args args);
Metas contiguous_upsample_backward(const OpInfo& info, Args args);
Metas im2col(const OpInfo& info, Args args);
Metas col2im(const OpInfo& info, Args args);
Metas grid_sampler(const OpInfo& info, Args args);
Metas grid_sampler_backward(const OpInfo& info, Args args);
Metas affine_grid(const OpInfo& info, Args args);

Metas batch_norm(const OpInfo& info, Args args);
Metas batch_norm_no_stats(const OpInfo& info, Args args);
Metas batch_norm_functional(const OpInfo& info, Args args);
Metas batch_norm_update(const OpInfo& info, Args args);
Metas batch_norm_update_functional(const OpInfo& info, Args args);
Metas batch_norm_no_update(const OpInfo& info, Args args);
Metas batch_norm_inference(const OpInfo& info, Args args);
Metas batch_norm_backward(const OpInfo& info, Args args);
Metas batch_norm_backward_reserve(const OpInfo& info, Args args);
Metas layer_norm(const OpInfo& info, Args args);
Metas layer_norm_backward(const OpInfo& info, Args args);
Metas group_norm(const OpInfo& info, Args args);
Metas group_norm_backward(const OpInfo& info, Args args);
Metas weight_norm(const OpInfo& info, Args args);
Metas weight_norm_backward(const OpInfo& info, Args args);
Metas rms_norm(const OpInfo& info, Args args);
Metas rms_norm_backward(const OpInfo& info, Args args);

Metas flash_attention(const OpInfo& info, Args args);
Metas flash_attention_backward(const OpInfo& info, Args args);

Metas glu(const OpInfo& info, Args args);
Metas glu_backward(const OpInfo& info, Args args);
Metas prelu_backward(const OpInfo& info, Args args);
Metas cross(const OpInfo& info, Args args);
Metas encoder_layer(const OpInfo& info, Args args);

}  // namespace kiln::ops::rules
