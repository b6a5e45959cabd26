// Whether the program could see that its messages to logging are given later than in eager, on leaving.
#include <algorithm>
#include <unordered_set>

#include "python/capture/call_tools.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {

/// Borrowed; null if there is none.
PyObject* own_attribute(PyObject* o, const char* name) {
  PyObject** dict = _PyObject_GetDictPtr(o);
  return dict && *dict && PyDict_Check(*dict) ? PyDict_GetItemString(*dict, name) : nullptr;
}

/// The objects that a logger's messages go through.
struct WayOfMessages {
  std::unordered_set<PyObject*> settings;  // decide what happens to a message
  std::unordered_set<PyObject*> written;   // may be changed by one: what handlers and filters of the user's refer to

  void add_logger(PyObject* logger) {
    for (int depth = 0; logger && depth < kMost; ++depth) {
      add(logger);
      add_filters(logger);
      add(own_attribute(logger, "manager"));
      PyObject* handlers = own_attribute(logger, "handlers");
      add(handlers);
      if (handlers && PyList_Check(handlers))
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handlers); ++i) add_handler(PyList_GET_ITEM(handlers, i));
      if (own_attribute(logger, "propagate") == Py_False) break;
      logger = own_attribute(logger, "parent");
      if (logger == Py_None) break;
    }
  }

 private:
  static constexpr int kMost = 1000, kDeepest = 6;

  void add(PyObject* o) {
    if (!o) return;
    settings.insert(o);
    if (PyObject** dict = _PyObject_GetDictPtr(o); dict && *dict) settings.insert(*dict);
  }

  void add_filters(PyObject* of) {
    PyObject* filters = own_attribute(of, "filters");
    add(filters);
    if (filters && PyList_Check(filters))
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(filters); ++i) add_code(PyList_GET_ITEM(filters, i));
  }

  void add_handler(PyObject* handler) {
    add_filters(handler);
    if (PyObject* formatter = own_attribute(handler, "formatter")) add_code(formatter);
    add_code(handler);
  }

  void add_code(PyObject* o) {
    add(o);
    const std::string module = Py_TYPE(o)->tp_flags & Py_TPFLAGS_HEAPTYPE ? module_of(Py_TYPE(o)) : "";
    if (module != "logging" && module != "logging.handlers") return add_written(o, 0);
    PyObject** dict = _PyObject_GetDictPtr(o);  // a handler's emit, say, may be the user's
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (dict && *dict && PyDict_Next(*dict, &at, &name, &value))
      if (PyFunction_Check(value) || PyMethod_Check(value)) add_written(value, 0);
  }

  static std::string module_of(PyTypeObject* t) {
    PyObject* name = PyDict_GetItemString(t->tp_dict, "__module__");
    return name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : "";
  }

  void add_written(PyObject* o, int depth) {
    if (PyType_Check(o) || PyModule_Check(o) || PyCode_Check(o) || written.size() >= kMost || !written.insert(o).second)
      return;
    if (depth >= kDeepest || !PyObject_IS_GC(o)) return;
    if (PyFunction_Check(o)) {  // its globals are not its own
      if (PyObject* closure = PyFunction_GET_CLOSURE(o)) add_written(closure, depth);
      return;
    }
    for (PyObject* part : referents_of(o)) add_written(part, depth + 1);
  }
};

}  // namespace

bool Machine::sees_message(const Deferred& message) const {
  static PyObject* const logger = py::check(PyObject_GetAttrString(py::import_module("logging"), "Logger")).release();
  if (message.made || message.args.empty() || PyObject_IsInstance(message.args[0].get(), logger) != 1) return false;
  // The last resort is the stream that sys has then.
  for (const char* name : {"logging", "sys"})
    if (globals_written.contains(PyModule_GetDict(PyImport_AddModule(name)))) return true;
  WayOfMessages way;
  way.add_logger(message.args[0].get());
  return std::any_of(overlay_order.begin(), overlay_order.end(),
                     [&](PyObject* o) { return way.settings.contains(o) || way.written.contains(o); }) ||
         std::any_of(knowns.begin(), knowns.end(), [&](const Known& k) {
           return way.written.contains(k.real.get()) || (way.settings.contains(k.real.get()) && was_written(k));
         });
}

}  // namespace kiln::capture
