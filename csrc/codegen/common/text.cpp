#include "codegen/common/text.h"

#include "base/error.h"

namespace kiln::codegen {

std::string canonical_text(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers) {
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
  for (const loops::Stage& s : kernel.nest.stages)
    for (loops::ValueId id : s.body) {
      const loops::BufferId b = kernel.nest.insts[id].buffer;
      if (b < 0 || buffers[b].kind != loops::BufferKind::Scratch || names.contains(b)) continue;
      const std::string& name = names[b] = "$" + std::to_string(scratch++);
      head += " " + name + ":" + std::string(dtype_name(buffers[b].dtype)) + "x" + std::to_string(buffers[b].numel);
    }
  loops::Nest nest = kernel.nest;
  nest.name.clear();
  if (!kernel.segments.empty()) std::fill(nest.extents.begin(), nest.extents.end(), 0);
  return head + "\n" + loops::print(nest, [&](loops::BufferId b) { return names.at(b); });
}

}  // namespace kiln::codegen
