#pragma once
#include "compiler/compile.h"
#include "joint/joint.h"
#include "joint/partition/partition.h"

namespace kiln::compiler {

/// Compiles a joint graph: graph passes, partition, `compiler` on each part. `eager`: the program itself, for a second
/// differentiation; may be null. The backward part is compiled at once too if one output alone can be differentiated,
/// else by what is asked for, at the first backward(): `compiler` may be called on a thread that holds no locks.
std::shared_ptr<runtime::CompiledFunction> compile_joint(joint::Joint joint, GraphCompiler compiler,
                                                         joint::PartitionMode mode, joint::Program eager = nullptr);

}  // namespace kiln::compiler
