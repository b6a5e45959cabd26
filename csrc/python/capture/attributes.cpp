// Attributes, globals and cells: reads by path with guards.
#include "python/capture/attributes.h"

#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/machine.h"
#include "python/capture/sizes.h"
#include "python/guards/checks.h"
#include "python/guards/class_image.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;
using GK = Guard::Kind;

py::Ref* Overlay::find(PyObject* name) {
  for (auto& [n, v] : entries)
    if (n.get() == name || PyUnicode_Compare(n.get(), name) == 0) return &v;
  return nullptr;
}

bool missing(PyObject* o, PyObject* name) {
  PyErr_Format(PyExc_AttributeError, "'%.50s' object has no attribute '%U'", Py_TYPE(o)->tp_name, name);
  return false;
}

void* slot_function(PyTypeObject* t, PyObject* name) {
  PyObject* d = _PyType_Lookup(t, name);
  return d && Py_TYPE(d) == &PyWrapperDescr_Type ? reinterpret_cast<PyWrapperDescrObject*>(d)->d_wrapped : nullptr;
}

namespace {
/// After a failed read: if it is an AttributeError, `guards` holds that the attribute is not there; the error goes if
/// `missing_ok`.
template <class F>
void missed(F&& guards, bool missing_ok) {
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return;
  PyObject *type, *value, *tb;
  PyErr_Fetch(&type, &value, &tb);
  guards();
  if (!missing_ok) return PyErr_Restore(type, value, tb);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(tb);
}

bool reads_generically(PyTypeObject* t) {
  return t->tp_getattro == PyObject_GenericGetAttr ||
         slot_function(t, names().getattribute) == reinterpret_cast<void*>(PyObject_GenericGetAttr);
}

}  // namespace

bool Machine::is_trusted_namespace(PyObject* dict) {
  auto it = trusted_.find(dict);
  if (it != trusted_.end()) return it->second;
  static PyObject* stdlib = PySys_GetObject("stdlib_module_names");
  static PyObject* key = PyUnicode_InternFromString("__name__");
  bool trusted = false;
  PyObject* name = PyDict_GetItemWithError(dict, key);
  if (name && PyUnicode_Check(name)) {
    std::string s = PyUnicode_AsUTF8(name);
    s = s.substr(0, s.find('.'));
    py::Ref package = py::Ref::steal(PyUnicode_FromString(s.c_str()));
    trusted = s == "torch" || s == "kiln" || (stdlib && s != "__main__" && PySet_Contains(stdlib, package.get()) == 1);
  }
  PyErr_Clear();
  alive.push_back(py::Ref::borrow(dict));
  return trusted_[dict] = trusted;
}

// --- globals
// -----------------------------------------------------------------------------------------------------------

bool Machine::is_namespace(PyObject* dict) {
  static PyObject* const name_of_name = PyUnicode_InternFromString("__name__");
  PyObject* name = PyDict_CheckExact(dict) ? PyDict_GetItemWithError(dict, name_of_name) : nullptr;
  PyErr_Clear();
  if (!name || !PyUnicode_Check(name)) return false;
  PyObject* module = PyDict_GetItem(PyImport_GetModuleDict(), name);
  return module && PyModule_Check(module) && PyModule_GetDict(module) == dict;
}

bool Machine::is_written_as_dict(PyObject* dict) const {
  return namespaces_.contains(dict) && std::any_of(knowns.begin(), knowns.end(), [&](const Known& k) {
           return k.real.get() == dict && was_written(k);
         });
}

