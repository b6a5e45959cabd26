// Leaving the captured region: recipes for what is alive, side effects from what was written.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include "aten/fake.h"
#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;

/// Something alive that no recipe can make.
struct NotRebuildable {
  std::string what;
};

class Leaver {
 public:
  explicit Leaver(Machine& machine) : m(machine) {}

  std::vector<at::Tensor> tensors;  // that leave the captured part

  RecipePtr recipe(PyObject* o);
  RecipePtr constant(PyObject* o) {
    RecipePtr r = make(Recipe::Kind::Constant);
    r->object = py::Ref::borrow(o);
    return r;
  }
  RecipePtr source(const SourcePtr& s) {
    RecipePtr r = make(Recipe::Kind::Source);
    r->source = s;
    return r;
  }
  RecipePtr contents(PyObject* container);
  /// The cell object itself; null recipe kind Source for the root's free variables.
  RecipePtr cell(PyObject* c);
  void side_effects();
  /// Guards that what was written is none of the other existing objects that were read: these had what they had before.
  void keep_apart();
  void add(SideEffect::Kind kind, RecipePtr target, PyObject* key, RecipePtr value);
  /// The effects that make a container what its shadow became.
  void diff(Known& k);
  void modes();

 private:
  static RecipePtr make(Recipe::Kind kind) {
    auto r = std::make_shared<Recipe>();
    r->kind = kind;
    return r;
  }
  RecipePtr output(PyObject* tensor);
  RecipePtr instance(PyObject* o);
  std::vector<RecipePtr> dict_parts(PyObject* o);  // key, value, key, value, ...
  RecipePtr by_reduce(PyObject* o);
  RecipePtr begin(PyObject* o, Recipe::Kind kind) {
    RecipePtr r = make(kind);
    made_[o] = r;
    return r;
  }
  void attributes(PyObject* o, Recipe& r);
  void diff_dict(const Known& k);
  void diff_attributes(const Known& k);

  Machine& m;
  std::unordered_map<PyObject*, RecipePtr> made_;
  std::unordered_set<PyObject*> open_;
  std::unordered_map<const c10::TensorImpl*, int64_t> outputs_;
};

RecipePtr Leaver::output(PyObject* tensor) {
  const at::Tensor t = THPVariable_Unpack(tensor);
  auto [it, first] = outputs_.emplace(t.unsafeGetTensorImpl(), static_cast<int64_t>(m.trace.graph().outputs().size()));
  if (first) {
    const graph::Value v = m.trace.value_of(t);
    if (!v) throw NotRebuildable{"a tensor that no recorded operation made"};
    m.trace.graph().outputs().emplace_back(v);
    tensors.push_back(t);
    auto twin = m.to_torch.find(v);
    if (twin != m.to_torch.end())
      m.torch_level->outputs().emplace_back(twin->second);
    else
      m.torch_level_ok = false;
  }
  RecipePtr r = make(Recipe::Kind::Output);
  r->index = it->second;
  return r;
}

RecipePtr Leaver::cell(PyObject* c) {
  auto it = made_.find(c);
  if (it != made_.end()) return it->second;
  if (m.made_cells.count(c)) {
    RecipePtr r = begin(c, Recipe::Kind::Cell);
    // The content may refer to the cell (a recursive local function), so it is put in after both exist.
    if (PyObject* content = PyCell_GET(c)) r->state.emplace_back(py::Ref::borrow(names().contents), recipe(content));
    return r;
  }
  if (const SourcePtr s = m.source_of_contents(c)) return made_[c] = source(m.cell_itself(s));
  throw NotRebuildable{"a cell of the captured function's closure"};
}

void Leaver::attributes(PyObject* o, Recipe& r) {
  PyObject** slot = _PyObject_GetDictPtr(o);
  py::Ref dict = slot ? py::Ref::steal(PyObject_GenericGetDict(o, nullptr)) : py::Ref();
  PyErr_Clear();
  Py_ssize_t pos = 0;
  PyObject *name, *value;
  while (dict && PyDict_Next(dict.get(), &pos, &name, &value))
    r.state.emplace_back(py::Ref::borrow(name), recipe(value));
  for (PyTypeObject* t = Py_TYPE(o); t; t = t->tp_base) {
    if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE)) break;
    PyObject *key, *descr;
    Py_ssize_t at = 0;
    while (PyDict_Next(t->tp_dict, &at, &key, &descr)) {
      if (Py_TYPE(descr) != &PyMemberDescr_Type) continue;
      py::Ref v = py::Ref::steal(Py_TYPE(descr)->tp_descr_get(descr, o, reinterpret_cast<PyObject*>(t)));
      if (v) r.state.emplace_back(py::Ref::borrow(key), recipe(v.get()));
      PyErr_Clear();
    }
  }
}

std::vector<RecipePtr> Leaver::dict_parts(PyObject* o) {
  py::Ref items = base_items(o);
  std::vector<RecipePtr> parts;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* pair = PyList_GET_ITEM(items.get(), i);
    parts.push_back(recipe(PyTuple_GET_ITEM(pair, 0)));
    parts.push_back(recipe(PyTuple_GET_ITEM(pair, 1)));
  }
  return parts;
}

