#include "codegen/common/shape.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"
#include "base/round.h"
#include "schedule/nest_tools.h"

namespace kiln::codegen {

using loops::Expr;
using loops::Inst;
using loops::Nest;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

const char* const kDivisionByZero = "ZeroDivisionError";

namespace {

double inst_cost(const Inst& i) {
  switch (i.op) {
    case Opcode::ConstInt:
    case Opcode::ConstFloat:
    case Opcode::Project:
      return 0;
    case Opcode::Div:
    case Opcode::Sqrt:
    case Opcode::Rsqrt:
      return 4;
    case Opcode::Load:
    case Opcode::MaskedLoad:
    case Opcode::Store:
      return symbolic::has_indirect(i.index) ? 6 : 2;
    default:
      return loops::is_math(i.op) ? 15 : 1;
  }
}

int element_size(const Nest& nest) {
  int float_size = 0, int_size = 0;
  for (const Stage& s : nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = nest.insts[id];
      if (is_floating(i.dtype)) {
        const int size = std::max(4, dtype_size(i.dtype));
        float_size = float_size ? std::min(float_size, size) : size;
      } else if (i.op == Opcode::Load || i.op == Opcode::MaskedLoad || i.op == Opcode::Store) {
        const int size = std::max(4, dtype_size(i.dtype));
        int_size = int_size ? std::min(int_size, size) : size;
      }
    }
  return float_size ? float_size : int_size ? int_size : 4;
}

/// Adding stores whose lanes may hit one address must run one lane at a time.
bool lanes_conflict(const Nest& nest, const Stage& stage, int var) {
  for (ValueId id : stage.body) {
    const Inst& i = nest.insts[id];
    if (i.op != Opcode::Store || i.mode != loops::StoreMode::Add) continue;
    int64_t stride;
    Expr rest;
    if (!split_linear(i.index, var, stride, rest) || stride == 0) return true;
    bool lane_indirect = false;
    for_each_var(rest, [&](const symbolic::AtomNode& v) {
      if (v.var_kind != symbolic::VarKind::Indirect) return;
      // Conservative unless the index is plainly loaded from a place that does not move with the lanes.
      for (const Stage& s : nest.stages)
        for (ValueId other : s.body) {
          const Inst& bind = nest.insts[other];
          if (bind.op != Opcode::Indirect || bind.var != v.id) continue;
          ValueId source = bind.args[0];
          while (nest.insts[source].op == Opcode::Cast) source = nest.insts[source].args[0];
          const Inst& load = nest.insts[source];
          lane_indirect |= load.op != Opcode::Load || uses_var(load.index, var) || has_indirect(load.index);
        }
    });
    if (lane_indirect) return true;
  }
  return false;
}

int pick_unroll(const Nest& nest, const std::vector<const Stage*>& stages, int width, int64_t extent) {
  int insts = 0;
  bool reduces = false, math = false;
  for (const Stage* s : stages)
    for (ValueId id : s->body) {
      const Inst& i = nest.insts[id];
      insts += i.op != Opcode::ConstInt && i.op != Opcode::ConstFloat && i.op != Opcode::Project;
      reduces |= i.op == Opcode::Reduce;
      math |= loops::is_math(i.op);
    }
  int unroll = reduces ? (insts <= 16 ? 4 : insts <= 40 ? 2 : 1) : (insts <= 12 ? 2 : 1);
  if (math) unroll = reduces && insts <= 16 ? 2 : 1;
  while (unroll > 1 && static_cast<int64_t>(width) * unroll > extent) unroll /= 2;
  return unroll;
}

/// Lanes for a loop that is shorter than a vector: the next power of two.
int narrowed(int width, int64_t extent) {
  while (width > 1 && width / 2 >= extent) width /= 2;
  return width;
}

/// Whether the access jumps along `lane` and runs along `cross`, and is cheaper in tiles of both.
bool crosses(const Nest& nest, const Inst& i, int lane, int cross) {
  const bool store = i.op == Opcode::Store && i.mode == loops::StoreMode::Assign && i.args.size() == 1;
  if ((i.op != Opcode::Load && !store) || has_indirect(i.index)) return false;
  int64_t jump = 0, run = 0;
  Expr rest;
  if (!split_linear(i.index, lane, jump, rest) || !split_linear(rest, cross, run, rest) || run != 1) return false;
  // Few elements next to each other are loaded with what lies between, and stored so if they fill the gap.
  if (nest.extents[cross] < 4) return store && jump == nest.extents[cross];
  return jump < 0 || jump > (store ? 1 : schedule::kMostInterleaved);
}

/// Tiles load before they compute, and store after it: no later instruction may read what is stored, none before a load
/// may write what is loaded.
bool may_move(const Stage& s, const Nest& nest, size_t at) {
  const Inst& i = nest.insts[s.body[at]];
  for (size_t k = 0; k < s.body.size(); ++k) {
    const Inst& other = nest.insts[s.body[k]];
    if (other.buffer != i.buffer || k == at) continue;
    if (i.op == Opcode::Load ? other.op == Opcode::Store && k < at : k > at) return false;
  }
  return true;
}

/// The variable of `candidates` along which most accesses of `s` run that jump with the lanes; marks these.
int mark_crossing(const Nest& nest, const Stage& s, int lane, const std::vector<int>& candidates,
                  std::vector<bool>& crossing) {
  int best = -1;
  std::vector<ValueId> best_accesses;
  for (int v : candidates) {
    std::vector<ValueId> found;
    for (size_t k = 0; k < s.body.size(); ++k)
      if (crosses(nest, nest.insts[s.body[k]], lane, v) && may_move(s, nest, k)) found.push_back(s.body[k]);
    if (found.size() > best_accesses.size()) best = v, best_accesses = found;
  }
  for (ValueId id : best_accesses) crossing[id] = true;
  return best;
}

/// Whether an outer point may be computed again, by another unit: nothing that it reads is written, and all is there
/// when the first unit runs.
bool may_repeat(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers) {
  if (kernel.streamed >= 0) return false;
  const Nest& nest = kernel.nest;
  for (const schedule::KernelArg& a : kernel.args)
    if (a.place >= 0) return false;
  std::vector<loops::BufferId> read, written;
  for (const Stage& s : nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = nest.insts[id];
      if (i.buffer < 0 || buffers.at(i.buffer).kind == loops::BufferKind::Scratch) continue;
      if (i.op != Opcode::Store) {
        read.push_back(i.buffer);
      } else {
        if (i.mode != loops::StoreMode::Assign || has_indirect(i.index)) return false;
        written.push_back(i.buffer);
      }
    }
  return std::none_of(written.begin(), written.end(),
                      [&](loops::BufferId b) { return std::find(read.begin(), read.end(), b) != read.end(); });
}

bool reduces(const Nest& nest, const Stage& s) {
  return std::any_of(s.body.begin(), s.body.end(), [&](ValueId id) {
    return nest.insts[id].op == Opcode::Reduce || nest.insts[id].op == Opcode::Scan;
  });
}

/// A power of two, so that kernels of about the same cost are cut in the same way, and share their code.
int64_t rounds_near(double rounds) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max(1.0, rounds))));
}

