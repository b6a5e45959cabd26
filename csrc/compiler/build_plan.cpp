#include "compiler/build_plan.h"

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/bisect.h"
#include "base/error.h"
#include "compiler/choose_step.h"
#include "compiler/interpreted_step.h"
#include "lower/lowering.h"
#include "runtime/aten_artifact.h"
#include "runtime/epilogue_step.h"
#include "runtime/kernel_step.h"
#include "runtime/library_steps.h"
#include "runtime/steps.h"

namespace kiln::compiler {

using loops::BufferId;
using loops::BufferKind;
using runtime::AtenStep;
using runtime::Plan;
using runtime::Slot;
using runtime::SlotInfo;

namespace {

class Builder {
 public:
  Builder(const lower::Lowered& lowered, const schedule::Plan& schedule, const schedule::MemoryPlan& memory)
      : lowered_(lowered), schedule_(schedule), memory_(memory) {}

  Plan build(const std::string& name, std::vector<codegen::CompiledKernel> kernels) {
    plan_.name = name;
    plan_.arena_bytes = memory_.arena_bytes;
    make_slots();
    std::vector<std::pair<const runtime::Step*, int>> begins;  // where the scheduled steps begin, and their places
    for (const schedule::Step& step : schedule_.steps) {
      const size_t begin = plan_.steps.size();
      if (step.is_kernel) {
        add_kernel(schedule_.kernels[step.index], std::move(kernels[step.index]));
      } else {
        Epilogue epilogue;
        if (step.epilogue >= 0) epilogue = {&schedule_.kernels[step.epilogue], &kernels[step.epilogue]};
        add_extern(lowered_.externs[schedule_.externs[step.index].index], epilogue);
      }
      if (begin < plan_.steps.size())
        begins.emplace_back(plan_.steps[begin].get(), static_cast<int>(&step - schedule_.steps.data()));
    }
    find_writes(begins);
    add_outputs();
    for (const auto& m : lowered_.mutated) plan_.add_mutated(slots_[lowered_.inputs[m.input]], m.uncounted);
    runtime::insert_frees(plan_);
    return std::move(plan_);
  }

 private:
  /// Whether the data may be such that the step raises.
  bool may_raise(const schedule::Step& step) const {
    const auto checks = [&](int kernel) {
      const auto& insts = schedule_.kernels[kernel].nest.insts;
      return std::any_of(insts.begin(), insts.end(), [](const auto& i) { return i.op == loops::Opcode::Indirect; });
    };
    if (step.kernel() >= 0 && checks(step.kernel())) return true;
    if (step.is_kernel) return false;
    const graph::Node* node = lowered_.externs[schedule_.externs[step.index].index].node;
    return node && lower::call_may_raise(*node);
  }

  std::vector<BufferId> written_by(const schedule::Step& step) const {
    std::vector<BufferId> out;
    if (step.kernel() >= 0)
      for (const schedule::KernelArg& a : schedule_.kernels[step.kernel()].args)
        if (a.written) out.push_back(a.buffer);
    if (!step.is_kernel)
      for (const auto& r : lowered_.externs[schedule_.externs[step.index].index].results)
        if (r) out.push_back(r->buffer);
    return out;
  }

