#include "loops_harness.h"
#include "schedule/epilogues.h"

namespace kiln::testing {
namespace {

/// A call that makes 256 rows of 256, a kernel on its result and a second tensor, and a call that reads the kernel's.
std::string program(const std::string& result_index, const std::string& between = "") {
  return R"(program {
  buffer x f32 65536 input
  buffer r f32 65536 input
  buffer c f32 65536 temp
  buffer y f32 65536 temp
  buffer z f32 65536 output
  extern 0 "call" reads [x] writes [c] rows 256
)" + between +
         R"(  nest "relu" extents [256, 256] outer [i0, i1] {
    stage [] {
      %0 = Load f32 c[)" +
         result_index + R"(]
      %1 = Load f32 r[256*i0 + i1]
      %2 = Add f32 %0, %1
      %3 = ConstFloat f32 0
      %4 = Maximum f32 %2, %3
      Store f32 y[256*i0 + i1] %4
    }
  }
  extern 1 "call" reads [y] writes [z]
}
)";
}

schedule::Plan plan_of(const std::string& text, const schedule::Options& options = {}) {
  const Program p = loops::parse(text);
  EXPECT_EQ(loops::print(p), text);
  loops::verify(p);
  return schedule::make_plan(p, options);
}

TEST(Epilogue, FollowsTheRowsOfACallAndTakesTheirPlace) {
  const schedule::Plan plan = plan_of(program("256*i0 + i1"));
  ASSERT_EQ(plan.steps.size(), 2u) << schedule::print(plan);
  ASSERT_GE(plan.steps[0].epilogue, 0);
  const schedule::Kernel& k = plan.kernels[plan.steps[0].epilogue];
  EXPECT_EQ(k.streamed, 2);
  const schedule::MemoryPlan memory = schedule::plan_memory(plan);
  EXPECT_EQ(memory.offsets[3], memory.offsets[2]);
  EXPECT_EQ(memory.arena_bytes, 65536 * 4);

  // Units run alone, in any order, in the call's own memory, and each reads what its span says.
  const auto compiled = codegen::compile_llvm(plan.kernels, plan.buffers, {});
  const codegen::CompiledKernel& kernel = compiled[plan.steps[0].epilogue];
  ASSERT_EQ(kernel.reads.first.size(), static_cast<size_t>(kernel.units));
  ASSERT_GT(kernel.units, 8);
  std::vector<float> c(65536), r(65536), want(65536);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < c.size(); ++i) {
    c[i] = normal(rng), r[i] = normal(rng);
    want[i] = std::max(c[i] + r[i], 0.0f);
  }
  std::vector<void*> pointers;
  for (const schedule::KernelArg& a : k.args) pointers.push_back(a.buffer == 1 ? r.data() : c.data());
  std::vector<int64_t> units(kernel.units);
  for (int64_t u = 0; u < kernel.units; ++u) units[u] = u;
  std::shuffle(units.begin(), units.end(), rng);
  for (const int64_t u : units) {
    const std::vector<float> before = c;
    ASSERT_EQ(kernel.fn(pointers.data(), kernel.args.data(), u, u + 1, nullptr), 0);
    for (int64_t i = 0; i < 65536; ++i) {
      if (i >= kernel.reads.first[u] && i <= kernel.reads.last[u])
        ASSERT_EQ(c[i], want[i]) << i;
      else
        ASSERT_EQ(c[i], before[i]) << i;
    }
  }
}

TEST(Epilogue, IsSwitchedOff) {
  schedule::Options options;
  options.epilogues = false;
  const schedule::Plan plan = plan_of(program("256*i0 + i1"), options);
  EXPECT_EQ(plan.steps.size(), 3u);
  EXPECT_LT(schedule::plan_memory(plan).arena_bytes, 2 * 65536 * 4);  // still in place
  options.in_place = false;
  EXPECT_EQ(schedule::plan_memory(plan_of(program("256*i0 + i1"), options)).arena_bytes, 2 * 65536 * 4);
}

TEST(Epilogue, NeedsTheResultInOrder) {
  const schedule::Plan plan = plan_of(program("i0 + 256*i1"));
  EXPECT_EQ(plan.steps.size(), 3u) << schedule::print(plan);
  // Another index reads what other points have written: no place is shared either.
  EXPECT_EQ(schedule::plan_memory(plan).arena_bytes, 2 * 65536 * 4);
}

TEST(Epilogue, WaitsForWhatAnotherStepChanges) {
  const schedule::Plan plan = plan_of(program("256*i0 + i1", "  extern 2 \"other\" reads [x] writes [r]\n"));
  for (const schedule::Step& s : plan.steps) EXPECT_LT(s.epilogue, 0) << schedule::print(plan);
}

TEST(Epilogue, DoesNotWriteWhatTheCallReads) {
  std::string text = program("256*i0 + i1");
  for (size_t at; (at = text.find("y[")) != std::string::npos;) text.replace(at, 2, "x[");
  text.replace(text.find("[y]"), 3, "[x]");
  for (const schedule::Step& s : plan_of(text).steps) EXPECT_LT(s.epilogue, 0);
}

TEST(InPlace, IsNotStoredBeforeTheLastLoad) {
  const std::string text = R"(program {
  buffer x f32 512 input
  buffer c f32 512 temp
  buffer y f32 512 temp
  buffer z f32 512 output
  buffer w f32 512 output
  extern 0 "call" reads [x] writes [c]
  nest "two" extents [512] outer [i0] {
    stage [] {
      %0 = Load f32 c[i0]
      %1 = Add f32 %0, %0
      Store f32 y[i0] %1
      %3 = Load f32 c[i0]
      Store f32 z[i0] %3
    }
  }
  extern 1 "call" reads [y] writes [w]
}
)";
  schedule::Plan plan = plan_of(text);
  // Scheduling shares the two loads: put the second one back, as fused nests may have it.
  loops::Nest& nest = plan.kernels[plan.steps[1].index].nest;
  loops::Stage& body = nest.stages[0];
  loops::Inst again = nest.insts[body.body[0]];
  ASSERT_EQ(again.op, loops::Opcode::Load);
  body.body.push_back(nest.add(again));
  for (schedule::Kernel& k : plan.kernels)
    for (schedule::KernelArg& a : k.args) a.place = -1;
  schedule::share_places(plan);
  for (const schedule::Kernel& k : plan.kernels)
    for (const schedule::KernelArg& a : k.args) EXPECT_LT(a.place, 0) << schedule::print(plan);
}

}  // namespace
}  // namespace kiln::testing
