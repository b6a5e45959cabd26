#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <vector>

#include "python/cpython/tensor.h"

// torch.overrides.TorchFunctionMode: a stack of objects on this thread. A call of a torch function goes to the
// __torch_function__ of the topmost one, which runs without it.
namespace kiln::py {

/// Whether a torch function that is called now goes to a mode.
inline bool function_mode_active() { return at::impl::torch_function_mode_enabled(); }

inline int64_t num_function_modes() { return at::impl::PythonTorchFunctionTLS::stack_len(); }

/// The mode at place `i`, 0 being the outermost; borrowed. Null if there are not as many.
inline PyObject* function_mode(int64_t i) {
  return i < num_function_modes() ? at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter())
                                  : nullptr;
}

/// This thread's stack of modes as it was when this was made.
class FunctionModes {
 public:
  void restore() const { at::impl::PythonTorchFunctionTLS::set_state(state_); }
  /// How many of the outermost modes are still what they were.
  int64_t common() const {
    int64_t n = 0;
    while (n < size() && n < num_function_modes() && function_mode(n) == modes_[static_cast<size_t>(n)]) ++n;
    return n;
  }
  int64_t size() const { return static_cast<int64_t>(modes_.size()); }
  at::impl::TorchFunctionDisabledState disabled() const { return disabled_; }

 private:
  at::impl::PythonTorchFunctionTLS state_ = at::impl::PythonTorchFunctionTLS::get_state();
  at::impl::TorchFunctionDisabledState disabled_ = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  std::vector<PyObject*> modes_ = [] {
    std::vector<PyObject*> all;
    for (int64_t i = 0; i < num_function_modes(); ++i) all.push_back(function_mode(i));
    return all;
  }();
};

/// Puts the modes of this thread aside: what was recorded under them is not to go to them again.
class NoFunctionModes {
 public:
  NoFunctionModes() {
    if (aside_) at::impl::PythonTorchFunctionTLS::set_state({});
  }
  ~NoFunctionModes() {
    if (aside_) at::impl::PythonTorchFunctionTLS::set_state(*aside_);
  }
  NoFunctionModes(const NoFunctionModes&) = delete;

 private:
  std::optional<at::impl::PythonTorchFunctionTLS> aside_ =
      num_function_modes() > 0 ? std::optional(at::impl::PythonTorchFunctionTLS::get_state()) : std::nullopt;
};

/// While one lives, an attribute of the tensor is what PyTorch's accessor says: no mode and no class is asked, which
/// the program would notice.
class PastOverrides {
 public:
  explicit PastOverrides(PyObject* o) {
    if (!is_tensor(o) || (THPVariable_CheckExact(o) && !function_mode_active())) return;
    before_ = at::impl::PythonTorchFunctionTLS::get_disabled_state();
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::ALL_DISABLED);
  }
  ~PastOverrides() {
    if (before_) at::impl::PythonTorchFunctionTLS::set_disabled_state(*before_);
  }
  PastOverrides(const PastOverrides&) = delete;

 private:
  std::optional<at::impl::TorchFunctionDisabledState> before_;
};

}  // namespace kiln::py