  /// Plan::undone, Plan::first_write and Plan::kept_elements.
  void find_writes(const std::vector<std::pair<const runtime::Step*, int>>& begins) {
    std::unordered_map<BufferId, size_t> first;  // of inputs: the first to write them, of `begins`
    for (const auto& m : lowered_.mutated)
      if (!m.writes_same) first.emplace(lowered_.inputs[m.input], begins.size());
    size_t last_raise = 0;
    for (size_t k = 0; k < begins.size(); ++k) {
      const schedule::Step& step = schedule_.steps[begins[k].second];
      if (may_raise(step)) last_raise = k + 1;
      for (BufferId b : written_by(step))
        if (const auto it = first.find(b); it != first.end()) it->second = std::min(it->second, k);
    }
    int64_t bytes = 0;
    std::vector<Slot> early;
    for (const auto& m : lowered_.mutated) {
      const BufferId b = lowered_.inputs[m.input];
      if (m.writes_same || first.at(b) >= last_raise) continue;
      const graph::TensorMeta& t = plan_.slots[slots_[b]].meta;
      early.push_back(slots_[b]);
      bytes += lower::extent_of(t.sizes, t.strides) * dtype_size(t.dtype);
    }
    size_t write = begins.size();
    const bool undo = bytes <= runtime::kMostUndone;
    for (const auto& [b, k] : first)
      if (!undo || k >= last_raise) write = std::min(write, k);
    if (undo) plan_.undone = std::move(early);
    if (write < begins.size()) plan_.first_write = begins[write].first;
    for (const auto& k : lowered_.kept_elements) {
      size_t known = 0;
      for (size_t s = 0; s < begins.size(); ++s)
        for (BufferId b : written_by(schedule_.steps[begins[s].second]))
          if (b == k.places || b == k.old) known = s + 1;
      if (known == begins.size()) continue;  // they are kept and overwritten in one kernel, the last
      plan_.kept_elements.push_back({slots_[k.input], slots_[k.places], slots_[k.old], begins[known].first});
    }
  }

  void make_slots() {
    slots_.assign(schedule_.buffers.size(), runtime::kNoSlot);
    for (size_t i = 0; i < lowered_.inputs.size(); ++i) {
      const BufferId b = lowered_.inputs[i];
      SlotInfo info{SlotInfo::Kind::Input, schedule_.buffers[b].name, meta(b)};
      info.frozen = lowered_.frozen[i];
      plan_.inputs.push_back(slots_[b] = plan_.add_slot(std::move(info)));
    }
    for (const auto& [b, node] : lowered_.constants) {
      SlotInfo info{SlotInfo::Kind::Constant, node->name, meta(b)};
      info.constant = aten::constant_tensor(node->args);
      slots_[b] = plan_.add_slot(std::move(info));
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] != runtime::kNoSlot) continue;
      const auto b = static_cast<BufferId>(i);
      SlotInfo info{SlotInfo::Kind::Dynamic, schedule_.buffers[b].name, meta(b)};
      if (i < lowered_.dynamic.size() && lowered_.dynamic[i]) {
        info.kind = SlotInfo::Kind::Dynamic;
      } else if (schedule_.buffers[b].kind == BufferKind::Output) {
        info.kind = SlotInfo::Kind::Fresh;
      } else if (memory_.offsets[b] >= 0) {
        info.kind = SlotInfo::Kind::Arena;
        info.arena_offset = memory_.offsets[b];
      } else {
        continue;  // vanished
      }
      slots_[i] = plan_.add_slot(std::move(info));
    }
  }

  graph::TensorMeta meta(BufferId b) const {
    if (static_cast<size_t>(b) < lowered_.metas.size()) return lowered_.metas[b];
    graph::TensorMeta m;
    m.dtype = schedule_.buffers[b].dtype;
    m.sizes = {schedule_.buffers[b].numel};
    m.strides = {1};
    return m;
  }

  // Memory that a call makes is there before the first step that writes it.
  void allocate(const std::vector<Slot>& slots) {
    std::vector<Slot> fresh;
    for (Slot s : slots)
      if (s != runtime::kNoSlot && plan_.slots[s].kind == SlotInfo::Kind::Fresh && allocated_.insert(s).second)
        fresh.push_back(s);
    if (!fresh.empty()) plan_.steps.push_back(std::make_unique<runtime::AllocateStep>(std::move(fresh), plan_));
  }

  struct Epilogue {
    const schedule::Kernel* kernel = nullptr;
    codegen::CompiledKernel* compiled = nullptr;
  };

  /// The slots of a kernel's arguments; makes the memory of those that the call brings.
  std::vector<Slot> kernel_slots(const schedule::Kernel& k) {
    std::vector<Slot> args;
    for (const schedule::KernelArg& a : k.args) {
      args.push_back(slots_[a.buffer]);
      KILN_CHECK(slots_[a.buffer] != runtime::kNoSlot, "kernel " + k.nest.name + " uses a buffer without memory");
    }
    allocate(args);
    return args;
  }