RecipePtr Leaver::instance(PyObject* o) {
  PyTypeObject* t = Py_TYPE(o);
  auto* type = reinterpret_cast<PyObject*>(t);
  if (m.made_types.count(type)) throw NotRebuildable{"an object of a class that the captured code made"};
  PyTypeObject* base = t;
  while (base && (base->tp_flags & Py_TPFLAGS_HEAPTYPE)) base = base->tp_base;
  // Only classes made in Python: those of C keep state where no recipe sees it.
  static const destructor python_dealloc = reinterpret_cast<PyTypeObject*>(names().module_type)->tp_dealloc;
  bool in_python = (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
  for (PyTypeObject* b = t; b && (b->tp_flags & Py_TPFLAGS_HEAPTYPE); b = b->tp_base)
    in_python = in_python && b->tp_dealloc == python_dealloc;
  if (!in_python && !PyTuple_Check(o) && !PyExceptionInstance_Check(o))
    throw NotRebuildable{std::string("an object of class ") + t->tp_name};
  if (PyTuple_Check(o) && !in_python && t->tp_new != PyTuple_Type.tp_new && !PyObject_HasAttrString(type, "_fields")) {
    // Structure sequences (torch.return_types) are made from a sequence.
    RecipePtr r = make(Recipe::Kind::Call);
    RecipePtr items = make(Recipe::Kind::Tuple);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) items->parts.push_back(recipe(PyTuple_GET_ITEM(o, i)));
    r->object = py::Ref::borrow(type);
    r->parts = {items};
    return made_[o] = r;
  }
  RecipePtr extra = make(Recipe::Kind::Tuple);
  if (base == &PyTuple_Type) {
    RecipePtr items = make(Recipe::Kind::Tuple);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) items->parts.push_back(recipe(PyTuple_GET_ITEM(o, i)));
    extra->parts = {items};
  } else if (PyExceptionInstance_Check(o)) {
    py::Ref args = py::Ref::steal(PyObject_GetAttrString(o, "args"));
    extra = recipe(args.get());
  } else if (base != &PyBaseObject_Type && base != &PyDict_Type && base != &PyList_Type && base != &PySet_Type &&
             reinterpret_cast<PyObject*>(base) != names().ordered_dict) {
    throw NotRebuildable{std::string("an object of class ") + t->tp_name};
  }
  RecipePtr r = begin(o, Recipe::Kind::Instance);
  r->object = py::Ref::borrow(type);
  r->parts = {constant(reinterpret_cast<PyObject*>(base)), extra};
  attributes(o, *r);
  if (PyExceptionInstance_Check(o)) {
    // The cause first: setting it sets the flag behind it.
    for (const char* name : {"__cause__", "__context__", "__suppress_context__"}) {
      py::Ref key = py::Ref::steal(PyUnicode_InternFromString(name));
      py::Ref value = py::Ref::steal(PyObject_GetAttr(o, key.get()));
      if (strcmp(name, "__context__") == 0 && m.caught.count(o) &&
          (value.get() == Py_None || value.get() == m.handled_at_start.get())) {
        static PyObject* handled = PySys_GetObject("exception");
        RecipePtr outer = make(Recipe::Kind::Call);
        outer->object = py::Ref::borrow(handled);
        r->state.emplace_back(key, outer);
      } else if (value && value.get() != Py_None && value.get() != Py_False) {
        r->state.emplace_back(key, recipe(value.get()));
      }
    }
  }
  if (PyDict_Check(o)) {
    r->elements = dict_parts(o);
  } else if (PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(o); ++i) r->elements.push_back(recipe(PyList_GET_ITEM(o, i)));
  } else if (PyAnySet_Check(o)) {
    Py_ssize_t pos = 0;
    PyObject* key;
    Py_hash_t hash;
    while (_PySet_NextEntry(o, &pos, &key, &hash)) r->elements.push_back(recipe(key));
  }
  return r;
}

/// Iterators and partials say themselves how to make them again: (callable, arguments, state).
RecipePtr Leaver::by_reduce(PyObject* o) {
  static PyObject* rebuild = PyObject_GetAttrString(polyfills(), "rebuild");
  const PyTypeObject* t = Py_TYPE(o);
  if (t == &PyDictIterKey_Type || t == &PyDictIterValue_Type || t == &PyDictIterItem_Type) {
    struct DictIterator {  // CPython 3.11's private dictiterobject
      PyObject_HEAD PyDictObject* dict;
      Py_ssize_t used, position;
      PyObject* result;
      Py_ssize_t left;
    };
    const auto* it = reinterpret_cast<DictIterator*>(o);
    if (it->dict) {
      // A real iterator again, which notices when the dict changes under it.
      auto* dict = reinterpret_cast<PyObject*>(it->dict);
      Known* k = m.find(dict);
      if (it->used != it->dict->ma_used || (k && k->snapshot && PyList_GET_SIZE(k->snapshot.get()) != 2 * it->used))
        throw NotRebuildable{"an iterator of a dict that has changed"};
      static PyObject* resume = PyObject_GetAttrString(polyfills(), "resume_dict_iterator");
      const char* view = t == &PyDictIterKey_Type ? "keys" : t == &PyDictIterValue_Type ? "values" : "items";
      RecipePtr r = make(Recipe::Kind::Call);
      r->object = py::Ref::borrow(resume);
      r->parts = {recipe(dict), constant(py::Ref::steal(PyUnicode_FromString(view)).get()),
                  constant(py::Ref::steal(PyLong_FromSsize_t(it->used - it->left)).get())};
      return made_[o] = r;
    }
  }
  py::Ref reduced = py::Ref::steal(PyObject_CallMethod(o, "__reduce__", nullptr));
  if (!reduced || !rebuild || !PyTuple_Check(reduced.get()) || PyTuple_GET_SIZE(reduced.get()) < 2) {
    PyErr_Clear();
    throw NotRebuildable{std::string("an object of class ") + Py_TYPE(o)->tp_name};
  }
  m.alive.push_back(reduced);
  RecipePtr r = make(Recipe::Kind::Call);
  r->object = py::Ref::borrow(rebuild);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reduced.get()) && i < 3; ++i)
    r->parts.push_back(recipe(PyTuple_GET_ITEM(reduced.get(), i)));
  return made_[o] = r;
}

