#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Results of calling `op` on graph values: ops::infer on their metadata. Throws Unsupported or ops::ShapeError.
std::vector<TensorMeta> infer(Op op, const std::vector<Arg>& args);

/// Appends a call whose results' metadata come from the op's shape rule. Throws as infer.
Node* add_inferred(Graph& g, Op op, std::vector<Arg> args, std::string name_hint = "");

/// A dimension counted from the front, of a tensor with `rank` of them.
inline int64_t wrap(int64_t dim, int64_t rank) { return dim < 0 ? dim + rank : dim; }

}  // namespace kiln::graph
