#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Whether patch_convolutions() takes the node.
bool is_patch_convolution(const Node& n);

/// Rewrites float32 convolutions whose windows tile the input (a vision transformer's patch embedding), and their
/// gradients, as matrix products of the windows, where channels are few: in two and three dims, and in one that
/// lift_convolutions made two. Sizes and strides do not change, sums are made in another order. Runs on functional
/// graphs, after convert_to_channels_last. Returns true if it changed the graph.
bool patch_convolutions(Graph& g);

}  // namespace kiln::graph
