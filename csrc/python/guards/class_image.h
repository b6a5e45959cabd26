#pragma once
#include <Python.h>

#include <memory>
#include <vector>

#include "python/cpython/ref.h"

namespace kiln::guards {

struct DictImage;

// Ints and floats that classes hold themselves and that are others in later calls (counters): they are guarded where
// they are read, and not with the class. A number is found to change when a class does not hold for it.
/// From a capture until its guards are made; admits the numbers that were found to change, and none while one lives.
class ChangingNumbers {
 public:
  ChangingNumbers();
  ~ChangingNumbers();
  ChangingNumbers(const ChangingNumbers&) = delete;
};
/// Whether the attribute `name` of `type`, found in its method resolution order, is such a number.
bool is_changing_number(PyTypeObject* type, PyObject* name);
/// Whether `type` or a class that it derives from has one.
bool has_changing_number(PyTypeObject* type);

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
  /// Whether it takes no notice of all numbers that are known to change.
  bool is_current() const;
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
