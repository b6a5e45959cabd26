#include "python/capture/arrays.h"

#include <cstring>
#include <string_view>

#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/guards/contents.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

constexpr int kDeepest = 3;                  // lists within lists of numbers
constexpr Py_ssize_t kMostBytes = 64 << 20;  // of an array that is kept with the compiled code

py::Ref attribute(PyObject* o, const char* name) { return py::check(PyObject_GetAttrString(o, name)); }

/// Whether no two calls need to find the same in it: objects, and times, of which "now" is one.
bool changes_by_itself(PyObject* array) {
  const py::Ref kind = attribute(attribute(array, "dtype").get(), "kind");
  return holds_objects(array) || PyUnicode_CompareWithASCIIString(kind.get(), "M") == 0 ||
         PyUnicode_CompareWithASCIIString(kind.get(), "m") == 0;
}

Py_ssize_t bytes_of(PyObject* array) { return PyLong_AsSsize_t(attribute(array, "nbytes").get()); }

bool is_dtype(PyObject* o) { return strncmp(Py_TYPE(o)->tp_name, "numpy.dtype", 11) == 0; }

/// What NumPy may be given, and may give, during a capture: numbers, texts, dtypes, arrays, and lists and tuples of
/// them.
bool is_operand(Machine& m, PyObject* o, int depth = 0) {
  if (is_array(o)) return !changes_by_itself(o) && (depth == 0 || is_made_array(m, o));
  if (PyTuple_Check(o) || PyList_CheckExact(o)) {
    PyObject** const items = PySequence_Fast_ITEMS(o);
    return depth < kDeepest && std::all_of(
                                   items, items + PySequence_Fast_GET_SIZE(o),
                                   [&](PyObject* item) { return is_operand(m, item, depth + 1); });
  }
  if (PySlice_Check(o)) {
    const auto* s = reinterpret_cast<PySliceObject*>(o);
    return is_operand(m, s->start, depth + 1) && is_operand(m, s->stop, depth + 1) && is_operand(m, s->step, depth + 1);
  }
  if (PyType_Check(o)) {
    auto* t = reinterpret_cast<PyTypeObject*>(o);
    return t == &PyFloat_Type || t == &PyLong_Type || t == &PyBool_Type || t == &PyComplex_Type || is_numpy_scalar(t);
  }
  if (o == Py_None || o == Py_Ellipsis || is_dtype(o)) return true;
  const bool plain = PyLong_CheckExact(o) || PyBool_Check(o) || PyFloat_CheckExact(o) || PyComplex_CheckExact(o) ||
                     PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || is_numpy_scalar(Py_TYPE(o));
  return plain && m.is_constant(o);
}

/// NumPy's functions that read or write files, print, call what they are given, tell where memory lies, or read and
/// write how NumPy was set up; each between two spaces.
constexpr std::string_view kLeftOut =
    " save savez savez_compressed savetxt load loadtxt genfromtxt fromfile fromregex fromstring frombuffer"
    " memmap open_memmap from_dlpack disp info source lookfor who test show_config show_runtime"
    " array2string array_repr array_str format_float_positional format_float_scientific"
    " set_string_function set_printoptions get_printoptions printoptions seterr geterr seterrcall"
    " geterrcall seterrobj geterrobj errstate setbufsize getbufsize set_numeric_ops add_docstring"
    " add_newdoc frompyfunc fromfunction fromiter apply_along_axis apply_over_axes piecewise nditer"
    " nested_iters get_include shares_memory may_share_memory byte_bounds ";

/// Whether it is one of NumPy's functions: of the module itself, of numpy.linalg or of numpy.fft.
bool is_exported(PyObject* callable) {
  static PyObject* const dunder_name = PyUnicode_InternFromString("__name__");
  const py::Ref name = py::Ref::steal(PyObject_GetAttr(callable, dunder_name));
  if (!name || !PyUnicode_Check(name.get())) return PyErr_Clear(), false;
  const std::string word = std::string(" ") + PyUnicode_AsUTF8(name.get()) + " ";
  if (kLeftOut.find(word) != std::string_view::npos) return false;
  PyObject* const modules = PyImport_GetModuleDict();
  for (const char* path : {"numpy", "numpy.linalg", "numpy.fft"}) {
    PyObject* const module = PyDict_GetItemString(modules, path);
    if (module && PyModule_Check(module) && PyDict_GetItem(PyModule_GetDict(module), name.get()) == callable)
      return true;
  }
  return false;
}

