#pragma once
#include <torch/csrc/autograd/python_variable.h>

namespace kiln::py {

/// Whether `o` is a torch.Tensor, by its type alone. PyTorch's THPVariable_Check asks isinstance(), which reads
/// `__class__` and so may run the program's own `__getattribute__`.
inline bool is_tensor(PyObject* o) {
  return THPVariableClass && PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

}  // namespace kiln::py
