#include "base/bisect.h"

#include <gtest/gtest.h>

#include "base/options.h"

namespace kiln {
namespace {

TEST(Bisect, AllowsTheFirstSoMany) {
  reset_bisect();
  options().graph_limit = 2;
  EXPECT_TRUE(bisect_allows(BisectUnit::Graph, "a"));
  EXPECT_TRUE(bisect_allows(BisectUnit::Graph, "b"));
  EXPECT_FALSE(bisect_allows(BisectUnit::Graph, "c"));
  EXPECT_TRUE(bisect_allows(BisectUnit::Kernel, "k"));
  EXPECT_EQ(bisect_count(BisectUnit::Graph), 3);
  options().graph_limit = -1;
  EXPECT_TRUE(bisect_allows(BisectUnit::Graph, "d"));
  reset_bisect();
  EXPECT_EQ(bisect_count(BisectUnit::Graph), 0);
}

}  // namespace
}  // namespace kiln
