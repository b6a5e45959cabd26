#pragma once
#include "joint/joint.h"
#include "python/bindings/bindings.h"

namespace kiln::bindings {

/// A Python function of tensors as a joint::Program: called with as many positional tensors, returns a tensor, None, or
/// a list or tuple of these. Takes the GIL to call; a Python exception passes through as pybind11::error_already_set.
joint::Program python_program(pybind11::object fn);

/// What a Python function returned, as tensors (None: undefined). Throws UserError for anything else.
std::vector<at::Tensor> to_tensors(pybind11::handle value);

}  // namespace kiln::bindings
