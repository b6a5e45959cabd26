// What C code can observe of existing objects without the machine's seeing it: which object it is (hashes, ==, `in`),
// and what its attributes are.
#include <iterator>
#include <sstream>
#include <unordered_set>

#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

constexpr int kDeepest = 8;  // containers within containers that are looked into

/// Whether C code tells instances apart by their address: == or hash is object's own.
bool compares_by_identity(PyTypeObject* t) {
  return t->tp_richcompare == PyBaseObject_Type.tp_richcompare || t->tp_hash == PyBaseObject_Type.tp_hash;
}

std::unordered_set<std::string> words(const char* text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

/// Methods and functions of C whose result depends on == or hash of what they are given.
bool compares(const char* name) {
  static const auto* names = new auto(words(
      "__and__ __contains__ __delitem__ __eq__ __getitem__ __ne__ __or__ __rand__ __ror__ __rsub__ __rxor__ "
      "__setitem__ __sub__ __xor__ _count_elements add contains count countOf difference difference_update discard eq "
      "fromkeys get getitem hash index indexOf intersection intersection_update isdisjoint issubset issuperset "
      "move_to_end ne pop remove setdefault symmetric_difference symmetric_difference_update union update"));
  return names->count(name) > 0;
}

/// Methods and functions of C that read all attributes of what they are given.
bool reads_all(const char* name) {
  static const auto* names = new auto(words("__dir__ __getstate__ __reduce__ __reduce_ex__ dir"));
  return names->count(name) > 0;
}

/// Whether the state of a class's instances is their __dict__ and nothing else, as object.__reduce_ex__ sees it.
bool is_plain_state(PyTypeObject* t) {
  if (!t->tp_dictoffset) return false;
  for (PyTypeObject* base = t; base != &PyBaseObject_Type; base = base->tp_base) {
    if (!base || !(base->tp_flags & Py_TPFLAGS_HEAPTYPE)) return false;
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(base->tp_dict, &at, &name, &value)) {
      if (Py_TYPE(value) == &PyMemberDescr_Type) return false;
      for (const char* own : {"__getstate__", "__reduce__", "__getnewargs__", "__getnewargs_ex__"})
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, own) == 0) return false;
    }
  }
  return true;
}

/// Classes of C whose instances call Python code or read attributes unseen: the polyfill of that name; else nullptr.
const char* polyfill_name(PyTypeObject* type) {
  for (const char* name : {"operator.attrgetter", "operator.methodcaller"})
    if (strcmp(type->tp_name, name) == 0) return name + strlen("operator.");
  return nullptr;
}

}  // namespace

bool Machine::is_same_tuple(PyObject* a, PyObject* b) {
  if (!PyTuple_CheckExact(a) || !PyTuple_CheckExact(b)) return false;
  const auto guarded = [&](PyObject* changing, PyObject* other) {
    const Known* k = find(changing);
    if (!k || !index_of_numbers.contains(k->real.get()) || !is_constant(other)) return false;
    const bool same = k->real.get() == other;
    if (same)
      guard(Guard::Kind::Is, k->source, other);
    else
      guard(Guard::Kind::NotSame, k->source, nullptr, 0, child(guards::Source::Kind::Const, nullptr, other));
    return same;
  };
  return guarded(a, b) || guarded(b, a);
}

void Machine::distinguish(PyObject* a, PyObject* b) {
  if (Py_TYPE(a) != Py_TYPE(b)) return;
  if (const Known* k = PyFunction_Check(a) ? find_plain(a) : nullptr; k && (a == b || k->alike))
    guard(Guard::Kind::Is, k->source, a);  // the other may have come out of a class, where nothing is guarded but that
  if (const Known* k = find_alike(b)) guard(Guard::Kind::Is, k->source, b);
  if (a == b) return;
  const Known *x = find(a), *y = find(b);
  if (!x || !y || x == y) return;
  guard(Guard::Kind::NotSame, x->source, nullptr, 0, y->source);
}