RecipePtr Leaver::contents(PyObject* o) {
  RecipePtr r;
  if (PyTuple_CheckExact(o) || PyList_CheckExact(o)) {
    r = begin(o, PyTuple_CheckExact(o) ? Recipe::Kind::Tuple : Recipe::Kind::List);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
      r->parts.push_back(recipe(PySequence_Fast_GET_ITEM(o, i)));
    return r;
  }
  if (PyDict_Check(o)) {
    const bool plain = PyDict_CheckExact(o), ordered = !plain && Py_TYPE(o) == &PyODict_Type;
    r = begin(o, plain ? Recipe::Kind::Dict : Recipe::Kind::Instance);
    std::vector<RecipePtr> parts = dict_parts(o);
    if (plain) {
      r->parts = std::move(parts);
    } else if (ordered) {
      r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(&PyODict_Type));
      r->parts = {constant(reinterpret_cast<PyObject*>(&PyODict_Type)), make(Recipe::Kind::Tuple)};
      r->elements = std::move(parts);
      // A state_dict has its _metadata so.
      attributes(o, *r);
    } else {  // defaultdict(factory, {...})
      py::Ref factory = py::Ref::steal(PyObject_GetAttrString(o, "default_factory"));
      RecipePtr dict = make(Recipe::Kind::Dict);
      dict->parts = std::move(parts);
      r->kind = Recipe::Kind::Call;
      r->object = py::Ref::borrow(names().default_dict);
      r->parts = {recipe(factory.get()), dict};
    }
    return r;
  }
  if (PyAnySet_CheckExact(o)) {
    r = begin(o, PySet_CheckExact(o) ? Recipe::Kind::Set : Recipe::Kind::FrozenSet);
    Py_ssize_t pos = 0;
    PyObject* key;
    Py_hash_t hash;
    while (_PySet_NextEntry(o, &pos, &key, &hash)) r->parts.push_back(recipe(key));
    return r;
  }
  throw NotRebuildable{Py_TYPE(o)->tp_name};
}

