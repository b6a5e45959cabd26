// Reading what existed before the call: stand-ins, their sources, and the guards on what was looked at.
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;
using GK = Guard::Kind;

namespace {
constexpr Py_ssize_t kLargestShadow = 20000;

bool is_enum(PyTypeObject* t) {
  static PyObject* meta = [] {
    PyObject* m = py::import_module("enum");
    return m ? PyObject_GetAttrString(m, "EnumMeta") : nullptr;
  }();
  return meta && PyObject_TypeCheck(reinterpret_cast<PyObject*>(t), reinterpret_cast<PyTypeObject*>(meta));
}
}  // namespace

Py_ssize_t base_size(PyObject* o) {
  if (PyTuple_Check(o) || PyList_Check(o)) return Py_SIZE(o);
  if (PyDict_Check(o)) return PyDict_GET_SIZE(o);
  if (PyAnySet_Check(o)) return PySet_GET_SIZE(o);
  return PyObject_Size(o);
}

bool is_len(PyObject* o) {
  static PyObject* const len = PyDict_GetItemString(PyEval_GetBuiltins(), "len");
  return o == len;
}

py::Ref base_items(PyObject* dict) {
  if (!PyODict_Check(dict)) return py::Ref::steal(PyDict_Items(dict));
  py::Ref items = py::Ref::steal(PyList_New(0));
  py311::each_of_ordered(dict, [&](PyObject* key, PyObject* value) {
    const py::Ref pair = value && items ? py::Ref::steal(PyTuple_Pack(2, key, value)) : py::Ref();
    if (!pair || PyList_Append(items.get(), pair.get()) < 0) items = {};
    return static_cast<bool>(items);
  });
  if (items && PyList_GET_SIZE(items.get()) == PyDict_GET_SIZE(dict)) return items;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "an OrderedDict that was written past its class");
  return {};
}

namespace {
/// The built-in container that a class in Python extends, if copies of its instances can stand for them: their state is
/// the container's and that of a __dict__, and nothing happens when a copy dies. Else null.
PyTypeObject* container_base(PyTypeObject* t) {
  if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE)) return nullptr;
  static PyObject* del = PyUnicode_InternFromString("__del__");
  if (_PyType_Lookup(t, del)) return nullptr;
  PyTypeObject* base = t;
  for (; base && (base->tp_flags & Py_TPFLAGS_HEAPTYPE); base = base->tp_base) {
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(base->tp_dict, &at, &name, &value))
      if (Py_TYPE(value) == &PyMemberDescr_Type) return nullptr;
  }
  const bool known = base == &PyDict_Type || base == &PyList_Type || base == &PyTuple_Type || base == &PySet_Type ||
                     base == &PyFrozenSet_Type || base == &PyODict_Type;
  return known ? base : nullptr;
}
}  // namespace

bool Machine::is_constant_type(PyTypeObject* t) {
  return t == &PyLong_Type || t == &PyFloat_Type || t == &PyUnicode_Type || t == &PyBytes_Type ||
         t == &PyComplex_Type || t == &PyBool_Type || t == Py_TYPE(Py_None) || t == &PyRange_Type ||
         t == &PySlice_Type || t == &THPDtypeType || t == &THPDeviceType || t == &THPLayoutType ||
         t == &THPMemoryFormatType || reinterpret_cast<PyObject*>(t) == names().size_type || is_numpy_scalar(t) ||
         (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE) &&
          (strcmp(t->tp_name, "decimal.Decimal") == 0 || strcmp(t->tp_name, "datetime.date") == 0 ||
           strcmp(t->tp_name, "datetime.timedelta") == 0));
}

