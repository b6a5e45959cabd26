#pragma once
#include <Python.h>

#include <string>

namespace kiln::capture {

/// "module.qualified_name" of a callable, for messages.
std::string describe(PyObject* callable);

/// How many arguments a vectorcall has, by position and by name.
inline size_t count_of(size_t nargsf, PyObject* kwnames) {
  return static_cast<size_t>(PyVectorcall_NARGS(nargsf) + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0));
}

/// Whether one of the arguments is a scalar or an array of NumPy's, which takes a stand-in for an object of Python's.
bool numpy_among(PyObject* const* args, size_t n);

}  // namespace kiln::capture
