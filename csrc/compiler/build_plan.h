#pragma once
#include "codegen/common/kernel.h"
#include "lower/lower.h"
#include "runtime/plan.h"
#include "schedule/schedule.h"

namespace kiln::compiler {

/// Puts a lowered graph, its schedule, memory plan and compiled kernels together into what an artifact runs.
runtime::Plan build_plan(const std::string& name, const lower::Lowered& lowered, const schedule::Plan& schedule,
                         const schedule::MemoryPlan& memory, std::vector<codegen::CompiledKernel> kernels);

}  // namespace kiln::compiler
