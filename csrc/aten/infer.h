#pragma once
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "aten/schema.h"
#include "graph/graph.h"

namespace kiln::aten {

/// Metadata of the op's tensor results from kiln's own rules, without touching the dispatcher; nullopt if there is no
/// rule. `args` is the boxed call's stack, fakes and wrapped numbers. Throws c10::Error with PyTorch's words or close
/// to them where the op itself would (sizes that do not broadcast).
std::optional<std::vector<graph::TensorMeta>> infer(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

}  // namespace kiln::aten
