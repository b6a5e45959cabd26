#pragma once
#include <cstdint>
#include <functional>

namespace kiln::runtime::gemm {

/// A float32 matrix in memory: element (i, j) at data[i * row + j * col]; strides in elements.
struct Matrix {
  const float* data;
  int64_t row, col;
};

/// What happens to each element of the product before it is stored.
struct Epilogue {
  const float* bias = nullptr;  // one per column of C, added
  bool accumulate = false;      // C += A B instead of C = A B
};

/// Runs body(task) for task in [0, tasks), on any threads; returns when all are done.
using Parallel = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;

/// C (m x n, row-major, leading dimension ldc) = A (m x k) * B (k x n), both with any strides.
/// `workspace` holds workspace_floats(m, n, k) floats, 64-byte aligned. float32 sums in the order of k within blocks of
/// at most 512, so the result differs from another library's by rounding only. Packing, micro-kernel and loop order
/// after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008.
void multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc, const Epilogue& epilogue,
              float* workspace, const Parallel& parallel, int threads);
int64_t workspace_floats(int64_t m, int64_t n, int64_t k);

/// B packed once for many products (frozen weights): packed_floats(k, n) floats.
int64_t packed_floats(int64_t k, int64_t n);
void pack(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel);
/// As multiply, with B as pack() left it.
void multiply_packed(int64_t m, int64_t n, int64_t k, Matrix a, const float* packed, float* c, int64_t ldc,
                     const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads);

/// True where the host has the vector units that these kernels need (AVX2 with FMA, or AVX-512).
bool supported();

}  // namespace kiln::runtime::gemm
