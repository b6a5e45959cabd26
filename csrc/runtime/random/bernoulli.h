#pragma once
#include <cstdint>

#include "base/dtype.h"

// Draws from ATen's default CPU generator, as ATen's kernels make them, without their pace of one number at a time.
namespace kiln::runtime::random {

/// Writes 1 with probability p, else 0, to `count` elements of `dtype` at `out`, and advances the generator as
/// at::bernoulli of that many elements does: the masks are the same. p in [0, 1].
void bernoulli(void* out, DType dtype, int64_t count, double p);

/// Whether `dtype` is served and ATen's masks are made as ours here; ATen built otherwise, or on another processor, may
/// take its numbers from elsewhere. Compares some draws when first asked.
bool serves_bernoulli(DType dtype);

}  // namespace kiln::runtime::random
