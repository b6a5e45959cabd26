#include "base/timer.h"

#include <algorithm>
#include <cstdio>

#include "base/log.h"

namespace kiln {

std::vector<StageTime>& stage_times() {
  thread_local std::vector<StageTime> times;
  return times;
}

void log_stage_times(std::string_view heading, size_t from) {
  if (!log_enabled(Topic::timing)) return;
  std::vector<StageTime> sums;
  for (size_t i = from; i < stage_times().size(); ++i) {
    const StageTime& t = stage_times()[i];
    const auto found = std::find_if(sums.begin(), sums.end(), [&](const StageTime& s) { return s.name == t.name; });
    if (found == sums.end())
      sums.push_back(t);
    else
      found->seconds += t.seconds;
  }
  std::string text;
  for (const StageTime& s : sums) {
    char line[32];
    std::snprintf(line, sizeof line, "%10.3f ms  ", s.seconds * 1e3);
    text += line + s.name + "\n";
  }
  log_artifact(Topic::timing, heading, text);
}

StageTimer::~StageTimer() {
  stage_times().push_back({name_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()});
}

}  // namespace kiln
