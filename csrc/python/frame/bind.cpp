#include "python/frame/bind.h"

#include <algorithm>

#include "python/frame/resume.h"

namespace kiln::frame {

bool bind(PyFunctionObject* function, PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
          Bound* out) {
  auto* code = reinterpret_cast<PyCodeObject*>(function->func_code);
  const bool plain = !(code->co_flags & (CO_VARARGS | CO_VARKEYWORDS)) && code->co_kwonlyargcount == 0;
  const Py_ssize_t given = nargs + (self ? 1 : 0);
  out->count = num_arguments(code);
  if (plain && !kwnames && !self && nargs == code->co_argcount) {
    out->locals = args;
    return true;
  }
  PyObject** slots = out->few.data();
  if (out->count > static_cast<int>(out->few.size())) {
    out->many.resize(static_cast<size_t>(out->count));
    slots = out->many.data();
  }
  std::fill_n(slots, out->count, nullptr);
  out->locals = slots;

  const int positional = code->co_argcount;
  const int named = positional + code->co_kwonlyargcount;
  const auto argument = [&](Py_ssize_t i) { return self ? (i == 0 ? self : args[i - 1]) : args[i]; };
  for (Py_ssize_t i = 0; i < std::min<Py_ssize_t>(given, positional); ++i) slots[i] = argument(i);
  if (code->co_flags & CO_VARARGS) {
    const Py_ssize_t extra = std::max<Py_ssize_t>(0, given - positional);
    out->rest = py::check(PyTuple_New(extra));
    for (Py_ssize_t i = 0; i < extra; ++i) PyTuple_SET_ITEM(out->rest.get(), i, Py_NewRef(argument(positional + i)));
    slots[named] = out->rest.get();
  } else if (given > positional) {
    return false;
  }
  if (code->co_flags & CO_VARKEYWORDS) {
    out->keywords = py::check(PyDict_New());
    slots[out->count - 1] = out->keywords.get();
  }
  const Py_ssize_t num_keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    PyObject* value = args[nargs + k];
    int found = -1;
    for (int i = code->co_posonlyargcount; i < named && found < 0; ++i)
      if (PyTuple_GET_ITEM(code->co_localsplusnames, i) == name) found = i;
    for (int i = code->co_posonlyargcount; i < named && found < 0; ++i)
      if (PyUnicode_Compare(PyTuple_GET_ITEM(code->co_localsplusnames, i), name) == 0) found = i;
    if (found >= 0) {
      if (slots[found]) return false;
      slots[found] = value;
    } else if (out->keywords) {
      if (PyDict_SetItem(out->keywords.get(), name, value) < 0) throw py::PythonError{};
    } else {
      return false;
    }
  }
  PyObject* defaults = function->func_defaults;
  const Py_ssize_t num_defaults = defaults ? PyTuple_GET_SIZE(defaults) : 0;
  for (int i = 0; i < positional; ++i) {
    if (slots[i]) continue;
    const Py_ssize_t d = i - (positional - num_defaults);
    if (d < 0) return false;
    slots[i] = PyTuple_GET_ITEM(defaults, d);
  }
  for (int i = positional; i < named; ++i) {
    if (slots[i]) continue;
    PyObject* value = function->func_kwdefaults ? PyDict_GetItemWithError(function->func_kwdefaults,
                                                                          PyTuple_GET_ITEM(code->co_localsplusnames, i))
                                                : nullptr;
    if (!value) {
      PyErr_Clear();
      return false;
    }
    slots[i] = value;
  }
  return true;
}

}  // namespace kiln::frame