  static std::unique_ptr<runtime::KernelStep> kernel_step(const schedule::Kernel& k, codegen::CompiledKernel compiled,
                                                          std::vector<Slot> args) {
    std::vector<bool> written;
    for (const schedule::KernelArg& a : k.args) written.push_back(a.written);
    return std::make_unique<runtime::KernelStep>(std::move(compiled), std::move(args), std::move(written));
  }

  void add_kernel(const schedule::Kernel& k, codegen::CompiledKernel compiled) {
    std::vector<Slot> args = kernel_slots(k);
    if (!bisect_allows(BisectUnit::Kernel, compiled.name)) {
      plan_.steps.push_back(std::make_unique<InterpretedStep>(k, schedule_.buffers, std::move(args)));
      return;
    }
    plan_.steps.push_back(kernel_step(k, std::move(compiled), std::move(args)));
  }

  /// The slot of a tensor over a buffer: the buffer's own, or a view of it.
  Slot slot_of(const lower::TensorView& v) {
    const Slot base = slots_.at(v.buffer);
    KILN_CHECK(base != runtime::kNoSlot, "a library call uses a buffer without memory");
    allocate({base});  // what has no elements is written by no step
    const graph::TensorMeta& whole = plan_.slots[base].meta;
    if (v.offset == 0 && v.dtype == whole.dtype && v.sizes == whole.sizes && v.strides == whole.strides) return base;
    auto& views = views_[base];
    for (const auto& [view, slot] : views)
      if (view.dtype == v.dtype && view.sizes == v.sizes && view.strides == v.strides && view.offset == v.offset)
        return slot;
    SlotInfo info{SlotInfo::Kind::View, plan_.slots[base].name + "_view", {}};
    info.meta.dtype = v.dtype;
    info.meta.sizes = v.sizes;
    info.meta.strides = v.strides;
    info.meta.offset = v.offset;
    info.base = base;
    const SlotInfo::Kind kind = plan_.slots[base].kind;
    const Slot s = plan_.add_slot(std::move(info));
    views.emplace_back(v, s);
    // Views of the arena are made with the frame; of memory that comes with each call, in each call.
    if (kind != SlotInfo::Kind::Arena && kind != SlotInfo::Kind::Constant)
      plan_.steps.push_back(std::make_unique<runtime::ViewStep>(s, plan_));
    return s;
  }

  /// `epilogue` follows the call: as a part of its step where kernels of ours make the result, or else as the next
  /// step.
  void add_extern(const lower::ExternCall& call, const Epilogue& epilogue) {
    if (!call.node) {
      plan_.steps.push_back(std::make_unique<runtime::AskStep>(slots_.at(call.results[0]->buffer)));
      return;
    }
    std::shared_ptr<const runtime::KernelStep> kernel;
    if (epilogue.kernel && bisect_allows(BisectUnit::Kernel, epilogue.compiled->name))
      kernel = kernel_step(*epilogue.kernel, *epilogue.compiled, kernel_slots(*epilogue.kernel));
    const bool joined = add_call(call, kernel);
    if (epilogue.kernel && !joined) add_kernel(*epilogue.kernel, std::move(*epilogue.compiled));
  }

