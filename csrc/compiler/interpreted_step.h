#pragma once
#include <vector>

#include "loops/loops.h"
#include "runtime/plan.h"
#include "schedule/schedule.h"

namespace kiln::compiler {

/// A kernel whose nest is run by the reference interpreter instead of generated code: what bisection puts in a kernel's
/// place. Slow, on the calling thread.
class InterpretedStep final : public runtime::Step {
 public:
  /// `args` are the slots of kernel.args, in order; `buffers` those of the schedule.
  InterpretedStep(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                  std::vector<runtime::Slot> args)
      : kernel_(kernel), buffers_(buffers), args_(std::move(args)) {}
  void run(runtime::Frame& frame) const override;
  std::string describe(const runtime::Plan& plan) const override;
  void for_each_slot(const std::function<void(runtime::Slot)>& f) const override;

 private:
  schedule::Kernel kernel_;
  std::vector<loops::Buffer> buffers_;
  std::vector<runtime::Slot> args_;
};

}  // namespace kiln::compiler
