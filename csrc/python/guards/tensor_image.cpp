#include "python/guards/tensor_image.h"

#include <algorithm>
#include <cstring>

#include "aten/pch.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::guards {
namespace {

/// Reaches the protected members of a TensorImpl between which its metadata lies.
struct Metadata : c10::TensorImpl {
  static const char* begin(const c10::TensorImpl& t) {
    return reinterpret_cast<const char*>(&(t.*(&Metadata::sizes_and_strides_)));
  }
  static const char* end(const c10::TensorImpl& t) {
    return reinterpret_cast<const char*>(&(t.*(&Metadata::key_set_)) + 1);
  }
  /// The pointer to autograd's part, which follows the storage; add() makes sure of that. Its getter is a call.
  static const void* autograd(const c10::TensorImpl& t) {
    const void* p;
    std::memcpy(&p, &(t.*(&Metadata::storage_)) + 1, sizeof p);
    return p;
  }
};

/// The compiler knows how many words these are: PyTorch's layout is fixed where kiln is built.
bool copy_words(const c10::TensorImpl& t, MetadataWords& to) {
  const char *begin = Metadata::begin(t), *end = Metadata::end(t);
  if (begin >= end || static_cast<size_t>(end - begin) > sizeof to) return false;
  to.fill(0);
  std::memcpy(to.data(), begin, static_cast<size_t>(end - begin));
  return true;
}

bool same_words(const c10::TensorImpl& t, const MetadataWords& words) {
  typedef uint64_t Pair __attribute__((vector_size(16), aligned(8), may_alias));
  const char* begin = Metadata::begin(t);
  const size_t count = static_cast<size_t>(Metadata::end(t) - begin) / sizeof(uint64_t);
  const auto differ = [&](size_t i) {
    return *reinterpret_cast<const Pair*>(begin + i * sizeof(uint64_t)) ^
           *reinterpret_cast<const Pair*>(words.data() + i);
  };
  Pair different = differ(count - 2);  // an odd last word, too
#pragma GCC unroll 8
  for (size_t i = 0; i + 2 < count; i += 2) different |= differ(i);
  return (different[0] | different[1]) == 0;
}

}  // namespace

bool TensorImages::add(PyObject* tensor, int guard) {
  const c10::TensorImpl* impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(impl->autograd_meta());
  if (meta != Metadata::autograd(*impl)) return false;
  if ((meta && meta->is_view_) || impl->is_python_dispatch() || impl->has_symbolic_sizes_strides()) return false;
  const char* sizes = reinterpret_cast<const char*>(impl->sizes().data());
  if (sizes < Metadata::begin(*impl) || sizes >= Metadata::end(*impl)) return false;
  MetadataWords words;
  if (!copy_words(*impl, words)) return false;
  const auto found = std::find(words_.begin(), words_.end(), words);
  const auto index = static_cast<size_t>(found - words_.begin());
  if (found == words_.end()) words_.push_back(words);
  images_.push_back({tensor, Py_TYPE(tensor), impl, meta, meta ? meta->grad_fn_.get() : nullptr,
                     meta && meta->requires_grad_, guard, index});
  return true;
}

void TensorImages::clear() {
  images_.clear();
  words_.clear();
}

inline bool TensorImages::same(const Image& image) const {
  // Reads by the addresses of the image, not by those just compared with it: no read waits for another then.
  const at::Tensor& tensor = THPVariable_Unpack(image.object);
  const bool found = (Py_TYPE(image.object) == image.type) & (tensor.unsafeGetTensorImpl() == image.impl);
  if (!found || Metadata::autograd(*image.impl) != image.autograd) return false;
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(image.autograd);
  if (meta &&
      ((meta->grad_fn_.get() != image.grad_fn) | (meta->requires_grad_ != image.requires_grad) | meta->is_view_))
    return false;
  return same_words(*image.impl, words_[image.words]);
}

size_t TensorImages::first_changed(size_t i) const {
  while (i < images_.size() && same(images_[i])) ++i;
  return i;
}

}  // namespace kiln::guards
