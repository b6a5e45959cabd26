#pragma once
#include "codegen/common/kernel.h"
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
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  codegen::CompiledKernel kernel_;
  std::vector<Slot> args_;
  std::vector<bool> written_;
};

}  // namespace kiln::runtime
