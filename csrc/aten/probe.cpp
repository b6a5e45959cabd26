#include "aten/probe.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <sstream>
#include <unordered_map>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/overlap.h"
#include "aten/pch.h"
#include "ops/ops.h"

namespace kiln::aten {
namespace {

/// Tensors of a call that is made as it is have no more elements than this together.
constexpr int64_t kMaxElements = 8192;

/// Those of a call that is made to see its results have no more than this.
constexpr int64_t kMaxTried = int64_t{1} << 24;

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

/// Puts the default generator back.
class KeepGenerator {
 public:
  KeepGenerator()
      : generator_(at::get_generator_or_default<at::CPUGeneratorImpl>({}, at::detail::getDefaultCPUGenerator())) {
    std::lock_guard lock(generator_->mutex_);
    engine_ = generator_->engine();
    next_float_ = generator_->next_float_normal_sample();
    next_double_ = generator_->next_double_normal_sample();
  }
  ~KeepGenerator() {
    std::lock_guard lock(generator_->mutex_);
    generator_->set_engine(engine_);
    generator_->set_next_float_normal_sample(next_float_);
    generator_->set_next_double_normal_sample(next_double_);
  }
  KeepGenerator(const KeepGenerator&) = delete;

 private:
  at::CPUGeneratorImpl* generator_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
};

/// Elements that some kernels want: indices and targets are in range as zeros, divisors and matrices are not.
enum class Fill : uint8_t { Zeros, Ordinary };

/// Real tensors in the place of fakes; fakes that share memory get tensors that do.
class StandIns {
 public:
  StandIns(Fill fill, bool shrunken) : fill_(fill), shrunken_(shrunken) {}

  c10::IValue replace(const c10::IValue& v) {
    return map_tensors(v, [this](const at::Tensor& t) { return real(t); });
  }

 private:
  at::Tensor real(const at::Tensor& t) {
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && !is_fake(t)) return t;
    at::Tensor& made = made_[t.unsafeGetTensorImpl()];
    if (made.defined()) return made;
    made = shrunken_ ? shrunk(t) : placed(t);
    if (fill_ == Fill::Ordinary) make_ordinary(made);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  at::Tensor shrunk(const at::Tensor& t) {
    std::vector<int64_t> sizes = t.sizes().vec();
    for (int64_t& s : sizes) s = std::min<int64_t>(s, 1);
    return at::zeros(sizes, t.scalar_type());
  }

  at::Tensor placed(const at::Tensor& t) {
    const auto bytes = static_cast<int64_t>(t.storage().nbytes());
    if (bytes > 8 * kMaxElements) return at::zeros(t.sizes(), t.scalar_type());
    at::Tensor& memory = memory_[t.storage().unsafeGetStorageImpl()];
    if (!memory.defined()) memory = at::zeros({bytes}, at::kByte);
    return at::empty({0}, t.scalar_type()).set_(memory.storage(), t.storage_offset(), t.sizes(), t.strides());
  }

  /// Numbers between 0 and 1, ones among the integers; square matrices are regular and positive.
  static void make_ordinary(at::Tensor t) {
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.stride(d) == 0 && t.size(d) > 1) t = t.narrow(d, 0, 1);  // expanded
    if (t.numel() == 0 || overlaps_itself(t)) return;
    if (!t.is_floating_point() && !t.is_complex()) {
      t.fill_(1);
      return;
    }
    const at::Tensor steps = at::arange(t.numel(), at::kDouble).mul_(0.754877666).frac_().mul_(0.1).add_(0.4);
    t.copy_(steps.view(t.sizes()));
    if (t.dim() >= 2 && t.size(-1) == t.size(-2)) t.diagonal(0, -2, -1).add_(static_cast<double>(t.size(-1)));
  }

  Fill fill_;
  bool shrunken_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> memory_;
};

/// While one lives, a call leaves no trace and meets no fakes.
class Unseen {
 public:
  Unseen() : quiet_(&silent_) {}

