// Calls of what functools.lru_cache wraps, which may give an object of an earlier call.
#include <torch/csrc/Size.h>

#include <algorithm>

#include "aten/fake.h"
#include "python/capture/call_tools.h"
#include "python/capture/machine.h"
#include "python/capture/sizes.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
/// The beginning of CPython 3.11's private lru_cache_object.
struct LruCache {
  PyObject_HEAD void* links[2];
  Py_hash_t hash;
  PyObject *key, *result;
  void* wrapper;
  int typed;
  PyObject* cache;
  Py_ssize_t hits;
  PyObject* func;
  Py_ssize_t maxsize, misses;
};

/// The item of the cache that the call which has just given `result` made or found: its key, and what the cache keeps
/// under it as long as it gives that very object. Null if another item gives the same.
std::pair<PyObject*, PyObject*> cached_item(const LruCache* cache, PyObject* result) {
  if (cache->maxsize > 0) {
    auto* latest = static_cast<LruCache*>(cache->links[0]);  // an item begins as the cache does
    if (latest != cache && latest->result == result) return {latest->key, reinterpret_cast<PyObject*>(latest)};
    return {};
  }
  std::pair<PyObject*, PyObject*> found;
  Py_ssize_t at = 0;
  PyObject *key, *value;
  while (PyDict_Next(cache->cache, &at, &key, &value)) {
    if (value != result) continue;
    if (found.first) return {};
    found = {key, value};
  }
  return found;
}

/// Whether such an argument is told from others by its address: looking its key up runs no Python code.
bool has_identity_hash(PyObject* o) {
  return Py_TYPE(o)->tp_hash == PyBaseObject_Type.tp_hash &&
         Py_TYPE(o)->tp_richcompare == PyBaseObject_Type.tp_richcompare;
}

bool has_parts(PyObject* o) { return PyTuple_CheckExact(o) || PyList_CheckExact(o) || PyDict_CheckExact(o); }

/// What a tuple, list or dict consists of, keys included; borrowed.
std::vector<PyObject*> parts_of(PyObject* o) {
  std::vector<PyObject*> parts;
  if (PyDict_CheckExact(o)) {
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(o, &at, &key, &value)) parts.insert(parts.end(), {key, value});
  } else {
    parts.assign(PySequence_Fast_ITEMS(o), PySequence_Fast_ITEMS(o) + PySequence_Fast_GET_SIZE(o));
  }
  return parts;
}

/// Whether it consists of numbers and texts all the way down.
bool holds_constants(PyObject* o, int depth = 0) {
  constexpr int kDeepest = 8;
  if (has_parts(o))
    return depth < kDeepest &&
           std::ranges::all_of(parts_of(o), [&](PyObject* part) { return holds_constants(part, depth + 1); });
  return o == Py_None || PyBool_Check(o) || PyLong_CheckExact(o) || PyFloat_CheckExact(o) || PyUnicode_CheckExact(o);
}

/// Whether a call with it is told from others by it: constants, existing objects, and open numbers.
bool is_open_key(Machine& m, PyObject* o) {
  if (PyTuple_CheckExact(o) || Py_TYPE(o) == &THPSizeType)
    return std::ranges::all_of(parts_of(o), [&](PyObject* part) { return is_open_key(m, part); });
  return m.is_constant(o) || m.find_plain(o) || m.is_open_number(o);
}

