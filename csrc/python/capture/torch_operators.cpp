#include <string>
#include <string_view>

#include "python/capture/machine.h"
#include "python/pch.h"

// The callables of torch.ops: packets (torch.ops.aten.add) and overloads (torch.ops.aten.add.Tensor).
namespace kiln::capture {

bool Machine::is_torch_operator(PyObject* o) {
  static PyObject* types = [] {
    PyObject* m = PyImport_ImportModule("torch._ops");
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

void Machine::guard_operator(PyObject* o) {
  guard_identity(o);
  if (find(o)) return;
  // Found through torch.ops, from which it goes when its library is destroyed; those of PyTorch stay.
  static PyObject* ops = PyObject_GetAttrString(PyImport_AddModule("torch"), "ops");
  py::Ref packet = py::Ref::steal(PyObject_GetAttrString(o, "_overloadpacket"));
  PyErr_Clear();
  if (!packet) packet = py::Ref::borrow(o);
  const py::Ref text = py::Ref::steal(PyObject_GetAttrString(packet.get(), "_qualified_op_name"));
  const char* qualified = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  const std::string_view name = qualified ? qualified : "";
  const size_t colons = name.find("::");
  PyErr_Clear();
  if (colons == std::string_view::npos || name.starts_with("aten::") || name.starts_with("prims::")) return;
  const py::Ref space = py::Ref::steal(PyObject_GetAttrString(ops, std::string(name.substr(0, colons)).c_str()));
  PyErr_Clear();
  if (!space || !PyModule_Check(space.get())) return;
  PyObject* dict = PyModule_GetDict(space.get());
  const py::Ref key = py::Ref::steal(PyUnicode_InternFromString(std::string(name.substr(colons + 2)).c_str()));
  if (key && PyDict_GetItemWithError(dict, key.get()) == packet.get())
    guard(Guard::Kind::Is,
          child(guards::Source::Kind::DictItem, child(guards::Source::Kind::Const, nullptr, dict), key.get()),
          packet.get());
}

}  // namespace kiln::capture
