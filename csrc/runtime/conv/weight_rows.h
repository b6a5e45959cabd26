#pragma once
#include <vector>

#include "runtime/conv/conv.h"

// How sums of products become the gradient of a weight, which may lie in memory in any order.
namespace kiln::runtime::conv {

/// A row of a sum of products, and where in the gradient it goes: the place of its first element.
struct SumRow {
  int64_t place;
  const float* data;
};

/// Writes `rows` as columns, sorting them by place: element j of a row, of `cols`, to to[place + j * step].
void write_columns(std::vector<SumRow>& rows, int64_t cols, float* to, int64_t step);

/// Of a sum over a part of the pixels, laid out as the gradient is.
int64_t partial_floats(const Shape& s);
/// Adds the sums over all parts but the first, which is in dweight.
void add_partials(const Shape& s, const float* partials, int64_t parts, float* dweight, const gemm::Parallel& parallel);

}  // namespace kiln::runtime::conv
