#include "base/pass.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/options.h"
#include "base/timer.h"

namespace kiln {
namespace {

struct Pass : ::testing::Test {
  Options saved = options();
  ~Pass() override { options() = saved; }
};

TEST_F(Pass, RunsAndIsTimed) {
  stage_times().clear();
  EXPECT_TRUE(run_pass("stage.one", {}, [] { return true; }));
  EXPECT_FALSE(run_pass("stage.two", {}, [] { return false; }));
  ASSERT_EQ(stage_times().size(), 2u);
  EXPECT_EQ(stage_times()[0].name, "stage.one");
  EXPECT_GE(stage_times()[0].seconds, 0);
}

TEST_F(Pass, IsSkippedByItsWholeName) {
  options().disable_passes = "other,stage.one";
  bool ran = false;
  run_pass("stage.one", {}, [&] { return ran = true; });
  EXPECT_FALSE(ran);
  run_pass("stage", {}, [&] { return ran = true; });
  EXPECT_TRUE(ran);
}

TEST_F(Pass, VerifierNamesThePass) {
  options().verify = true;
  PassHooks hooks{[] { return std::string("text"); }, [] { throw InternalError("bad node"); }};
  try {
    run_pass("stage.one", hooks, [] { return true; });
    FAIL();
  } catch (const InternalError& e) {
    EXPECT_NE(std::string(e.what()).find("pass stage.one: bad node"), std::string::npos);
  }
}

TEST_F(Pass, InjectedFailure) {
  options().inject_failure = "stage";
  EXPECT_THROW(run_pass("stage.one", {}, [] { return true; }), InternalError);
  EXPECT_NO_THROW(run_pass("other", {}, [] { return true; }));
}

}  // namespace
}  // namespace kiln
