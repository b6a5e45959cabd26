// Losses with their gradients. Reduction: 0 none, 1 mean, 2 sum.
#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

Value reduce(Builder& b, Value v, int64_t reduction) {
  return reduction == kNone ? v : reduction == kMean ? b.mean_all(v) : b.sum_all(v);
}

double share(const TensorMeta& m, int64_t reduction) {
  return reduction == kMean ? 1.0 / static_cast<double>(m.numel()) : 1.0;
}

bool mse(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, target, reduction)
  const Value d = b.sub(n.arg(0), n.arg(1));
  out = {reduce(b, b.mul(d, d), n.arg(2).to_int())};
  return true;
}
bool mse_backward(Builder& b, const Node& n, std::vector<Value>& out) {  // (grad, self, target, reduction)
  const Value d = b.sub(n.arg(1), n.arg(2));
  out = {b.mul(b.mul(d, 2.0 * share(n.results[0], n.arg(3).to_int())), n.arg(0))};
  return true;
}

Value call_loss(Builder& b, const char* op, Value x, Value y, double parameter) {
  TensorMeta m = b.sub(x, y).meta();
  return b.raw(op, {x, y, Arg(parameter)}, std::move(m));
}
bool smooth_l1(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, target, reduction, beta)
  // ATen rounds every step in float16, none in bfloat16.
  if (n.arg(3).to_double() <= 0 || n.results[0].dtype == DType::Float16) return false;
  if (b.sub(n.arg(0), n.arg(1)).meta().dtype != n.results[0].dtype) return false;
  out = {reduce(b, call_loss(b, "kiln::smooth_l1", n.arg(0).value(), n.arg(1).value(), n.arg(3).to_double()),
                n.arg(2).to_int())};
  return true;
}
bool smooth_l1_backward(Builder& b, const Node& n, std::vector<Value>& out) {  // (grad, self, target, reduction, beta)
  const double norm = share(n.results[0], n.arg(3).to_int()), beta = n.arg(4).to_double();
  const Value x = b.sub(n.arg(1), n.arg(2)), g = b.mul(n.arg(0), norm);
  const Value low = b.call("aten::le.Scalar", {x, Arg(-beta)}), high = b.call("aten::ge.Scalar", {x, Arg(beta)});
  const Value mid = beta == 0 ? b.mul(g, 0.0) : b.div(b.mul(x, g), beta);
  const Value up = b.expand(g, x.meta().sizes), down = b.expand(b.neg(g), x.meta().sizes);
  out = {b.where(low, down, b.where(high, up, mid))};
  return out[0].meta().dtype == n.results[0].dtype;
}
bool huber(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, target, reduction, delta)
  if (dtype_size(n.results[0].dtype) == 2) return false;          // ATen rounds every step
  out = {reduce(b, call_loss(b, "kiln::huber", n.arg(0).value(), n.arg(1).value(), n.arg(3).to_double()),
                n.arg(2).to_int())};
  return true;
}

// --- negative log likelihood -----------------------------------------------------------------------------------------

// [N, C, ...] against targets [N, ...].
struct Nll {
  Value used;    // bool [N, ...]: not ignored
  Value target;  // ignored ones replaced by class 0
  Value weight;  // [N, ...], or null
};

Nll prepare(Builder& b, Value target, Value weight, int64_t ignore, DType t) {
  Nll r;
  r.used = b.ne(target, Arg(ignore));
  r.target = b.where(r.used, target, Arg(0));
  if (weight) {
    const Sizes sizes = target.meta().sizes;
    const Value flat = b.view(r.target, {target.meta().numel()});
    r.weight = b.to(b.view(b.call("aten::index_select", {weight, Arg(0), flat}), sizes), t);
  }
  return r;
}

bool nll_forward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (self, target, weight, reduction, ignore_index) -> (output, total_weight)
  const Value x = n.arg(0).value(), target = n.arg(1).value();
  const DType t = x.meta().dtype;
  if (x.meta().dim() < 2 || x.meta().numel() == 0 || target.meta().dtype != DType::Int64) return false;
  const int64_t reduction = n.arg(3).to_int();
  const Nll r = prepare(b, target, has(n, 2) ? n.arg(2).value() : Value{}, n.arg(4).to_int(), t);
  const Value picked = b.call("aten::gather", {x, Arg(1), b.unsqueeze(r.target, 1), Arg(false)});
  Value loss = b.neg(b.view(b.up(picked), target.meta().sizes));
  if (r.weight) loss = b.mul(loss, b.up(r.weight));
  loss = b.where(r.used, loss, b.full({}, 0.0, loss.meta().dtype));
  if (reduction == kNone) {
    out = {b.to(loss, t), b.full({}, 0.0, n.results[1].dtype)};
    return true;
  }
  const Value ones = r.weight ? b.up(r.weight) : b.full(target.meta().sizes, 1.0, loss.meta().dtype);
  const Value total = b.sum_all(b.where(r.used, ones, b.full({}, 0.0, loss.meta().dtype)));
  Value sum = b.sum_all(loss);
  if (reduction == kMean) sum = b.div(sum, total);
  out = {b.to(sum, t), b.to(total, n.results[1].dtype)};
  return true;
}