PyObject* Machine::load_global(PyObject* globals, PyObject* builtins, PyObject* name, bool allow_missing) {
  if (!namespaces_.empty() && (is_written_as_dict(globals) || is_written_as_dict(builtins)))
    return graph_break("call-that-breaks", "a read of a module's variable, behind a change of its dict");
  const auto written = [&](PyObject* dict) {
    const auto it = globals_written.find(dict);
    return it == globals_written.end() ? nullptr : it->second.find(name);
  };
  if (py::Ref* v = written(globals)) {
    if (*v) return v->new_ref();
    globals = nullptr;
  }
  py::Ref* const builtin = written(builtins);
  if (globals) {
    auto cached = globals_seen_.find({globals, name});
    if (cached != globals_seen_.end() && !builtin) return cached->second.new_ref();
    PyObject* o = PyDict_GetItemWithError(globals, name);
    if (o) {
      PyObject* v;
      const Class c = classify(o);
      const bool code = c == Class::Function || c == Class::Module || c == Class::Type || c == Class::Singleton;
      if (code && is_trusted_namespace(globals) && o != Py_None && !PyBool_Check(o)) {
        if (c != Class::Singleton)
          remember_constant(o);
        else
          remember_bound(o, child(SK::Const, nullptr, o));
        v = Py_NewRef(o);
      } else {
        v = see(o, child(SK::Global, child(SK::Const, nullptr, globals), name));
      }
      if (!v) return nullptr;
      alive.push_back(py::Ref::borrow(name));
      globals_seen_.emplace(std::make_pair(globals, name), py::Ref::borrow(v));
      return v;
    }
    if (PyErr_Occurred()) return nullptr;
    if (builtins && !is_trusted_namespace(globals)) guard(GK::DictLacks, child(SK::Const, nullptr, globals), name);
  }
  if (builtin && *builtin) return builtin->new_ref();
  if (builtins && !builtin) {
    PyObject* o = PyDict_CheckExact(builtins) ? PyDict_GetItemWithError(builtins, name) : nullptr;
    if (o && globals && !is_trusted_namespace(globals)) {
      if (!builtins_) builtins_ = guards::constant(builtins, "builtins");
      guard(GK::Is, child(SK::DictItem, builtins_, name), o);
      globals_seen_.emplace(std::make_pair(globals, name), py::Ref::borrow(o));
      alive.push_back(py::Ref::borrow(name));
    }
    if (o) return Py_NewRef(o);
  }
  if (!PyErr_Occurred() && !allow_missing) PyErr_Format(PyExc_NameError, "name '%U' is not defined", name);
  return nullptr;
}

// --- cells
// -------------------------------------------------------------------------------------------------------------

SourcePtr Machine::source_of_contents(PyObject* cell) {
  if (const auto s = cell_source.find(cell); s != cell_source.end()) return s->second;
  // A resume function gets the frame's cells as arguments, others at each call.
  const Known* k = find_plain(cell);
  return k ? cell_source[cell] = child(SK::CellContents, k->source, nullptr) : nullptr;
}

SourcePtr Machine::cell_itself(const SourcePtr& contents) {
  return contents->kind == SK::CellContents ? contents->base : guards::cell_object(contents->index, contents->name);
}

PyObject* Machine::load_cell(PyObject* cell, const SourcePtr& source) {
  if (!cell) return nullptr;
  if (made_cells.count(cell)) return Py_XNewRef(PyCell_GET(cell));
  auto it = cells_written.find(cell);
  if (it != cells_written.end()) return it->second.new_ref();
  PyObject* o = PyCell_GET(cell);
  if (!o) return nullptr;
  SourcePtr path = source_of_contents(cell);
  if (!path) path = source;
  if (!path) path = child(SK::CellContents, child(SK::Const, nullptr, cell), nullptr);
  return see(o, path);
}

// --- reading attributes
// ------------------------------------------------------------------------------------------------

PyObject* Machine::dict_owner(PyObject* o) {
  PyObject** slot = _PyObject_GetDictPtr(o);
  return slot && *slot ? dict_owners_.try_emplace(*slot, o).first->second : o;
}

