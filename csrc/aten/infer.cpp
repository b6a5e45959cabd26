#include "aten/infer.h"

#include <ATen/ExpandUtils.h>

#include <unordered_map>

#include "aten/convert.h"

namespace kiln::aten {
namespace {

using Metas = std::vector<graph::TensorMeta>;

/// Arguments of a boxed call by name.
struct Call {
  const OpInfo& op;
  c10::ArrayRef<c10::IValue> args;
  const c10::IValue* find(const char* name) const {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return args[i].isNone() ? nullptr : &args[i];
    return nullptr;
  }
};

/// dtype, device and memory format arguments over the defaults of `m` (its dtype and device).
void take_options(const Call& call, graph::TensorMeta& m) {
  if (auto* v = call.find("dtype")) m.dtype = dtype_of(static_cast<at::ScalarType>(v->toInt()));
  if (auto* v = call.find("device")) m.device = device_of(v->toDevice());
}

/// Strides of a copy of `like` in the memory format argument, Preserve by default.
void take_format(const Call& call, const at::Tensor& like, graph::TensorMeta& m, at::MemoryFormat otherwise) {
  at::MemoryFormat f = otherwise;
  if (auto* v = call.find("memory_format")) f = static_cast<at::MemoryFormat>(v->toInt());
  if (f != at::MemoryFormat::Preserve) {
    m.strides = graph::strides_for(m.sizes, memory_format_of(f));
  } else if (like.is_non_overlapping_and_dense()) {
    m.strides = like.strides().vec();
  } else {
    m.strides = at::infer_dense_strides(like.sizes(), like.strides());
  }
}

graph::TensorMeta defaults() {
  graph::TensorMeta m;
  m.dtype = dtype_of(c10::get_default_dtype_as_scalartype());
  return m;
}

graph::TensorMeta fresh_like(const at::Tensor& t) {
  graph::TensorMeta m;
  m.dtype = dtype_of(t.scalar_type());
  m.sizes = t.sizes().vec();
  m.device = device_of(t.device());
  return m;
}

/// zeros, ones, rand, randn, empty, full: sizes as an argument.
Metas factory(const Call& call) {
  graph::TensorMeta m = defaults();
  m.sizes = call.find("size")->toIntVector();
  if (auto* fill = call.find("fill_value")) {
    if (fill->isBool())
      m.dtype = DType::Bool;
    else if (fill->isInt())
      m.dtype = DType::Int64;
    else if (fill->isComplexDouble())
      m.dtype = m.dtype == DType::Float64 ? DType::Complex128 : DType::Complex64;
  }
  if (call.find("high")) m.dtype = DType::Int64;
  take_options(call, m);
  if (auto* v = call.find("stride"))
    m.strides = v->toIntVector();
  else if (auto* f = call.find("memory_format"))
    m.strides = graph::strides_for(m.sizes, memory_format_of(static_cast<at::MemoryFormat>(f->toInt())));
  else
    m.strides = graph::contiguous_strides(m.sizes);
  return {m};
}

Metas scalar_tensor(const Call& call) {
  graph::TensorMeta m = defaults();
  take_options(call, m);
  return {m};
}

Metas like(const Call& call) {
  const at::Tensor& self = call.args[0].toTensor();
  graph::TensorMeta m = fresh_like(self);
  take_options(call, m);
  take_format(call, self, m, at::MemoryFormat::Preserve);
  return {m};
}

Metas new_like(const Call& call) {
  graph::TensorMeta m = fresh_like(call.args[0].toTensor());
  m.sizes = call.find("size")->toIntVector();
  take_options(call, m);
  if (auto* v = call.find("stride"))
    m.strides = v->toIntVector();
  else
    m.strides = graph::contiguous_strides(m.sizes);
  return {m};
}

/// The op does not change its first argument's dtype or sizes; strides as of a TensorIterator output.
Metas same(const Call& call) {
  const at::Tensor& self = call.args[0].toTensor();
  graph::TensorMeta m = fresh_like(self);
  take_format(call, self, m, at::MemoryFormat::Preserve);
  return {m};
}

Metas unsafe_view(const Call& call) {
  const at::Tensor& self = call.args[0].toTensor();
  graph::TensorMeta m = fresh_like(self);
  m.sizes = at::infer_size(call.args[1].toIntVector(), self.numel());
  m.strides = graph::contiguous_strides(m.sizes);
  return {m};
}

using Rule = Metas (*)(const Call&);
const std::unordered_map<graph::Op, Rule>& rules() {
  static const auto& table = *[] {
    auto* t = new std::unordered_map<graph::Op, Rule>();
    auto add = [&](std::initializer_list<const char*> names, Rule rule) {
      for (const char* name : names) t->emplace(graph::Op(std::string("aten::") + name), rule);
    };
    add({"zeros", "ones", "rand", "randn", "empty.memory_format", "empty_strided", "full", "randint", "randint.low",
         "rand.generator", "randn.generator"},
        factory);
    add({"scalar_tensor"}, scalar_tensor);
    add({"zeros_like", "ones_like", "rand_like", "randn_like", "empty_like", "full_like", "randint_like", "_to_copy"},
        like);
    add({"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}, new_like);
    add({"clone", "fill.Scalar", "fill.Tensor", "relu", "bernoulli", "bernoulli.p", "hardtanh", "hardswish",
         "lift_fresh_copy", "uniform", "normal_functional"},
        same);
    add({"_unsafe_view"}, unsafe_view);
    return t;
  }();
  return table;
}

}  // namespace

std::optional<Metas> infer(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  auto it = rules().find(op.op);
  if (it == rules().end()) return std::nullopt;
  return it->second(Call{op, args});
}

}  // namespace kiln::aten