/// Methods that compute, or write to the array alone.
bool is_plain_method(std::string_view name) {
  return !name.starts_with("_") && name != "tofile" && name != "dump" && name != "dumps" && name != "resize" &&
         name != "setflags";
}

bool may_be_numpys(PyObject* callable) {
  const PyTypeObject* t = Py_TYPE(callable);
  if (strcmp(t->tp_name, "numpy.ufunc") == 0 || strcmp(t->tp_name, "numpy._ArrayFunctionDispatcher") == 0) return true;
  if (t == &PyFunction_Type) {
    PyObject* const module = reinterpret_cast<PyFunctionObject*>(callable)->func_module;
    return module && PyUnicode_Check(module) && std::string_view(PyUnicode_AsUTF8(module)).starts_with("numpy");
  }
  if (!PyCFunction_Check(callable)) return false;
  PyObject* const module = reinterpret_cast<PyCFunctionObject*>(callable)->m_module;
  return module && PyUnicode_Check(module) && std::string_view(PyUnicode_AsUTF8(module)).starts_with("numpy");
}

/// Runs NumPy with `args`, all of them operands that were read.
PyObject* run_numpy(Machine& m, PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  const size_t all = count_of(n, kwnames);
  const bool is_operator = PyCFunction_Check(callable) && !may_be_numpys(callable);
  const std::string what = is_operator ? std::string("operator.") + name_of(callable) : describe(callable);
  std::vector<PyObject*> given{callable};
  given.insert(given.end(), args, args + all);
  for (SharedArray& s : m.shared_arrays)
    for (size_t i = 1; i < given.size(); ++i)
      s.used = s.used || (is_array(given[i]) && owner_of(given[i]) == s.owner.get());
  std::vector<py::Ref> copies;
  py::Ref r;
  {
    Machine::Paused paused_here(m);  // much of it is Python
    // Existing arrays are not to be written, and no part of one is to leave: copies tell.
    for (size_t i = 1; i < given.size(); ++i) {
      if (!is_array(given[i]) || is_made_array(m, given[i])) continue;
      static PyObject* const copied = PyObject_GetAttrString(polyfills(), "copied_array");
      copies.push_back(py::check(PyObject_CallFunctionObjArgs(copied, given[i], /*writeable=*/Py_False, nullptr)));
      given[i] = copies.back().get();
    }
    static PyObject* const call_of_numpy = PyObject_GetAttrString(polyfills(), "call_of_numpy");
    r = py::Ref::steal(PyObject_Vectorcall(call_of_numpy, given.data(), n + 1, kwnames));
  }
  if (!r) {
    if (!PyErr_ExceptionMatches(PyExc_FloatingPointError) && copies.empty()) return nullptr;
    PyErr_Clear();
    return m.graph_break("call-that-breaks", "a call of " + what + ", which warns, or writes to an existing array");
  }
  const auto cannot_stay = [&](PyObject* v) {
    if (!is_array(v)) return false;
    PyObject* const owner = owner_of(v);
    return !owner || bytes_of(v) > kMostBytes || bytes_of(owner) > kMostBytes ||
           std::any_of(copies.begin(), copies.end(), [&](const py::Ref& c) { return c.get() == owner; });
  };
  if (!is_operand(m, r.get()) || any_within(r.get(), cannot_stay))
    return m.graph_break("call-that-breaks", "a call of " + what + ", whose result is a " + Py_TYPE(r.get())->tp_name +
                                                 " of much data, of objects or of existing memory");
  return m.after_c_call(r.release());
}

}  // namespace

bool is_array(PyObject* o) {
  static PyTypeObject* type = nullptr;
  if (type) return Py_TYPE(o) == type;
  if (strcmp(Py_TYPE(o)->tp_name, "numpy.ndarray") != 0 || Py_TYPE(o)->tp_flags & Py_TPFLAGS_HEAPTYPE) return false;
  type = Py_TYPE(o);
  return true;
}

PyObject* owner_of(PyObject* array) {
  while (array && is_array(array)) {
    const py::Ref base = attribute(array, "base");  // the array keeps it alive
    if (base.get() == Py_None) return array;
    array = base.get();
  }
  return nullptr;
}

