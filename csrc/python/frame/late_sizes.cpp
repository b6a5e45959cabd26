#include "python/frame/late_sizes.h"

#include <limits>

namespace kiln::frame {

bool LateSizes::pays(uint64_t key) const {
  const auto it = eager_seconds_.find(key);
  return it != eager_seconds_.end() && it->second >= 2 * compile_seconds_;
}

void LateSizes::ran(uint64_t key, double seconds) {
  // Sizes that never repeat must not fill the memory.
  constexpr size_t kMostKeys = 1 << 14;
  if (eager_seconds_.size() >= kMostKeys && !eager_seconds_.count(key)) eager_seconds_.clear();
  eager_seconds_[key] += seconds;
}

void LateSizes::compiled(uint64_t key, bool made) {
  eager_seconds_[key] = made ? 0 : -std::numeric_limits<double>::infinity();
  made_ += made;
}

}  // namespace kiln::frame
