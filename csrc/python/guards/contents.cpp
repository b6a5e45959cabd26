#include "python/guards/contents.h"

#include <cstring>
#include <string>
#include <string_view>

namespace kiln::guards {
namespace {

/// A borrowed view of an object's memory.
class View {
 public:
  explicit View(PyObject* o) : held_(PyObject_CheckBuffer(o) && PyObject_GetBuffer(o, &buffer_, PyBUF_FULL_RO) == 0) {
    if (!held_) PyErr_Clear();
  }
  ~View() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  explicit operator bool() const { return held_; }
  Py_ssize_t size() const { return buffer_.len; }
  bool holds_objects() const { return buffer_.format && strchr(buffer_.format, 'O'); }

  /// All but the bytes, as bytes.
  std::string layout() const {
    std::string s = buffer_.format ? buffer_.format : "B";
    s += buffer_.readonly ? "\n1" : "\n0";
    const auto add = [&](const Py_ssize_t* values) {
      if (values) s.append(reinterpret_cast<const char*>(values), sizeof(Py_ssize_t) * buffer_.ndim);
    };
    s.append(reinterpret_cast<const char*>(&buffer_.itemsize), sizeof(Py_ssize_t));
    add(buffer_.shape);
    add(buffer_.strides);
    return s;
  }
  /// Copies size() bytes to `to`, in the order of the elements.
  bool copy(char* to) const {
    if (PyBuffer_ToContiguous(to, &buffer_, buffer_.len, 'C') == 0) return true;
    PyErr_Clear();
    return false;
  }
  bool is_dense() const { return PyBuffer_IsContiguous(&buffer_, 'C'); }
  const char* data() const { return static_cast<const char*>(buffer_.buf); }

 private:
  mutable Py_buffer buffer_ = {};
  bool held_;
};

std::string_view text_of(PyObject* bytes) { return {PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)}; }

}  // namespace

py::Ref contents_of(PyObject* o, Py_ssize_t limit) {
  const View view(o);
  if (!view || view.size() > limit || view.holds_objects()) return {};
  const std::string layout = view.layout();
  py::Ref bytes = py::Ref::steal(PyBytes_FromStringAndSize(nullptr, view.size()));
  py::Ref text = py::Ref::steal(PyBytes_FromStringAndSize(layout.data(), static_cast<Py_ssize_t>(layout.size())));
  py::Ref both;
  if (text && bytes && view.copy(PyBytes_AS_STRING(bytes.get())))
    both = py::Ref::steal(PyTuple_Pack(2, text.get(), bytes.get()));
  if (!both) PyErr_Clear();
  return both;
}

bool has_contents(PyObject* o, PyObject* contents) {
  const View view(o);
  const std::string_view bytes = text_of(PyTuple_GET_ITEM(contents, 1));
  if (!view || view.size() != static_cast<Py_ssize_t>(bytes.size())) return false;
  if (view.layout() != text_of(PyTuple_GET_ITEM(contents, 0))) return false;
  if (view.is_dense()) return memcmp(view.data(), bytes.data(), bytes.size()) == 0;
  std::string copy(bytes.size(), '\0');
  return view.copy(copy.data()) && copy == bytes;
}

bool same_contents(PyObject* a, PyObject* b) {
  const View x(a), y(b);
  return x && y && x.size() == y.size() && x.is_dense() && y.is_dense() && !x.holds_objects() &&
         x.layout() == y.layout() && memcmp(x.data(), y.data(), static_cast<size_t>(x.size())) == 0;
}

}  // namespace kiln::guards
