#include "runtime/plan.h"

#include <atomic>
#include <mutex>

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"
#include "base/log.h"
#include "runtime/arena.h"
#include "runtime/pool.h"
#include "runtime/step_times.h"
#include "runtime/steps.h"

namespace kiln::runtime {

at::Tensor allocate(const graph::TensorMeta& m) {
  if (m.device.type != graph::DeviceType::CPU) return aten::empty_of(m);
  int64_t extent = 1;
  for (size_t i = 0; i < m.sizes.size(); ++i) {
    if (m.sizes[i] == 0) {
      extent = 0;
      break;
    }
    extent += (m.sizes[i] - 1) * m.strides[i];
  }
  c10::Allocator* allocator = pool_allocator();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                       extent * dtype_size(m.dtype), allocator, /*resizable=*/true);
  at::Tensor t =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                               c10::scalarTypeToTypeMeta(aten::scalar_type_of(m.dtype)));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes, m.strides);
  return t;
}

namespace {

bool same_strides(const at::Tensor& t, const graph::TensorMeta& m) {
  const at::IntArrayRef sizes = t.sizes(), strides = t.strides();
  for (size_t i = 0; i < m.sizes.size(); ++i)
    if (strides[i] != m.strides[i] && sizes[i] > 1) return t.numel() == 0;
  return true;
}

}  // namespace

at::Tensor with_meta(at::Tensor t, const graph::TensorMeta& m, const std::string& what) {
  if (!t.defined() || t.layout() != at::kStrided) return t;
  // How much memory a library wants for the backward (mkldnn_rnn_layer), no Meta kernel tells.
  if (t.scalar_type() == at::kByte && m.sizes == std::vector<int64_t>{0}) return t;
  KILN_CHECK(t.sizes() == at::IntArrayRef(m.sizes),
             what + " has unexpected sizes " + c10::str(t.sizes()) + ", not " + c10::str(at::IntArrayRef(m.sizes)));
  KILN_CHECK(m.dtype == DType::Opaque || aten::dtype_of(t.scalar_type()) == m.dtype,
             what + " has an unexpected dtype " + c10::toString(t.scalar_type()));
  if (t.strides() == at::IntArrayRef(m.strides)) return t;
  if (same_strides(t, m)) {  // but for those of dims of one element, which tell a program nothing but are seen
    c10::TensorImpl* impl = t.unsafeGetTensorImpl();
    at::Tensor same(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
    same.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes, m.strides, t.storage_offset());
    return same;
  }
  at::Tensor copy = m.dtype == DType::Opaque ? at::empty_strided(m.sizes, m.strides, t.options()) : allocate(m);
  // Where the layout says that elements are one (expand), they are equal, and written once.
  at::Tensor to = copy, from = t;
  for (size_t d = 0; d < m.sizes.size(); ++d)
    if (m.strides[d] == 0 && m.sizes[d] > 1) {
      to = to.narrow(static_cast<int64_t>(d), 0, 1);
      from = from.narrow(static_cast<int64_t>(d), 0, 1);
    }
  to.copy_(from);
  return copy;
}

std::string Plan::slot_text(Slot s) const {
  if (s == kNoSlot) return "none";
  const SlotInfo& info = slots[s];
  std::string text =
      "%" + (info.name.empty() ? std::to_string(s) : info.name) + ":" + std::string(dtype_name(info.meta.dtype)) + "[";
  for (size_t i = 0; i < info.meta.sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(info.meta.sizes[i]);
  text += "]";
  if (info.kind == SlotInfo::Kind::Arena) text += "@" + std::to_string(info.arena_offset);
  return text;
}

void insert_frees(Plan& plan) {
  std::vector<int> last(plan.slots.size(), -1);
  auto root = [&](Slot s) { return plan.slots[s].kind == SlotInfo::Kind::View ? plan.slots[s].base : s; };
  for (size_t i = 0; i < plan.steps.size(); ++i)
    plan.steps[i]->for_each_slot([&](Slot s) {
      if (s == kNoSlot) return;
      last[s] = last[root(s)] = static_cast<int>(i);
    });
  std::vector<bool> keep(plan.slots.size(), false);
  for (Slot s : plan.outputs)
    if (s != kNoSlot) keep[s] = true;
  for (Slot s : plan.mutated) keep[s] = true;  // versions are bumped, and copies made, at the end
  for (const Plan::KeptElements& k : plan.kept_elements) keep[k.places] = keep[k.old] = true;
  std::vector<std::vector<Slot>> dead(plan.steps.size());
  for (size_t s = 0; s < plan.slots.size(); ++s) {
    const SlotInfo& info = plan.slots[s];
    using Kind = SlotInfo::Kind;
    if (last[s] < 0 || keep[s] || info.kind == Kind::Arena || info.kind == Kind::Constant) continue;
    if (info.kind == Kind::View) {
      const Kind base = plan.slots[info.base].kind;
      if (base == Kind::Arena || base == Kind::Constant) continue;
    }
    dead[last[s]].push_back(static_cast<Slot>(s));
  }
  std::vector<std::unique_ptr<Step>> steps;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    steps.push_back(std::move(plan.steps[i]));
    if (!dead[i].empty() && i + 1 < plan.steps.size()) steps.push_back(std::make_unique<FreeStep>(std::move(dead[i])));
  }
  plan.steps = std::move(steps);
}

