#include "python/guards/class_image.h"

#include <unordered_map>

#include "python/cpython/py311.h"

namespace kiln::guards {

/// One class's own attributes; classes derived from it share the image. Its owner is alive while a class is that
/// derives from it.
struct DictImage {
  PyTypeObject* owner;
  py::Ref attributes;
  uint64_t stamp;

  explicit DictImage(PyTypeObject* type)
      : owner(type), attributes(py::check(PyDict_Copy(type->tp_dict))), stamp(py311::dict_version(type->tp_dict)) {}

  bool holds() {
    PyObject* now = owner->tp_dict;
    if (py311::dict_version(now) == stamp) return true;
    if (PyDict_GET_SIZE(now) != PyDict_GET_SIZE(attributes.get())) return false;
    Py_ssize_t pos = 0;
    PyObject *name, *value;
    while (PyDict_Next(attributes.get(), &pos, &name, &value))
      if (PyDict_GetItemWithError(now, name) != value) return PyErr_Clear(), false;
    stamp = py311::dict_version(now);
    return true;
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
  if (auto image = known.lock(); image && image->holds()) return image;
  auto image = std::make_shared<DictImage>(type);
  known = image;
  return image;
}

}  // namespace

std::shared_ptr<ClassImage> ClassImage::of(PyTypeObject* type) {
  const unsigned tag = py311::type_version(type);
  if (!tag) return nullptr;
  std::weak_ptr<ClassImage>& known = newest<ClassImage>()[type];
  if (auto image = known.lock(); image && image->holds()) return image;
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

bool ClassImage::holds_anew() {
  const unsigned tag = py311::type_version(type_);
  if (tag && tag == other_tag_) return false;
  PyObject* mro = type_->tp_mro;
  bool same = PyTuple_GET_SIZE(mro) == PyTuple_GET_SIZE(mro_.get());
  for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(mro); ++i)
    same = PyTuple_GET_ITEM(mro, i) == PyTuple_GET_ITEM(mro_.get(), i);
  for (const auto& dict : dicts_) same = same && dict->holds();
  if (tag) (same ? tag_ : other_tag_) = tag;
  return same;
}

}  // namespace kiln::guards
