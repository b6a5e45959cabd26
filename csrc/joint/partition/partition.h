#pragma once
#include <memory>
#include <vector>

#include "graph/graph.h"
#include "joint/joint.h"

namespace kiln::joint {

/// A joint graph cut in two. The forward graph takes the primals, returns the joint graph's forward outputs and then
/// what is saved; the backward graph takes what is saved and then the tangents, and returns the gradients.
struct Parts {
  struct Saved {
    bool primal = false;  // input `index` of the forward graph itself; else its output `index`
    int64_t index = 0;
    int64_t shares = -1;  // output of the program in whose memory it lies, if it is none itself
  };
  std::unique_ptr<graph::Graph> forward, backward;
  std::vector<Saved> saved;  // one per leading placeholder of `backward`
};

enum class PartitionMode : uint8_t {
  SaveAll,  // keep whatever the backward reads; recompute views only
  MinCut,   // keep the fewest bytes from which cheap ops can make the rest again
};

/// Cuts `joint` (which has a backward) in two.
///
/// MinCut is a minimum cut in a flow network over the values that do not depend on tangents: each value is an edge of
/// capacity "bytes to keep it"; ops that may not run twice (random, products, convolutions, reductions, transcendental
/// functions, whatever a library call of the backward would need in memory anyway) hang on the source, ops that need
/// tangents on the sink. Among the minimum cuts the one nearest to the sink is taken: the least to compute again. The
/// idea is that of rematerialization by network flow (cut a DAG of values so that the stored ones separate inputs from
/// gradients), solved by Boykov and Kolmogorov's algorithm, "An Experimental Comparison of Min-Cut/Max-Flow Algorithms"
/// (PAMI 2004).
Parts partition(const Joint& joint, PartitionMode mode);

}  // namespace kiln::joint
