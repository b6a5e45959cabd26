#include "python/guards/tree.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Size.h>

#include <algorithm>

#include "base/error.h"
#include "base/hash.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/py311.h"
#include "python/cpython/tensor.h"
#include "python/guards/contents.h"
#include "python/guards/text.h"

namespace kiln::guards {
namespace {

bool is_deque(PyObject* o) {
  static const PyTypeObject* type = [] {
    PyObject* module = py::import_module("collections");
    return reinterpret_cast<PyTypeObject*>(module ? PyObject_GetAttrString(module, "deque") : nullptr);
  }();
  return Py_TYPE(o) == type;
}

/// A key that is equal for equal steps from one parent.
std::string step_key(const Source& s, int parent, int key_node) {
  std::string k = std::to_string(static_cast<int>(s.kind)) + "/" + std::to_string(parent) + "/" +
                  std::to_string(s.index) + "/" + std::to_string(key_node) + "/";
  if (s.object && s.kind == Source::Kind::DictItem && PyUnicode_CheckExact(s.object.get()))
    return k + "s" + PyUnicode_AsUTF8(s.object.get());
  if (s.object) k += std::to_string(reinterpret_cast<uintptr_t>(s.object.get()));
  if (s.kind == Source::Kind::Attr) k += "/" + s.name;
  return k;
}

/// A hash of the int `value` where the guard is about another one.
std::optional<uint64_t> other_int(PyObject* value, const Guard& guard) {
  if (guard.kind != Guard::Kind::Equals || !PyLong_CheckExact(value) || !PyLong_CheckExact(guard.object.get()))
    return std::nullopt;
  return static_cast<uint64_t>(PyObject_Hash(value));
}

}  // namespace

GuardTree::GuardTree(std::vector<Guard> guards, const std::vector<SourcePtr>& wanted) : guards_(std::move(guards)) {
  facts_.resize(guards_.size());
  classes_.resize(guards_.size());
  ends_.resize(guards_.size(), {-1, -1});
  for (size_t i = 0; i < guards_.size(); ++i) {
    const Guard& g = guards_[i];
    if (g.kind == Guard::Kind::Tensor) facts_[i] = tensor_facts(g);
    if (g.kind == Guard::Kind::Type || g.kind == Guard::Kind::ClassVersion)
      classes_[i] = ClassImage::of(reinterpret_cast<PyTypeObject*>(g.object.get()));
    if (g.kind == Guard::Kind::Is && g.number != Guard::kIdentityAlone && PyFunction_Check(g.object.get())) {
      auto* f = reinterpret_cast<PyFunctionObject*>(g.object.get());
      functions_[static_cast<int>(i)] = {py::Ref::borrow(f->func_code), py::Ref::borrow(f->func_defaults),
                                         py::Ref::borrow(f->func_kwdefaults),
                                         f->func_kwdefaults ? py311::dict_version(f->func_kwdefaults) : 0};
    }
    if (g.source) ends_[i].first = add_source(g.source);
    if (g.kind == Guard::Kind::Tensor || g.kind == Guard::Kind::Apart) distinct_.push_back(ends_[i].first);
    if (g.other) ends_[i].second = add_source(g.other);
    if (!g.source)
      globals_.push_back(static_cast<int>(i));
    else if (g.other)
      binary_.push_back(static_cast<int>(i));
    else
      nodes_[ends_[i].first].checks.push_back(static_cast<int>(i));
  }
  for (const SourcePtr& s : wanted) wanted_.push_back(add_source(s));
  std::sort(distinct_.begin(), distinct_.end());
  distinct_.erase(std::unique(distinct_.begin(), distinct_.end()), distinct_.end());

  // Roots without children (arguments that are tensors or numbers) come first: they fail most often and cost least.
  std::vector<int> roots;
  for (size_t n = 0; n < nodes_.size(); ++n)
    if (nodes_[n].parent < 0) roots.push_back(static_cast<int>(n));
  std::stable_partition(roots.begin(), roots.end(),
                        [&](int n) { return nodes_[n].children.empty() && nodes_[n].kind == Source::Kind::Local; });
  std::vector<bool> placed(nodes_.size(), false);
  const auto place = [&](auto&& self, int n) -> void {
    if (placed[n]) return;
    if (nodes_[n].parent >= 0) self(self, nodes_[n].parent);
    if (nodes_[n].key_node >= 0) self(self, nodes_[n].key_node);
    if (placed[n]) return;
    placed[n] = true;
    order_.push_back(n);
    for (int child : nodes_[n].children) self(self, child);
  };
  for (int n : roots) place(place, n);
  values_.resize(nodes_.size());
  ids_.clear();
  added_.clear();
}

int GuardTree::add_source(const SourcePtr& source) {
  KILN_CHECK(source != nullptr, "a guard or an input has no source");
  if (const auto it = added_.find(source); it != added_.end()) return it->second;
  const int parent = source->base ? add_source(source->base) : -1;
  const int key_node = source->key_source ? add_source(source->key_source) : -1;
  const std::string key =
      source->kind == Source::Kind::Global
          ? "g" + std::to_string(reinterpret_cast<uintptr_t>(source->object.get())) + "/" + source->name
          : step_key(*source, parent, key_node);
  if (auto it = ids_.find(key); it != ids_.end()) return added_[source] = it->second;

  Node node;
  node.kind = source->kind;
  node.parent = parent;
  node.key_node = key_node;
  node.index = source->index;
  node.source = source;
  node.object = source->object;
  if (source->kind == Source::Kind::Global) {
    // A global is an item of a constant dict.
    node.parent = add_source(constant(source->object.get(), "globals()"));
    node.object = py::check(PyUnicode_InternFromString(source->name.c_str()));
  }
  if (source->kind == Source::Kind::Attr) node.object = py::check(PyUnicode_InternFromString(source->name.c_str()));
  if (source->kind == Source::Kind::DictItem || source->kind == Source::Kind::Global) {
    node.hash = PyObject_Hash(node.object.get());
    if (node.hash == -1) {
      PyErr_Clear();
      throw InternalError("a source's key cannot be hashed: " + source->text());
    }
  }
  const int id = add_node(std::move(node));
  ids_.emplace(key, id);
  return added_[source] = id;
}

int GuardTree::add_node(Node node) {
  const int id = static_cast<int>(nodes_.size());
  if (node.parent >= 0) nodes_[node.parent].children.push_back(id);
  nodes_.push_back(std::move(node));
  return id;
}

namespace {
/// Of a container, or what lends its memory; -1 for other objects.
int64_t length_of(PyObject* o) {
  if (PyList_Check(o) || PyTuple_Check(o)) return Py_SIZE(o);
  if (PyDict_Check(o)) return PyDict_GET_SIZE(o);
  if (PyAnySet_Check(o)) return PySet_GET_SIZE(o);
  if (is_deque(o)) return PySequence_Size(o);
  if (!PyObject_CheckBuffer(o)) return -1;
  const Py_ssize_t n = PyObject_Size(o);  // of an array or its like
  if (n < 0) PyErr_Clear();
  return n;
}
}  // namespace

PyObject* GuardTree::fetch(const Node& n, PyObject* base, PyObject* key, const Call& call, Owned& owned) const {
  switch (n.kind) {
    case Source::Kind::Local:
      return n.index < call.num_locals ? call.locals[n.index] : nullptr;
    case Source::Kind::Cell:
    case Source::Kind::CellObject: {
      PyObject* cell = nullptr;
      if (n.index >= call.first_free) {
        const Py_ssize_t i = n.index - call.first_free;
        cell = call.closure && i < PyTuple_GET_SIZE(call.closure) ? PyTuple_GET_ITEM(call.closure, i) : nullptr;
      } else if (n.index < call.num_locals) {
        cell = call.locals[n.index];
      }
      if (n.kind == Source::Kind::CellObject) return cell && PyCell_Check(cell) ? cell : nullptr;
      // An argument that a nested function uses is put into its cell only by the frame's first instructions.
      return cell && PyCell_Check(cell) ? PyCell_GET(cell) : cell;
    }
    case Source::Kind::Const:
      return n.object.get();
    case Source::Kind::Attr: {
      // Of a class: what it or a base holds, as it is. Of a module: its dict, or else what its __getattr__ gives (lazy
      // modules, torch._VF).
      if (PyType_Check(base))
        if (PyObject* held = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(base), n.object.get())) return held;
      if (PyModule_Check(base)) {
        if (PyObject* held = PyDict_GetItemWithError(PyModule_GetDict(base), n.object.get())) return held;
        PyObject* given = PyErr_Occurred() ? nullptr : PyObject_GetAttr(base, n.object.get());
        if (!given) {
          PyErr_Clear();
          return nullptr;
        }
        owned.push_back(py::Ref::steal(given));
        return given;
      }
      PyObject* descriptor = _PyType_Lookup(Py_TYPE(base), n.object.get());
      if (!descriptor || !is_c_accessor(descriptor)) return nullptr;
      const py::PastOverrides itself(base);
      PyObject* value = Py_TYPE(descriptor)->tp_descr_get(descriptor, base, reinterpret_cast<PyObject*>(Py_TYPE(base)));
      if (!value) {
        PyErr_Clear();
        return nullptr;
      }
      owned.push_back(py::Ref::steal(value));
      return value;
    }
    case Source::Kind::InstanceDict: {
      PyObject** dict = _PyObject_GetDictPtr(base);
      if (!dict) return nullptr;
      if (!*dict) {
        py::Ref made = py::Ref::steal(PyObject_GenericGetDict(base, nullptr));
        if (!made) PyErr_Clear();
      }
      return *dict;
    }
    case Source::Kind::Global:
    case Source::Kind::DictItem: {
      if (!PyDict_Check(base)) return nullptr;
      PyObject* value = _PyDict_GetItem_KnownHash(base, n.object.get(), n.hash);
      if (!value && PyErr_Occurred()) PyErr_Clear();
      return value;
    }
    case Source::Kind::DictItemAt:
      return PyDict_Check(base) && key ? py::item_at(base, key) : nullptr;
    case Source::Kind::ListItem:
      if (PyList_Check(base)) return n.index < PyList_GET_SIZE(base) ? PyList_GET_ITEM(base, n.index) : nullptr;
      if (PyTuple_Check(base)) return n.index < PyTuple_GET_SIZE(base) ? PyTuple_GET_ITEM(base, n.index) : nullptr;
      if (is_deque(base) && n.index < PySequence_Size(base)) {
        // The deque itself keeps it alive.
        const py::Ref item = py::Ref::steal(PySequence_GetItem(base, static_cast<Py_ssize_t>(n.index)));
        return item.get();
      }
      return nullptr;
    case Source::Kind::DictKeyAt: {
      if (!PyDict_Check(base)) return nullptr;
      Py_ssize_t at = 0;
      PyObject *k = nullptr, *v;
      if (PyODict_Check(base)) {
        py311::each_of_ordered(base, [&](PyObject* key, PyObject*) {
          if (at++ == n.index) k = key;
          return !k;
        });
        return k;
      }
      for (int64_t i = 0; PyDict_Next(base, &at, &k, &v); ++i)
        if (i == n.index) return k;
      return nullptr;
    }
    case Source::Kind::SetItemAt: {
      if (!PyAnySet_Check(base)) return nullptr;
      Py_ssize_t at = 0;
      PyObject* k;
      Py_hash_t hash;
      for (int64_t i = 0; _PySet_NextEntry(base, &at, &k, &hash); ++i)
        if (i == n.index) return k;
      return nullptr;
    }
    case Source::Kind::CellContents:
      return PyCell_Check(base) ? PyCell_GET(base) : nullptr;
    case Source::Kind::Type:
      return reinterpret_cast<PyObject*>(Py_TYPE(base));
    case Source::Kind::WeakRef: {
      if (!PyWeakref_Check(base)) return nullptr;
      PyObject* o = PyWeakref_GET_OBJECT(base);
      return o == Py_None ? nullptr : o;
    }
    case Source::Kind::Length: {
      const int64_t length = length_of(base);
      if (length < 0) return nullptr;
      owned.push_back(py::Ref::steal(PyLong_FromLongLong(length)));
      return owned.back().get();
    }
    case Source::Kind::Index:
      if (!py::is_numpy_int(base)) return nullptr;
      owned.push_back(py::Ref::steal(PyNumber_Index(base)));
      return owned.back().get();
    case Source::Kind::ArrayMemory: {
      static PyObject* const from_numpy = PyObject_GetAttrString(PyImport_AddModule("torch"), "from_numpy");
      owned.push_back(py::Ref::steal(PyObject_CallOneArg(from_numpy, base)));
      if (!owned.back()) PyErr_Clear();
      return owned.back().get();
    }
    case Source::Kind::FunctionMode:
      return py::function_mode(n.index);
  }
  return nullptr;
}

