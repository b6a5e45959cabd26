#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "codegen/common/shape.h"
#include "schedule/schedule.h"

namespace kiln::codegen {

/// What stands before the lengths of rounds in a canonical text, as "16x4", of which a blank is the end.
constexpr std::string_view kRoundText = " by ";

/// Everything that decides a kernel's code, and nothing else: buffers by their place among the arguments, variables and
/// values renumbered, no names, no extent that comes as an argument. Kernels with equal texts share their code.
std::string canonical_text(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                           const KernelShape& shape);

}  // namespace kiln::codegen
