#pragma once
#include <Python.h>

#include <memory>
#include <vector>

#include "python/cpython/ref.h"

namespace kiln::guards {

struct DictImage;

/// What a class was when a program was captured: its method resolution order, and the attributes of each class in it.
/// CPython gives a class a new version tag at any change of it or of a base. While the tag is the remembered one
/// nothing else is looked at; under another tag the class may still be as it was, since patches are taken back: tracers
/// of torch.fx replace nn.Module's __call__ for as long as they run. All members need the GIL, and run no Python code.
class ClassImage {
 public:
  /// Of `type` as it is now; null for a class that CPython gives no version, which is taken never to change.
  static std::shared_ptr<ClassImage> of(PyTypeObject* type);
  /// Whether the class is what it was. It must be alive.
  bool holds() { return type_->tp_version_tag == tag_ || holds_anew(); }
  /// The version tag under which it was last found to hold.
  unsigned tag() const { return tag_; }

 private:
  bool holds_anew();

  PyTypeObject* type_ = nullptr;
  unsigned tag_ = 0;
  unsigned other_tag_ = 0;  // one under which it was found to differ
  py::Ref mro_;
  std::vector<std::shared_ptr<DictImage>> dicts_;  // of the classes in mro_ that Python code can change
};

}  // namespace kiln::guards