RecipePtr Leaver::recipe(PyObject* o) {
  if (!o) return make(Recipe::Kind::Null);
  const Class c = m.classify(o);
  if (c == Class::Type && m.made_types.count(o)) throw NotRebuildable{"a class that the captured code made"};
  const bool slice = PySlice_Check(o) && !m.is_constant(o);  // of tensors
  if (m.is_open_number(o)) {
    RecipePtr r = make(m.is_size(o) ? Recipe::Kind::Size : Recipe::Kind::Real);
    r->index = m.output_of(o);
    return r;
  }
  if (c == Class::Constant && !slice && PyTuple_Check(o) && m.size_among(&o, 1)) {  // a torch.Size
    RecipePtr items = make(Recipe::Kind::Tuple), r = make(Recipe::Kind::Call);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) items->parts.push_back(recipe(PyTuple_GET_ITEM(o, i)));
    r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(o)));
    r->parts.push_back(items);
    return r;
  }
  if ((c == Class::Constant && !slice) || c == Class::Type) return constant(o);
  if (m.is_text(o) && !made_.count(o)) {
    RecipePtr r = begin(o, Recipe::Kind::Call);
    r->object = py::check(PyObject_GetAttrString(o, "function"));
    const py::Ref args = py::check(PyObject_GetAttrString(o, "args"));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.get()); ++i)
      r->parts.push_back(recipe(PyTuple_GET_ITEM(args.get(), i)));
    return r;
  }
  if (m.is_number(o) && !made_.count(o)) {
    if (auto s = m.number_sources.find(o); s != m.number_sources.end()) return made_[o] = source(s->second);
    RecipePtr r = begin(o, Recipe::Kind::Call);
    r->object = py::Ref::borrow(number_value_function());
    py::Ref tensor = py::Ref::steal(PyObject_GetAttrString(o, "tensor"));
    r->parts.push_back(recipe(tensor.get()));
    return r;
  }
  auto it = made_.find(o);
  if (it != made_.end()) {
    if (open_.count(o)) throw NotRebuildable{"a container that contains itself"};
    return it->second;
  }
  if (Known* k = m.find(o))
    return made_[o] = k->source->kind == SK::Const ? constant(k->real.get()) : source(k->source);
  if (slice) {
    RecipePtr r = make(Recipe::Kind::Slice);
    auto* s = reinterpret_cast<PySliceObject*>(o);
    r->parts = {recipe(s->start), recipe(s->stop), recipe(s->step)};
    return made_[o] = r;
  }
  if (m.is_constant(o) &&
      !(PyCFunction_Check(o) && PyCFunction_GET_SELF(o) && !PyModule_Check(PyCFunction_GET_SELF(o))) &&
      Py_TYPE(o) != &_PyMethodWrapper_Type)
    return constant(o);
  if (PyWeakref_CheckRefExact(o) && PyWeakref_GetObject(o) != Py_None) {
    RecipePtr r = begin(o, Recipe::Kind::Call);
    r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(&_PyWeakref_RefType));
    r->parts = {recipe(PyWeakref_GetObject(o))};
    if (PyObject* called = reinterpret_cast<PyWeakReference*>(o)->wr_callback) r->parts.push_back(recipe(called));
    return r;
  }
  struct Open {
    std::unordered_set<PyObject*>& set;
    PyObject* o;
    ~Open() { set.erase(o); }
  };
  switch (c) {
    case Class::Tensor: {
      RecipePtr r = made_[o] = output(o);
      PyObject** slot = _PyObject_GetDictPtr(o);
      Py_ssize_t pos = 0;
      PyObject *name, *value;
      while (slot && *slot && PyDict_Next(*slot, &pos, &name, &value))  // what the program hung on it
        r->state.emplace_back(py::Ref::borrow(name), recipe(value));
      return r;
    }
    case Class::Tuple:
    case Class::List:
    case Class::Dict:
    case Class::Set:
    case Class::FrozenSet:
    case Class::OrderedDict:
    case Class::DefaultDict: {
      open_.insert(o);
      Open open{open_, o};
      return contents(o);
    }
    case Class::Deque: {
      RecipePtr r = make(Recipe::Kind::Call), list = make(Recipe::Kind::List);
      py::Ref items = py::Ref::steal(PySequence_List(o)), maxlen = py::Ref::steal(PyObject_GetAttrString(o, "maxlen"));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i)
        list->parts.push_back(recipe(PyList_GET_ITEM(items.get(), i)));
      r->object = py::Ref::borrow(names().deque);
      r->parts = {list, recipe(maxlen.get())};
      return made_[o] = r;
    }
    case Class::Method: {
      RecipePtr r = make(Recipe::Kind::Method);
      r->parts = {recipe(PyMethod_GET_FUNCTION(o)), recipe(PyMethod_GET_SELF(o))};
      return made_[o] = r;
    }
    case Class::Function: {
      auto* f = reinterpret_cast<PyFunctionObject*>(o);
      if (!m.is_made_function(o)) return constant(o);
      RecipePtr r = begin(o, Recipe::Kind::Function);
      r->object = py::Ref::borrow(f->func_code);
      RecipePtr closure = constant(Py_None);
      if (f->func_closure) {
        closure = make(Recipe::Kind::Tuple);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f->func_closure); ++i)
          closure->parts.push_back(cell(PyTuple_GET_ITEM(f->func_closure, i)));
      }
      auto or_none = [&](PyObject* x) { return x ? recipe(x) : constant(Py_None); };
      r->parts = {constant(f->func_globals),
                  constant(f->func_name),
                  or_none(f->func_defaults),
                  or_none(f->func_kwdefaults),
                  closure,
                  or_none(f->func_annotations && PyDict_Check(f->func_annotations) ? f->func_annotations : nullptr),
                  constant(f->func_qualname)};
      if (f->func_dict) {
        Py_ssize_t pos = 0;
        PyObject *name, *value;
        while (PyDict_Next(f->func_dict, &pos, &name, &value))
          r->state.emplace_back(py::Ref::borrow(name), recipe(value));
      }
      return r;
    }
    default:
      break;
  }
  if (PyCell_Check(o)) return cell(o);
  if (PyCFunction_Check(o) || Py_TYPE(o) == &_PyMethodWrapper_Type) {  // [].append
    static PyObject* getattr = PyObject_GetAttrString(PyImport_AddModule("builtins"), "getattr");
    py::Ref self = py::Ref::steal(PyObject_GetAttrString(o, "__self__")),
            name = py::Ref::steal(PyObject_GetAttrString(o, "__name__"));
    if (!self || !name) {
      PyErr_Clear();
      return constant(o);
    }
    RecipePtr r = make(Recipe::Kind::Call);
    // By the class's descriptor where there is one: getattr might come to a __getattribute__ in Python, the very one
    // that is captured here.
    PyObject* d = PyType_Check(self.get()) ? nullptr : _PyType_Lookup(Py_TYPE(self.get()), name.get());
    if (d && (Py_TYPE(d) == &PyMethodDescr_Type || Py_TYPE(d) == &PyWrapperDescr_Type)) {
      r->object = py::Ref::steal(PyObject_GetAttrString(d, "__get__"));
      r->parts = {recipe(self.get())};
    } else {
      r->object = py::Ref::borrow(getattr);
      r->parts = {recipe(self.get()), constant(name.get())};
    }
    return made_[o] = r;
  }
  if (c == Class::Singleton) return constant(o);
  if (PyGen_Check(o) || PyCoro_CheckExact(o)) throw NotRebuildable{"a suspended generator"};
  if (Py_TYPE(o) == &PySuper_Type) {
    py::Ref type = py::Ref::steal(PyObject_GetAttrString(o, "__thisclass__")),
            self = py::Ref::steal(PyObject_GetAttrString(o, "__self__"));
    RecipePtr r = make(Recipe::Kind::Call);
    r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(&PySuper_Type));
    r->parts = {recipe(type.get()), recipe(self.get())};
    return made_[o] = r;
  }
  if (!(Py_TYPE(o)->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyExceptionInstance_Check(o)) return by_reduce(o);
  if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().partial || PyIter_Check(o)) {
    if (Py_TYPE(o)->tp_iternext && strncmp(Py_TYPE(o)->tp_name, "itertools.", 10) == 0) return by_reduce(o);
    if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().partial) return by_reduce(o);
  }
  if (is_getter(Py_TYPE(o))) return by_reduce(o);
  open_.erase(o);
  return instance(o);
}

