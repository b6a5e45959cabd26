#include "python/capture/callables.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "base/log.h"
#include "python/cpython/ref.h"

namespace kiln::capture {
namespace {

struct Row {
  const char* path;
  Policy policy;
};
const Row kCallables[] = {
#define KILN_CALLABLE(path, policy) {path, Policy::policy},
#define KILN_FUNCTION(path, policy)
#include "python/capture/callables.def"
#undef KILN_CALLABLE
#undef KILN_FUNCTION
};
const Row kFunctions[] = {
#define KILN_CALLABLE(path, policy)
#define KILN_FUNCTION(path, policy) {path, Policy::policy},
#include "python/capture/callables.def"
#undef KILN_CALLABLE
#undef KILN_FUNCTION
};

const struct {
  const char *getter, *setter;  // no setter: null
} kSettings[] = {
#define KILN_SETTING(getter, setter) {getter, setter},
#include "python/capture/settings.def"
#undef KILN_SETTING
};

/// CPython 3.11's private object behind a slot that is bound to a receiver.
struct MethodWrapper {
  PyObject_HEAD PyWrapperDescrObject* descr;
  PyObject* self;
};

/// Builtin functions and methods are told apart by their PyMethodDef, slot wrappers by slot and C function.
const void* key_of(PyObject* o) {
  PyTypeObject* t = Py_TYPE(o);
  if (PyCFunction_Check(o)) return reinterpret_cast<PyCFunctionObject*>(o)->m_ml;
  if (t == &PyMethodDescr_Type || t == &PyClassMethodDescr_Type)
    return reinterpret_cast<PyMethodDescrObject*>(o)->d_method;
  const PyWrapperDescrObject* d = nullptr;
  if (t == &PyWrapperDescr_Type) d = reinterpret_cast<PyWrapperDescrObject*>(o);
  if (t == &_PyMethodWrapper_Type) d = reinterpret_cast<MethodWrapper*>(o)->descr;
  if (d) return reinterpret_cast<const char*>(d->d_base) + reinterpret_cast<uintptr_t>(d->d_wrapped) * 31;
  return o;
}

struct Tables {
  std::unordered_map<const void*, Policy> callables;
  std::unordered_map<const void*, Policy> functions;   // by code object
  std::unordered_map<const void*, PyObject*> getters;  // of settings, by setter
  std::unordered_set<PyTypeObject*> pure_types;
  std::vector<std::string> unresolved;

  void add(PyObject* o, Policy policy) {
    if (PyType_Check(o)) return;
    callables[key_of(o)] = policy;
  }

  /// What is called under an entry of a class: of a staticmethod its function, else the entry.
  static py::Ref called(PyObject* entry) {
    if (Py_TYPE(entry) != &PyStaticMethod_Type) return py::Ref::borrow(entry);
    return py::check(PyObject_GetAttrString(entry, "__func__"));
  }

  /// The object at a dotted path; null (no error set) if there is none in this build of Python or PyTorch.
  static py::Ref resolve(const std::string& path) {
    size_t dot = path.find('.');
    py::Ref o = py::Ref::steal(py::import_module(path.substr(0, dot).c_str()));
    while (o && dot != std::string::npos) {
      const size_t next = path.find('.', dot + 1);
      const std::string name = path.substr(dot + 1, next == std::string::npos ? next : next - dot - 1);
      py::Ref v;
      if (PyType_Check(o.get())) {
        // The class's own entry: a classmethod or function rather than what it binds to.
        PyObject* d = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(o.get())->tp_dict, name.c_str());
        if (d) v = called(d);
      }
      if (!v) v = py::Ref::steal(PyObject_GetAttrString(o.get(), name.c_str()));
      if (!v && !PyModule_Check(o.get())) {  // it hides the submodule of its name (torch._higher_order_ops.cond)
        PyErr_Clear();
        if (const auto module = py::Ref::steal(py::import_module(path.substr(0, dot).c_str())))
          v = py::Ref::steal(PyObject_GetAttrString(module.get(), name.c_str()));
      }
      if (!v) {  // a submodule that its package hides (torch.optim.adam)
        PyErr_Clear();
        v = py::Ref::steal(py::import_module(path.substr(0, next).c_str()));
      }
      o = std::move(v);
      dot = next;
    }
    if (!o) PyErr_Clear();
    return o;
  }

