#pragma once
#include <string>

#include "aten/schema.h"

namespace kiln::aten {

/// Why eager refuses this call of an ATen operator, found by making it on small real tensors in place of the fakes:
/// dtypes that a kernel lacks, numbers and strings out of their range, sizes, memory that overlaps. Empty if eager
/// takes it, if it takes or refuses it depending on the elements, or if that cannot be found out cheaply. Large tensors
/// are asked about with sizes of 1, which tells of dtypes only. Leaves no trace: no random number is drawn, no warning
/// given.
std::string refused_by_eager(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

}  // namespace kiln::aten
