#include "compiler/freeze.h"

#include <gtest/gtest.h>

namespace kiln::compiler {
namespace {

/// A product with a float16 weight of so many columns, computed in float32.
std::string product(const std::string& columns) {
  return R"(graph inference {
  input %x : f32[4, 8192]
  input %w : f16[8192, )" +
         columns + R"(] {frozen}
  %wide = aten::_to_copy(%w, f32, None, None, None, False, None) : f32[8192, )" +
         columns + R"(]
  %mm = aten::mm(%x, %wide) : f32[4, )" +
         columns + R"(]
  return (%mm)
}
)";
}

TEST(Freeze, CopiesOfHalfWeightsAreKept) {
  const auto split = split_frozen(*graph::parse(product("64")));
  ASSERT_TRUE(split);
  EXPECT_EQ(split->prologue_inputs, std::vector<size_t>{1});
  EXPECT_EQ(split->rest_inputs, std::vector<size_t>{0});
}

TEST(Freeze, CopiesThatWouldFillTheMemoryAreNot) { EXPECT_FALSE(split_frozen(*graph::parse(product("8193")))); }

}  // namespace
}  // namespace kiln::compiler
