#include "codegen/common/offsets.h"

namespace kiln::codegen {

std::vector<int64_t> take_offsets(schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers) {
  std::vector<int64_t> bytes(kernel.args.size(), 0);
  if (!kernel.segments.empty()) return bytes;  // the indices are those of the first segment
  for (size_t k = 0; k < bytes.size(); ++k) {
    const loops::Buffer& buffer = buffers.at(kernel.args[k].buffer);
    std::vector<loops::Inst*> accesses;
    int64_t least = buffer.numel - 1;  // masked loads may load the first element in place of theirs
    for (const loops::Stage& s : kernel.nest.stages)
      for (loops::ValueId id : s.body) {
        loops::Inst& i = kernel.nest.insts[id];
        if (i.buffer != kernel.args[k].buffer) continue;
        accesses.push_back(&i);
        least = std::min(least, i.index.range().lo);
      }
    if (accesses.empty() || least <= 0) continue;
    for (loops::Inst* i : accesses) i->index = i->index - loops::Expr(least);
    bytes[k] = least * dtype_size(buffer.dtype);
  }
  return bytes;
}

}  // namespace kiln::codegen
