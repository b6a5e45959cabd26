#include "runtime/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kiln::runtime {
namespace {

struct Threads {
  int before = at::get_num_threads();
  explicit Threads(int n) { at::set_num_threads(n); }
  ~Threads() { at::set_num_threads(before); }
};

TEST(Parallel, RunsEachTaskOnce) {
  for (int threads : {1, 2, 3, 5}) {
    const Threads some(threads);
    for (int64_t tasks : {0, 1, 2, 7, 64, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      parallel_tasks(tasks, [&](int64_t i) { ++runs[i]; });
      for (const auto& r : runs) ASSERT_EQ(r.load(), 1);
    }
  }
}

// The first task ends when all others have: those of its thread's share too, which somebody else has to take.
TEST(Parallel, OthersTakeWhatASlowThreadHasLeft) {
  const Threads two(2);
  constexpr int64_t kTasks = 16;
  std::atomic<int64_t> done{0};
  bool all = false;
  parallel_tasks(kTasks, [&](int64_t i) {
    if (i > 0) {
      ++done;
      return;
    }
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (done.load() < kTasks - 1 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    all = done.load() == kTasks - 1;
  });
  EXPECT_TRUE(all);
  EXPECT_EQ(done.load(), kTasks - 1);
}

TEST(Parallel, ExceptionsComeOut) {
  const Threads two(2);
  EXPECT_THROW(parallel_tasks(8, [](int64_t i) { i == 5 ? throw std::runtime_error("five") : void(); }),
               std::runtime_error);
}

}  // namespace
}  // namespace kiln::runtime
