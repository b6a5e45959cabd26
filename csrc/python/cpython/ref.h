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

}  // namespace kiln::py
