#include "base/timer.h"

namespace kiln {

std::vector<StageTime>& stage_times() {
  thread_local std::vector<StageTime> times;
  return times;
}

StageTimer::~StageTimer() {
  stage_times().push_back({name_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()});
}

}  // namespace kiln