Class Machine::classify_type(PyTypeObject* t) {
  if (t == &PyTuple_Type) return Class::Tuple;
  if (t == &PyList_Type) return Class::List;
  if (t == &PyDict_Type) return Class::Dict;
  auto it = classes_.find(t);
  if (it != classes_.end()) return it->second;
  const Names& n = names();
  auto* type = reinterpret_cast<PyObject*>(t);
  Class c = Class::Instance;
  if (t == &PyBool_Type || t == Py_TYPE(Py_None) || t == Py_TYPE(Py_Ellipsis) || t == Py_TYPE(Py_NotImplemented) ||
      t == &PyCFunction_Type || t == &PyMethodDescr_Type || t == &PyWrapperDescr_Type ||
      t == &PyClassMethodDescr_Type || t == &PyGetSetDescr_Type || t == &PyMemberDescr_Type || t == &PyCode_Type ||
      t == &_PyMethodWrapper_Type || is_enum(t))
    c = Class::Singleton;
  else if (is_constant_type(t))
    c = Class::Constant;
  else if (t == &PySet_Type)
    c = Class::Set;
  else if (t == &PyFrozenSet_Type)
    c = Class::FrozenSet;
  else if (type == n.ordered_dict)
    c = Class::OrderedDict;
  else if (type == n.default_dict)
    c = Class::DefaultDict;
  else if (type == n.deque)
    c = Class::Deque;
  else if (t == &PyFunction_Type)
    c = Class::Function;
  else if (t == &PyMethod_Type)
    c = Class::Method;
  else if (PyType_IsSubtype(t, &PyModule_Type))
    c = Class::Module;
  else if (PyType_IsSubtype(t, &PyType_Type))
    c = Class::Type;
  else if (THPVariableClass && PyType_IsSubtype(t, reinterpret_cast<PyTypeObject*>(THPVariableClass)))
    c = Class::Tensor;
  alive.push_back(py::Ref::borrow(type));
  classes_.emplace(t, c);
  return c;
}

Class Machine::classify(PyObject* o) { return classify_type(Py_TYPE(o)); }

bool Machine::is_constant(PyObject* o) {
  switch (classify(o)) {
    case Class::Constant:
      if (PySlice_Check(o)) {
        auto* s = reinterpret_cast<PySliceObject*>(o);
        return is_constant(s->start) && is_constant(s->stop) && is_constant(s->step);
      }
      return !(PyTuple_Check(o) && size_among(&o, 1));
    case Class::Singleton:
    case Class::Type:
      return true;
    case Class::Tuple:
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i)
        if (!is_constant(PyTuple_GET_ITEM(o, i))) return false;
      return true;
    case Class::FrozenSet: {
      Py_ssize_t pos = 0;
      PyObject* key;
      Py_hash_t hash;
      while (_PySet_NextEntry(o, &pos, &key, &hash))
        if (!is_constant(key)) return false;
      return true;
    }
    default:
      return false;
  }
}

// --- guards ----------------------------------------------------------------------------------------------------------

const std::shared_ptr<const graph::StackFrame>& Machine::place_of(py311::Frame* f) {
  auto& place = places_[f->prev_instr];
  if (!place) {
    PyCodeObject* code = f->f_code;
    alive.push_back(py::Ref::borrow(reinterpret_cast<PyObject*>(code)));  // another may not take its address
    const int line = PyCode_Addr2Line(code, py311::last_instruction(f) * static_cast<int>(sizeof(_Py_CODEUNIT)));
    place = std::make_shared<const graph::StackFrame>(
        graph::StackFrame{PyUnicode_AsUTF8(code->co_filename), PyUnicode_AsUTF8(code->co_qualname), line});
  }
  return place;
}

const std::shared_ptr<const std::string>& Machine::where() {
  py311::Frame* f = ts->cframe->current_frame;
  const _Py_CODEUNIT* at = f ? f->prev_instr : nullptr;
  if (at != last_where_instruction_) {
    last_where_instruction_ = at;
    last_where_ = nullptr;
    if (f)
      last_where_ = std::make_shared<const std::string>(place_of(f)->file + ":" + std::to_string(place_of(f)->line));
  }
  return last_where_;
}

void Machine::guard(GK kind, const SourcePtr& source, PyObject* object, uint64_t number, const SourcePtr& other) {
  SourceKey key{static_cast<int>(kind), source.get(), object,
                static_cast<int64_t>(reinterpret_cast<intptr_t>(other.get()))};
  if (kind == GK::Equals || kind == GK::Type || kind == GK::Contents) key.key = nullptr;
  if (!guards_taken_.insert(key).second) return;
  Guard g;
  g.kind = kind;
  g.source = source;
  g.other = other;
  g.object = py::Ref::borrow(object);
  g.number = number;
  g.where = where();
  result.guards.push_back(std::move(g));
}

