#pragma once
#include <functional>

#include "graph/graph.h"

namespace kiln::graph {

/// Has the backward nodes of a graph read what nodes compute for which `again` holds from copies of these nodes
/// (Node::recomputed), placed before the first backward node that needs them. What is `again` itself keeps what it
/// reads. `kept`, if given, says what stands before a backward node or a copy in the place of any other value.
/// Returns whether the graph has changed.
bool recompute_for_backward(Graph& g, const std::function<bool(const Node*)>& again,
                            const std::function<Value(Value v, Node* before)>& kept = nullptr);

}  // namespace kiln::graph
