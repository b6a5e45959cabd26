#pragma once
#include "lower/lowering.h"

namespace kiln::lower {

Tensor zeros(const Lowering& l, DType t, const Sizes& sizes);

/// Stores at computed places: value(p) at place(p), an index of the tensor, for each point p of `ranges`.
struct Scattering {
  Sizes ranges;
  loops::StoreMode mode;
  /// Whether points that differ in this dim never meet in one place: those are the outer, parallel loops. The others
  /// run in order inside, so that sums are formed, and the last write wins, as in eager.
  std::function<bool(size_t dim)> apart;
  std::function<std::vector<Expr>(Ops&, Index)> place;
  std::function<Val(Ops&, Index)> value;
  /// Whether to store at all. Null: always.
  std::function<std::optional<Val>(Ops&, Index)> condition = nullptr;
  bool wide = false;   // sums of half types are formed in float32
  bool whole = false;  // what is read for a place differs between points that are `apart`, too
};
/// A nest that stores into a copy of self, or into place().
bool scatter_into(Lowering& l, const Node& n, const Tensor& self, const Scattering& s);

}  // namespace kiln::lower