SourcePtr Machine::child(SK kind, const SourcePtr& base, PyObject* key, int64_t i) {
  SourceKey k{static_cast<int>(kind), base.get(), key, i};
  SourcePtr& slot = sources_[k];
  if (slot) return slot;
  if (key) alive.push_back(py::Ref::borrow(key));
  auto text = [&] { return std::string(PyUnicode_AsUTF8(key)); };
  switch (kind) {
    case SK::Local:
      slot = guards::local(i, text());
      break;
    case SK::Attr:
      slot = guards::attr(base, text());
      break;
    case SK::InstanceDict:
      slot = guards::instance_dict(base);
      break;
    case SK::DictItem:
      slot = guards::dict_item(base, key);
      break;
    case SK::ListItem:
      slot = guards::list_item(base, i);
      break;
    case SK::DictKeyAt:
      slot = guards::dict_key_at(base, i);
      break;
    case SK::SetItemAt:
      slot = guards::set_item_at(base, i);
      break;
    case SK::CellContents:
      slot = guards::cell_contents(base);
      break;
    case SK::Type:
      slot = guards::type_of(base);
      break;
    case SK::WeakRef:
      slot = guards::weakref(base);
      break;
    case SK::Length:
      slot = guards::length(base);
      break;
    case SK::Index:
      slot = guards::index(base);
      break;
    case SK::ArrayMemory:
      slot = guards::array_memory(base);
      break;
    case SK::FunctionMode:
      slot = guards::function_mode(i);
      break;
    case SK::Const: {
      std::string name = Py_TYPE(key)->tp_name;
      if (PyType_Check(key))
        name = reinterpret_cast<PyTypeObject*>(key)->tp_name;
      else if (PyFunction_Check(key))
        name = PyUnicode_AsUTF8(reinterpret_cast<PyFunctionObject*>(key)->func_qualname);
      else if (PyModule_Check(key))
        name = PyModule_GetName(key) ? PyModule_GetName(key) : (PyErr_Clear(), "module");
      slot = guards::constant(key, name);
      break;
    }
    case SK::Global:
      slot = guards::global(base->object.get(), text());
      break;
    default:
      throw InternalError("this kind of source has no child()");
  }
  return slot;
}

SourcePtr Machine::item_at(const SourcePtr& dict, const SourcePtr& key) {
  SourcePtr& slot = sources_[{static_cast<int>(SK::DictItemAt), dict.get(), nullptr,
                              static_cast<int64_t>(reinterpret_cast<intptr_t>(key.get()))}];
  if (!slot) slot = guards::dict_item_at(dict, key);
  return slot;
}

SourcePtr Machine::source_of_object(PyObject* o) {
  if (Known* k = find(o)) return k->source;
  return child(SK::Const, nullptr, o);
}

Known& Machine::remember(Known k) {
  const int i = static_cast<int>(knowns.size());
  knowns.push_back(std::move(k));
  Known& kept = knowns.back();
  index[kept.stand_in.get()] = i;
  if (kept.real && kept.real.get() != kept.stand_in.get())
    (is_constant(kept.real.get()) ? index_of_numbers : index)[kept.real.get()] = i;
  return kept;
}

void Machine::remember_constant(PyObject* o) {
  if (const Known* k = find(o)) {
    // It was met on a path of its own, where another might be next time.
    if (k->source->kind != SK::Const) guard(GK::Is, k->source, o);
    return;
  }
  Known k;
  k.source = child(SK::Const, nullptr, o);
  k.real = py::Ref::borrow(o);
  k.stand_in = k.real;
  k.active = true;
  remember(std::move(k));
}

// --- seeing ----------------------------------------------------------------------------------------------------------

PyObject* Machine::see(PyObject* o, const SourcePtr& source) {
  const Class c = classify(o);
  switch (c) {
    case Class::Constant:
      if (is_changing(o, source)) return number_for(o, source);
      if (Py_IS_TYPE(o, &THPSizeType))
        if (PyObject* sizes = changing_shape(o, source); sizes || PyErr_Occurred()) return sizes;
      guard_constant(source, o);
      return Py_NewRef(o);
    case Class::Singleton:
    case Class::Type:
      if (!guard_method_on_stack(o, source)) guard_constant(source, o);
      if (PyErr_Occurred()) return nullptr;
      remember_bound(o, source);
      return Py_NewRef(o);
    case Class::Tuple:
    case Class::FrozenSet:
      if (is_constant(o) && !is_changing(o, source)) {
        guard_constant(source, o);
        return Py_NewRef(o);
      }
      break;
    default:
      break;
  }
  PyObject* s = stand_in(o, source);
  if (s && !observe(s)) Py_CLEAR(s);
  return s;
}

