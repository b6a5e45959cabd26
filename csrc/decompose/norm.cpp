// Normalizations: batch, layer, group and RMS norm with their gradients.
#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

struct Moments {
  Value mean, rstd, var;
};

// Mean and 1/sqrt(var + eps) over dims (kept as ones), by one pass.
Moments moments(Builder& b, Value x, const Sizes& dims, double eps) {
  Node* vm = b.node("aten::var_mean.correction", {x, Arg::ints(dims), Arg(0), Arg(true)});
  return {vm->out(1), b.rsqrt(b.add(vm->out(0), eps)), vm->out(0)};
}

int64_t product(const TensorMeta& m, const Sizes& dims) {
  int64_t n = 1;
  for (int64_t d : dims) n *= m.sizes[d];
  return n;
}

// --- layer norm
// --------------------------------------------------------------------------------------------------------

struct NormDims {
  Sizes inner, outer;  // dims
  NormDims(int64_t rank, int64_t normalized) {
    for (int64_t d = 0; d < rank; ++d) (d < rank - normalized ? outer : inner).push_back(d);
  }
};

bool layer_norm(Builder& b, const Node& n, std::vector<Value>& out) {  // (x, normalized_shape, weight, bias, eps)
  const Value input = n.arg(0).value();
  if (input.meta().numel() == 0) return false;
  const NormDims d(input.meta().dim(), static_cast<int64_t>(n.arg(1).to_ints().size()));
  const Value x = b.up(input);
  const Moments m = moments(b, x, d.inner, n.arg(4).to_double());
  Value y = b.mul(b.sub(x, m.mean), m.rstd);
  if (has(n, 2)) y = b.mul(y, b.up(n.arg(2).value()));
  if (has(n, 3)) y = b.add(y, b.up(n.arg(3).value()));
  out = {b.to(y, n.results[0].dtype), b.to(m.mean, n.results[1].dtype), b.to(m.rstd, n.results[2].dtype)};
  return true;
}

// grad of y = (x - mean) * rstd over `dims` of g (already times the weight).
Value norm_grad(Builder& b, Value g, Value x_hat, Value rstd, const Sizes& dims) {
  const double size = static_cast<double>(product(x_hat.meta(), dims));
  const Value a = b.div(b.sum(g, dims, true), size);
  const Value c = b.div(b.sum(b.mul(g, x_hat), dims, true), size);
  return b.mul(b.sub(b.sub(g, a), b.mul(x_hat, c)), rstd);
}

// A sum over dims cast to a weight's dtype and sizes.
Value weight_grad(Builder& b, Value g, const Sizes& dims, const TensorMeta& like) {
  return b.to(b.view(b.sum(g, dims, false), like.sizes), like.dtype);
}

bool layer_norm_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, input, normalized_shape, mean, rstd, weight, bias, output_mask)
  const Value input = n.arg(1).value();
  if (input.meta().numel() == 0) return false;
  const NormDims d(input.meta().dim(), static_cast<int64_t>(n.arg(2).to_ints().size()));
  const Value g = b.up(n.arg(0).value()), x = b.up(input);
  const Value rstd = b.up(n.arg(4).value());
  const Value x_hat = b.mul(b.sub(x, b.up(n.arg(3).value())), rstd);
  const auto& mask = n.arg(7).list();
  out.assign(3, Value{});
  if (mask[0].to_bool()) {
    const Value gw = has(n, 5) ? b.mul(g, b.up(n.arg(5).value())) : g;
    out[0] = b.to(norm_grad(b, gw, x_hat, rstd, d.inner), n.results[0].dtype);
  }
  if (mask[1].to_bool() && has(n, 5)) out[1] = weight_grad(b, b.mul(g, x_hat), d.outer, n.results[1]);
  if (mask[2].to_bool() && has(n, 6)) out[2] = weight_grad(b, g, d.outer, n.results[2]);
  return true;
}

// --- RMS norm
// ----------------------------------------------------------------------------------------------------------

