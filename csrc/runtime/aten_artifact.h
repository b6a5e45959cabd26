#pragma once
#include "runtime/compiled_graph.h"
#include "runtime/plan.h"

namespace kiln::runtime {

/// Runs every node of a functional graph by its own ATen kernel (option codegen=false, and what bisection compares
/// with). Throws Unsupported for an op that the dispatcher does not have.
std::shared_ptr<Artifact> aten_artifact(const graph::Graph& g);

}  // namespace kiln::runtime
