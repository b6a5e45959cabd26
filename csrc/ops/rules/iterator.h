#pragma once
#include <span>
#include <vector>

#include "ops/ops.h"

// Shape, dtype and strides of element-wise results, as ATen's TensorIterator chooses them.
namespace kiln::ops {

/// torch.result_type: tensors with dims win over 0-dim tensors, these over Python numbers, within one category of
/// dtypes. Numbers count as wrapped; None and undefined tensors are skipped.
DType result_type(std::span<const Arg> operands);

/// Broadcast of two shapes. Throws ShapeError in eager's words.
std::vector<int64_t> broadcast_sizes(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

/// Sizes and strides of the result over `inputs`. `common`: the dtype that inputs are cast to first, which makes a
/// dense copy of those that are not dense already (null: no casts).
TensorMeta iterate(std::span<const TensorMeta* const> inputs, DType result, const DType* common = nullptr);

/// The dtypes that an integer or bool argument becomes in ops that only make floats: the default dtype.
inline DType to_float(DType t) { return is_integral(t) ? default_dtype() : t; }

/// Strides that clone, to() and *_like take under preserve_format: the tensor's own if it is dense, else ones in the
/// same order of dims (infer_dense_strides).
std::vector<int64_t> preserved_strides(const TensorMeta& t);
/// Dense strides with the order of dims that (sizes, strides) has.
std::vector<int64_t> dense_strides_like(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

}  // namespace kiln::ops
