#pragma once
#include <Python.h>

#include <utility>

namespace kiln::py {

/// An owned reference to a Python object; all members need the GIL.
class Ref {
 public:
  Ref() = default;
  /// Takes over a new reference.
  static Ref steal(PyObject* o) {
    Ref r;
    r.o_ = o;
    return r;
  }
  static Ref borrow(PyObject* o) {
    Py_XINCREF(o);
    return steal(o);
  }
  Ref(const Ref& r) : o_(r.o_) { Py_XINCREF(o_); }
  Ref(Ref&& r) noexcept : o_(std::exchange(r.o_, nullptr)) {}
  Ref& operator=(Ref r) noexcept {
    std::swap(o_, r.o_);
    return *this;
  }
  ~Ref() { Py_XDECREF(o_); }
  PyObject* get() const { return o_; }
  PyObject* release() { return std::exchange(o_, nullptr); }
  PyObject* new_ref() const {
    Py_XINCREF(o_);
    return o_;
  }
  explicit operator bool() const { return o_ != nullptr; }

 private:
  PyObject* o_ = nullptr;
};

/// A Python exception is set; C++ frames between here and the C API boundary unwind.
struct PythonError {};

/// Steals `o`; throws PythonError if it is null.
inline Ref check(PyObject* o) {
  if (!o) throw PythonError{};
  return Ref::steal(o);
}

/// The module of this name, a new reference, or null with an exception. PyImport_ImportModule asks the frame on top for
/// its __import__; while a program is captured that frame is the program's, and may have none (a namedtuple's __new__).
inline PyObject* import_module(const char* name) {
  const Ref text = Ref::steal(PyUnicode_FromString(name));
  if (!text) return nullptr;
  if (PyObject* loaded = PyImport_GetModule(text.get()); loaded || PyErr_Occurred()) return loaded;
  const Ref package = Ref::steal(PyImport_ImportModuleLevelObject(text.get(), nullptr, nullptr, nullptr, 0));
  if (!package) return nullptr;
  PyObject* module = PyImport_GetModule(text.get());
  if (!module && !PyErr_Occurred()) PyErr_SetObject(PyExc_ModuleNotFoundError, text.get());
  return module;
}

}  // namespace kiln::py
