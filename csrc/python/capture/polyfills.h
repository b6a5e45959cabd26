#pragma once
#include "python/cpython/py311.h"
#include "python/cpython/ref.h"

namespace kiln::capture {

/// A call of what kiln._polyfills has in place of a function, with the arguments that are bound in its frame.
struct PolyfillCall {
  /// Throws py::PythonError if there is no such polyfill.
  explicit PolyfillCall(py311::Frame* frame);
  py::Ref function, args, kwargs;
};

}  // namespace kiln::capture
