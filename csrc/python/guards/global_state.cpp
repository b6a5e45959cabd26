#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include "aten/transforms.h"
#include "python/cpython/py311.h"
#include "python/cpython/ref.h"
#include "python/guards/guard.h"
#include "python/pch.h"

namespace kiln::guards {

namespace {

/// Inside the Python kernel of an operator: autograd has passed, though tensors still say requires_grad.
bool below_autograd() {
  return !c10::InferenceMode::is_enabled() &&
         c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

/// Inside torch.jit.trace: its graph is made of the operators that are called.
bool traced_by_jit() { return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Tracer); }

/// Inside torch.autograd.forward_ad's dual_level: tensors may carry tangents, which no guard looks at.
bool forward_mode_active() {
  static PyObject* const globals =
      PyModule_GetDict(py::check(py::import_module("torch.autograd.forward_ad")).release());
  static uint64_t version = 0;
  static bool active = false;
  if (const uint64_t now = py311::dict_version(globals); now != version) {
    version = now;
    PyObject* level = PyDict_GetItemString(globals, "_current_level");
    active = level && PyLong_Check(level) && PyLong_AsLong(level) >= 0;
  }
  return active;
}

/// The hook of a saved_tensors_hooks that packs, borrowed, or null. Also where a trace has them rest.
PyObject* pack_hook() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (hooks.stack.empty() || hooks.disabled_error_message) return nullptr;
  return hooks.stack.top().first.ptr(getPyInterpreter());
}

using FunctionName = std::pair<const char*, const char*>;  // its module and qualified name
constexpr FunctionName kRecomputing = {"torch.utils.checkpoint", "_recomputation_hook.__init__.<locals>.pack_hook"};
constexpr FunctionName kKeepingHooks[] = {
    {"torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.pack_hook"},
    kRecomputing,
    {"torch.autograd.graph", "save_on_cpu.__init__.<locals>.pack_to_cpu"},
};

bool is_function_of(PyObject* o, const char* module, const char* name) {
  if (!PyFunction_Check(o)) return false;
  const auto* f = reinterpret_cast<PyFunctionObject*>(o);
  return f->func_module && PyUnicode_Check(f->func_module) &&
         PyUnicode_CompareWithASCIIString(f->func_module, module) == 0 &&
         PyUnicode_CompareWithASCIIString(f->func_qualname, name) == 0;
}

/// The hook that packs where this thread came from outside of compiled code into it.
thread_local const void* entered_under = nullptr;

}  // namespace

SavedHooks saved_hooks() {
  PyObject* const pack = pack_hook();
  if (!pack) return SavedHooks::None;
  for (const auto& [module, name] : kKeepingHooks)
    if (pack == entered_under && is_function_of(pack, module, name)) return SavedHooks::Keeping;
  return SavedHooks::Others;
}

bool recomputing() {
  PyObject* const pack = pack_hook();
  return pack && is_function_of(pack, kRecomputing.first, kRecomputing.second);
}

EnteredUnderHooks::EnteredUnderHooks() : before_(entered_under) { entered_under = pack_hook(); }
EnteredUnderHooks::~EnteredUnderHooks() { entered_under = before_; }

const char* eager_only() {
  if (saved_hooks() == SavedHooks::Others) return "saved-tensor hooks (activation checkpointing) are active";
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return "a TorchDispatchMode is active, which is to see each op";
  if (below_autograd()) return "this is the kernel of an operator, below autograd";
  if (aten::inside_transform()) return "a transform of torch.func is active, which is to see each operator";
  if (traced_by_jit()) return "torch.jit.trace is active, which is to see each operator";
  if (forward_mode_active()) return "forward-mode differentiation is active, which is to see each operator";
  return nullptr;
}

uint64_t pack_global_state() {
  uint64_t word = 0;
  int used = 0;
  const auto put = [&](uint64_t value, int bits) {
    word |= (value & ((uint64_t{1} << bits) - 1)) << used;
    used += bits;
  };
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  put(autograd.get_grad_mode(), 1);
  put(autograd.get_inference_mode(), 1);
  put(autograd.get_fw_grad_mode(), 1);
  const bool cpu = at::autocast::is_autocast_enabled(at::kCPU);
  const bool cuda = at::autocast::is_autocast_enabled(at::kCUDA);
  put(cpu, 1);
  put(cuda, 1);
  put(cpu ? static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)) : 0, 6);
  put(cuda ? static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)) : 0, 6);
  put((cpu || cuda) && at::autocast::is_autocast_cache_enabled(), 1);
  put(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()), 6);
  put(at::get_num_threads() > 1, 1);
  const at::Context& context = at::globalContext();
  put(context.deterministicAlgorithms(), 1);
  put(context.deterministicAlgorithmsWarnOnly(), 1);
  put(context.deterministicFillUninitializedMemory(), 1);
  put(static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state()), 2);
  put(static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::stack_len()), 8);
  put(static_cast<uint64_t>(c10::impl::TorchDispatchModeTLS::stack_len()), 8);
  put(static_cast<uint64_t>(saved_hooks()), 2);
  put(below_autograd(), 1);
  put(aten::inside_transform(), 1);
  put(forward_mode_active(), 1);
  put(traced_by_jit(), 1);
  return word;
}

}  // namespace kiln::guards