bool is_same_key(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (Py_TYPE(a) == size_type()) return expr_of(a) == expr_of(b);
  if (PyTuple_Check(a)) return std::ranges::equal(parts_of(a), parts_of(b), is_same_key);
  return (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

/// Whether `made`, of open sizes, is `real` in the traced call.
bool has_hints_of(Machine& m, PyObject* made, PyObject* real) {
  if (has_parts(made))
    return Py_TYPE(made) == Py_TYPE(real) &&
           std::ranges::equal(parts_of(made), parts_of(real),
                              [&](PyObject* ours, PyObject* theirs) { return has_hints_of(m, ours, theirs); });
  const py::Ref hint = py::Ref::steal(m.with_hints(made));
  return hint && Py_TYPE(hint.get()) == Py_TYPE(real) && PyObject_RichCompareBool(hint.get(), real, Py_EQ) == 1;
}

/// Whether all that an object of this class consists of is what it refers to: a class statement's, with no state
/// of C's, and types.SimpleNamespace.
bool is_made_of_references(PyTypeObject* t) {
  static const PyTypeObject* namespace_type = Py_TYPE(PySys_GetObject("implementation"));
  return t == namespace_type || py311::is_of_class_statement(t);
}

/// Whether objects of this class are told from all others.
bool compares_by_address(PyTypeObject* t) { return t->tp_richcompare == PyBaseObject_Type.tp_richcompare; }

/// The existing objects that `o`, which the captured code made, consists of, if it consists of those and constants
/// alone all the way down: containers, and instances of Python's classes that are compared by what they hold. Another
/// call would make one like it, and find what this one's was.
bool is_made_of_constants(Machine& m, PyObject* o, std::vector<Known*>* existing, int depth = 0) {
  constexpr int kDeepest = 12;
  if (m.is_constant(o)) return true;
  if (Known* k = m.find(o)) {
    if (k->kind == Known::Kind::Plain) existing->push_back(k);
    return k->kind == Known::Kind::Plain;
  }
  const Class c = m.classify(o);
  const bool instance = c == Class::Instance && is_made_of_references(Py_TYPE(o)) && !compares_by_address(Py_TYPE(o)) &&
                        !m.is_open_number(o) && !m.made_types.count(reinterpret_cast<PyObject*>(Py_TYPE(o)));
  if (depth == kDeepest || !(instance || is_container(c))) return false;
  return std::ranges::all_of(referents_of(o),
                             [&](PyObject* part) { return is_made_of_constants(m, part, existing, depth + 1); });
}

/// Whether it is known what the key of such arguments depends on: the captured code's own objects are hashed by it, so
/// that what their classes' code reads is guarded. False, perhaps with an error, if it is not.
bool settle_hashes(Machine& m, const std::vector<PyObject*>& made) {
  static PyObject* hash = PyDict_GetItemString(PyEval_GetBuiltins(), "hash");
  const Machine::Moment before = m.now();
  for (PyObject* o : made)
    if (!py::Ref::steal(m.call(hash, &o, 1, nullptr))) return false;
  return !m.refusal_since(before);
}

void note_objects(Machine& m, PyObject* made) {
  if (!has_parts(made) || m.find(made)) return;  // an existing object stands for itself
  const std::vector<PyObject*> parts = parts_of(made);
  if (!PyTuple_CheckExact(made)) m.cached_objects.push_back({py::Ref::borrow(made), parts, m.root_instruction});
  for (PyObject* part : parts) note_objects(m, part);
}

/// The very call that eager makes, on these existing objects: it runs or finds what an earlier call left.
PyObject* call_for_real(Machine& m, PyObject* wrapper, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  for (size_t i = 0; i < count_of(nargsf, kwnames); ++i)
    if (Known* k = m.find_plain(args[i])) m.guard(Guard::Kind::Is, k->source, args[i]);
  Machine::Paused paused_here(m);
  aten::RecordingPaused no_recording;
  aten::NoFakeGuard real;
  return PyObject_Vectorcall(wrapper, args, nargsf, kwnames);
}

/// A call with open sizes among the arguments: the function is interpreted, if what it gives depends on these alone and
/// consists of numbers, and it has no effects.
PyObject* call_with_sizes(Machine& m, PyObject* wrapper, PyObject* wrapped, PyObject* const* args, size_t nargsf,
                          PyObject* kwnames) {
  const size_t all = count_of(nargsf, kwnames), n = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  const auto is_same_ref = [](const py::Ref& a, PyObject* b) { return is_same_key(a.get(), b); };
  for (const CachedCall& c : m.cached_calls)
    if (c.wrapper == wrapper && c.kwnames.get() == kwnames &&
        std::equal(c.args.begin(), c.args.end(), args, args + all, is_same_ref))
      return Py_NewRef(c.result.get());
  // Only what it gives for other sizes is taken from the code.
  std::vector<py::Ref> held;
  std::vector<PyObject*> hints;
  for (size_t i = 0; i < all; ++i) {
    hints.push_back(held.emplace_back(py::Ref::steal(m.with_hints(args[i]))).get());
    if (!hints.back()) return nullptr;
  }
  const py::Ref real = py::Ref::steal(call_for_real(m, wrapper, hints.data(), n, kwnames));
  if (!real) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; i < all; ++i) py::Ref::steal(m.with_values(args[i]));  // it raises for these sizes
    PyErr_Restore(type, value, traceback);
    return nullptr;
  }
  if (!holds_constants(real.get()))
    return m.on_values(args, all, [&](PyObject* const* values) { return m.call_cached(wrapper, values, n, kwnames); });
  const Machine::Moment before = m.now();
  py::Ref made = py::Ref::steal(m.call(wrapped, args, n, kwnames));
  if (!made) return nullptr;
  // What it reads may have changed since the cache was asked first.
  if (m.refusal_since(before) || !has_hints_of(m, made.get(), real.get())) {
    if (PyErr_Occurred()) return nullptr;
    return m.graph_break(
        "call-that-breaks",
        "a call of " + describe(wrapper) + ", which keeps its results, and reads or changes more than its arguments");
  }
  note_objects(m, made.get());
  std::vector<py::Ref> kept;
  for (size_t i = 0; i < all; ++i) kept.push_back(py::Ref::borrow(args[i]));
  m.cached_calls.push_back({wrapper, py::Ref::borrow(kwnames), std::move(kept), py::Ref::borrow(made.get())});
  return made.release();
}
}  // namespace

