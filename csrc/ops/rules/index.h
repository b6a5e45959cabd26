#pragma once
#include "ops/rules/common.h"

// Reads and writes at indices held in tensors.
namespace kiln::ops::rules {

Metas embedding(const OpInfo& info, Args args);
Metas embedding_backward(const OpInfo& info, Args args);
/// Bags, offset2bag, bag_size and max_indices, whose sizes depend on which kernel serves the call.
Metas embedding_bag(const OpInfo& info, Args args);
/// The dense gradient of the weight; Unsupported for a sparse one.
Metas embedding_bag_backward(const OpInfo& info, Args args);
Metas embedding_bag_weights_backward(const OpInfo& info, Args args);
/// index.Tensor with integer indices; bool masks make the size depend on data: Unsupported.
Metas index(const OpInfo& info, Args args);
/// A clone of self (index_put, index_fill).
Metas preserved_self(const OpInfo& info, Args args);
/// Row-major, like self (scatter, index_add).
Metas fresh_self(const OpInfo& info, Args args);
Metas index_select(const OpInfo& info, Args args);
Metas gather(const OpInfo& info, Args args);
Metas take(const OpInfo& info, Args args);
Metas masked_scatter(const OpInfo& info, Args args);
/// Ops whose result's size depends on elements: Unsupported, with a reason.
Metas data_dependent(const OpInfo& info, Args args);

}  // namespace kiln::ops::rules