PyObject* Machine::instance_dict(PyObject* o) {
  if (find_plain(o)) o = dict_owner(o);
  Known* k = find_plain(o);
  if (PyType_Check(o)) return load_type_attr(o, k, names().dict, false);
  if (Known* tensor = k ? nullptr : find(o); tensor && tensor->kind == Known::Kind::Tensor)
    return graph_break("call-that-breaks", "the __dict__ of a tensor that existed before");
  if (!k) return after_c_call(PyObject_GetAttr(o, names().dict));
  PyObject** slot = _PyObject_GetDictPtr(o);
  if (!slot) return PyObject_GetAttr(o, names().dict);
  // An object without attributes gets its (empty) dict now; that changes nothing the program can see.
  py::Ref dict = py::Ref::steal(PyObject_GenericGetDict(o, nullptr));
  if (!dict) return nullptr;
  const SourcePtr source = child(SK::InstanceDict, k->source, nullptr);
  py::Ref shadow = py::Ref::steal(see(dict.get(), source));
  if (!shadow) return nullptr;
  auto it = overlays.find(o);
  if (it != overlays.end()) {
    for (auto& [name, value] : it->second.entries) {
      const int rc =
          value ? PyDict_SetItem(shadow.get(), name.get(), value.get()) : PyDict_DelItem(shadow.get(), name.get());
      if (rc < 0) PyErr_Clear();
    }
    overlays.erase(it);
  }
  dict_shadows_[o] = shadow;
  return shadow.release();
}

PyObject* Machine::load_instance_attr(PyObject* o, Known* k, PyObject* name, bool* found) {
  *found = false;
  o = dict_owner(o);
  k = find(o);
  if (!dict_shadows_.empty()) {
    auto it = dict_shadows_.find(o);
    if (it != dict_shadows_.end()) {
      PyObject* v = PyDict_GetItemWithError(it->second.get(), name);
      *found = v != nullptr;
      return Py_XNewRef(v);
    }
  }
  if (!overlays.empty()) {
    auto it = overlays.find(o);
    if (it != overlays.end())
      if (py::Ref* v = it->second.find(name)) {
        *found = static_cast<bool>(*v);
        return v->new_ref();
      }
  }
  auto seen = attributes_seen_.find({o, name});
  if (seen != attributes_seen_.end()) {
    *found = static_cast<bool>(seen->second);
    return seen->second.new_ref();
  }
  PyObject** slot = _PyObject_GetDictPtr(o);
  PyObject* dict = slot ? *slot : nullptr;
  py::Ref made_dict;
  if (!dict && slot) {
    made_dict = py::Ref::steal(PyObject_GenericGetDict(o, nullptr));
    dict = made_dict.get();
  }
  PyObject* v = nullptr;
  if (dict) {
    PyObject* real = PyDict_GetItemWithError(dict, name);
    if (!real && PyErr_Occurred()) return nullptr;
    const SourcePtr source = child(SK::InstanceDict, k->source, nullptr);
    if (real && classify(real) == Class::Tensor && !find(real) && loading && loads_to_ask_for_none(*loading, name)) {
      guard(GK::Type, child(SK::DictItem, source, name), reinterpret_cast<PyObject*>(Py_TYPE(real)),
            py311::type_version(Py_TYPE(real)));
      *found = true;
      return Py_NewRef(real);
    }
    if (real) {
      v = see(real, child(SK::DictItem, source, name));
      if (!v) return nullptr;
      *found = true;
    } else {
      guard(GK::DictLacks, source, name);
    }
  }
  alive.push_back(py::Ref::borrow(name));
  attributes_seen_.emplace(std::make_pair(o, name), py::Ref::borrow(v));
  return v;
}

namespace {
/// Whether a read by this accessor runs what torch.autograd.graph.saved_tensors_hooks unpacks with. A checkpoint counts
/// such reads; a guard must not add one.
bool runs_unpack_hooks(PyObject* descr) {
  static const std::array<PyObject*, 2> accessors = [] {
    py::Ref base = py::check(PyObject_GetAttrString(py::import_module("torch._C"), "_FunctionBase"));
    std::array<PyObject*, 2> found{};
    size_t i = 0;
    for (const char* name : {"saved_tensors", "saved_variables"})
      found[i++] = py::check(PyObject_GetAttrString(base.get(), name)).release();
    return found;
  }();
  return descr == accessors[0] || descr == accessors[1];
}
}  // namespace

