#pragma once
#include "lower/lowering.h"

namespace kiln::lower {

Tensor zeros(const Lowering& l, DType t, const Sizes& sizes);

/// A nest that stores `value(point)` at `place(point)` of a copy of self. Points that differ in a dim for which
/// `apart(dim)` holds never meet in one place: those are the outer, parallel loops. The others run in order inside, so
/// that sums are formed, and the last write wins, as in eager. With `wide`, sums of half types are formed in float32.
bool scatter_into(Lowering& l, const Node& n, const Tensor& self, const Sizes& ranges, loops::StoreMode mode,
                  const std::function<bool(size_t dim)>& apart,
                  const std::function<std::vector<Expr>(Ops&, Index)>& place,
                  const std::function<Val(Ops&, Index)>& value,
                  const std::function<std::optional<Val>(Ops&, Index)>& condition = nullptr, bool wide = false);

}  // namespace kiln::lower