bool rms_norm(Builder& b, const Node& n, std::vector<Value>& out) {  // (x, normalized_shape, weight, eps) -> (y, rstd)
  const Value input = n.arg(0).value();
  if (input.meta().numel() == 0 || n.arg(3).is_none()) return false;
  const NormDims d(input.meta().dim(), static_cast<int64_t>(n.arg(1).to_ints().size()));
  const Value x = b.up(input);
  const Value mean = b.call("aten::mean.dim", {b.mul(x, x), Arg::ints(d.inner), Arg(true), Arg()});
  const Value rstd = b.rsqrt(b.add(mean, n.arg(3).to_double()));
  Value y = b.mul(x, rstd);
  if (has(n, 2)) y = b.mul(y, b.up(n.arg(2).value()));
  out = {b.to(y, n.results[0].dtype), b.to(rstd, n.results[1].dtype)};
  return true;
}

bool rms_norm_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, input, normalized_shape, rstd, weight, output_mask) -> (dx, dw)
  const Value input = n.arg(1).value();
  if (input.meta().numel() == 0) return false;
  const NormDims d(input.meta().dim(), static_cast<int64_t>(n.arg(2).to_ints().size()));
  const Value g = b.up(n.arg(0).value()), x = b.up(input), rstd = b.up(n.arg(3).value());
  const Value x_hat = b.mul(x, rstd);
  const auto& mask = n.arg(5).list();
  out.assign(2, Value{});
  if (mask[0].to_bool()) {
    const Value gw = has(n, 4) ? b.mul(g, b.up(n.arg(4).value())) : g;
    const Value c = b.call("aten::mean.dim", {b.mul(gw, x_hat), Arg::ints(d.inner), Arg(true), Arg()});
    out[0] = b.to(b.mul(b.sub(gw, b.mul(x_hat, c)), rstd), n.results[0].dtype);
  }
  if (mask[1].to_bool() && has(n, 4)) out[1] = weight_grad(b, b.mul(g, x_hat), d.outer, n.results[1]);
  return true;
}

// --- batch norm
// --------------------------------------------------------------------------------------------------------

Sizes all_but_channels(const TensorMeta& m) {
  Sizes dims;
  for (int64_t d = 0; d < m.dim(); ++d)
    if (d != 1) dims.push_back(d);
  return dims;
}
// A per-channel vector against [N, C, ...].
Value channels(Builder& b, Value v, int64_t rank) {
  Sizes sizes(rank, 1);
  sizes[1] = v.meta().sizes[0];
  return b.view(v, sizes);
}
Value channels_up(Builder& b, const Node& n, size_t arg, int64_t rank) {
  return channels(b, b.up(n.arg(arg).value()), rank);
}

struct BatchNorm {
  Value y, mean, rstd, running_mean, running_var;
};

// Statistics of the batch, the output, and the running statistics after the step.
BatchNorm batch_norm_train(Builder& b, const Node& n, Value running_mean, Value running_var, double momentum,
                           double eps) {
  const Value input = n.arg(0).value();
  const int64_t rank = input.meta().dim();
  const Sizes dims = all_but_channels(input.meta());
  const int64_t size = product(input.meta(), dims), c = input.meta().sizes[1];
  const Value x = b.up(input);
  const Moments m = moments(b, x, dims, eps);
  BatchNorm r;
  r.y = b.mul(b.sub(x, m.mean), m.rstd);
  if (has(n, 1)) r.y = b.mul(r.y, channels_up(b, n, 1, rank));
  if (has(n, 2)) r.y = b.add(r.y, channels_up(b, n, 2, rank));
  r.y = b.to(r.y, n.results[0].dtype);
  r.mean = b.view(m.mean, {c});
  r.rstd = b.view(m.rstd, {c});
  auto update = [&](Value running, Value now) {
    const Value old = b.up(running);
    return b.to(b.add(b.mul(now, momentum), b.mul(old, 1 - momentum)), running.meta().dtype);
  };
  if (running_mean) r.running_mean = update(running_mean, r.mean);
  if (running_var) {
    const double unbiased =
        size > 1 ? static_cast<double>(size) / static_cast<double>(size - 1) : std::numeric_limits<double>::infinity();
    r.running_var = update(running_var, b.mul(b.view(m.var, {c}), unbiased));
  }
  return r;
}

