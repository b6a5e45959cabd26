#pragma once
#include "python/cpython/ref.h"

namespace kiln::py {

/// The arguments that a call of `code` has bound to its first locals, as a call would be given them again: `args` a
/// tuple, `kwargs` a dict of those that take keywords only. Throws PythonError.
struct BoundArguments {
  BoundArguments(PyCodeObject* code, PyObject* const* locals);
  Ref args, kwargs;
};

}  // namespace kiln::py