bool Machine::guard_method_on_stack(PyObject* o, const SourcePtr& source) {
  if (!options.resumes || source->kind != SK::Local || !PyCFunction_CheckExact(o)) return false;
  PyObject* const self = PyCFunction_GET_SELF(o);
  if (!self || PyModule_Check(self) || PyType_Check(self) || classify(self) != Class::Instance) return false;
  static PyObject *const of = PyUnicode_InternFromString("__self__"), *const name =
                                                                          PyUnicode_InternFromString("__name__");
  guard(GK::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
  const py::Ref called = py::Ref::steal(PyObject_GetAttr(o, name));
  const py::Ref seen = py::Ref::steal(called ? see(self, child(SK::Attr, source, of)) : nullptr);
  if (!seen) return false;
  guard_constant(child(SK::Attr, source, name), called.get());
  return true;
}

void Machine::remember_bound(PyObject* o, const SourcePtr& source) {
  if (!PyCFunction_Check(o) || find(o)) return;
  PyObject* self = PyCFunction_GET_SELF(o);
  if (!self || PyModule_Check(self)) return;
  Known k;
  k.source = source;
  k.real = py::Ref::borrow(o);
  k.stand_in = k.real;
  k.active = true;
  remember(std::move(k));
}

PyObject* Machine::stand_in(PyObject* o, const SourcePtr& source) {
  const Class c = classify(o);
  Known* known = find(o);
  if (const auto it = index_of_numbers.find(o); !known && it != index_of_numbers.end()) known = &knowns[it->second];
  if (Known* k = known) {
    // One object on two paths, which may lead to two next time. What it is on a path of constants, it is for good.
    const bool first = k->source->kind == SK::Const, second = source->kind == SK::Const;  // of constants
    if (k->source == source || (first && second)) return k->stand_in.new_ref();
    if (first || second) {
      guard(GK::Is, first ? source : k->source, k->real.get());
    } else if ((c == Class::Function || c == Class::Module) && !k->alike) {
      guard(GK::Is, source, k->real.get());
      if (!activate(*k)) return nullptr;
    } else {
      guard(GK::SameObject, source, nullptr, 0, k->source);
    }
    return k->stand_in.new_ref();
  }
  if (is_container(c)) return make_shadow(o, c, source);
  if (PyObject* dict = py311::dict_behind(o)) return make_proxy(o, dict, source);
  switch (c) {
    case Class::Constant:
    case Class::Singleton:
    case Class::Type:
      return Py_NewRef(o);
    case Class::Tensor:
      return make_fake(o, source);
    case Class::Instance:
      if (PyTypeObject* base = container_base(Py_TYPE(o))) return make_shadow(o, classify_type(base), source);
      break;
    default:
      break;
  }
  Known k;
  k.source = source;
  k.real = py::Ref::borrow(o);
  k.stand_in = k.real;
  k.active = c == Class::Module && source->kind == SK::Const;
  k.alike = c == Class::Function && options.changing_functions && !options.changing_functions->empty() &&
            options.changing_functions->contains(source->id());
  remember(std::move(k));
  return Py_NewRef(o);
}

bool Machine::activate(Known& k) {
  if (k.active) return true;
  if (stays_unread(k)) return true;
  // What is in it is looked at, too, whatever it is loaded for.
  const auto go_on_loading = c10::make_scope_exit([this, by = std::exchange(loading, nullptr)] { loading = by; });
  k.active = true;
  PyObject* o = k.real.get();
  switch (k.kind) {
    case Known::Kind::Proxy:
      break;
    case Known::Kind::Tensor: {
      const at::Tensor& t = THPVariable_Unpack(o);
      Guard g;
      g.kind = GK::Tensor;
      g.source = k.source;
      g.object = py::Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(o)));
      g.number = t.key_set().raw_repr();
      g.meta = aten::meta_of(t);
      g.is_leaf = !t.grad_fn();
      if (trace.sizes) g.any_dims = open_dims(k);
      g.where = where();
      // That it is not None, it may have been asked before.
      if (guards_taken_.contains({static_cast<int>(GK::Type), k.source.get(), nullptr, 0}))
        std::erase_if(result.guards,
                      [&](const Guard& taken) { return taken.kind == GK::Type && taken.source == g.source; });
      result.guards.push_back(std::move(g));
      break;
    }
    case Known::Kind::Shadow: {
      auto* type = reinterpret_cast<PyObject*>(Py_TYPE(o));
      guard(GK::Type, k.source, type, py311::type_version(Py_TYPE(o)));
      const Py_ssize_t n = base_size(o);
      if (k.attributes) {
        py::Ref names_now = py::Ref::steal(PyDict_Keys(k.attributes.get()));
        names_now = py::Ref::steal(PyList_AsTuple(names_now.get()));
        guard(GK::Keys, child(SK::InstanceDict, k.source, nullptr), names_now.get());
      }
      if (PyDict_Check(o)) {
        py::Ref keys = py::Ref::steal(PyTuple_New(n));
        if (!keys) return false;
        const py::Ref items = base_items(o);
        if (!items) return false;
        bool constant = true;
        for (Py_ssize_t i = 0; i < n; ++i) {
          PyObject* const key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
          PyTuple_SET_ITEM(keys.get(), i, Py_NewRef(key));
          constant = constant && is_constant(key);
          if (py::is_tensor(key)) guard_identity(key);
        }
        if (!guard_factory(k)) return false;
        if (constant)
          guard(GK::Keys, k.source, keys.get());
        else
          guard(GK::Length, k.source, nullptr, static_cast<uint64_t>(n));
      } else if (k.whole) {
        py::Ref elements = py::Ref::steal(PySequence_Tuple(o));
        if (!elements) return false;
        guard(GK::Keys, k.source, elements.get());
      } else {
        guard(GK::Length, k.source, nullptr, static_cast<uint64_t>(n));
      }
      for (auto& [source, value] : k.constants) guard_constant(source, value.get());
      for (auto& [source, value] : k.met_again)
        if (!py::Ref::steal(stand_in(value.get(), source))) return false;
      // C code that is given a container looks at what is in it: at lists within lists (==, sum), at sizes of tensors.
      // A dict's lists wait until somebody does: one that keeps a history is only appended to.
      for (const py::Ref& v : k.contents)
        if (!(PyDict_Check(o) && PyList_CheckExact(v.get())) && !observe(v.get())) return false;
      break;
    }
    case Known::Kind::Plain:
      switch (classify(o)) {
        case Class::Function:
          if (k.alike) {
            guard_alike(k);
            break;
          }
          [[fallthrough]];
        case Class::Module:
          guard(GK::Is, k.source, o);
          break;
        default:
          guard(GK::Type, k.source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
          if (classify(o) == Class::Instance && c_state(Py_TYPE(o)) == CState::Value) guard(GK::Equals, k.source, o);
      }
  }
  return true;
}

