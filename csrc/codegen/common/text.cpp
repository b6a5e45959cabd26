#include "codegen/common/text.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace kiln::codegen {

using loops::Stage;

std::string canonical_text(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                           const KernelShape& shape) {
  std::unordered_map<loops::BufferId, std::string> names;
  std::string head = kernel.vectorize_outer ? "columns" : "rows";
  const size_t pointers = kernel.segments.empty() ? kernel.args.size() : kernel.args.size() / kernel.segments.size();
  if (!kernel.segments.empty()) head += " segments";
  if (kernel.streamed >= 0) head += " streamed";
  for (size_t k = 0; k < pointers; ++k) {
    const schedule::KernelArg& a = kernel.args[k];
    std::string& name = names[a.buffer] = "b" + std::to_string(k);
    head += " " + name + ":" + std::string(dtype_name(buffers.at(a.buffer).dtype)) + (a.written ? "w" : "r");
  }
  for (size_t k = 0; k < pointers; ++k)
    if (kernel.args[k].place >= 0) head += " " + names.at(kernel.args[k].buffer) + "@" + names.at(kernel.args[k].place);
  int scratch = 0;
  for (const Stage& s : kernel.nest.stages)
    for (loops::ValueId id : s.body) {
      const loops::BufferId b = kernel.nest.insts[id].buffer;
      if (b < 0 || buffers[b].kind != loops::BufferKind::Scratch || names.contains(b)) continue;
      const std::string& name = names[b] = "$" + std::to_string(scratch++);
      // Where each begins is in the code.
      head += " " + name + ":" + std::string(dtype_name(buffers[b].dtype)) + "+" +
              std::to_string(shape.scratch_offset.at(b));
    }
  loops::Nest nest = kernel.nest;
  nest.name.clear();
  if (!kernel.segments.empty()) std::fill(nest.extents.begin(), nest.extents.end(), 0);
  // What comes as an argument is not in the code; how it is cut up is.
  for (size_t v = 0; v < shape.open.size(); ++v)
    if (shape.open[v] >= 0) {
      nest.extents[v] = 0;
      head += " open i" + std::to_string(v) + "=s" + std::to_string(shape.open[v]);
    }
  for (const Stage& s : nest.stages)
    for (loops::ValueId id : s.body) {
      loops::Inst& i = nest.insts[id];
      if (i.op == loops::Opcode::Indirect)  // the code returns the message's number
        i.message =
            std::to_string(std::find(shape.errors.begin(), shape.errors.end(), i.message) - shape.errors.begin());
      if (const int k = shape.open_constant[id]; k >= 0) {
        i.imm = i.imm2 = 0;
        i.fimm = 0;
        head += " %" + std::to_string(id) + "=s" + std::to_string(k);
      }
    }
  if (shape.units > std::numeric_limits<int32_t>::max()) head += " many units";
  if (shape.open_blocks >= 0) head += " blocks=s" + std::to_string(shape.open_blocks);
  if (shape.open_cross_blocks >= 0)
    head += " tiles=s" + std::to_string(shape.open_cross_blocks) + " of " + std::to_string(shape.cross_block);
  if (shape.open_row_blocks >= 0) head += " rows=s" + std::to_string(shape.open_row_blocks);
  if (shape.open_blocks >= 0 || shape.blocks > 1) head += " block " + std::to_string(shape.block);
  head += " row " + std::to_string(shape.row_var) + " " + std::to_string(shape.row_block) + " inner";
  for (int v : shape.inner_vars) head += " " + std::to_string(v);
  for (size_t k = 0; k < nest.stages.size(); ++k) {
    const Stage& s = nest.stages[k];
    const int64_t step = static_cast<int64_t>(shape.stage_width[k]) * shape.stage_unroll[k];
    const auto rest = [&](int v) {
      const std::string round =
          std::string(kRoundText) + std::to_string(shape.stage_width[k]) + "x" + std::to_string(shape.stage_unroll[k]);
      if (shape.overlaps[v]) return round + " overlap";
      return round + " rest " + (shape.open_rest[v] ? "any" : std::to_string(kernel.nest.extents[v] % step));
    };
    if (const int v = shape.stage_cross[k]; v >= 0)
      head += " cross " + std::to_string(v) + (shape.overlaps[v] ? " overlap" : "");
    if (k == 0 && shape.lane_var >= 0 && shape.open[shape.lane_var] >= 0) head += rest(shape.lane_var);
    const auto open = [&](int v) { return shape.open[v] >= 0; };
    if (std::none_of(s.vars.begin(), s.vars.end(), open)) continue;
    head += " levels " + std::to_string(shape.stage_levels[k]);
    if (s.vars.size() > 1) {
      const Strips strips = strips_of(kernel.nest, shape, k);
      head +=
          " cut " + std::to_string(strips.at) + " " + std::to_string(strips.length) + (strips.within ? " within" : "");
    }
    if (shape.lane_var >= 0 || !open(s.vars.back())) continue;
    head += rest(s.vars.back());
    if (kernel.nest.extents[s.vars.back()] / step > kStrip) head += " strips";
  }
  return head + "\n" + loops::print(nest, [&](loops::BufferId b) { return names.at(b); });
}

}  // namespace kiln::codegen
