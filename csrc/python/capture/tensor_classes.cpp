// Subclasses of torch.Tensor that are made in Python: what their classes say of attributes, of construction, and of the
// operators that go to their __torch_function__, which runs as any other Python code does.
#include <torch/csrc/autograd/python_variable.h>

#include "python/capture/callables.h"
#include "python/capture/leaver.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

using GK = guards::Guard::Kind;
using SK = guards::Source::Kind;

namespace {
PyTypeObject* tensor_type() { return reinterpret_cast<PyTypeObject*>(names().tensor_type); }

bool is_plain_class(PyTypeObject* t) {
  auto* type = reinterpret_cast<PyObject*>(t);
  return type == names().tensor_type || type == names().parameter_type || type == names().buffer_type;
}

/// Whether the class has of this name what torch.Tensor has.
bool inherits(PyTypeObject* t, PyObject* name) {
  return _PyType_Lookup(t, name) == _PyType_Lookup(tensor_type(), name);
}
PyObject* class_to_become() {
  static PyObject* name = PyUnicode_InternFromString("cls_to_become");
  return name;
}
}  // namespace

bool Machine::is_uninitialized(PyObject* tensor) {
  return !is_plain_class(Py_TYPE(tensor)) && !inherits(Py_TYPE(tensor), class_to_become());
}

bool Machine::captures_class(PyObject* tensor) const {
  PyTypeObject* t = Py_TYPE(tensor);
  if (is_plain_class(t)) return true;
  // Of __torch_dispatch__ the dispatcher would ask for on stand-ins; accessors of attributes would be asked for what
  // only the real tensor holds.
  static const std::array<PyObject*, 6> own = [] {
    std::array<PyObject*, 6> all{};
    size_t i = 0;
    for (const char* name :
         {"__torch_dispatch__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__del__"})
      all[i++] = PyUnicode_InternFromString(name);
    return all;
  }();
  return (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && t->tp_basicsize == tensor_type()->tp_basicsize &&
         !made_types.contains(reinterpret_cast<PyObject*>(t)) && inherits(t, class_to_become()) &&
         std::all_of(own.begin(), own.end(), [&](PyObject* name) { return inherits(t, name); });
}

PyObject* Machine::break_at_class(PyObject* tensor) {
  return graph_break("tensor-subclass", std::string("a tensor of class ") + Py_TYPE(tensor)->tp_name);
}

bool Machine::take_class(PyObject* stand_in, PyObject* type) {
  if (PyObject_SetAttr(stand_in, names().class_, type) < 0) return false;
  note_class(stand_in);
  return true;
}

void Machine::note_class(PyObject* tensor) {
  PyTypeObject* t = Py_TYPE(tensor);
  if (is_plain_class(t)) return;
  auto* type = reinterpret_cast<PyObject*>(t);
  if (!noted_classes.insert(type).second) return;
  guard(GK::ClassVersion, child(SK::Const, nullptr, type), type, py311::type_version(t));
}

bool Machine::goes_to_class(PyObject* const* args, size_t n) const {
  return !noted_classes.empty() && overrides_among(args, n);
}

bool Machine::accessor_goes_elsewhere(PyObject* o, PyObject* name) const {
  if (!py::function_mode_active() && !goes_to_class(&o, 1)) return false;
  PyObject* held = _PyType_Lookup(Py_TYPE(o), name);
  return held && Py_TYPE(held) == &PyGetSetDescr_Type && PyUnicode_Compare(name, names().dict) != 0 &&
         PyUnicode_Compare(name, names().class_) != 0;
}

bool Machine::has_own_operators(PyObject* tensor) const {
  PyTypeObject* t = Py_TYPE(tensor);
  if (is_plain_class(t)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(t->tp_mro); ++i) {
    PyObject* base = PyTuple_GET_ITEM(t->tp_mro, i);
    if (base == names().tensor_type) return false;
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(reinterpret_cast<PyTypeObject*>(base)->tp_dict, &at, &name, &value)) {
      const std::string_view text = PyUnicode_AsUTF8(name);
      if (PyFunction_Check(value) && text.starts_with("__") && text != "__init__" && text != "__repr__") return true;
    }
  }
  return false;
}

