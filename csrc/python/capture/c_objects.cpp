// Existing objects whose state lies in C: numbers' subclasses, NumPy's scalars and arrays, bytearrays, views of dicts,
// decimals. No instruction shows when C code reads them, so what C code is given is guarded by value or refused.
#include <cstring>
#include <string_view>

#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/guards/contents.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

using Is = Machine::CState;

constexpr Py_ssize_t kLargestContents = 4096;  // bytes that are compared at each call
constexpr int kDeepest = 3;                    // containers within containers that C code is expected to look into

bool is_heap(PyTypeObject* t) { return (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0; }

template <size_t n>
bool is_one_of(const char* name, const char* const (&names)[n]) {
  for (const char* other : names)
    if (strcmp(name, other) == 0) return true;
  return false;
}

/// The class in C whose layout instances of `t` have; object for plain classes of Python.
PyTypeObject* c_base(PyTypeObject* t) {
  while (t->tp_base && py311::is_of_class_statement(t)) t = t->tp_base;
  return t;
}

bool starts_with(const char* s, std::string_view prefix) { return strncmp(s, prefix.data(), prefix.size()) == 0; }

/// Classes whose instances do not change, or whose C state no function shows; which one it is tells all.
bool is_fixed(PyTypeObject* t) {
  for (const char* ours : {"torch.", "kiln.", "numpy.dtype", "pybind11_"})
    if (starts_with(t->tp_name, ours)) return true;
  if (is_heap(t)) {  // pybind11's classes
    PyObject* module = PyDict_GetItemWithError(t->tp_dict, names().module);
    if (module && PyUnicode_Check(module) && starts_with(PyUnicode_AsUTF8(module), "torch")) return true;
  }
  return is_one_of(t->tp_name, {"weakref",
                                "weakref.ReferenceType",
                                "functools.partial",
                                "functools._lru_cache_wrapper",
                                "re.Pattern",
                                "re.Match",
                                "property",
                                "classmethod",
                                "staticmethod",
                                "cell",
                                "PyCapsule",
                                "_thread.lock",
                                "_thread.RLock",
                                "_struct.Struct",
                                "operator.itemgetter",
                                "operator.attrgetter",
                                "operator.methodcaller",
                                "numpy.ufunc",
                                "super",
                                "numpy._ArrayFunctionDispatcher",
                                "ContextVar",
                                "_contextvars.ContextVar"});
}

bool lends_memory(PyTypeObject* t) {
  return is_one_of(t->tp_name, {"numpy.ndarray", "bytearray", "memoryview", "array.array"}) && t->tp_as_buffer &&
         t->tp_as_buffer->bf_getbuffer;
}

/// Functions that keep, count or classify what they are given, without looking into it.
bool only_keeps(const char* name) {
  return is_one_of(name, {"isinstance", "issubclass", "callable", "append", "appendleft", "insert", "is_", "is_not",
                          "ref", "__init_subclass__", "__setattr__"});
}
/// Functions that look at their arguments, but not at what is in them.
bool looks_once(const char* name) {
  return is_one_of(name, {"iter",     "next",       "len",         "reversed",      "extend",   "update",
                          "get",      "setdefault", "pop",         "items",         "values",   "keys",
                          "copy",     "clear",      "popitem",     "from_iterable", "__len__",  "__iter__",
                          "__next__", "__init__",   "__getitem__", "__setitem__",   "reduce",   "getitem",
                          "setitem",  "popleft",    "extendleft",  "move_to_end",   "fromkeys", "islice"});
}

}  // namespace

bool numpy_among(PyObject* const* args, size_t n) {
  return std::any_of(args, args + n, [](PyObject* o) { return o && (is_numpy_scalar(Py_TYPE(o)) || is_array(o)); });
}

bool is_numpy_scalar(PyTypeObject* t) {
  if (is_heap(t) || !starts_with(t->tp_name, "numpy.")) return false;
  for (PyTypeObject* base = t; base; base = base->tp_base)
    if (is_one_of(base->tp_name, {"numpy.number", "numpy.bool", "numpy.bool_"})) return true;
  return is_one_of(t->tp_name, {"numpy.float64", "numpy.complex128", "numpy.str_", "numpy.bytes_"});
}

Machine::CState Machine::c_state(PyTypeObject* t) {
  auto it = c_states_.find(t);
  if (it != c_states_.end()) return it->second;
  PyTypeObject* base = c_base(t);
  Is state = Is::Other;
  if (base == &PyBaseObject_Type)
    state = Is::None;
  else if (base == &PyFloat_Type || base == &PyLong_Type || base == &PyUnicode_Type || base == &PyBytes_Type ||
           base == &PyComplex_Type || is_numpy_scalar(base) ||
           is_one_of(base->tp_name, {"types.GenericAlias", "types.UnionType"}))
    state = Is::Value;
  else if (lends_memory(t))
    state = Is::Memory;
  else if (is_fixed(base))
    state = Is::Fixed;
  alive.push_back(py::Ref::borrow(reinterpret_cast<PyObject*>(t)));
  c_states_.emplace(t, state);
  return state;
}

bool Machine::opens(PyObject* container) {
  if (!observe(container)) return false;
  Known* k = find(container);
  if (!k || k->kind != Known::Kind::Shadow || k->opened) return true;
  k->opened = true;
  const std::vector<py::Ref> contents = k->contents;
  return std::all_of(contents.begin(), contents.end(), [&](const py::Ref& v) { return opens(v.get()); });
}

