#include "runtime/call_template.h"

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"

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
}  // namespace

CallTemplate::CallTemplate(const graph::Node& node, const SlotOf& slot_of) : op_(find_op(node.op)) {
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
}

void CallTemplate::fill(const std::vector<at::Tensor>& tensors, std::vector<c10::IValue>& stack) const {
  stack.assign(template_.begin(), template_.end());
  for (const TensorArg& t : tensors_) stack[t.arg] = tensors[t.slot];
  for (const ListArg& l : lists_) {
    if (l.optional) {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(l.slots.size());
      for (Slot s : l.slots)
        list.push_back(s == kNoSlot ? std::optional<at::Tensor>() : std::optional<at::Tensor>(tensors[s]));
      stack[l.arg] = std::move(list);
    } else {
      c10::List<at::Tensor> list;
      list.reserve(l.slots.size());
      for (Slot s : l.slots) list.push_back(s == kNoSlot ? at::Tensor() : tensors[s]);
      stack[l.arg] = std::move(list);
    }
  }
}

void CallTemplate::for_each_slot(const std::function<void(Slot)>& f) const {
  for (const TensorArg& t : tensors_) f(t.slot);
  for (const ListArg& l : lists_)
    for (Slot s : l.slots) f(s);
}

void for_each_result(std::vector<c10::IValue>& stack, const std::function<void(at::Tensor)>& f) {
  for (c10::IValue& v : stack) {
    if (v.isTensor()) {
      f(std::move(v).toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) f(t);
    }
  }
}

}  // namespace kiln::runtime