bool& raised_before_writes() {
  thread_local bool raised = false;
  return raised;
}

namespace {

class PlannedArtifact final : public Artifact {
 public:
  explicit PlannedArtifact(Plan plan) : plan_(std::move(plan)) {
    for (size_t s = 0; s < plan_.slots.size(); ++s) {
      using Kind = SlotInfo::Kind;
      const SlotInfo& info = plan_.slots[s];
      const Kind base = info.kind == Kind::View ? plan_.slots[info.base].kind : info.kind;
      // What is left in a frame after a call, unless an output took it; cleared so that memory goes back at once.
      if (base != Kind::Arena && base != Kind::Constant) transient_.push_back(static_cast<Slot>(s));
    }
  }
  ~PlannedArtifact() override {
    delete cached_.load();
    for (Frame* f : spare_) delete f;
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) override {
    KILN_CHECK(inputs.size() == plan_.inputs.size(), "artifact " + plan_.name + " takes " +
                                                         std::to_string(plan_.inputs.size()) + " inputs, not " +
                                                         std::to_string(inputs.size()));
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    FrameLease lease(*this);
    Frame& frame = *lease.frame;
    if (frame.arena_generation != lease.arena.generation()) bind_arena(frame, lease.arena);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Slot s = plan_.inputs[i];
      const SlotInfo& info = plan_.slots[s];
      at::Tensor& t = inputs[i];
      // Callers guard sizes and dtypes; strides of gradients are only known at run time.
      if (t.defined() &&
          (t.sizes() != at::IntArrayRef(info.meta.sizes) || t.strides() != at::IntArrayRef(info.meta.strides)))
        t = adapt(std::move(t), s, lease);
      frame.set(s, std::move(t));
    }
    // Memory that is shared until someone writes to it (torch._lazy_clone) is copied here.
    for (Slot s : plan_.mutated)
      if (const at::Tensor& t = frame.tensors[s]; t.defined() && t.has_storage())
        frame.ptrs[s] = static_cast<char*>(t.mutable_data_ptr());
    const std::vector<Undone> undone = keep(frame);
    const Step* running = nullptr;
    try {
      if (log_enabled(Topic::step_times))
        step_times_.run(plan_, frame, running);
      else
        for (const auto& step : plan_.steps) (running = step.get())->run(frame);
    } catch (...) {
      raised_before_writes() = comes_before_writes(running);
      if (raised_before_writes()) {
        put_back_elements(frame, running);
        put_back(frame, undone);
      }
      throw;
    }
    for (const auto& [input, original] : lease.copy_back) original.copy_(frame.tensors[input]);
    for (Slot s : plan_.counted) {
      at::Tensor& t = frame.tensors[s];
      if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
    std::vector<at::Tensor> outputs;
    outputs.reserve(plan_.outputs.size());
    for (Slot s : plan_.outputs) outputs.push_back(s == kNoSlot ? at::Tensor() : frame.tensors[s]);
    return outputs;
  }

  std::string describe() const override {
    std::string text = "artifact " + plan_.name + ": " + std::to_string(plan_.steps.size()) + " steps, arena " +
                       std::to_string(plan_.arena_bytes) + " bytes\n";
    text += "  inputs:";
    for (Slot s : plan_.inputs) text += " " + plan_.slot_text(s);
    text += "\n";
    for (const auto& step : plan_.steps) text += "  " + step->describe(plan_) + "\n";
    text += "  outputs:";
    for (Slot s : plan_.outputs) text += " " + plan_.slot_text(s);
    return text + "\n";
  }

 private:
  // Kernels below autograd and autocast: what those keys do is in the graph already.
  static constexpr c10::DispatchKeySet kAbove =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

  struct FrameLease {
    PlannedArtifact& artifact;
    ArenaLease arena;
    Frame* frame;
    std::vector<std::pair<Slot, at::Tensor>> copy_back;
    explicit FrameLease(PlannedArtifact& a) : artifact(a), arena(a.plan_.arena_bytes), frame(a.take()) {}
    ~FrameLease() {
      for (Slot s : artifact.transient_) frame->tensors[s] = at::Tensor();
      artifact.give(frame);
    }
  };

