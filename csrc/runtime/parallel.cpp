#include "runtime/parallel.h"

#include <ATen/Parallel.h>

#include <atomic>

namespace kiln::runtime {

void parallel_tasks(int64_t tasks, const std::function<void(int64_t)>& body) {
  const int64_t threads = std::min<int64_t>(tasks, at::get_num_threads());
  if (threads <= 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(i);
  });
}

}  // namespace kiln::runtime
