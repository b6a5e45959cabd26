#pragma once
#include "python/cpython/ref.h"

namespace kiln::capture {

/// Raises AttributeError as a lookup does. False.
bool missing(PyObject* o, PyObject* name);

/// The C function behind a type's slot wrapper of this name, null if it is something else.
void* slot_function(PyTypeObject* t, PyObject* name);

}  // namespace kiln::capture