namespace {

/// Of a dict or a set.
bool same_keys(PyObject* o, PyObject* keys) {
  const bool dict = PyDict_Check(o);
  if (!dict && !PyAnySet_Check(o)) return false;
  if ((dict ? PyDict_GET_SIZE(o) : PySet_GET_SIZE(o)) != PyTuple_GET_SIZE(keys)) return false;
  if (PyODict_Check(o)) {
    Py_ssize_t same = 0;
    py311::each_of_ordered(o, [&](PyObject* key, PyObject*) {
      PyObject* const expected = PyTuple_GET_ITEM(keys, same);
      return (key == expected || same_constant(key, expected)) && ++same < PyTuple_GET_SIZE(keys);
    });
    return same == PyTuple_GET_SIZE(keys);
  }
  Py_ssize_t at = 0;
  PyObject *k, *v;
  Py_hash_t hash;
  for (Py_ssize_t i = 0; dict ? PyDict_Next(o, &at, &k, &v) : _PySet_NextEntry(o, &at, &k, &hash); ++i) {
    PyObject* expected = PyTuple_GET_ITEM(keys, i);
    if (k != expected && !same_constant(k, expected)) return false;
  }
  return true;
}

bool lacks_attribute(PyObject* o, PyObject* name) {
  PyObject* d = _PyType_Lookup(Py_TYPE(o), name);
  if (!d || (Py_TYPE(d) != &PyGetSetDescr_Type && Py_TYPE(d) != &PyMemberDescr_Type)) return false;
  const py::Ref value = py::Ref::steal(Py_TYPE(d)->tp_descr_get(d, o, reinterpret_cast<PyObject*>(Py_TYPE(o))));
  const bool lacks = !value && PyErr_ExceptionMatches(PyExc_AttributeError);
  PyErr_Clear();
  return lacks;
}

/// 1: has it, 0: lacks it, -1: no dict.
int dict_has(PyObject* dict, PyObject* key) {
  if (!PyDict_Check(dict)) return -1;
  const int r = PyDict_Contains(dict, key);
  if (r < 0) PyErr_Clear();
  return r;
}

bool setting_holds(PyObject* setting) {
  const py::Ref now = py::Ref::steal(PyObject_CallObject(PyTuple_GET_ITEM(setting, 0), PyTuple_GET_ITEM(setting, 1)));
  const bool same = now && PyObject_RichCompareBool(now.get(), PyTuple_GET_ITEM(setting, 2), Py_EQ) == 1;
  PyErr_Clear();
  return same;
}

}  // namespace

