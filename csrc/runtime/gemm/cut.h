#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/round.h"
#include "runtime/gemm/gemm.h"

namespace kiln::runtime::gemm {

/// Rows of C that wait for whoever takes finished rows stay in the second-level cache: so many floats of a task.
constexpr int64_t kWaitingFloats = 1 << 16;

/// Finds out, task by task, when all columns of a block of rows are done.
class RowsLeft {
 public:
  RowsLeft(int64_t row_tasks, int64_t column_tasks, const RowsDone* done) : done_(done) {
    if (!done_ || column_tasks == 1) return;
    left_ = std::make_unique<std::atomic<int64_t>[]>(row_tasks);
    for (int64_t r = 0; r < row_tasks; ++r) left_[r].store(column_tasks, std::memory_order_relaxed);
  }
  /// One of the tasks of this block of rows, which are [begin, end), is finished.
  void finished(int64_t row_task, int64_t begin, int64_t end) {
    if (!done_) return;
    // The last one to finish has seen what the others wrote.
    if (left_ && left_[row_task].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    (*done_)(begin, end);
  }

 private:
  const RowsDone* done_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
};

/// How much of B is packed at a time: what stays in the caches until it is used, and no more memory than that.
struct Chunk {
  static constexpr int64_t kFloats = 1 << 20;
  int64_t n, k;
  Chunk(int64_t all_n, int64_t all_k) : n(std::max<int64_t>(all_n, 1)), k(std::max<int64_t>(all_k, 1)) {
    if (n * k <= 2 * kFloats) return;
    if (k > n)
      k = std::min(k, round_up(std::max<int64_t>(kFloats / n, 4 * kMaxDepth), kMaxDepth));
    else
      n = std::min(n, round_up(std::max<int64_t>(kFloats / k, 1024), 256));
  }
  /// Calls f(first column, columns, first of k, depth, epilogue) for each chunk in turn.
  template <class F>
  void each(int64_t all_n, int64_t all_k, const Epilogue& epilogue, const F& f) const {
    for (int64_t j = 0; j < all_n; j += n)
      for (int64_t p = 0; p < all_k; p += k) {
        const int64_t width = std::min(n, all_n - j), depth = std::min(k, all_k - p);
        const bool last = p + depth == all_k;
        f(j, width, p, depth,
          Epilogue{epilogue.bias && last ? epilogue.bias + j : nullptr, epilogue.accumulate || p > 0,
                   last && j + width == all_n ? epilogue.rows_done : nullptr});
      }
  }
};

}  // namespace kiln::runtime::gemm
