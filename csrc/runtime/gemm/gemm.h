#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/gemm/ahead.h"

// Products of float32 matrices by kernels of our own, in two forms: the plain one, and one whose left rows are found
// through pointers, which is what a convolution over channels-last data is.
// Packing, register tiles and loop order after Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", ACM TOMS 34(3), 2008; rows through pointers after Dukhan, "The Indirect Convolution Algorithm",
// arXiv:1907.02129, 2019.
namespace kiln::runtime::gemm {

/// A float32 matrix in memory: element (i, j) at data[i * row + j * col]; strides in elements.
struct Matrix {
  const float* data;
  int64_t row, col;
};

/// Told that rows [begin, end) of C are final, by the thread that finished them, while other threads work on others.
using RowsDone = std::function<void(int64_t begin, int64_t end)>;

/// What happens to each element of the product before it is stored, and afterwards.
struct Epilogue {
  const float* bias = nullptr;  // one per column of C, added
  bool accumulate = false;      // C += A B instead of C = A B
  const RowsDone* rows_done =
      nullptr;  // called at most once for a row; never, where the product is not made row by row

  /// What is stored for `sum`, in this column, over `before`.
  float applied(float sum, float before, int64_t column) const {
    return sum + (accumulate ? before : 0.0f) + (bias ? bias[column] : 0.0f);
  }
};

/// Runs body(task) for task in [0, tasks), on any threads; returns when all are done.
using Parallel = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;
/// A Parallel of the calling thread alone.
void serial(int64_t tasks, const std::function<void(int64_t)>& body);

/// True where the host has the vector units that these kernels need (AVX2 with FMA, or AVX-512).
bool supported();

/// C (m x n, row-major, leading dimension ldc) = A (m x k) * B (k x n), both with any strides.
/// `workspace` holds workspace_floats(m, n, k, a, b, threads) floats, 64-byte aligned. Sums run in the order of k
/// within blocks of at most kMaxDepth, so the result differs from another library's by rounding only; a product that is
/// cut along k has other rounding for another number of threads.
void multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc, const Epilogue& epilogue,
              float* workspace, const Parallel& parallel, int threads);
/// Of a and b the strides count.
int64_t workspace_floats(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, int threads);
/// Whether m rows are so few that multiply() streams B as it lies, as fast as memory is: a copy packed once is no
/// better. Up to eight rows, it streams a B that would have to be packed first.
bool reads_b_once(int64_t m);

/// B packed once for many products (frozen weights): packed_floats(k, n) floats, 64-byte aligned.
int64_t packed_floats(int64_t k, int64_t n);
void pack(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel);
/// As multiply, with B as pack() left it; `workspace` holds packed_a_floats(m, n, k, a, threads)
/// floats.
void multiply_packed(int64_t m, int64_t n, int64_t k, Matrix a, const float* packed, float* c, int64_t ldc,
                     const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads);
int64_t packed_a_floats(int64_t m, int64_t n, int64_t k, const Matrix& a, int threads);

// --- the general form --------------------------------------------------------------------------------------------

/// Depth of one block of k at most: a panel of B of this depth stays in the second-level cache.
constexpr int64_t kMaxDepth = 512;

/// k cut into segments within which a row of A is contiguous (one tap of a convolution, say), grouped into blocks.
struct Depths {
  struct Segment {
    int64_t k;       // first index of k
    int64_t length;  // at most kMaxDepth
    int64_t tap;     // which run of k it belongs to
    int64_t offset;  // its start within that run
  };
  struct Block {
    int64_t k, depth, first_segment, segments;
  };
  std::vector<Segment> segments;
  std::vector<Block> blocks;
  int64_t k = 0;
  /// `taps` runs of `length` each.
  Depths(int64_t taps, int64_t length);
  /// The same, but each block has a part of all runs. taps <= kMaxDepth.
  static Depths taps_inside(int64_t taps, int64_t length);

 private:
  Depths() = default;
};

/// Where packed B's panels lie: block by block, panel by panel, depth * width floats each.
struct PackedB {
  int64_t n;
  explicit PackedB(int64_t n) : n(n) {}
  int64_t panels() const;
  int64_t first_column(int64_t panel) const;
  int64_t width(int64_t panel) const;    // a multiple of 16, or 8
  int64_t columns(int64_t panel) const;  // of B in it: the rest of the width is zeros
  int64_t at(const Depths::Block& block, int64_t panel) const;
};

/// Rows [begin, end) of C from `parts` summands, row-major and n wide, `step` floats apart: added up in their order.
void add_parts(const float* summands, int64_t step, int64_t parts, int64_t begin, int64_t end, int64_t n, float* c,
               int64_t ldc, const Epilogue& epilogue);

/// Rows per register tile.
int64_t tile_rows();

/// For rows [i, i + count) and those of the segments in which they are not all zeros: the address of row r's first
/// element of the q-th of these segments to out[q * kMaxTileRows + r], the segment's index to which[q]. Rows of zeros
/// point to zeros(). Returns how many segments these are.
using RowPointers = std::function<int64_t(int64_t i, int64_t count, const Depths::Segment* segments, int64_t how_many,
                                          const float** out, int64_t* which)>;
/// The addresses of rows [i, i + count) of C, to `out`.
using RowsOfC = std::function<void(int64_t i, int64_t count, float** out)>;
/// kMaxDepth zeros.
const float* zeros();

/// C = A B with the rows of A (elements of a segment contiguous) and of C through pointers, B packed.
void multiply_indirect(int64_t m, const Depths& depths, const RowPointers& rows, const PackedB& layout,
                       const float* packed, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                       const Parallel& parallel, int threads);

/// Where B's panels come from when they are packed on the way, by the task that multiplies them.
struct PanelSource {
  /// Writes one block of a panel, lines of layout.width(panel) floats.
  std::function<void(const Depths::Block& block, int64_t panel, float* to)> pack;
  /// What pack() will read.
  std::function<Ahead(const Depths::Block& block, int64_t panel, int64_t pieces)> ahead;
};
/// Whether that is better: where B (k x n) is too large for the caches, a packed copy of it would be written to memory
/// and read again. A, `a_floats` in memory, must stay in them instead, as all of it meets each panel.
bool packs_by_panel(int64_t n, int64_t k, int64_t a_floats, int threads);
/// As multiply_indirect; the epilogue's rows_done is not called.
void multiply_by_panel(int64_t m, const Depths& depths, const RowPointers& rows, const PackedB& layout,
                       const PanelSource& source, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                       const Parallel& parallel, int threads);

/// Packs `count` (<= width) vectors of length k: element (v, p) from src[v * vec + p * step] to dst[p * width + v]; the
/// rest of each line is zero.
void pack_panel(const float* src, int64_t vec, int64_t step, int64_t count, int64_t k, int64_t width, float* dst);

/// dst[c * dst_row + r] = src[r * src_row + c] for r < rows, c < cols.
void transpose(const float* src, int64_t src_row, int64_t rows, int64_t cols, float* dst, int64_t dst_row);

}  // namespace kiln::runtime::gemm
