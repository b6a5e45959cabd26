#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

/// One finished stage or pass: dotted name ("joint.partition") and wall seconds.
struct StageTime {
  std::string name;
  double seconds;
};

/// Times of the compile in progress on this thread, in the order in which stages ended; explain and reports read it.
std::vector<StageTime>& stage_times();

/// Logs (topic timing) these times from the `from`th on, those of one name added up.
void log_stage_times(std::string_view heading, size_t from = 0);

/// Adds a StageTime when it goes out of scope.
class StageTimer {
 public:
  explicit StageTimer(std::string name) : name_(std::move(name)), start_(std::chrono::steady_clock::now()) {}
  ~StageTimer();
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  std::string name_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kiln