bool Machine::guard_factory(const Known& k) {
  PyObject* const dict = k.real.get();
  if (!PyObject_TypeCheck(dict, reinterpret_cast<PyTypeObject*>(names().default_dict))) return true;
  static PyObject* const name = PyUnicode_InternFromString("default_factory");
  const py::Ref factory = py::Ref::steal(PyObject_GetAttr(dict, name));
  const SourcePtr source = child(SK::Attr, k.source, name);
  if (factory && PyFunction_Check(factory.get())) return static_cast<bool>(py::Ref::steal(see(factory.get(), source)));
  guard(GK::Is, source, factory.get());
  return static_cast<bool>(factory);
}

void Machine::guard_alike(const Known& k) {
  auto* f = reinterpret_cast<PyFunctionObject*>(k.real.get());
  const auto part = [&](const char* name) {
    return child(SK::Attr, k.source, py::Ref::steal(PyUnicode_InternFromString(name)).get());
  };
  guard(GK::Type, k.source, reinterpret_cast<PyObject*>(&PyFunction_Type), py311::type_version(&PyFunction_Type));
  guard(GK::Is, part("__code__"), f->func_code);
  guard(GK::Is, part("__globals__"), f->func_globals);
  // Which arguments may be left out, and what they are then: objects are looked at where they are used.
  const SourcePtr defaults = child(SK::Attr, k.source, names().defaults),
                  kwdefaults = child(SK::Attr, k.source, names().kwdefaults);
  if (!f->func_defaults) guard(GK::Is, defaults, Py_None);
  if (!f->func_kwdefaults) guard(GK::Is, kwdefaults, Py_None);
  if (f->func_defaults) {
    guard(GK::Length, defaults, nullptr, static_cast<uint64_t>(PyTuple_GET_SIZE(f->func_defaults)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f->func_defaults); ++i)
      if (PyObject* v = PyTuple_GET_ITEM(f->func_defaults, i); is_constant(v))
        guard_constant(child(SK::ListItem, defaults, nullptr, i), v);
  }
  if (f->func_kwdefaults) {
    guard(GK::Keys, kwdefaults, py::Ref::steal(PySequence_Tuple(f->func_kwdefaults)).get());
    Py_ssize_t at = 0;
    PyObject *name, *v;
    while (PyDict_Next(f->func_kwdefaults, &at, &name, &v))
      if (is_constant(v)) guard_constant(child(SK::DictItem, kwdefaults, name), v);
  }
}