Value batch_norm_eval(Builder& b, const Node& n, Value running_mean, Value running_var, double eps) {
  const Value input = n.arg(0).value();
  const int64_t rank = input.meta().dim();
  const Value x = b.up(input);
  // Per channel first, so that each element costs one multiplication and one addition.
  Value scale = b.rsqrt(b.add(b.up(running_var), eps));
  if (has(n, 1)) scale = b.mul(scale, b.up(n.arg(1).value()));
  Value y = b.mul(b.sub(x, channels(b, b.up(running_mean), rank)), channels(b, scale, rank));
  if (has(n, 2)) y = b.add(y, channels_up(b, n, 2, rank));
  return b.to(y, n.results[0].dtype);
}

// Saved statistics of an evaluation are empty tensors.
Value saved_or_empty(Builder& b, Value v, const TensorMeta& m) {
  if (v && v.meta().sizes == m.sizes) return b.to(v, m.dtype);
  return b.full(m.sizes, 0.0, m.dtype);
}

bool degenerate(const Node& n) {
  const TensorMeta& m = n.arg(0).value().meta();
  return m.numel() == 0 || m.dim() < 2;
}

// (x, weight, bias, running_mean, running_var, training, momentum, eps) -> (y, mean, rstd, new mean, new var)
bool batch_norm_functional(Builder& b, const Node& n, std::vector<Value>& out) {
  if (degenerate(n)) return false;
  const Value rm = has(n, 3) ? n.arg(3).value() : Value{}, rv = has(n, 4) ? n.arg(4).value() : Value{};
  const double eps = n.arg(7).to_double();
  if (n.arg(5).to_bool()) {
    const BatchNorm r = batch_norm_train(b, n, rm, rv, n.arg(6).to_double(), eps);
    out = {r.y, saved_or_empty(b, r.mean, n.results[1]), saved_or_empty(b, r.rstd, n.results[2])};
    if (n.results.size() > 3) {
      out.push_back(r.running_mean);
      out.push_back(r.running_var);
    }
  } else {
    if (!rm || !rv) return false;
    out = {batch_norm_eval(b, n, rm, rv, eps), saved_or_empty(b, {}, n.results[1]),
           saved_or_empty(b, {}, n.results[2])};
    if (n.results.size() > 3) {
      out.push_back(rm);
      out.push_back(rv);
    }
  }
  return true;
}

// native_batch_norm changes running statistics although its schema does not say so: only without them, or in
// evaluation.
bool batch_norm_native(Builder& b, const Node& n, std::vector<Value>& out) {
  if (n.arg(5).to_bool() && (has(n, 3) || has(n, 4))) return false;
  return batch_norm_functional(b, n, out);
}

bool batch_norm_no_stats(Builder& b, const Node& n, std::vector<Value>& out) {  // (x, w, b, training, momentum, eps)
  if (degenerate(n) || !n.arg(3).to_bool()) return false;
  const BatchNorm r = batch_norm_train(b, n, {}, {}, n.arg(4).to_double(), n.arg(5).to_double());
  out = {r.y, saved_or_empty(b, r.mean, n.results[1]), saved_or_empty(b, r.rstd, n.results[2])};
  return true;
}

bool batch_norm_no_training(Builder& b, const Node& n, std::vector<Value>& out) {  // (x, w, b, rm, rv, momentum, eps)
  if (degenerate(n)) return false;
  out = {batch_norm_eval(b, n, n.arg(3).value(), n.arg(4).value(), n.arg(6).to_double()),
         saved_or_empty(b, {}, n.results[1]), saved_or_empty(b, {}, n.results[2])};
  return true;
}

// (x, weight, bias, running_mean, running_var, momentum, eps) -> (y, mean, rstd, reserve, new mean, new var)
bool batch_norm_with_update(Builder& b, const Node& n, std::vector<Value>& out) {
  if (degenerate(n)) return false;
  const BatchNorm r =
      batch_norm_train(b, n, n.arg(3).value(), n.arg(4).value(), n.arg(5).to_double(), n.arg(6).to_double());
  out = {r.y,
         saved_or_empty(b, r.mean, n.results[1]),
         saved_or_empty(b, r.rstd, n.results[2]),
         saved_or_empty(b, {}, n.results[3]),
         r.running_mean,
         r.running_var};
  return true;
}

