#pragma once
#include <Python.h>

#include <string>

namespace kiln::guards {

/// A printable form of `o` that runs none of the user's code: repr for builtin constants, names of types, the type's
/// name otherwise; cut at `limit` characters. Keeps any exception that is set.
std::string repr_of(PyObject* o, size_t limit = 80);

}  // namespace kiln::guards
