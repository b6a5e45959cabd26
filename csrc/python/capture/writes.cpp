// Writes to attributes, globals and cells, into overlays that are replayed on leaving.
#include <structmember.h>

#include <algorithm>

#include "python/capture/attributes.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;
using GK = Guard::Kind;

namespace {
Overlay& overlay_of(std::unordered_map<PyObject*, Overlay>& map, PyObject* o, std::vector<PyObject*>* order = nullptr) {
  Overlay& overlay = map[o];
  if (!overlay.object) {
    overlay.object = py::Ref::borrow(o);
    if (order) order->push_back(o);
  }
  return overlay;
}

void write(Overlay& overlay, PyObject* name, PyObject* value) {
  if (py::Ref* v = overlay.find(name))
    *v = py::Ref::borrow(value);
  else
    overlay.entries.emplace_back(py::Ref::borrow(name), py::Ref::borrow(value));
}

/// Whether a data descriptor's __set__ is Python code, which is interpreted.
bool sets_in_python(PyObject* descr) {
  static PyObject* set = PyUnicode_InternFromString("__set__");
  static PyObject* del = PyUnicode_InternFromString("__delete__");
  if (PyType_IsSubtype(Py_TYPE(descr), &PyProperty_Type)) return true;
  for (PyObject* name : {set, del})
    if (PyObject* f = _PyType_Lookup(Py_TYPE(descr), name); f && PyFunction_Check(f)) return true;
  return false;
}
}  // namespace

bool Machine::store_global(PyObject* globals, PyObject* name, PyObject* value) {
  if (!value) {
    PyObject* old = load_global(globals, nullptr, name);
    if (!old) return false;
    Py_DECREF(old);
  }
  if (namespaces_.contains(globals)) {
    graph_break("call-that-breaks", "a change of a module's variable, behind a look at its dict");
    return false;
  }
  // The warnings that wait for the end of the captured part, whose callables alone are made here, were given before.
  if (says_of_warnings(globals) &&
      std::any_of(deferred.begin(), deferred.end(), [](const Deferred& call) { return call.made; })) {
    graph_break("call-that-breaks", "a change of what happens to warnings, behind one");
    return false;
  }
  write(overlay_of(globals_written, globals), name, value);
  return true;
}

bool Machine::store_cell(PyObject* cell, PyObject* value) {
  if (made_cells.count(cell)) {
    PyCell_Set(cell, value);
    return true;
  }
  if (!cells_written.count(cell)) cells_order.push_back(py::Ref::borrow(cell));
  cells_written[cell] = py::Ref::borrow(value);
  return true;
}

bool Machine::store_by_descriptor(PyObject* descr, PyObject* o, PyObject* name, PyObject* value) {
  if (!sets_in_python(descr)) {
    graph_break("write-to-c-attribute",
                std::string("writing attribute ") + PyUnicode_AsUTF8(name) + " of a " + Py_TYPE(o)->tp_name);
    return false;
  }
  py::Ref hold = py::Ref::borrow(descr);
  if (Py_TYPE(descr)->tp_descr_set(descr, o, value) == 0) return true;
  after_c_call(nullptr);
  return false;
}

bool Machine::generic_store_attr(PyObject* o, PyObject* name, PyObject* value) {
  Known* k = find(o);
  const bool plain = k && k->kind == Known::Kind::Plain;
  if (!plain && !(k && k->kind == Known::Kind::Tensor)) {
    if (PyObject_GenericSetAttr(o, name, value) == 0) return true;
    after_c_call(nullptr);
    return false;
  }
  PyObject* descr = _PyType_Lookup(Py_TYPE(o), name);
  const bool member = descr && Py_IS_TYPE(descr, &PyMemberDescr_Type);
  const bool data = descr && Py_TYPE(descr)->tp_descr_set;
  if (data && !member) return store_by_descriptor(descr, o, name, value);
  const bool read_only = member ? reinterpret_cast<PyMemberDescrObject*>(descr)->d_member->flags & READONLY
                                : plain && !_PyObject_GetDictPtr(o);
  if (read_only) return PyObject_GenericSetAttr(o, name, value) == 0;  // writes nothing, and raises what eager raises
  if (plain && !data) {
    o = dict_owner(o);
    k = find(o);
  }
  auto it = dict_shadows_.find(o);
  if (it != dict_shadows_.end()) {
    if (value) return PyDict_SetItem(it->second.get(), name, value) == 0;
    if (PyDict_DelItem(it->second.get(), name) == 0) return true;
    PyErr_Clear();
    return missing(o, name);
  }
  if (!value) {
    bool found = false;
    py::Ref old = py::Ref::steal(load_instance_attr(o, k, name, &found));
    if (!found) return PyErr_Occurred() ? false : missing(o, name);
  }
  write(overlay_of(overlays, o, &overlay_order), name, value);
  return true;
}