bool GuardTree::holds(int i, PyObject* value, PyObject* other) const {
  const Guard& g = guards_[i];
  switch (g.kind) {
    case Guard::Kind::Type:
      return reinterpret_cast<PyObject*>(Py_TYPE(value)) == g.object.get() && (!classes_[i] || classes_[i]->holds());
    case Guard::Kind::ClassVersion:
      return value == g.object.get() && (!classes_[i] || classes_[i]->holds());
    case Guard::Kind::Is:
      return value == g.object.get() && same_function(i);
    case Guard::Kind::Equals:
      return same_constant(value, g.object.get());
    case Guard::Kind::SmallInt:
      return is_small_int(value);
    case Guard::Kind::Contents:
      return has_contents(value, g.object.get());
    case Guard::Kind::Length:
      return length_of(value) == static_cast<int64_t>(g.number);
    case Guard::Kind::Keys:
      return same_keys(value, g.object.get());
    case Guard::Kind::DictHas:
      return dict_has(value, g.object.get()) == 1;
    case Guard::Kind::DictLacks:
      if (other) return PyDict_Check(value) && !py::item_at(value, other);
      return dict_has(value, g.object.get()) == 0;
    case Guard::Kind::AttrLacks:
      return lacks_attribute(value, g.object.get());
    case Guard::Kind::Tensor:
      return check_tensor(value, facts_[i]);
    case Guard::Kind::SameObject:
      return value == other;
    case Guard::Kind::NotSame:
      return value != other;
    case Guard::Kind::Apart:
      return true;  // all_distinct()
    case Guard::Kind::NoHooks:
      return !has_gradient_hooks(value);
    case Guard::Kind::GlobalState:
      return pack_global_state() == g.number;
    case Guard::Kind::Setting:
      return setting_holds(g.object.get());
  }
  return false;
}