  struct Undone {
    at::Tensor input;  // steps let go of those that they read last
    size_t bytes;
  };
  std::vector<Undone> keep(Frame& frame) const {
    std::vector<Undone> undone;
    size_t bytes = 0;
    for (Slot s : plan_.undone) {
      const at::Tensor& t = frame.tensors[s];
      // With the gaps between the elements: whoever has those does not write to them now.
      undone.push_back({t, at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size())});
      bytes += undone.back().bytes;
    }
    frame.kept.resize(bytes);
    char* to = frame.kept.data();
    for (const Undone& u : undone) to = std::copy_n(static_cast<const char*>(u.input.const_data_ptr()), u.bytes, to);
    return undone;
  }
  static void put_back(const Frame& frame, const std::vector<Undone>& undone) {
    const char* from = frame.kept.data();
    for (const Undone& u : undone) {
      std::copy_n(from, u.bytes, static_cast<char*>(u.input.mutable_data_ptr()));
      from += u.bytes;
    }
  }

  /// What was overwritten by the time that `running` raised.
  void put_back_elements(const Frame& frame, const Step* running) const {
    for (auto k = plan_.kept_elements.rbegin(); k != plan_.kept_elements.rend(); ++k) {
      if (comes_before(running, k->known)) continue;
      const at::Tensor &places = frame.tensors[k->places], &old = frame.tensors[k->old];
      const auto size = static_cast<int64_t>(old.element_size());
      const int64_t* place = places.const_data_ptr<int64_t>();
      const char* from = static_cast<const char*>(old.const_data_ptr());
      for (int64_t i = 0; i < places.numel(); ++i, from += size)
        std::copy_n(from, size, frame.ptrs[k->input] + place[i] * size);
    }
  }

  /// Whether `step` runs before `other` does.
  bool comes_before(const Step* step, const Step* other) const {
    for (const auto& s : plan_.steps)
      if (s.get() == step || s.get() == other) return s.get() != other;
    return false;
  }
  bool comes_before_writes(const Step* step) const {
    return !plan_.first_write || comes_before(step, plan_.first_write);
  }

  at::Tensor adapt(at::Tensor t, Slot s, FrameLease& lease) {
    at::Tensor fitting = with_meta(t, plan_.slots[s].meta, "input " + plan_.slots[s].name);
    if (!fitting.is_same(t) && std::count(plan_.mutated.begin(), plan_.mutated.end(), s))
      lease.copy_back.emplace_back(s, t);
    return fitting;
  }

  Frame* take() {
    if (Frame* f = cached_.exchange(nullptr)) return f;
    {
      std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        Frame* f = spare_.back();
        spare_.pop_back();
        return f;
      }
    }
    return make_frame();
  }

  void give(Frame* f) {
    Frame* none = nullptr;
    if (cached_.compare_exchange_strong(none, f)) return;
    std::lock_guard lock(mutex_);
    spare_.push_back(f);
  }

  Frame* make_frame() const {
    auto f = std::make_unique<Frame>();
    f->tensors.resize(plan_.slots.size());
    f->ptrs.resize(plan_.slots.size(), nullptr);
    for (size_t s = 0; s < plan_.slots.size(); ++s)
      if (plan_.slots[s].kind == SlotInfo::Kind::Constant) f->set(static_cast<Slot>(s), plan_.slots[s].constant);
    bind_views(*f, SlotInfo::Kind::Constant);
    return f.release();
  }

  /// Points the slots of the arena, and views of them, into the memory that the call has.
  void bind_arena(Frame& f, const ArenaLease& arena) const {
    f.arena_generation = arena.generation();
    for (size_t s = 0; s < plan_.slots.size(); ++s) {
      const SlotInfo& info = plan_.slots[s];
      if (info.kind != SlotInfo::Kind::Arena) continue;
      f.ptrs[s] = arena.data() + info.arena_offset;
      f.tensors[s] = wrap(f.ptrs[s], info.meta);
    }
    bind_views(f, SlotInfo::Kind::Arena);
  }

  void bind_views(Frame& f, SlotInfo::Kind base) const {
    for (size_t s = 0; s < plan_.slots.size(); ++s) {
      const SlotInfo& info = plan_.slots[s];
      if (info.kind != SlotInfo::Kind::View || plan_.slots[info.base].kind != base) continue;
      f.ptrs[s] = f.ptrs[info.base] + info.meta.offset * dtype_size(info.meta.dtype);
      f.tensors[s] = wrap(f.ptrs[s], info.meta);
    }
  }

  // Wrappers own nothing: the arena is leased for each call, constants are the plan's.
  static at::Tensor wrap(void* data, const graph::TensorMeta& m) {
    return at::from_blob(data, m.sizes, m.strides, at::TensorOptions(aten::scalar_type_of(m.dtype)));
  }

  Plan plan_;
  StepTimes step_times_;
  std::vector<Slot> transient_;
  std::atomic<Frame*> cached_{nullptr};
  std::mutex mutex_;
  std::vector<Frame*> spare_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Artifact> make_artifact(Plan plan) { return std::make_shared<PlannedArtifact>(std::move(plan)); }

}  // namespace kiln::runtime