SourcePtr Machine::attribute_of_class(const SourcePtr& source, PyObject* type, PyObject* name) {
  const SourcePtr held = child(SK::Attr, source, name);
  PyObject* o = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(type), name);
  return o && Py_IS_TYPE(o, &PyStaticMethod_Type) ? child(SK::Attr, held, names().func) : held;
}

PyObject* Machine::generic_load_attr(PyObject* o, Known* k, PyObject* name, bool missing_ok) {
  PyTypeObject* t = Py_TYPE(o);
  PyObject* descr = _PyType_Lookup(t, name);
  py::Ref hold = py::Ref::borrow(descr);
  descrgetfunc get = descr ? Py_TYPE(descr)->tp_descr_get : nullptr;
  if (descr && get && Py_TYPE(descr)->tp_descr_set) {
    if (!guards::is_c_accessor(descr)) return after_c_call(get(descr, o, reinterpret_cast<PyObject*>(t)));
    if (name == names().dict || PyUnicode_Compare(name, names().dict) == 0) return instance_dict(o);
    auto it = overlays.find(o);
    if (it != overlays.end())
      if (py::Ref* v = it->second.find(name)) {
        if (*v) return v->new_ref();
        if (!missing_ok) missing(o, name);
        return nullptr;
      }
    if (runs_unpack_hooks(descr))
      return graph_break("call-that-breaks", "the saved tensors of a function that ran before");
    py::Ref real = py::Ref::steal(get(descr, o, reinterpret_cast<PyObject*>(t)));
    if (!real) {
      missed([&] { guard(GK::AttrLacks, k->source, name); }, missing_ok);
      return nullptr;
    }
    if (real.get() == reinterpret_cast<PyObject*>(t)) return real.release();  // __class__
    return see(real.get(), child(SK::Attr, k->source, name));
  }
  bool found = false;
  PyObject* v = load_instance_attr(o, k, name, &found);
  if (found || PyErr_Occurred()) return v;
  if (descr && get) {
    if (k->alike) guard(GK::Is, k->source, o);  // a method of the function itself
    v = after_c_call(get(descr, o, reinterpret_cast<PyObject*>(t)));
    if (!v || !Py_IS_TYPE(descr, &PyStaticMethod_Type) || find(v) || is_constant(v)) return v;
    const py::Ref wrapped = py::Ref::steal(v);
    PyObject* const type = reinterpret_cast<PyObject*>(t);
    return see(v, attribute_of_class(child(SK::Const, nullptr, type), type, name));
  }
  if (descr) {
    // A class attribute: the type's guard holds what it is, but not what is inside a container or an instance.
    if (is_constant(descr) && !guards::is_changing_number(t, name)) return hold.release();
    return see(descr, child(SK::Attr, child(SK::Const, nullptr, reinterpret_cast<PyObject*>(t)), name));
  }
  if (!missing_ok) missing(o, name);
  return nullptr;
}

void Machine::guard_replaceable(PyObject* dict, PyObject* name) {
  if (!is_trusted_namespace(dict)) return;
  if (auto it = globals_written.find(dict); it != globals_written.end() && it->second.find(name)) return;
  PyObject* o = PyDict_GetItemWithError(dict, name);
  const Class c = o ? classify(o) : Class::Instance;
  if (c == Class::Function || c == Class::Type || (c == Class::Singleton && PyCFunction_Check(o)))
    guard(GK::Is, child(SK::Global, child(SK::Const, nullptr, dict), name), o, Guard::kIdentityAlone);
}

