#include "codegen/common/text.h"

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
      head += " " + name + ":" + std::string(dtype_name(buffers[b].dtype)) + "x" + std::to_string(buffers[b].numel);
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
  if (shape.units > std::numeric_limits<int32_t>::max()) head += " many units";
  if (shape.open_blocks >= 0) head += " blocks=s" + std::to_string(shape.open_blocks);
  if (shape.open_row_blocks >= 0) head += " rows=s" + std::to_string(shape.open_row_blocks);
  if (shape.open_blocks >= 0 || shape.blocks > 1) head += " block " + std::to_string(shape.block);
  head += " row " + std::to_string(shape.row_var) + " " + std::to_string(shape.row_block) + " inner";
  for (int v : shape.inner_vars) head += " " + std::to_string(v);
  for (size_t k = 0; k < nest.stages.size(); ++k) {
    const Stage& s = nest.stages[k];
    const int64_t step = static_cast<int64_t>(shape.stage_width[k]) * shape.stage_unroll[k];
    const auto rest = [&](int v) { return " rest " + std::to_string(kernel.nest.extents[v] % step); };
    if (shape.stage_cross[k] >= 0) head += " cross " + std::to_string(shape.stage_cross[k]);
    if (k == 0 && shape.lane_var >= 0 && shape.open[shape.lane_var] >= 0) head += rest(shape.lane_var);
    if (s.vars.empty() || shape.open[s.vars.back()] < 0) continue;
    head += " levels " + std::to_string(shape.stage_levels[k]);
    if (shape.lane_var >= 0) continue;
    head += rest(s.vars.back());
    if (kernel.nest.extents[s.vars.back()] / step > kStrip) head += " strips";
  }
  return head + "\n" + loops::print(nest, [&](loops::BufferId b) { return names.at(b); });
}

}  // namespace kiln::codegen