// --- side effects
// ------------------------------------------------------------------------------------------------------

void Leaver::diff_dict(const Known& k) {
  PyObject* now = k.stand_in.get();
  py::Ref items = base_items(now);
  PyObject* before = k.snapshot.get();  // key, value, key, value ...
  const Py_ssize_t n_before = PyList_GET_SIZE(before) / 2, n = PyList_GET_SIZE(items.get());
  bool same = n == n_before;
  for (Py_ssize_t i = 0; same && i < n; ++i) {
    PyObject* pair = PyList_GET_ITEM(items.get(), i);
    same = PyTuple_GET_ITEM(pair, 0) == PyList_GET_ITEM(before, 2 * i) &&
           PyTuple_GET_ITEM(pair, 1) == PyList_GET_ITEM(before, 2 * i + 1);
  }
  if (same) return;
  m.activate(const_cast<Known&>(k));
  // By identity: __hash__ and == of a stand-in are those of the object that it stands for only while the machine runs.
  std::unordered_map<PyObject*, PyObject*> old;
  for (Py_ssize_t i = 0; i < n_before; ++i)
    old.emplace(PyList_GET_ITEM(before, 2 * i), PyList_GET_ITEM(before, 2 * i + 1));
  std::unordered_set<PyObject*> left;
  // Writes of single items keep the order if what is left of the old keys comes first, in the old order.
  bool ordered = true;
  for (Py_ssize_t i = 0, next = 0; i < n; ++i) {
    PyObject* key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
    if (!old.contains(key)) continue;
    while (next < n_before && PyList_GET_ITEM(before, 2 * next) != key) ++next;
    ordered = ordered && next < n_before && static_cast<size_t>(i) == left.size();
    left.insert(key);
  }
  auto effect = [&](SideEffect::Kind kind) -> SideEffect& {
    SideEffect e;
    e.kind = kind;
    e.target = source(k.source);
    m.result.side_effects.push_back(std::move(e));
    return m.result.side_effects.back();
  };
  auto set_key = [&](SideEffect& e, PyObject* key) {
    if (m.is_constant(key))
      e.key = py::Ref::borrow(key);
    else
      e.key_recipe = recipe(key);
  };
  if (!ordered) {
    RecipePtr value = make(Recipe::Kind::Dict);
    value->parts = dict_parts(now);
    effect(SideEffect::Kind::ReplaceDict).value = value;
    return;
  }
  for (Py_ssize_t i = 0; i < n_before; ++i) {
    PyObject* key = PyList_GET_ITEM(before, 2 * i);
    if (!left.contains(key)) set_key(effect(SideEffect::Kind::DelItem), key);
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
    PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 1);
    if (const auto it = old.find(key); it != old.end() && it->second == value) continue;
    RecipePtr r = recipe(value);
    SideEffect& e = effect(SideEffect::Kind::SetItem);
    e.value = r;
    set_key(e, key);
  }
}

void Leaver::diff_attributes(const Known& k) {
  const py::Ref now = py::Ref::steal(PyObject_GenericGetDict(k.stand_in.get(), nullptr));
  const py::Ref before_all = k.attributes ? k.attributes : py::Ref::steal(PyDict_New());
  PyObject* before = before_all.get();
  auto effect = [&](SideEffect::Kind kind, PyObject* name, RecipePtr value) {
    SideEffect e;
    e.kind = kind;
    e.target = source(k.source);
    e.key = py::Ref::borrow(name);
    e.value = std::move(value);
    m.activate(const_cast<Known&>(k));
    m.result.side_effects.push_back(std::move(e));
  };
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(before, &at, &name, &value))
    if (!PyDict_Contains(now.get(), name)) effect(SideEffect::Kind::DelAttr, name, nullptr);
  at = 0;
  while (PyDict_Next(now.get(), &at, &name, &value))
    if (PyDict_GetItem(before, name) != value) effect(SideEffect::Kind::SetAttr, name, recipe(value));
}

void Leaver::add(SideEffect::Kind kind, RecipePtr target, PyObject* key, RecipePtr value) {
  SideEffect e;
  e.kind = kind;
  e.target = std::move(target);
  e.key = py::Ref::borrow(key);
  e.value = std::move(value);
  m.result.side_effects.push_back(std::move(e));
}