PyObject* Machine::operator_of_class_change(PyObject* target, PyObject* const** args) {
  static PyObject *const
      aten = py::Ref::steal(PyObject_GetAttrString(PyImport_AddModule("torch.ops"), "aten")).release(),
      *const alias = PyObject_GetAttrString(aten, "alias"), *const detach = PyObject_GetAttrString(aten, "detach");
  const std::string_view name = name_of(target);
  if (name == "as_subclass") return alias;
  if (name != "_make_subclass") return nullptr;
  ++*args;  // the class
  return detach;
}

PyObject* Machine::load_hung_attr(PyObject* o, PyObject* name) {
  if (auto written = overlays.find(o); written != overlays.end())
    if (py::Ref* v = written->second.find(name); v && *v) return v->new_ref();
  PyObject** slot = _PyObject_GetDictPtr(o);
  if (PyObject* own = slot && *slot ? PyDict_GetItem(*slot, name) : nullptr) return Py_NewRef(own);
  Known* k = find(o);
  if (!k || k->real.get() == o) return nullptr;
  const SourcePtr source = child(SK::InstanceDict, k->source, nullptr);
  PyObject** real_slot = _PyObject_GetDictPtr(k->real.get());
  if (PyObject* real = real_slot && *real_slot ? PyDict_GetItem(*real_slot, name) : nullptr)
    return see(real, child(SK::DictItem, source, name));
  guard(GK::DictLacks, source, name);
  return nullptr;
}

PyObject* Machine::load_tensor_class_attr(PyObject* o, PyObject* name, bool* found) {
  PyTypeObject* t = Py_TYPE(o);
  *found = !is_plain_class(t) && !inherits(t, name);
  if (!*found) return nullptr;
  PyObject* held = _PyType_Lookup(t, name);
  // What hangs on the tensor comes before what its class has, properties aside.
  if (!Py_TYPE(held)->tp_descr_set) {
    if (PyObject* hung = load_hung_attr(o, name); hung || PyErr_Occurred()) return hung;
    if (!Py_TYPE(held)->tp_descr_get) return load_attr(reinterpret_cast<PyObject*>(t), name);
  }
  return after_c_call(PyObject_GetAttr(o, name));
}

PyObject* Machine::call_tensor_subclass(PyObject* type, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  static PyObject *make = PyUnicode_InternFromString("__new__"), *init = PyUnicode_InternFromString("__init__");
  auto* t = reinterpret_cast<PyTypeObject*>(type);
  const auto refuse = [&] {
    PyErr_Clear();
    return graph_break("tensor-constructor", std::string("a call of the class ") + t->tp_name);
  };
  if (made_types.contains(type)) return refuse();
  if (!inherits(t, make)) {
    const bool python = Py_TYPE(_PyType_Lookup(t, make)) == &PyStaticMethod_Type;
    return python ? PyObject_Vectorcall(type, args, nargsf, kwnames) : refuse();
  }
  const auto n = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  if (kwnames) return refuse();
  py::Ref made = py::Ref::steal(call_tensor_class(names().tensor_type, args, n));
  if (!made) return nullptr;
  if (find(made.get()) || !take_class(made.get(), type) || !captures_class(made.get())) return refuse();
  PyObject* filled_by = _PyType_Lookup(t, init);
  if (!PyFunction_Check(filled_by)) return made.release();
  std::vector<PyObject*> given{made.get()};
  given.insert(given.end(), args, args + n);
  const py::Ref none = py::Ref::steal(call(filled_by, given.data(), given.size(), nullptr));
  return none ? made.release() : nullptr;
}

RecipePtr Leaver::of_class(const RecipePtr& tensor, PyTypeObject* type) {
  static PyObject* with_class = PyObject_GetAttrString(PyImport_AddModule("kiln._C"), "_with_class");
  if (is_plain_class(type)) return tensor;
  RecipePtr r = make(Recipe::Kind::Call);
  r->object = py::Ref::borrow(with_class);
  r->parts = {tensor, recipe(reinterpret_cast<PyObject*>(type))};
  return r;
}

}  // namespace kiln::capture
