#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

namespace kiln::aten {

/// This thread's modes that change what an operator on the CPU does, as they are when this is made.
struct Modes {
  bool grad = at::GradMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType autocast_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool autocast_cache = at::autocast::is_autocast_cache_enabled();

  void restore() const {
    at::GradMode::set_enabled(grad);
    at::autocast::set_autocast_enabled(at::kCPU, autocast);
    at::autocast::set_autocast_dtype(at::kCPU, autocast_dtype);
    at::autocast::set_autocast_cache_enabled(autocast_cache);
  }
};

}  // namespace kiln::aten
