#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace kiln::runtime {

/// The default generator of the CPU, as it is when this is made.
class GeneratorState {
 public:
  GeneratorState() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::scoped_lock lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  void restore() const {
    at::Generator generator = generator_;
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace kiln::runtime
