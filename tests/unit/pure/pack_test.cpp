#include "loops_harness.h"
#include "schedule/pack_operands.h"

namespace kiln::testing {
namespace {

/// The sums of 256 rows of 256 by the elements of `v` at `first`, less those at `second`.
Program columns(const std::string& first, const std::string& second) {
  Program p = loops::parse(R"(program {
  buffer x f32 65536 input
  buffer v f32 1024 input
  buffer y f32 256 output
  nest "sum" extents [256, 256] outer [i0] {
    stage [i1] {
      %0 = Load f32 x[256*i0 + i1]
      %1 = Load f32 v[)" + first +
                           R"(]
      %2 = Mul f32 %0, %1
      %3 = Load f32 v[)" + second +
                           R"(]
      %4 = Sub f32 %2, %3
      %5 = Reduce.Sum f32 %4
    }
    stage [] {
      Store f32 y[i0] %5
    }
  }
}
)");
  loops::verify(p);
  return p;
}

TEST(Pack, OperandsReadInStepsAreCopiedByOneKernel) {
  const Program p = columns("4*i1 + 1", "4*i1 + 3");
  const schedule::Plan plan = schedule::make_plan(p, {});
  ASSERT_EQ(plan.steps.size(), 2u) << schedule::print(plan);
  EXPECT_EQ(plan.kernels[plan.steps[0].index].args.size(), 3u);
  for (const schedule::Kernel& k : plan.kernels) loops::verify(k.nest, plan.buffers);
  // The temps lie apart, and while both are read.
  const schedule::MemoryPlan memory = schedule::plan_memory(plan);
  EXPECT_EQ(memory.arena_bytes, 2 * 256 * 4);

  Memory m(p.buffers);
  std::mt19937 rng(1);
  fill(m, p.buffers, 0, rng, 1);
  fill(m, p.buffers, 1, rng, 1);
  check_program(p, m, 1e-4);
}

TEST(Pack, WhatLiesInOrderStays) {
  EXPECT_EQ(schedule::make_plan(columns("i1", "i0"), {}).steps.size(), 1u);
  EXPECT_EQ(schedule::make_plan(columns("i1 + 4", "4*i1"), {}).steps.size(), 2u);
}

TEST(Pack, IsSwitchedOff) {
  schedule::Options options;
  options.pack = false;
  EXPECT_EQ(schedule::make_plan(columns("4*i1 + 1", "4*i1 + 3"), options).steps.size(), 1u);
}

}  // namespace
}  // namespace kiln::testing
