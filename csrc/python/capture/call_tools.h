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

}  // namespace kiln::capture