bool Machine::reads(PyObject* o, int depth) {
  if (told_apart.contains(o)) pin_members(o);
  if (depth >= 0 && !opens(o)) return false;
  switch (classify(o)) {
    case Class::Tuple:
    case Class::List:
      if (depth > kDeepest || depth < 0) return true;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
        if (!reads(PySequence_Fast_GET_ITEM(o, i), depth + 1)) return false;
      return true;
    case Class::Dict: {
      if (depth > kDeepest || depth < 0) return true;
      Py_ssize_t pos = 0;
      PyObject *key, *value;
      while (PyDict_Next(o, &pos, &key, &value))
        if (!reads(value, depth + 1)) return false;
      return true;
    }
    case Class::Instance:
      break;
    default:
      return true;
  }
  Known* k = find_plain(o);
  if (!k) return depth < 0 || reads_what_it_holds(o, depth);
  const Is state = c_state(Py_TYPE(o));
  switch (state) {
    case Is::None:
      return true;
    case Is::Value:
      return observe(o);
    case Is::Fixed: {
      // An attribute that C computes may be a new object each time; a dtype is not.
      const guards::Source& s = *k->source;
      if (s.kind == guards::Source::Kind::Attr && s.base->kind != guards::Source::Kind::Const &&
          !starts_with(Py_TYPE(o)->tp_name, "numpy.dtype"))
        break;
      guard(Guard::Kind::Is, k->source, o);
      return true;
    }
    case Is::Memory: {
      const auto was_written = [](const Known& other) {
        if (!other.stand_in || !py::is_tensor(other.stand_in.get())) return false;
        const at::Tensor& t = THPVariable_Unpack(other.stand_in.get());
        return t.is_inference() || t._version() != 0;
      };
      if (std::any_of(knowns.begin(), knowns.end(), was_written)) {
        graph_break("value-of-c-object", "the values of " + k->source->text() +
                                             ", whose memory a tensor that was written may have (torch.from_numpy)");
        return false;
      }
      if (k->read) return true;
      const bool changes = options.changing_contents && options.changing_contents->contains(k->source->id());
      if (changes) {
        graph_break("value-of-c-object", "the values of " + k->source->text() +
                                             ", which are others in each call (torch.from_numpy shares them)");
        return false;
      }
      py::Ref contents = guards::contents_of(o, kLargestContents);
      if (!contents) break;
      if (!observe(o)) return false;
      guard(Guard::Kind::Contents, k->source, contents.get());
      k->read = true;
      return true;
    }
    case Is::Other:
      break;
  }
  if (PyIter_Check(o) && (depth < 0 || refuses_iterator(o))) return depth < 0;
  graph_break("value-of-c-object", "the value of " + k->source->text() + ", a " + Py_TYPE(o)->tp_name +
                                       (state == Is::Memory ? " of more than a few elements" : ""));
  return false;
}

bool Machine::reads_what_it_holds(PyObject* o, int depth) {
  PyTypeObject* t = Py_TYPE(o);
  const bool view = t == &PyDictKeys_Type || t == &PyDictValues_Type || t == &PyDictItems_Type;
  if (depth > kDeepest || !(view || PyIter_Check(o)) || is_heap(t) || PyGen_Check(o) || !t->tp_traverse) return true;
  for (PyObject* inner : referents_of(o))
    if (!reads(inner, depth + (is_container(classify(inner)) ? 0 : 1))) return false;
  return true;
}

bool Machine::refuses_write(PyObject* o) {
  if (classify(o) != Class::Instance || !find_plain(o)) return false;
  // In Python the method is interpreted; of a value the operator makes a new one.
  const Is state = c_state(Py_TYPE(o));
  if (state == Is::None || state == Is::Value) return false;
  graph_break("write-to-c-object", std::string("a write to a ") + Py_TYPE(o)->tp_name);
  return true;
}

bool Machine::reads_arguments(PyObject* c_callable, PyObject* const* args, size_t n) {
  const char* name = name_of(c_callable);
  if (only_keeps(name)) return true;
  if (n == 1 && strcmp(name, "len") == 0 && find_plain(args[0]) && classify(args[0]) == Class::Instance &&
      c_state(Py_TYPE(args[0])) == Is::Memory) {
    const Py_ssize_t length = PyObject_Size(args[0]);
    if (length < 0) return false;
    guard(Guard::Kind::Length, find_plain(args[0])->source, nullptr, static_cast<uint64_t>(length));
    return observe(args[0]);
  }
  const int depth = looks_once(name) ? -1 : 0;
  const bool adds = n > 0 && told_apart.contains(args[0]) && strcmp(name, "add") == 0;  // looks at no order
  for (size_t i = adds ? 1 : 0; i < n; ++i)
    if (!reads(args[i], depth)) return false;
  return true;
}

bool Machine::refuses_method(PyObject* c_callable, PyObject* receiver) {
  const Class c = classify(receiver);
  const Is state = c == Class::Instance ? c_state(Py_TYPE(receiver)) : Is::None;
  const bool changes = state == Is::Memory || state == Is::Other;
  if (PyCFunction_Check(c_callable) && find_plain(c_callable) && (changes || is_container(c))) {
    graph_break("container-from-outside", std::string("a method of a ") + Py_TYPE(receiver)->tp_name +
                                              " that was bound before the captured code");
    return true;
  }
  return changes && refuses_write(receiver);
}

bool Machine::refuses_view(PyObject* base, PyObject* made) {
  if (!made || !find_plain(base) || !PyObject_CheckBuffer(base) || find(made)) return false;
  if (c_state(Py_TYPE(base)) != Is::Memory || !is_one_of(Py_TYPE(made)->tp_name, {"memoryview", "numpy.ndarray"}))
    return false;
  graph_break("value-of-c-object", std::string("a part of a ") + Py_TYPE(base)->tp_name);
  return true;
}

}  // namespace kiln::capture
