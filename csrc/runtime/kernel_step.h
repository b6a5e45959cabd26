#pragma once
#include "codegen/common/kernel.h"
#include "runtime/arena.h"
#include "runtime/plan.h"

namespace kiln::runtime {

/// Runs a generated kernel.
class KernelStep final : public Step {
 public:
  /// `args` are the slots of the kernel's pointers, in order.
  KernelStep(codegen::CompiledKernel kernel, std::vector<Slot> args, std::vector<bool> written)
      : kernel_(std::move(kernel)), args_(std::move(args)), written_(std::move(written)) {}
  /// Throws c10::IndexError or c10::Error where the kernel stops with an error (an index out of range, an integer zero
  /// divisor).
  void run(Frame& frame) const override;
  /// Runs units [begin, end) on this thread. `user`: whose scratch memory to take.
  void run_units(Frame& frame, int64_t begin, int64_t end, ScratchUser user = ScratchUser::Step) const;
  /// Runs units [begin, end) on all threads.
  void run_parallel_units(Frame& frame, int64_t begin, int64_t end) const;
  const codegen::CompiledKernel& kernel() const { return kernel_; }
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  void raise(int32_t error) const;

  codegen::CompiledKernel kernel_;
  std::vector<Slot> args_;
  std::vector<bool> written_;
};

}  // namespace kiln::runtime
