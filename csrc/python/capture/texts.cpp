// Texts that are made of numbers the graph computes, and of open sizes: the program sees kiln._numbers.Text in their
// place, and the str is made on leaving, if anything is left that wants it (the message of a check that holds is not).
// Whatever needs the text before ends the attempt; the next one needs the numbers where the text is made.
#include "aten/fake.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
PyObject* member(const char* name) { return member_of("kiln._numbers", name); }
}  // namespace

PyTypeObject* text_type() {
  static PyObject* t = member("Text");
  return reinterpret_cast<PyTypeObject*>(t);
}

bool Machine::is_text(PyObject* o) const { return has_numbers && Py_TYPE(o) == text_type(); }

bool Machine::text_among(PyObject* const* args, size_t n) const {
  return has_numbers && std::any_of(args, args + n, [&](PyObject* o) {
           return is_text(o) || (PyTuple_CheckExact(o) &&
                                 text_among(PySequence_Fast_ITEMS(o), static_cast<size_t>(PyTuple_GET_SIZE(o))));
         });
}

bool Machine::makes_texts() const { return options.texts && options.item_numbers && !py::function_mode_active(); }

bool Machine::is_unknown(PyObject* const* args, size_t n) const {
  return number_among(args, n, /*nested=*/true) || size_among(args, n);
}

PyObject* Machine::make_text(PyObject* function, PyObject* const* args, size_t n) {
  static PyObject* text = member("text");
  py::Ref made;
  if (makes_texts()) {
    Paused plainly(*this);
    const aten::RecordingPaused no_recording;
    std::vector<PyObject*> all{function};
    all.insert(all.end(), args, args + n);
    made = py::Ref::steal(PyObject_Vectorcall(text, all.data(), all.size(), nullptr));
    if (!made) return nullptr;
  }
  if (made && made.get() != Py_None) {
    has_numbers = true;
    return made.release();
  }
  return text_among(args, n) ? need_text() : nullptr;
}

PyObject* Machine::need_text() {
  text_needed = true;
  return graph_break("symbolic-branch", "a text that is made of numbers of the graph is needed");
}

PyObject* Machine::joined_text(PyObject* join, PyObject* given) {
  py::Ref items = py::Ref::borrow(given);
  if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) {
    // As str.join does it, whose items could not be texts.
    if (!iterates(given)) return nullptr;
    items = py::Ref::steal(after_c_call(PySequence_List(given)));
    if (!items) return nullptr;
  }
  PyObject* const all = items.get();
  if (!number_among(&all, 1, /*nested=*/true))
    return all == given ? nullptr : after_c_call(PyUnicode_Join(PyCFunction_GET_SELF(join), all));
  const py::Ref pieces = py::Ref::steal(PySequence_Tuple(all));
  PyObject* const args[] = {pieces.get()};
  return pieces ? make_text(join, args, 1) : nullptr;
}

PyObject* Machine::text_of_call(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  if (!makes_texts() || kwnames || n == 0) return nullptr;
  const auto builtin = [](const char* name) { return PyDict_GetItemString(PyEval_GetBuiltins(), name); };
  static PyObject *const repr = builtin("repr"), *const ascii = builtin("ascii"), *const format = builtin("format");
  static PyObject* const round = builtin("round");
  if (callable == round && n == 2 && is_number(args[0])) return make_text(callable, args, n);
  const std::string_view name = name_of(callable);
  if (name == "format" || name == "join") {
    // A method of a str, bound or not.
    PyObject* self = PyCFunction_Check(callable)                ? PyCFunction_GET_SELF(callable)
                     : Py_TYPE(callable) == &PyMethodDescr_Type ? *args
                                                                : nullptr;
    if (self && PyUnicode_CheckExact(self)) {
      const size_t first = PyCFunction_Check(callable) ? 0 : 1;
      const py::Ref method = py::check(PyObject_GetAttrString(self, name_of(callable)));
      if (name == "join") return n == first + 1 ? joined_text(method.get(), args[first]) : nullptr;
      return is_unknown(args + first, n - first) ? make_text(method.get(), args + first, n - first) : nullptr;
    }
  }
  const bool one = callable == reinterpret_cast<PyObject*>(&PyUnicode_Type) || callable == repr || callable == ascii;
  if (one ? n != 1 : callable != format || n > 2) return nullptr;
  return is_number(args[0]) || is_text(args[0]) || is_open_number(args[0]) ? make_text(callable, args, n) : nullptr;
}

}  // namespace kiln::capture