 private:
  Silent silent_;
  c10::WarningUtils::WarningHandlerGuard quiet_;
  c10::WarningUtils::WarnAlways not_once_;  // what warns once will do so later
  KeepGenerator generator_;
  at::AutoGradMode no_grad_{false};
  NoFakeGuard real_;
};

torch::jit::Stack call_on_stand_ins(const OpInfo& op, c10::ArrayRef<c10::IValue> args, Fill fill, bool shrunken) {
  StandIns tensors(fill, shrunken);
  torch::jit::Stack stack;
  for (const c10::IValue& v : args) stack.push_back(tensors.replace(v));
  op.handle.callBoxed(stack);
  return stack;
}

std::optional<std::string> complaint(const OpInfo& op, c10::ArrayRef<c10::IValue> args, Fill fill, bool shrunken) {
  try {
    call_on_stand_ins(op, args, fill, shrunken);
    return std::nullopt;
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
}

/// Whether a call on tensors of size 1 says something of the call itself, as far as dtypes go.
bool can_shrink(const OpInfo& op) {
  const ops::OpInfo* row = ops::lookup(op.op);
  if (!row) return false;
  switch (row->kind) {
    case ops::Kind::Pointwise:
    case ops::Kind::Reduction:
    case ops::Kind::Scan:
    case ops::Kind::Softmax:
    case ops::Kind::Gather:
    case ops::Kind::Scatter:
    case ops::Kind::Loss:
      return true;
    default:
      return false;
  }
}

bool is_about_dtypes(const std::string& message) {
  for (const char* word : {"dtype", "type", "not implemented for", "not supported"})
    if (message.find(word) != std::string::npos) return true;
  return false;
}

/// Whether the elements of a mask say how many values an in-place write takes.
bool selects_by_mask(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  return op.op.name().find("index_put") != std::string::npos && has_mask(args[1]);
}

struct Call {
  std::string key;
  int64_t elements = 0;
  bool possible = true;
  bool plain = true;  // nothing but float32 or float64 tensors, all alike, and numbers

  Call(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
    std::ostringstream text;
    text << op.op.id() << ' ' << c10::get_default_dtype_as_scalartype();
    std::unordered_map<const c10::StorageImpl*, int> storages;
    std::optional<at::ScalarType> dtype;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < args.size(); ++i) {
      const c10::IValue& v = args[i];
      bool any = false;
      text << '|';
      for_each_tensor(v, [&](const at::Tensor& t) {
        any = true;
        text << ';';
        if (!t.defined()) return;
        if (!t.is_cpu() || t.layout() != at::kStrided || t.is_conj() || t.is_neg()) possible = false;
        const bool number = t.unsafeGetTensorImpl()->is_wrapped_number();
        if (!possible) return;
        text << t.scalar_type() << (number ? "w" : "");
        // Memory that is shared is told apart, other layouts are not.
        const c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
        const bool known = !storages.emplace(storage, static_cast<int>(storages.size())).second;
        text << t.sizes();
        if (known) text << '@' << storages[storage] << t.strides() << t.storage_offset();
        if (!t.is_non_overlapping_and_dense()) text << t.strides();
        if (number) return;
        elements += t.numel();
        plain = plain && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble) &&
                (!dtype || *dtype == t.scalar_type());
        dtype = t.scalar_type();
      });
      if (any || v.isTensor() || v.isTensorList()) continue;
      if (v.isGenerator() || v.isObject() || v.isStorage()) {
        possible = false;
        return;
      }
      if (v.isString() || (v.isBool() && arguments[i].type()->kind() == c10::TypeKind::NumberType)) plain = false;
      text << v.tagKind() << v;
    }
    key = text.str();
  }
};

}  // namespace

std::string refused_by_eager(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  if ((op.kind != OpKind::Functional && op.kind != OpKind::InPlace) || op.factory || op.needs_data) return "";
  if (op.random && op.kind != OpKind::InPlace) return "";
  if (!op.op.name().starts_with("aten::")) return "";
  const Call call(op, args);
  if (!call.possible) return "";
  const bool shrunken = call.elements > kMaxElements;
  if (shrunken && (call.plain || !can_shrink(op))) return "";
  static auto& known = *new std::unordered_map<std::string, std::string>();
  static auto& mutex = *new std::mutex();
  {
    std::lock_guard lock(mutex);
    if (auto it = known.find(call.key); it != known.end()) return it->second;
  }
  std::string refusal;
  {
    const Unseen unseen;
    std::optional<std::string> first = complaint(op, args, Fill::Zeros, shrunken);
    if (first && complaint(op, args, Fill::Ordinary, shrunken)) refusal = op.op.name() + " in eager: " + *first;
  }
  if ((shrunken || selects_by_mask(op, args)) && !is_about_dtypes(refusal)) refusal.clear();
  std::lock_guard lock(mutex);
  if (known.size() > 10000) known.clear();
  return known.emplace(call.key, refusal).first->second;
}

std::optional<std::vector<graph::TensorMeta>> results_in_eager(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  // Others may do more than to compute.
  const bool is_pytorchs = op.op.name().starts_with("aten::") || op.op.name().starts_with("quantized::");
  if (op.kind != OpKind::Functional || op.factory || op.needs_data || !is_pytorchs) return std::nullopt;
  int64_t elements = 0;
  for (const c10::IValue& v : args) {
    if (v.isGenerator() || v.isStorage()) return std::nullopt;
    for_each_tensor(v, [&](const at::Tensor& t) { elements += t.defined() ? t.numel() : 0; });
  }
  if (elements > kMaxTried) return std::nullopt;
  const Unseen unseen;
  std::optional<std::vector<graph::TensorMeta>> found;
  for (const Fill fill : {Fill::Zeros, Fill::Ordinary}) {
    try {
      std::vector<graph::TensorMeta> metas;
      for (const at::Tensor& t : flatten_tensors(call_on_stand_ins(op, args, fill, /*shrunken=*/false))) {
        if (t.defined() && t.layout() != at::kStrided) return std::nullopt;
        metas.emplace_back();
        metas.back().defined = t.defined();
        if (t.defined()) metas.back() = meta_of(t);
      }
      if (found && *found != metas) return std::nullopt;
      found = std::move(metas);
    } catch (const std::exception&) {
      // The elements may be at fault: a scale of zero.
    }
  }
  return found;
}

}  // namespace kiln::aten
