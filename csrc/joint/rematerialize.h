#pragma once
#include "graph/graph.h"

namespace kiln::joint {

/// Has the backward nodes of a joint graph read what a checkpointed call computed (Node::checkpoint) from copies of its
/// nodes, each placed before the first backward node that needs it, so that the originals die with the forward. Kept
/// are what the call returned or wrote, random draws (0-or-1 ones as bools), and what no op table tells about. As
/// torch.utils.checkpoint does it, after Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
bool rematerialize(graph::Graph& g);

}  // namespace kiln::joint
