#pragma once
#include "joint/joint.h"

namespace kiln::joint {

/// Removes nodes that nothing needs. Random ops stay: eager draws their numbers too.
bool remove_dead(graph::Graph& g);

/// After all passes that may merge values: gives every forward output memory of its own by an aten::clone where two
/// outputs, or an output and an input, constant or changed input, would share one. (Outputs that alias in eager are one
/// forward output here.)
bool separate_outputs(Joint& joint);

}  // namespace kiln::joint