void Machine::pin(PyObject* o, bool values, int depth) {
  if (depth > kDeepest) return;
  const Class c = classify(o);
  if (c == Class::Method) {
    pin(PyMethod_GET_FUNCTION(o), values, depth + 1);
    return pin(PyMethod_GET_SELF(o), values, depth + 1);
  }
  if (const Known* k = find_alike(o)) return guard(Guard::Kind::Is, k->source, o);
  if (c == Class::Instance) {
    const Known* k = find_plain(o);
    if (k && compares_by_identity(Py_TYPE(o))) guard(Guard::Kind::Is, k->source, o);
  } else if (!is_container(c)) {
    return;
  }
  if (PyDict_Check(o)) {
    Py_ssize_t pos = 0;
    PyObject *key, *value;
    while (PyDict_Next(o, &pos, &key, &value)) {
      pin(key, true, depth + 1);
      if (values) pin(value, true, depth + 1);
    }
  } else if (PyAnySet_Check(o)) {
    Py_ssize_t pos = 0;
    PyObject* key;
    Py_hash_t hash;
    while (_PySet_NextEntry(o, &pos, &key, &hash)) pin(key, true, depth + 1);
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < Py_SIZE(o); ++i)
      pin(PyTuple_Check(o) ? PyTuple_GET_ITEM(o, i) : PyList_GET_ITEM(o, i), true, depth + 1);
  } else if (c == Class::Deque) {
    for (Py_ssize_t i = 0; i < PySequence_Size(o); ++i)
      if (py::Ref item = py::Ref::steal(PySequence_GetItem(o, i))) pin(item.get(), true, depth + 1);
  }
}

bool Machine::tell_apart(PyObject* set, PyObject* key) {
  constexpr Py_ssize_t kMost = 32;  // each pair of them is a guard
  const auto is_pinnable = [&](PyObject* o) {
    if (!py::is_tensor(o))
      return classify(o) == Class::Instance && find_plain(o) && !find_alike(o) && compares_by_identity(Py_TYPE(o));
    return find(o) && Py_TYPE(o)->tp_hash == reinterpret_cast<PyTypeObject*>(names().tensor_type)->tp_hash;
  };
  const auto refuse = [&] {
    if (told_apart.contains(set)) pin_members(set);
    return false;
  };
  if (!PySet_CheckExact(set) || find_plain(set)) return false;
  if (PySet_GET_SIZE(set) > kMost || !is_pinnable(key)) return refuse();
  std::vector<PyObject*> members;
  Py_ssize_t pos = 0;
  PyObject* member;
  Py_hash_t hash;
  while (_PySet_NextEntry(set, &pos, &member, &hash)) {
    if (!is_pinnable(member)) return refuse();
    members.push_back(member);
  }
  for (PyObject* m : members) distinguish(key, m);
  if (told_apart.insert(set).second) alive.push_back(py::Ref::borrow(set));
  return true;
}

int Machine::look_up_apart(int (*f)(PyObject* set, PyObject* key), PyObject* set, PyObject* key) {
  const Hashing hashing(*this, key);
  return f(set, key);
}

void Machine::pin_members(PyObject* set) {
  told_apart.erase(set);
  pin(set);
  Py_ssize_t pos = 0;
  PyObject* member;
  Py_hash_t hash;
  while (_PySet_NextEntry(set, &pos, &member, &hash))
    if (py::is_tensor(member)) guard_identity(real_of(member));
}

void Machine::pin_lookup(PyObject* container, PyObject* key) {
  const Class c = classify(key);
  // Those are told apart by guards of their own.
  if (is_constant(key) || c == Class::Tensor || (c == Class::Function && !find_alike(key)) || c == Class::Module)
    return;
  pin(key);
  pin(container, /*values=*/!PyDict_Check(container));
}

