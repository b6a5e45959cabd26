#include "compiler/interpreted_step.h"

#include <c10/util/Exception.h>

#include "base/dtype.h"

namespace kiln::compiler {

void InterpretedStep::run(runtime::Frame& frame) const {
  std::vector<void*> pointers(buffers_.size(), nullptr);
  for (size_t i = 0; i < args_.size(); ++i) pointers[kernel_.args[i].buffer] = frame.ptrs[args_[i]];
  std::vector<std::vector<char>> scratch;
  for (size_t b = 0; b < buffers_.size(); ++b)
    if (buffers_[b].kind == loops::BufferKind::Scratch) {
      scratch.emplace_back(buffers_[b].numel * dtype_size(buffers_[b].dtype));
      pointers[b] = scratch.back().data();
    }
  try {
    loops::interpret(kernel_.nest, buffers_, pointers);
  } catch (const loops::KernelError& e) {
    const std::string message = e.what();
    TORCH_CHECK_INDEX(message.find("index") == std::string::npos, message);
    TORCH_CHECK(false, message);
  }
}

std::string InterpretedStep::describe(const runtime::Plan& plan) const {
  std::string text = "interpreted " + kernel_.nest.name + "(";
  for (size_t i = 0; i < args_.size(); ++i) text += (i ? ", " : "") + plan.slot_text(args_[i]);
  return text + ")";
}

void InterpretedStep::for_each_slot(const std::function<void(runtime::Slot)>& f) const {
  for (runtime::Slot s : args_) f(s);
}

}  // namespace kiln::compiler
