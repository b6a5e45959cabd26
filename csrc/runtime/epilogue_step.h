#pragma once
#include "runtime/gemm/gemm.h"
#include "runtime/kernel_step.h"

namespace kiln::runtime {

/// A step that may make its first result row by row and say which rows are finished.
class RowsStep : public Step {
 public:
  /// Elements of a row of the result, whose rows follow each other in memory; 0 if it is not made so.
  virtual int64_t row_length() const { return 0; }
  /// Runs the step and calls `done` from its threads; some rows, or all, may be left out.
  virtual void run_rows(Frame& frame, const gemm::RowsDone& done) const = 0;
};

/// A step and the kernel that reads its result: the kernel's units run block by block, as soon as the rows they need
/// are finished and still in the cache of the thread that made them. What is left runs afterwards.
class EpilogueStep final : public Step {
 public:
  EpilogueStep(std::unique_ptr<Step> producer, std::shared_ptr<const KernelStep> kernel);
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  std::unique_ptr<Step> producer_;
  const RowsStep* rows_ = nullptr;  // producer_, if it makes rows that the kernel's units follow
  std::shared_ptr<const KernelStep> kernel_;
};

}  // namespace kiln::runtime