bool GuardTree::same_function(int guard) const {
  auto it = functions_.find(guard);
  if (it == functions_.end()) return true;
  const auto* f = reinterpret_cast<PyFunctionObject*>(guards_[guard].object.get());
  const FunctionParts& parts = it->second;
  return f->func_code == parts.code.get() && f->func_defaults == parts.defaults.get() &&
         f->func_kwdefaults == parts.kwdefaults.get() &&
         (!f->func_kwdefaults || py311::dict_version(f->func_kwdefaults) == parts.kwdefaults_version);
}

bool GuardTree::all_distinct() {
  sorted_.clear();
  for (int n : distinct_) sorted_.push_back(values_[n]);
  std::sort(sorted_.begin(), sorted_.end());
  return std::adjacent_find(sorted_.begin(), sorted_.end()) == sorted_.end();
}

bool GuardTree::written_apart(PyObject* const* values) {
  if (written_.empty()) return true;
  reaches_.clear();
  for (size_t i = 0; i < written_.size(); ++i) {
    if (!py::is_tensor(values[i])) continue;
    const at::Tensor& t = THPVariable_Unpack(values[i]);
    if (!t.has_storage() || t.numel() == 0) continue;
    const auto* begin = static_cast<const char*>(t.const_data_ptr());
    const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
    reaches_.push_back({begin, begin + bytes, written_[i]});
  }
  std::sort(reaches_.begin(), reaches_.end(), [](const Reach& a, const Reach& b) { return a.begin < b.begin; });
  const char *end = nullptr, *end_of_written = nullptr;
  for (const Reach& r : reaches_) {
    if (r.begin < (r.written ? end : end_of_written)) return false;
    end = std::max(end, r.end);
    if (r.written) end_of_written = std::max(end_of_written, r.end);
  }
  return true;
}