void Leaver::diff(Known& k) {
  PyObject* now = k.stand_in.get();
  PyObject* before = k.snapshot.get();
  PyObject** attributes = _PyObject_GetDictPtr(now);
  if (k.attributes || (attributes && *attributes && PyDict_GET_SIZE(*attributes))) diff_attributes(k);
  const bool deque = m.classify(now) == Class::Deque;
  if (deque && !k.active && k.appended) {
    RecipePtr value = make(Recipe::Kind::List);
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(k.appended.get()); ++j)
      value->parts.push_back(recipe(PyList_GET_ITEM(k.appended.get(), j)));
    return add(SideEffect::Kind::ExtendList, source(k.source), nullptr, value);
  }
  const py::Ref items = deque ? py::Ref::steal(PySequence_List(now)) : py::Ref();
  if (deque) now = items.get();
  if (PyList_Check(now)) {
    const Py_ssize_t size = PyList_GET_SIZE(now), old = PyList_GET_SIZE(before);
    bool longer = size >= old;
    for (Py_ssize_t j = 0; longer && j < old; ++j) longer = PyList_GET_ITEM(now, j) == PyList_GET_ITEM(before, j);
    if (longer && size == old) return;
    const bool extends = longer && !k.active && PyList_CheckExact(k.real.get());  // what nobody looked at stays
    if (!extends) m.activate(k);
    RecipePtr value = make(Recipe::Kind::List);
    for (Py_ssize_t j = extends ? old : 0; j < size; ++j) value->parts.push_back(recipe(PyList_GET_ITEM(now, j)));
    const auto replace = deque ? SideEffect::Kind::ReplaceDeque : SideEffect::Kind::ReplaceList;
    add(extends ? SideEffect::Kind::ExtendList : replace, source(k.source), nullptr, value);
  } else if (PyDict_Check(now)) {
    diff_dict(k);
  } else if (PySet_Check(now)) {
    std::unordered_set<PyObject*> old;  // by identity, as the keys of a dict
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(before); ++j) old.insert(PyList_GET_ITEM(before, j));
    std::vector<PyObject*> keys;
    Py_ssize_t pos = 0;
    PyObject* key;
    Py_hash_t hash;
    while (_PySet_NextEntry(now, &pos, &key, &hash)) keys.push_back(key);
    if (keys.size() == old.size() &&
        std::all_of(keys.begin(), keys.end(), [&](PyObject* o) { return old.contains(o); }))
      return;
    RecipePtr value = make(Recipe::Kind::Set);
    for (PyObject* o : keys) value->parts.push_back(recipe(o));
    m.activate(k);
    add(SideEffect::Kind::ReplaceSet, source(k.source), nullptr, value);
  }
}

void Leaver::keep_apart() {
  std::unordered_map<PyTypeObject*, bool> written;  // by class: whether one whose identity is not fixed is written
  std::unordered_set<const Known*> changed;
  const auto is_fixed = [&](const Known& k) {
    const Class c = m.classify(k.real.get());
    return k.source->kind == SK::Const || c == Class::Module || (c == Class::Function && !k.alike) || c == Class::Type;
  };
  const auto note = [&](const Known* k) {
    if (!k) return;
    changed.insert(k);
    written[Py_TYPE(k->real.get())] |= !is_fixed(*k);
  };
  for (const Known& k : m.knowns)
    if (k.kind == Known::Kind::Shadow && k.written) note(&k);
  for (PyObject* o : m.overlay_order) note(m.find(o));
  for (const Known& k : m.knowns) {
    const auto it = written.find(Py_TYPE(k.real.get()));
    if (k.kind == Known::Kind::Tensor || it == written.end() || (!k.active && !changed.contains(&k))) continue;
    // Two that are what they are need not be told apart.
    if (it->second || !is_fixed(k)) m.guard(guards::Guard::Kind::Apart, k.source);
  }
  if (!m.cells_order.empty())
    for (const auto& [cell, contents] : m.cell_source) m.guard(guards::Guard::Kind::Apart, m.cell_itself(contents));
}