bool batch_norm_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)
  const Value input = n.arg(1).value();
  if (degenerate(n)) return false;
  const int64_t rank = input.meta().dim();
  const Sizes dims = all_but_channels(input.meta());
  const double size = static_cast<double>(product(input.meta(), dims));
  const bool train = n.arg(7).to_bool();
  const Value g = b.up(n.arg(0).value()), x = b.up(input);
  const Value mean = channels_up(b, n, train ? 5 : 3, rank);
  const Value rstd = train ? channels_up(b, n, 6, rank)
                           : channels(b, b.rsqrt(b.add(b.up(n.arg(4).value()), n.arg(8).to_double())), rank);
  const auto& mask = n.arg(9).list();
  out.assign(3, Value{});
  const Value centered = b.sub(x, mean);
  const bool sums = train || mask[1].to_bool() || mask[2].to_bool();
  const Value total = sums ? b.sum(g, dims, true) : Value{};
  const Value dot = sums ? b.sum(b.mul(g, centered), dims, true) : Value{};
  if (mask[0].to_bool()) {
    Value dx = g;
    if (train) {
      const Value slope = b.mul(b.div(dot, size), b.mul(rstd, rstd));
      dx = b.sub(b.sub(g, b.mul(centered, slope)), b.div(total, size));
    }
    dx = b.mul(dx, has(n, 2) ? b.mul(rstd, channels_up(b, n, 2, rank)) : rstd);
    out[0] = b.to(dx, n.results[0].dtype);
  }
  if (mask[1].to_bool()) out[1] = b.to(b.view(b.mul(dot, rstd), n.results[1].sizes), n.results[1].dtype);
  if (mask[2].to_bool()) out[2] = b.to(b.view(total, n.results[2].sizes), n.results[2].dtype);
  return true;
}

// --- group norm
// --------------------------------------------------------------------------------------------------------

// Moments of the groups of x: [N, G, C / G, HW], with ones for the last two dims. Where the channels of a pixel lie
// side by side, a group is many runs of a few of them: there each channel's moments come first, whole pixels at a time.
// Those of equal parts combine as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
// Sample Variances", 1979.
Moments group_moments(Builder& b, Value x, bool channels_last, double eps) {
  if (!channels_last) return moments(b, x, {2, 3}, eps);
  Node* vm = b.node("aten::var_mean.correction", {x, Arg::ints({3}), Arg(0), Arg(true)});
  Node* means = b.node("aten::var_mean.correction", {vm->out(1), Arg::ints({2}), Arg(0), Arg(true)});
  const Value within = b.call("aten::mean.dim", {vm->out(0), Arg::ints({2}), Arg(true), Arg()});
  const Value var = b.add(within, means->out(0));
  return {means->out(1), b.rsqrt(b.add(var, eps)), var};
}

bool group_norm(Builder& b, const Node& n, std::vector<Value>& out) {  // (x, weight, bias, N, C, HxW, groups, eps)
  const Value input = n.arg(0).value();
  const int64_t N = n.arg(3).to_int(), C = n.arg(4).to_int(), HW = n.arg(5).to_int(), G = n.arg(6).to_int();
  if (input.meta().numel() == 0) return false;
  const Value x = b.view(b.up(input), {N, G, C / G, HW});
  const bool channels_last = input.meta().strides[1] == 1 && G < C && HW > 1;
  const Moments m = group_moments(b, x, channels_last, n.arg(7).to_double());
  Value y = b.mul(b.sub(x, m.mean), m.rstd);
  if (has(n, 1)) y = b.mul(y, b.view(b.up(n.arg(1).value()), {1, G, C / G, 1}));
  if (has(n, 2)) y = b.add(y, b.view(b.up(n.arg(2).value()), {1, G, C / G, 1}));
  out = {b.to(b.view(y, input.meta().sizes), n.results[0].dtype), b.to(b.view(m.mean, {N, G}), n.results[1].dtype),
         b.to(b.view(m.rstd, {N, G}), n.results[2].dtype)};
  return true;
}

