#include "runtime/step_times.h"

#include <chrono>
#include <cstdio>
#include <numeric>

#include "aten/pch.h"
#include "base/log.h"

namespace kiln::runtime {

void StepTimes::run(const Plan& plan, Frame& frame, const Step*& running) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  for (const auto& step : plan.steps) {
    const Clock::time_point start = Clock::now();
    running = step.get();
    running->run(frame);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sums_.resize(seconds.size());
  for (size_t i = 0; i < seconds.size(); ++i) sums_[i] += seconds[i];
  if (++calls_ < report_at_) return;
  log_artifact(Topic::step_times, plan.name, text(plan));
  sums_.clear();
  calls_ = 0;
  report_at_ *= 10;
}

std::string StepTimes::text(const Plan& plan) const {
  const double total = std::accumulate(sums_.begin(), sums_.end(), 0.0);
  std::string out;
  const auto line = [&](double seconds, const std::string& what) {
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, "%10.1f us %5.1f%%  ", seconds / calls_ * 1e6, 100 * seconds / total);
    out += numbers + what + "\n";
  };
  line(total, "a call, mean of " + std::to_string(calls_));
  for (size_t i = 0; i < sums_.size(); ++i) line(sums_[i], plan.steps[i]->describe(plan));
  return out;
}

}  // namespace kiln::runtime