void Leaver::side_effects() {
  for (const Machine::Deferred& call : m.deferred) {
    SideEffect e;
    e.kind = SideEffect::Kind::Call;
    e.value = call.made ? constant(call.callable.get()) : recipe(call.callable.get());
    for (const py::Ref& a : call.args) e.extra.push_back(recipe(a.get()));
    m.result.side_effects.push_back(std::move(e));
  }
  for (size_t i = 0; i < m.knowns.size(); ++i) {  // recipes may add some
    Known& k = m.knowns[i];
    if (k.kind != Known::Kind::Shadow) continue;
    const size_t before = m.result.side_effects.size();
    diff(k);
    k.written = m.result.side_effects.size() > before;
  }
  for (PyObject* o : m.overlay_order) {
    auto it = m.overlays.find(o);
    if (it == m.overlays.end()) continue;
    RecipePtr target = recipe(o);
    for (auto& [name, value] : it->second.entries) {
      if (value)
        add(SideEffect::Kind::SetAttr, target, name.get(), recipe(value.get()));
      else
        add(SideEffect::Kind::DelAttr, target, name.get(), nullptr);
    }
  }
  for (auto& [dict, overlay] : m.globals_written)
    for (auto& [name, value] : overlay.entries) {
      if (value)
        add(SideEffect::Kind::StoreGlobal, constant(dict), name.get(), recipe(value.get()));
      else
        add(SideEffect::Kind::DeleteGlobal, constant(dict), name.get(), nullptr);
    }
  for (const py::Ref& c : m.cells_order) {
    PyObject* value = m.cells_written[c.get()].get();
    add(SideEffect::Kind::StoreCell, cell(c.get()), nullptr, value ? recipe(value) : nullptr);
  }
  for (const auto& [fake, data] : m.data_written)
    add(SideEffect::Kind::SetAttr, recipe(fake), names().data, recipe(data.get()));
  for (PyObject* fake : m.flags_written) {
    const bool now = THPVariable_Unpack(fake).requires_grad();
    if (THPVariable_Unpack(m.real_of(fake)).requires_grad() != now)
      add(SideEffect::Kind::SetAttr, recipe(fake), names().requires_grad, constant(now ? Py_True : Py_False));
  }
  std::vector<std::pair<size_t, PyObject*>> droppable;  // effect, the gradient it replaces
  for (const py::Ref& fake : m.grad_order) {
    Machine::Grad& g = m.grads_[fake.get()];
    const at::Tensor t = THPVariable_Unpack(fake.get());
    const at::Tensor& now = t.grad();
    const bool had = static_cast<bool>(g.initial);
    auto& effects = m.result.side_effects;
    if (now.defined() ? had && THPVariable_Unpack(g.initial.get()).is_same(now) : !had && g.looked) continue;
    py::Ref value = now.defined() ? py::Ref::steal(THPVariable_Wrap(now)) : py::Ref::borrow(Py_None);
    add(SideEffect::Kind::SetAttr, recipe(fake.get()), names().grad, recipe(value.get()));
    if (had && !m.trace.find(THPVariable_Unpack(g.initial.get())))
      droppable.emplace_back(effects.size() - 1, g.initial.get());
  }
  for (auto [at, grad] : droppable)
    if (!made_.count(grad)) m.result.side_effects[at].drop_before = true;
  modes();
}

/// Grad mode, autocast and the like as the captured part leaves them.
void Leaver::modes() {
  const auto call_object = [&](PyObject* function, const std::vector<PyObject*>& args) {
    SideEffect e;
    e.kind = SideEffect::Kind::Call;
    e.value = constant(function);
    for (PyObject* a : args) e.extra.push_back(constant(a));
    m.result.side_effects.push_back(std::move(e));
  };
  const auto call = [&](const char* name, std::initializer_list<PyObject*> args, const char* in = "torch._C") {
    const py::Ref module = py::check(PyImport_ImportModule(in));
    call_object(py::check(PyObject_GetAttrString(module.get(), name)).get(), args);
  };
  const auto flag = [](bool b) { return b ? Py_True : Py_False; };
  const aten::Modes now;
  const aten::Modes& before = m.modes_at_start;
  py::Ref cpu = py::Ref::steal(PyUnicode_InternFromString("cpu"));
  if (now.grad != before.grad) call("_set_grad_enabled", {flag(now.grad)});
  if (now.autocast != before.autocast) call("set_autocast_enabled", {cpu.get(), flag(now.autocast)});
  if (now.autocast_dtype != before.autocast_dtype)
    call("set_autocast_dtype", {cpu.get(), reinterpret_cast<PyObject*>(torch::getTHPDtype(now.autocast_dtype))});
  if (now.autocast_cache != before.autocast_cache) call("set_autocast_cache_enabled", {flag(now.autocast_cache)});
  const aten::TransformModes differentiation;
  if (differentiation.forward_grad != m.transform_modes_at_start.forward_grad)
    call("_set_fwd_grad_enabled", {flag(differentiation.forward_grad)});
  if (differentiation.saved_hooks_disabled != m.transform_modes_at_start.saved_hooks_disabled) {
    if (!differentiation.saved_hooks_disabled) {
      call("_saved_tensors_hooks_enable", {}, "torch._C._autograd");
    } else {
      const py::Ref message = py::check(PyUnicode_FromString(differentiation.saved_hooks_disabled->c_str()));
      call("_saved_tensors_hooks_disable", {message.get()}, "torch._C._autograd");
    }
  }
  const int64_t kept = m.function_modes_at_start.common();
  for (int64_t i = m.function_modes_at_start.size(); i > kept; --i) call("_pop_torch_function_stack", {});
  for (int64_t i = kept; i < py::num_function_modes(); ++i) {
    call("_push_on_torch_function_stack", {});
    m.result.side_effects.back().extra = {recipe(py::function_mode(i))};
  }
  for (const Machine::Setting& s : m.settings) {
    if (!s.setter) continue;
    const py::Ref now = py::check(PyObject_CallObject(s.getter.get(), s.args.get()));
    if (PyObject_RichCompareBool(now.get(), s.before.get(), Py_EQ) == 1) continue;
    PyObject** const first = PySequence_Fast_ITEMS(s.args.get());
    std::vector<PyObject*> args(first, first + PyTuple_GET_SIZE(s.args.get()));
    args.push_back(now.get());
    call_object(s.setter.get(), args);
  }
  for (int i = 0; i < m.autocast_nesting; ++i) call("autocast_increment_nesting", {});
  for (int i = 0; i > m.autocast_nesting; --i) call("autocast_decrement_nesting", {});
  if (m.autocast_nesting < 0) call("clear_autocast_cache", {});
}

