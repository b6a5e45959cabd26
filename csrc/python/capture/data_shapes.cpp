// Operators whose result, or its shape, depends on data (nonzero, masks as indices, repeat_interleave, unique). Where
// that data is small integers which cost little to compute from the graph's inputs (labels, lengths, edges, masks over
// them), what it is in this call is taken for granted, and that it is so becomes a guard: see Machine::decide_numbers.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/istft_native.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/own_ops.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {

using Stack = torch::jit::Stack;
using Handler = bool (*)(Machine&, const c10::OperatorHandle&, Stack&);
using Indices = c10::List<std::optional<at::Tensor>>;

/// The call's arguments, which stand on top of the stack.
c10::IValue& argument(const c10::OperatorHandle& op, Stack& stack, size_t i) {
  return stack[stack.size() - op.schema().arguments().size() + i];
}

bool give(const c10::OperatorHandle& op, Stack& stack, std::vector<c10::IValue> results) {
  torch::jit::drop(stack, op.schema().arguments().size());
  for (c10::IValue& r : results) stack.push_back(std::move(r));
  return true;
}

bool is_fake_argument(const c10::IValue& v) { return v.isTensor() && aten::is_fake(v.toTensor()); }

bool nonzero(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = argument(op, stack, 0).toTensor();
  if (!m.may_decide(self)) return false;
  const at::Tensor found = m.sized_nonzero(self);
  return found.defined() && give(op, stack, {found});
}

/// One tensor of indices per dim.
bool nonzero_by_dim(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = argument(op, stack, 0).toTensor();
  if (!m.may_decide(self)) return false;
  const at::Tensor found = m.sized_nonzero(self.dim() ? self : self.unsqueeze(0));
  return found.defined() && give(op, stack, {found.unbind(1)});
}

/// `given` with tensors of indices in place of masks, as the masks select of `self`; empty if they cannot be decided.
std::optional<Indices> without_masks(Machine& m, const at::Tensor& self, const c10::IValue& given) {
  const auto is_mask = [](const at::Tensor& t) { return t.defined() && aten::is_mask(t.scalar_type()); };
  std::vector<at::Tensor> all;
  for (const c10::IValue& v : given.toListRef()) all.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
  int64_t dim = 0;
  for (const at::Tensor& t : all) {
    if (!is_mask(t)) {
      ++dim;
      continue;
    }
    if (t.dim() == 0 || dim + t.dim() > self.dim() || t.sizes() != self.sizes().slice(dim, t.dim())) return {};
    if (!m.may_decide(t)) return {};
    dim += t.dim();
  }
  Indices indices;
  for (const at::Tensor& t : all) {
    if (!is_mask(t)) {
      indices.push_back(t.defined() ? std::optional(t) : std::nullopt);
      continue;
    }
    const at::Tensor found = m.sized_nonzero(t);
    if (!found.defined()) return {};
    for (int64_t d = 0; d < t.dim(); ++d) indices.push_back(found.select(1, d));
  }
  return indices;
}

bool index(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  if (!aten::has_mask(argument(op, stack, 1))) return false;
  const at::Tensor self = argument(op, stack, 0).toTensor();
  const auto indices = without_masks(m, self, argument(op, stack, 1));
  return indices && give(op, stack, {at::index(self, *indices)});
}

/// Whether what is written by the mask, the only index, has a line for each element that it selects.
bool one_for_each(const at::Tensor& self, const c10::IValue& indices, const at::Tensor& values) {
  const auto list = indices.toListRef();
  if (list.size() != 1 || !list[0].isTensor()) return false;
  const int64_t rest = self.dim() - list[0].toTensor().dim(), at = values.dim() - rest - 1;
  return rest >= 0 && at >= 0 && values.size(at) != 1;
}

/// Writing by masks needs no shape, but for its gradient and to see whether the values fit.
template <bool kInPlace>
bool index_put(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  if (!aten::has_mask(argument(op, stack, 1))) return false;
  const at::Tensor self = argument(op, stack, 0).toTensor(), values = argument(op, stack, 2).toTensor();
  const bool accumulate = argument(op, stack, 3).toBool(), has_gradient = values.requires_grad();
  if (!(has_gradient && at::GradMode::is_enabled()) && !one_for_each(self, argument(op, stack, 1), values))
    return false;
  const auto indices = without_masks(m, self, argument(op, stack, 1));
  if (!indices) return false;
  if constexpr (kInPlace)
    return give(op, stack, {at::index_put_(const_cast<at::Tensor&>(self), *indices, values, accumulate)});
  return give(op, stack, {at::index_put(self, *indices, values, accumulate)});
}

