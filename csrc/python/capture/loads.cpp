// PyTorch's loaders of decompositions: functions that run once in a process, when the first transform does. A capture
// never calls one. Where it matters that one has not run, the program's call runs in eager and has it run.
#include <algorithm>
#include <string>
#include <string_view>

#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

/// The functions behind which are the operators that vmap has no batching rule for until its loader has run.
bool reaches_decomposition(std::string_view function) {
  // And addr_, mse_loss_backward, nll_loss_nd, cross_entropy_loss.
  static constexpr std::string_view kBeginnings[] = {"mse_loss", "smooth_l1_loss", "huber_loss",
                                                     "nll_loss", "cross_entropy",  "addr"};
  return std::any_of(std::begin(kBeginnings), std::end(kBeginnings),
                     [&](std::string_view f) { return function.starts_with(f); });
}

}  // namespace

PyObject* Machine::put_off_for(const std::string& loader) {
  return put_off(loader + " has not run yet in this process");
}

PyObject* Machine::put_off(std::string why) {
  given_up = std::move(why);
  not_yet = broken = true;
  PyErr_SetNone(graph_break_type());
  return nullptr;
}

PyObject* Machine::call_loader(py311::Frame* frame) {
  const std::string name = PyUnicode_AsUTF8(frame->f_code->co_qualname);
  // vmap's loader sets this flag of its module; that of forward-mode autograd imports a module.
  if (PyObject* loaded = PyDict_GetItemString(frame->f_func->func_globals, "DECOMPOSITIONS_LOADED")) {
    if (loaded != Py_True) missing_loader = name;
  } else if (!PyDict_GetItemString(PyImport_GetModuleDict(), "torch._decomp.decompositions_for_jvp")) {
    return put_off_for(name);
  }
  return Py_NewRef(Py_None);
}

bool Machine::waits_for_loader(PyObject* function) {
  py::Ref text;
  std::string_view name = name_of(function);
  if (name.empty() && is_torch_operator(function)) {
    text = py::Ref::steal(PyObject_GetAttrString(function, "__name__"));
    PyErr_Clear();
    if (text && PyUnicode_Check(text.get())) name = PyUnicode_AsUTF8(text.get());
  }
  if (!reaches_decomposition(name)) return false;
  decomposition_called = true;
  return backward_waits_for_loader();
}

bool Machine::backward_waits_for_loader() const {
  return decomposition_called && aten::inside_transform() && !missing_loader.empty();
}

}  // namespace kiln::capture