// --- exits
// -------------------------------------------------------------------------------------------------------------

bool Machine::is_made_function(PyObject* f) {
  // Existing functions that the program met are known; others come out of classes.
  return made_functions.count(f) != 0;
}

void Machine::leave_return(PyObject* value) {
  Exit exit;
  exit.kind = Exit::Kind::Return;
  leave(exit, [&](Leaver& l) { exit.value = l.recipe(value); });
}

void Machine::leave_at(int offset, PyObject** sp, py311::Frame* frame) {
  Exit exit;
  exit.kind = Exit::Kind::Break;
  exit.offset = offset;
  auto r = break_reasons.find(offset);
  if (r != break_reasons.end()) exit.reason = r->second;
  leave(exit, [&](Leaver& l) {
    PyCodeObject* code = frame->f_code;
    for (int i = 0; i < code->co_nlocalsplus; ++i) {
      PyObject* o = frame->localsplus[i];
      const uint8_t kind = py311::local_kind(code, i);
      if (!o) {
        exit.locals.push_back(nullptr);
      } else if (kind & py311::KindFree) {
        auto s = std::make_shared<Recipe>();
        s->kind = Recipe::Kind::Source;
        s->source = guards::cell(i, py311::local_name(code, i));
        exit.locals.push_back(PyCell_GET(o) ? s : nullptr);
      } else {
        exit.locals.push_back(PyCell_Check(o) && (kind & py311::KindCell) ? l.cell(o) : l.recipe(o));
      }
    }
    for (PyObject** p = py311::stack_base(frame); p < sp; ++p) exit.stack.push_back(l.recipe(*p));
  });
}

void Machine::leave(Exit& exit, const std::function<void(Leaver&)>& fill) {
  if (!finalizable.empty()) {
    root_instruction = finalizable.begin()->second;
    graph_break("object-with-finalizer", "an object with a __del__ is alive where the captured part ends");
    return;
  }
  aten::RecordingPaused no_recording;
  Paused paused_here(*this);
  result.exit.kind = exit.kind;
  Leaver leaver(*this);
  try {
    fill(leaver);
    leaver.side_effects();
    leaver.keep_apart();
  } catch (const NotRebuildable& e) {
    PyErr_Clear();
    // An earlier point may do: the last call before here that is not yet a break.
    trace.graph().outputs().clear();
    torch_level->outputs().clear();
    result.side_effects.clear();
    graph_break("not-rebuildable", e.what + " is alive where the captured part ends");
    while (!root_calls.empty() && options.break_at.count(root_calls.back())) root_calls.pop_back();
    root_instruction = root_calls.empty() ? -1 : root_calls.back();
    return;
  }
  PyErr_Clear();
  for (const at::Tensor& t : leaver.tensors)
    if (const int made_at = leaf_behind(t, leaver.tensors); made_at >= 0) {
      graph_break("autograd", "a tensor with requires_grad=True is made, and results depend on it");
      root_instruction = made_at;
      return;
    }
  for (const at::Tensor& t : leaver.tensors)
    if (const int registered_at = hook_behind(t); registered_at >= 0) {
      graph_break("autograd", "a hook on a gradient that is computed after the captured part");
      root_instruction = registered_at;
      return;
    }
  for (const auto& [t, instruction] : retained)
    if (has_or_views(leaver.tensors, t)) {
      graph_break("autograd", "a result of which retain_grad() was called");
      root_instruction = instruction;
      return;
    }
  result.exit = std::move(exit);
  done = true;
}

void Machine::finish() {
  result.sizes = trace.sizes;
  // What was decided by an input's data is a condition on it, though nothing may be computed of it.
  if (trace.num_nodes == 0 && branches_.numbers.empty() && branches_.values.empty()) {
    result.inputs.clear();
    result.example_inputs.clear();
    return;
  }
  result.traced = trace.share();
  // Operators of tensors are methods of theirs, which may be replaced.
  PyObject* tensor = names().tensor_type;
  guard(guards::Guard::Kind::ClassVersion, child(guards::Source::Kind::Const, nullptr, tensor), tensor,
        py311::type_version(reinterpret_cast<PyTypeObject*>(tensor)));
  result.eager_condition = any_of(eager_conditions_, "eager_condition");
  result.other_branch = any_of(branches_, "other_branch");
  for (const Conditions* asked : {&eager_conditions_, &branches_})
    if (trace.sizes &&
        std::any_of(trace.sizes->arguments().begin(), trace.sizes->arguments().end(),
                    [&](const auto& a) { return asked->nodes.contains(const_cast<graph::Node*>(a.node)); }))
      trace.sizes->refuse("a condition on data that are computed of an open size");
  if (!torch_level_ok) return;
  result.torch_level = torch_level;
  if (trace.sizes && options.for_fx) finish_torch_sizes();
}

}  // namespace kiln::capture
