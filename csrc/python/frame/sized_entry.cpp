#include "python/frame/sized_entry.h"

#include <chrono>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/options.h"
#include "base/timer.h"
#include "compiler/compile.h"
#include "python/cpython/tensor.h"
#include "python/frame/compile.h"
#include "python/frame/turn.h"
#include "python/pch.h"

namespace kiln::frame {

using Clock = std::chrono::steady_clock;

namespace {
/// Combinations of sizes that are remembered.
constexpr size_t kMostVariants = 4096;
/// Calls of one way to run new sizes before it is judged. What a trial compiles takes its first ones.
constexpr int64_t kTrials = 32;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
}  // namespace

size_t SizedEntry::Hash::operator()(const Key& key) const {
  size_t h = key.size();
  for (int64_t n : key) hash_combine(h, n);
  return h;
}

template <class Get>
std::shared_ptr<SizedEntry::Variant> SizedEntry::find(const Ints& ints, Get&& get) {
  key_ = ints;
  for (size_t i : open_) {
    const at::Tensor t = get(i);
    key_.insert(key_.end(), t.sizes().begin(), t.sizes().end());
    key_.insert(key_.end(), t.strides().begin(), t.strides().end());
    key_.push_back(t.storage_offset());
  }
  ++calls_;
  if (!last_ || key_ != last_key_) {
    if (variants_.size() >= kMostVariants && !variants_.contains(key_))
      std::erase_if(variants_, [](const auto& v) { return !v.second->graph; });
    const auto [it, fresh] = variants_.try_emplace(key_);
    last_key_ = key_;
    last_ = it->second;
    if (fresh) {
      const auto made = it->second = last_ = std::make_shared<Variant>();
      std::vector<at::Tensor> tensors;
      for (size_t i = 0; i < program_->num_inputs(); ++i) tensors.push_back(get(i));
      made->asked = !prefers_parts();                   // eager needs no answer
      Scoped<ConfigPtr> quiet(mode().config, nullptr);  // operators' kernels for fake tensors are in Python
      made->fits = program_->may_fit(tensors, ints) && (!made->asked || fits_inside(tensors, ints));
      return made;
    }
  }
  last_->used = calls_;
  return last_;
}

bool SizedEntry::fits_inside(const std::vector<at::Tensor>& inputs, const Ints& ints) const {
  return asks_ == Asks::Inputs || !program_->asks_inside() || program_->fits(inputs, ints);
}

bool SizedEntry::fits(PyObject* const* inputs, const Ints& ints) {
  return find(ints, [&](size_t i) { return py::graph_input(inputs[i]); })->fits;
}

SizedEntry::Ints SizedEntry::delivered(PyObject* const* inputs, const Ints& ints) {
  if (!program_->delivers()) return {};
  const std::shared_ptr<Variant> v = find(ints, [&](size_t i) { return py::graph_input(inputs[i]); });
  if (v->sizes.empty()) {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < program_->num_inputs(); ++i) tensors.push_back(py::graph_input(inputs[i]));
    Scoped<ConfigPtr> quiet(mode().config, nullptr);
    program_->trace_at(tensors, ints, &v->sizes);
  }
  return v->sizes;
}

void SizedEntry::add_captured(const std::vector<at::Tensor>& inputs, const Ints& ints, Ints sizes,
                              std::shared_ptr<runtime::CompiledFunction> graph, double seconds) {
  const auto captured = find(ints, [&](size_t i) { return inputs[i]; });
  captured->graph = std::move(graph);
  ++num_compiled_;
  captured->sizes = std::move(sizes);
  captured->fits = true;
  compile_seconds_ = seconds;
}

bool SizedEntry::pays(const Variant& v) const {
  if (v.refused || mode().run_only || options().size_limit <= 0) return false;
  const bool few = static_cast<int64_t>(num_compiled_) < options().recompile_limit;
  // What has run in eager is taken to gain half of its time.
  return few ? v.uncompiled.calls > 0 || !program_->runs()
             : v.uncompiled.seconds > compile_seconds_ * (program_->runs() ? 1 : 2);
}

