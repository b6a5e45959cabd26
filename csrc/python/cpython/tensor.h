#pragma once
#include <ATen/ScalarOps.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string_view>

namespace kiln::py {

/// Whether `o` is a torch.Tensor, by its type alone. PyTorch's THPVariable_Check asks isinstance(), which reads
/// `__class__` and so may run the program's own `__getattribute__`.
inline bool is_tensor(PyObject* o) {
  return THPVariableClass && PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

/// Whether `o` is a float, or the float of NumPy's that is one (np.float64).
inline bool is_float(PyObject* o) {
  return PyFloat_CheckExact(o) || (PyFloat_Check(o) && std::string_view(Py_TYPE(o)->tp_name) == "numpy.float64");
}

/// Whether `o` is np.int64, which is no int.
inline bool is_numpy_int(PyObject* o) {
  return !PyLong_Check(o) && std::string_view(Py_TYPE(o)->tp_name) == "numpy.int64";
}

/// What a graph gets for a tensor, or, as a 0-dim tensor of float64 or int64, for a float or int that it computes with.
/// `o` is one of these, and the int fits.
inline at::Tensor graph_input(PyObject* o) {
  if (PyFloat_Check(o)) return at::scalar_tensor(PyFloat_AS_DOUBLE(o), at::TensorOptions().dtype(at::kDouble));
  if (PyLong_CheckExact(o))
    return at::scalar_tensor(int64_t{PyLong_AsLongLong(o)}, at::TensorOptions().dtype(at::kLong));
  return THPVariable_Unpack(o);
}

}  // namespace kiln::py
