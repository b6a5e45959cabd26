#include "lower/pointwise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"

namespace kiln::lower {

namespace {

struct Promotion {
  std::optional<DType> dim, zero, number;
  static void join(std::optional<DType>& to, DType t) { to = to ? promote_types(*to, t) : t; }
  static int category(DType t) { return is_complex(t) ? 3 : is_floating(t) ? 2 : t == DType::Bool ? 0 : 1; }
  static std::optional<DType> combine(std::optional<DType> strong, std::optional<DType> weak) {
    if (!strong) return weak;
    if (!weak || category(*weak) <= category(*strong)) return strong;
    return promote_types(*strong, *weak);
  }
};

}  // namespace

DType result_type(const Node& n, std::initializer_list<int> args) {
  Promotion p;
  for (int i : args) {
    const Arg& a = n.arg(i);
    if (a.is_value() && a.value()) {
      const TensorMeta& m = a.value().meta();
      Promotion::join(m.sizes.empty() ? p.zero : p.dim, m.dtype);
    } else if (a.is<bool>()) {
      Promotion::join(p.number, DType::Bool);
    } else if (a.is<int64_t>()) {
      Promotion::join(p.number, DType::Int64);
    } else if (a.is<double>()) {
      Promotion::join(p.number, DType::Float32);
    }
  }
  return Promotion::combine(Promotion::combine(p.dim, p.zero), p.number).value_or(DType::Float32);
}

Val number(Ops& ops, const Arg& a, DType t) {
  if (is_floating(t)) return ops.constant_float(t, a.to_double());
  if (t == DType::Bool) return ops.constant_int(t, a.to_double() != 0);
  return ops.constant_int(t, a.is<double>() ? static_cast<int64_t>(a.to_double()) : a.to_int());
}

bool Operands::make(const Lowering& l, const Node& n, std::initializer_list<int> args, Operands& out) {
  for (int i : args) {
    if (i >= static_cast<int>(n.args.size())) return false;
    const Arg& a = n.arg(i);
    One one;
    if (a.is_value()) {
      if (!a.value()) return false;
      one.is_tensor = true;
      one.tensor = l.get(a);
    } else if (a.is_number()) {
      one.number = a;
    } else {
      return false;
    }
    out.list_.push_back(std::move(one));
  }
  return true;
}

Val Operands::value(size_t k, Ops& ops, Index p, DType promoted, DType compute) const {
  const One& o = list_[k];
  const Val v = o.is_tensor ? o.tensor.load(ops, broadcast_index(o.tensor.sizes, p)) : number(ops, o.number, compute);
  return cast_to(ops, cast_to(ops, v, promoted), compute);
}

std::vector<Tensor> Operands::tensors() const {
  std::vector<Tensor> out;
  for (const One& o : list_)
    if (o.is_tensor) out.push_back(o.tensor);
  return out;
}

namespace {

Val c(Ops& o, Val like, double v) { return o.constant(like.dtype, v); }
Val zero(Ops& o, Val like) { return c(o, like, 0); }

// In the node's dtype, and back.
Val rounded(Ops& o, const Node& n, Val v) { return cast_to(o, cast_to(o, v, n.results[0].dtype), v.dtype); }

// alpha * b, without the product where it is one.
Val times(Ops& o, const Node& n, size_t i, Val b) {
  if (i >= n.args.size() || (n.arg(i).is_number() && n.arg(i).to_double() == 1)) return b;
  return o.Mul(b, rounded(o, n, number(o, n.arg(i), b.dtype)));
}

Val add(Ops& o, const Node& n, Val a, Val b) {
  if (a.dtype == DType::Bool) return o.Or(a, b);
  return o.Add(a, times(o, n, 2, b));
}
Val sub(Ops& o, const Node& n, Val a, Val b) { return o.Sub(a, times(o, n, 2, b)); }
Val rsub(Ops& o, const Node& n, Val a, Val b) { return o.Sub(b, times(o, n, 2, a)); }
Val mul(Ops& o, const Node&, Val a, Val b) { return a.dtype == DType::Bool ? o.And(a, b) : o.Mul(a, b); }
Val maximum(Ops& o, const Node&, Val a, Val b) { return a.dtype == DType::Bool ? o.Or(a, b) : o.Maximum(a, b); }
Val minimum(Ops& o, const Node&, Val a, Val b) { return a.dtype == DType::Bool ? o.And(a, b) : o.Minimum(a, b); }

#define F1(expr)                            \
  [](Ops& o, const Node& n, Val a) -> Val { \
    (void)n;                                \
    return expr;                            \
  }
#define F2(expr)                                   \
  [](Ops& o, const Node& n, Val a, Val b) -> Val { \
    (void)n;                                       \
    return expr;                                   \
  }
#define F3(expr)                                          \
  [](Ops& o, const Node& n, Val a, Val b, Val d) -> Val { \
    (void)n;                                              \
    return expr;                                          \
  }

// Division of integers truncates or floors; ATen's true division of them was promoted to float before.
bool div_mode(Lowering& l, const Node& n) {
  const Arg& mode = n.arg(2);
  if (mode.is_none()) return scaled<F2(o.Div(a, b))>(l, n);
  const DType t = n.results[0].dtype;
  // Division by an integer zero raises; kernels do, too, but only where the divisor is known to be a number is it
  // cheap.
  if (t == DType::Bool || t != compute_type(t)) return false;
  if (mode.as<std::string>() == "floor") return binary<F2(o.FloorDiv(a, b))>(l, n);
  return binary<F2(is_floating(a.dtype) ? o.Trunc(o.Div(a, b)) : o.TruncDiv(a, b))>(l, n);
}

bool floor_divide(Lowering& l, const Node& n) {
  return n.results[0].dtype != DType::Bool && scaled<F2(o.FloorDiv(a, b)), 6>(l, n);
}

// A single element is no whole vector: ATen computes it by the C library's pow, as Python does its floats.
bool power(Lowering& l, const Node& n) {
  const TensorMeta& out = n.results[0];
  const bool single = std::all_of(out.sizes.begin(), out.sizes.end(), [](int64_t size) { return size == 1; });
  if (single && out.dtype == DType::Float64) return binary<F2(o.PowScalar(a, b)), 20>(l, n);
  return binary<F2(o.Pow(a, b)), 20>(l, n);
}

// As the C library computes it, which is what Python's math module gives.
bool c_math(Lowering& l, const Node& n) {
  static const std::unordered_map<std::string, Rule> rules = {
#define KILN_C_MATH(f, opcode) {#f, unary<F1(o.opcode(a)), 20>},
#include "ops/c_math.def"
#undef KILN_C_MATH
  };
  const auto rule = rules.find(n.arg(1).as<std::string>());
  return rule != rules.end() && rule->second(l, n);
}

// ATen's own list of exponents that it computes without pow.
bool pow_scalar(Lowering& l, const Node& n) {
  const Arg& e = n.arg(1);
  if (!e.is_number()) return false;
  const double v = e.to_double();
  const DType t = n.results[0].dtype;
  if (t == DType::BFloat16 && v == 3) return unary<F1(o.Mul(rounded(o, n, o.Mul(a, a)), a))>(l, n);
  if (t == DType::BFloat16 && v == -2) return unary<F1(o.Reciprocal(rounded(o, n, o.Mul(a, a)))), 5>(l, n);
  if (is_floating(t)) {
    if (v == 2) return unary<F1(o.Mul(a, a))>(l, n);
    if (v == 3) return unary<F1(o.Mul(o.Mul(a, a), a))>(l, n);
    if (v == 0.5) return unary<F1(o.Sqrt(a)), 4>(l, n);
    if (v == -0.5) return unary<F1(o.Rsqrt(a)), 6>(l, n);
    if (v == -1) return unary<F1(o.Reciprocal(a)), 4>(l, n);
    if (v == -2) return unary<F1(o.Reciprocal(o.Mul(a, a))), 5>(l, n);
    if (v == 1) return unary<F1(a)>(l, n);
    if (v == 0) return unary<F1(c(o, a, 1))>(l, n);
  } else if (v < 0) {
    return false;  // an error in eager
  }
  return power(l, n);
}

bool pow_tensor(Lowering& l, const Node& n) {
  if (!is_floating(n.results[0].dtype)) return false;  // negative exponents raise
  return power(l, n);
}

// `a` to bool, as != 0.
Val truth(Ops& o, Val a) { return a.dtype == DType::Bool ? a : o.Ne(a, zero(o, a)); }

bool clamp(Lowering& l, const Node& n) {
  const bool low = !n.arg(1).is_none(), high = n.args.size() > 2 && !n.arg(2).is_none();
  if (low && high) return pointwise_rule<F3(o.Minimum(o.Maximum(a, b), d)), In::Result, false, 2, 0, 1, 2>(l, n);
  if (low) return binary<F2(o.Maximum(a, b))>(l, n);
  if (high) return pointwise_rule<F2(o.Minimum(a, b)), In::Result, false, 1, 0, 2>(l, n);
  return false;
}

// where(condition, a, b); the condition keeps its dtype, so it is not promoted with the others.
template <int C, int A, int B>
bool select_rule(Lowering& l, const Node& n) {
  Operands operands;
  if (!n.arg(C).is_value() || !n.arg(C).value()) return false;
  if (!Operands::make(l, n, {A, B}, operands)) return false;
  const Tensor condition = l.get(n.arg(C));
  if (condition.dtype != DType::Bool && condition.dtype != DType::UInt8) return false;
  const DType out = n.results[0].dtype;
  std::vector<Tensor> inputs = operands.tensors();
  inputs.push_back(condition);
  l.set(n, l.lazy(
               out, n.results[0].sizes,
               [=](Ops& ops, Index p) {
                 const Val k = truth(ops, condition.load(ops, broadcast_index(condition.sizes, p)));
                 const Val a = operands.value(0, ops, p, out);
                 return ops.where(k, a, operands.value(1, ops, p, out));
               },
               inputs, 1));
  return true;
}

bool to_copy(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const DType out = n.results[0].dtype;
  l.set(n, l.lazy(
               out, t.sizes, [t, out](Ops& ops, Index p) { return cast_to(ops, t.load(ops, p), out); }, {t},
               t.dtype == out ? 0 : 1));
  return true;
}

// --- activations and their gradients; formulas as in ATen's CPU kernels --------------------------------------------

constexpr double kSqrt1_2 = 0.70710678118654752440, kInvSqrt2Pi = 0.39894228040143267794;
constexpr double kSqrt2OverPi = 0.79788456080286535588, kGeluCubic = 0.044715;

bool is_tanh(const Node& n, size_t i) {
  return n.args.size() > i && n.arg(i).is<std::string>() && n.arg(i).as<std::string>() == "tanh";
}

Val gelu(Ops& o, const Node& n, Val x) {
  if (is_tanh(n, 1)) {
    const Val cube = o.Mul(o.Mul(x, x), x);
    const Val inner = o.Mul(c(o, x, kSqrt2OverPi), o.Add(x, o.Mul(c(o, x, kGeluCubic), cube)));
    return o.Mul(o.Mul(c(o, x, 0.5), x), o.Add(c(o, x, 1), o.Tanh(inner)));
  }
  return o.Mul(o.Mul(x, c(o, x, 0.5)), o.Add(c(o, x, 1), o.Erf(o.Mul(x, c(o, x, kSqrt1_2)))));
}

Val gelu_backward(Ops& o, const Node& n, Val g, Val x) {
  const Val one = c(o, x, 1), half = c(o, x, 0.5);
  if (is_tanh(n, 2)) {
    const Val square = o.Mul(x, x);
    const Val inner = o.Mul(c(o, x, kSqrt2OverPi), o.Add(x, o.Mul(c(o, x, kGeluCubic), o.Mul(square, x))));
    const Val t = o.Tanh(inner);
    const Val left = o.Mul(half, x), right = o.Add(one, t);
    const Val left_d = o.Mul(half, right);
    const Val tanh_d = o.Sub(one, o.Mul(t, t));
    const Val inner_d = o.Mul(c(o, x, kSqrt2OverPi), o.Add(one, o.Mul(c(o, x, 3 * kGeluCubic), square)));
    return o.Mul(g, o.Add(left_d, o.Mul(o.Mul(left, tanh_d), inner_d)));
  }
  const Val cdf = o.Mul(half, o.Add(one, o.Erf(o.Mul(x, c(o, x, kSqrt1_2)))));
  const Val pdf = o.Mul(c(o, x, kInvSqrt2Pi), o.Exp(o.Mul(o.Mul(x, x), c(o, x, -0.5))));
  return o.Mul(g, o.Add(cdf, o.Mul(x, pdf)));
}

Val silu(Ops& o, const Node&, Val x) { return o.Div(x, o.Add(c(o, x, 1), o.Exp(o.Neg(x)))); }
Val silu_backward(Ops& o, const Node&, Val g, Val x) {
  const Val one = c(o, x, 1), s = o.Div(one, o.Add(one, o.Exp(o.Neg(x))));
  return o.Mul(o.Mul(g, s), o.Add(one, o.Mul(x, o.Sub(one, s))));
}

Val hardtanh_backward(Ops& o, const Node& n, Val g, Val x) {
  const Val out = o.Or(o.Le(x, number(o, n.arg(2), x.dtype)), o.Ge(x, number(o, n.arg(3), x.dtype)));
  return o.where(out, zero(o, g), g);
}
Val relu6(Ops& o, Val x) { return o.Minimum(o.Maximum(x, zero(o, x)), c(o, x, 6)); }
Val hardsigmoid(Ops& o, const Node&, Val x) { return o.Div(relu6(o, o.Add(x, c(o, x, 3))), c(o, x, 6)); }
Val hardsigmoid_backward(Ops& o, const Node&, Val g, Val x) {
  const Val in = o.And(o.Gt(x, c(o, x, -3)), o.Lt(x, c(o, x, 3)));
  // ATen's sixth is a float, for doubles too.
  return o.where(in, o.Mul(g, c(o, g, 1.0F / 6)), zero(o, g));
}
Val hardswish(Ops& o, const Node&, Val x) { return o.Div(o.Mul(x, relu6(o, o.Add(x, c(o, x, 3)))), c(o, x, 6)); }
Val hardswish_backward(Ops& o, const Node&, Val g, Val x) {
  const Val mid = o.Mul(g, o.Add(o.Div(x, c(o, x, 3)), c(o, x, 0.5)));
  return o.where(o.Le(x, c(o, x, -3)), zero(o, g), o.where(o.Lt(x, c(o, x, 3)), mid, g));
}
Val leaky_relu(Ops& o, const Node& n, Val x) {
  return o.where(o.Gt(x, zero(o, x)), x, o.Mul(x, number(o, n.arg(1), x.dtype)));
}
Val leaky_relu_backward(Ops& o, const Node& n, Val g, Val x) {
  return o.where(o.Gt(x, zero(o, x)), g, o.Mul(g, number(o, n.arg(2), g.dtype)));
}
Val elu(Ops& o, const Node& n, Val x) {  // (x, alpha, scale, input_scale)
  const double alpha = n.arg(1).to_double(), scale = n.arg(2).to_double(), in = n.arg(3).to_double();
  const Val negative = o.Minimum(x, zero(o, x));  // an exponential that overflows is slow
  const Val low = o.Mul(o.Expm1(o.Mul(negative, c(o, x, in))), c(o, x, alpha * scale));
  return o.where(o.Le(x, zero(o, x)), low, o.Mul(x, c(o, x, scale)));
}
Val elu_backward(Ops& o, const Node& n, Val g, Val y) {  // (grad, alpha, scale, input_scale, is_result, self_or_result)
  const double alpha = n.arg(1).to_double(), scale = n.arg(2).to_double(), in = n.arg(3).to_double();
  const double negative = alpha * scale;
  const Val low = n.arg(4).to_bool() ? o.Mul(o.Mul(g, c(o, g, in)), o.Add(y, c(o, y, negative)))
                                     : o.Mul(o.Mul(g, c(o, g, in * negative)), o.Exp(o.Mul(y, c(o, y, in))));
  return o.where(o.Le(y, zero(o, y)), low, o.Mul(g, c(o, g, scale)));
}
Val softplus(Ops& o, const Node& n, Val x) {  // (x, beta, threshold)
  const Val beta = number(o, n.arg(1), x.dtype), scaled = o.Mul(x, beta);
  return o.where(o.Gt(scaled, number(o, n.arg(2), x.dtype)), x, o.Div(o.Log1p(o.Exp(scaled)), beta));
}
Val softplus_backward(Ops& o, const Node& n, Val g, Val x) {
  const Val beta = number(o, n.arg(2), x.dtype), scaled = o.Mul(x, beta), z = o.Exp(scaled);
  return o.where(o.Gt(scaled, number(o, n.arg(3), x.dtype)), g, o.Div(o.Mul(g, z), o.Add(z, c(o, z, 1))));
}
// Where its square overflows, the vector library's code gives infinity.
Val log_of_twice(Ops& o, Val x) { return o.Add(o.Log(x), c(o, x, std::numbers::ln2)); }
Val square_overflows(Ops& o, Val x) { return o.Gt(x, c(o, x, x.dtype == DType::Float64 ? 1e150 : 1e15)); }
Val asinh(Ops& o, const Node&, Val x) {
  const Val size = o.Abs(x);
  return o.where(square_overflows(o, size), o.Copysign(log_of_twice(o, size), x), o.Asinh(x));
}
Val acosh(Ops& o, const Node&, Val x) { return o.where(square_overflows(o, x), log_of_twice(o, x), o.Acosh(x)); }
Val mish(Ops& o, const Node&, Val x) { return o.Mul(x, o.Tanh(o.Log1p(o.Exp(x)))); }
Val mish_backward(Ops& o, const Node&, Val g, Val x) {
  const Val s = o.Sigmoid(x), t = o.Tanh(o.Log1p(o.Exp(x)));
  return o.Mul(g, o.Add(t, o.Mul(o.Mul(x, s), o.Sub(c(o, x, 1), o.Mul(t, t)))));
}
Val tanh_backward(Ops& o, const Node&, Val g, Val y) { return o.Mul(g, o.Sub(c(o, y, 1), o.Mul(y, y))); }
Val sigmoid_backward(Ops& o, const Node&, Val g, Val y) { return o.Mul(o.Mul(g, o.Sub(c(o, y, 1), y)), y); }
Val xlogy(Ops& o, const Node& n, Val a, Val b) {
  const Val product = o.Mul(a, rounded(o, n, o.Log(b)));
  return o.where(o.Ne(b, b), b, o.where(o.Eq(a, zero(o, a)), zero(o, a), product));
}
Val softshrink(Ops& o, const Node& n, Val x) {
  const Val lambda = number(o, n.arg(1), x.dtype);
  const Val high = o.Gt(x, lambda), low = o.Lt(x, o.Neg(lambda));
  // NaN stays NaN.
  return o.where(high, o.Sub(x, lambda), o.where(low, o.Add(x, lambda), o.Mul(x, zero(o, x))));
}
Val is_inf(Ops& o, Val x) { return o.Eq(o.Abs(x), c(o, x, std::numeric_limits<double>::infinity())); }

// log_sigmoid_forward returns (output, buffer); the buffer is only for this op's own backward.
bool log_sigmoid_forward(Lowering& l, const Node& n) {
  const Tensor x = l.get(n.arg(0));
  const DType out = n.results[0].dtype, compute = compute_type(out);
  l.set(n, l.lazy(
               out, x.sizes,
               [=](Ops& o, Index p) {
                 const Val v = cast_to(o, x.load(o, p), compute);
                 const Val r = o.Sub(o.Minimum(v, zero(o, v)), o.Log1p(o.Exp(o.Neg(o.Abs(v)))));
                 return cast_to(o, r, out);
               },
               {x}, 40));
  if (l.is_used(n, 1)) {
    if (x.sizes == n.results[1].sizes)
      l.set(
          n,
          l.lazy(
              out, x.sizes,
              [=](Ops& o, Index p) { return cast_to(o, o.Exp(o.Neg(o.Abs(cast_to(o, x.load(o, p), compute)))), out); },
              {x}, 20),
          1);
    else
      return false;
  }
  return true;
}
Val log_sigmoid_backward(Ops& o, const Node&, Val g, Val x) {
  const Val one = c(o, x, 1), negative = o.Lt(x, zero(o, x));
  const Val z = o.Exp(o.Neg(o.Abs(x)));
  const Val deriv = o.where(negative, one, zero(o, x)), sign = o.where(negative, one, o.Neg(one));
  return o.Mul(o.Sub(deriv, o.Mul(sign, o.Div(z, o.Add(one, z)))), g);
}

Val lerp(Ops& o, Val a, Val b, Val w) {
  const Val d = o.Sub(b, a), one = c(o, w, 1);
  return o.where(o.Lt(o.Abs(w), c(o, w, 0.5)), o.Add(a, o.Mul(w, d)), o.Sub(b, o.Mul(d, o.Sub(one, w))));
}
Val addcmul(Ops& o, const Node& n, Val a, Val x, Val y) {
  return o.Add(a, o.Mul(o.Mul(number(o, n.arg(3), a.dtype), x), y));
}
Val addcdiv(Ops& o, const Node& n, Val a, Val x, Val y) {
  return o.Add(a, o.Div(o.Mul(number(o, n.arg(3), a.dtype), x), y));
}
Val threshold(Ops& o, const Node& n, Val x) {
  return o.where(o.Le(x, number(o, n.arg(1), x.dtype)), number(o, n.arg(2), x.dtype), x);
}
Val threshold_backward(Ops& o, const Node& n, Val g, Val x) {
  return o.where(o.Le(x, number(o, n.arg(2), x.dtype)), zero(o, g), g);
}
Val smooth_l1(Ops& o, Val d, double beta) {
  const Val z = o.Abs(d), b = c(o, z, beta), half = c(o, z, 0.5);
  return o.where(o.Lt(z, b), o.Div(o.Mul(o.Mul(half, z), z), b), o.Sub(z, o.Mul(half, b)));
}

bool relu(Lowering& l, const Node& n) { return unary<F1(o.Maximum(a, zero(o, a)))>(l, n); }

// round(x, decimals=0) only.
bool round_decimals(Lowering& l, const Node& n) {
  return n.arg(1).to_int() == 0 && is_floating(n.results[0].dtype) && unary<F1(o.Round(a))>(l, n);
}
// On integers these are the identity.
template <auto F>
bool rounding(Lowering& l, const Node& n) {
  return is_floating(n.results[0].dtype) ? unary<F>(l, n) : to_copy(l, n);
}
bool nan_to_num(Lowering& l, const Node& n) {
  if (!is_floating(n.results[0].dtype)) return to_copy(l, n);
  const DType t = n.results[0].dtype;
  // Half types have limits of their own, which only their dtype knows.
  if (t != DType::Float32 && t != DType::Float64) return false;
  return unary<[](Ops& o, const Node& n, Val a) {
    const double max = a.dtype == DType::Float64 ? std::numeric_limits<double>::max()
                                                 : static_cast<double>(std::numeric_limits<float>::max());
    const double nan = n.arg(1).is_none() ? 0 : n.arg(1).to_double();
    const double high = n.arg(2).is_none() ? max : n.arg(2).to_double();
    const double low = n.arg(3).is_none() ? -max : n.arg(3).to_double();
    const double inf = std::numeric_limits<double>::infinity();
    return o.where(o.Ne(a, a), c(o, a, nan),
                   o.where(o.Eq(a, c(o, a, inf)), c(o, a, high), o.where(o.Eq(a, c(o, a, -inf)), c(o, a, low), a)));
  }>(l, n);
}

template <auto F>
constexpr Rule logical = &pointwise_rule<F, In::Promote, true, 1, 0, 1>;
template <auto F>
constexpr Rule predicate = &pointwise_rule<F, In::Promote, true, 1, 0>;
template <auto F>
constexpr Rule either = &pointwise_rule<F, In::Result, true, 1, 0, 1>;  // bool operands allowed

bool float_only_predicate(Lowering& l, const Node& n, Rule rule) {
  return is_floating(n.arg(0).value().meta().dtype) && rule(l, n);
}
bool is_inf_rule(Lowering& l, const Node& n) { return float_only_predicate(l, n, predicate<F1(is_inf(o, a))>); }

const RuleRow kRows[] = {
    {"aten::add.Tensor", either<add>},
    {"aten::add.Scalar", either<add>},
    {"aten::sub.Tensor", binary<sub>},
    {"aten::sub.Scalar", binary<sub>},
    {"aten::rsub.Tensor", binary<rsub>},
    {"aten::rsub.Scalar", binary<rsub>},
    {"aten::mul.Tensor", scaled<mul>},
    {"aten::mul.Scalar", scaled<mul>},
    {"aten::div.Tensor", scaled<F2(o.Div(a, b)), 4>},
    {"aten::div.Scalar", scaled<F2(o.Div(a, b)), 4>},
    {"aten::div.Tensor_mode", div_mode},
    {"aten::div.Scalar_mode", div_mode},
    {"aten::floor_divide", floor_divide},
    {"aten::floor_divide.Scalar", floor_divide},
    {"aten::remainder.Tensor", binary<F2(o.Remainder(a, b)), 6>},
    {"aten::remainder.Scalar", binary<F2(o.Remainder(a, b)), 6>},
    {"aten::fmod.Tensor", binary<F2(o.Fmod(a, b)), 6>},
    {"aten::fmod.Scalar", binary<F2(o.Fmod(a, b)), 6>},
    {"aten::pow.Tensor_Scalar", pow_scalar},
    {"kiln::c_math", c_math},
    {"aten::pow.Tensor_Tensor", pow_tensor},
    {"aten::pow.Scalar", pow_tensor},
    {"aten::maximum", either<maximum>},
    {"aten::minimum", either<minimum>},
    {"aten::fmax", binary<F2(is_floating(a.dtype) ? o.Fmax(a, b) : o.Maximum(a, b))>},
    {"aten::fmin", binary<F2(is_floating(a.dtype) ? o.Fmin(a, b) : o.Minimum(a, b))>},
    {"aten::atan2", binary<F2(o.Atan2(a, b)), 30>},
    {"aten::hypot", binary<F2(o.Hypot(a, b)), 10>},
    {"aten::copysign.Tensor", binary<F2(o.Copysign(a, b))>},
    {"aten::copysign.Scalar", binary<F2(o.Copysign(a, b))>},
    {"aten::xlogy.Tensor", binary<xlogy, 20>},
    {"aten::bitwise_and.Tensor", either<F2(o.And(a, b))>},
    {"aten::bitwise_and.Scalar", either<F2(o.And(a, b))>},
    {"aten::bitwise_or.Tensor", either<F2(o.Or(a, b))>},
    {"aten::bitwise_or.Scalar", either<F2(o.Or(a, b))>},
    {"aten::bitwise_xor.Tensor", either<F2(o.Xor(a, b))>},
    {"aten::bitwise_xor.Scalar", either<F2(o.Xor(a, b))>},
    {"aten::bitwise_not", &pointwise_rule<F1(o.Not(a)), In::Result, true, 1, 0>},
    {"aten::bitwise_left_shift.Tensor", binary<F2(o.Shl(a, b))>},
    {"aten::bitwise_right_shift.Tensor", binary<F2(o.Shr(a, b))>},
    {"aten::logical_and", logical<F2(o.And(truth(o, a), truth(o, b)))>},
    {"aten::logical_or", logical<F2(o.Or(truth(o, a), truth(o, b)))>},
    {"aten::logical_xor", logical<F2(o.Xor(truth(o, a), truth(o, b)))>},
    {"aten::logical_not", predicate<F1(o.Not(truth(o, a)))>},
    {"aten::eq.Tensor", compare<F2(o.Eq(a, b))>},
    {"aten::eq.Scalar", compare<F2(o.Eq(a, b))>},
    {"aten::ne.Tensor", compare<F2(o.Ne(a, b))>},
    {"aten::ne.Scalar", compare<F2(o.Ne(a, b))>},
    {"aten::lt.Tensor", compare<F2(o.Lt(a, b))>},
    {"aten::lt.Scalar", compare<F2(o.Lt(a, b))>},
    {"aten::le.Tensor", compare<F2(o.Le(a, b))>},
    {"aten::le.Scalar", compare<F2(o.Le(a, b))>},
    {"aten::gt.Tensor", compare<F2(o.Gt(a, b))>},
    {"aten::gt.Scalar", compare<F2(o.Gt(a, b))>},
    {"aten::ge.Tensor", compare<F2(o.Ge(a, b))>},
    {"aten::ge.Scalar", compare<F2(o.Ge(a, b))>},
    {"aten::isnan", predicate<F1(o.Ne(a, a))>},
    {"aten::isinf", is_inf_rule},
    {"aten::where.self", select_rule<0, 1, 2>},
    {"aten::where.ScalarSelf", select_rule<0, 1, 2>},
    {"aten::where.ScalarOther", select_rule<0, 1, 2>},
    {"aten::where.Scalar", select_rule<0, 1, 2>},
    {"aten::masked_fill.Scalar", select_rule<1, 2, 0>},
    {"aten::masked_fill.Tensor", select_rule<1, 2, 0>},
    {"aten::clamp", clamp},
    {"aten::clamp.Tensor", clamp},
    {"aten::clamp_min", binary<F2(o.Maximum(a, b))>},
    {"aten::clamp_min.Tensor", binary<F2(o.Maximum(a, b))>},
    {"aten::clamp_max", binary<F2(o.Minimum(a, b))>},
    {"aten::clamp_max.Tensor", binary<F2(o.Minimum(a, b))>},
    {"aten::hardtanh", &pointwise_rule<F3(o.Minimum(o.Maximum(a, b), d)), In::Result, false, 2, 0, 1, 2>},
    {"aten::_to_copy", to_copy},
    {"aten::clone", to_copy},
    {"aten::contiguous", to_copy},
    {"aten::lift_fresh_copy", to_copy},
    {"aten::neg", unary<F1(o.Neg(a))>},
    {"aten::abs", unary<F1(o.Abs(a))>},
    {"aten::sign", unary<F1(o.Sign(a))>},
    {"aten::sgn", unary<F1(o.Sign(a))>},
    {"aten::square", unary<F1(o.Mul(a, a))>},
    {"aten::sqrt", unary<F1(o.Sqrt(a)), 4>},
    {"aten::rsqrt", unary<F1(o.Rsqrt(a)), 6>},
    {"aten::reciprocal", unary<F1(o.Reciprocal(a)), 4>},
    {"aten::floor", rounding<F1(o.Floor(a))>},
    {"aten::ceil", rounding<F1(o.Ceil(a))>},
    {"aten::trunc", rounding<F1(o.Trunc(a))>},
    {"aten::round", rounding<F1(o.Round(a))>},
    {"aten::round.decimals", round_decimals},
    {"aten::frac", unary<F1(o.Sub(a, o.Trunc(a)))>},
    {"aten::exp", unary<F1(o.Exp(a)), 12>},
    {"aten::exp2", unary<F1(o.Exp2(a)), 12>},
    {"aten::expm1", unary<F1(o.Expm1(a)), 14>},
    {"aten::log", unary<F1(o.Log(a)), 12>},
    {"aten::log2", unary<F1(o.Log2(a)), 12>},
    {"aten::log10", unary<F1(o.Log10(a)), 12>},
    {"aten::log1p", unary<F1(o.Log1p(a)), 14>},
    {"aten::sin", unary<F1(o.Sin(a)), 14>},
    {"aten::cos", unary<F1(o.Cos(a)), 14>},
    {"aten::tan", unary<F1(o.Tan(a)), 20>},
    {"aten::asin", unary<F1(o.Asin(a)), 20>},
    {"aten::acos", unary<F1(o.Acos(a)), 20>},
    {"aten::atan", unary<F1(o.Atan(a)), 20>},
    {"aten::sinh", unary<F1(o.Sinh(a)), 20>},
    {"aten::cosh", unary<F1(o.Cosh(a)), 20>},
    {"aten::tanh", unary<F1(o.Tanh(a)), 16>},
    {"aten::asinh", unary<asinh, 30>},
    {"aten::acosh", unary<acosh, 30>},
    {"aten::atanh", unary<F1(o.Atanh(a)), 20>},
    {"aten::erf", unary<F1(o.Erf(a)), 20>},
    {"aten::erfc", unary<F1(o.Erfc(a)), 20>},
    {"aten::lgamma", unary<F1(o.Lgamma(a)), 40>},
    {"aten::sigmoid", unary<F1(o.Sigmoid(a)), 14>},
    {"aten::relu", relu},
    {"aten::relu6", unary<F1(relu6(o, a))>},
    {"aten::gelu", unary<gelu, 24>},
    {"aten::gelu_backward", binary<gelu_backward, 40>},
    {"aten::silu", unary<silu, 18>},
    {"aten::silu_backward", binary<silu_backward, 22>},
    {"aten::hardtanh_backward", binary<hardtanh_backward, 3>},
    {"aten::hardsigmoid", unary<hardsigmoid, 6>},
    {"aten::hardsigmoid_backward", binary<hardsigmoid_backward, 4>},
    {"aten::hardswish", unary<hardswish, 7>},
    {"aten::hardswish_backward", binary<hardswish_backward, 7>},
    {"aten::leaky_relu", unary<leaky_relu, 2>},
    {"aten::leaky_relu_backward", binary<leaky_relu_backward, 2>},
    {"aten::elu", unary<elu, 18>},
    {"aten::elu_backward", &pointwise_rule<elu_backward, In::Result, false, 18, 0, 5>},
    {"aten::softplus", unary<softplus, 30>},
    {"aten::softplus_backward", binary<softplus_backward, 20>},
    {"aten::softshrink", unary<softshrink, 4>},
    {"aten::mish", unary<mish, 50>},
    {"aten::mish_backward", binary<mish_backward, 60>},
    {"aten::tanh_backward", binary<tanh_backward, 3>},
    {"aten::sigmoid_backward", binary<sigmoid_backward, 3>},
    {"aten::log_sigmoid_forward", log_sigmoid_forward},
    {"aten::log_sigmoid_backward", binary<log_sigmoid_backward, 24>},
    {"aten::threshold", unary<threshold>},
    {"aten::threshold_backward", binary<threshold_backward>},
    {"aten::lerp.Scalar", binary<F2(lerp(o, a, b, number(o, n.arg(2), a.dtype))), 6>},
    {"aten::lerp.Tensor", &pointwise_rule<F3(lerp(o, a, b, d)), In::Result, false, 6, 0, 1, 2>},
    {"aten::addcmul", &pointwise_rule<addcmul, In::Result, false, 3, 0, 1, 2>},
    {"aten::addcdiv", &pointwise_rule<addcdiv, In::Result, false, 6, 0, 1, 2>},
    {"aten::nan_to_num", nan_to_num},
    // Elementwise losses (decomposition makes means and sums of them).
    {"kiln::smooth_l1",
     &pointwise_rule<F2(smooth_l1(o, o.Sub(a, b), n.arg(2).to_double())), In::Result, false, 8, 0, 1>},
    {"kiln::huber", &pointwise_rule<[](Ops& o, const Node& n, Val a, Val b) {
       const Val z = o.Abs(o.Sub(a, b)), d = number(o, n.arg(2), z.dtype), half = c(o, z, 0.5);
       return o.where(o.Le(z, d), o.Mul(o.Mul(half, z), z), o.Mul(d, o.Sub(z, o.Mul(half, d))));
     },
                                    In::Result, false, 8, 0, 1>},
};

}  // namespace

std::span<const RuleRow> pointwise_rules() { return kRows; }

}  // namespace kiln::lower
