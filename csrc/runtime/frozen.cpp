#include "runtime/frozen.h"

#include <cstring>

#include "aten/pch.h"
#include "base/weak_map.h"
#include "runtime/pool.h"

namespace kiln::runtime {

std::array<uint64_t, Snapshot::kSamples> Snapshot::sample(const at::Tensor& t) {
  std::array<uint64_t, kSamples> out{};
  const auto* data = static_cast<const char*>(t.const_data_ptr());
  const size_t size = std::min<size_t>(t.element_size(), sizeof(uint64_t));
  int64_t last = 0;  // in elements
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 0) return out;
    last += (t.size(d) - 1) * t.stride(d);
  }
  for (int i = 0; i < kSamples; ++i)
    std::memcpy(&out[i], data + static_cast<int64_t>(t.element_size()) * (last * i / (kSamples - 1)), size);
  return out;
}

bool Snapshot::holds(const at::Tensor& t) const {
  c10::TensorImpl* const impl = t.unsafeGetTensorImpl();
  return impl_._unsafe_get_target() == impl && impl->has_storage() && !impl->is_inference() &&
         impl->version_counter().current_version() == version_ && impl->storage().is_alias_of(storage_) &&
         impl->storage_offset() == offset_ && sample(t) == samples_;
}

void Snapshot::take(const at::Tensor& t) {
  c10::TensorImpl* const impl = t.unsafeGetTensorImpl();
  if (impl->is_inference() || !impl->has_storage()) {
    *this = Snapshot();
    return;
  }
  impl_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(t.getIntrusivePtr());
  storage_ = impl->storage();
  offset_ = impl->storage_offset();
  version_ = impl->version_counter().current_version();
  samples_ = sample(t);
}

namespace {

/// What weights alone gave, and of which.
struct FrozenValues {
  std::vector<Snapshot> of;
  std::vector<at::Tensor> values;
};

// Never destroyed: artifacts may end after the process's statics.
WeakMap<const PackedWeight::Buffer>& packed_weights() {
  static auto* map = new WeakMap<const PackedWeight::Buffer>;
  return *map;
}
WeakMap<const FrozenValues>& frozen_values() {
  static auto* map = new WeakMap<const FrozenValues>;
  return *map;
}

/// The key of what is made of these tensors in this form. Another tensor may get a dead one's address: snapshots tell.
std::string key_of(std::string form, c10::ArrayRef<at::Tensor> weights) {
  for (const at::Tensor& t : weights)
    form += " " + std::to_string(reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()));
  return form;
}

}  // namespace

PackedWeight::Buffer::Buffer(const at::Tensor& weight, int64_t floats)
    : memory(pool_allocator()->allocate(static_cast<size_t>(floats) * sizeof(float))) {
  of.take(weight);
}

std::shared_ptr<const PackedWeight::Buffer> PackedWeight::get(const at::Tensor& weight, int64_t floats,
                                                              const std::function<void(float*)>& pack) const {
  std::lock_guard lock(mutex_);
  if (!weight.defined()) return nullptr;
  const bool again = snapshot_.holds(weight);
  if (again && packed_) return packed_;
  if (!again) snapshot_.take(weight);
  const std::string key = key_of(form_, weight);
  packed_ = packed_weights().find(key);
  if (packed_ && packed_->of.holds(weight)) return packed_;
  packed_.reset();
  if (!again) return nullptr;
  auto made = std::make_shared<Buffer>(weight, floats);
  pack(made->data());
  packed_ = std::move(made);
  packed_weights().keep(key, packed_);
  return packed_;
}

namespace {

class FrozenArtifact final : public Artifact {
 public:
  FrozenArtifact(std::string form, std::shared_ptr<Artifact> prologue, std::shared_ptr<Artifact> rest,
                 std::vector<size_t> prologue_inputs, std::vector<size_t> rest_inputs)
      : form_(std::move(form)),
        prologue_(std::move(prologue)),
        rest_(std::move(rest)),
        prologue_inputs_(std::move(prologue_inputs)),
        rest_inputs_(std::move(rest_inputs)) {}

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) override {
    std::vector<at::Tensor> args;
    {
      std::lock_guard lock(mutex_);
      if (!holds(frozen_, inputs)) make(inputs);
      args.reserve(rest_inputs_.size() + frozen_->values.size());
      for (size_t i : rest_inputs_) args.push_back(inputs[i]);
      args.insert(args.end(), frozen_->values.begin(), frozen_->values.end());
    }
    inputs.clear();
    return rest_->run(std::move(args));
  }

  std::string describe() const override { return prologue_->describe() + rest_->describe(); }

 private:
  bool holds(const std::shared_ptr<const FrozenValues>& frozen, const std::vector<at::Tensor>& inputs) const {
    bool same = frozen != nullptr;
    for (size_t i = 0; same && i < prologue_inputs_.size(); ++i)
      same = frozen->of[i].holds(inputs[prologue_inputs_[i]]);
    return same;
  }

  void make(const std::vector<at::Tensor>& inputs) {
    std::vector<at::Tensor> weights;
    for (size_t i : prologue_inputs_) weights.push_back(inputs[i]);
    const std::string key = key_of(form_, weights);
    frozen_ = frozen_values().find(key);
    if (holds(frozen_, inputs)) return;
    frozen_.reset();
    auto made = std::make_shared<FrozenValues>();
    // Taken first: a write that happens meanwhile is then seen by the next call.
    made->of.resize(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) made->of[i].take(weights[i]);
    made->values = prologue_->run(std::move(weights));
    frozen_ = std::move(made);
    frozen_values().keep(key, frozen_);
  }

  std::string form_;
  std::shared_ptr<Artifact> prologue_, rest_;
  std::vector<size_t> prologue_inputs_, rest_inputs_;
  std::mutex mutex_;
  std::shared_ptr<const FrozenValues> frozen_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Artifact> frozen_artifact(std::string form, std::shared_ptr<Artifact> prologue,
                                          std::shared_ptr<Artifact> rest, std::vector<size_t> prologue_inputs,
                                          std::vector<size_t> rest_inputs) {
  return std::make_shared<FrozenArtifact>(std::move(form), std::move(prologue), std::move(rest),
                                          std::move(prologue_inputs), std::move(rest_inputs));
}

}  // namespace kiln::runtime
