// Compiled with OpenMP, which is how ATen's pool is reached (its parallel_for is an inline template).
#include "runtime/parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace kiln::runtime {

namespace {

/// What is left of one thread's share of the tasks. The thread takes from the front; whoever has finished its own share
/// takes from the back.
class alignas(64) Share {
 public:
  void fill(int64_t begin, int64_t end) { left_.store(pack(begin, end), std::memory_order_relaxed); }
  /// A task, or -1 where none is left.
  int64_t take(bool front) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t begin = static_cast<int64_t>(left >> 32), end = static_cast<int64_t>(left & 0xffffffff);
      if (begin >= end) return -1;
      const uint64_t rest = front ? pack(begin + 1, end) : pack(begin, end - 1);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) return front ? begin : end - 1;
    }
  }

 private:
  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }
  std::atomic<uint64_t> left_{0};
};

}  // namespace

void parallel_tasks(int64_t tasks, const std::function<void(int64_t)>& body) {
  const int64_t threads = std::min<int64_t>(tasks, at::get_num_threads());
  if (threads <= 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  std::vector<Share> shares(threads);
  for (int64_t t = 0; t < threads; ++t) shares[t].fill(t * tasks / threads, (t + 1) * tasks / threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t other = 0; other < threads; ++other)
        for (int64_t i; (i = shares[(t + other) % threads].take(other == 0)) >= 0;) body(i);
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
