#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "runtime/plan.h"

namespace kiln::runtime {

/// Where an artifact's time goes: adds up the wall time of each of its steps, and logs the sums under the topic
/// step_times after 10, 100, 1000, .. calls. Safe to use from several threads.
class StepTimes {
 public:
  /// Runs the steps; `running`: gets the one that runs, which has raised if this throws.
  void run(const Plan& plan, Frame& frame, const Step*& running);

 private:
  std::string text(const Plan& plan) const;

  std::mutex mutex_;
  std::vector<double> sums_;  // seconds by step, since the last report
  int64_t calls_ = 0, report_at_ = 10;
};

}  // namespace kiln::runtime
