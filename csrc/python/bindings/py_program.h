#pragma once
#include "joint/joint.h"
#include "python/bindings/bindings.h"
#include "python/frame/mode.h"

namespace kiln::bindings {

/// Where C++ calls the Python code of a traced program or of a compiled graph: the GIL is held, and nothing of that
/// code is compiled, though the call may come from the backward of a compiled function whose eager parts are running.
class PythonScope {
 public:
  PythonScope() : quiet_(frame::mode().config, nullptr) {}

 private:
  pybind11::gil_scoped_acquire gil_;
  frame::Scoped<frame::ConfigPtr> quiet_;
};

/// A Python object for a holder that may be dropped where there is no GIL: as the last of a tensor's history, with the
/// tensor.
using Held = std::shared_ptr<pybind11::object>;
Held hold(pybind11::object o);

/// A Python function of tensors as a joint::Program: called with as many positional tensors, returns a tensor, None, or
/// a list or tuple of these. Takes the GIL to call; a Python exception passes through as pybind11::error_already_set.
joint::Program python_program(pybind11::object fn);

/// joint::trace_joint of a Python function, at `examples`.
joint::Joint trace_program(const pybind11::object& fn, const std::vector<at::Tensor>& examples);

/// What a Python function returned, as tensors (None: undefined). Throws UserError for anything else.
std::vector<at::Tensor> to_tensors(pybind11::handle value);

}  // namespace kiln::bindings
