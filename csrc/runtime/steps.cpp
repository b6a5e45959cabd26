#include "runtime/steps.h"

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"
#include "runtime/pool.h"

namespace kiln::runtime {

using graph::Arg;

c10::OperatorHandle find_op(const graph::Op& op) {
  const std::string& full = op.name();
  const size_t space = full.find("::");
  const size_t dot = space == std::string::npos ? std::string::npos : full.find('.', space);
  const std::string name = full.substr(0, dot), overload = dot == std::string::npos ? "" : full.substr(dot + 1);
  auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle) throw Unsupported("no operator " + full);
  return *handle;
}

namespace {

bool holds_values(const Arg& a) {
  bool found = false;
  graph::for_each_value(a, [&](graph::Value) { found = true; });
  return found;
}

bool is_tensor_list(const c10::TypePtr& type, bool& optional) {
  c10::TypePtr t = type;
  if (t->kind() == c10::TypeKind::OptionalType) t = t->expectRef<c10::OptionalType>().getElementType();
  if (t->kind() != c10::TypeKind::ListType) return false;
  t = t->expectRef<c10::ListType>().getElementType();
  optional = t->kind() == c10::TypeKind::OptionalType;
  if (optional) t = t->expectRef<c10::OptionalType>().getElementType();
  return t->kind() == c10::TypeKind::TensorType;
}

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
                   bool own_results)
    : op_(find_op(node.op)), results_(std::move(results)), own_results_(own_results) {
  const auto& formals = op_.schema().arguments();
  KILN_CHECK(node.args.size() <= formals.size(), "too many arguments for " + node.op.name());
  for (size_t i = 0; i < formals.size(); ++i) {
    if (i >= node.args.size()) {
      KILN_CHECK(formals[i].default_value().has_value(),
                 "missing argument " + formals[i].name() + " of " + node.op.name());
      template_.push_back(*formals[i].default_value());
      continue;
    }
    const Arg& arg = node.args[i];
    bool optional = false;
    if (arg.is_value()) {
      if (arg.value()) tensors_.push_back({i, slot_of(arg.value())});
      template_.emplace_back(arg.value() || formals[i].type()->kind() != c10::TypeKind::TensorType
                                 ? c10::IValue()
                                 : c10::IValue(at::Tensor()));
    } else if (arg.is_list() && is_tensor_list(formals[i].real_type(), optional) && holds_values(arg)) {
      ListArg list{i, optional, {}};
      for (const Arg& a : arg.list()) list.slots.push_back(a.is_value() && a.value() ? slot_of(a.value()) : kNoSlot);
      lists_.push_back(std::move(list));
      template_.emplace_back();
    } else {
      template_.push_back(aten::to_ivalue(arg, formals[i].real_type(), no_tensor));
    }
  }
  for (Slot s : results_) metas_.push_back(s == kNoSlot ? graph::TensorMeta() : plan.slots[s].meta);
}

bool AtenStep::shares_memory(const Frame& frame, const at::Tensor& t) const {
  if (!t.has_storage()) return false;
  auto same = [&](Slot s) {
    return s != kNoSlot && frame.tensors[s].has_storage() && frame.tensors[s].storage().data() == t.storage().data() &&
           t.storage().nbytes() > 0;
  };
  for (const TensorArg& a : tensors_)
    if (same(a.slot)) return true;
  for (const ListArg& l : lists_)
    if (std::any_of(l.slots.begin(), l.slots.end(), same)) return true;
  return false;
}

void AtenStep::run(Frame& frame) const {
  std::vector<c10::IValue>& stack = frame.stack;
  StackGuard guard{stack};
  stack.assign(template_.begin(), template_.end());
  for (const TensorArg& t : tensors_) stack[t.arg] = frame.tensors[t.slot];
  for (const ListArg& l : lists_) {
    if (l.optional) {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(l.slots.size());
      for (Slot s : l.slots)
        list.push_back(s == kNoSlot ? std::optional<at::Tensor>() : std::optional<at::Tensor>(frame.tensors[s]));
      stack[l.arg] = std::move(list);
    } else {
      c10::List<at::Tensor> list;
      list.reserve(l.slots.size());
      for (Slot s : l.slots) list.push_back(s == kNoSlot ? at::Tensor() : frame.tensors[s]);
      stack[l.arg] = std::move(list);
    }
  }
  call_library(op_, stack);
  size_t r = 0;
  auto take = [&](at::Tensor t) {
    KILN_CHECK(r < results_.size(), "more results than expected from " + c10::toString(op_.operator_name()));
    const size_t i = r++;
    if (results_[i] == kNoSlot) return;
    if (own_results_ && shares_memory(frame, t)) t = t.clone(at::MemoryFormat::Preserve);
    frame.set(results_[i], with_meta(std::move(t), metas_[i], c10::toString(op_.operator_name())));
  };
  for (c10::IValue& v : stack) {
    if (v.isTensor()) {
      take(std::move(v).toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) take(t);
    }
  }
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
  for (const TensorArg& t : tensors_) in.push_back(t.slot);
  for (const ListArg& l : lists_) in.insert(in.end(), l.slots.begin(), l.slots.end());
  return slots_text(plan, results_) + " = call " + c10::toString(op_.operator_name()) + "(" + slots_text(plan, in) +
         ")";
}

void AtenStep::for_each_slot(const std::function<void(Slot)>& f) const {
  for (const TensorArg& t : tensors_) f(t.slot);
  for (const ListArg& l : lists_)
    for (Slot s : l.slots) f(s);
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
  const at::Tensor& base = frame.tensors[base_];
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
