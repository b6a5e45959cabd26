#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_set>

#include "ops/ops.h"
#include "ops/rules/rules.h"

namespace kiln::ops {
namespace {

std::vector<OpInfo> make_table() {
  using namespace rules;
  using enum Kind;
  std::vector<OpInfo> rows;
#define KILN_OP(name, kind, flags, ...) rows.push_back({Op(name), kind, flags, __VA_ARGS__, nullptr});
#include "ops/aten_copy.def"
#include "ops/aten_foreach.def"
#include "ops/aten_index.def"
#include "ops/aten_nn.def"
#include "ops/aten_pointwise.def"
#include "ops/aten_reduction.def"
#include "ops/aten_view.def"
#undef KILN_OP
  return rows;
}

// "aten::add_.Tensor" -> "aten::add.Tensor"; empty for names that are not in-place ones ("aten::__and__.Tensor").
std::string functional_name(std::string_view name) {
  const size_t start = name.find("::");
  if (start == std::string_view::npos) return {};
  const size_t dot = std::min(name.find('.', start), name.size());
  const std::string_view base = name.substr(0, dot);
  if (!base.ends_with('_') || base.ends_with("__")) return {};
  return std::string(base.substr(0, base.size() - 1)) + std::string(name.substr(dot));
}

bool is_out_overload(std::string_view name) {
  const size_t start = name.find("::");
  if (start == std::string_view::npos) return false;
  const size_t dot = name.find('.', start);
  if (dot == std::string_view::npos) return false;
  const std::string_view overload = name.substr(dot + 1);
  return overload == "out" || overload.ends_with("_out");
}

class Registry {
 public:
  Registry() {
    for (const OpInfo& info : table()) {
      const bool fresh = known_.emplace(info.op, &info).second;
      KILN_CHECK(fresh, "two rows for " + info.op.name());
    }
  }
  const OpInfo* find(Op op) {
    {
      std::shared_lock lock(mutex_);
      if (auto it = known_.find(op); it != known_.end()) return it->second;
    }
    const OpInfo* info = derive(op);
    std::unique_lock lock(mutex_);
    return known_.emplace(op, info).first->second;
  }

 private:
  const OpInfo* derive(Op op) {
    const std::string base = functional_name(op.name());
    if (base.empty()) return nullptr;
    const OpInfo* functional = find(Op(base));
    if (!functional) return nullptr;
    // Lives as long as the process, as the rows of the table do.
    auto* info = new OpInfo(*functional);
    info->op = op;
    info->flags |= kMutates;
    info->rule = functional->rule ? rules::in_place : nullptr;
    info->functional = functional;
    return info;
  }
  std::shared_mutex mutex_;
  std::unordered_map<Op, const OpInfo*> known_;
};

Registry& registry() {
  static auto* r = new Registry;
  return *r;
}

std::atomic<DType> g_default_dtype{DType::Float32};

}  // namespace

const std::vector<OpInfo>& table() {
  static const auto* rows = new std::vector<OpInfo>(make_table());
  return *rows;
}

const OpInfo* lookup(Op op) { return registry().find(op); }

namespace {
thread_local bool has_one_thread = false;
}  // namespace

bool one_thread() { return has_one_thread; }
void set_one_thread(bool one) { has_one_thread = one; }

std::vector<TensorMeta> infer(Op op, std::span<const Arg> args) {
  const OpInfo* info = lookup(op);
  if (!info || !info->rule) throw Unsupported("no shape rule for " + op.name());
  try {
    return info->rule(*info, args);
  } catch (const std::bad_variant_access&) {
    throw Unsupported("the shape rule of " + op.name() + " does not know arguments of these kinds");
  } catch (const std::out_of_range&) {
    throw Unsupported("the shape rule of " + op.name() + " misses an argument or a dim");
  }
}

bool is_random(Op op) {
  const OpInfo* info = lookup(op);
  return info && info->has(kRandom);
}

bool is_view(Op op) {
  const OpInfo* info = lookup(op);
  return info && info->kind == Kind::View;
}

bool is_pointwise(Op op) {
  const OpInfo* info = lookup(op);
  return info && info->kind == Kind::Pointwise;
}

bool mutates(Op op) {
  if (const OpInfo* info = lookup(op)) return info->has(kMutates);
  return !functional_name(op.name()).empty() || is_out_overload(op.name());
}

Recompute recompute_cost(Op op) {
  const OpInfo* info = lookup(op);
  if (!info || info->has(kRandom) || info->has(kMutates)) return Recompute::Never;
  switch (info->kind) {
    case Kind::View:
    case Kind::Factory:
      return Recompute::Free;
    case Kind::Pointwise:
    case Kind::Copy:
      return Recompute::Cheap;
    case Kind::MatMul:
    case Kind::Convolution:
    case Kind::Attention:
    case Kind::Other:
      return Recompute::Never;
    default:
      return Recompute::Dear;
  }
}

bool saves_tensors(Op op) {
  static const std::unordered_set<std::string_view> names = {"addmm",        "baddbmm",
                                                             "batch_norm",   "bmm",
                                                             "conv1d",       "conv2d",
                                                             "conv3d",       "convolution",
                                                             "dropout",      "_convolution",
                                                             "exp",          "gelu",
                                                             "group_norm",   "instance_norm",
                                                             "layer_norm",   "linear",
                                                             "matmul",       "mm",
                                                             "_log_softmax", "relu",
                                                             "rms_norm",     "sigmoid",
                                                             "silu",         "softmax",
                                                             "tanh",         "scaled_dot_product_attention"};
  std::string_view name = op.name();
  constexpr std::string_view aten = "aten::";
  if (!name.starts_with(aten)) return false;
  name.remove_prefix(aten.size());
  return names.contains(name.substr(0, name.find('.')));
}

DType default_dtype() { return g_default_dtype; }
void set_default_dtype(DType t) { g_default_dtype = t; }

}  // namespace kiln::ops
