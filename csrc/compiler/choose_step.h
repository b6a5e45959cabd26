#pragma once
#include <memory>

#include "runtime/plan.h"

namespace kiln::compiler {

/// Two ways to compute one thing, a product or a convolution: which is faster depends on shapes and the machine (one
/// library is built for its maker's cores), so it is measured, on zeros in memory of its own, and remembered for the
/// process.
class StepChooser {
 public:
  /// The faster of `ours` and `library`, which read and write the same slots of `plan`. Takes `ours` when measuring is
  /// off (pass "plan.measure_products" disabled), when this chooser's time is spent, or when a measurement fails.
  std::unique_ptr<runtime::Step> choose(const std::string& what, std::unique_ptr<runtime::Step> ours,
                                        std::unique_ptr<runtime::Step> library, const runtime::Plan& plan);

 private:
  double seconds_left_ = 0.15;  // of one compile
};

}  // namespace kiln::compiler
