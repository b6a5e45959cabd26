// Floats that changed between calls: the graph gets them as 0-dim tensors, and the program sees kiln._numbers.Number in
// their place. Whatever needs the value ends the attempt; the next one takes that float for a constant again.
#include <ATen/ScalarOps.h>

#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
PyObject* numbers_module() {
  static PyObject* m = py::check(PyImport_ImportModule("kiln._numbers")).release();
  return m;
}
PyTypeObject* number_type() {
  static PyObject* t = py::check(PyObject_GetAttrString(numbers_module(), "Number")).release();
  return reinterpret_cast<PyTypeObject*>(t);
}
PyObject* function_of(const char* name) { return py::check(PyObject_GetAttrString(numbers_module(), name)).release(); }
}  // namespace

void load_numbers() { number_type(); }

bool Machine::is_number(PyObject* o) const { return has_numbers && Py_TYPE(o) == number_type(); }

bool Machine::is_changing(PyObject* o, const SourcePtr& source) const {
  if (!options.changing_floats || options.changing_floats->empty()) return false;
  const auto changes = [&](const SourcePtr& s) {
    const std::string text = s->text();
    return options.changing_floats->count(text) && !options.constant_floats.count(text);
  };
  if (PyFloat_CheckExact(o)) return changes(source);
  if (!PyTuple_CheckExact(o)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i)
    if (PyFloat_CheckExact(PyTuple_GET_ITEM(o, i)) && changes(guards::list_item(source, i))) return true;
  return false;
}

PyObject* Machine::number_for(PyObject* o, const SourcePtr& source) {
  const std::string text = source->text();
  if (auto it = numbers.find(text); it != numbers.end()) return it->second.new_ref();
  py::Ref real, fake;
  {
    aten::RecordingPaused paused;
    const at::Tensor t = at::scalar_tensor(PyFloat_AS_DOUBLE(o), at::TensorOptions().dtype(at::kDouble));
    real = py::Ref::steal(THPVariable_Wrap(t));
  }
  if (!real) return nullptr;
  fake = py::Ref::steal(make_fake(real.get(), source));
  if (!fake) return nullptr;
  find(fake.get())->active = true;  // the float is found again, not a tensor: its type is the only guard
  guard(Guard::Kind::Type, source, reinterpret_cast<PyObject*>(&PyFloat_Type), py311::type_version(&PyFloat_Type));
  has_numbers = true;
  Paused plainly(*this);
  py::Ref sources = py::Ref::steal(Py_BuildValue("(s)", text.c_str()));
  py::Ref number = py::Ref::steal(sources ? PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(number_type()),
                                                                         fake.get(), sources.get(), nullptr)
                                          : nullptr);
  if (!number) return nullptr;
  number_sources[number.get()] = source;
  return (numbers[text] = number).new_ref();
}

PyObject* Machine::number_step(PyObject* const* args, size_t n) {
  KILN_CHECK(n == 2 && PyUnicode_Check(args[0]), "kiln._C._number takes what to do and an object");
  if (PyUnicode_CompareWithASCIIString(args[0], "is") == 0) return Py_NewRef(is_number(args[1]) ? Py_True : Py_False);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i)
    needed_floats.insert(PyUnicode_AsUTF8(PyTuple_GET_ITEM(args[1], i)));
  return graph_break("symbolic-branch", "the value of a float that changes between calls is needed");
}

PyObject* Machine::specialize(PyObject* number) {
  py::Ref sources = py::Ref::steal(PyObject_GetAttrString(number, "sources"));
  static PyObject* what = PyUnicode_InternFromString("specialize");
  PyObject* args[] = {what, sources.get()};
  return sources ? number_step(args, 2) : nullptr;
}

PyObject* Machine::number_among(PyObject* const* args, size_t n, bool nested) const {
  for (size_t i = 0; has_numbers && i < n; ++i) {
    if (!args[i]) continue;
    if (is_number(args[i])) return args[i];
    if (!nested || !(PyList_CheckExact(args[i]) || PyTuple_CheckExact(args[i]))) continue;
    PyObject** items = PySequence_Fast_ITEMS(args[i]);
    if (PyObject* number = number_among(items, static_cast<size_t>(Py_SIZE(args[i])), nested)) return number;
  }
  return nullptr;
}

PyObject* Machine::operate_on_numbers(const char* op, PyObject* const* args) {
  static PyObject* binary = function_of("binary");
  return PyObject_CallFunction(binary, "sOO", op, args[0], args[1]);
}

PyObject* Machine::call_with_numbers(PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames) {
  static PyObject* function = function_of("call");
  const size_t named = kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0;
  py::Ref positional = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(args.size() - named)));
  py::Ref keywords = py::Ref::steal(PyDict_New());
  if (!positional || !keywords) return nullptr;
  for (size_t i = 0; i < args.size(); ++i) {
    if (i < args.size() - named)
      PyTuple_SET_ITEM(positional.get(), static_cast<Py_ssize_t>(i), Py_NewRef(args[i]));
    else if (PyDict_SetItem(keywords.get(), PyTuple_GET_ITEM(kwnames, i - (args.size() - named)), args[i]) < 0)
      return nullptr;
  }
  return PyObject_CallFunctionObjArgs(function, callable, positional.get(), keywords.get(), nullptr);
}

PyObject* number_value_function() {
  static PyObject* f = function_of("value");
  return f;
}

}  // namespace kiln::capture