bool Machine::differs(const Known& k) const {
  PyObject *now = k.stand_in.get(), *before = k.snapshot.get();
  if (PyTuple_Check(now) || PyFrozenSet_Check(now)) return false;
  const auto was = [before](Py_ssize_t i, PyObject* o) { return PyList_GET_ITEM(before, i) == o; };
  if (PyAnySet_Check(now)) {
    std::unordered_set<PyObject*> old;  // by identity, as the keys of a dict
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i) old.insert(PyList_GET_ITEM(before, i));
    if (static_cast<size_t>(PySet_GET_SIZE(now)) != old.size()) return true;
    Py_ssize_t at = 0;
    PyObject* key;
    Py_hash_t hash;
    while (_PySet_NextEntry(now, &at, &key, &hash))
      if (!old.contains(key)) return true;
    return false;
  }
  if (PyDict_Check(now)) {
    const py::Ref items = base_items(now);  // before: key, value, key, value ...
    if (!items) {
      PyErr_Clear();
      return true;
    }
    const Py_ssize_t n = PyList_GET_SIZE(items.get());
    if (2 * n != PyList_GET_SIZE(before)) return true;
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* const pair = PyList_GET_ITEM(items.get(), i);
      if (!was(2 * i, PyTuple_GET_ITEM(pair, 0)) || !was(2 * i + 1, PyTuple_GET_ITEM(pair, 1))) return true;
    }
    return false;
  }
  const py::Ref items = PyList_Check(now) ? py::Ref::borrow(now) : py::Ref::steal(PySequence_List(now));
  const Py_ssize_t n = PyList_GET_SIZE(items.get());
  if (n != PyList_GET_SIZE(before)) return true;
  for (Py_ssize_t i = 0; i < n; ++i)
    if (!was(i, PyList_GET_ITEM(items.get(), i))) return true;
  return false;
}

bool Machine::was_written(const Known& k) const {
  return k.kind == Known::Kind::Shadow &&
         (k.written || k.touched ||
          (PyDict_Check(k.stand_in.get()) && py311::dict_version(k.stand_in.get()) != k.version));
}

void Machine::note_write(PyObject* o) {
  if (Known* const k = find(o)) k->touched = true;
}

void Machine::note_writes(PyObject* const* args, size_t n) {
  PyObject *type, *value, *traceback;  // of a call that raised; it may have written before
  PyErr_Fetch(&type, &value, &traceback);
  for (size_t i = 0; i < n; ++i) {
    PyObject* const o = args[i];
    if (PyCFunction_Check(o)) {  // a bound method, which C code may call
      if (PyCFunction_GET_SELF(o) && !PyModule_Check(PyCFunction_GET_SELF(o))) note_write(PyCFunction_GET_SELF(o));
      continue;
    }
    const bool dict = PyDict_Check(o) && !PyODict_Check(o);  // these have a version
    if (dict || PyTuple_Check(o) || PyFrozenSet_Check(o) || !is_container(classify(o))) continue;
    if (Known* const k = find(o); k && k->kind == Known::Kind::Shadow && !k->touched) k->touched = differs(*k);
  }
  PyErr_Restore(type, value, traceback);
}

void Machine::pin_compared(PyObject* c_callable, PyObject* const* args, size_t n) {
  if (n == 0 || !compares(name_of(c_callable))) return;
  // pop() of a sequence asks for a place; looking at all that is left each time would take the square of its size.
  if (n == 1 && (PyList_Check(args[0]) || classify(args[0]) == Class::Deque)) return;
  const size_t first = n > 1 ? 1 : 0;  // with a receiver, what matters is what it is asked for
  bool constant = true;
  for (size_t i = first; i < n; ++i) constant = constant && is_constant(args[i]);
  if (constant) return;
  if (first && PyDict_Check(args[0]) && !PyDict_Check(args[1])) return pin_lookup(args[0], args[1]);
  for (size_t i = 0; i < n; ++i) pin(args[i], /*values=*/!(first && PyDict_Check(args[0])));
}

PyObject* Machine::reduce_existing(PyObject* c_callable, PyObject* const* args, size_t n) {
  if (n != 2 || !find_plain(args[0]) || !PyLong_Check(args[1]) || PyLong_AsLong(args[1]) < 2) return nullptr;
  PyTypeObject* t = Py_TYPE(args[0]);
  if (strcmp(name_of(c_callable), "__reduce_ex__") != 0 || !is_plain_state(t)) return nullptr;
  static PyObject* make = [] {
    PyObject* m = py::import_module("copyreg");
    return m ? PyObject_GetAttrString(m, "__newobj__") : nullptr;
  }();
  py::Ref dict = py::Ref::steal(make ? instance_dict(args[0]) : nullptr);
  py::Ref state = py::Ref::steal(dict ? PyDict_Copy(dict.get()) : nullptr);
  if (state && PyDict_GET_SIZE(state.get()) == 0) state = py::Ref::borrow(Py_None);
  return state ? Py_BuildValue("O(O)OOO", make, t, state.get(), Py_None, Py_None) : nullptr;
}

