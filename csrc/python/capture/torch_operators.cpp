#include <string>
#include <string_view>

#include "python/capture/machine.h"
#include "python/pch.h"

// The callables of torch.ops: packets (torch.ops.aten.add) and overloads (torch.ops.aten.add.Tensor).
namespace kiln::capture {

bool Machine::is_torch_operator(PyObject* o) {
  static PyObject* types = [] {
    PyObject* m = py::import_module("torch._ops");
    PyObject* t = m ? Py_BuildValue("(NN)", PyObject_GetAttrString(m, "OpOverload"),
                                    PyObject_GetAttrString(m, "OpOverloadPacket"))
                    : nullptr;
    Py_XDECREF(m);
    PyErr_Clear();
    return t;
  }();
  auto is = [&](int i) { return PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, i))); };
  return types && (is(0) || is(1));
}

void Machine::find_overload(PyObject* packet, PyObject* name) {
  PyObject** dict = _PyObject_GetDictPtr(packet);
  if ((dict && *dict && PyDict_Contains(*dict, name) != 0) || _PyType_Lookup(Py_TYPE(packet), name)) return;
  Paused paused_here(*this);
  const py::Ref made = py::Ref::steal(PyObject_GetAttr(packet, name));
  if (!made) PyErr_Clear();  // the program meets the error too
}

}  // namespace kiln::capture
