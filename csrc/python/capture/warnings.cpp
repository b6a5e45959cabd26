// Warnings, of warnings.warn and of C code: effects on leaving, where no filter makes exceptions of them.
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {

/// What warnings.warn was called with.
struct Arguments {
  PyObject *message = nullptr, *category = PyExc_UserWarning;
  long level = 1;
};

/// False for arguments of another kind than a string, a category and a level.
bool parse(PyObject* const* args, size_t n, PyObject* kwnames, Arguments* out) {
  const size_t all = n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0);
  for (size_t i = 0; i < all; ++i) {
    const char* const by_place[] = {"message", "category", "stacklevel", "source"};
    if (i < n && i > 3) return false;
    const std::string_view name =
        i < n ? by_place[i] : PyUnicode_AsUTF8(PyTuple_GET_ITEM(kwnames, static_cast<Py_ssize_t>(i - n)));
    if (name == "message") {
      out->message = args[i];
    } else if (name == "category") {
      if (args[i] != Py_None) out->category = args[i];
    } else if (name == "stacklevel") {
      if (!PyLong_CheckExact(args[i])) return false;
      out->level = PyLong_AsLong(args[i]);
    } else if (name != "source" || args[i] != Py_None) {
      return false;
    }
  }
  return out->message && PyUnicode_CheckExact(out->message) && PyType_Check(out->category) &&
         PyObject_IsSubclass(out->category, PyExc_Warning) == 1;
}

/// Frames of the import system, which levels do not count.
bool is_internal(py311::Frame* f) {
  const std::string_view file = PyUnicode_AsUTF8(f->f_code->co_filename);
  return file.find("importlib") != file.npos && file.find("_bootstrap") != file.npos;
}

PyObject* helper(const char* name) {
  PyObject* f = PyObject_GetAttrString(polyfills(), name);
  if (!f) throw InternalError(std::string("kiln._polyfills has no ") + name);
  return f;
}

}  // namespace

PyObject* recorded_warnings() {
  static PyObject* const module = py::import_module("warnings");
  PyObject* const show = PyDict_GetItemString(PyModule_GetDict(module), "_showwarnmsg_impl");
  if (!show || !PyCFunction_Check(show)) return nullptr;
  PyObject* const self = PyCFunction_GET_SELF(show);
  return self && PyList_CheckExact(self) ? self : nullptr;
}

bool says_of_warnings(PyObject* globals) {
  static PyObject* const dict = PyModule_GetDict(py::import_module("warnings"));
  return globals == dict;
}

PyObject* Machine::written_filters(PyObject* module) {
  static PyObject* const name_of_filters = PyUnicode_InternFromString("filters");
  const py::Ref real = py::Ref::steal(PyObject_GetAttr(module, name_of_filters));
  if (!real || !PyList_Check(real.get())) return Py_None;
  PyObject* filters = nullptr;
  for (const Known& k : knowns)
    if (k.kind == Known::Kind::Shadow && k.real.get() == real.get()) filters = k.stand_in.get();
  if (const auto written = globals_written.find(PyModule_GetDict(module)); written != globals_written.end())
    for (const auto& [name, value] : written->second.entries) {
      if (PyUnicode_Compare(name.get(), name_of_filters) == 0) {
        if (!value || !PyList_Check(value.get())) return Py_None;
        filters = value.get();
        continue;
      }
      const py::Ref before = py::Ref::steal(PyObject_GetAttr(module, name.get()));
      const Known* k = value ? find(value.get()) : nullptr;
      if (!before || !value || (value.get() != before.get() && !(k && k->real.get() == before.get()))) return Py_None;
    }
  return filters && PyObject_RichCompareBool(filters, real.get(), Py_EQ) == 1 ? nullptr : filters;
}

PyObject* Machine::call_warn(PyObject* const* args, size_t n, PyObject* kwnames) {
  Arguments given;
  if (!parse(args, n, kwnames, &given)) return refuse_warning();
  // The frame that the warning is about must be one of the captured ones: others may be others in the next call.
  py311::Frame* at = ts->cframe->current_frame;
  const bool count_all = given.level <= 0 || is_internal(at);
  for (long level = given.level; --level > 0;) do {
      if (at == root) return refuse_warning();
      at = at->previous;
    } while (!count_all && is_internal(at));
  return warn_at(at, given.message, given.category);
}

PyObject* Machine::warn_at(py311::Frame* at, PyObject* message, PyObject* category) {
  static PyObject *const raises = helper("warning_raises"), *const action_of = helper("warning_action"),
                         *const warn = helper("warn_in"), *const partial = [] {
                           const py::Ref functools = py::Ref::steal(py::import_module("functools"));
                           return PyObject_GetAttrString(functools.get(), "partial");
                         }();
  Paused paused_here(*this);  // the helpers are no part of the program
  PyObject* const name = PyDict_GetItemString(at->f_globals, "__name__");
  if (!name || !PyUnicode_CheckExact(name) || at->f_globals == PyModule_GetDict(polyfills())) return refuse_warning();
  const py::Ref line = py::Ref::steal(PyLong_FromLong(place_of(at)->line));
  static PyObject* const module = py::import_module("warnings");
  PyObject* const filters = written_filters(module);
  PyErr_Clear();
  if (filters) {  // inside catch_warnings()
    const py::Ref action = PyList_Check(filters)
                               ? py::Ref::steal(PyObject_CallFunctionObjArgs(action_of, filters, category, message,
                                                                             name, line.get(), nullptr))
                               : py::Ref();
    PyErr_Clear();
    if (!action || PyUnicode_CompareWithASCIIString(action.get(), "ignore") != 0) return refuse_warning();
    Py_RETURN_NONE;
  }
  // What the program has looked at must not stay without the warning.
  if (PyObject* const recorded = recorded_warnings(); recorded && find(recorded)) return refuse_warning();
  PyObject* const about[] = {category, message, name, line.get()};
  const Setting* s = find_setting(raises, about, 4);
  if (!s || s->before.get() != Py_False) return refuse_warning();
  py::Ref call = py::Ref::steal(PyObject_CallFunctionObjArgs(partial, warn, at->f_globals, nullptr));
  if (!call) return nullptr;
  return defer(std::move(call), {message, category, at->f_code->co_filename, line.get()}, /*made=*/true);
}

PyObject* Machine::refuse_warning() { return graph_break("call-that-breaks", "a call of warnings.warn"); }

PyObject* Machine::defer_shown_warning(PyObject* shown) {
  py311::Frame* const at = ts->cframe->current_frame;
  py::Ref text, category;
  {
    Paused paused_here(*this);
    const py::Ref message = py::Ref::steal(PyObject_GetAttrString(shown, "message"));
    text = py::Ref::steal(message ? PyObject_Str(message.get()) : nullptr);
    category = py::Ref::steal(text ? PyObject_GetAttrString(shown, "category") : nullptr);
    if (!category) return nullptr;
    // It is noted as shown, which it is not yet.
    PyObject* registry = PyDict_GetItemString(at->f_globals, "__warningregistry__");
    const int line = place_of(at)->line;
    for (PyObject* k : {Py_BuildValue("(OOi)", text.get(), category.get(), line),
                        Py_BuildValue("(OO)", text.get(), category.get())}) {
      const py::Ref key = py::Ref::steal(k);
      if (registry && PyDict_Check(registry) && key && PyDict_Contains(registry, key.get()) == 1)
        PyDict_DelItem(registry, key.get());
    }
    PyErr_Clear();
  }
  return warn_at(at, text.get(), category.get());
}

}  // namespace kiln::capture
