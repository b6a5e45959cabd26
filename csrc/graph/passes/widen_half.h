#pragma once
#include <functional>

#include "graph/graph.h"

namespace kiln::graph {

/// Whether ATen computes products and convolutions of a half type number by number on this machine, since neither it
/// nor oneDNN has vector code for them: float16 on x86 without AVX-512's float16 arithmetic, bfloat16 without AVX-512.
bool has_slow_products(DType dtype);

/// Whether the node copies a tensor of a half type into a wider one.
bool is_widening_copy(const Node& n);

/// Computes matrix products, convolutions, attention and their gradients of the types that are `slow` in float32 and
/// rounds what comes out: ATen keeps their sums in float32, too, so results differ in the order of sums alone. Products
/// of few rows with a matrix whose columns are dense stay: they take as long as reading the matrix. Attention with one
/// query is computed in float32 for both half types: kiln's own kernel reads keys and values once, ten times as fast as
/// ATen's. Runs on functional graphs. Returns true if it changed the graph.
bool widen_half(Graph& g, const std::function<bool(DType)>& slow);

}  // namespace kiln::graph
