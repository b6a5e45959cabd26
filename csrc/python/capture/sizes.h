#pragma once
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "aten/sizes.h"
#include "python/cpython/ref.h"

// What sizes.cpp and reals.cpp, the two kinds of open numbers, have of each other.
namespace kiln::capture {

/// kiln._sizes.Size and kiln._sizes.Real; null before load_sizes().
PyTypeObject* size_type();
PyTypeObject* real_type();
/// Of the capture whose numbers these are, under the GIL; null if there is none.
aten::Sizes* sizes_of_capture();

/// The expression of a Size, or of an int; none for other objects.
std::optional<symbolic::Expr> expr_of(PyObject* o);
/// What a Real is, or a Size, an int or a float as one; none for other objects.
std::optional<symbolic::Real> as_real(PyObject* o);
/// The object of such a class. New references; a plain int or float if it is one.
PyObject* make_size(const symbolic::Expr& e);
PyObject* make_real(const symbolic::Real& r);
/// The number itself, from now on a condition, as an object of its class; other objects as they are. New reference.
PyObject* pinned(PyObject* o);

/// The class of an open number for the program: int or float, or np.int64 or np.float64 if it is one of NumPy's. New
/// reference.
py::Ref class_of(PyObject* number);
/// Whether `o` is an open number of NumPy's.
bool is_of_numpy(PyObject* o);
/// Whether PyTorch's bindings ask for a class: they ask whether it is a number, and mean Python's.
bool asked_by_torch();
/// Whether `result`, of `a` and `b`, is NumPy's if one of them is. One that became a constant is computed of the
/// values.
bool keeps_class(PyObject* a, PyObject* b, const symbolic::Number& result);
/// np.True_ or np.False_.
PyObject* truth_of_numpy(PyObject* truth);
/// What NumPy's comparisons give, if one of the operands is its. Steals the truth that Python's give.
PyObject* truth_between(PyObject* a, PyObject* b, PyObject* truth);

using BinaryFunction = PyObject* (*)(PyObject*, PyObject*);
/// What the numbers themselves give.
PyObject* on_numbers(PyObject* a, PyObject* b, BinaryFunction f);
PyObject* power_of_numbers(PyObject* a, PyObject* b);
/// A method of the number, whose name it is.
template <const char* const& name>
PyObject* method_of_number(PyObject* self, PyObject* args) {
  const py::Ref n = py::Ref::steal(pinned(self));
  const py::Ref method = n ? py::Ref::steal(PyObject_GetAttrString(n.get(), name)) : py::Ref();
  return method ? PyObject_CallObject(method.get(), args) : nullptr;
}
/// The definition `m_<id>` of the method __<id>__ for a class of open numbers.
#define KILN_METHOD_OF_NUMBER(id)           \
  const char* const k_##id = "__" #id "__"; \
  PyMethodDef m_##id = {k_##id, &method_of_number<k_##id>, METH_VARARGS, nullptr};
/// An attribute that the number's class for the program has, and the open number has not.
PyObject* attribute_of_number(PyObject* number, PyObject* name);

/// Python's operator `op`, which `f` is, between two numbers of which one is open; NotImplemented for others.
PyObject* real_arithmetic(symbolic::Real::Op op, PyObject* a, PyObject* b, BinaryFunction f);
/// The same of comparisons; `op`: Py_LT to Py_GE.
PyObject* compare_reals(PyObject* a, PyObject* b, int op);

/// torch.sym_min and torch.sym_max where one is a float: the result is.
PyObject* extreme_of_reals(PyObject* a, PyObject* b, bool min);

c10::SymNode node_of(PyObject* number);
PyObject* made_with_node(PyTypeObject* type, const pybind11::object& node);
void add_members(PyTypeObject* type, const std::vector<PyMethodDef*>& methods,
                 const std::vector<PyGetSetDef*>& getters);
void load_reals(PyObject* module);

}  // namespace kiln::capture