bool masked_select(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = argument(op, stack, 0).toTensor(), mask = argument(op, stack, 1).toTensor();
  if (!at::are_expandable(self.sizes(), mask.sizes()) || mask.scalar_type() != at::kBool || !m.may_decide(mask))
    return false;
  const std::vector<int64_t> sizes = at::infer_size(self.sizes(), mask.sizes());
  if (sizes.empty()) return false;
  const at::Tensor found = m.sized_nonzero(mask.expand(sizes));
  if (!found.defined()) return false;
  Indices indices;
  for (const at::Tensor& t : found.unbind(1)) indices.push_back(t);
  return give(op, stack, {at::index(self.expand(sizes), indices)});
}

/// Whether no element of `t`, which has some, is negative. False if that cannot be decided.
bool none_negative(Machine& m, const at::Tensor& t) { return m.decide(at::ge(at::min(t), 0)).value_or(false); }

/// Each index as often as `repeats` says. Undefined if their number cannot be decided.
at::Tensor repeated_indices(Machine& m, const at::Tensor& repeats) {
  if (repeats.dim() != 1 || !m.may_decide(repeats)) return {};
  // Told the size, the operator does not look for negative ones.
  if (repeats.numel() > 0 && !none_negative(m, repeats)) return {};
  const at::Tensor total = m.decide_numbers(at::sum(repeats));
  if (!total.defined()) return {};
  const std::optional<int64_t> size = total.item().toLong();  // a plain number would be another overload's repeats
  return at::repeat_interleave(repeats, size);
}

bool repeat_interleave(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  if (!argument(op, stack, 1).isNone()) return false;
  const at::Tensor indices = repeated_indices(m, argument(op, stack, 0).toTensor());
  return indices.defined() && give(op, stack, {indices});
}

bool repeat_elements(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const c10::IValue& given_dim = argument(op, stack, 2);
  const at::Tensor given = argument(op, stack, 0).toTensor(), repeats = argument(op, stack, 1).toTensor();
  if (given.dim() == 0 || !argument(op, stack, 3).isNone() || !m.may_decide(repeats)) return false;
  const at::Tensor self = given_dim.isNone() ? given.flatten() : given;
  const int64_t dim = given_dim.isNone() ? 0 : given_dim.toInt();
  if (dim < -self.dim() || dim >= self.dim()) return false;
  const int64_t size = self.size(dim);
  if (repeats.numel() != 1 && (repeats.dim() != 1 || repeats.numel() != size)) return false;
  const bool one_for_all = repeats.numel() == 1 && size != 1;
  const at::Tensor indices = repeated_indices(m, one_for_all ? repeats.reshape({1}).expand({size}) : repeats);
  return indices.defined() && give(op, stack, {self.index_select(dim, indices)});
}

/// How many numbers bincount() counts, of which there are some: `least`, if none is larger, whatever they are. None if
/// that cannot be known.
std::optional<int64_t> numbers_to_count(Machine& m, const at::Tensor& self, int64_t least) {
  if (least < 0) return {};
  if (!m.may_decide(self)) {
    if (least == 0) return {};
    const at::Tensor fits = at::logical_and(at::ge(at::min(self), 0), at::lt(at::max(self), least));
    return m.assert_that(fits, /*wanted=*/true) ? std::optional(least) : std::nullopt;
  }
  if (!none_negative(m, self)) return {};
  if (least > 0 && m.decide(at::lt(at::max(self), least)).value_or(false)) return least;
  const at::Tensor largest = m.decide_numbers(at::max(self).to(at::kLong));
  return largest.defined() ? std::optional(std::max(least, largest.item().toLong() + 1)) : std::nullopt;
}

/// How often each number occurs, or their weights, added up.
bool bincount(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = argument(op, stack, 0).toTensor();
  const auto weights = argument(op, stack, 1).toOptional<at::Tensor>();
  if (self.dim() != 1 || self.numel() == 0 || !c10::isIntegralType(self.scalar_type(), /*includeBool=*/false) ||
      (weights && (weights->sizes() != self.sizes() || weights->is_complex() || weights->requires_grad())))
    return false;
  const std::optional<int64_t> size = numbers_to_count(m, self, argument(op, stack, 2).toInt());
  if (!size) return false;
  const at::ScalarType type = !weights ? at::kLong : weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
  const at::TensorOptions options = self.options().dtype(type);
  const at::Tensor added = weights ? weights->to(type) : at::ones_like(self, options);
  return give(op, stack, {at::zeros({*size}, options).scatter_add(0, self.to(at::kLong), added)});
}

bool equal(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor a = argument(op, stack, 0).toTensor(), b = argument(op, stack, 1).toTensor();
  if (m.inside_istft && a.dim() == 0 && m.assert_that(a, false)) return give(op, stack, {false});
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type() || !m.may_decide(a) || !m.may_decide(b))
    return false;
  const auto truth = m.decide_truth(at::all(at::eq(a, b)));
  return truth && give(op, stack, {*truth});
}