bool GuardTree::run_slow(const Call& call, Owned& owned, int* failed_guard, int* failed_node) {
  ++slow_runs_;
  *failed_guard = *failed_node = -1;
  for (int g : globals_)
    if (!holds(g, nullptr, nullptr)) return *failed_guard = g, false;
  for (int id : order_) {
    const Node& n = nodes_[id];
    PyObject* value = fetch(n, n.parent >= 0 ? values_[n.parent] : nullptr,
                            n.key_node >= 0 ? values_[n.key_node] : nullptr, call, owned);
    values_[id] = value;
    if (!value) return *failed_node = id, false;
    for (int g : n.checks)
      if (!holds(g, value, nullptr)) return *failed_guard = g, false;
  }
  for (int g : binary_)
    if (!holds(g, values_[ends_[g].first], values_[ends_[g].second])) return *failed_guard = g, false;
  if (all_distinct()) return true;
  // The first run is for the very call that was captured: what is one tensor there need not be two.
  if (slow_runs_ > 1) return false;
  distinct_.clear();
  return true;
}

void GuardTree::suspect(int node) {
  suspects_.clear();
  const auto add = [&](const auto& self, int id) -> void {
    if (id < 0 || std::find(suspects_.begin(), suspects_.end(), id) != suspects_.end()) return;
    self(self, nodes_[id].parent);
    self(self, nodes_[id].key_node);
    suspects_.push_back(id);
  };
  add(add, node);
}

