#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/compiled_graph.h"

// Weights that do not change between calls: what is made of them alone is kept. A weight counts as unchanged if it is
// the same tensor, over the same memory, of the same version (PyTorch counts writes), and a few of its elements are as
// they were, since writes through `.data` are not counted.
namespace kiln::runtime {

class Snapshot {
 public:
  /// True if `t` is what take() saw. Inference tensors, whose writes nobody counts, never are.
  bool holds(const at::Tensor& t) const;
  void take(const at::Tensor& t);

 private:
  static constexpr int kSamples = 4;
  static std::array<uint64_t, kSamples> sample(const at::Tensor& t);

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  c10::Storage storage_;  // held, so that no other memory gets its address
  int64_t offset_ = 0;
  uint32_t version_ = 0;
  std::array<uint64_t, kSamples> samples_{};
};

/// A packed form of one weight, made when two calls in a row bring the same one. All artifacts of the process share it:
/// those of one model for several batch sizes, above all.
class PackedWeight {
 public:
  struct Buffer {
    Buffer(const at::Tensor& weight, int64_t floats);
    Snapshot of;
    c10::DataPtr memory;  // of the pool: between weights that come and go the C library's heap grows without end
    float* data() const { return static_cast<float*>(memory.get()); }
  };
  /// `form` says all that the packed form depends on, but for the weight: what is packed how, which part of it.
  explicit PackedWeight(std::string form) : form_(std::move(form)) {}
  /// The packed form of `weight` (`floats` floats, written by `pack`); null while it changes from call to call.
  std::shared_ptr<const Buffer> get(const at::Tensor& weight, int64_t floats,
                                    const std::function<void(float*)>& pack) const;

 private:
  std::string form_;
  mutable std::mutex mutex_;
  mutable Snapshot snapshot_;                     // guarded by mutex_
  mutable std::shared_ptr<const Buffer> packed_;  // guarded by mutex_; of snapshot_
};

/// An artifact whose first part, `prologue`, depends on weights alone and runs when they change. `rest` takes the
/// inputs numbered `rest_inputs`, then the prologue's outputs. Artifacts of equal `form`, the prologue as a text, share
/// what it makes of the same weights.
std::shared_ptr<Artifact> frozen_artifact(std::string form, std::shared_ptr<Artifact> prologue,
                                          std::shared_ptr<Artifact> rest, std::vector<size_t> prologue_inputs,
                                          std::vector<size_t> rest_inputs);

}  // namespace kiln::runtime