PyObject* Machine::remember_made_type(PyObject* type) {
  if (!type || !PyType_Check(type) || !made_types.insert(type).second) return type;
  alive.push_back(py::Ref::borrow(type));
  // Classes are in cycles, and live on after the capture: what stands for a number of it must not.
  py::Ref made = py::Ref::steal(type);
  const py::Ref items = py::Ref::steal(PyDict_Items(reinterpret_cast<PyTypeObject*>(type)->tp_dict));
  for (Py_ssize_t i = 0; items && i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* const item = PyList_GET_ITEM(items.get(), i);
    PyObject* const v = PyTuple_GET_ITEM(item, 1);
    if (is_masked(v)) return specialize_masked(v);
    if (!is_number(v) && !is_text(v) && !is_open_number(v)) continue;
    const py::Ref value = py::Ref::steal(is_open_number(v) ? with_values(v) : specialize(v));
    if (!value || PyObject_SetAttr(type, PyTuple_GET_ITEM(item, 0), value.get()) < 0) return nullptr;
  }
  return items ? made.release() : nullptr;
}

bool Machine::refuses_class_write(PyObject* type) {
  if (made_types.count(type)) return false;
  graph_break("write-to-class", std::string("writing an attribute of the class ") +
                                    reinterpret_cast<PyTypeObject*>(type)->tp_name + ", which existed before");
  return true;
}

void Machine::remember_function(PyObject* o) {
  auto* f = reinterpret_cast<PyFunctionObject*>(o);
  if (made_functions.count(o) || find(o)) return;
  remember_constant(o);
  if (!is_trusted_namespace(f->func_globals)) guard(GK::Is, child(SK::Const, nullptr, o), o);
}

bool Machine::store_attr(PyObject* o, PyObject* name, PyObject* value) {
  const Class c = classify(o);
  if (c == Class::Tensor) return store_tensor_attr(o, name, value);
  if (c == Class::Function) remember_function(o);
  Known* k = find_plain(o);
  if (c == Class::Singleton && !made_types.count(reinterpret_cast<PyObject*>(Py_TYPE(o)))) {  // a member of an Enum
    graph_break("write-to-c-object", std::string("writing an attribute of a ") + Py_TYPE(o)->tp_name);
    return false;
  }
  if (!k && c != Class::Type) {
    note_write(o);
    if (PyObject_SetAttr(o, name, value) == 0) return true;
    after_c_call(nullptr);
    return false;
  }
  if (c == Class::Module) {
    // Classes of modules may have attributes of their own (torch.backends.cudnn.enabled).
    PyObject* descr = _PyType_Lookup(Py_TYPE(o), name);
    if (descr && Py_TYPE(descr)->tp_descr_set) return store_by_descriptor(descr, o, name, value);
    return store_global(PyModule_GetDict(o), name, value);
  }
  if (c == Class::Type) {
    if (refuses_class_write(o)) return false;
    if (PyObject_SetAttr(o, name, value) == 0) return true;
    after_c_call(nullptr);
    return false;
  }
  PyTypeObject* t = Py_TYPE(o);
  void* set = slot_function(t, names().setattr);
  void* del = slot_function(t, names().delattr);
  const bool generic = t->tp_setattro == PyObject_GenericSetAttr ||
                       ((value ? set : del) == reinterpret_cast<void*>(PyObject_GenericSetAttr));
  if (generic) return generic_store_attr(o, name, value);
  PyObject* f = _PyType_Lookup(t, value ? names().setattr : names().delattr);
  if (f && PyFunction_Check(f)) {
    if (f == names().module_setattr && value && is_plain_module_write(o, name, value))
      return generic_store_attr(o, name, value);
    if (PyObject_SetAttr(o, name, value) == 0) return true;
    after_c_call(nullptr);
    return false;
  }
  graph_break("write-to-c-object", std::string("writing an attribute of a ") + t->tp_name);
  return false;
}

bool Machine::is_plain_tensor(PyObject* o) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(o)) != names().tensor_type || overlays.contains(o)) return false;
  const Known* k = find(o);
  for (PyObject* t : {o, k ? k->real.get() : o})  // an attribute may make it a parameter or a buffer
    if (PyObject** const dict = _PyObject_GetDictPtr(t); dict && *dict && PyDict_GET_SIZE(*dict) > 0) return false;
  return true;
}

bool Machine::is_plain_module_write(PyObject* o, PyObject* name, PyObject* value) {
  // nn.Module.__setattr__ ends in object.__setattr__ for plain values under names that no store holds.
  const Class c = classify(value);
  const bool plain = is_constant(value) || is_number(value) || is_open_number(value) || is_text(value) ||
                     c == Class::List || c == Class::Dict || c == Class::Tuple || is_plain_tensor(value);
  if (!plain) return false;
  o = dict_owner(o);
  PyObject** slot = _PyObject_GetDictPtr(o);
  PyObject* dict = slot ? *slot : nullptr;
  if (!dict || dict_shadows_.count(o)) return false;
  PyObject* const stores[] = {names().parameters, names().buffers, names().modules};
  for (PyObject* store : stores) {
    PyObject* real = PyDict_GetItem(dict, store);
    if (!real || !PyDict_CheckExact(real) || find(real) || PyDict_Contains(real, name)) return false;
    guard(GK::DictLacks, child(SK::DictItem, child(SK::InstanceDict, find(o)->source, nullptr), store), name);
  }
  return true;
}

}  // namespace kiln::capture
