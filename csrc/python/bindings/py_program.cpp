#include "python/bindings/py_program.h"

#include "base/error.h"
#include "python/cpython/tensor.h"
#include "python/frame/engine.h"

namespace kiln::bindings {
namespace {

at::Tensor to_tensor(PyObject* o) {
  if (o == Py_None) return {};
  if (!py::is_tensor(o)) throw UserError(std::string("a tensor or None is expected, not ") + Py_TYPE(o)->tp_name);
  return THPVariable_Unpack(o);
}

}  // namespace

std::vector<at::Tensor> to_tensors(pybind11::handle value) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) return {to_tensor(value.ptr())};
  std::vector<at::Tensor> out;
  for (pybind11::handle item : value) out.push_back(to_tensor(item.ptr()));
  return out;
}

Held hold(pybind11::object o) {
  return {new pybind11::object(std::move(o)), [](pybind11::object* held) {
            if (!Py_IsInitialized()) return;
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

joint::Program python_program(pybind11::object fn) {
  return [held = hold(std::move(fn))](const std::vector<at::Tensor>& inputs) {
    const PythonScope python;
    pybind11::tuple args(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      args[i] = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(inputs[i]));
    return to_tensors((*held)(*args));
  };
}

joint::Joint trace_program(const pybind11::object& fn, const std::vector<at::Tensor>& examples) {
  frame::start_engine();
  return joint::trace_joint(python_program(fn), examples);
}

}  // namespace kiln::bindings
