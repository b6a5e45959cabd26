#pragma once
#include <Python.h>

#include "python/cpython/ref.h"

namespace kiln::guards {

/// What an object that lends its memory (an array of NumPy's, a bytearray, a NumPy scalar) holds now: layout, type of
/// elements and a copy of the bytes. Null, without an error, if it lends none, holds objects or more than `limit`
/// bytes. Runs no Python code.
py::Ref contents_of(PyObject* o, Py_ssize_t limit);
/// True if `o` holds what contents_of() gave.
bool has_contents(PyObject* o, PyObject* contents);
/// True if two objects that lend their memory hold the same.
bool same_contents(PyObject* a, PyObject* b);

}  // namespace kiln::guards
