// Recipes: how to make anew, when the graph has run, what the captured code made and left alive.
#include <torch/csrc/autograd/python_variable.h>

#include "aten/autograd.h"
#include "aten/fake.h"
#include "aten/transforms.h"
#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/leaver.h"
#include "python/capture/sizes.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;

RecipePtr Leaver::output(PyObject* tensor) {
  const at::Tensor t = THPVariable_Unpack(tensor);
  // Its history is that of a level of its own, which no graph has.
  if (aten::is_wrapper(t) && t.requires_grad())
    throw NotRebuildable{"a tensor that a transform differentiates (torch.func.vjp's function holds such)"};
  auto [it, first] = outputs_.emplace(t.unsafeGetTensorImpl(), static_cast<int64_t>(m.trace.graph().outputs().size()));
  if (first) {
    const graph::Value v = m.trace.value_of(t);
    if (!v) throw NotRebuildable{"a tensor that no recorded operation made"};
    const bool view = aten::is_inference_view(t);
    // Where the whole part runs in it, its tensors are made in it.
    if (view || (t.is_inference() && !m.modes_at_start.inference))
      m.result.inference_outputs.push_back({it->second, view});
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

RecipePtr Leaver::parameter(const RecipePtr& data, const at::Tensor& t) {
  static PyObject* make_subclass = PyObject_GetAttrString(names().tensor_type, "_make_subclass");
  RecipePtr r = make(Recipe::Kind::Call);
  r->object = py::Ref::borrow(make_subclass);
  r->parts = {constant(names().parameter_type), data, constant(t.requires_grad() ? Py_True : Py_False)};
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

namespace {
/// While what an object refers to is looked at that is filled in when all objects exist: what is on the way may be
/// among it.
class FilledLater {
 public:
  explicit FilledLater(std::unordered_set<PyObject*>& open) : open_(open), on_the_way_(std::exchange(open, {})) {}
  ~FilledLater() { open_ = std::move(on_the_way_); }
  FilledLater(const FilledLater&) = delete;

 private:
  std::unordered_set<PyObject*>& open_;
  std::unordered_set<PyObject*> on_the_way_;
};
}  // namespace

void Leaver::attributes(PyObject* o, Recipe& r) {
  PyObject** slot = _PyObject_GetDictPtr(o);
  py::Ref dict = slot ? py::Ref::steal(PyObject_GenericGetDict(o, nullptr)) : py::Ref();
  PyErr_Clear();
  const FilledLater later(open_);
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

py::Ref Leaver::whole_items(PyObject* dict) {
  py::Ref items = base_items(dict);
  if (!items) throw NotRebuildable{std::string("a broken ") + Py_TYPE(dict)->tp_name};
  return items;
}

std::vector<RecipePtr> Leaver::dict_parts(PyObject* o) {
  const py::Ref items = whole_items(o);
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
  bool in_python = (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
  for (PyTypeObject* b = t; b && (b->tp_flags & Py_TPFLAGS_HEAPTYPE); b = b->tp_base)
    in_python = in_python && py311::is_of_class_statement(b);
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
    if (py::Ref::steal(PyException_GetTraceback(o)).get() == Machine::unknown_traceback())
      throw NotRebuildable{"an exception that was raised, and its traceback,"};
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
  const FilledLater later(open_);
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
  if (m.failed_iterators.contains(o)) throw NotRebuildable{"an iterator that has failed"};
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
      Py_ssize_t ahead = 0;  // a key that was removed and set again is ahead, too
      for (Py_ssize_t at = it->position; PyDict_Next(dict, &at, nullptr, nullptr);) ++ahead;
      if (it->used != it->dict->ma_used || ahead != it->left ||
          (k && k->snapshot && PyList_GET_SIZE(k->snapshot.get()) != 2 * it->used))
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
  if (t == &PySetIter_Type) {
    struct SetIterator {  // CPython 3.11's private setiterobject
      PyObject_HEAD PySetObject* set;
      Py_ssize_t used, position, left;
    };
    const auto* it = reinterpret_cast<SetIterator*>(o);
    if (it->set) {
      auto* set = reinterpret_cast<PyObject*>(it->set);
      Known* k = m.find(set);
      if (it->used != it->set->used || (k && m.was_written(*k)))
        throw NotRebuildable{"an iterator of a set that has changed"};
      const RecipePtr of = recipe(set);
      const bool as_it_is = of->object && (of->kind == Recipe::Kind::Set || of->kind == Recipe::Kind::FrozenSet);
      if (of->kind == Recipe::Kind::Source || as_it_is) {  // else the elements come to other places
        static PyObject* resume = PyObject_GetAttrString(polyfills(), "resume_set_iterator");
        RecipePtr r = make(Recipe::Kind::Call);
        r->object = py::Ref::borrow(resume);
        r->parts = {of, constant(py::Ref::steal(PyLong_FromSsize_t(it->used - it->left)).get())};
        return made_[o] = r;
      }
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

RecipePtr Leaver::array(PyObject* o) {
  PyObject* const owner = owner_of(o);
  if (!owner || holds_objects(o)) throw NotRebuildable{"an array of objects, or of memory that is no array's"};
  PyObject* const writeable = is_writeable(o) ? Py_True : Py_False;
  RecipePtr r = begin(o, Recipe::Kind::Call);
  if (owner == o) {
    static PyObject* const copied = PyObject_GetAttrString(polyfills(), "copied_array");
    r->object = py::Ref::borrow(copied);
    r->parts = {constant(copy_of_array(o).get()), constant(writeable)};
    return r;
  }
  static PyObject* const view = PyObject_GetAttrString(polyfills(), "view_of_array");
  static PyObject* const offset = PyObject_GetAttrString(polyfills(), "offset_in_array");
  r->object = py::Ref::borrow(view);
  r->parts = {recipe(owner)};
  for (const char* name : {"shape", "dtype", "strides"})
    r->parts.push_back(constant(py::check(PyObject_GetAttrString(o, name)).get()));
  r->parts.push_back(constant(py::check(PyObject_CallFunctionObjArgs(offset, o, owner, nullptr)).get()));
  r->parts.push_back(constant(writeable));
  return r;
}

void Leaver::elements_of_set(PyObject* set, Recipe& r) {
  Py_ssize_t at = 0;
  PyObject* key;
  Py_hash_t hash;
  while (_PySet_NextEntry(set, &at, &key, &hash)) r.parts.push_back(recipe(key));
  // In which order a set is gone through depends on what it held before, too. What is made anew hashes anew.
  at = 0;
  for (const RecipePtr& part : r.parts)
    if (!_PySet_NextEntry(set, &at, &key, &hash) || part->kind != Recipe::Kind::Constant || part->object.get() != key)
      return;
  r.parts.clear();
  r.object = py::Ref::steal(r.kind == Recipe::Kind::Set ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
  if (!r.object || !py311::copy_set(r.object.get(), set)) throw py::PythonError{};
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
    elements_of_set(o, *r);
    return r;
  }
  throw NotRebuildable{Py_TYPE(o)->tp_name};
}

namespace {
/// The class's descriptor that the bound C method `o` is of, if there is one. getattr might come to another: that of a
/// derived class (super().__init__), or a __getattribute__ in Python, the very one that is captured here.
PyObject* descriptor_behind(PyObject* o, PyObject* self, PyObject* name) {
  struct MethodWrapper {  // CPython 3.11's private wrapperobject
    PyObject_HEAD PyObject* descriptor;
    PyObject* self;
  };
  if (Py_TYPE(o) == &_PyMethodWrapper_Type) return reinterpret_cast<MethodWrapper*>(o)->descriptor;
  if (PyType_Check(self)) return nullptr;
  PyObject* mro = Py_TYPE(self)->tp_mro;
  for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); ++i) {
    PyObject* d = PyDict_GetItem(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i))->tp_dict, name);
    if (d && Py_TYPE(d) == &PyMethodDescr_Type &&
        reinterpret_cast<PyMethodDescrObject*>(d)->d_method == reinterpret_cast<PyCFunctionObject*>(o)->m_ml)
      return d;
  }
  return nullptr;
}
}  // namespace

RecipePtr Leaver::recipe(PyObject* o) {
  struct Level {
    int& depth;
    explicit Level(int& d) : depth(d) { ++depth; }
    ~Level() { --depth; }
  } level(depth_);
  if (depth_ > kDeepestRecipe) throw NotRebuildable{"a chain of too many objects that refer to one another"};
  if (!o) return make(Recipe::Kind::Null);
  const Class c = m.classify(o);
  if (c == Class::Type && m.made_types.count(o)) throw NotRebuildable{"a class that the captured code made"};
  const bool slice = PySlice_Check(o) && !m.is_constant(o);  // of tensors
  if (m.is_open_number(o)) {
    if (auto s = m.number_sources.find(o); s != m.number_sources.end()) return source(s->second);
    RecipePtr r = make(m.is_size(o) ? Recipe::Kind::Size : Recipe::Kind::Real);
    r->index = m.output_of(o);
    if (!capture::is_of_numpy(o)) return r;
    RecipePtr in_class = make(Recipe::Kind::Call);
    in_class->object = class_of(o);
    in_class->parts.push_back(r);
    return in_class;
  }
  if (c == Class::Constant && !slice && PyTuple_Check(o) && m.size_among(&o, 1)) {  // a torch.Size
    RecipePtr items = make(Recipe::Kind::Tuple), r = make(Recipe::Kind::Call);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) items->parts.push_back(recipe(PyTuple_GET_ITEM(o, i)));
    r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(o)));
    r->parts.push_back(items);
    return r;
  }
  note_id(o);
  if ((c == Class::Constant && !slice) || c == Class::Type) return constant(o);
  if (m.is_text(o) && !made_.count(o)) {
    RecipePtr r = begin(o, Recipe::Kind::Call);
    r->object = py::check(PyObject_GetAttrString(o, "function"));
    const py::Ref args = py::check(PyObject_GetAttrString(o, "args"));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.get()); ++i)
      r->parts.push_back(recipe(PyTuple_GET_ITEM(args.get(), i)));
    return r;
  }
  if (m.is_masked(o) && !made_.count(o)) return masked(o);
  if (m.is_number(o) && !made_.count(o)) {
    if (auto s = m.number_sources.find(o); s != m.number_sources.end()) return made_[o] = source(s->second);
    RecipePtr r = begin(o, Recipe::Kind::Call);
    r->object = py::Ref::borrow(number_value_function());
    py::Ref tensor = py::Ref::steal(PyObject_GetAttrString(o, "tensor"));
    r->parts.push_back(recipe(tensor.get()));
    const py::Ref of_numpy = py::check(PyObject_GetAttrString(o, "numpy"));
    if (of_numpy.get() != Py_None) r->parts.push_back(constant(of_numpy.get()));
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
  if (!entered_.insert(o).second) throw NotRebuildable{"an object that contains itself"};
  Open entered{entered_, o};
  switch (c) {
    case Class::Tensor: {
      RecipePtr r = output(o);
      if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().parameter_type) r = parameter(r, THPVariable_Unpack(o));
      r = of_class(r, Py_TYPE(o));
      made_[o] = r;
      PyObject** slot = _PyObject_GetDictPtr(o);
      Py_ssize_t pos = 0;
      PyObject *name, *value;
      while (slot && *slot && PyDict_Next(*slot, &pos, &name, &value))  // what the program hung on it
        r->state.emplace_back(py::Ref::borrow(name), recipe(value));
      if (const at::Tensor& t = THPVariable_Unpack(o); t.is_leaf() && t.grad().defined()) {
        const py::Ref grad = py::Ref::steal(THPVariable_Wrap(t.grad()));
        r->state.emplace_back(py::Ref::borrow(names().grad), recipe(grad.get()));
      }
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
      open_.insert(o);
      Open open{open_, o};
      RecipePtr r = begin(o, Recipe::Kind::Call), list = make(Recipe::Kind::List);
      py::Ref items = py::Ref::steal(PySequence_List(o)), maxlen = py::Ref::steal(PyObject_GetAttrString(o, "maxlen"));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i)
        list->parts.push_back(recipe(PyList_GET_ITEM(items.get(), i)));
      r->object = py::Ref::borrow(names().deque);
      r->parts = {list, recipe(maxlen.get())};
      return r;
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
                  or_none(f->func_annotations ? PyFunction_GetAnnotations(o) : nullptr),  // until asked for, a tuple
                  constant(f->func_qualname),
                  or_none(f->func_doc),
                  or_none(f->func_module)};
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
    if (PyObject* d = descriptor_behind(o, self.get(), name.get())) {
      r->object = py::Ref::steal(PyObject_GetAttrString(d, "__get__"));
      // Without a class, CPython 3.11 looks into a null pointer for methods that ask for theirs (METH_METHOD).
      PyObject* const type = reinterpret_cast<PyObject*>(PyDescr_TYPE(d));
      r->parts = {recipe(self.get()), constant(type)};
    } else {
      r->object = py::Ref::borrow(getattr);
      r->parts = {recipe(self.get()), constant(name.get())};
    }
    return made_[o] = r;
  }
  if (c == Class::Singleton) return constant(o);
  if (o == Machine::unknown_traceback()) throw NotRebuildable{"a traceback"};
  if (PyGen_Check(o) || PyCoro_CheckExact(o)) throw NotRebuildable{"a suspended generator"};
  if (Py_TYPE(o) == &PySuper_Type) {
    py::Ref type = py::Ref::steal(PyObject_GetAttrString(o, "__thisclass__")),
            self = py::Ref::steal(PyObject_GetAttrString(o, "__self__"));
    RecipePtr r = make(Recipe::Kind::Call);
    r->object = py::Ref::borrow(reinterpret_cast<PyObject*>(&PySuper_Type));
    r->parts = {recipe(type.get()), recipe(self.get())};
    return made_[o] = r;
  }
  if (is_array(o)) return array(o);
  if (!(Py_TYPE(o)->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyExceptionInstance_Check(o)) return by_reduce(o);
  if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().partial || PyIter_Check(o)) {
    if (Py_TYPE(o)->tp_iternext && strncmp(Py_TYPE(o)->tp_name, "itertools.", 10) == 0) return by_reduce(o);
    if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().partial) return by_reduce(o);
  }
  if (is_getter(Py_TYPE(o))) return by_reduce(o);
  open_.erase(o);
  return instance(o);
}

}  // namespace kiln::capture
