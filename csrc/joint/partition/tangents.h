#pragma once
#include <memory>
#include <vector>

#include "graph/graph.h"
#include "joint/joint.h"

// What a backward graph is when some of its tangents are undefined: gradients of outputs that a backward() did not
// reach.
namespace kiln::joint {

/// By each of the `num_saved` leading placeholders of `backward`: the tangents whose gradients read it.
/// `reached_from` as in Joint.
std::vector<TangentSet> readers_of_saved(const graph::Graph& backward, size_t num_saved,
                                         const std::vector<TangentSet>& reached_from);

struct Narrowed {
  std::unique_ptr<graph::Graph> graph;
  std::vector<size_t> inputs;  // the placeholders of the whole graph that are left
};

/// The part of `backward` that runs when only the tangents in `defined` are there. As in eager, a gradient that none of
/// these reaches is undefined, one undefined summand is no summand, and any other use of an undefined gradient reads
/// zeros.
Narrowed narrow(const graph::Graph& backward, size_t num_saved, const TangentSet& defined,
                const std::vector<TangentSet>& reached_from);

}  // namespace kiln::joint