int levels_for(int64_t rounds) {
  int levels = 0;
  for (; rounds > kStrip; rounds /= kStrip) ++levels;
  return levels;
}

/// Lets a unit run through about `rows` rows.
void gather_rows(KernelShape& shape, const Nest& nest, int64_t rows) {
  while (rows >= 2 && !shape.unit_vars.empty()) {
    const int v = shape.unit_vars.back();
    shape.unit_vars.pop_back();
    if (nest.extents[v] > rows) {
      shape.row_var = v;
      shape.row_block = rows;
      shape.row_blocks = ceil_div(nest.extents[v], rows);
      return;
    }
    shape.inner_vars.insert(shape.inner_vars.begin(), v);
    rows = rounds_near(static_cast<double>(rows) / static_cast<double>(std::max<int64_t>(nest.extents[v], 1)));
  }
}

}  // namespace

double point_cost(const Nest& nest) {
  double total = 0;
  for (const Stage& s : nest.stages) {
    double c = 0;
    for (ValueId id : s.body) c += inst_cost(nest.insts[id]);
    total += c * static_cast<double>(nest.stage_size(s)) + (s.vars.empty() ? 0 : 16);
  }
  return total;
}

KernelShape shape_of(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers, int simd_bits,
                     Lengths lengths) {
  const Nest& nest = kernel.nest;
  KernelShape shape;
  shape.lengths = lengths;
  shape.simd_bits = simd_bits;
  shape.width = std::max(1, simd_bits / 8 / element_size(nest));
  shape.unit_vars = nest.outer;
  shape.stage_width.assign(nest.stages.size(), 1);
  shape.stage_unroll.assign(nest.stages.size(), 1);
  shape.stage_cross.assign(nest.stages.size(), -1);
  shape.crossing.assign(nest.insts.size(), false);
  shape.overlaps.assign(nest.extents.size(), false);
  if (kernel.vectorize_outer && !nest.outer.empty()) {
    shape.lane_var = nest.outer.back();
    shape.unit_vars.pop_back();
    std::vector<const Stage*> all;
    bool conflict = false;
    for (const Stage& s : nest.stages) {
      all.push_back(&s);
      conflict |= lanes_conflict(nest, s, shape.lane_var);
    }
    const int64_t extent = nest.extents[shape.lane_var];
    const int width = conflict ? 1 : narrowed(shape.width, extent);
    int cross = -1;  // of a pointwise kernel
    if (width >= 4 && kernel.segments.empty())
      for (size_t k = 0; k < nest.stages.size(); ++k) {
        const Stage& s = nest.stages[k];
        const bool pointwise = schedule::is_pointwise(nest);
        if (s.vars.empty() && !pointwise) continue;
        const std::vector<int> candidates = pointwise ? shape.unit_vars : std::vector<int>{s.vars.back()};
        shape.stage_cross[k] = mark_crossing(nest, s, shape.lane_var, candidates, shape.crossing);
        if (pointwise) cross = shape.stage_cross[k];
      }
    if (cross >= 0) std::erase(shape.unit_vars, cross);
    int unroll = conflict ? 1 : pick_unroll(nest, all, width, extent);
    // Each part has tiles of its own. Two fetch pairs of lines, as the processor does on the side that jumps.
    if (cross >= 0)
      unroll = extent >= 2 * width ? 2 : 1;
    else if (shape.has_tiles())
      unroll = std::min(unroll, 2);
    std::fill(shape.stage_width.begin(), shape.stage_width.end(), width);
    std::fill(shape.stage_unroll.begin(), shape.stage_unroll.end(), unroll);
    const int64_t step = static_cast<int64_t>(width) * unroll;
    if (shape.has_tiles() && may_repeat(kernel, buffers)) {
      // What is done twice should be little.
      const auto overlaps = [&](int v, int64_t round) {
        const int64_t e = nest.extents[v];
        return e >= round && (lengths == Lengths::Any || ceil_div(e, round) * round * 8 <= e * 9);
      };
      shape.overlaps[shape.lane_var] = overlaps(shape.lane_var, step);
      for (size_t k = 0; k < nest.stages.size(); ++k)
        if (const int v = shape.stage_cross[k]; v >= 0)
          shape.overlaps[v] = overlaps(v, width) && !reduces(nest, nest.stages[k]);
    }
    // A unit is worth some microseconds, and is whole vectors.
    double lanes = std::max(1.0, 65536.0 / std::max(1.0, point_cost(nest)));
    if (cross >= 0) {
      // Few lines of the side that jumps at a time: they often lie in the same sets of a cache.
      constexpr int64_t kLines = 64;
      const bool all = nest.extents[cross] <= kLines * 3 / 2;
      shape.cross_block = !all ? kLines : shape.overlaps[cross] ? kLines * 3 / 2 : nest.extents[cross];
      shape.cross_blocks = ceil_div(nest.extents[cross], shape.cross_block);
      lanes /= static_cast<double>(shape.cross_block);
    }
    shape.block = step * rounds_near(lanes / static_cast<double>(step));
    // Small units fit to whatever block of rows is finished.
    if (kernel.streamed >= 0) shape.block = std::min(shape.block, std::max(step, 2048 / step * step));
    shape.blocks = ceil_div(extent, shape.block);
    if (shape.blocks == 1 && shape.cross_blocks == 1 && kernel.streamed < 0 && kernel.segments.empty())
      gather_rows(shape, nest, rounds_near(lanes / static_cast<double>(std::max<int64_t>(extent, 1))));
  } else {
    for (size_t k = 0; k < nest.stages.size(); ++k) {
      const Stage& s = nest.stages[k];
      if (s.vars.empty()) continue;
      bool scalar = lanes_conflict(nest, s, s.vars.back());
      for (ValueId id : s.body) scalar |= nest.insts[id].op == Opcode::Scan;
      const int64_t extent = nest.extents[s.vars.back()];
      shape.stage_width[k] = scalar ? 1 : narrowed(shape.width, extent);
      const int width = shape.stage_width[k];
      shape.stage_unroll[k] = scalar ? 1 : pick_unroll(nest, {&s}, width, extent);
      // Of two rounds and more, the code is good for all lengths.
      if (lengths == Lengths::Any && extent % width != 0 && extent < 2 * width * shape.stage_unroll[k])
        shape.stage_unroll[k] = 1;
    }
  }
  if (!kernel.segments.empty()) {
    // One code for any sizes: the block is the same for all, the extents come as arguments.
    shape.segmented = true;
    const int64_t step = static_cast<int64_t>(shape.width) * 2;
    const double lanes = std::max(1.0, 65536.0 / std::max(1.0, point_cost(nest)));
    shape.block = std::max<int64_t>(step, static_cast<int64_t>(lanes) / step * step);
    shape.args.push_back(static_cast<int64_t>(kernel.segments.size()));
    int64_t units = 0;
    for (int64_t extent : kernel.segments) {
      shape.args.push_back(units);
      units += ceil_div(extent, shape.block);
    }
    shape.args.push_back(units);
    shape.args.insert(shape.args.end(), kernel.segments.begin(), kernel.segments.end());
    shape.blocks = units;
    std::fill(shape.stage_unroll.begin(), shape.stage_unroll.end(), 1);
  }
  for (size_t k = 0; k < nest.stages.size(); ++k) {
    const Stage& s = nest.stages[k];
    int64_t rounds = s.vars.empty() ? 0 : nest.stage_size(s);
    if (rounds > 0 && shape.lane_var < 0) {
      const int64_t extent = nest.extents[s.vars.back()];
      rounds = rounds / extent * ceil_div(extent, static_cast<int64_t>(shape.stage_width[k]) * shape.stage_unroll[k]);
    }
    shape.stage_levels.push_back(levels_for(rounds));
  }
  shape.open.assign(nest.extents.size(), -1);
  shape.open_rest.assign(nest.extents.size(), false);
  shape.open_constant.assign(nest.insts.size(), -1);
  shape.units = shape.blocks * shape.cross_blocks * shape.row_blocks;
  for (int v : shape.unit_vars) shape.units *= nest.extents[v];
  int64_t lanes = shape.block;
  if (shape.lane_var >= 0 && !shape.segmented) lanes = std::min(lanes, nest.extents[shape.lane_var]);
  double points = static_cast<double>(lanes * shape.cross_block * shape.row_block);
  for (int v : shape.inner_vars) points *= static_cast<double>(nest.extents[v]);
  const double unit_cost = std::max(1.0, point_cost(nest) * points);
  shape.grain = std::max<int64_t>(1, static_cast<int64_t>(160000.0 / unit_cost));

  const auto error = [&](const std::string& message) {
    if (std::find(shape.errors.begin(), shape.errors.end(), message) == shape.errors.end())
      shape.errors.push_back(message);
  };
  for (const Stage& s : nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = nest.insts[id];
      if (is_complex(i.dtype) || dtype_kind(i.dtype) == 'o')
        throw Unsupported("kernels on " + std::string(dtype_name(i.dtype)));
      if (i.op == Opcode::Indirect) error(i.message);
      if (is_integral(i.dtype) && loops::divides(i.op)) error(kDivisionByZero);
      if (i.buffer >= 0 && buffers.at(i.buffer).kind == loops::BufferKind::Scratch &&
          shape.scratch_offset.emplace(i.buffer, shape.scratch_bytes).second) {
        const int64_t bytes = buffers[i.buffer].numel * dtype_size(buffers[i.buffer].dtype);
        shape.scratch_bytes += (bytes + 63) / 64 * 64;
      }
    }
  return shape;
}

