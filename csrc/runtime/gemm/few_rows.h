#pragma once
#include "runtime/gemm/gemm.h"

// Products of a few rows with a matrix (a language model that writes word by word, a small batch). They take as long as
// reading the matrix does, so it is read where it is, once and in order.
namespace kiln::runtime::gemm {

constexpr int64_t kFewRows = 8;
/// Whether multiply_few_rows() takes it: rows of A contiguous, B contiguous along its rows or columns.
bool has_few_rows(int64_t m, const Matrix& a, const Matrix& b);
/// As multiply(); `workspace` holds few_rows_floats(m, n, k, b, threads) floats. The epilogue's rows_done is not
/// called.
void multiply_few_rows(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                       const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads);
/// Of b the strides count.
int64_t few_rows_floats(int64_t m, int64_t n, int64_t k, const Matrix& b, int threads);

/// C = A B + bias, all of one half type: rows of A contiguous and `row` elements apart, columns of B contiguous and
/// `line` apart, one number of `bias` (or null) for each column of C, which is row-major with leading dimension `ldc`.
struct HalfProduct {
  const uint16_t* a;
  int64_t row;
  const uint16_t* b;
  int64_t line;
  const uint16_t* bias;
  uint16_t* c;
  int64_t ldc;
};
/// At most kFewRows rows of bfloat16 (`brain`) or float16: sums are kept in float32 and rounded once. `workspace` holds
/// m * k floats.
void multiply_few_half_rows(bool brain, int64_t m, int64_t n, int64_t k, const HalfProduct& product, float* workspace,
                            const Parallel& parallel, int threads);

}  // namespace kiln::runtime::gemm
