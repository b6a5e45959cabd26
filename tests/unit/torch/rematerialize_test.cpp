#include "joint/rematerialize.h"

#include <gtest/gtest.h>

#include "graph/graph.h"

namespace kiln::joint {
namespace {

std::string rematerialized(const char* text) {
  const auto g = graph::parse(text);
  EXPECT_TRUE(rematerialize(*g));
  graph::verify(*g, /*functional=*/true);
  return graph::print(*g);
}

TEST(Rematerialize, WhatTheBackwardReadsIsComputedAgainRightBeforeIt) {
  EXPECT_EQ(rematerialized(R"(graph joint {
  input %x : f32[4]
  input %tangent : f32[4]
  %sin = aten::sin(%x) : f32[4] {checkpoint=1}
  %exp = aten::exp(%sin) : f32[4] {checkpoint=1}
  %tanh = aten::tanh(%exp) : f32[4] {checkpoint=1}
  %neg = aten::neg(%tanh) : f32[4]
  %a = aten::mul.Tensor(%tangent, %tanh) : f32[4] {backward}
  %b = aten::mul.Tensor(%a, %exp) : f32[4] {backward}
  %c = aten::mul.Tensor(%b, %sin) : f32[4] {backward}
  return (%neg, %c)
}
)"),
            R"(graph joint {
  input %x : f32[4]
  input %tangent : f32[4]
  %sin = aten::sin(%x) : f32[4] {checkpoint=1}
  %exp = aten::exp(%sin) : f32[4] {checkpoint=1}
  %tanh = aten::tanh(%exp) : f32[4] {checkpoint=1}
  %neg = aten::neg(%tanh) : f32[4]
  %a = aten::mul.Tensor(%tangent, %tanh) : f32[4] {backward}
  %sin_1 = aten::sin(%x) : f32[4] {backward, recomputed}
  %exp_1 = aten::exp(%sin_1) : f32[4] {backward, recomputed}
  %b = aten::mul.Tensor(%a, %exp_1) : f32[4] {backward}
  %c = aten::mul.Tensor(%b, %sin_1) : f32[4] {backward}
  return (%neg, %c)
}
)");
}

TEST(Rematerialize, DrawsAreKeptAsBools) {
  EXPECT_EQ(rematerialized(R"(graph joint {
  input %x : f32[4]
  input %tangent : f32[4]
  %draw = aten::bernoulli.p(%x, 0.5, None) : f32[4] {checkpoint=1}
  %scaled = aten::div.Scalar(%draw, 0.5) : f32[4] {checkpoint=1}
  %y = aten::mul.Tensor(%x, %scaled) : f32[4] {checkpoint=1}
  %grad = aten::mul.Tensor(%tangent, %scaled) : f32[4] {backward}
  return (%y, %grad)
}
)"),
            R"(graph joint {
  input %x : f32[4]
  input %tangent : f32[4]
  %draw = aten::bernoulli.p(%x, 0.5, None) : f32[4] {checkpoint=1}
  %ne = aten::ne.Scalar(%draw, 0) : b8[4]
  %scaled = aten::div.Scalar(%draw, 0.5) : f32[4] {checkpoint=1}
  %y = aten::mul.Tensor(%x, %scaled) : f32[4] {checkpoint=1}
  %_to_copy = aten::_to_copy(%ne, f32, None, None, None, False, None) : f32[4] {backward, recomputed}
  %scaled_1 = aten::div.Scalar(%_to_copy, 0.5) : f32[4] {backward, recomputed}
  %grad = aten::mul.Tensor(%tangent, %scaled_1) : f32[4] {backward}
  return (%y, %grad)
}
)");
}

TEST(Rematerialize, OtherDrawsStayWhatTheyAre) {
  const auto g = graph::parse(R"(graph joint {
  input %x : f32[4]
  input %tangent : f32[4]
  %draw = aten::normal_functional(%x, 0.0, 1.0, None) : f32[4] {checkpoint=1}
  %y = aten::mul.Tensor(%x, %draw) : f32[4] {checkpoint=1}
  %grad = aten::mul.Tensor(%tangent, %draw) : f32[4] {backward}
  return (%y, %grad)
}
)");
  EXPECT_FALSE(rematerialize(*g));
}

}  // namespace
}  // namespace kiln::joint
