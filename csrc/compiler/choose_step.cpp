#include "compiler/choose_step.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <cstring>
#include <mutex>

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/log.h"
#include "base/pass.h"

namespace kiln::compiler {

using runtime::Frame;
using runtime::Plan;
using runtime::Slot;
using runtime::Step;

namespace {

struct Choices {
  std::mutex mutex;
  std::unordered_map<std::string, bool> ours;  // by key; guarded by mutex
};
Choices& choices() {
  static Choices* c = new Choices;
  return *c;
}

std::string key_of(const std::string& what, const Step& step, const Plan& plan) {
  std::string key = what + " " + std::to_string(at::get_num_threads());
  step.for_each_slot([&](Slot s) {
    if (s == runtime::kNoSlot) return;
    const graph::TensorMeta& m = plan.slots[s].meta;
    key += " " + std::string(dtype_name(m.dtype)) + c10::str(at::IntArrayRef(m.sizes), at::IntArrayRef(m.strides));
  });
  return key;
}

/// Bytes that a measurement may fill: what large products would take adds to the process's peak, and they take longer
/// to run once than a choice gains.
constexpr int64_t kMostBytes = int64_t{64} << 20;

int64_t bytes_of(const Step& step, const Plan& plan) {
  int64_t bytes = 0;
  step.for_each_slot([&](Slot s) {
    if (s != runtime::kNoSlot) bytes += plan.slots[s].meta.numel() * dtype_size(plan.slots[s].meta.dtype);
  });
  return bytes;
}

double seconds(const Step& step, Frame& frame) {
  const auto start = std::chrono::steady_clock::now();
  step.run(frame);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::unique_ptr<Step> StepChooser::choose(const std::string& what, std::unique_ptr<Step> ours,
                                          std::unique_ptr<Step> library, const Plan& plan) {
  if (!pass_enabled("plan.measure_products")) return ours;
  const std::string key = key_of(what, *ours, plan);
  {
    std::lock_guard lock(choices().mutex);
    if (auto it = choices().ours.find(key); it != choices().ours.end())
      return it->second ? std::move(ours) : std::move(library);
  }
  if (seconds_left_ <= 0 || bytes_of(*ours, plan) > kMostBytes) return ours;
  const auto start = std::chrono::steady_clock::now();
  bool ours_wins = true;
  try {
    // Whatever mode the compile runs in, these calls go straight to the CPU's kernels.
    c10::impl::ForceDispatchKeyGuard straight(
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    Frame frame;
    frame.tensors.resize(plan.slots.size());
    frame.ptrs.resize(plan.slots.size(), nullptr);
    for (const Step* step : {ours.get(), library.get()})
      step->for_each_slot([&](Slot s) {
        if (s == runtime::kNoSlot || frame.tensors[s].defined()) return;
        at::Tensor t = aten::empty_of(plan.slots[s].meta);  // not of the pool, which would keep it
        std::memset(t.mutable_data_ptr(), 0, t.storage().nbytes());
        frame.set(s, std::move(t));
      });
    // In turns, so that a neighbour on the same cores slows both; the best of each counts.
    double best_ours = 1e9, best_library = 1e9;
    for (int i = 0; i < 4; ++i) {
      best_ours = std::min(best_ours, seconds(*ours, frame));
      best_library = std::min(best_library, seconds(*library, frame));
      const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (i > 0 && spent > 0.02) break;
    }
    ours_wins = best_ours <= best_library;
    if (log_enabled(Topic::timing))
      log_artifact(Topic::timing, "product",
                   key + ": ours " + std::to_string(best_ours * 1e6) + " us, library " +
                       std::to_string(best_library * 1e6) + " us");
  } catch (const std::exception& e) {
    log_artifact(Topic::timing, "not measured", key + ": " + e.what());
    ours_wins = true;
  }
  seconds_left_ -= std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::lock_guard lock(choices().mutex);
  choices().ours[key] = ours_wins;
  return ours_wins ? std::move(ours) : std::move(library);
}

}  // namespace kiln::compiler
