// Calls of what functools.lru_cache wraps, which may give an object of an earlier call.
#include "aten/fake.h"
#include "python/capture/call_tools.h"
#include "python/capture/machine.h"
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
}  // namespace

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
  bool plain = true;
  for (size_t i = 0; plain && i < all; ++i) plain = is_constant(args[i]) || find_plain(args[i]);
  auto* cache = reinterpret_cast<LruCache*>(wrapper);
  if (plain && cache->maxsize != 0) {
    // The very call that eager makes: it runs or finds what an earlier call left. A constant result stays right.
    for (size_t i = 0; i < all; ++i)
      if (Known* k = find_plain(args[i])) guard(Guard::Kind::Is, k->source, args[i]);
    py::Ref r;
    {
      Paused paused_here(*this);
      aten::RecordingPaused no_recording;
      aten::NoFakeGuard real;
      r = py::Ref::steal(PyObject_Vectorcall(wrapper, args, nargsf, kwnames));
    }
    if (!r) return nullptr;
    if (is_constant(r.get())) return r.release();
    bool quiet = !trusted;
    for (size_t i = 0; quiet && i < all; ++i) quiet = is_constant(args[i]) || has_identity_hash(args[i]);
    if (PyObject* seen = quiet ? see_cached(wrapper, r.get()) : nullptr; seen || PyErr_Occurred()) return seen;
    if (!trusted) --cache->hits;  // the call that eager makes behind the break finds this result
  }
  // Which object it gives, and what was done to it since, is the program's business, but not for Python's and torch's
  // own.
  if (!trusted) return graph_break("call-that-breaks", "a call of " + describe(wrapper) + ", which keeps its results");
  return call(wrapped.get(), args, nargsf, kwnames);
}

}  // namespace kiln::capture
