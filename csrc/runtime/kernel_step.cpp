#include "runtime/kernel_step.h"

#include <c10/util/SmallVector.h>

#include <atomic>

#include "aten/pch.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

namespace kiln::runtime {
void KernelStep::run(Frame& frame) const {
  c10::SmallVector<void*, 24> pointers(args_.size());
  for (size_t i = 0; i < args_.size(); ++i) pointers[i] = frame.ptrs[args_[i]];
  int32_t error = 0;
  if (kernel_.units <= kernel_.grain) {
    error = kernel_.fn(pointers.data(), kernel_.args.data(), 0, kernel_.units,
                       kernel_.scratch_bytes ? scratch(kernel_.scratch_bytes) : nullptr);
  } else {
    std::atomic<int32_t> first{0};
    run_parallel(kernel_.units, kernel_.grain, [&](int64_t begin, int64_t end) {
      const int32_t e = kernel_.fn(pointers.data(), kernel_.args.data(), begin, end,
                                   kernel_.scratch_bytes ? scratch(kernel_.scratch_bytes) : nullptr);
      if (e) first = e;
    });
    error = first;
  }
  if (error) [[unlikely]] {
    const std::string& message = kernel_.errors.at(error - 1);
    TORCH_CHECK_INDEX(message.find("index") == std::string::npos, message);
    TORCH_CHECK(false, message);
  }
}

std::string KernelStep::describe(const Plan& plan) const {
  std::string text = kernel_.name + "(";
  for (size_t i = 0; i < args_.size(); ++i)
    text += (i ? ", " : "") + std::string(written_[i] ? "=" : "") + plan.slot_text(args_[i]);
  text += ")";
  if (kernel_.units > kernel_.grain)
    text += "  units " + std::to_string(kernel_.units) + " grain " + std::to_string(kernel_.grain);
  return text;
}

void KernelStep::for_each_slot(const std::function<void(Slot)>& f) const {
  for (Slot s : args_) f(s);
}

}  // namespace kiln::runtime