PyObject* Machine::load_module_attr(PyObject* module, Known* k, PyObject* name, bool missing_ok) {
  PyObject* dict = PyModule_GetDict(module);
  // A module's class may have data descriptors of its own (torch.backends), which come first.
  PyTypeObject* t = Py_TYPE(module);
  PyObject* descr = t == &PyModule_Type ? nullptr : _PyType_Lookup(t, name);
  if (descr && Py_TYPE(descr)->tp_descr_get && Py_TYPE(descr)->tp_descr_set)
    return after_c_call(Py_TYPE(descr)->tp_descr_get(descr, module, reinterpret_cast<PyObject*>(t)));
  PyObject* v = load_global(dict, nullptr, name, true);
  if (v || PyErr_Occurred()) {
    if (v) guard_replaceable(dict, name);
    return v;
  }
  const SourcePtr contents = child(SK::Const, nullptr, dict);
  if (!is_trusted_namespace(dict)) {
    static PyObject* getattr_name = names().getattr;
    py::Ref getattr = py::Ref::steal(load_global(dict, nullptr, getattr_name, true));
    if (getattr) {
      guard(GK::DictLacks, contents, name);
      v = call(getattr.get(), &name, 1, nullptr);
      if (!v && missing_ok && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
      return v;
    }
    if (PyErr_Occurred()) return nullptr;
    guard(GK::DictLacks, contents, getattr_name);
  }
  // PyTorch's own code loads that compiler by naming it, to tell it about tensors.
  if (PyUnicode_CompareWithASCIIString(name, "_dynamo") == 0) {
    static PyObject* torch = py::import_module("torch");
    static PyObject* unloaded = PyObject_GetAttrString(polyfills(), "unloaded_dynamo");
    if (module == torch) return see(unloaded, child(SK::Const, nullptr, unloaded));
  }
  {
    Paused paused_here(*this);  // lazy modules and torch.ops fill themselves; that is idempotent
    aten::RecordingPaused no_recording;
    v = PyObject_GetAttr(module, name);
  }
  if (!v) {
    missed([&] { guard(GK::DictLacks, contents, name); }, missing_ok);
    return nullptr;
  }
  py::Ref hold = py::Ref::steal(v);
  return see(v, child(SK::Attr, child(SK::Const, nullptr, module), name));
}

PyObject* Machine::load_type_attr(PyObject* type, Known* k, PyObject* name, bool missing_ok) {
  auto written = overlays.find(type);
  if (written != overlays.end())
    if (py::Ref* v = written->second.find(name); v && *v) return v->new_ref();
  const auto guard_class = [&] {
    for (PyObject* t : {type, reinterpret_cast<PyObject*>(Py_TYPE(type))})
      if (reinterpret_cast<PyTypeObject*>(t)->tp_flags & Py_TPFLAGS_HEAPTYPE && !made_types.count(t))
        guard(GK::ClassVersion, child(SK::Const, nullptr, t), t,
              py311::type_version(reinterpret_cast<PyTypeObject*>(t)));
  };
  PyObject* v = PyObject_GetAttr(type, name);
  if (!v) {
    if (!break_pending()) missed(guard_class, missing_ok);
    return after_c_call(nullptr);
  }
  py::Ref hold = py::Ref::steal(v);
  const Class c = classify(v);
  if (c == Class::Function || c == Class::Type || c == Class::Method || is_constant(v)) {
    auto* t = reinterpret_cast<PyTypeObject*>(type);
    PyObject* module = t->tp_flags & Py_TPFLAGS_HEAPTYPE ? PyDict_GetItem(t->tp_dict, names().module) : nullptr;
    const bool builtin = !(t->tp_flags & Py_TPFLAGS_HEAPTYPE);
    if (!builtin && (!module || !PyUnicode_Check(module) || strncmp(PyUnicode_AsUTF8(module), "torch", 5) != 0)) {
      // Functions and constants of a class of the user's: one guard on the class's version covers them all.
      guard(GK::ClassVersion, child(SK::Const, nullptr, type), type, py311::type_version(t));
    }
    if (is_constant(v) && guards::is_changing_number(t, name))
      return see(v, attribute_of_class(source_of_object(type), type, name));
    return hold.release();
  }
  // Descriptors make new objects (super, properties of metaclasses); only what the class holds is an existing object.
  if (Py_REFCNT(v) == 1) {
    if (Py_TYPE(v) == &PyDictProxy_Type) {  // its __dict__
      if (guards::has_changing_number(reinterpret_cast<PyTypeObject*>(type)))
        return graph_break("call-that-breaks", "the __dict__ of a class with a number that changes");
      guard_class();
    }
    return hold.release();
  }
  if (find(v)) return observe(find(v)->stand_in.get()) ? find(v)->stand_in.new_ref() : nullptr;
  return see(v, attribute_of_class(source_of_object(type), type, name));
}

PyObject* Machine::unknown_traceback() {
  static PyObject* traceback = py::check(PyObject_GetAttrString(polyfills(), "UNKNOWN_TRACEBACK")).release();
  return traceback;
}

PyObject* Machine::load_attr(PyObject* o, PyObject* name, bool missing_ok) {
  PyTypeObject* t = Py_TYPE(o);
  if (t == &PyTraceBack_Type && o == unknown_traceback())
    return graph_break("traceback", "what a traceback tells is asked for");
  auto native = [&]() -> PyObject* {
    PyObject* v = PyObject_GetAttr(o, name);
    if (!v && missing_ok && PyErr_ExceptionMatches(PyExc_AttributeError) && !break_pending()) PyErr_Clear();
    if (!v && !PyErr_Occurred()) return nullptr;
    return after_c_call(v);
  };
  // Python's symbolic ints have attributes that NumPy's have not. Operators are their own.
  py::Ref value;
  if (is_open_number(o) && capture::is_of_numpy(o) && PyUnicode_READ_CHAR(name, 0) != '_') {
    value = py::Ref::steal(pinned(o));
    if (!value) return nullptr;
    o = value.get();
    t = Py_TYPE(o);
  }
  switch (classify_type(t)) {
    case Class::Module:
      return load_module_attr(o, find(o), name, missing_ok);
    case Class::Type:
      return load_type_attr(o, find(o), name, missing_ok);
    case Class::Tensor:
      return load_tensor_attr(o, name, missing_ok);
    case Class::Method:
      if (!_PyType_Lookup(t, name) || PyUnicode_CompareWithASCIIString(name, "__doc__") == 0) {  // the function's
        Known* k = find_plain(o);
        py::Ref f = k ? py::Ref::steal(load_attr(o, names().func)) : py::Ref::borrow(PyMethod_GET_FUNCTION(o));
        return f ? load_attr(f.get(), name, missing_ok) : nullptr;
      }
      if (Known* k = find_plain(o)) {
        py::Ref v = py::Ref::steal(PyObject_GetAttr(o, name));
        if (!v) {
          if (missing_ok && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
          return nullptr;
        }
        if (Py_REFCNT(v.get()) == 1) return v.release();
        return see(v.get(), child(SK::Attr, k->source, name));
      }
      return native();
    case Class::Function:
      if (!is_trusted_namespace(reinterpret_cast<PyFunctionObject*>(o)->func_globals)) remember_function(o);
      [[fallthrough]];
    case Class::Instance: {
      if (is_torch_operator(o)) find_overload(o, name);
      Known* k = find_plain(o);
      if (!k) {
        if (is_array(o) && shows_address(name))
          return graph_break("value-of-c-object", "where an array lies in memory");
        PyObject* v = native();
        if (!v || find(v)) return v;
        // What a made object shows may still belong to its class.
        const Class c = classify(v);
        if (PyLong_CheckExact(v) || PyFloat_CheckExact(v)) {
          py::Ref hold = py::Ref::steal(v);
          const py::Ref of = py::Ref::steal(t == &PySuper_Type ? PyObject_GetAttrString(o, "__self_class__") : nullptr);
          if (of && PyType_Check(of.get()) && guards::has_changing_number(reinterpret_cast<PyTypeObject*>(of.get())))
            return graph_break("call-that-breaks", "super() of a class with a number that changes");
          PyObject** const dict = _PyObject_GetDictPtr(o);
          const bool own = dict && *dict && PyDict_Contains(*dict, name) == 1;
          if (own || _PyType_Lookup(t, name) != v || !guards::is_changing_number(t, name)) return hold.release();
          return see(v, child(SK::Attr, child(SK::Const, nullptr, reinterpret_cast<PyObject*>(t)), name));
        }
        if (c < Class::Tuple || c > Class::Tensor || is_constant(v)) return v;
        if (_PyType_Lookup(t, name) == v) {
          py::Ref hold = py::Ref::steal(v);
          return see(v, child(SK::Attr, child(SK::Const, nullptr, reinterpret_cast<PyObject*>(t)), name));
        }
        return v;
      }
      if (!reads_generically(t)) {
        if (c_state(t) == CState::Other && !reads(o)) return nullptr;
        return native();
      }
      py::Ref method;
      PyObject* getattr = _PyType_Lookup(t, names().getattr);
      if (!getattr) return generic_load_attr(o, k, name, missing_ok);
      const SourcePtr source = k->source;
      PyObject* v = generic_load_attr(o, k, name, true);
      if (v) return v;
      if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return nullptr;
        PyErr_Clear();
      }
      if (getattr == names().module_getattr) return load_nn_module_attr(o, find(o), name, missing_ok);
      method = py::Ref::borrow(getattr);
      PyObject* args[3] = {nullptr, o, name};
      v = PyObject_Vectorcall(getattr, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
      if (!v && missing_ok && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
      return v;
    }
    case Class::Singleton:
      // What the user hung on a member of an Enum.
      if (_PyObject_GetDictPtr(o) && PyUnicode_READ_CHAR(name, 0) != '_' && !_PyType_Lookup(t, name)) {
        remember_constant(o);
        bool found = false;
        PyObject* v = load_instance_attr(o, find(o), name, &found);
        if (found || PyErr_Occurred()) return v;
      }
      return native();
    default:
      return native();
  }
}

PyObject* Machine::load_nn_module_attr(PyObject* o, Known* k, PyObject* name, bool missing_ok) {
  PyObject* const stores[] = {names().parameters, names().buffers, names().modules};
  o = dict_owner(o);
  k = find(o);
  for (PyObject* store : stores) {
    bool found = false;
    // Look into the store without making a shadow of all of it, if nothing has written there.
    PyObject** slot = _PyObject_GetDictPtr(o);
    PyObject* dict = slot ? *slot : nullptr;
    PyObject* real = dict ? PyDict_GetItemWithError(dict, store) : nullptr;
    if (real && PyDict_CheckExact(real) && !find(real) && !dict_shadows_.count(o) && !overlays.count(o)) {
      const SourcePtr source = child(SK::DictItem, child(SK::InstanceDict, k->source, nullptr), store);
      PyObject* v = PyDict_GetItemWithError(real, name);
      if (v) return see(v, child(SK::DictItem, source, name));
      if (PyErr_Occurred()) return nullptr;
      guard(GK::DictLacks, source, name);
      continue;
    }
    py::Ref contents = py::Ref::steal(load_instance_attr(o, k, store, &found));
    if (PyErr_Occurred()) return nullptr;
    if (!found) continue;
    if (looks_up(contents.get(), name, LookUp::Item) < 0) return nullptr;
    PyObject* v = PyObject_GetItem(contents.get(), name);
    if (v) {
      if (!observe(v)) Py_CLEAR(v);
      return v;
    }
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return nullptr;
    PyErr_Clear();
  }
  if (!missing_ok) missing(o, name);
  return nullptr;
}

int Machine::load_method(PyObject* o, PyObject* name, PyObject** method) {
  const Class c = classify(o);
  if (is_open_number(o) && capture::is_of_numpy(o)) {
    *method = load_attr(o, name);
    return *method ? 0 : -1;
  }
  if (c == Class::Instance || c == Class::Function) {
    Known* k = find_plain(o);
    PyTypeObject* t = Py_TYPE(o);
    if (k && reads_generically(t)) {
      PyObject* descr = _PyType_Lookup(t, name);
      if (descr && PyType_HasFeature(Py_TYPE(descr), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
        py::Ref hold = py::Ref::borrow(descr);
        bool found = false;
        PyObject* v = load_instance_attr(o, k, name, &found);
        if (PyErr_Occurred()) return -1;
        if (!found && classify(descr) == Class::Instance)  // lru_cache's wrappers: they exist, and the class is the way
          v = see(descr, child(SK::Attr, child(SK::Const, nullptr, reinterpret_cast<PyObject*>(t)), name));
        else if (!found)
          v = hold.release();
        *method = v;
        return !v ? -1 : found ? 0 : 1;
      }
    } else if (!k) {
      const int unbound = _PyObject_GetMethod(o, name, method);
      if (!*method) {
        after_c_call(nullptr);
        return -1;
      }
      return unbound;
    }
  } else if (c == Class::Tensor) {
    PyObject* descr = _PyType_Lookup(Py_TYPE(o), name);
    if (descr && PyType_HasFeature(Py_TYPE(descr), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
      *method = Py_NewRef(descr);
      return 1;
    }
  } else if (c != Class::Module && c != Class::Type && c != Class::Method) {
    const int unbound = _PyObject_GetMethod(o, name, method);
    if (!*method) return -1;
    return unbound;
  }
  *method = load_attr(o, name);
  return *method ? 0 : -1;
}

PyObject* Machine::load_tensor_attr(PyObject* o, PyObject* name, bool missing_ok) {
  if (accessor_goes_elsewhere(o, name)) {
    if (py::function_mode_active()) refuse_sizes("a function mode");
    return after_c_call(PyObject_GetAttr(o, name));
  }
  bool of_class = false;
  if (PyObject* v = load_tensor_class_attr(o, name, &of_class); of_class) {
    if (!v && missing_ok && !break_pending() && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return v;
  }
  auto written = overlays.find(o);
  if (written != overlays.end())
    if (py::Ref* v = written->second.find(name); v && *v) return v->new_ref();
  if (PyUnicode_Compare(name, names().grad) == 0) return load_grad(o);
  if (PyUnicode_Compare(name, names().dict) == 0) return instance_dict(o);
  // What no guard looks at: how often it was written to, what it is a view of, and its place in autograd's graph.
  for (const char* unseen : {"_version", "_base", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks"})
    if (PyUnicode_CompareWithASCIIString(name, unseen) == 0)
      return graph_break("tensor-internals", std::string("reading a tensor's ") + unseen);
  PyObject* descr = _PyType_Lookup(Py_TYPE(o), name);
  PyObject* args[2] = {o, name};
  PyObject* v;
  if (descr && guards::is_c_accessor(descr)) {
    static PyObject* getattr = PyObject_GetAttrString(PyImport_AddModule("builtins"), "getattr");
    // The accessor of .data goes past the dispatcher, where nothing is recorded.
    const bool data = PyUnicode_Compare(name, names().data) == 0;
    v = torch_call(getattr, args, 2, nullptr, [&] {
      return data ? THPVariable_Wrap(at::_ops::data::call(THPVariable_Unpack(o))) : PyObject_GetAttr(o, name);
    });
  } else {
    v = after_c_call(PyObject_GetAttr(o, name));
  }
  if (v || !PyErr_ExceptionMatches(PyExc_AttributeError) || break_pending()) return v;
  PyObject *type, *value, *tb;
  PyErr_Fetch(&type, &value, &tb);
  const py::Ref missing[] = {py::Ref::steal(type), py::Ref::steal(value), py::Ref::steal(tb)};
  if (PyObject* hung = load_hung_attr(o, name); hung || PyErr_Occurred()) return hung;
  if (!missing_ok) PyErr_Restore(missing[0].new_ref(), missing[1].new_ref(), missing[2].new_ref());
  return nullptr;
}

}  // namespace kiln::capture
