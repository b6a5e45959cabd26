#include <cmath>

#include "graph/infer.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

// bfloat16 and float16 by their precision and range; NaN and infinities are exact everywhere.
bool exact_in_float(double c, int mantissa_bits, int max_exponent, int min_exponent) {
  if (c == 0 || !std::isfinite(c)) return true;
  int exponent = 0;
  const double m = std::frexp(c, &exponent);  // |m| in [0.5, 1)
  if (exponent > max_exponent || exponent < min_exponent) return false;
  const double scaled = std::ldexp(m, mantissa_bits);
  return scaled == std::trunc(scaled);
}

bool exact(double c, DType t) {
  switch (t) {
    case DType::Float64:
      return true;
    case DType::Float32:
      return std::isnan(c) || static_cast<double>(static_cast<float>(c)) == c;
    case DType::BFloat16:
      return exact_in_float(c, 8, 128, -125);
    case DType::Float16:
      return exact_in_float(c, 11, 16, -13);
    default:
      return false;
  }
}

bool exact(const Arg& number, DType t) {
  if (t == DType::Bool) return number.is<bool>();
  if (is_integral(t)) {
    if (number.is<double>()) return false;
    const int64_t v = number.to_int();
    if (t == DType::Int64) return true;
    const int bits = 8 * dtype_size(t);
    const int64_t low = t == DType::UInt8 ? 0 : -(int64_t{1} << (bits - 1));
    const int64_t high = t == DType::UInt8 ? 255 : (int64_t{1} << (bits - 1)) - 1;
    return v >= low && v <= high;
  }
  return is_floating(t) && exact(number.to_double(), t);
}

// The number that a constant has as an element of dtype `t`: promotion must not change by putting it there.
Arg typed(const Arg& number, DType t) {
  if (is_floating(t)) return number.to_double();
  if (t == DType::Bool) return number.to_bool();
  return number.to_int();
}

const Op kFull("aten::full"), kFullLike("aten::full_like"), kScalar("aten::scalar_tensor"), kOnes("aten::ones"),
    kZeros("aten::zeros"), kOnesLike("aten::ones_like"), kZerosLike("aten::zeros_like"), kNewZeros("aten::new_zeros"),
    kNewOnes("aten::new_ones"), kNewFull("aten::new_full"), kClone("aten::clone"), kToCopy("aten::_to_copy"),
    kMul("aten::mul.Tensor"), kDiv("aten::div.Tensor"), kSub("aten::sub.Tensor"), kViewDtype("aten::view.dtype"),
    kAdd("aten::add.Tensor");

// The number that all elements of the node's result hold, if that is known.
std::optional<Arg> constant_of(const Node* n, const std::unordered_map<const Node*, Arg>& known) {
  if (n->kind != NodeKind::Call || n->results.size() != 1) return std::nullopt;
  const DType t = n->results[0].dtype;
  std::optional<Arg> c;
  if (n->op == kFull || n->op == kFullLike)
    c = n->args.at(1);
  else if (n->op == kNewFull)
    c = n->args.at(2);
  else if (n->op == kScalar)
    c = n->args.at(0);
  else if (n->op == kOnes || n->op == kOnesLike || n->op == kNewOnes)
    c = Arg(1);
  else if (n->op == kZeros || n->op == kZerosLike || n->op == kNewZeros)
    c = Arg(0);
  else if ((ops::is_view(n->op) && !(n->op == kViewDtype)) || n->op == kClone || n->op == kToCopy) {
    if (!n->args.at(0).is_value() || !n->args[0].value()) return std::nullopt;
    const auto it = known.find(n->args[0].value().node);
    if (it != known.end()) c = it->second;
  }
  if (!c || !c->is_number()) return std::nullopt;
  if (t == DType::Bool && c->is<int64_t>()) c = Arg(c->to_bool());
  if (!exact(*c, t)) return std::nullopt;
  return typed(*c, t);
}

bool is_number(const Arg& a, double c) { return a.is_number() && !a.is<bool>() && a.to_double() == c; }

}  // namespace

bool fold_constants(Graph& g) {
  const auto escapes = escaping(g);
  std::unordered_map<const Node*, Arg> known;
  std::unordered_map<const Node*, std::vector<Value>> replaced;
  bool changed = false;
  for (const auto& node : g.nodes()) {
    Node* n = node.get();
    for (Arg& a : n->args)
      for_each_value(a, [&](Value& v) {
        const auto it = v ? replaced.find(v.node) : replaced.end();
        if (it != replaced.end()) v = it->second.at(v.index);
      });
    if (n->kind != NodeKind::Call) continue;
    if (auto c = constant_of(n, known)) {
      known.emplace(n, *c);
      continue;
    }
    if (!(n->op == kAdd || n->op == kSub || n->op == kMul || n->op == kDiv) || n->args.size() < 2) continue;
    const auto number_at = [&](size_t i) -> std::optional<Arg> {
      if (!n->args[i].is_value() || !n->args[i].value()) return std::nullopt;
      const auto it = known.find(n->args[i].value().node);
      if (it == known.end()) return std::nullopt;
      return it->second;
    };
    // The second operand becomes the number; of a commutative op, the first one too, in the second's place.
    std::vector<Arg> args = n->args;
    if (auto c = number_at(1)) {
      args[1] = *c;
    } else if (auto first = number_at(0);
               first && args[1].is_value() && (n->op == kMul || (n->op == kAdd && is_number(args.at(2), 1)))) {
      args[0] = args[1];
      args[1] = *first;
    }
    if (args[1].is_number() && args[0].is_value() && args != n->args) {
      try {
        std::vector<TensorMeta> results = infer(n->op, args);
        results.at(0).requires_grad = n->results[0].requires_grad;
        if (results[0] == n->results[0]) {
          n->args = args;
          changed = true;
        }
      } catch (const Unsupported&) {
        // Without a rule for these arguments the call stays as it is.
      }
    }
    // A complex product with 1 multiplies by 0, too: infinities become NaN.
    const bool neutral = (n->op == kMul && is_number(n->args[1], 1)) ||
                         (n->op == kDiv && is_number(n->args[1], 1) && n->args.size() == 2) ||
                         (n->op == kSub && is_number(n->args[1], 0) && !std::signbit(n->args[1].to_double()));
    if (neutral && !is_complex(n->results[0].dtype) && n->args[0].is_value() &&
        may_replace(n->out(), n->args[0].value(), escapes)) {
      replaced[n] = {n->args[0].value()};
      changed = true;
    }
  }
  if (!replaced.empty()) g.replace_uses(replaced);
  return changed;
}

}  // namespace kiln::graph
