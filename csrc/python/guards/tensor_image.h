#pragma once
#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

namespace c10 {
struct TensorImpl;
struct AutogradMetaInterface;
}  // namespace c10

namespace kiln::guards {

/// Words of memory of a tensor that hold all that TensorFacts compares, autograd's part excepted: sizes, strides, data
/// type, device and dispatch keys, as they lie in PyTorch's TensorImpl.
using MetadataWords = std::array<uint64_t, 16>;

/// What the memory of tensors that are known by address looked like when their facts were checked. Where it looks the
/// same, the facts hold still; where it does not, they may. A few nanoseconds a tensor. Needs the GIL.
class TensorImages {
 public:
  /// Adds `tensor`. False if its memory does not say all: a view (its history is made when it is asked for), more than
  /// five dimensions, sizes that a subclass computes.
  bool add(PyObject* tensor, int guard);
  void clear();
  size_t size() const { return images_.size(); }
  PyObject* object(size_t i) const { return images_[i].object; }
  int guard(size_t i) const { return images_[i].guard; }
  /// The first tensor from `i` on, all of which must be alive, that does not look as it did when it was added; size()
  /// if there is none.
  size_t first_changed(size_t i) const;

 private:
  struct Image {
    PyObject* object;
    PyTypeObject* type;
    const c10::TensorImpl* impl;
    const c10::AutogradMetaInterface* autograd;
    const void* grad_fn;
    bool requires_grad;
    int guard;
    size_t words;  // in words_, which tensors of one shape share
  };
  bool same(const Image& image) const;

  std::vector<Image> images_;
  std::vector<MetadataWords> words_;
};

}  // namespace kiln::guards
