#pragma once
#include <optional>
#include <string>
#include <vector>

#include "aten/schema.h"

namespace kiln::aten {

/// Why eager refuses this call of an ATen operator, found by making it on small real tensors in place of the fakes:
/// dtypes that a kernel lacks, numbers and strings out of their range, sizes, memory that overlaps. Empty if eager
/// takes it, if it takes or refuses it depending on the elements, or if that cannot be found out cheaply. Large tensors
/// are asked about with sizes of 1, which tells of dtypes only. Leaves no trace: no random number is drawn, no warning
/// given.
std::string refused_by_eager(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

/// What such a call returns, found by making it on real tensors of the same sizes and strides: for operators that have
/// neither a shape rule nor a Meta kernel. Null if eager refuses the call, if the sizes of its results depend on the
/// elements, or if the tensors are too large to try. Leaves no trace either.
std::optional<std::vector<graph::TensorMeta>> results_in_eager(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

}  // namespace kiln::aten
