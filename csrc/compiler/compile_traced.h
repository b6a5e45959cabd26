#pragma once
#include "compiler/compile.h"
#include "joint/joint.h"
#include "joint/partition/partition.h"

namespace kiln::compiler {

/// What a compiler of the parts counts on: `Free`, it makes the strides that the graph says (kiln's own), so that
/// values may be laid out for fast kernels; `Traced`, it calls operators as they were traced, whose results have the
/// strides that ATen gives them (compilers written in Python).
enum class Strides { Free, Traced };

/// Compiles a joint graph: graph passes, partition, `compiler` on each part. `eager`: the program itself, for a second
/// differentiation; may be null. The backward part is compiled at once too if one output alone can be differentiated,
/// else by what is asked for, at the first backward(): `compiler` may be called on a thread that holds no locks.
std::shared_ptr<runtime::CompiledFunction> compile_joint(joint::Joint joint, GraphCompiler compiler,
                                                         joint::PartitionMode mode, joint::Program eager = nullptr,
                                                         Strides strides = Strides::Free);

}  // namespace kiln::compiler