bool is_made_array(Machine& m, PyObject* o) {
  if (!is_array(o) || m.find_plain(o)) return false;
  PyObject* const owner = owner_of(o);
  return owner && !m.find_plain(owner);
}

bool is_writeable(PyObject* array) { return attribute(attribute(array, "flags").get(), "writeable").get() == Py_True; }

bool holds_objects(PyObject* array) { return attribute(attribute(array, "dtype").get(), "hasobject").get() == Py_True; }

bool is_held_once(PyObject* array) {
  PyObject* const owner = owner_of(array);
  return owner && Py_REFCNT(array) == 1 && (owner == array || Py_REFCNT(owner) == 1);
}

py::Ref copy_of_array(PyObject* array) { return py::check(PyObject_CallMethod(array, "copy", "s", "K")); }

bool shows_address(PyObject* name) {
  return std::ranges::any_of(
      std::initializer_list<const char*>{"ctypes", "data", "__array_interface__", "__array_struct__"},
      [&](const char* n) { return PyUnicode_CompareWithASCIIString(name, n) == 0; });
}

bool makes_dtype(Machine& m, PyTypeObject* type, PyObject* const* args, size_t n) {
  return strcmp(type->tp_name, "numpy.dtype") == 0 &&
         std::all_of(args, args + n, [&](PyObject* o) { return is_operand(m, o); });
}

PyObject* Machine::call_numpy(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  size_t n = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  const size_t all = count_of(nargsf, kwnames);
  std::vector<PyObject*> with_receiver;
  PyObject* const self = PyCFunction_Check(callable) ? PyCFunction_GET_SELF(callable) : nullptr;
  if (self && is_array(self)) {
    PyObject* const method = PyDict_GetItemString(Py_TYPE(self)->tp_dict, name_of(callable));
    if (!method) return nullptr;
    with_receiver.push_back(self);
    with_receiver.insert(with_receiver.end(), args, args + all);
    return call_numpy(method, with_receiver.data(), n + 1, kwnames);
  }
  if (Py_TYPE(callable) == &PyMethodDescr_Type) {
    if (n == 0 || !is_array(args[0]) || PyDescr_TYPE(callable) != Py_TYPE(args[0]) ||
        !is_plain_method(name_of(callable)))
      return nullptr;
  } else if (!may_be_numpys(callable) || !is_exported(callable)) {
    return nullptr;
  }
  if (size_among(args, all))
    return on_values(args, all, [&](PyObject* const* values) { return call_numpy(callable, values, n, kwnames); });
  const auto operand = [this](PyObject* o) { return is_operand(*this, o); };
  if (!std::all_of(args, args + all, operand)) {
    PyObject* const number = number_among(args, all, /*nested=*/true);
    return number ? specialize(number) : nullptr;
  }
  for (size_t i = 0; i < all; ++i)
    if (!reads(args[i])) return nullptr;
  if (Known* k = find_plain(callable)) guard(Guard::Kind::Is, k->source, callable);
  return run_numpy(*this, callable, args, n, kwnames);
}

PyObject* operate_on_arrays(Machine& m, const char* op, PyObject* const* args, size_t n,
                            PyObject* (*native)(PyObject* const*)) {
  if (std::all_of(args, args + n, [&](PyObject* o) { return is_operand(m, o); })) {
    if (!std::all_of(args, args + n, [&](PyObject* o) { return m.reads(o); })) return nullptr;
    return run_numpy(m, operator_object(op), args, n, nullptr);
  }
  if (std::any_of(args, args + n, [&](PyObject* o) { return m.has_fake(o); }))
    return m.graph_break("call-that-breaks", "an operator of arrays and tensors");
  return native(args);
}

SharedArray::SharedArray(PyObject* array, at::Tensor made, int made_at)
    : owner(py::Ref::borrow(owner_of(array))),
      contents(guards::contents_of(owner.get(), kMostBytes)),
      tensor(std::move(made)),
      version(tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version())),
      instruction(made_at) {}

bool SharedArray::changed() const {
  // Nobody counts the writes to inference tensors.
  return used || tensor.is_inference() || static_cast<int64_t>(tensor._version()) != version || !contents ||
         !guards::has_contents(owner.get(), contents.get());
}

}  // namespace kiln::capture