bool GuardTree::fails_as_before(const Call& call, Owned& owned) {
  for (int id : suspects_) {
    const Node& n = nodes_[id];
    PyObject* value = fetch(n, n.parent >= 0 ? values_[n.parent] : nullptr,
                            n.key_node >= 0 ? values_[n.key_node] : nullptr, call, owned);
    values_[id] = value;
    if (!value) return true;
    for (int g : n.checks)
      if (!holds(g, value, nullptr)) return true;
  }
  return false;
}

bool GuardTree::check(const Call& call, PyObject** values, Owned& owned) {
  if (has_fast_) {
    const Outcome outcome = run_fast(call, owned);
    if (outcome == Outcome::Holds) {
      for (size_t i = 0; i < delivered_.size(); ++i)
        values[i] = delivered_[i].slot >= 0 ? slots_[delivered_[i].slot] : delivered_[i].object;
      return written_apart(values);
    }
    if (outcome == Outcome::Fails) return false;
    owned.clear();
  }
  if (fails_as_before(call, owned)) return false;
  int guard, node;
  if (!run_slow(call, owned, &guard, &node)) {
    suspect(guard >= 0 ? ends_[guard].first : node);
    return false;
  }
  for (size_t i = 0; i < wanted_.size(); ++i) values[i] = values_[wanted_[i]];
  if (!written_apart(values)) return false;
  if (has_fast_ && failed_.node >= 0) {
    // What moved more than twice while the guards still held is not worth assuming.
    Node& n = nodes_[failed_.node];
    int& misses = failed_.pin ? n.misses : n.stamp_misses;
    if (++misses > 2) (failed_.pin ? n.moves : n.stamp_moves) = true;
  }
  make_fast();
  return true;
}

std::vector<GuardTree::Change> GuardTree::changes(const Call& call, bool* alone) {
  Owned owned;
  std::vector<Change> changed;
  *alone = std::all_of(globals_.begin(), globals_.end(), [&](int g) { return holds(g, nullptr, nullptr); });
  const auto differ = [](PyObject* a, PyObject* b) {
    if ((PyLong_CheckExact(a) && PyLong_CheckExact(b)) || (py::is_numpy_int(a) && py::is_numpy_int(b)))
      return PyObject_RichCompareBool(a, b, Py_NE) == 1;
    return py::is_float(a) && py::is_float(b) && PyFloat_AS_DOUBLE(a) != PyFloat_AS_DOUBLE(b);
  };
  const auto alike = [](PyObject* a, PyObject* b) {
    return a != b && PyFunction_Check(a) && PyFunction_Check(b) && PyFunction_GET_CODE(a) == PyFunction_GET_CODE(b);
  };
  for (int id : order_) {
    const Node& n = nodes_[id];
    PyObject* base = n.parent >= 0 ? values_[n.parent] : nullptr;
    PyObject* key = n.key_node >= 0 ? values_[n.key_node] : nullptr;
    const bool lost = (n.parent >= 0 && !base) || (n.key_node >= 0 && !key);
    PyObject* value = lost ? nullptr : fetch(n, base, key, call, owned);
    *alone = *alone && (value || lost);
    for (int g : n.checks) {
      if (!value || holds(g, value, nullptr)) continue;
      const size_t before = changed.size();
      PyObject* expected = guards_[g].kind == Guard::Kind::Equals ? guards_[g].object.get() : nullptr;
      if (expected && differ(expected, value)) changed.push_back({Change::Kind::Number, n.source});
      const auto is_tuple = [](PyObject* o) { return PyTuple_CheckExact(o) || Py_IS_TYPE(o, &THPSizeType); };
      if (expected && is_tuple(expected) && is_tuple(value) && Py_SIZE(expected) == Py_SIZE(value))
        for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i)
          if (differ(PyTuple_GET_ITEM(expected, i), PyTuple_GET_ITEM(value, i)))
            changed.push_back({Change::Kind::Number, list_item(n.source, i)});
      if (guards_[g].kind == Guard::Kind::Is && alike(guards_[g].object.get(), value))
        changed.push_back({Change::Kind::Function, n.source});
      if (guards_[g].kind == Guard::Kind::Length && length_of(value) >= 0)
        changed.push_back({Change::Kind::Number, length(n.source)});
      if (guards_[g].kind == Guard::Kind::Contents) changed.push_back({Change::Kind::Contents, n.source});
      const uint64_t dims = guards_[g].kind == Guard::Kind::Tensor ? other_dims(value, facts_[g]) : 0;
      if (dims) changed.push_back({Change::Kind::Sizes, n.source, dims});
      // Nothing further may be read through it, but what a tensor of other sizes has for its gradient.
      if (!dims) value = nullptr;
      *alone = *alone && changed.size() > before;
    }
    values_[id] = value;
  }
  *alone = *alone && !changed.empty();
  return changed;
}

