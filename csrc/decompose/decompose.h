#pragma once
#include <span>
#include <string>
#include <vector>

#include "graph/graph.h"

// ATen -> a small set of ops that lowering has rules for (or that libraries run): normalizations, losses, lists of
// tensors, linear layers. Formulas are eager's; half types are computed in float32 and rounded where ATen rounds.
namespace kiln::decompose {

/// Rewrites g in place until no rule applies; returns true if anything changed. Outputs and mutated values keep their
/// metadata. The graph must be functional.
bool decompose(graph::Graph& g);
/// True if there is a rule for `op`.
bool has_rule(const graph::Op& op);

}  // namespace kiln::decompose
