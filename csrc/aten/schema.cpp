#include "aten/schema.h"

#include <mutex>
#include <unordered_map>

#include "aten/meta_kernels.h"
#include "base/error.h"
#include "ops/ops.h"

namespace kiln::aten {
namespace {

bool is_tensor_type(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::OptionalType:
      return is_tensor_type(type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType:
      return is_tensor_type(type->castRaw<c10::ListType>()->getElementType());
    default:
      return false;
  }
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

/// Reads off the schema of the operator what the record says.
void fill(OpInfo& info) {
  const c10::OperatorHandle& handle = info.handle;
  const c10::FunctionSchema& schema = handle.schema();
  info.op = graph::Op(full_name(handle.operator_name()));
  info.random = handle.hasTag(at::Tag::nondeterministic_seeded);
  const ops::OpInfo* row = ops::lookup(info.op);
  info.needs_data = handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape) ||
                    (row && row->has(ops::kDataDependent));
  bool out = false;
  info.factory = true;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_tensor_type(arguments[i].type())) info.factory = false;
    if (const auto* alias = arguments[i].alias_info(); alias && alias->isWrite()) {
      info.written_args.push_back(static_cast<int>(i));
      out |= arguments[i].is_out();
    }
  }
  bool views = false;
  for (const c10::Argument& ret : schema.returns()) {
    int from = -1;
    if (const auto* alias = ret.alias_info()) {
      if (alias->isWrite()) {
        for (int i : info.written_args)
          if (arguments[i].alias_info()->beforeSets() == alias->beforeSets()) from = i;
      } else {
        views = true;
      }
    }
    info.written_return.push_back(from);
  }
  if (!info.written_args.empty()) {
    const std::string& name = schema.name();
    // ATen's out= kernels resize what they write to; others write.
    info.kind = out && name.starts_with("aten::") ? OpKind::Out : OpKind::InPlace;
    if (handle.hasTag(at::Tag::inplace_view) || name == "aten::resize_" || name == "aten::resize_as_" ||
        name == "aten::set_")
      info.kind = OpKind::InPlaceView;
  } else if (views) {
    info.kind = OpKind::View;
  }
  info.meta = meta_kernel(info.op);
}

/// The records by what finds them.
struct Records {
  std::mutex mutex;
  /// By the schema's address: it is part of the operator's definition in the dispatcher and does not move.
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>> by_schema;
  std::unordered_map<graph::Op, const OpInfo*> by_name;
  std::vector<std::unique_ptr<OpInfo>> gone;  // graphs may refer to them
};

struct Forget final : c10::OpRegistrationListener {
  explicit Forget(Records& r) : records(r) {}
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override {
    std::lock_guard lock(records.mutex);
    const auto it = records.by_schema.find(&handle.schema());
    if (it == records.by_schema.end()) return;
    it->second->deregistered = true;
    records.by_name.erase(it->second->op);
    records.gone.push_back(std::move(it->second));
    records.by_schema.erase(it);
  }
  Records& records;
};

Records& records() {
  static auto& all = *[] {
    auto* made = new Records();
    // Never taken back: it lives as long as the records.
    new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Forget>(*made)));
    return made;
  }();
  return all;
}

}  // namespace

bool OpInfo::call_needs_data(const std::function<bool(size_t)>& is_given,
                             const std::function<bool(size_t)>& has_mask) const {
  if (!needs_data) return false;
  static const graph::Op index("aten::index.Tensor");
  if (op == index) return has_mask(1);
  // repeat_interleave knows its size if it is told.
  const std::optional<int> size = schema().argumentIndexWithName("output_size");
  return !size || !is_given(static_cast<size_t>(*size));
}

const OpInfo& op_info(const c10::OperatorHandle& handle) {
  Records& all = records();
  std::lock_guard lock(all.mutex);
  auto& slot = all.by_schema[&handle.schema()];
  if (!slot) {
    slot = std::make_unique<OpInfo>(handle);
    fill(*slot);
  }
  return *slot;
}

const OpInfo* find_op(graph::Op op) {
  Records& all = records();
  {
    std::lock_guard lock(all.mutex);
    if (auto it = all.by_name.find(op); it != all.by_name.end()) return it->second;
  }
  const std::string& name = op.name();
  const size_t colons = name.find("::");
  if (colons == std::string::npos) return nullptr;
  const size_t dot = name.find('.', colons);
  auto handle = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), dot == std::string::npos ? std::string() : name.substr(dot + 1)});
  if (!handle) return nullptr;  // not remembered: a library may register it later
  const OpInfo* info = &op_info(*handle);
  std::lock_guard lock(all.mutex);
  all.by_name.emplace(op, info);
  return info;
}

const OpInfo& get_op(graph::Op op) {
  const OpInfo* info = find_op(op);
  KILN_CHECK(info, "no operator " + op.name());
  return *info;
}
const OpInfo& get_op(std::string_view name) { return get_op(graph::Op(name)); }

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& r : schema.returns()) {
    const auto kind = r.type()->kind();
    if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType) return true;
  }
  return schema.returns().empty();
}

}  // namespace kiln::aten
