#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "graph/graph.h"

namespace kiln::compiler {

/// A graph in two: what depends on frozen inputs alone, and the rest.
struct FrozenSplit {
  std::unique_ptr<graph::Graph> prologue;  // its outputs are the values that the rest needs of it
  std::unique_ptr<graph::Graph> rest;      // inputs: those of the graph that it uses, then the prologue's outputs
  std::vector<size_t> prologue_inputs;     // numbers of the graph's inputs
  std::vector<size_t> rest_inputs;
};

/// Splits a functional graph; nullopt if nothing but views hangs on frozen inputs alone. What the graph returns is
/// never part of the prologue: the caller gets memory of his own.
std::optional<FrozenSplit> split_frozen(const graph::Graph& g);

}  // namespace kiln::compiler