Strips strips_of(const Nest& nest, const KernelShape& shape, size_t stage) {
  const std::vector<int>& vars = nest.stages[stage].vars;
  int64_t rounds = nest.extents[vars.back()];
  if (shape.lane_var < 0)
    rounds = ceil_div(rounds, static_cast<int64_t>(shape.stage_width[stage]) * shape.stage_unroll[stage]);
  if (rounds > kStrip || vars.size() < 2) return {-1, 0, rounds > kStrip};
  // The strip is of the loop outside of as many whole loops as are in one.
  Strips strips{static_cast<int>(vars.size()) - 2, 0, false};
  while (strips.at > 0 && rounds * nest.extents[vars[strips.at]] <= kStrip) rounds *= nest.extents[vars[strips.at--]];
  strips.length = rounds_near(static_cast<double>(kStrip) / static_cast<double>(rounds));
  return strips;
}

UnitSpans unit_spans(const schedule::Kernel& kernel, const KernelShape& shape) {
  constexpr int64_t kMostUnits = 1 << 16;
  const Nest& nest = kernel.nest;
  if (kernel.streamed < 0 || shape.segmented || shape.cross_block > 1 || shape.units > kMostUnits) return {};
  UnitSpans spans;
  spans.first.assign(shape.units, std::numeric_limits<int64_t>::max());
  spans.last.assign(shape.units, -1);
  for (const Stage& s : nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = nest.insts[id];
      if (i.buffer != kernel.streamed) continue;
      const auto index = i.op == Opcode::Load ? schedule::as_affine(i.index) : std::nullopt;
      if (!index) return {};
      std::vector<int64_t> stride(nest.extents.size(), 0);
      int64_t within = 0;  // what inner variables add at most
      for (const schedule::Digit& d : index->digits) {
        stride[d.var] = d.stride;
        if (std::find(nest.outer.begin(), nest.outer.end(), d.var) == nest.outer.end())
          within += d.stride * (nest.extents[d.var] - 1);
      }
      for (int64_t unit = 0; unit < shape.units; ++unit) {
        int64_t first = index->offset, last = within, rest = unit;
        if (shape.lane_var >= 0) {
          const int64_t lane = rest % shape.blocks * shape.block;
          rest /= shape.blocks;
          first += stride[shape.lane_var] * lane;
          last += stride[shape.lane_var] * (std::min(shape.block, nest.extents[shape.lane_var] - lane) - 1);
        }
        for (size_t k = shape.unit_vars.size(); k-- > 0;) {
          const int v = shape.unit_vars[k];
          first += stride[v] * (rest % nest.extents[v]);
          rest /= nest.extents[v];
        }
        spans.first[unit] = std::min(spans.first[unit], first);
        spans.last[unit] = std::max(spans.last[unit], first + last);
      }
    }
  if (!std::is_sorted(spans.first.begin(), spans.first.end()) || !std::is_sorted(spans.last.begin(), spans.last.end()))
    return {};
  return spans;
}

}  // namespace kiln::codegen
