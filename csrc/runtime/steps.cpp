#include "runtime/steps.h"

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"
#include "runtime/pool.h"

namespace kiln::runtime {

using graph::Arg;

namespace {

at::Tensor no_tensor(graph::Value) { throw InternalError("a tensor among constants"); }

/// Clears the stack also when a kernel throws, so that it holds no tensors longer than the call.
struct StackGuard {
  std::vector<c10::IValue>& stack;
  ~StackGuard() { stack.clear(); }
};

void call_library(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  PoolForLibraries scope;
  op.callBoxed(stack);
}

}  // namespace

AtenStep::AtenStep(const graph::Node& node, const SlotOf& slot_of, std::vector<Slot> results, const Plan& plan,
                   Results taken)
    : call_(node, slot_of), results_(std::move(results)), taken_(taken) {
  for (Slot s : results_) metas_.push_back(s == kNoSlot ? graph::TensorMeta() : plan.slots[s].meta);
}

bool AtenStep::shares_memory(const Frame& frame, const at::Tensor& t) const {
  if (!t.has_storage()) return false;
  bool shared = false;
  call_.for_each_slot([&](Slot s) {
    shared |= s != kNoSlot && frame.tensors[s].has_storage() &&
              frame.tensors[s].storage().data() == t.storage().data() && t.storage().nbytes() > 0;
  });
  return shared;
}

void AtenStep::run(Frame& frame) const {
  std::vector<c10::IValue>& stack = frame.stack;
  StackGuard guard{stack};
  call_.fill(frame.tensors, stack);
  call_library(call_.op(), stack);
  size_t r = 0;
  for_each_result(stack, [&](at::Tensor t) {
    KILN_CHECK(r < results_.size(), "more results than expected from " + c10::toString(call_.op().operator_name()));
    const size_t i = r++;
    if (results_[i] == kNoSlot) return;
    if (taken_ == Results::Copied) {
      frame.tensors[results_[i]].copy_(t);
      return;
    }
    if (taken_ == Results::TakenApart && shares_memory(frame, t)) t = t.clone(at::MemoryFormat::Preserve);
    frame.set(results_[i], with_meta(std::move(t), metas_[i], c10::toString(call_.op().operator_name())));
  });
}

namespace {

std::string slots_text(const Plan& plan, const std::vector<Slot>& slots) {
  std::string text;
  for (Slot s : slots) text += (text.empty() ? "" : ", ") + plan.slot_text(s);
  return text;
}

}  // namespace

std::string AtenStep::describe(const Plan& plan) const {
  std::vector<Slot> in;
  call_.for_each_slot([&](Slot s) { in.push_back(s); });
  return slots_text(plan, results_) + " = call " + c10::toString(call_.op().operator_name()) + "(" +
         slots_text(plan, in) + ")";
}

void AtenStep::for_each_slot(const std::function<void(Slot)>& f) const {
  call_.for_each_slot(f);
  for (Slot s : results_) f(s);
}

AtenOutStep::AtenOutStep(c10::OperatorHandle op, const graph::Node& node, const AtenStep::SlotOf& slot_of,
                         std::vector<Slot> outs)
    : op_(std::move(op)), outs_(std::move(outs)) {
  const auto& formals = op_.schema().arguments();
  size_t out = 0;
  for (size_t i = 0; i < formals.size(); ++i) {
    if (formals[i].is_out()) {
      KILN_CHECK(out < outs_.size(), "too few outputs for " + node.op.name());
      tensors_.emplace_back(i, outs_[out++]);
      template_.emplace_back();
    } else if (node.args.at(i).is_value() && node.args[i].value()) {
      tensors_.emplace_back(i, slot_of(node.args[i].value()));
      template_.emplace_back();
    } else {
      template_.push_back(aten::to_ivalue(node.args[i], formals[i].real_type(), no_tensor));
    }
  }
  KILN_CHECK(out == outs_.size(), "too many outputs for " + node.op.name());
}

void AtenOutStep::run(Frame& frame) const {
  std::vector<c10::IValue>& stack = frame.stack;
  StackGuard guard{stack};
  stack.assign(template_.begin(), template_.end());
  for (const auto& [arg, slot] : tensors_) stack[arg] = frame.tensors[slot];
  call_library(op_, stack);
}

std::string AtenOutStep::describe(const Plan& plan) const {
  std::vector<Slot> in;
  for (const auto& [arg, slot] : tensors_)
    if (!std::count(outs_.begin(), outs_.end(), slot)) in.push_back(slot);
  return slots_text(plan, outs_) + " <- call " + c10::toString(op_.operator_name()) + "(" + slots_text(plan, in) + ")";
}

void AtenOutStep::for_each_slot(const std::function<void(Slot)>& f) const {
  for (const auto& [arg, slot] : tensors_) f(slot);
}

ViewStep::ViewStep(Slot slot, const Plan& plan)
    : slot_(slot), base_(plan.slots[slot].base), meta_(plan.slots[slot].meta) {}

void ViewStep::run(Frame& frame) const {
  at::Tensor base = frame.tensors[base_];
  if (is_complex(meta_.dtype) != base.is_complex()) base = aten::reinterpret(base, aten::scalar_type_of(meta_.dtype));
  frame.set(slot_, base.as_strided(meta_.sizes, meta_.strides, base.storage_offset() + meta_.offset));
}

void AskStep::run(Frame& frame) const {
  if (frame.tensors[slot_].item<bool>()) throw AssertionFailed();
}

std::string AskStep::describe(const Plan& plan) const { return "ask " + plan.slot_text(slot_); }

std::string ViewStep::describe(const Plan& plan) const {
  return plan.slot_text(slot_) + " = view of " + plan.slot_text(base_);
}

void ViewStep::for_each_slot(const std::function<void(Slot)>& f) const {
  f(base_);
  f(slot_);
}

AllocateStep::AllocateStep(std::vector<Slot> slots, const Plan& plan) {
  for (Slot s : slots) slots_.emplace_back(s, plan.slots[s].meta);
}

void AllocateStep::run(Frame& frame) const {
  for (const auto& [slot, meta] : slots_) frame.set(slot, allocate(meta));
}

std::string AllocateStep::describe(const Plan& plan) const {
  std::string text = "allocate";
  for (const auto& [slot, meta] : slots_) text += " " + plan.slot_text(slot);
  return text;
}

void AllocateStep::for_each_slot(const std::function<void(Slot)>& f) const {
  for (const auto& [slot, meta] : slots_) f(slot);
}

void CopyStep::run(Frame& frame) const { frame.tensors[to_].copy_(frame.tensors[from_]); }

std::string CopyStep::describe(const Plan& plan) const {
  return "copy " + plan.slot_text(from_) + " to " + plan.slot_text(to_);
}

void CopyStep::for_each_slot(const std::function<void(Slot)>& f) const {
  f(to_);
  f(from_);
}

void MutateStep::run(Frame& frame) const {
  auto shares = [&](const at::Tensor& t) {
    return t.defined() && t.has_storage() && std::any_of(pairs_.begin(), pairs_.end(), [&](const Pair& p) {
             return frame.tensors[p.input].storage().is_alias_of(t.storage());
           });
  };
  std::vector<at::Tensor> values;
  values.reserve(pairs_.size());
  for (const Pair& p : pairs_) {
    const at::Tensor& v = frame.tensors[p.value];
    values.push_back(shares(v) ? v.clone() : v);
  }
  for (Slot s : keep_) {
    at::Tensor& t = frame.tensors[s];
    if (shares(t)) frame.set(s, t.clone(at::MemoryFormat::Preserve));
  }
  for (size_t i = 0; i < pairs_.size(); ++i) frame.tensors[pairs_[i].input].copy_(values[i]);
}

std::string MutateStep::describe(const Plan& plan) const {
  std::string text = "write back";
  for (const Pair& p : pairs_) text += " " + plan.slot_text(p.value) + " to " + plan.slot_text(p.input);
  return text;
}

void MutateStep::for_each_slot(const std::function<void(Slot)>& f) const {
  for (const Pair& p : pairs_) {
    f(p.input);
    f(p.value);
  }
  for (Slot s : keep_) f(s);
}

std::string FreeStep::describe(const Plan& plan) const {
  std::string text = "free";
  for (Slot s : slots_) text += " %" + plan.slots[s].name;
  return text;
}

}  // namespace kiln::runtime
