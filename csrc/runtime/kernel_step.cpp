#include "runtime/kernel_step.h"

#include <c10/util/SmallVector.h>

#include <atomic>

#include "aten/pch.h"
#include "runtime/parallel.h"

namespace kiln::runtime {

namespace {
c10::SmallVector<void*, 24> pointers_of(const Frame& frame, const std::vector<Slot>& args,
                                        const std::vector<int64_t>& offsets) {
  c10::SmallVector<void*, 24> pointers(args.size());
  for (size_t i = 0; i < args.size(); ++i) pointers[i] = static_cast<char*>(frame.ptrs[args[i]]) + offsets[i];
  return pointers;
}
int32_t call(const codegen::CompiledKernel& kernel, void* const* pointers, int64_t begin, int64_t end,
             ScratchUser user) {
  return kernel.fn(pointers, kernel.args.data(), begin, end,
                   kernel.scratch_bytes ? scratch(kernel.scratch_bytes, user) : nullptr);
}
}  // namespace

void KernelStep::run(Frame& frame) const {
  if (kernel_.units <= kernel_.grain)
    run_units(frame, 0, kernel_.units);
  else
    run_parallel_units(frame, 0, kernel_.units);
}

void KernelStep::run_units(Frame& frame, int64_t begin, int64_t end, ScratchUser user) const {
  const auto pointers = pointers_of(frame, args_, kernel_.offsets);
  if (const int32_t error = call(kernel_, pointers.data(), begin, end, user)) [[unlikely]]
    raise(error);
}

void KernelStep::run_parallel_units(Frame& frame, int64_t begin, int64_t end) const {
  const auto pointers = pointers_of(frame, args_, kernel_.offsets);
  std::atomic<int32_t> first{0};
  run_parallel(end - begin, kernel_.grain, [&](int64_t from, int64_t to) {
    if (const int32_t e = call(kernel_, pointers.data(), begin + from, begin + to, ScratchUser::Step)) first = e;
  });
  if (first) [[unlikely]]
    raise(first);
}

void KernelStep::raise(int32_t error) const {
  const std::string& message = kernel_.errors.at(error - 1);
  TORCH_CHECK_INDEX(message.find("index") == std::string::npos, message);
  TORCH_CHECK(false, message);
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
