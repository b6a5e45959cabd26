#pragma once
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/function.h>

#include <utility>
#include <vector>

namespace kiln::runtime {

/// Edges that were taken out of a node, with their places.
using TakenEdges = std::vector<std::pair<size_t, torch::autograd::Edge>>;

/// Takes out of `edges`, those of a node that the engine is running, what passes no gradient on: where `gradients` has
/// an undefined one and the node behind the edge gets none from elsewhere, that node is not run, nor what only it leads
/// to. In eager, where each result has a graph of its own, no such edge is in the graph, and hooks there are not
/// called; a hook that is called is given None. `passes`: eager's graph has the edge, and passes no gradient on. Edges
/// stay where the engine would have to start a node that got its gradients before. Gives what was taken: it must be put
/// back before the next backward.
TakenEdges take_silent_edges(torch::autograd::edge_list& edges, const torch::autograd::variable_list& gradients,
                             c10::function_ref<bool(size_t)> passes);

}  // namespace kiln::runtime
