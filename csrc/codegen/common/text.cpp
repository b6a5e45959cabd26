#include "codegen/common/text.h"

#include "base/error.h"

namespace kiln::codegen {

std::string canonical_text(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers) {
  std::vector<loops::Buffer> named = buffers;
  std::string head = kernel.vectorize_outer ? "columns" : "rows";
  const size_t pointers = kernel.segments.empty() ? kernel.args.size() : kernel.args.size() / kernel.segments.size();
  if (!kernel.segments.empty()) head += " segments";
  if (kernel.streamed >= 0) head += " streamed";
  for (size_t k = 0; k < pointers; ++k) {
    loops::Buffer& b = named.at(kernel.args[k].buffer);
    b.name = "b" + std::to_string(k);
    head += " " + b.name + ":" + std::string(dtype_name(b.dtype)) + (kernel.args[k].written ? "w" : "r");
  }
  for (size_t k = 0; k < pointers; ++k)
    if (kernel.args[k].place >= 0)
      head += " " + named[kernel.args[k].buffer].name + "@" + named[kernel.args[k].place].name;
  int scratch = 0;
  for (const loops::Stage& s : kernel.nest.stages)
    for (loops::ValueId id : s.body) {
      const loops::BufferId buffer = kernel.nest.insts[id].buffer;
      if (buffer < 0 || buffers[buffer].kind != loops::BufferKind::Scratch || named[buffer].name[0] == '$') continue;
      named[buffer].name = "$" + std::to_string(scratch++);
      head += " " + named[buffer].name + ":" + std::string(dtype_name(buffers[buffer].dtype)) + "x" +
              std::to_string(buffers[buffer].numel);
    }
  loops::Nest nest = kernel.nest;
  nest.name.clear();
  if (!kernel.segments.empty()) std::fill(nest.extents.begin(), nest.extents.end(), 0);
  return head + "\n" + loops::print(nest, named);
}

}  // namespace kiln::codegen
