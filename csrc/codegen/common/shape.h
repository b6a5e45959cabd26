#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "codegen/common/kernel.h"
#include "schedule/schedule.h"

// What every emitter has to know of a kernel before it writes code: how its outer domain is cut into parallel units,
// how wide vectors are, where scratch lies, which errors it can report.
namespace kiln::codegen {

/// Rounds that one accumulator adds up at most before it is added to one of the next level.
constexpr int64_t kStrip = 128;

struct KernelShape {
  int simd_bits = 512;  // registers of the target
  Lengths lengths = Lengths::Few;
  int width = 1;                  // lanes of the vector variable
  std::vector<int> stage_width;   // per stage (rows: a scan or a conflicting store makes it 1)
  std::vector<int> stage_unroll;  // parts per stage; with vectorize_outer all equal
  int lane_var = -1;              // vectorize_outer: the variable over lanes, if the domain has any
  int64_t block = 1;              // lanes of lane_var in one unit
  int64_t blocks = 1;
  /// Accesses that jump with the lanes but are contiguous in another variable (a transpose) are made in tiles of
  /// `width` by `width` elements, turned in registers. Per stage: that variable, a loop of the stage's or (pointwise)
  /// an outer one; -1: none. Per instruction: whether it is such an access.
  std::vector<int> stage_cross;
  std::vector<bool> crossing;
  bool has_tiles() const { return std::find(crossing.begin(), crossing.end(), true) != crossing.end(); }
  int64_t cross_block = 1;  // pointwise: elements of that outer variable in one unit
  int64_t cross_blocks = 1;
  /// Variables whose last round, of vectors or tiles, ends with the last element and does again what rounds before it
  /// did: one code for all rounds, in place of others for what is left over, where tiles make it long.
  std::vector<bool> overlaps;
  // Short rows: a unit holds many, so that finding its place costs little.
  int row_var = -1;  // the outer variable whose elements `row_block` at a time are one unit's, if any
  int64_t row_block = 1;
  int64_t row_blocks = 1;
  std::vector<int> inner_vars;  // outer variables that a unit runs through, outermost first
  std::vector<int> unit_vars;   // and that it fixes, outermost first (then row blocks, cross blocks, blocks)
  int64_t units = 1;
  int64_t grain = 1;
  std::map<loops::BufferId, int64_t> scratch_offset;  // bytes into scratch, of buffers that lie there
  int64_t scratch_bytes = 0;
  bool segmented = false;
  /// Levels above a stage's accumulators with which none adds up much more than kStrip rounds.
  std::vector<int> stage_levels;
  /// Variables whose extent is not in the code but comes as args[open[v]], if it is not -1: one code serves all batch
  /// sizes and lengths.
  std::vector<int> open;
  int open_blocks = -1, open_cross_blocks = -1, open_row_blocks = -1;  // where in args these are, if they are open
  /// Open variables over lanes of which the code does not know either what a last round is short of, only that it is
  /// short of something.
  std::vector<bool> open_rest;
  /// By instruction: constants that come as args[open_constant[id]] (a float as the bits of a float64, of two the
  /// second one after it), if it is not -1.
  std::vector<int> open_constant;
  /// segmented: count n, first unit of each segment and the total (n + 1), extents (n). Else what `open` and the
  /// symbolic sizes of a generalized kernel stand for.
  std::vector<int64_t> args;
  std::vector<std::string> errors;  // messages; code k is errors[k - 1]
};

/// The extents of which a kernel's code is independent become arguments (KernelShape::open, args), and so do, in its
/// indices, the strides of the outer variables that lanes do not run along: as symbolic sizes s<k>, of value args[k].
/// Equal strides become one argument, since code may depend on their being equal. So do constants that sizes make (a
/// count that a sum is divided by, a position). After shape_of and unit_spans.
void generalize(schedule::Kernel& kernel, KernelShape& shape);

KernelShape shape_of(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers, int simd_bits,
                     Lengths lengths = Lengths::Few);

/// Which part of Kernel::streamed each unit loads; empty if there is none, if a load of it is masked or its index no
/// sum of multiples of loop variables, or if the units do not walk through it in order.
UnitSpans unit_spans(const schedule::Kernel& kernel, const KernelShape& shape);

/// Where the sums of a stage's loops are cut into strips, after which accumulators are added to the next level
/// (KernelShape::stage_levels): the loop over vars[at] every `length` rounds, or, where that is -1, the innermost one
/// if it is `within`.
struct Strips {
  int at = -1;
  int64_t length = 0;
  bool within = false;
};
Strips strips_of(const loops::Nest& nest, const KernelShape& shape, size_t stage);

/// Rough cost of one outer point, in scalar-operation units.
double point_cost(const loops::Nest& nest);

/// Message of the error that integer division by zero reports.
extern const char* const kDivisionByZero;

}  // namespace kiln::codegen
