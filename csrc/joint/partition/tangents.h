#pragma once
#include <compare>
#include <memory>
#include <vector>

#include "graph/graph.h"
#include "joint/joint.h"

// What a backward graph is when some of its tangents are undefined (gradients of outputs that a backward() did not
// reach), and when it is taken apart at the program's results.
namespace kiln::joint {

/// By each of the `num_saved` leading placeholders of `backward`: the tangents whose gradients read it.
/// `reached_from` as in Joint.
std::vector<TangentSet> readers_of_saved(const graph::Graph& backward, size_t num_saved,
                                         const std::vector<TangentSet>& reached_from);

struct Narrowed {
  std::unique_ptr<graph::Graph> graph;  // null if it cannot be taken apart as asked
  std::vector<size_t> inputs;           // the placeholders of the whole graph that are left
};

/// Which part of a backward graph.
struct Part {
  TangentSet defined;
  /// Tangents, of those in Joint::total_of, that stand for the whole gradient: what other tangents in `defined`
  /// contribute to it is left out.
  TangentSet cut;
  /// The outputs are what the tangents in `defined` contribute to those in `cut`, in order; not the primals' gradients.
  bool contributions = false;
  bool operator==(const Part&) const = default;
  std::weak_ordering operator<=>(const Part&) const = default;
};

/// The part of `backward` that runs when only the tangents in `part.defined` are there. As in eager, a gradient that
/// none of these reaches is undefined, one undefined summand is no summand, and any other use of an undefined gradient
/// reads zeros. The first `num_grads` outputs are the gradients of inputs; `reached_from` as in Joint.
Narrowed narrow(const graph::Graph& backward, size_t num_saved, const Part& part,
                const std::vector<TangentSet>& reached_from, size_t num_grads);

}  // namespace kiln::joint
