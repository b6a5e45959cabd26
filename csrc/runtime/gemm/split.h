#pragma once
#include "runtime/gemm/gemm.h"

// Products of float32 matrices by a unit that multiplies bfloat16: each number is cut into three bfloat16, whose sum it
// is exactly, and six of the nine products of parts are added up in float32. What is left out is below the rounding of
// a float32 product; where numbers are too large, too small or not finite for that, a block is multiplied without the
// unit. After Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations", ARITH 2019 (arXiv:1904.06376).
namespace kiln::runtime::gemm {

/// Whether the host has such a unit (amx::supported()), and products of this size are faster on it.
bool splits(int64_t m, int64_t n, int64_t k);

/// As multiply(), for m, n, k > 0, on a host with the unit; rows_done may not be called. `workspace` holds
/// split_workspace_floats(n, k) floats, 64-byte aligned.
void multiply_split(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                    const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads);
int64_t split_workspace_floats(int64_t n, int64_t k);

/// B packed once for many products (frozen weights): split_floats(k, n) floats, 64-byte aligned.
int64_t split_floats(int64_t k, int64_t n);
void pack_split(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel);
/// As multiply_split, with B, which is still read where its numbers are not for the unit, as pack_split() left it.
void multiply_split_packed(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, const float* packed, float* c,
                           int64_t ldc, const Epilogue& epilogue, const Parallel& parallel, int threads);

}  // namespace kiln::runtime::gemm
