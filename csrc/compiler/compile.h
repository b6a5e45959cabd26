#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "runtime/compiled_graph.h"

// The stages in order. compile.cpp is the newcomer's map of the compiler.
namespace kiln::compiler {

/// Compiles one functional ATen graph (decompose -> lower -> loops -> schedule -> codegen). `inference`: no autograd
/// will ever run through it and parameters may be frozen. Throws Unsupported or InternalError.
std::shared_ptr<runtime::Artifact> compile_functional(const graph::Graph& g, bool inference);

/// Makes artifacts of functional graphs. Custom AOT compilers (kiln.aot.aot_module_simplified) and the default backend
/// have this one form; `which` is "forward", "backward" or "inference".
using GraphCompiler =
    std::function<std::shared_ptr<runtime::Artifact>(const graph::Graph& g, const std::string& which)>;

/// Compiles a traced graph (ATen ops above autograd, may mutate its inputs, may hold kiln::backward) for inputs like
/// `examples`: joint trace, functionalization, partition, and `compiler` on each part. The default compiler is
/// compile_functional. The graph's outputs must all be tensors or None.
std::shared_ptr<runtime::CompiledFunction> compile_traced(const graph::Graph& traced,
                                                          const std::vector<at::Tensor>& examples,
                                                          GraphCompiler compiler = nullptr);

}  // namespace kiln::compiler
