// Pattern matching: the instructions of `match` statements.
#include "python/capture/eval.h"
#include "python/pch.h"

namespace kiln::capture {

Flow op_get_len(Exec& e, int) {
  if (!e.m.reads(e.top(), -1)) return Flow::Error;
  const Py_ssize_t n = PyObject_Length(e.top());
  if (n < 0) return Flow::Error;
  e.push(PyLong_FromSsize_t(n));
  return Flow::Next;
}

Flow op_match_mapping(Exec& e, int) {
  e.push(Py_NewRef(Py_TYPE(e.top())->tp_flags & Py_TPFLAGS_MAPPING ? Py_True : Py_False));
  return Flow::Next;
}

Flow op_match_sequence(Exec& e, int) {
  e.push(Py_NewRef(Py_TYPE(e.top())->tp_flags & Py_TPFLAGS_SEQUENCE ? Py_True : Py_False));
  return Flow::Next;
}

Flow op_match_keys(Exec& e, int) {
  PyObject* keys = e.top(0);
  PyObject* subject = e.top(1);
  if (!e.m.reads(subject, -1)) return Flow::Error;
  const Py_ssize_t n = PyTuple_GET_SIZE(keys);
  py::Ref values = py::Ref::steal(PyTuple_New(n)), seen = py::Ref::steal(PySet_New(nullptr));
  if (!values || !seen) return Flow::Error;
  static PyObject* get = PyUnicode_InternFromString("get");
  py::Ref missing = py::Ref::steal(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* key = PyTuple_GET_ITEM(keys, i);
    const int again = PySet_Contains(seen.get(), key);
    if (again > 0) PyErr_Format(PyExc_ValueError, "mapping pattern checks duplicate key (%R)", key);
    if (again || PySet_Add(seen.get(), key) < 0) return Flow::Error;
    PyObject* v = PyObject_CallMethodObjArgs(subject, get, key, missing.get(), nullptr);
    if (!v) return Flow::Error;
    if (v == missing.get()) {
      Py_DECREF(v);
      e.push(Py_NewRef(Py_None));
      return Flow::Next;
    }
    PyTuple_SET_ITEM(values.get(), i, v);
  }
  e.push(values.release());
  return Flow::Next;
}

namespace {
/// What a class pattern asks its subject: attribute after attribute, each once.
class ClassPattern {
 public:
  ClassPattern(Exec& e, PyObject* subject, PyTypeObject* type) : e_(e), subject_(subject), type_(type) {}

  /// The attribute; null without an exception: the subject lacks it.
  PyObject* attribute(PyObject* name) {
    const int again = PySet_Contains(seen_.get(), name);
    if (again > 0)
      PyErr_Format(PyExc_TypeError, "%s() got multiple sub-patterns for attribute %R", type_->tp_name, name);
    if (again || PySet_Add(seen_.get(), name) < 0) return nullptr;
    PyObject* v = e_.m.load_attr(subject_, name);
    if (!v && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return v;
  }

  /// The names of the `n` attributes that are matched by position; null: an exception, or the class matches itself.
  py::Ref positional(Py_ssize_t n, bool* itself) {
    static PyObject* match_args = PyUnicode_InternFromString("__match_args__");
    py::Ref fields = py::Ref::steal(e_.m.load_attr(reinterpret_cast<PyObject*>(type_), match_args));
    if (fields && !PyTuple_CheckExact(fields.get())) {
      PyErr_Format(PyExc_TypeError, "%s.__match_args__ must be a tuple (got %s)", type_->tp_name,
                   Py_TYPE(fields.get())->tp_name);
      return {};
    }
    if (!fields) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return {};
      PyErr_Clear();
      *itself = type_->tp_flags & _Py_TPFLAGS_MATCH_SELF;
    }
    const Py_ssize_t allowed = fields ? PyTuple_GET_SIZE(fields.get()) : *itself;
    if (allowed < n) {
      PyErr_Format(PyExc_TypeError, "%s() accepts %zd positional sub-pattern%s (%zd given)", type_->tp_name, allowed,
                   allowed == 1 ? "" : "s", n);
      return {};
    }
    for (Py_ssize_t i = 0; fields && i < n; ++i) {
      PyObject* name = PyTuple_GET_ITEM(fields.get(), i);
      if (PyUnicode_CheckExact(name)) continue;
      PyErr_Format(PyExc_TypeError, "__match_args__ elements must be strings (got %s)", Py_TYPE(name)->tp_name);
      return {};
    }
    return fields;
  }

 private:
  Exec& e_;
  PyObject* subject_;
  PyTypeObject* type_;
  py::Ref seen_ = py::check(PySet_New(nullptr));
};
}  // namespace

/// CPython 3.11, ceval.c: the subject, the class and the names by keyword; gives the attributes as a tuple, or None.
Flow op_match_class(Exec& e, int arg) {
  py::Ref names = py::Ref::steal(e.pop()), type = py::Ref::steal(e.pop()), subject = py::Ref::steal(e.pop());
  if (!PyType_Check(type.get())) {
    PyErr_SetString(PyExc_TypeError, "called match pattern must be a class");
    return Flow::Error;
  }
  if (e.m.is_masked(subject.get())) {
    e.m.specialize_masked(subject.get());
    return Flow::Error;
  }
  const int is = PyObject_IsInstance(subject.get(), type.get());
  if (is < 0) return Flow::Error;
  const Py_ssize_t keywords = PyTuple_GET_SIZE(names.get());
  py::Ref out = py::Ref::steal(PyTuple_New(arg + keywords));
  if (!out) return Flow::Error;
  ClassPattern pattern(e, subject.get(), reinterpret_cast<PyTypeObject*>(type.get()));
  bool matches = is, itself = false;
  py::Ref fields = matches && arg > 0 ? pattern.positional(arg, &itself) : py::Ref();
  if (PyErr_Occurred()) return Flow::Error;
  if (itself && arg > 0) PyTuple_SET_ITEM(out.get(), 0, subject.new_ref());
  for (Py_ssize_t i = itself ? 1 : 0; matches && i < arg + keywords; ++i) {
    PyObject* name = i < arg ? PyTuple_GET_ITEM(fields.get(), i) : PyTuple_GET_ITEM(names.get(), i - arg);
    PyObject* v = pattern.attribute(name);
    if (!v && PyErr_Occurred()) return Flow::Error;
    matches = v;
    if (v) PyTuple_SET_ITEM(out.get(), i, v);
  }
  e.push(matches ? out.release() : Py_NewRef(Py_None));
  return Flow::Next;
}

}  // namespace kiln::capture
