#pragma once
#include "graph/graph.h"

namespace kiln::graph {

/// Spells arithmetic on complex tensors, and what moves their elements, with the operators of real ones: kernels know
/// no complex numbers. Formulas are ATen's, also for infinities and NaN: a real operand has an imaginary part of zero.
/// Other operators (Fourier transforms, matrix products), outputs and mutations get complex tensors as before, made by
/// aten::complex where the parts are computed.
bool split_complex(Graph& g);

}  // namespace kiln::graph
