#include "python/frame/callable.h"

#include <structmember.h>

#include "base/error.h"
#include "python/capture/capture.h"
#include "python/frame/bind.h"
#include "python/frame/errors.h"
#include "python/frame/hook.h"
#include "python/frame/module_call.h"
#include "python/frame/skip.h"
#include "python/pch.h"

namespace kiln::frame {
namespace {

struct Impl {
  ConfigPtr config;
  /// Bound methods have entries of their own: the object is nearly always part of what is guarded.
  std::unique_ptr<CodeCache> own;
  /// Modules: entries of `forward`, which is compiled in place of the call's own code while there are no hooks.
  std::unique_ptr<ModuleCall> module_call;
  CodeCache forward_cache;
};

struct CompiledObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;   // what the user gave
  PyObject* function;  // the Python function in it
  PyObject* self;      // of a bound method, or null
  PyObject* dict;
  PyObject* weakrefs;
  Impl* impl;
};

CompiledObject* as_compiled(PyObject* o) { return reinterpret_cast<CompiledObject*>(o); }

PyObject* call_compiled(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  CompiledObject* c = as_compiled(callable);
  const Mode& m = mode();
  if (m.disabled || options().disable || capture::is_capturing())
    return PyObject_Vectorcall(c->wrapped, args, nargsf, kwnames);
  try {
    auto* function = reinterpret_cast<PyFunctionObject*>(c->function);
    CodeCache* cache = c->impl->own.get();
    if (c->impl->module_call) {
      if (PyFunctionObject* forward = c->impl->module_call->forward(function, c->self)) {
        function = forward;
        cache = &c->impl->forward_cache;
      }
    }
    auto* code = reinterpret_cast<PyCodeObject*>(function->func_code);
    Target target{function, code, cache, c->impl->config, true, c};
    if (!target.cache) {
      CodeInfo* info = code_info(code);
      if (!info) throw py::PythonError{};
      target.cache = &info->cache(target.config);
    }
    Bound bound;
    if (!bind(function, c->self, args, PyVectorcall_NARGS(nargsf), kwnames, &bound))
      return PyObject_Vectorcall(c->wrapped, args, nargsf, kwnames);  // raises as CPython does
    const guards::Call call{bound.locals, bound.count, function->func_closure,
                            code->co_nlocalsplus - code->co_nfreevars, function->func_globals};
    const guards::EnteredUnderHooks entered;
    std::vector<PyObject*> values;
    guards::Owned owned;
    // `callable` may be released by what it runs.
    const py::Ref keep = py::Ref::borrow(callable);
    if (EntryPtr entry = find_entry(target, call, values, owned))
      return run_entry(std::move(target), std::move(entry), call, values, owned);
    if (m.run_only) return PyObject_Vectorcall(c->wrapped, args, nargsf, kwnames);
    return compile_and_run(target, [&] {
      if (target.function == reinterpret_cast<PyFunctionObject*>(c->function))
        return PyObject_Vectorcall(c->wrapped, args, nargsf, kwnames);
      // The module's forward in place of its call.
      const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
      std::vector<PyObject*> all{c->self};
      all.insert(all.end(), args, args + n + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0));
      return PyObject_Vectorcall(reinterpret_cast<PyObject*>(target.function), all.data(), static_cast<size_t>(n + 1),
                                 kwnames);
    });
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

int traverse_compiled(PyObject* o, visitproc visit, void* arg) {
  CompiledObject* c = as_compiled(o);
  Py_VISIT(Py_TYPE(o));
  Py_VISIT(c->wrapped);
  Py_VISIT(c->function);
  Py_VISIT(c->self);
  Py_VISIT(c->dict);
  return 0;
}
int clear_compiled(PyObject* o) {
  Py_CLEAR(as_compiled(o)->dict);
  return 0;
}
void dealloc_compiled(PyObject* o) {
  CompiledObject* c = as_compiled(o);
  PyTypeObject* type = Py_TYPE(o);
  PyObject_GC_UnTrack(o);
  if (c->weakrefs) PyObject_ClearWeakRefs(o);
  Py_CLEAR(c->wrapped);
  Py_CLEAR(c->function);
  Py_CLEAR(c->self);
  Py_CLEAR(c->dict);
  forget_owner(c);
  if (c->impl && c->impl->config->alone) forget_caches(c->impl->config);
  delete c->impl;
  type->tp_free(o);
  Py_DECREF(type);
}
PyObject* bind_method(PyObject* o, PyObject* instance, PyObject*) {
  if (!instance || instance == Py_None) return Py_NewRef(o);
  return PyMethod_New(o, instance);
}
PyObject* repr_compiled(PyObject* o) { return PyUnicode_FromFormat("<compiled %R>", as_compiled(o)->wrapped); }
PyObject* entries_of(PyObject* o, void*) {
  CompiledObject* c = as_compiled(o);
  auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(c->function)->func_code);
  CodeInfo* info = code_info(code);
  const CodeCache* cache = c->impl->own ? c->impl->own.get() : info ? &info->cache(c->impl->config) : nullptr;
  if (!c->impl->forward_cache.entries.empty()) cache = &c->impl->forward_cache;
  PyObject* list = PyList_New(0);
  if (!list || !cache) return list;
  for (const EntryPtr& e : cache->entries) {
    py::Ref row = py::Ref::steal(Py_BuildValue(
        "{s:L,s:L,s:L,s:n,s:n,s:O,s:n,s:n}", "id", e->id, "hits", e->hits, "slow_checks", e->tree.slow_runs(), "guards",
        (Py_ssize_t)e->tree.guards().size(), "fast_steps", (Py_ssize_t)e->tree.fast_size(), "breaks",
        e->continuation ? Py_True : Py_False, "sizes", (Py_ssize_t)(e->sizes ? e->sizes->num_variants() : 1),
        "compiled_sizes", (Py_ssize_t)(e->sizes ? e->sizes->num_compiled() : 1)));
    if (!row || PyList_Append(list, row.get()) < 0) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

PyObject* wrapped_name() {
  static PyObject* const name = PyUnicode_InternFromString("__wrapped__");
  return name;
}

/// __wrapped__ of a callable of kiln's: `wrapped`, unless the dict has another.
template <class Object>
PyObject* get_wrapped(PyObject* o, void*) {
  const auto* callable = reinterpret_cast<Object*>(o);
  PyObject* dict = callable->dict;
  PyObject* said = dict ? PyDict_GetItemWithError(dict, wrapped_name()) : nullptr;
  if (!said && PyErr_Occurred()) return nullptr;
  return Py_NewRef(said ? said : callable->wrapped);
}

int set_wrapped(PyObject* o, PyObject* value, void*) {
  const py::Ref dict = py::Ref::steal(PyObject_GenericGetDict(o, nullptr));
  if (!dict) return -1;
  return value ? PyDict_SetItem(dict.get(), wrapped_name(), value) : PyDict_DelItem(dict.get(), wrapped_name());
}

/// An attribute of the function that was compiled, for what reads a callable's code and defaults.
PyObject* get_of_function(PyObject* o, void* name) {
  return PyObject_GetAttrString(as_compiled(o)->function, static_cast<const char*>(name));
}

template <const char* name>
constexpr PyGetSetDef kOfFunction{name, &get_of_function, nullptr, "that of the function that was compiled",
                                  const_cast<char*>(name)};
constexpr char kCode[] = "__code__", kDefaults[] = "__defaults__", kKwdefaults[] = "__kwdefaults__",
               kClosure[] = "__closure__", kGlobals[] = "__globals__";

}  // namespace

PyTypeObject* compiled_type() {
  static PyTypeObject* type = [] {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(CompiledObject, vectorcall), READONLY, nullptr},
        {"__dictoffset__", T_PYSSIZET, offsetof(CompiledObject, dict), READONLY, nullptr},
        {"__weaklistoffset__", T_PYSSIZET, offsetof(CompiledObject, weakrefs), READONLY, nullptr},
        {"_kiln_wrapped", T_OBJECT, offsetof(CompiledObject, wrapped), READONLY, "what was compiled"},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef getset[] = {
        {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
        {"__wrapped__", &get_wrapped<CompiledObject>, &set_wrapped,
         "what was compiled, unless functools.wraps has said otherwise", nullptr},
        kOfFunction<kCode>,
        kOfFunction<kDefaults>,
        kOfFunction<kKwdefaults>,
        kOfFunction<kClosure>,
        kOfFunction<kGlobals>,
        {"_entries", &entries_of, nullptr,
         "compiled entries, as dicts: id, hits, slow_checks, guards, fast_steps, breaks, and how many "
         "combinations of sizes came up and are compiled",
         nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr}};
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_compiled)},
                           {Py_tp_traverse, reinterpret_cast<void*>(&traverse_compiled)},
                           {Py_tp_clear, reinterpret_cast<void*>(&clear_compiled)},
                           {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                           {Py_tp_descr_get, reinterpret_cast<void*>(&bind_method)},
                           {Py_tp_repr, reinterpret_cast<void*>(&repr_compiled)},
                           {Py_tp_members, members},
                           {Py_tp_getset, getset},
                           {0, nullptr}};
    PyType_Spec spec = {
        "kiln._C.CompiledCallable", sizeof(CompiledObject), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

PyObject* original_of(PyObject* callable, const Config& config) {
  PyTypeObject* type = compiled_type();
  if (!type || Py_TYPE(callable) != type) return nullptr;
  const Config& own = *as_compiled(callable)->impl->config;
  // fullgraph of its own is kept: at a break the call is made as it stands.
  const bool plain = !own.backend && own.options.empty();
  const bool same = own.backend.get() == config.backend.get() && own.options == config.options;
  return same || plain ? as_compiled(callable)->wrapped : nullptr;
}

py::Ref make_compiled(PyObject* target, ConfigPtr config) {
  PyObject* function = target;
  PyObject* self = nullptr;
  if (PyMethod_Check(target)) {
    function = PyMethod_GET_FUNCTION(target);
    self = PyMethod_GET_SELF(target);
  }
  if (!PyFunction_Check(function))
    throw UserError(std::string("kiln._C.compile takes a Python function or a bound method of one, not ") +
                    Py_TYPE(target)->tp_name);
  init_skip();
  PyTypeObject* type = compiled_type();
  if (!type) throw py::PythonError{};
  py::Ref made = py::check(type->tp_alloc(type, 0));
  CompiledObject* c = as_compiled(made.get());
  c->vectorcall = &call_compiled;
  c->wrapped = Py_NewRef(target);
  c->function = Py_NewRef(function);
  c->self = Py_XNewRef(self);
  c->impl = new Impl;
  c->impl->config = std::move(config);
  if (self) c->impl->own = std::make_unique<CodeCache>();
  if (ModuleCall::applies(reinterpret_cast<PyFunctionObject*>(function), self))
    c->impl->module_call = std::make_unique<ModuleCall>();
  // What functools.wraps copies.
  for (const char* name : {"__module__", "__name__", "__qualname__", "__doc__", "__annotations__"}) {
    py::Ref value = py::Ref::steal(PyObject_GetAttrString(target, name));
    if (!value)
      PyErr_Clear();
    else if (PyObject_SetAttrString(made.get(), name, value.get()) < 0)
      throw py::PythonError{};
  }
  if (auto* f = reinterpret_cast<PyFunctionObject*>(function); f->func_dict && !self) {
    py::Ref dict = py::check(PyObject_GenericGetDict(made.get(), nullptr));
    if (PyDict_Update(dict.get(), f->func_dict) < 0) throw py::PythonError{};
    if (PyDict_Contains(dict.get(), wrapped_name()) == 1) PyDict_DelItem(dict.get(), wrapped_name());
  }
  return made;
}

// --- kiln.disable and kiln.run
// ------------------------------------------------------------------------------------------

namespace {

enum class ModeKind { Disabled, DisabledOnce, RunOnly };

struct ModeObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped;
  PyObject* dict;
  PyObject* weakrefs;
  ModeKind kind;
};
ModeObject* as_mode(PyObject* o) { return reinterpret_cast<ModeObject*>(o); }

PyObject* call_mode(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  ModeObject* o = as_mode(callable);
  Mode& m = mode();
  const py::Ref keep = py::Ref::borrow(callable);
  switch (o->kind) {
    case ModeKind::Disabled: {
      Scoped<int> off(m.disabled, m.disabled + 1);
      return PyObject_Vectorcall(o->wrapped, args, nargsf, kwnames);
    }
    case ModeKind::RunOnly: {
      Scoped<bool> only(m.run_only, true);
      return PyObject_Vectorcall(o->wrapped, args, nargsf, kwnames);
    }
    case ModeKind::DisabledOnce:
      break;
  }
  return PyObject_Vectorcall(o->wrapped, args, nargsf, kwnames);
}

int traverse_mode(PyObject* o, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(o));
  Py_VISIT(as_mode(o)->wrapped);
  Py_VISIT(as_mode(o)->dict);
  return 0;
}
int clear_mode(PyObject* o) {
  Py_CLEAR(as_mode(o)->dict);
  return 0;
}
void dealloc_mode(PyObject* o) {
  PyTypeObject* type = Py_TYPE(o);
  PyObject_GC_UnTrack(o);
  if (as_mode(o)->weakrefs) PyObject_ClearWeakRefs(o);
  Py_CLEAR(as_mode(o)->wrapped);
  Py_CLEAR(as_mode(o)->dict);
  type->tp_free(o);
  Py_DECREF(type);
}

py::Ref make_mode(PyObject* target, ModeKind kind) {
  PyTypeObject* type = mode_type();
  if (!type) throw py::PythonError{};
  py::Ref made = py::check(type->tp_alloc(type, 0));
  ModeObject* o = as_mode(made.get());
  o->vectorcall = &call_mode;
  o->wrapped = Py_NewRef(target);
  o->kind = kind;
  for (const char* name : {"__module__", "__name__", "__qualname__", "__doc__", "__annotations__"}) {
    py::Ref value = py::Ref::steal(PyObject_GetAttrString(target, name));
    if (!value)
      PyErr_Clear();
    else if (PyObject_SetAttrString(made.get(), name, value.get()) < 0)
      throw py::PythonError{};
  }
  return made;
}

}  // namespace

PyTypeObject* mode_type() {
  static PyTypeObject* type = [] {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(ModeObject, vectorcall), READONLY, nullptr},
        {"__dictoffset__", T_PYSSIZET, offsetof(ModeObject, dict), READONLY, nullptr},
        {"__weaklistoffset__", T_PYSSIZET, offsetof(ModeObject, weakrefs), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef getset[] = {{"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
                                   {"__wrapped__", &get_wrapped<ModeObject>, &set_wrapped,
                                    "what it calls, unless functools.wraps has said otherwise", nullptr},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&dealloc_mode)},
                           {Py_tp_traverse, reinterpret_cast<void*>(&traverse_mode)},
                           {Py_tp_clear, reinterpret_cast<void*>(&clear_mode)},
                           {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                           {Py_tp_descr_get, reinterpret_cast<void*>(&bind_method)},
                           {Py_tp_members, members},
                           {Py_tp_getset, getset},
                           {0, nullptr}};
    PyType_Spec spec = {
        "kiln._C.ModeCallable", sizeof(ModeObject), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

py::Ref make_disabled(PyObject* target, bool recursive) {
  if (!recursive) {
    PyObject* function = PyMethod_Check(target) ? PyMethod_GET_FUNCTION(target) : target;
    if (PyFunction_Check(function))
      if (CodeInfo* info = code_info(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function))))
        info->internal = true;
  }
  return make_mode(target, recursive ? ModeKind::Disabled : ModeKind::DisabledOnce);
}
py::Ref make_run(PyObject* target) { return make_mode(target, ModeKind::RunOnly); }

}  // namespace kiln::frame
