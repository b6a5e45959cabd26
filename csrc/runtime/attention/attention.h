#pragma once
#include <cstdint>

#include "runtime/gemm/gemm.h"

// Scaled dot-product attention of float32 tensors and its gradient, blockwise, without the matrix of all scores in
// memory. After Dao et al., "FlashAttention", NeurIPS 2022 (online softmax of Milakov and Gimelshein,
// arXiv:1805.02867).
namespace kiln::runtime::attention {

/// A [batch, heads, length, head_size] tensor; strides in elements, elements of a head contiguous.
template <class T>
struct Tensor4 {
  T* data;
  int64_t batch, head, row;
  T* at(int64_t b, int64_t h, int64_t i = 0) const { return data + b * batch + h * head + i * row; }
};
using In = Tensor4<const float>;
using Out = Tensor4<float>;

/// Logarithms of the rows' softmax sums, [batch, heads, queries]; strides in elements.
struct RowSums {
  float* data;
  int64_t batch, head, row;
  float& at(int64_t b, int64_t h, int64_t i) const { return data[b * batch + h * head + i * row]; }
};

/// Numbers added to the scaled scores, [batch, heads, queries, keys]; strides in elements, 0 along a broadcast
/// dimension, 0 or 1 along keys. A query whose scores are all -inf gets zeros.
struct Mask {
  const float* data = nullptr;  // nullptr: no mask
  int64_t batch = 0, head = 0, row = 0, key = 0;
  const float* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return data + b * batch + h * head + i * row + j * key;
  }
};

/// key/value heads divide query heads (grouped-query attention). causal: query i sees keys 0..i.
struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, head_size;
  float scale;
  bool causal;
};

/// True where the host has a vector unit that these kernels are written for (gemm::supported()), and the shape is one
/// they serve: head_size at most 256, no empty dimension, and not a few queries for many keys.
bool supported(const Shape& s);

/// out = softmax(scale * q k^T + mask) v; also writes the rows' log-sum-exp, unless lse.data is nullptr.
void forward(const Shape& s, In q, In k, In v, Mask mask, Out out, RowSums lse, const gemm::Parallel& parallel);

/// Gradients of q, k and v from that of out; `out` and `lse` as forward left them.
void backward(const Shape& s, In grad_out, In q, In k, In v, Mask mask, In out, RowSums lse, Out grad_q, Out grad_k,
              Out grad_v, const gemm::Parallel& parallel);

}  // namespace kiln::runtime::attention
