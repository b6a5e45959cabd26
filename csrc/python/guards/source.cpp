#include "python/guards/source.h"

#include <cstdio>
#include <regex>

#include "python/guards/text.h"

namespace kiln::guards {

std::string repr_of(PyObject* o, size_t limit) {
  // Called for printing only; a repr that raises must not disturb the caller.
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text;
  PyTypeObject* t = Py_TYPE(o);
  const bool heap = (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0;
  // A user's class may have a __repr__ in Python: no user code runs for a printout.
  if (PyType_Check(o)) {
    text = reinterpret_cast<PyTypeObject*>(o)->tp_name;
    if (reinterpret_cast<PyTypeObject*>(o)->tp_flags & Py_TPFLAGS_HEAPTYPE) {
      auto* heap_type = reinterpret_cast<PyHeapTypeObject*>(o);
      if (heap_type->ht_qualname) text = PyUnicode_AsUTF8(heap_type->ht_qualname);
    }
  } else if (!heap && !PyDict_Check(o) && !PyList_Check(o)) {
    py::Ref r = py::Ref::steal(PyObject_Repr(o));
    const char* utf8 = r ? PyUnicode_AsUTF8(r.get()) : nullptr;
    text = utf8 ? utf8 : "";
  }
  if (text.empty()) text = std::string("<") + t->tp_name + " object>";
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
  if (text.size() > limit) text = text.substr(0, limit) + "...";
  return text;
}

namespace {

/// Tells objects apart that look alike: of another class, or at another address.
std::string at_address(const void* o) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "@%zx", reinterpret_cast<size_t>(o));
  return digits;
}

/// A text that no other key of one dict has.
std::string key_id(PyObject* o) {
  if (PyTuple_CheckExact(o)) {
    std::string text = "(";
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) text += key_id(PyTuple_GET_ITEM(o, i)) + ",";
    return text + ")";
  }
  const bool by_value = PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || PyLong_CheckExact(o) ||
                        PyFloat_CheckExact(o) || PyComplex_CheckExact(o);
  return by_value ? repr_of(o, std::string::npos) : repr_of(o) + at_address(o);
}

}  // namespace

std::string Source::text() const { return text(/*unique=*/false); }
std::string Source::id() const { return text(/*unique=*/true); }

std::string shown(const std::string& id) {
  static const std::regex address("@[0-9a-f]+");
  return std::regex_replace(id, address, "");
}

std::string Source::text(bool unique) const {
  const auto of_base = [&] { return base ? base->text(unique) : std::string("?"); };
  switch (kind) {
    case Kind::Local:
      return "L['" + name + "']";
    case Kind::Cell:
      return "C['" + name + "']";
    case Kind::CellObject:
      return "cell(" + name + ")";
    case Kind::Global:
      return "G" + (unique ? at_address(object.get()) : "") + "['" + name + "']";
    case Kind::Const:
      return (name.empty() ? repr_of(object.get()) : name) + (unique ? at_address(object.get()) : "");
    case Kind::Attr:
      return of_base() + "." + name;
    case Kind::InstanceDict:
      return of_base() + ".__dict__";
    case Kind::DictItem:
      return of_base() + "[" + (unique ? key_id(object.get()) : repr_of(object.get())) + "]";
    case Kind::DictItemAt:
      return of_base() + "[" + (key_source ? key_source->text(unique) : "?") + "]";
    case Kind::ListItem:
      return of_base() + "[" + std::to_string(index) + "]";
    case Kind::DictKeyAt:
      return "list(" + of_base() + ")[" + std::to_string(index) + "]";
    case Kind::SetItemAt:
      return "tuple(" + of_base() + ")[" + std::to_string(index) + "]";
    case Kind::CellContents:
      return of_base() + ".cell_contents";
    case Kind::Type:
      return "type(" + of_base() + ")";
    case Kind::WeakRef:
      return of_base() + "()";
    case Kind::Length:
      return "len(" + of_base() + ")";
    case Kind::Index:
      return "index(" + of_base() + ")";
    case Kind::ArrayMemory:
      return "torch.from_numpy(" + of_base() + ")";
    case Kind::FunctionMode:
      return "torch_function_modes()[" + std::to_string(index) + "]";
  }
  return "?";
}

namespace {
std::shared_ptr<Source> make(Source::Kind kind, SourcePtr base) {
  auto s = std::make_shared<Source>();
  s->kind = kind;
  s->base = std::move(base);
  return s;
}
}  // namespace

SourcePtr local(int64_t index, std::string name) {
  auto s = make(Source::Kind::Local, nullptr);
  s->index = index;
  s->name = std::move(name);
  return s;
}
SourcePtr cell(int64_t index, std::string name) {
  auto s = make(Source::Kind::Cell, nullptr);
  s->index = index;
  s->name = std::move(name);
  return s;
}
SourcePtr cell_object(int64_t index, std::string name) {
  auto s = make(Source::Kind::CellObject, nullptr);
  s->index = index;
  s->name = std::move(name);
  return s;
}
SourcePtr global(PyObject* dict, std::string name) {
  auto s = make(Source::Kind::Global, nullptr);
  s->object = py::Ref::borrow(dict);
  s->name = std::move(name);
  return s;
}
SourcePtr constant(PyObject* object, std::string name) {
  auto s = make(Source::Kind::Const, nullptr);
  s->object = py::Ref::borrow(object);
  s->name = std::move(name);
  return s;
}
SourcePtr attr(SourcePtr base, std::string name) {
  auto s = make(Source::Kind::Attr, std::move(base));
  s->name = std::move(name);
  return s;
}
SourcePtr instance_dict(SourcePtr base) { return make(Source::Kind::InstanceDict, std::move(base)); }
SourcePtr dict_item(SourcePtr base, PyObject* key) {
  auto s = make(Source::Kind::DictItem, std::move(base));
  s->object = py::Ref::borrow(key);
  return s;
}
SourcePtr dict_item_at(SourcePtr base, SourcePtr key) {
  auto s = make(Source::Kind::DictItemAt, std::move(base));
  s->key_source = std::move(key);
  return s;
}
SourcePtr list_item(SourcePtr base, int64_t index) {
  auto s = make(Source::Kind::ListItem, std::move(base));
  s->index = index;
  return s;
}
SourcePtr dict_key_at(SourcePtr base, int64_t index) {
  auto s = make(Source::Kind::DictKeyAt, std::move(base));
  s->index = index;
  return s;
}
SourcePtr set_item_at(SourcePtr base, int64_t index) {
  auto s = make(Source::Kind::SetItemAt, std::move(base));
  s->index = index;
  return s;
}
SourcePtr cell_contents(SourcePtr base) { return make(Source::Kind::CellContents, std::move(base)); }
SourcePtr type_of(SourcePtr base) { return make(Source::Kind::Type, std::move(base)); }
SourcePtr weakref(SourcePtr base) { return make(Source::Kind::WeakRef, std::move(base)); }
SourcePtr length(SourcePtr base) { return make(Source::Kind::Length, std::move(base)); }
SourcePtr index(SourcePtr base) { return make(Source::Kind::Index, std::move(base)); }
SourcePtr array_memory(SourcePtr base) { return make(Source::Kind::ArrayMemory, std::move(base)); }
SourcePtr function_mode(int64_t index) {
  auto s = make(Source::Kind::FunctionMode, nullptr);
  s->index = index;
  return s;
}

}  // namespace kiln::guards