bool CachedObject::changed() const { return parts_of(object.get()) != parts; }

PyObject* Machine::see_cached(PyObject* wrapper, PyObject* result) {
  auto* cache = reinterpret_cast<LruCache*>(wrapper);
  const auto [key, item] = cached_item(cache, result);
  if (!key) return nullptr;
  // What was done to the result since is guarded as that of any other object, and that it is still this one.
  const std::string name = describe(wrapper);
  guard(Guard::Kind::Is, guards::dict_item(guards::constant(cache->cache, name + ".cache"), key), item);
  return see(result, guards::constant(result, name + "()"));
}

PyObject* Machine::call_cached(PyObject* wrapper, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (made_functions.count(wrapper)) return after_c_call(PyObject_Vectorcall(wrapper, args, nargsf, kwnames));
  static PyObject* wrapped_name = PyUnicode_InternFromString("__wrapped__");
  py::Ref wrapped = py::Ref::steal(load_attr(wrapper, wrapped_name));
  if (!wrapped) return nullptr;
  PyObject* globals = PyFunction_Check(wrapped.get()) ? PyFunction_GET_GLOBALS(wrapped.get()) : nullptr;
  const bool trusted = globals && is_trusted_namespace(globals);
  const size_t all = count_of(nargsf, kwnames);
  auto* cache = reinterpret_cast<LruCache*>(wrapper);
  if (!trusted && cache->maxsize != 0 && size_among(args, all) &&
      std::all_of(args, args + all, [this](PyObject* o) { return is_open_key(*this, o); }))
    return call_with_sizes(*this, wrapper, wrapped.get(), args, nargsf, kwnames);
  bool plain = true;
  std::vector<PyObject*> made;
  std::vector<Known*> parts;
  for (size_t i = 0; plain && i < all; ++i) {
    if (is_constant(args[i]) || find_plain(args[i])) continue;
    plain = !trusted && is_made_of_constants(*this, args[i], &parts);
    made.push_back(args[i]);
  }
  if (plain && cache->maxsize != 0 && !made.empty()) {
    plain = settle_hashes(*this, made);
    if (PyErr_Occurred()) return nullptr;
    for (const Known* k : parts) guard(Guard::Kind::Is, k->source, k->real.get());
  }
  if (plain && cache->maxsize != 0) {
    py::Ref r = py::Ref::steal(call_for_real(*this, wrapper, args, nargsf, kwnames));
    if (!r || is_constant(r.get())) return r.release();  // a constant stays right
    bool quiet = !trusted;
    for (size_t i = 0; quiet && i < all; ++i)
      quiet = is_constant(args[i]) || has_identity_hash(args[i]) || std::ranges::count(made, args[i]);
    if (PyObject* seen = quiet ? see_cached(wrapper, r.get()) : nullptr; seen || PyErr_Occurred()) return seen;
    if (!trusted) --cache->hits;  // the call that eager makes behind the break finds this result
  }
  // Which object it gives, and what was done to it since, is the program's business, but not for Python's and torch's
  // own.
  if (!trusted && cache->maxsize != 0)
    return graph_break("call-that-breaks", "a call of " + describe(wrapper) + ", which keeps its results");
  return call(wrapped.get(), args, nargsf, kwnames);
}

}  // namespace kiln::capture