void Machine::guard_constant(const SourcePtr& source, PyObject* v) {
  const Class c = classify(v);
  guard(c == Class::Constant || c == Class::Tuple || c == Class::FrozenSet ? GK::Equals : GK::Is, source, v);
}

// --- stand-ins -------------------------------------------------------------------------------------------------------

PyObject* Machine::make_fake(PyObject* tensor, const SourcePtr& source) {
  if (is_uninitialized(tensor)) return put_off("a lazy module waits for its first input");
  if (!captures_class(tensor)) return break_at_class(tensor);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  const at::Tensor real = THPVariable_Unpack(tensor);
  std::string why;
  at::Tensor fake;
  if (real._is_zerotensor())
    return graph_break("unsupported-tensor", source->text() + " is a zero tensor without memory");
  {
    aten::RecordingPaused paused;
    try {
      (void)real.grad_fn();  // throws for a view whose base was written where autograd forbids it, and so does its use
      fake = aten::make_fake(real);
    } catch (const c10::Error& e) {
      why = e.what_without_backtrace();
    } catch (const std::exception& e) {
      why = e.what();
    }
  }
  if (!fake.defined()) return graph_break("unsupported-tensor", source->text() + ": " + why);
  PyObject* stand_in = THPVariable_Wrap(fake);
  if (!stand_in) return nullptr;
  if (type != names().tensor_type && !take_class(stand_in, type)) {
    Py_DECREF(stand_in);
    return nullptr;
  }
  Known k;
  k.kind = Known::Kind::Tensor;
  k.source = source;
  k.real = py::Ref::borrow(tensor);
  k.stand_in = py::Ref::borrow(stand_in);
  remember(std::move(k));
  return stand_in;
}

PyObject* Machine::make_proxy(PyObject* o, PyObject* dict, const SourcePtr& source) {
  // The proxy itself is guarded: it is of one dict for good, which its own type does not give out.
  guard(GK::Is, source, o);
  const py::Ref shadow = py::Ref::steal(see(dict, guards::constant(dict, source->text() + ".mapping")));
  PyObject* stand_in = shadow ? PyDictProxy_New(shadow.get()) : nullptr;
  if (!stand_in) return nullptr;
  Known k;
  k.kind = Known::Kind::Proxy;
  k.active = true;
  k.source = source;
  k.real = py::Ref::borrow(o);
  k.stand_in = py::Ref::borrow(stand_in);
  remember(std::move(k));
  return stand_in;
}

