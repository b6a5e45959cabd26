#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Lays the activations of float32 2-d convolutions out channels-last, and those of 3-d ones that become 2-d
/// (volume_convolutions): convolutions get channels-last inputs (cloned
/// where they are not), and every later value takes the strides that its op's shape rule then gives. Values that the
/// graph returns get the strides back that they had. Sizes and values do not change. Runs on functional graphs, before
/// the partition, so that saved activations keep the layout. Returns true if the graph has such a convolution.
bool convert_to_channels_last(Graph& g);

}  // namespace kiln::graph
