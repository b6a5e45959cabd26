#pragma once
#include <ATen/core/boxing/KernelFunction.h>

#include "graph/graph.h"

namespace kiln::aten {

/// The native C++ Meta kernel of `op`, to be called boxed on plain meta tensors; null if meta_kernels.def has no row.
const c10::KernelFunction* meta_kernel(graph::Op op);

}  // namespace kiln::aten
