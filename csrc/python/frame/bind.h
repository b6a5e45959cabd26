#pragma once
#include <Python.h>

#include <array>
#include <vector>

#include "python/cpython/ref.h"

namespace kiln::frame {

/// Arguments bound to a function's first slots, as CPython would bind them.
struct Bound {
  PyObject* const* locals = nullptr;  // borrowed: from the caller's array, or from `slots`
  int count = 0;                      // positional, keyword-only, *args, **kwargs
  std::array<PyObject*, 16> few;
  std::vector<PyObject*> many;
  py::Ref rest, keywords;  // the new *args tuple and **kwargs dict
};

/// Binds a call of `function` (with `self` in front, if not null). False if CPython would raise, or in cases that are
/// rare; `out` is then unspecified and no exception is set. `args` must stay alive with the result.
bool bind(PyFunctionObject* function, PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames,
          Bound* out);

}  // namespace kiln::frame