  /// What the other compiler has wrapped to keep away from it, once it runs in this process: all its wrappers have one
  /// code.
  static py::Ref without_peer(py::Ref f) {
    while (f && PyFunction_Check(f.get())) {
      PyObject* code = reinterpret_cast<PyFunctionObject*>(f.get())->func_code;
      const std::string_view file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code)->co_filename);
      if (file.find("/torch/_dynamo/") == std::string_view::npos) break;
      py::Ref inner = py::Ref::steal(PyObject_GetAttrString(f.get(), "__wrapped__"));
      if (!inner) PyErr_Clear();
      f = std::move(inner);
    }
    return f;
  }

  static bool is_group(const Row& row) { return std::string_view(row.path).ends_with(".*"); }

  /// Every callable of a module or class.
  void add_group(const Row& row) {
    const std::string path(row.path, strlen(row.path) - 2);
    py::Ref o = resolve(path);
    if (!o) {
      unresolved.push_back(row.path);
      return;
    }
    PyObject* dict = PyType_Check(o.get())     ? reinterpret_cast<PyTypeObject*>(o.get())->tp_dict
                     : PyModule_Check(o.get()) ? PyModule_GetDict(o.get())
                                               : nullptr;
    if (PyType_Check(o.get()) && row.policy == Policy::Pure)
      pure_types.insert(reinterpret_cast<PyTypeObject*>(o.get()));
    py::Ref names = dict ? py::Ref() : py::Ref::steal(PyObject_Dir(o.get()));
    Py_ssize_t pos = 0;
    PyObject *name, *value;
    while (dict && PyDict_Next(dict, &pos, &name, &value)) {
      if (Py_TYPE(value) == &PyStaticMethod_Type) {
        if (const py::Ref f = called(value); PyCFunction_Check(f.get())) add(f.get(), row.policy);
      } else if (PyCFunction_Check(value) || Py_TYPE(value) == &PyMethodDescr_Type ||
                 Py_TYPE(value) == &PyClassMethodDescr_Type || Py_TYPE(value) == &PyWrapperDescr_Type) {
        add(value, row.policy);
      } else if (PyType_Check(value) && row.policy == Policy::Pure && PyModule_Check(o.get())) {
        auto* t = reinterpret_cast<PyTypeObject*>(value);
        pure_types.insert(t);
        Py_ssize_t p = 0;
        PyObject *n, *v;
        if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE))
          while (PyDict_Next(t->tp_dict, &p, &n, &v))
            if (Py_TYPE(v) == &PyMethodDescr_Type || Py_TYPE(v) == &PyWrapperDescr_Type) add(v, row.policy);
      }
    }
    if (names) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names.get()); ++i) {
        // What every object has is object's, not this module's.
        if (_PyType_Lookup(&PyBaseObject_Type, PyList_GET_ITEM(names.get(), i))) continue;
        py::Ref v = py::Ref::steal(PyObject_GetAttr(o.get(), PyList_GET_ITEM(names.get(), i)));
        if (v && (PyCFunction_Check(v.get()))) add(v.get(), row.policy);
        PyErr_Clear();
      }
    }
  }

  Tables() {
    // A type's own row is stronger than a group's: many types share one C function (object.__setattr__).
    for (const Row& row : kCallables)
      if (is_group(row)) add_group(row);
    for (const Row& row : kCallables) {
      if (is_group(row)) continue;
      if (py::Ref o = resolve(row.path))
        add(o.get(), row.policy);
      else
        unresolved.push_back(row.path);
    }
    for (const auto& row : kSettings) {
      py::Ref getter = resolve(row.getter), setter = row.setter ? resolve(row.setter) : py::Ref();
      if (!getter || (row.setter && !setter)) {
        unresolved.push_back(getter ? row.setter : row.getter);
        continue;
      }
      add(getter.get(), Policy::ReadSetting);
      if (!setter) continue;
      add(setter.get(), Policy::WriteSetting);
      getters[key_of(setter.get())] = getter.release();
    }
    for (const Row& row : kFunctions) {
      py::Ref o = resolve(row.path);
      while (o && !PyFunction_Check(o.get())) {
        py::Ref inner = py::Ref::steal(PyObject_GetAttrString(o.get(), "__func__"));
        if (!inner) {
          PyErr_Clear();
          break;
        }
        o = std::move(inner);
      }
      o = without_peer(std::move(o));
      if (!o || !PyFunction_Check(o.get())) {
        unresolved.push_back(row.path);
        continue;
      }
      Py_INCREF(o.get());  // its code must keep its address
      functions[reinterpret_cast<PyFunctionObject*>(o.get())->func_code] = row.policy;
    }
    for (const char* path :
         {"torch.device", "torch.dtype", "torch.Size", "torch.finfo", "torch.iinfo", "types.CellType"}) {
      py::Ref o = resolve(path);
      if (o && PyType_Check(o.get())) pure_types.insert(reinterpret_cast<PyTypeObject*>(o.get()));
    }
  }
};

