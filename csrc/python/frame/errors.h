#pragma once
#include <exception>
#include <string>

#include "python/cpython/ref.h"

namespace kiln::frame {

/// Sets kiln.exc.<name> with `message` as the current Python exception and throws py::PythonError.
[[noreturn]] void raise(const char* name, const std::string& message);
/// Sets the Python exception that belongs to a C++ exception: kiln's own classes, PyTorch's for c10::Error. A
/// PythonError leaves the one that is set.
void set_python_error(std::exception_ptr error);

}  // namespace kiln::frame
