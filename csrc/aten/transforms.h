#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <optional>
#include <string>

// torch.func's transforms (vmap, grad, vjp): a stack of levels on this thread, whose tensors wrap those of the level
// below. An operator comes to the dispatcher once per level, and at last, with plain tensors, below all of them.
namespace kiln::aten {

/// Whether a level is active: the call at hand has still to be transformed.
inline bool inside_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

/// Whether a level has wrapped this tensor around another.
inline bool is_wrapper(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return t.defined() && t.key_set().has_any(kWrappers);
}

/// What transforms set on this thread while they run, as it is when this is made.
struct TransformModes {
  std::optional<std::string> saved_hooks_disabled = at::SavedTensorDefaultHooks::get_disabled_error_message();
  bool dual_level = torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  bool forward_grad = c10::AutogradState::get_tls_state().get_fw_grad_mode();

  void restore() const {
    if (saved_hooks_disabled)
      at::SavedTensorDefaultHooks::disable(*saved_hooks_disabled);
    else
      at::SavedTensorDefaultHooks::enable();
    if (!dual_level && torch::autograd::ForwardADLevel::try_get_by_idx(0))
      torch::autograd::ForwardADLevel::release_idx(0);
    c10::AutogradState::get_tls_state().set_fw_grad_mode(forward_grad);
  }
};

}  // namespace kiln::aten
