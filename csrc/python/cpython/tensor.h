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

/// Whether a tensor is equal, as the key of a dict, to itself alone: its hash is that of torch.Tensor, its id().
inline bool hashes_by_id(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("__hash__");
  static PyObject* const own = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(THPVariableClass), name);
  return _PyType_Lookup(Py_TYPE(tensor), name) == own;
}

inline Py_hash_t hash_of_id(PyObject* o) { return static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(o)); }

/// dict[key], borrowed, for a key that need not be a constant; null without an error if there is none. A tensor's hash
/// is a function in Python, which is not run.
inline PyObject* item_at(PyObject* dict, PyObject* key) {
  PyObject* const value = is_tensor(key) && hashes_by_id(key) ? _PyDict_GetItem_KnownHash(dict, key, hash_of_id(key))
                                                              : PyDict_GetItemWithError(dict, key);
  if (!value) PyErr_Clear();
  return value;
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
