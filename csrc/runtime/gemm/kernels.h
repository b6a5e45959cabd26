#pragma once
#include <cstdint>

// Register tiles of the matrix product: the only code that is written for one vector unit.
namespace kiln::runtime::gemm {

/// Shape of the register tile: `mr` rows of A by `nr` columns of B.
struct Tile {
  int64_t mr, nr;
};
constexpr int64_t kMaxTileRows = 12, kMaxTileColumns = 64;
Tile tile();
/// Rows of the tile for panels of at most `width` columns: more than tile().mr where so few columns would leave the
/// multipliers waiting. At least tile().mr, at most kMaxTileRows.
int64_t tile_rows_for(int64_t width);
bool has_avx512();

/// Left operand of a tile: `segments` runs of `lengths[s]` steps; row i of run s starts at rows[s * kMaxTileRows + i]
/// and advances by `step` elements a step. Run s meets the panel from step starts[s] on; without `starts`, the runs
/// follow each other in the panel.
struct Left {
  int64_t segments;
  const int64_t* lengths;
  const float* const* rows;
  int64_t step;
  const int64_t* starts = nullptr;
};

/// The tile's place in C and what to add on the way.
struct Store {
  float* const* c;  // one pointer a row
  int64_t first;    // of the tile's columns
  int64_t cols;     // columns that exist
  const float* bias;
  bool accumulate;
};

/// Multiplies a tile: rows of `left` by a packed panel `b` (`width` floats a step, 64-byte aligned).
using Micro = void (*)(const Left& left, const float* b, const Store& s);
/// Width of the panel for at most so many columns.
constexpr int64_t kNarrowWidth = 8;
/// The kernel for this many rows (1 .. tile_rows_for(width)) and this panel width (kNarrowWidth, 16, 32, ..
/// tile().nr).
Micro micro_for(int64_t rows, int64_t width);

/// Transposes a 16 x 16 block.
void transpose16(const float* src, int64_t src_row, float* dst, int64_t dst_row);

/// Packs `lines` lines of 6 * tiles floats, `step` apart, into tiles of 6 columns: line p of tile t to
/// dst + (t * depth + p) * 6. With `more`, further lines follow behind these in `src` and in each tile: the two floats
/// behind the last six may be read and, in `dst`, be written.
void pack_sixes(const float* src, int64_t step, int64_t lines, int64_t tiles, int64_t depth, bool more, float* dst);

}  // namespace kiln::runtime::gemm
