#pragma once
#include <ATen/FunctionalTensorWrapper.h>

// What kernels of functionalization do with their arguments: kiln's own for operators that PyTorch's do not fit.
namespace kiln::aten {

/// The value that `t` has now, below functionalization; `t` itself if it is not functional.
inline at::Tensor value_below(const at::Tensor& t) {
  namespace fn = at::functionalization::impl;
  if (!t.defined() || !fn::isFunctionalTensor(t)) return t;
  fn::sync(t);
  return fn::from_functional_tensor(t);
}

/// Makes `value` that of a functional tensor and of what it is a view of.
inline void write_below(const at::Tensor& functional, const at::Tensor& value) {
  namespace fn = at::functionalization::impl;
  fn::replace_(functional, value);
  fn::commit_update(functional);
  fn::sync(functional);
}

}  // namespace kiln::aten
