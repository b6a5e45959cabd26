#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "python/capture/call_tools.h"
#include "python/capture/machine.h"
#include "python/pch.h"

// The callables of torch.ops: packets (torch.ops.aten.add) and overloads (torch.ops.aten.add.Tensor); and calls of
// operators as nodes at torch level.
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

namespace {
/// Of a TorchBind class (torch.classes): a packed weight.
bool is_script_object(PyObject* o) {
  static PyObject* const type = PyObject_GetAttrString(PyImport_AddModule("torch._C"), "ScriptObject");
  return PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(type));
}
}  // namespace

PyObject* Machine::torch_call(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames,
                              const std::function<PyObject*()>& f) {
  if (waits_for_loader(target)) return put_off_for(missing_loader);
  // What a transform, or a mode, makes of a call has its own arguments, and appears at torch level as what it runs.
  if (const bool to_class = goes_to_class(args, count_of(n, kwnames));
      to_class || aten::inside_transform() || py::function_mode_active()) {
    if (!to_class) refuse_sizes("a function mode");
    return after_c_call(f());
  }
  if (options.for_fx && std::any_of(args, args + count_of(n, kwnames), is_script_object))
    return graph_break("unsupported-operator-argument",
                       "an object of a TorchBind class, in a graph for a backend that takes fx graphs");
  if (PyObject* size = ask_size(target, args, n, kwnames)) return size;
  if (PyErr_Occurred()) return nullptr;
  const int64_t before = trace.num_nodes;
  ++torch_depth;
  PyObject* r = f();
  --torch_depth;
  note_sizes_told(target, args, n, kwnames, r, before);
  r = after_c_call(r);
  if (r && py::is_tensor(r) && !captures_class(r)) {
    const py::Ref made = py::Ref::steal(r);
    return break_at_class(r);
  }
  if (r && py::is_tensor(r)) note_class(r);
  if (r && differentiates_new_data(args, count_of(n, kwnames), r)) {
    Py_DECREF(r);
    return graph_break("autograd", "a use of a tensor that needs gradients and whose .data was written");
  }
  if (r && !checkpoint.undecided.empty() && !decide_kept()) Py_CLEAR(r);
  if (r && n > 0 && trace.num_nodes != before && reshapes_input(args[0])) {
    Py_DECREF(r);
    return graph_break("call-that-breaks",
                       describe(target) + " of an existing tensor, whose sizes or strides it changes");
  }
  if (!r || torch_depth > 0 || trace.num_nodes == before) return r;
  // A factory's requires_grad=True is set above the dispatcher.
  if (kwnames && py::is_tensor(r)) {
    const at::Tensor t = THPVariable_Unpack(r);
    if (t.requires_grad() && t.is_leaf() && !t.is_view() && !find(r)) make_leaf(t);
  }
  if (PyObject* op = operator_of_class_change(target, &args)) target = op, n = 1, kwnames = nullptr;
  if (!record_torch_level(target, args, n, kwnames, r)) Py_CLEAR(r);
  return r;
}

}  // namespace kiln::capture