void SizedEntry::compile(Variant& v, const std::vector<at::Tensor>& inputs, const Ints& ints) {
  const CompileTurn turn;
  if (!turn || v.graph) return;
  const NoGarbageCollection no_collection;
  Scoped<ConfigPtr> quiet(mode().config, nullptr);
  const OptionScope scope(*config_);
  stage_times().clear();
  const auto start = Clock::now();
  try {
    std::shared_ptr<graph::Graph> traced;
    {
      StageTimer timer("trace");
      traced = program_->trace_at(inputs, ints, &v.sizes);
    }
    v.graph = compile_for(*traced, inputs, *config_);
    ++num_compiled_;
  } catch (const runtime::SizesDiffer&) {
    throw;
  } catch (const std::exception& e) {
    v.refused = true;
    log_artifact(Topic::recompiles, "sizes that keep coming cannot be compiled", e.what());
    return;
  }
  compile_seconds_ = since(start);
  mode().compile_seconds += compile_seconds_;
  log_stage_times("sizes that keep coming");
  if (num_compiled_ <= static_cast<size_t>(options().size_limit) + 1) return;
  Variant* oldest = nullptr;
  for (auto& [key, other] : variants_)
    if (other->graph && other.get() != &v && (!oldest || other->used < oldest->used)) oldest = other.get();
  if (!oldest) return;
  oldest->graph = nullptr;
  --num_compiled_;
}

std::function<void(double)> SizedEntry::waits(const std::vector<at::Tensor>& inputs, const Ints& ints) {
  if (program_->runs()) return nullptr;
  const std::shared_ptr<Variant> v = find(ints, [&](size_t i) { return inputs[i]; });
  try {
    if (!v->graph && pays(*v)) compile(*v, inputs, ints);
  } catch (const runtime::SizesDiffer&) {
    v->fits = false;
  }
  if (v->graph) return nullptr;
  return [v](double seconds) { v->uncompiled.add(seconds); };
}

void SizedEntry::Way::add(double s) {
  constexpr double kLately = 8;
  recent = calls == 0 ? s : recent + (s - recent) / kLately;
  seconds += s;
  ++calls;
}

bool SizedEntry::prefers_parts() const {
  return in_parts_->calls >= kTrials && in_parts_->recent < 0.9 * by_operator_.recent;
}

std::function<void(double)> SizedEntry::runs_in_parts(const std::vector<at::Tensor>& inputs, const Ints& ints) {
  if (config_->fullgraph || mode().run_only || by_operator_.calls < kTrials || by_operator_.seconds < compile_seconds_)
    return nullptr;
  if (in_parts_->calls >= kTrials && !prefers_parts()) return nullptr;
  const std::shared_ptr<Variant> v = find(ints, [&](size_t i) { return inputs[i]; });
  if (v->graph || pays(*v)) return nullptr;
  return [v, parts = in_parts_](double seconds) {
    v->uncompiled.add(seconds);
    parts->add(seconds);
    if (parts->calls == kTrials)
      log_artifact(Topic::recompiles, "new sizes",
                   "the call in eager, with what it calls compiled, takes " + std::to_string(parts->recent) + " s");
  };
}

std::vector<at::Tensor> SizedEntry::run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes) {
  const std::shared_ptr<Variant> v = find(ints, [&](size_t i) { return inputs[i]; });
  try {
    if (!v->graph && pays(*v)) compile(*v, inputs, ints);
    if (const auto graph = v->graph) {
      *sizes = v->sizes;
      pybind11::gil_scoped_release no_gil;
      return graph->call(std::move(inputs));
    }
    if (!std::exchange(v->asked, true) && !fits_inside(inputs, ints)) throw runtime::SizesDiffer();
    const auto start = Clock::now();
    std::vector<at::Tensor> outputs;
    {
      pybind11::gil_scoped_release no_gil;
      outputs = program_->run(std::move(inputs), ints, sizes);
    }
    const double seconds = since(start);
    v->uncompiled.add(seconds);
    by_operator_.add(seconds);
    return outputs;
  } catch (const runtime::SizesDiffer&) {
    v->fits = false;
    throw;
  } catch (...) {
    // Eager says what is wrong. If nothing is, something was captured that is for other sizes alone.
    constexpr int64_t kPatience = 2;
    if (!v->graph && ++v->failures >= kPatience) v->fits = false;
    throw;
  }
}

}  // namespace kiln::frame
