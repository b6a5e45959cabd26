#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Rewrites float32 1-d convolutions, and their gradients, as 2-d ones of pictures with one row, which kernels of our
/// own serve. Sizes, strides and values do not change. Runs on functional graphs, before convert_to_channels_last.
/// Returns true if the graph has such a convolution.
bool lift_convolutions(Graph& g);

}  // namespace kiln::graph