PyObject* Machine::make_shadow(PyObject* o, Class c, const SourcePtr& source) {
  const Py_ssize_t n = base_size(o);
  if (n < 0) return nullptr;
  // An instance of a class that extends the container: its copy is one too, made and filled by the container's own
  // means.
  PyTypeObject* subclass = Py_TYPE(o)->tp_flags & Py_TPFLAGS_HEAPTYPE ? Py_TYPE(o) : nullptr;
  auto make_empty = [&](PyTypeObject* base, PyObject* content) {
    py::Ref args = py::Ref::steal(content ? PyTuple_Pack(1, content) : PyTuple_New(0));
    return args ? py::Ref::steal(base->tp_new(subclass, args.get(), nullptr)) : py::Ref();
  };
  if (!deferred.empty() && o == recorded_warnings())
    return graph_break("call-that-breaks", "a read of the recorded warnings, behind one");
  if (n > kLargestShadow)
    return graph_break("large-container", source->text() + " has " + std::to_string(n) + " elements");
  if (is_namespace(o)) {
    if (globals_written.contains(o))
      return graph_break("call-that-breaks", "a look at a module's dict, behind a change of its variables");
    namespaces_.insert(o);
  }
  Known fresh;
  fresh.kind = Known::Kind::Shadow;
  fresh.source = source;
  fresh.real = py::Ref::borrow(o);
  py::Ref copy, snapshot = py::Ref::steal(PyList_New(0));
  if (!snapshot) return nullptr;
  // Tuples and frozensets cannot be filled after they are known; they cannot contain themselves either.
  std::vector<std::pair<SourcePtr, py::Ref>> constants;
  std::vector<py::Ref> inner;
  std::vector<std::pair<SourcePtr, py::Ref>> met_again;
  auto stand_in_later_guarded = [&](PyObject* v, const SourcePtr& s) -> py::Ref {
    const Known* before = find(v);
    if (!before) return py::Ref::steal(stand_in(v, s));
    if (before->source != s) met_again.emplace_back(s, py::Ref::borrow(v));
    return before->stand_in;
  };
  auto element = [&](PyObject* v, const SourcePtr& s) -> py::Ref {
    const bool changing = is_changing(v, s);
    if (changing && !PyTuple_CheckExact(v)) return py::Ref::steal(number_for(v, s));
    if (!changing && is_constant(v)) {
      constants.emplace_back(s, py::Ref::borrow(v));
      return py::Ref::borrow(v);
    }
    py::Ref stand = stand_in_later_guarded(v, s);
    if (Known* k = stand ? find(stand.get()) : nullptr;
        k &&
        (k->kind != Known::Kind::Plain || (classify(v) == Class::Instance && c_state(Py_TYPE(v)) == CState::Value)))
      inner.push_back(py::Ref::borrow(stand.get()));
    return stand;
  };
  auto keep = [&](const py::Ref& v) { return PyList_Append(snapshot.get(), v.get()) == 0; };
  auto known = [&](PyObject* stand) -> size_t {
    fresh.stand_in = py::Ref::borrow(stand);
    fresh.snapshot = snapshot;
    const size_t at = knowns.size();
    remember(std::move(fresh));
    return at;
  };
  size_t at = 0;
  switch (c) {
    case Class::Tuple: {
      copy = py::Ref::steal(PyTuple_New(n));
      if (!copy) return nullptr;
      for (Py_ssize_t i = 0; i < n; ++i) {
        py::Ref v = element(PyTuple_GET_ITEM(o, i), child(SK::ListItem, source, nullptr, i));
        if (!v) return nullptr;
        PyTuple_SET_ITEM(copy.get(), i, v.release());
      }
      if (subclass) copy = make_empty(&PyTuple_Type, copy.get());
      if (!copy) return nullptr;
      at = known(copy.get());
      break;
    }
    case Class::List: {
      copy = subclass ? make_empty(&PyList_Type, nullptr) : py::Ref::steal(PyList_New(0));
      if (!copy) return nullptr;
      at = known(copy.get());
      for (Py_ssize_t i = 0; i < n; ++i) {
        py::Ref v = element(PyList_GET_ITEM(o, i), child(SK::ListItem, source, nullptr, i));
        if (!v || PyList_Append(copy.get(), v.get()) < 0 || !keep(v)) return nullptr;
      }
      break;
    }
    case Class::Deque: {
      static PyObject* maxlen_name = PyUnicode_InternFromString("maxlen");
      py::Ref nothing = py::Ref::steal(PyTuple_New(0)), maxlen = py::Ref::steal(PyObject_GetAttr(o, maxlen_name));
      if (!nothing || !maxlen) return nullptr;
      copy = py::Ref::steal(PyObject_CallFunctionObjArgs(names().deque, nothing.get(), maxlen.get(), nullptr));
      if (!copy) return nullptr;
      at = known(copy.get());
      constants.emplace_back(child(SK::Attr, source, maxlen_name), maxlen);
      for (Py_ssize_t i = 0; i < n; ++i) {
        py::Ref real = py::Ref::steal(PySequence_GetItem(o, i));
        py::Ref v = real ? element(real.get(), child(SK::ListItem, source, nullptr, i)) : py::Ref();
        py::Ref done = py::Ref::steal(v ? PyObject_CallMethodOneArg(copy.get(), names().append, v.get()) : nullptr);
        if (!done || !keep(v)) return nullptr;
      }
      break;
    }
    case Class::Set:
    case Class::FrozenSet: {
      Py_ssize_t pos = 0, i = 0;
      PyObject* key;
      Py_hash_t hash;
      std::vector<py::Ref> elements;
      while (_PySet_NextEntry(o, &pos, &key, &hash)) elements.push_back(py::Ref::borrow(key));
      // Constants are guarded together: to come to an element by its number, one goes past all that stand before it.
      fresh.whole = std::all_of(elements.begin(), elements.end(), [this](const py::Ref& r) {
        return is_constant(r.get()) && !PyLong_CheckExact(r.get()) && !PyFloat_CheckExact(r.get());
      });
      py::Ref list = py::Ref::steal(PyList_New(0));
      bool themselves = true;
      for (const py::Ref& r : elements) {
        py::Ref v = fresh.whole ? r : element(r.get(), child(SK::SetItemAt, source, nullptr, i++));
        if (!v || PyList_Append(list.get(), v.get()) < 0 || !keep(v)) return nullptr;
        themselves &= v.get() == r.get();
      }
      // Stand-ins have hashes, and places, of their own.
      PyObject* const given = themselves ? nullptr : list.get();
      if (c == Class::Set)
        copy = subclass ? make_empty(&PySet_Type, nullptr) : py::Ref::steal(PySet_New(nullptr));
      else
        copy = subclass ? make_empty(&PyFrozenSet_Type, given) : py::Ref::steal(PyFrozenSet_New(given));
      if (!copy) return nullptr;
      if (themselves ? !py311::copy_set(copy.get(), o) : c == Class::Set && _PySet_Update(copy.get(), given) < 0)
        return nullptr;
      at = known(copy.get());
      break;
    }
    case Class::Dict:
    case Class::OrderedDict:
    case Class::DefaultDict: {
      if (c == Class::DefaultDict) {
        py::Ref factory = py::Ref::steal(PyObject_GetAttrString(o, "default_factory"));
        copy = py::Ref::steal(PyObject_CallOneArg(names().default_dict, factory.get()));
      } else if (subclass) {
        copy = make_empty(c == Class::Dict ? &PyDict_Type : &PyODict_Type, nullptr);
      } else {
        copy = py::Ref::steal(c == Class::Dict ? PyDict_New() : PyObject_CallNoArgs(names().ordered_dict));
      }
      if (!copy) return nullptr;
      at = known(copy.get());
      py::Ref items = base_items(o);
      if (!items) return nullptr;
      for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject* pair = PyList_GET_ITEM(items.get(), i);
        PyObject* real_key = PyTuple_GET_ITEM(pair, 0);
        py::Ref key = py::Ref::borrow(real_key);
        SourcePtr value_source;
        if (is_constant(real_key)) {
          value_source = child(SK::DictItem, source, real_key);
        } else {
          const SourcePtr place = child(SK::DictKeyAt, source, nullptr, i);
          key = stand_in_later_guarded(real_key, place);
          if (key && is_container(classify(real_key)) && !observe(key.get()))
            return nullptr;  // it is hashed and compared
          const Known* const k = find(real_key);
          value_source = item_at(source, k ? k->source : place);
        }
        py::Ref v = key ? element(PyTuple_GET_ITEM(pair, 1), value_source) : py::Ref();
        if (!v) return nullptr;
        // What computes a tensor's hash would look at it.
        const bool by_id = py::is_tensor(real_key) && py::hashes_by_id(real_key);
        const Hashing hashing(*this, key.get());
        const int rc = PyODict_Check(copy.get()) ? PyODict_SetItem(copy.get(), key.get(), v.get())
                       : by_id ? _PyDict_SetItem_KnownHash(copy.get(), key.get(), v.get(), py::hash_of_id(real_key))
                               : PyDict_SetItem(copy.get(), key.get(), v.get());
        if (rc < 0 || !keep(key) || !keep(v)) return nullptr;
      }
      break;
    }
    default:
      return graph_break("container-from-outside", source->text() + " is a " + Py_TYPE(o)->tp_name);
  }
  // An OrderedDict has attributes too, if seldom.
  PyObject** slot = subclass || c == Class::OrderedDict ? _PyObject_GetDictPtr(o) : nullptr;
  if (slot && (subclass || (*slot && PyDict_GET_SIZE(*slot)))) {
    py::Ref real = py::Ref::steal(PyObject_GenericGetDict(o, nullptr));
    py::Ref attributes = real ? py::Ref::steal(PyObject_GenericGetDict(copy.get(), nullptr)) : py::Ref();
    if (!attributes) return nullptr;
    Py_ssize_t pos = 0;
    PyObject *name, *value;
    while (PyDict_Next(real.get(), &pos, &name, &value)) {
      py::Ref v = element(value, child(SK::DictItem, child(SK::InstanceDict, source, nullptr), name));
      if (!v || PyDict_SetItem(attributes.get(), name, v.get()) < 0) return nullptr;
    }
    knowns[at].attributes = py::Ref::steal(PyDict_Copy(attributes.get()));
  }
  if (PyDict_Check(copy.get())) knowns[at].version = py311::dict_version(copy.get());
  knowns[at].constants = std::move(constants);
  knowns[at].contents = std::move(inner);
  knowns[at].met_again = std::move(met_again);
  return copy.release();
}

}  // namespace kiln::capture
