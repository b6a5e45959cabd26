#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Whether volume_convolutions() takes the node.
bool is_volume_convolution(const Node& n);

/// Rewrites float32 convolutions of volumes, transposed ones too, and their gradients, as those of pictures, for which
/// there are kernels of our own: a picture for each place along the depth, whose channels are those of all the slices
/// that the kernel reaches from there. Sizes and strides do not change, sums are made in another order. Runs on
/// functional graphs, after convert_to_channels_last, which gives such convolutions channels-last volumes. Returns true
/// if it changed the graph.
bool volume_convolutions(Graph& g);

}  // namespace kiln::graph