bool group_norm_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, input, mean, rstd, weight, N, C, HxW, groups, output_mask)
  const Value input = n.arg(1).value();
  const int64_t N = n.arg(5).to_int(), C = n.arg(6).to_int(), HW = n.arg(7).to_int(), G = n.arg(8).to_int();
  if (input.meta().numel() == 0) return false;
  const Sizes sizes{N, G, C / G, HW};
  const Value g = b.view(b.up(n.arg(0).value()), sizes), x = b.view(b.up(input), sizes);
  const Value rstd = b.view(b.up(n.arg(3).value()), {N, G, 1, 1});
  const Value x_hat = b.mul(b.sub(x, b.view(b.up(n.arg(2).value()), {N, G, 1, 1})), rstd);
  const auto& mask = n.arg(9).list();
  out.assign(3, Value{});
  // Sums over the pixels of each image and channel: all others are sums of these.
  const Value total = b.sum(g, {3}, true), dot = b.sum(b.mul(g, x_hat), {3}, true);
  if (mask[0].to_bool()) {
    const Value weight = has(n, 4) ? b.view(b.up(n.arg(4).value()), {1, G, C / G, 1}) : Value{};
    const auto weighted = [&](Value v) { return weight ? b.mul(v, weight) : v; };
    const auto mean = [&](Value sums) {
      return b.div(b.sum(weighted(sums), {2}, true), static_cast<double>(C / G * HW));
    };
    const Value dx = b.mul(b.sub(b.sub(weighted(g), mean(total)), b.mul(x_hat, mean(dot))), rstd);
    out[0] = b.to(b.view(dx, input.meta().sizes), n.results[0].dtype);
  }
  if (mask[1].to_bool()) out[1] = weight_grad(b, dot, {0, 3}, n.results[1]);
  if (mask[2].to_bool()) out[2] = weight_grad(b, total, {0, 3}, n.results[2]);
  return true;
}

// --- weight norm
// -------------------------------------------------------------------------------------------------------

// Half types are rounded inside of the operator.
bool is_exact(const Value& v) { return v.meta().dtype == DType::Float32 || v.meta().dtype == DType::Float64; }

/// The dims that the norm of `v` goes over, those but `dim`.
Sizes all_but(const TensorMeta& v, int64_t dim) {
  Sizes dims;
  for (int64_t d = 0; d < v.dim(); ++d)
    if (d != wrap(dim, v.dim())) dims.push_back(d);
  return dims;
}

bool weight_norm(Builder& b, const Node& n, std::vector<Value>& out) {  // (v, g, dim) -> (w, norms)
  const Value v = n.arg(0).value(), g = n.arg(1).value();
  if (!is_exact(v) || v.meta().numel() == 0) return false;
  const Sizes dims = all_but(v.meta(), n.arg(2).to_int());
  const Value norms = b.call("aten::sqrt", {b.sum(b.mul(v, v), dims, true)});
  out = {b.mul(v, b.div(g, norms)), norms};
  return true;
}

bool weight_norm_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  // (grad, v, g, norms, dim) -> (dv, dg)
  const Value grad = n.arg(0).value(), v = n.arg(1).value(), g = n.arg(2).value(), norms = n.arg(3).value();
  if (!is_exact(v) || v.meta().numel() == 0) return false;
  const Value dot = b.sum(b.mul(grad, v), all_but(v.meta(), n.arg(4).to_int()), true);
  const Value dg = b.div(dot, norms);
  out = {b.mul(b.div(g, norms), b.sub(grad, b.mul(v, b.div(dg, norms)))), dg};
  return true;
}

const RuleRow kRows[] = {
    {"aten::native_layer_norm", layer_norm},
    {"aten::native_layer_norm_backward", layer_norm_backward},
    {"aten::_weight_norm_interface", weight_norm},
    {"aten::_weight_norm_interface_backward", weight_norm_backward},
    {"aten::_fused_rms_norm", rms_norm},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::native_batch_norm", batch_norm_native},
    {"aten::_native_batch_norm_legit_functional", batch_norm_functional},
    {"aten::_native_batch_norm_legit.no_stats", batch_norm_no_stats},
    {"aten::_native_batch_norm_legit_no_training", batch_norm_no_training},
    {"aten::_batch_norm_with_update_functional", batch_norm_with_update},
    {"aten::native_batch_norm_backward", batch_norm_backward},
    {"aten::native_group_norm", group_norm},
    {"aten::native_group_norm_backward", group_norm_backward},
};

}  // namespace

std::span<const RuleRow> norm_rules() { return kRows; }

}  // namespace kiln::decompose
