#include "aten/own_ops.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "aten/pch.h"
#include "aten/schema.h"

namespace kiln::aten {

namespace {

at::Tensor found_nonzero(const at::Tensor& self, int64_t size) {
  at::Tensor found = self.nonzero();
  TORCH_CHECK(found.size(0) == size, "expected ", size, " elements that are not zero, found ", found.size(0));
  return found;
}

at::Tensor nonzero_shape(const at::Tensor& self, int64_t size) {
  return at::empty_strided({size, self.dim()}, {1, size}, self.options().dtype(at::kLong));
}

using Function = double (*)(double);

Function c_function(c10::string_view name) {
  static const std::unordered_map<std::string_view, Function> functions = {
#define KILN_C_MATH(f, opcode) {#f, &::f},
#include "ops/c_math.def"
#undef KILN_C_MATH
  };
  const auto it = functions.find(std::string_view(name.data(), name.size()));
  TORCH_CHECK(it != functions.end(), "kiln::c_math has no function ", name);
  return it->second;
}

at::Tensor c_math(const at::Tensor& self, c10::string_view function) {
  TORCH_CHECK(self.scalar_type() == at::kDouble, "kiln::c_math is for float64, not ", self.scalar_type());
  const Function f = c_function(function);
  at::Tensor out = self.clone();  // dense, whatever self is
  double* data = out.mutable_data_ptr<double>();
  std::transform(data, data + out.numel(), data, f);
  return out;
}

at::Tensor c_math_shape(const at::Tensor& self, c10::string_view) { return at::empty_like(self); }

std::vector<int64_t> ints_of(const at::Tensor& t) {
  const at::Tensor whole = t.to(at::kLong).contiguous();
  const int64_t* data = whole.const_data_ptr<int64_t>();
  return {data, data + whole.numel()};
}

std::tuple<at::Tensor, at::Tensor> ctc_loss_shape(const at::Tensor& log_probs, const at::Tensor& targets,
                                                  const at::Tensor&, const at::Tensor&, int64_t, bool) {
  const int64_t batch = log_probs.size(1);
  const at::Tensor loss = at::empty({batch}, log_probs.options());
  if (targets.dim() != 2) return {loss, at::empty({0}, log_probs.options())};
  return {loss, at::empty({batch, log_probs.size(0), 2 * targets.size(1) + 1}, log_probs.options())};
}

std::tuple<at::Tensor, at::Tensor> ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets,
                                            const at::Tensor& input_lengths, const at::Tensor& target_lengths,
                                            int64_t blank, bool zero_infinity) {
  const at::AutoDispatchBelowAutograd no_history;
  const auto [loss, alpha] =
      at::_ctc_loss(log_probs, targets, ints_of(input_lengths), ints_of(target_lengths), blank, zero_infinity);
  at::Tensor kept =
      std::get<1>(ctc_loss_shape(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity));
  if (kept.numel() > 0) kept.narrow(2, 0, alpha.size(2)).copy_(alpha);
  return {loss, kept};
}

at::Tensor ctc_loss_backward(const at::Tensor& grad, const at::Tensor& log_probs, const at::Tensor& targets,
                             const at::Tensor& input_lengths, const at::Tensor& target_lengths, const at::Tensor& loss,
                             const at::Tensor& kept, int64_t blank, bool zero_infinity) {
  const at::AutoDispatchBelowAutograd no_history;
  const std::vector<int64_t> lengths = ints_of(input_lengths), sizes = ints_of(target_lengths);
  const int64_t longest = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  const at::Tensor alpha = kept.numel() > 0
                               ? kept.narrow(2, 0, 2 * longest + 1).contiguous()
                               : std::get<1>(at::_ctc_loss(log_probs, targets, lengths, sizes, blank, zero_infinity));
  return at::_ctc_loss_backward(grad, log_probs, targets, lengths, sizes, loss, alpha, blank, zero_infinity);
}

at::Tensor ctc_loss_backward_shape(const at::Tensor&, const at::Tensor& log_probs, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, bool) {
  return at::empty_like(log_probs, at::MemoryFormat::Contiguous);
}

class CtcLoss : public torch::autograd::Function<CtcLoss> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& log_probs,
                                                const at::Tensor& targets, const at::Tensor& input_lengths,
                                                const at::Tensor& target_lengths, int64_t blank, bool zero_infinity) {
    static const auto op = get_op(graph::Op("kiln::ctc_loss")).handle.typed<decltype(ctc_loss)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [loss, kept] = op.call(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
    ctx->save_for_backward({log_probs, targets, input_lengths, target_lengths, loss, kept});
    ctx->saved_data["blank"] = blank;
    ctx->saved_data["zero_infinity"] = zero_infinity;
    ctx->mark_non_differentiable({kept});
    return {loss, kept};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = get_op(graph::Op("kiln::ctc_loss_backward")).handle.typed<decltype(ctc_loss_backward)>();
    const auto saved = ctx->get_saved_variables();
    return {op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
                    ctx->saved_data["blank"].toInt(), ctx->saved_data["zero_infinity"].toBool()),
            {},
            {},
            {},
            {},
            {}};
  }
};

std::tuple<at::Tensor, at::Tensor> ctc_loss_autograd(const at::Tensor& log_probs, const at::Tensor& targets,
                                                     const at::Tensor& input_lengths, const at::Tensor& target_lengths,
                                                     int64_t blank, bool zero_infinity) {
  const auto r = CtcLoss::apply(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  return {r[0], r[1]};
}

const graph::Op& nonzero_sized_op() {
  static const graph::Op op("kiln::nonzero_sized");
  return op;
}
}  // namespace

bool is_own_op(const graph::Op& op) {
  static const graph::Op own[] = {nonzero_sized_op(), graph::Op("kiln::c_math"), graph::Op("kiln::ctc_loss"),
                                  graph::Op("kiln::ctc_loss_backward")};
  return std::find(std::begin(own), std::end(own), op) != std::end(own);
}

at::Tensor nonzero_sized(const at::Tensor& self, int64_t size) {
  static const auto op = get_op(nonzero_sized_op()).handle.typed<at::Tensor(const at::Tensor&, int64_t)>();
  return op.call(self, size);
}

}  // namespace kiln::aten

TORCH_LIBRARY_FRAGMENT(kiln, m) {
  m.def("nonzero_sized(Tensor self, int size) -> Tensor");
  m.def("c_math(Tensor self, str function) -> Tensor");
  m.def(
      "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
      "bool zero_infinity) -> (Tensor, Tensor)");
  m.def(
      "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
      "Tensor loss, Tensor kept, int blank, bool zero_infinity) -> Tensor");
}
TORCH_LIBRARY_IMPL(kiln, CPU, m) {
  m.impl("nonzero_sized", &kiln::aten::found_nonzero);
  m.impl("c_math", &kiln::aten::c_math);
  m.impl("ctc_loss", &kiln::aten::ctc_loss);
  m.impl("ctc_loss_backward", &kiln::aten::ctc_loss_backward);
}
TORCH_LIBRARY_IMPL(kiln, Meta, m) {
  m.impl("nonzero_sized", &kiln::aten::nonzero_shape);
  m.impl("c_math", &kiln::aten::c_math_shape);
  m.impl("ctc_loss", &kiln::aten::ctc_loss_shape);
  m.impl("ctc_loss_backward", &kiln::aten::ctc_loss_backward_shape);
}
TORCH_LIBRARY_IMPL(kiln, Autograd, m) { m.impl("ctc_loss", &kiln::aten::ctc_loss_autograd); }