bool GuardTree::add_sizes(int id, PyObject* value, size_t* key, bool* differs) const {
  for (int g : nodes_[id].checks) {
    if (holds(g, value, nullptr)) continue;
    const std::optional<uint64_t> other =
        guards_[g].kind == Guard::Kind::Tensor ? other_sizes(value, facts_[g]) : other_int(value, guards_[g]);
    if (!other) return false;
    *differs = true;
    hash_combine(*key, id);
    hash_combine(*key, *other);
  }
  return true;
}

std::optional<uint64_t> GuardTree::sizes_key(const Call& call, std::vector<int>* where) {
  Owned owned;
  size_t key = 0;
  bool differs = false;
  for (int g : globals_)
    if (!holds(g, nullptr, nullptr)) return std::nullopt;
  for (int id : order_) {
    const Node& n = nodes_[id];
    PyObject* value = fetch(n, n.parent >= 0 ? values_[n.parent] : nullptr,
                            n.key_node >= 0 ? values_[n.key_node] : nullptr, call, owned);
    values_[id] = value;
    bool here = false;
    if (!value || !add_sizes(id, value, &key, &here)) return std::nullopt;
    differs |= here;
    if (here && where) where->push_back(id);
  }
  for (int g : binary_)
    if (!holds(g, values_[ends_[g].first], values_[ends_[g].second])) return std::nullopt;
  return differs ? std::optional<uint64_t>(key) : std::nullopt;
}

PyObject* GuardTree::read(int id, const Call& call, Owned& owned) const {
  const Node& n = nodes_[id];
  PyObject* base = n.parent >= 0 ? read(n.parent, call, owned) : nullptr;
  PyObject* key = n.key_node >= 0 ? read(n.key_node, call, owned) : nullptr;
  if ((n.parent >= 0 && !base) || (n.key_node >= 0 && !key)) return nullptr;
  return fetch(n, base, key, call, owned);
}

std::optional<uint64_t> GuardTree::sizes_key_at(const Call& call, const std::vector<int>& where) {
  Owned owned;
  size_t key = 0;
  bool differs = false;
  for (int id : where) {
    PyObject* value = read(id, call, owned);
    if (!value || !add_sizes(id, value, &key, &differs)) return std::nullopt;
  }
  return differs ? std::optional<uint64_t>(key) : std::nullopt;
}

std::string GuardTree::failure(const Call& call) {
  Owned owned;
  int guard, node;
  if (run_slow(call, owned, &guard, &node)) {
    std::vector<PyObject*> values;
    for (int id : wanted_) values.push_back(values_[id]);
    return written_apart(values.data()) ? "" : kSharedMemory;
  }
  if (guard < 0 && node < 0) return "two objects that were different are one";
  if (guard < 0) return nodes_[node].source->text() + " no longer exists";
  const Guard& g = guards_[guard];
  std::string text = g.text();
  PyObject* value = ends_[guard].first >= 0 ? values_[ends_[guard].first] : nullptr;
  if (!value) return text;
  if (g.kind == Guard::Kind::Tensor) return text + ": " + explain_tensor(value, facts_[guard]);
  if (g.kind == Guard::Kind::Type && Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(g.object.get()))
    return text + ": the class was changed";
  if (g.kind == Guard::Kind::Type) return text + ": got " + Py_TYPE(value)->tp_name;
  if (g.kind == Guard::Kind::Is && value == g.object.get()) return text + ": its code or defaults were changed";
  if (g.kind == Guard::Kind::Length) return text + ": got " + std::to_string(length_of(value));
  return text + ": got " + repr_of(value);
}

}  // namespace kiln::guards