/// Operator by operator, so that its check is seen.
bool istft(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const auto given = [&](size_t i) -> const c10::IValue& { return argument(op, stack, i); };
  m.inside_istft = true;
  const auto leave = c10::make_scope_exit([&] { m.inside_istft = false; });
  return give(op, stack,
              {at::native::istft(given(0).toTensor(), given(1).toInt(), given(2).toOptional<int64_t>(),
                                 given(3).toOptional<int64_t>(), given(4).toOptional<at::Tensor>(), given(5).toBool(),
                                 given(6).toBool(), given(7).toOptional<bool>(), given(8).toOptional<int64_t>(),
                                 given(9).toBool())});
}

/// A constant of the trace with t's numbers and, where it is dense, with its strides: constants lie row by row.
at::Tensor constant_like(Machine& m, const at::Tensor& t) {
  std::vector<int64_t> order(static_cast<size_t>(t.dim())), back(order.size());
  std::iota(order.begin(), order.end(), 0);
  if (!t.is_contiguous() && t.is_non_overlapping_and_dense())
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  at::Tensor rows;
  {
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard no_fakes;
    rows = t.permute(order).contiguous();
  }
  const at::Tensor constant = aten::record_constant(m.trace, rows);
  return std::is_sorted(order.begin(), order.end()) ? constant : constant.permute(back);
}

/// An operator on one tensor that is decided as a whole: its results are constants.
bool constant_results(Machine& m, const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = argument(op, stack, 0).toTensor();
  if (self.numel() > aten::kMaxConstant) return false;
  const at::Tensor now = m.decide_numbers(self);
  if (!now.defined()) return false;
  Stack real(stack.end() - static_cast<int64_t>(op.schema().arguments().size()), stack.end());
  real[0] = now;
  {
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard no_fakes;
    op.callBoxed(real);
  }
  std::vector<c10::IValue> results;
  for (const c10::IValue& v : real) results.emplace_back(constant_like(m, v.toTensor()));
  return give(op, stack, std::move(results));
}

const Handler* handler_of(const c10::OperatorName& name) {
  static const auto* handlers = new std::unordered_map<c10::OperatorName, Handler>{
      {{"aten::nonzero", ""}, nonzero},
      {{"aten::argwhere", ""}, nonzero},
      {{"aten::nonzero_numpy", ""}, nonzero_by_dim},
      {{"aten::where", ""}, nonzero_by_dim},
      {{"aten::index", "Tensor"}, index},
      {{"aten::index_put", ""}, index_put<false>},
      {{"aten::index_put_", ""}, index_put<true>},
      {{"aten::masked_select", ""}, masked_select},
      {{"aten::repeat_interleave", "Tensor"}, repeat_interleave},
      {{"aten::repeat_interleave", "self_Tensor"}, repeat_elements},
      {{"aten::bincount", ""}, bincount},
      {{"aten::equal", ""}, equal},
      {{"aten::istft", ""}, istft},
      {{"aten::_unique2", ""}, constant_results},
      {{"aten::unique_dim", ""}, constant_results},
      {{"aten::unique_consecutive", ""}, constant_results},
  };
  const auto it = handlers->find(name);
  return it == handlers->end() ? nullptr : &it->second;
}

}  // namespace

bool Machine::may_decide(const at::Tensor& t) {
  const graph::Value value = options.for_fx ? graph::Value() : trace.value_of(t);
  NodeSet constants, nodes;
  if (!value || trace_back(value, &constants, Reach::Constants)) return static_cast<bool>(value);
  return options.data_branches && c10::isIntegralType(t.scalar_type(), /*includeBool=*/true) &&
         trace_back(value, &nodes);
}

at::Tensor Machine::sized_nonzero(const at::Tensor& mask) {
  const at::Tensor count = decide_numbers(at::count_nonzero(mask));
  return count.defined() ? aten::nonzero_sized(mask, count.item().toLong()) : at::Tensor();
}

bool Machine::replace_data_shape(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const Handler* handler = handler_of(op.operator_name());
  return handler && is_fake_argument(argument(op, stack, 0)) && (*handler)(*this, op, stack);
}

PyObject* Machine::decided_list(PyObject* o) {
  if (!py::is_tensor(o) || !aten::is_fake(THPVariable_Unpack(o))) return nullptr;
  const at::Tensor now = decide_numbers(THPVariable_Unpack(o));
  if (!now.defined()) return nullptr;
  Paused paused_here(*this);
  aten::RecordingPaused no_recording;
  aten::NoFakeGuard real;
  const py::Ref tensor = py::Ref::steal(THPVariable_Wrap(now));
  return tensor ? PyObject_CallMethod(tensor.get(), "tolist", nullptr) : nullptr;
}

}  // namespace kiln::capture
