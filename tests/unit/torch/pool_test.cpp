#include "runtime/pool.h"

#include <gtest/gtest.h>

// Freed blocks are kept for those who ask for such ones, and none beyond what was ever in use at once.
namespace kiln::runtime {
namespace {

c10::DataPtr block(size_t bytes) { return pool_allocator()->allocate(bytes); }

TEST(Pool, ReusesFreedBlocks) {
  void* first;
  {
    auto p = pool_allocator()->allocate(1 << 20);
    first = p.get();
  }
  auto again = pool_allocator()->allocate((1 << 20) - 100);
  EXPECT_EQ(again.get(), first);
  EXPECT_GE(pool_stats().in_use, size_t{1} << 20);
}

TEST(Pool, ServesTheSizesThatAreAskedForNow) {
  trim_pool();
  const size_t small = 3 << 20, large = 4 << 20;
  {
    auto a = block(large), b = block(small);
  }
  // Another program's sizes: no block of the first one's may keep these from being kept.
  const size_t slack = size_t{32} << 20;
  for (const size_t size : {size_t{10} << 20, size_t{20} << 20, size_t{30} << 20}) {
    void* first = block(size).get();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(block(size).get(), first) << size;
    EXPECT_GE(pool_stats().cached, size);
  }
  EXPECT_LE(pool_stats().cached + pool_stats().in_use, (size_t{30} << 20) + slack);
}

TEST(Pool, KeepsAWorkspaceThatIsFreeWhenTheResultIsMade) {
  trim_pool();
  void* first = nullptr;
  for (int i = 0; i < 4; ++i) {
    auto input = block(1 << 20);
    {
      auto workspace = block(24 << 20);
      if (first) EXPECT_EQ(workspace.get(), first);
      first = workspace.get();
    }
    auto result = block(1 << 20);
    input.clear();
  }
}

TEST(Pool, TrimGivesEverythingBack) {
  block(1 << 20);
  trim_pool();
  EXPECT_EQ(pool_stats().cached, size_t{0});
}

}  // namespace
}  // namespace kiln::runtime
