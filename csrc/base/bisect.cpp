#include "base/bisect.h"

#include <array>
#include <atomic>

#include "base/log.h"
#include "base/options.h"

namespace kiln {
namespace {

std::array<std::atomic<int64_t>, 3> counts;

std::atomic<int64_t>& count_of(BisectUnit unit) { return counts[static_cast<size_t>(unit)]; }

int64_t limit_of(BisectUnit unit) {
  switch (unit) {
    case BisectUnit::Function:
      return options().function_limit;
    case BisectUnit::Graph:
      return options().graph_limit;
    case BisectUnit::Kernel:
      return options().kernel_limit;
  }
  return -1;
}

}  // namespace

bool bisect_allows(BisectUnit unit, const std::string& name) {
  static constexpr const char* kNames[] = {"function", "graph", "kernel"};
  int64_t number = ++count_of(unit);
  int64_t limit = limit_of(unit);
  bool allowed = limit < 0 || number <= limit;
  if (log_enabled(Topic::bisect))
    log_artifact(Topic::bisect, "bisect",
                 std::string(kNames[static_cast<size_t>(unit)]) + " " + std::to_string(number) + ": " + name +
                     (allowed ? "" : " (refused)"));
  return allowed;
}

int64_t bisect_count(BisectUnit unit) { return count_of(unit); }

void reset_bisect() {
  for (auto& count : counts) count = 0;
}

}  // namespace kiln
