#pragma once
#include "graph/graph.h"

// Clean-up passes over functional graphs, one a file. Each returns true if it changed the graph. None changes what the
// graph returns, the strides of a result, which results share storage, or the order of random numbers.
namespace kiln::graph {

/// Whether a call is made though nobody uses its results: it draws random numbers, may refuse the elements that it
/// gets, or has no results at all (a check).
bool runs_unused(const Node& n);
/// Whether a call may raise for the elements that it gets; the shapes were checked when it was traced.
bool may_raise(const Node& n);

/// Removes calls whose results nobody uses. Those that runs_unused names stay, and so do ops that the table does not
/// know (they may have effects).
bool eliminate_dead_code(Graph& g);

/// Merges calls of one op on equal arguments. Not random ops, and not two values that are both returned: the caller may
/// write to one of them.
bool eliminate_common_subexpressions(Graph& g);

/// Puts numbers in the place of tensors that hold one number only (full, ones_like, their views and casts) where an
/// element-wise op reads them and the number is exact in their dtype; drops x * 1, x / 1, x - 0.
bool fold_constants(Graph& g);

/// Shortens chains of views: a view that ends where an earlier member of its chain was becomes that member; a view of a
/// view and a permutation of a permutation become one.
bool simplify_views(Graph& g);

/// Removes clones and casts that change neither dtype nor layout, and casts to a wider dtype and back.
bool remove_redundant_copies(Graph& g);

/// Folds batch normalizations by stored statistics into the convolution before them, where all that is involved is
/// frozen. Rounding differs; for inference.
bool fold_norms(Graph& g);

/// Has the products of a backward read what is cheap to compute from values that are there until then anyway (an
/// activation function's results, a normalization's) from copies of those nodes, so that the originals die with the
/// forward. For graphs that hold a forward and its backward; where they are two, the partitioner chooses.
bool recompute_operands(Graph& g);

/// The clean-up passes, in a good order, each through run_pass as "graph.<name>".
bool clean_up(Graph& g);

/// The value whose storage `v` lies in: what it is a view of, through any number of views.
Value storage_root(Value v);
/// Nodes whose results leave the graph: returned or stored into an input, directly (true) or through views only
/// (false).
std::unordered_map<const Node*, bool> escaping(const Graph& g);
/// True if `v` may take the place of `old`, which is `v`'s equal in value: metadata agree, and no two results that
/// leave the graph come to share storage, nor one with an input.
bool may_replace(const Value& old, const Value& v, const std::unordered_map<const Node*, bool>& escapes);

}  // namespace kiln::graph