bool nll_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, self, target, weight, reduction, ignore_index, total_weight)
  const Value x = n.arg(1).value(), target = n.arg(2).value();
  const DType t = x.meta().dtype;
  if (x.meta().dim() < 2 || x.meta().numel() == 0 || target.meta().dtype != DType::Int64) return false;
  const int64_t reduction = n.arg(4).to_int();
  const Nll r = prepare(b, target, has(n, 3) ? n.arg(3).value() : Value{}, n.arg(5).to_int(), t);
  Value g = b.neg(b.up(n.arg(0).value()));
  if (reduction == kMean) g = b.div(g, b.up(n.arg(6).value()));
  if (r.weight) g = b.mul(g, b.up(r.weight));
  // Without weights a reduced gradient is one number, compared against every class in place.
  g = b.where(r.used, g, b.full({}, 0.0, g.meta().dtype));
  Sizes classes(x.meta().dim(), 1);
  classes[1] = x.meta().sizes[1];
  const Value hit = b.eq(b.view(b.arange(classes[1]), classes), b.unsqueeze(r.target, 1));
  out = {b.to(b.where(hit, b.unsqueeze(g, 1), b.full({}, 0.0, g.meta().dtype)), n.results[0].dtype)};
  return out[0].meta().sizes == n.results[0].sizes;
}

// --- binary cross entropy
// ----------------------------------------------------------------------------------------------

// The forward stays a call of ATen's, which refuses inputs outside of [0, 1].
bool bce_backward(Builder& b, const Node& n, std::vector<Value>& out) {  // (grad, self, target, weight, reduction)
  const Value x = n.arg(1).value(), y = n.arg(2).value();
  const Value spread = b.call("aten::clamp_min", {b.mul(b.sub(b.full({}, 1.0, x.meta().dtype), x), x), Arg(1e-12)});
  Value g = b.div(b.mul(n.arg(0), b.sub(x, y)), spread);
  if (has(n, 3)) g = b.mul(g, n.arg(3));
  if (n.arg(4).to_int() == kMean) g = b.mul(g, share(n.results[0], kMean));
  out = {g};
  return true;
}
bool bce_logits(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, target, weight, pos_weight, reduction)
  const Value x = n.arg(0).value(), y = n.arg(1).value();
  const Value log_sigmoid = b.node("aten::log_sigmoid_forward", {x})->out(0);
  const Value one = b.full({}, 1.0, x.meta().dtype);
  Value loss;
  if (has(n, 3)) {
    const Value weight = b.add(b.mul(b.sub(n.arg(3), 1.0), y), 1.0);
    loss = b.sub(b.mul(b.sub(one, y), x), b.mul(weight, log_sigmoid));
  } else {
    loss = b.sub(b.mul(b.sub(one, y), x), log_sigmoid);
  }
  if (has(n, 2)) loss = b.mul(loss, n.arg(2));
  out = {reduce(b, loss, n.arg(4).to_int())};
  return true;
}

const RuleRow kRows[] = {
    {"aten::mse_loss", mse},
    {"aten::mse_loss_backward", mse_backward},
    {"aten::smooth_l1_loss", smooth_l1},
    {"aten::smooth_l1_loss_backward", smooth_l1_backward},
    {"aten::huber_loss", huber},
    {"aten::nll_loss_forward", nll_forward},
    {"aten::nll_loss_backward", nll_backward},
    {"aten::nll_loss2d_forward", nll_forward},
    {"aten::nll_loss2d_backward", nll_backward},
    {"aten::binary_cross_entropy_backward", bce_backward},
    {"aten::binary_cross_entropy_with_logits", bce_logits},
};

}  // namespace

std::span<const RuleRow> loss_rules() { return kRows; }

}  // namespace kiln::decompose
