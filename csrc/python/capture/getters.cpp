// Objects of operator.itemgetter, attrgetter and methodcaller, whose work C does unseen: a call runs Python that does
// the same (kiln/_polyfills.py), with what the object says of itself when it is copied.
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

/// What makes it a getter's, by class.
PyObject* functions() {
  static PyObject* const functions = PyObject_GetAttrString(polyfills(), "GETTERS");
  return functions;
}

}  // namespace

bool is_getter(PyTypeObject* t) {
  return functions() && PyDict_GetItemWithError(functions(), reinterpret_cast<PyObject*>(t));
}

PyObject* Machine::call_getter(PyObject* getter, PyObject* subject) {
  const py::Ref reduced = py::Ref::steal(PyObject_CallMethod(getter, "__reduce__", nullptr));
  if (!reduced) return nullptr;
  // A method's keywords are in a partial instead of the class.
  PyObject* function = PyDict_GetItemWithError(functions(), PyTuple_GET_ITEM(reduced.get(), 0));
  PyObject* given = PyTuple_GET_ITEM(reduced.get(), 1);
  bool plain = function != nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) plain = plain && is_constant(PyTuple_GET_ITEM(given, i));
  PyErr_Clear();
  if (!plain)
    return graph_break("call-of-unknown-object", std::string("a call of an object of class ") +
                                                     Py_TYPE(getter)->tp_name + " that holds more than constants");
  if (const Known* k = find_plain(getter)) guard(guards::Guard::Kind::Is, k->source, getter);
  PyObject* args[] = {nullptr, subject, given};
  return call(function, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

}  // namespace kiln::capture