  /// Whether the call's result may lie where its argument does: the same bits seen as other numbers, of a buffer that
  /// no step writes again. What the caller gets is its own memory.
  bool lends_memory(const lower::ExternCall& call) {
    static const graph::Op kOtherNumbers("aten::view.dtype");
    if (call.node->op != kOtherNumbers || call.inputs.size() != 1 || call.results.size() != 1 || !call.results[0])
      return false;
    const BufferId from = call.inputs.begin()->second.buffer, to = call.results[0]->buffer;
    const auto lent = lent_by_.find(from);
    const BufferId root = lent == lent_by_.end() ? from : lent->second;
    const auto is_output = [&](BufferId b) {
      return std::any_of(lowered_.outputs.begin(), lowered_.outputs.end(),
                         [&](const lower::Output& o) { return o.defined && o.view.buffer == b; });
    };
    switch (plan_.slots[slots_.at(root)].kind) {
      case SlotInfo::Kind::Input:
        if (is_output(to) || std::any_of(lowered_.mutated.begin(), lowered_.mutated.end(),
                                         [&](const auto& m) { return lowered_.inputs[m.input] == root; }))
          return false;
        break;
      case SlotInfo::Kind::Dynamic:
        if (is_output(to) && (is_output(root) || !lent_to_output_.insert(root).second)) return false;
        break;
      default:
        return false;
    }
    lent_by_[to] = root;
    return true;
  }
  std::unordered_map<BufferId, BufferId> lent_by_;  // a result -> the buffer whose memory it has
  std::unordered_set<BufferId> lent_to_output_;

  /// True if `kernel` (may be null) became part of the call's step.
  bool add_call(const lower::ExternCall& call, const std::shared_ptr<const runtime::KernelStep>& kernel) {
    std::unordered_map<graph::Value, Slot> inputs;
    for (const auto& [value, view] : call.inputs) inputs[value] = slot_of(view);
    auto find = [&](graph::Value v) { return inputs.at(v); };
    std::vector<Slot> results;
    for (const auto& r : call.results) results.push_back(r ? slots_.at(r->buffer) : runtime::kNoSlot);
    if (!call.into) {
      const auto taken = lends_memory(call) ? AtenStep::Results::Taken : AtenStep::Results::TakenApart;
      plan_.steps.push_back(std::make_unique<AtenStep>(*call.node, find, std::move(results), plan_, taken));
      return false;
    }
    allocate(results);
    const auto with_kernel = [&](std::unique_ptr<runtime::Step> step) {
      if (kernel) step = std::make_unique<runtime::EpilogueStep>(std::move(step), kernel);
      return step;
    };
    auto own_kernel = runtime::make_library_step(*call.node, find, results, plan_);
    const char* const out = lower::out_overload(call.node->op);
    const auto aten_into = [&]() -> std::unique_ptr<runtime::Step> {
      if (out)
        return std::make_unique<runtime::AtenOutStep>(runtime::find_op(graph::Op(out)), *call.node, find, results);
      return std::make_unique<AtenStep>(*call.node, find, results, plan_, AtenStep::Results::Copied);
    };
    if (own_kernel && (out || runtime::library_may_be_faster(*call.node))) {
      std::unique_ptr<runtime::Step> library = aten_into();
      plan_.steps.push_back(chooser_.choose(call.node->op.name(), with_kernel(std::move(own_kernel)),
                                            with_kernel(std::move(library)), plan_));
      return kernel != nullptr;
    }
    if (own_kernel) {
      plan_.steps.push_back(with_kernel(std::move(own_kernel)));
      return kernel != nullptr;
    }
    plan_.steps.push_back(aten_into());
    return false;
  }

  void add_outputs() {
    for (const lower::Output& o : lowered_.outputs) {
      if (!o.defined) {
        plan_.outputs.push_back(runtime::kNoSlot);
        continue;
      }
      plan_.outputs.push_back(slot_of(o.view));
    }
  }

  const lower::Lowered& lowered_;
  const schedule::Plan& schedule_;
  const schedule::MemoryPlan& memory_;
  Plan plan_;
  std::vector<Slot> slots_;  // by buffer
  std::unordered_set<Slot> allocated_;
  StepChooser chooser_;
  std::unordered_map<Slot, std::vector<std::pair<lower::TensorView, Slot>>> views_;
};

}  // namespace

Plan build_plan(const std::string& name, const lower::Lowered& lowered, const schedule::Plan& schedule,
                const schedule::MemoryPlan& memory, std::vector<codegen::CompiledKernel> kernels) {
  return Builder(lowered, schedule, memory).build(name, std::move(kernels));
}

}  // namespace kiln::compiler
