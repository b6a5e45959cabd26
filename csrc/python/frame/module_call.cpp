#include "python/frame/module_call.h"

#include <torch/csrc/jit/frontend/tracer.h>

#include "python/capture/callables.h"
#include "python/cpython/py311.h"
#include "python/frame/skip.h"
#include "python/pch.h"

namespace kiln::frame {
namespace {

PyObject* interned(const char* s) { return PyUnicode_InternFromString(s); }

bool is_named(PyFunctionObject* f, const char* name) {
  return PyUnicode_CompareWithASCIIString(reinterpret_cast<PyCodeObject*>(f->func_code)->co_name, name) == 0;
}

}  // namespace

bool ModuleCall::applies(PyFunctionObject* function, PyObject* self) {
  PyTypeObject* module = nn_module_type();
  if (!self || !module || !PyType_IsSubtype(Py_TYPE(self), module)) return false;
  for (const char* name : {"_wrapped_call_impl", "_call_impl"}) {
    PyObject* own = PyDict_GetItemString(module->tp_dict, name);
    if (own == reinterpret_cast<PyObject*>(function)) return true;
  }
  return false;
}

bool ModuleCall::refresh(PyFunctionObject* function, PyObject* self) {
  static PyObject* const instance_names[] = {interned("_backward_hooks"), interned("_backward_pre_hooks"),
                                             interned("_forward_hooks"), interned("_forward_pre_hooks")};
  static PyObject* const global_names[] = {interned("_global_backward_pre_hooks"), interned("_global_backward_hooks"),
                                           interned("_global_forward_hooks"), interned("_global_forward_pre_hooks")};
  static PyObject* const forward = interned("forward");
  static PyObject* const call_impl = interned("_call_impl");
  static PyObject* const compiled = interned("_compiled_call_impl");
  forward_ = nullptr;
  type_ = Py_TYPE(self);
  type_version_ = py311::type_version(type_);
  PyObject** where = _PyObject_GetDictPtr(self);
  if (!where || !*where || !type_version_) return false;
  dict_ = *where;
  dict_version_ = py311::dict_version(dict_);
  globals_version_ = py311::dict_version(function->func_globals);
  for (int i = 0; i < 4; ++i) {
    hooks_[i] = PyDict_GetItemWithError(dict_, instance_names[i]);
    hooks_[i + 4] = PyDict_GetItemWithError(function->func_globals, global_names[i]);
    if (!hooks_[i] || !hooks_[i + 4] || !PyDict_Check(hooks_[i]) || !PyDict_Check(hooks_[i + 4])) return false;
  }
  // Replaced for this instance, or for its class.
  if (PyDict_GetItemWithError(dict_, forward)) return false;
  if (PyDict_GetItemWithError(dict_, call_impl)) return false;
  if (_PyType_Lookup(type_, call_impl) != _PyType_Lookup(nn_module_type(), call_impl)) return false;
  if (is_named(function, "_wrapped_call_impl")) {
    PyObject* own = PyDict_GetItemWithError(dict_, compiled);
    if (own && own != Py_None) return false;
    PyObject* of_class = _PyType_Lookup(type_, compiled);
    if (of_class && of_class != Py_None) return false;
  }
  PyObject* found = _PyType_Lookup(type_, forward);
  if (!found || !PyFunction_Check(found)) return false;
  // What is called in its place is called by captured code.
  if (capture::policy_of_code(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(found))) == capture::Policy::Polyfill)
    return false;
  forward_ = reinterpret_cast<PyFunctionObject*>(found);
  return true;
}

PyFunctionObject* ModuleCall::forward(PyFunctionObject* function, PyObject* self) {
  if (torch::jit::tracer::isTracing()) return nullptr;
  PyObject** where = _PyObject_GetDictPtr(self);
  const bool same = where && *where && *where == dict_ && Py_TYPE(self) == type_ &&
                    type_->tp_version_tag == type_version_ && py311::dict_version(dict_) == dict_version_ &&
                    py311::dict_version(function->func_globals) == globals_version_;
  if (!same) {
    const bool found = refresh(function, self);
    PyErr_Clear();
    if (!found) return nullptr;
  }
  if (!forward_) return nullptr;
  for (PyObject* hooks : hooks_)
    if (PyDict_GET_SIZE(hooks) != 0) return nullptr;
  return forward_;
}

}  // namespace kiln::frame
