// Compiled with OpenMP, which is how ATen's pool is reached (its parallel_for is an inline template).
#include "runtime/parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
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

void run_parallel(int64_t units, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (units + grain - 1) / grain);
  if (threads <= 1 || at::in_parallel_region()) {
    f(0, units);
    return;
  }
  constexpr int64_t kPiecesPerThread = 4;
  const int64_t piece = std::max(grain, (units + threads * kPiecesPerThread - 1) / (threads * kPiecesPerThread));
  parallel_tasks((units + piece - 1) / piece, [&](int64_t i) { f(i * piece, std::min(units, (i + 1) * piece)); });
}

}  // namespace kiln::runtime
