#include "symbolic/real.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <span>

#include "base/error.h"

namespace kiln::symbolic {

struct Real::Function {
  std::string_view name;
  double (*of)(double);
};

struct Real::Node {
  Op op;
  double constant = 0;
  Expr integer;
  const Function* function = nullptr;
  std::vector<Real> operands;
  int64_t num_nodes = 1;
};

namespace {
/// What CPython's functions of these names call.
const Real::Function kFunctions[] = {
    {"sqrt", [](double x) { return std::sqrt(x); }},   {"exp", [](double x) { return std::exp(x); }},
    {"expm1", [](double x) { return std::expm1(x); }}, {"log", [](double x) { return std::log(x); }},
    {"log1p", [](double x) { return std::log1p(x); }}, {"log2", [](double x) { return std::log2(x); }},
    {"log10", [](double x) { return std::log10(x); }}, {"sin", [](double x) { return std::sin(x); }},
    {"cos", [](double x) { return std::cos(x); }},     {"tan", [](double x) { return std::tan(x); }},
    {"asin", [](double x) { return std::asin(x); }},   {"acos", [](double x) { return std::acos(x); }},
    {"atan", [](double x) { return std::atan(x); }},   {"sinh", [](double x) { return std::sinh(x); }},
    {"cosh", [](double x) { return std::cosh(x); }},   {"tanh", [](double x) { return std::tanh(x); }},
    {"fabs", [](double x) { return std::fabs(x); }},
};

/// Python's float a // b and a % b: a rest with the divisor's sign, and the quotient that goes with it.
std::pair<double, double> floor_divide(double a, double b) {
  double rest = std::fmod(a, b), quotient = (a - rest) / b;
  if (rest != 0) {
    if ((b < 0) != (rest < 0)) {
      rest += b;
      quotient -= 1;
    }
  } else {
    rest = std::copysign(0.0, b);
  }
  if (quotient == 0) return {std::copysign(0.0, a / b), rest};
  double whole = std::floor(quotient);
  if (quotient - whole > 0.5) whole += 1;
  return {whole, rest};
}

using Text = std::pair<Real::Op, const char*>;
constexpr Text kSigns[] = {{Real::Op::Add, " + "},   {Real::Op::Sub, " - "},       {Real::Op::Mul, " * "},
                           {Real::Op::Div, " / "},   {Real::Op::FloorDiv, " // "}, {Real::Op::Mod, " % "},
                           {Real::Op::Pow, " ** "},  {Real::Op::Less, " < "},      {Real::Op::LessEqual, " <= "},
                           {Real::Op::Equal, " == "}};
constexpr Text kNames[] = {{Real::Op::Abs, "abs"},
                           {Real::Op::Floor, "floor"},
                           {Real::Op::Ceil, "ceil"},
                           {Real::Op::Trunc, "int"},
                           {Real::Op::Round, "round"}};
/// Null if `texts` has none for it.
const char* text_of(std::span<const Text> texts, Real::Op op) {
  const auto it = std::find_if(texts.begin(), texts.end(), [&](const Text& t) { return t.first == op; });
  return it == texts.end() ? nullptr : it->second;
}
}  // namespace

const Real::Function* Real::find_function(std::string_view name) {
  const auto* it =
      std::find_if(std::begin(kFunctions), std::end(kFunctions), [&](const Function& f) { return f.name == name; });
  return it == std::end(kFunctions) ? nullptr : it;
}

Real::Real(double constant) : node_(std::make_shared<const Node>(Node{Op::Constant, constant, {}, nullptr, {}, 1})) {}
Real::Real(Expr integer)
    : node_(std::make_shared<const Node>(Node{Op::Integer, 0, std::move(integer), nullptr, {}, 1})) {}
Real::Real(Op op, Real a) {
  const int64_t n = a.num_nodes() + 1;
  node_ = std::make_shared<const Node>(Node{op, 0, {}, nullptr, {std::move(a)}, n});
}
Real::Real(Op op, Real a, Real b) {
  const int64_t n = a.num_nodes() + b.num_nodes() + 1;
  node_ = std::make_shared<const Node>(Node{op, 0, {}, nullptr, {std::move(a), std::move(b)}, n});
}
Real::Real(const Function* function, Real a) {
  const int64_t n = a.num_nodes() + 1;
  node_ = std::make_shared<const Node>(Node{Op::Function, 0, {}, function, {std::move(a)}, n});
}

Real::Op Real::op() const { return node_->op; }
double Real::constant() const { return node_->constant; }
const Expr& Real::integer() const { return node_->integer; }
const Real::Function* Real::function() const { return node_->function; }
std::string_view Real::function_name() const { return node_->function->name; }
const std::vector<Real>& Real::operands() const { return node_->operands; }
int64_t Real::num_nodes() const { return node_->num_nodes; }

bool Real::operator==(const Real& o) const {
  const Node &a = *node_, &b = *o.node_;
  if (&a == &b) return true;
  // Zeros of both signs are two constants, and a NaN is one.
  const auto same = [](double x, double y) {
    return (x == y && std::signbit(x) == std::signbit(y)) || (std::isnan(x) && std::isnan(y));
  };
  return a.op == b.op && a.num_nodes == b.num_nodes && a.function == b.function && same(a.constant, b.constant) &&
         a.integer == b.integer && a.operands == b.operands;
}

void for_each_integer(const Real& r, const std::function<void(const Expr&)>& f) {
  if (r.op() == Real::Op::Integer) f(r.integer());
  for (const Real& operand : r.operands()) for_each_integer(operand, f);
}

void for_each_var(const Number& n, const std::function<void(const AtomNode&)>& f) {
  if (const Expr* e = std::get_if<Expr>(&n)) return for_each_var(*e, f);
  for_each_integer(std::get<Real>(n), [&](const Expr& e) { for_each_var(e, f); });
}

std::optional<double> evaluate(const Real& r, const std::function<std::optional<int64_t>(const Expr&)>& integer) {
  constexpr int64_t kExact = int64_t{1} << 53;
  using Op = Real::Op;
  if (r.op() == Op::Constant) return r.constant();
  if (r.op() == Op::Integer) {
    const auto n = integer(r.integer());
    return n && *n <= kExact && *n >= -kExact ? std::optional(static_cast<double>(*n)) : std::nullopt;
  }
  std::array<double, 2> x{};
  for (size_t i = 0; i < r.operands().size(); ++i) {
    const auto operand = evaluate(r.operands()[i], integer);
    if (!operand) return std::nullopt;
    x[i] = *operand;
  }
  const auto [a, b] = x;
  // Python raises where a function of finite numbers is not finite.
  const auto finite = [&](double result) {
    return std::isfinite(result) || !std::isfinite(a) || !std::isfinite(b) ? std::optional(result) : std::nullopt;
  };
  const auto whole = [&](double result) {
    return std::fabs(result) <= static_cast<double>(kExact) ? std::optional(result) : std::nullopt;
  };
  switch (r.op()) {
    case Op::Neg:
      return -a;
    case Op::Abs:
      return std::fabs(a);
    case Op::Add:
      return a + b;
    case Op::Sub:
      return a - b;
    case Op::Mul:
      return a * b;
    case Op::Div:
      return b != 0 ? std::optional(a / b) : std::nullopt;
    case Op::FloorDiv:
      return b != 0 ? std::optional(floor_divide(a, b).first) : std::nullopt;
    case Op::Mod:
      return b != 0 ? std::optional(floor_divide(a, b).second) : std::nullopt;
    case Op::Pow:
      return finite(std::pow(a, b));
    case Op::Less:
      return a < b;
    case Op::LessEqual:
      return a <= b;
    case Op::Equal:
      return a == b;
    case Op::Floor:
      return whole(std::floor(a));
    case Op::Ceil:
      return whole(std::ceil(a));
    case Op::Trunc:
      return whole(std::trunc(a));
    case Op::Round:
      return whole(std::nearbyint(a));
    case Op::Function:
      return finite(r.function()->of(a));
    case Op::Constant:
    case Op::Integer:
      break;
  }
  throw InternalError("bad operation of a real number");
}

std::string print(const Real& r) {
  using Op = Real::Op;
  const auto operand = [](const Real& o) {
    const std::string text = print(o);
    const bool plain = o.op() != Op::Neg && !text_of(kSigns, o.op());
    return plain && (o.op() != Op::Integer || text.find_first_of(" *") == std::string::npos) ? text : "(" + text + ")";
  };
  switch (r.op()) {
    case Op::Constant: {
      std::array<char, 32> text{};
      for (const char* format : {"%.15g", "%.17g"}) {  // the shorter if it is the same number
        std::snprintf(text.data(), text.size(), format, r.constant());
        if (std::strtod(text.data(), nullptr) == r.constant()) break;
      }
      const std::string out = text.data();
      return out.find_first_not_of("-0123456789") == std::string::npos ? out + ".0" : out;
    }
    case Op::Integer:
      return print(r.integer());
    case Op::Neg:
      return "-" + operand(r.operands()[0]);
    case Op::Function:
      return std::string(r.function_name()) + "(" + print(r.operands()[0]) + ")";
    default:
      break;
  }
  if (const char* name = text_of(kNames, r.op())) return std::string(name) + "(" + print(r.operands()[0]) + ")";
  return operand(r.operands()[0]) + text_of(kSigns, r.op()) + operand(r.operands()[1]);
}

std::string print(const Number& n) {
  return std::visit([](const auto& x) { return print(x); }, n);
}

}  // namespace kiln::symbolic
