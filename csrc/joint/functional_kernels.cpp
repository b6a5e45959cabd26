// Functionalization of ops whose schema hides that they write, and its switches.
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "aten/functional_tensor.h"
#include "aten/pch.h"
#include "joint/state.h"

namespace kiln::joint {
namespace {

namespace fn = at::functionalization::impl;
using OptionalTensor = std::optional<at::Tensor>;

using aten::value_below;
OptionalTensor value_below(const OptionalTensor& t) { return t ? OptionalTensor(aten::value_below(*t)) : t; }

/// native_batch_norm in training writes its running statistics although its schema does not say so.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(const at::Tensor& input, const OptionalTensor& weight,
                                                                 const OptionalTensor& bias, const OptionalTensor& mean,
                                                                 const OptionalTensor& var, bool training,
                                                                 double momentum, double eps) {
  const bool functional = fn::isFunctionalTensor(input);
  const bool writes = training && mean && mean->defined() && fn::isFunctionalTensor(*mean) && var && var->defined() &&
                      fn::isFunctionalTensor(*var);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> out;
  at::Tensor new_mean, new_var;
  {
    c10::impl::ExcludeDispatchKeyGuard skip(c10::DispatchKeySet(c10::DispatchKey::Functionalize));
    if (writes) {
      at::Tensor a, b, c;
      std::tie(a, b, c, new_mean, new_var) =
          at::_native_batch_norm_legit_functional(value_below(input), value_below(weight), value_below(bias),
                                                  value_below(*mean), value_below(*var), training, momentum, eps);
      out = {a, b, c};
    } else if (!functional) {
      out = at::native_batch_norm(input, weight, bias, mean, var, training, momentum, eps);
    } else if (training && (!mean || !mean->defined())) {
      out = at::_native_batch_norm_legit(value_below(input), value_below(weight), value_below(bias), training, momentum,
                                         eps);
    } else if (!training) {
      out = at::_native_batch_norm_legit_no_training(value_below(input), value_below(weight), value_below(bias),
                                                     value_below(*mean), value_below(*var), momentum, eps);
    } else {
      out = at::native_batch_norm(value_below(input), value_below(weight), value_below(bias), value_below(mean),
                                  value_below(var), training, momentum, eps);
    }
  }
  if (writes) {
    const std::pair<at::Tensor, at::Tensor> changes[] = {{*mean, new_mean}, {*var, new_var}};
    for (const auto& [wrapper, value] : changes) aten::write_below(wrapper, value);
  }
  if (!functional) return out;
  return {fn::to_functional_tensor(std::get<0>(out)), fn::to_functional_tensor(std::get<1>(out)),
          fn::to_functional_tensor(std::get<2>(out))};
}

/// Eager draws numbers in the order of self's memory; the functional form draws them in logical order, which is the
/// same with the dimensions in the order of their strides.
at::Tensor& bernoulli_(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  c10::impl::ExcludeDispatchKeyGuard skip(c10::DispatchKeySet(c10::DispatchKey::Functionalize));
  if (!fn::isFunctionalTensor(self)) return self.bernoulli_(p, generator);
  const at::Tensor value = value_below(self);
  if (!TraceState::is_active() || value.is_contiguous()) {
    aten::write_below(self, at::bernoulli(value, p, generator));
    return self;
  }
  std::vector<int64_t> order(static_cast<size_t>(value.dim())), back(order.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value.stride(a) > value.stride(b); });
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  const bool in_order = std::ranges::is_sorted(order);
  aten::write_below(self, in_order ? at::bernoulli(value, p, generator)
                                   : at::bernoulli(value.permute(order), p, generator).permute(back));
  return self;
}

/// Functional forms that give a row-major tensor for any layout. A view that another layout was written to could not be
/// put back into what it is a view of, and autograd's formulas write to what they have just made: the operators that
/// the program calls are looked after in replay.cpp, too.
constexpr const char* kRowMajor[] = {
    "scatter_.src",
    "scatter_.value",
    "scatter_.reduce",
    "scatter_.value_reduce",
    "scatter_add_",
    "index_add_",
    "index_copy_",
    "index_reduce_",
    "masked_scatter_",
    "tril_",
    "triu_",
    "cumsum_",
    "cumprod_",
    "renorm_",
    "addmm_",
    "baddbmm_",
    "addbmm_",
    "scatter_reduce_.two",
    "masked_fill_.Scalar",
    "masked_fill_.Tensor",
};

/// Functionalization of one of those: the result lies in memory as self does, or would without its gaps.
void keep_layout(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[first].toTensor();
  c10::impl::ExcludeDispatchKeyGuard skip(c10::DispatchKeySet(c10::DispatchKey::Functionalize));
  if (!fn::isFunctionalTensor(self)) {
    for (size_t i = first; i < stack->size(); ++i)
      TORCH_CHECK(!(*stack)[i].isTensor() || !fn::isFunctionalTensor((*stack)[i].toTensor()), op.schema().name(),
                  " of a tensor that is not functional, with a functional argument");
    return op.callBoxed(stack);
  }
  std::string name = op.schema().name();
  name.pop_back();  // the underscore
  const auto form = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), op.schema().overload_name().c_str());
  for (size_t i = first; i < stack->size(); ++i)
    if ((*stack)[i].isTensor()) (*stack)[i] = aten::value_below((*stack)[i].toTensor());
  const at::Tensor value = (*stack)[first].toTensor();
  form.callBoxed(stack);
  at::Tensor result = stack->back().toTensor();
  if (TraceState::is_active()) {  // others' sizes may be symbols
    const std::vector<int64_t> strides = value.is_non_overlapping_and_dense()
                                             ? value.strides().vec()
                                             : at::infer_dense_strides(value.sizes(), value.strides());
    if (result.numel() > 0 && result.strides() != at::IntArrayRef(strides))
      result = TraceState::laid_out(result, strides);
  }
  aten::write_below(self, result);
  stack->back() = self;
}

// Before each in-place op, functionalization runs the op's Meta kernel once more to find shape errors. Those kernels
// are Python, take 100 us each, and the check is done by the shape rules anyway. PyTorch reads this switch once.
[[maybe_unused]] const bool no_reference_runs = [] {
  setenv("TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE", "1", /*overwrite=*/0);
  return true;
}();

}  // namespace
}  // namespace kiln::joint

TORCH_LIBRARY_IMPL(aten, Functionalize, m) { m.impl("native_batch_norm", &kiln::joint::native_batch_norm); }

namespace {
/// PyTorch warns when a kernel of its own is replaced; these are replaced on purpose, and nothing says so.
[[maybe_unused]] const bool replaced = [] {
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const auto replace = [](c10::DispatchKey key, const char* name, torch::CppFunction kernel) {
    static auto* libraries = new std::vector<torch::Library>();  // what they register goes with them
    libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__).impl(name, std::move(kernel));
  };
  replace(c10::DispatchKey::Functionalize, "bernoulli_.float", torch::CppFunction(&kiln::joint::bernoulli_));
  for (const char* name : kiln::joint::kRowMajor)
    replace(c10::DispatchKey::Functionalize, name,
            torch::CppFunction::makeFromBoxedFunction<&kiln::joint::keep_layout>());
  // Views of tensors that are zero without memory go straight to the strided kernels, which take a functional tensor
  // for a plain one. Below they come to the same kernels, by way of functionalization.
  for (const char* view : {"view", "_reshape_alias", "as_strided"})
    replace(c10::DispatchKey::ZeroTensor, view, torch::CppFunction::makeFallthrough());
  return true;
}();
}  // namespace