bool Machine::reads_attributes(PyObject* c_callable, PyObject* const* args, size_t n) {
  if (n == 0) return false;
  PyObject* const o = classify(args[0]) == Class::Method ? PyMethod_GET_FUNCTION(args[0]) : args[0];
  if (!find_plain(o) || (classify(o) != Class::Instance && classify(o) != Class::Function)) return false;
  const char* name = name_of(c_callable);
  if (!reads_all(name)) return false;
  graph_break("call-that-breaks", std::string(name) + " of an existing object, which reads all of its attributes");
  return true;
}

bool Machine::refuses_callback(PyObject* o) {
  PyTypeObject* t = Py_TYPE(o);
  if (t == &PyCFunction_Type || t == &PyMethodDescr_Type || t == &PyWrapperDescr_Type) {
    switch (policy_of(o)) {
      case Policy::Pure:
      case Policy::Operator:
      case Policy::Torch:
      case Policy::Iter:
      case Policy::Next:
      case Policy::Paused:
      case Policy::True:
      case Policy::False:
        return false;
      default:
        break;
    }
  } else if (!polyfill_name(t)) {
    return false;
  }
  graph_break("call-that-breaks", c10::str(t->tp_name, " given to C code, which calls it unseen"));
  return true;
}

PyObject* Machine::polyfilled_class(PyTypeObject* type) {
  static PyObject* variable = PyObject_GetAttrString(PyImport_AddModule("torch.autograd.variable"), "Variable");
  const char* name = reinterpret_cast<PyObject*>(type) == variable ? "Variable" : polyfill_name(type);
  for (const char* context : {"torch._C.DisableTorchFunctionSubclass", "torch._C.DisableTorchFunction"})
    if (strcmp(type->tp_name, context) == 0) name = context + strlen("torch._C.");
  return name ? PyObject_GetAttrString(polyfills(), name) : nullptr;
}

void Machine::remember_finalizer(PyObject* made) {
  static PyObject* name = PyUnicode_InternFromString("__del__");
  PyTypeObject* type = Py_TYPE(made);
  PyObject* del = type->tp_finalize && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) ? _PyType_Lookup(type, name) : nullptr;
  if (del && PyFunction_Check(del) && !find(made)) finalizable.emplace(made, root_instruction);
}

namespace {
/// Through iterators and what they iterate over.
bool runs_code_at_its_end(PyObject* o, int depth) {
  static PyObject* name = PyUnicode_InternFromString("__del__");
  PyTypeObject* t = Py_TYPE(o);
  if (PyGen_Check(o) || PyCoro_CheckExact(o) || PyAsyncGen_CheckExact(o))
    return reinterpret_cast<PyGenObject*>(o)->gi_frame_state == py311::Suspended;
  const bool in_python = (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
  if (in_python && t->tp_finalize && _PyType_Lookup(t, name)) return true;
  constexpr int kDeepest = 4;
  const bool container = depth > 0 && (PyList_CheckExact(o) || PyTuple_CheckExact(o) || PyDict_CheckExact(o));
  if (depth == kDeepest || !t->tp_traverse || !(container || (!in_python && t->tp_iternext))) return false;
  struct Visit {
    int depth, left;  // no more than so many objects are looked at
    bool found;
  } visit{depth + 1, 64, false};
  t->tp_traverse(
      o,
      [](PyObject* part, void* arg) {
        auto* v = static_cast<Visit*>(arg);
        v->found = v->found || runs_code_at_its_end(part, v->depth);
        return v->found || --v->left == 0 ? 1 : 0;
      },
      &visit);
  return visit.found;
}
}  // namespace

bool Machine::may_let_go(PyObject* o) {
  if (!options.resumes || !o) return true;
  const Known* k = find(o);
  if (!k || k->kind != Known::Kind::Plain || !runs_code_at_its_end(k->real.get(), 0)) return true;
  graph_break("object-with-finalizer", "an object is let go whose end runs code: a generator, or one with a __del__");
  return false;
}

bool Machine::skips_finalizer(py311::Frame* frame) {
  PyCodeObject* code = frame->f_code;
  if (code->co_argcount != 1 || PyUnicode_CompareWithASCIIString(code->co_name, "__del__") != 0) return false;
  if (!root) return true;  // a stand-in of the capture before, which is let go when a new one starts
  return finalizable.erase(frame->localsplus[0]) > 0 ? broken : broken && !find(frame->localsplus[0]);
}

}  // namespace kiln::capture
