#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "python/capture/call_tools.h"
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

bool has_ways_of_its_own(PyObject* torch_operator) {
  py::Ref name = py::Ref::steal(PyObject_GetAttrString(torch_operator, "_qualified_op_name"));  // of a packet
  if (!name) {
    PyErr_Clear();
    const py::Ref schema = py::Ref::steal(PyObject_GetAttrString(torch_operator, "_schema"));
    name = py::Ref::steal(schema ? PyObject_GetAttrString(schema.get(), "name") : nullptr);
  }
  const char* const text = name && PyUnicode_Check(name.get()) ? PyUnicode_AsUTF8(name.get()) : nullptr;
  PyErr_Clear();
  if (!text) return false;
  for (const char* own : {"aten::", "prim::", "prims::", "kiln::"})
    if (strncmp(text, own, strlen(own)) == 0) return false;
  const auto found = c10::Dispatcher::singleton().findSchema({text, ""});
  if (!found) return false;
  const auto tensor = [](const c10::Argument& a) { return a.type()->str().find("Tensor") != std::string::npos; };
  const c10::FunctionSchema& schema = found->schema();
  return std::ranges::none_of(schema.arguments(), tensor) && std::ranges::none_of(schema.returns(), tensor);
}

void Machine::find_overload(PyObject* packet, PyObject* name) {
  PyObject** dict = _PyObject_GetDictPtr(packet);
  if ((dict && *dict && PyDict_Contains(*dict, name) != 0) || _PyType_Lookup(Py_TYPE(packet), name)) return;
  Paused paused_here(*this);
  const py::Ref made = py::Ref::steal(PyObject_GetAttr(packet, name));
  if (!made) PyErr_Clear();  // the program meets the error too
}

}  // namespace kiln::capture