Tables& tables() {
  static Tables* t = new Tables();
  return *t;
}
}  // namespace

PyObject* polyfills() {
  static PyObject* module = py::import_module("kiln._polyfills");
  if (!module) throw InternalError("kiln._polyfills cannot be imported");
  return module;
}

py::Ref polyfill_of(PyCodeObject* code) {
  std::string name = PyUnicode_AsUTF8(code->co_qualname);
  std::replace(name.begin(), name.end(), '.', '_');
  return py::check(PyObject_GetAttrString(polyfills(), name.c_str()));
}

void load_callables() {
  polyfills();
  load_sizes();
  tables();
}
const std::vector<std::string>& unresolved_callables() { return tables().unresolved; }

Policy policy_of(PyObject* callable) {
  const auto& map = tables().callables;
  auto it = map.find(key_of(callable));
  return it == map.end() ? Policy::Unknown : it->second;
}

PyObject* self_of(PyObject* c_callable) {
  if (PyCFunction_Check(c_callable)) return PyCFunction_GET_SELF(c_callable);
  return Py_TYPE(c_callable) == &_PyMethodWrapper_Type ? reinterpret_cast<MethodWrapper*>(c_callable)->self : nullptr;
}

PyObject* getter_of(PyObject* setter) { return tables().getters.at(key_of(setter)); }

const char* name_of(PyObject* c_callable) {
  if (PyCFunction_Check(c_callable)) return reinterpret_cast<PyCFunctionObject*>(c_callable)->m_ml->ml_name;
  PyTypeObject* t = Py_TYPE(c_callable);
  PyObject* descriptor = nullptr;
  if (t == &PyMethodDescr_Type || t == &PyWrapperDescr_Type || t == &PyClassMethodDescr_Type) descriptor = c_callable;
  if (t == &_PyMethodWrapper_Type)
    descriptor = reinterpret_cast<PyObject*>(reinterpret_cast<MethodWrapper*>(c_callable)->descr);
  return descriptor ? PyUnicode_AsUTF8(PyDescr_NAME(descriptor)) : "";
}

Policy policy_of_code(PyCodeObject* code) {
  const auto& map = tables().functions;
  auto it = map.find(code);
  return it == map.end() ? Policy::Interpret : it->second;
}

bool constructs_purely(PyTypeObject* type) {
  while (type && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !tables().pure_types.count(type)) type = type->tp_base;
  if (!type) return false;
  if (PyType_IsSubtype(type, &PyTuple_Type) && PyDict_GetItemString(type->tp_dict, "n_sequence_fields")) return true;
  return tables().pure_types.count(type) ||
         PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(PyExc_BaseException));
}

}  // namespace kiln::capture
