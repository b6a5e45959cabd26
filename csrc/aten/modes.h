#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "aten/convert.h"

namespace kiln::aten {

/// This thread's modes that change what an operator on the CPU does, as they are when this is made.
struct Modes {
  bool grad = at::GradMode::is_enabled();
  bool inference = c10::InferenceMode::is_enabled();  // restore() leaves it: blocks end by themselves
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

/// Whether autograd records: enable_grad() inside of inference_mode() changes nothing.
inline bool grad_enabled() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

/// Puts the CPU's autocast into the state that a node was recorded in; back at the end. Casts of weights are not
/// cached: the cache would outlive the run.
class AutocastStates {
 public:
  AutocastStates() { at::autocast::set_autocast_cache_enabled(false); }
  ~AutocastStates() { before_.restore(); }
  AutocastStates(const AutocastStates&) = delete;
  /// `dtype`: graph::Node::autocast.
  void set(DType dtype) const {
    at::autocast::set_autocast_enabled(at::kCPU, dtype != DType::Opaque);
    if (dtype != DType::Opaque) at::autocast::set_autocast_dtype(at::kCPU, scalar_type_of(dtype));
  }

 private:
  Modes before_;
};

/// The program's saved-tensor hooks are for tensors with data: a trace on stand-ins has them rest.
class NoSavedTensorHooks {
 public:
  NoSavedTensorHooks() = default;
  ~NoSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tracing(before_); }
  NoSavedTensorHooks(const NoSavedTensorHooks&) = delete;

 private:
  bool before_ = at::SavedTensorDefaultHooks::set_tracing(true);
};

}  // namespace kiln::aten
