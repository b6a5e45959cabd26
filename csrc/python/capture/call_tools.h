#pragma once
#include <Python.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kiln::capture {

/// "module.qualified_name" of a callable, for messages.
std::string describe(PyObject* callable);

/// How many arguments a vectorcall has, by position and by name.
inline size_t count_of(size_t nargsf, PyObject* kwnames) {
  return static_cast<size_t>(PyVectorcall_NARGS(nargsf) + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0));
}

/// What `function`, one of kiln's own, gives in place of a call of `callable`: it is given this, the arguments as a
/// tuple and those with names as a dict.
PyObject* call_instead(PyObject* function, PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames);
/// A member of one of kiln's modules. New reference; throws py::PythonError if there is none.
PyObject* member_of(const char* module, const char* name);

/// Whether one of the arguments is a scalar or an array of NumPy's, which takes a stand-in for an object of Python's.
bool numpy_among(PyObject* const* args, size_t n);

/// Whether `is` holds for `o`, or for what a list or tuple has among its items and those of the lists in it.
template <class Is>
bool any_within(PyObject* o, const Is& is) {
  if (!PyList_Check(o) && !PyTuple_Check(o)) return is(o);
  PyObject** const items = PySequence_Fast_ITEMS(o);
  return std::any_of(items, items + PySequence_Fast_GET_SIZE(o), [&](PyObject* i) { return any_within(i, is); });
}

/// What `o` holds, as its class tells the garbage collector; borrowed.
inline std::vector<PyObject*> referents_of(PyObject* o) {
  std::vector<PyObject*> held;
  const auto add = [](PyObject* part, void* to) {
    static_cast<std::vector<PyObject*>*>(to)->push_back(part);
    return 0;
  };
  if (Py_TYPE(o)->tp_traverse) Py_TYPE(o)->tp_traverse(o, add, &held);
  return held;
}

/// Whether it is an operator of another library that neither takes nor gives a tensor: what its kernel does, and tells,
/// depends on more than its arguments.
bool has_ways_of_its_own(PyObject* torch_operator);

}  // namespace kiln::capture
