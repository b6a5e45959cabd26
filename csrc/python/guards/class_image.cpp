#include "python/guards/class_image.h"

#include <algorithm>
#include <unordered_map>

#include "python/cpython/py311.h"

namespace kiln::guards {

namespace {
using NumbersOfClasses = std::unordered_map<PyTypeObject*, py::Ref>;  // names, as sets
NumbersOfClasses& admitted() {
  static auto* numbers = new NumbersOfClasses();
  return *numbers;
}
NumbersOfClasses& found() {
  static auto* numbers = new NumbersOfClasses();
  return *numbers;
}

bool has(const py::Ref& names, PyObject* name) { return names && PySet_Contains(names.get(), name) == 1; }
const py::Ref& names_of(const NumbersOfClasses& numbers, PyTypeObject* type) {
  static const py::Ref none;
  const auto it = numbers.find(type);
  return it == numbers.end() ? none : it->second;
}
bool are_numbers(PyObject* a, PyObject* b) {
  return Py_TYPE(a) == Py_TYPE(b) && (PyLong_CheckExact(a) || PyFloat_CheckExact(a));
}
/// The class in `type`'s method resolution order that has the attribute.
PyTypeObject* owner_of(PyTypeObject* type, PyObject* name) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if (PyDict_Contains(base->tp_dict, name) == 1) return base;
  }
  return nullptr;
}
}  // namespace

static int at_work = 0;  // the ChangingNumbers that live

ChangingNumbers::~ChangingNumbers() { --at_work; }
ChangingNumbers::ChangingNumbers() {
  if (at_work++) return;
  for (auto& [type, names] : found()) {
    py::Ref& known = admitted()[type];
    known = known ? py::Ref::steal(PyNumber_Or(known.get(), names.get())) : names;
  }
  found().clear();
}

bool is_changing_number(PyTypeObject* type, PyObject* name) {
  if (admitted().empty()) return false;
  PyTypeObject* const owner = owner_of(type, name);
  return owner && has(names_of(admitted(), owner), name);
}

bool has_changing_number(PyTypeObject* type) {
  if (admitted().empty()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i)
    if (admitted().contains(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i)))) return true;
  return false;
}

/// One class's own attributes; classes derived from it share the image. Its owner is alive while a class is that
/// derives from it.
struct DictImage {
  PyTypeObject* owner;
  py::Ref attributes;
  uint64_t stamp;
  py::Ref changing;  // the names of numbers that it takes no notice of, or null

  explicit DictImage(PyTypeObject* type)
      : owner(type),
        attributes(py::check(PyDict_Copy(type->tp_dict))),
        stamp(py311::dict_version(type->tp_dict)),
        changing(names_of(admitted(), type)) {}

  bool is_current() const { return changing.get() == names_of(admitted(), owner).get(); }

  bool holds() {
    PyObject* now = owner->tp_dict;
    if (py311::dict_version(now) == stamp) return true;
    if (PyDict_GET_SIZE(now) != PyDict_GET_SIZE(attributes.get())) return false;
    bool same = true;
    Py_ssize_t pos = 0;
    PyObject *name, *value;
    while (PyDict_Next(attributes.get(), &pos, &name, &value)) {
      PyObject* const other = PyDict_GetItemWithError(now, name);
      if (other == value) continue;
      if (!other || !are_numbers(value, other)) return PyErr_Clear(), false;
      if (has(changing, name)) continue;
      same = false;
      py::Ref& names = found()[owner];
      if (!names) names = py::Ref::steal(PySet_New(nullptr));
      PySet_Add(names.get(), name);
    }
    if (same) stamp = py311::dict_version(now);
    return same;
  }
};

namespace {

/// The newest image of each class. A class that is gone leaves an entry that has expired.
template <class Image>
std::unordered_map<PyTypeObject*, std::weak_ptr<Image>>& newest() {
  static auto* images = new std::unordered_map<PyTypeObject*, std::weak_ptr<Image>>();
  return *images;
}

std::shared_ptr<DictImage> dict_of(PyTypeObject* type) {
  std::weak_ptr<DictImage>& known = newest<DictImage>()[type];
  if (auto image = known.lock(); image && image->is_current() && image->holds()) return image;
  auto image = std::make_shared<DictImage>(type);
  known = image;
  return image;
}

}  // namespace

std::shared_ptr<ClassImage> ClassImage::of(PyTypeObject* type) {
  const unsigned tag = py311::type_version(type);
  if (!tag) return nullptr;
  std::weak_ptr<ClassImage>& known = newest<ClassImage>()[type];
  if (auto image = known.lock(); image && image->is_current() && image->holds()) return image;
  auto image = std::make_shared<ClassImage>();
  image->type_ = type;
  image->tag_ = tag;
  image->mro_ = py::Ref::borrow(type->tp_mro);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if (PyType_Check(base) && (base->tp_flags & Py_TPFLAGS_HEAPTYPE)) image->dicts_.push_back(dict_of(base));
  }
  known = image;
  return image;
}

bool ClassImage::is_current() const {
  return std::ranges::all_of(dicts_, [](const auto& dict) { return dict->is_current(); });
}

bool ClassImage::holds_anew() {
  const unsigned tag = py311::type_version(type_);
  if (tag && tag == other_tag_) return false;
  PyObject* mro = type_->tp_mro;
  bool same = PyTuple_GET_SIZE(mro) == PyTuple_GET_SIZE(mro_.get());
  for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(mro); ++i)
    same = PyTuple_GET_ITEM(mro, i) == PyTuple_GET_ITEM(mro_.get(), i);
  for (const auto& dict : dicts_) same = dict->holds() && same;  // each finds its own numbers
  if (tag) (same ? tag_ : other_tag_) = tag;
  return same;
}

}  // namespace kiln::guards
