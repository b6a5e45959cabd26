#include "codegen/triton/ops.h"

#include <cmath>

#include "base/error.h"
#include "codegen/common/source.h"

namespace kiln::codegen::triton {

using loops::Opcode;
using loops::ReduceKind;

std::string type_name(DType t) {
  switch (t) {
    case DType::Bool:
      return "tl.int1";
    case DType::UInt8:
      return "tl.uint8";
    case DType::Int8:
      return "tl.int8";
    case DType::Int16:
      return "tl.int16";
    case DType::Int32:
      return "tl.int32";
    case DType::Int64:
      return "tl.int64";
    case DType::Float16:
      return "tl.float16";
    case DType::BFloat16:
      return "tl.bfloat16";
    case DType::Float32:
      return "tl.float32";
    case DType::Float64:
      return "tl.float64";
    default:
      throw Unsupported("Triton has no " + std::string(dtype_name(t)));
  }
}

namespace {

bool is_signed(DType t) { return dtype_kind(t) == 'i'; }

std::string float_text(double v, DType t) {
  if (std::isnan(v)) return "float(\"nan\")";
  if (std::isinf(v)) return v < 0 ? "float(\"-inf\")" : "float(\"inf\")";
  return float_digits(v, t);
}

/// A number of an integer dtype, as it wraps.
int64_t wrapped(int64_t v, DType t) {
  const int bits = dtype_size(t) * 8;
  if (t == DType::Bool) return v & 1;
  if (bits == 64) return v;
  const auto low = static_cast<int64_t>(static_cast<uint64_t>(v) & ((uint64_t{1} << bits) - 1));
  return is_signed(t) && low >> (bits - 1) ? low - (int64_t{1} << bits) : low;
}

std::string full(const std::string& number, DType t) { return "tl.full((), " + number + ", " + type_name(t) + ")"; }

/// An extreme of a dtype: what a maximum or minimum begins with.
std::string extreme(DType t, bool largest) {
  if (is_floating(t)) return largest ? "float(\"inf\")" : "float(\"-inf\")";
  if (t == DType::Bool) return largest ? "True" : "False";
  const int bits = dtype_size(t) * 8;
  if (!is_signed(t)) return largest ? std::to_string((int64_t{1} << bits) - 1) : "0";
  const auto most = static_cast<int64_t>(~uint64_t{0} >> (65 - bits));
  return std::to_string(largest ? most : -most - 1);
}

}  // namespace

std::string literal(const loops::Inst& i) {
  if (i.op == Opcode::ConstFloat) return float_text(i.fimm, i.dtype);
  const int64_t v = wrapped(i.imm, i.dtype);
  return i.dtype == DType::Bool ? (v ? "True" : "False") : std::to_string(v);
}

bool literal_is_typed(DType t) { return t != DType::Bool && !is_half(t); }

std::string typed_constant(const loops::Inst& i) {
  // Numbers become half types by way of float32.
  if (is_half(i.dtype)) return cast(full(literal(i), DType::Float32), DType::Float32, i.dtype);
  return full(literal(i), i.dtype);
}

std::string cast(const std::string& text, DType from, DType to) {
  const auto as = [](const std::string& v, DType t) { return v + ".to(" + type_name(t) + ")"; };
  if (from == to) return text;
  if (from == DType::BFloat16) return cast("from_bfloat16(" + text + ")", DType::Float32, to);
  if (from == DType::Float16 && to != DType::Float32) return cast(as(text, DType::Float32), DType::Float32, to);
  if (to == DType::Bool) return "(" + text + " != 0)";
  if (is_half(to)) {
    const std::string single = from == DType::Float32 ? text : as(text, DType::Float32);
    return to == DType::BFloat16 ? "to_bfloat16(" + single + ")" : as(single, to);
  }
  if (is_floating(from) && is_integral(to)) {
    const DType through = to == DType::Int64 || to == DType::UInt8 ? DType::Int64 : DType::Int32;
    const std::string whole = (through == DType::Int64 ? "to_int64(" : "to_int32(") + text + ")";
    return through == to ? whole : as(whole, to);
  }
  return as(text, to);
}

namespace {

const char* infix(Opcode op, DType t) {
  const bool flag = t == DType::Bool;
  switch (op) {
    case Opcode::Add:
      return flag ? "|" : "+";
    case Opcode::Sub:
      return flag ? "^" : "-";
    case Opcode::Mul:
      return flag ? "&" : "*";
    case Opcode::Div:
      return t == DType::Float64 ? "/" : nullptr;  // of float32, `/` is not rounded correctly
    case Opcode::Maximum:
      return flag ? "|" : nullptr;
    case Opcode::Minimum:
      return flag ? "&" : nullptr;
    default:
      return shared_infix(op);
  }
}

/// Functions whose names are all there is to say: of the prelude, of Triton and of libdevice.
const char* function_name(Opcode op, bool floating) {
  switch (op) {
    case Opcode::Div:
      return "tl.div_rn";
    case Opcode::FloorDiv:
      return floating ? "floor_divide" : "floor_divide_int";
    case Opcode::TruncDiv:
      return floating ? "trunc_divide" : "trunc_divide_int";
    case Opcode::Remainder:
      return floating ? "remainder" : "remainder_int";
    case Opcode::Fmod:
      return floating ? "libdevice.fmod" : "fmod_int";
    case Opcode::Maximum:
      return "maximum";
    case Opcode::Minimum:
      return "minimum";
    case Opcode::Fmax:
      return "fmax";
    case Opcode::Fmin:
      return "fmin";
    case Opcode::Pow:
      return floating ? "libdevice.pow" : "power_int";
    case Opcode::Atan2:
      return "libdevice.atan2";
    case Opcode::Hypot:
      return "libdevice.hypot";
    case Opcode::Copysign:
      return "libdevice.copysign";
    case Opcode::Nextafter:
      return "libdevice.nextafter";
    case Opcode::Abs:
      return "tl.abs";
    case Opcode::Sign:
      return "sign";
    case Opcode::Floor:
      return "tl.floor";
    case Opcode::Ceil:
      return "tl.ceil";
    case Opcode::Trunc:
      return "libdevice.trunc";
    case Opcode::Round:
      return "libdevice.rint";
    case Opcode::Exp:
      return "libdevice.exp";
    case Opcode::Exp2:
      return "libdevice.exp2";
    case Opcode::Expm1:
      return "libdevice.expm1";
    case Opcode::Log:
      return "libdevice.log";
    case Opcode::Log2:
      return "libdevice.log2";
    case Opcode::Log10:
      return "libdevice.log10";
    case Opcode::Log1p:
      return "libdevice.log1p";
    case Opcode::Sin:
      return "libdevice.sin";
    case Opcode::Cos:
      return "libdevice.cos";
    case Opcode::Tan:
      return "libdevice.tan";
    case Opcode::Asin:
      return "libdevice.asin";
    case Opcode::Acos:
      return "libdevice.acos";
    case Opcode::Atan:
      return "libdevice.atan";
    case Opcode::Sinh:
      return "libdevice.sinh";
    case Opcode::Cosh:
      return "libdevice.cosh";
    case Opcode::Tanh:
      return "libdevice.tanh";
    case Opcode::Asinh:
      return "libdevice.asinh";
    case Opcode::Acosh:
      return "libdevice.acosh";
    case Opcode::Atanh:
      return "libdevice.atanh";
    case Opcode::Erf:
      return "libdevice.erf";
    case Opcode::Erfc:
      return "libdevice.erfc";
    case Opcode::Lgamma:
      return "libdevice.lgamma";
    case Opcode::Sigmoid:
      return "sigmoid";
    case Opcode::Fma:
      return "tl.fma";
    case Opcode::Shl:
      return "shift_left";
    case Opcode::Shr:
      return "shift_right";
    default:
      return nullptr;
  }
}

/// What a function of integers has to know of their dtype.
std::string dtype_arguments(Opcode op, DType t) {
  const std::string sign = is_signed(t) ? "True" : "False", bits = std::to_string(dtype_size(t) * 8);
  switch (op) {
    case Opcode::FloorDiv:
    case Opcode::TruncDiv:
    case Opcode::Remainder:
    case Opcode::Fmod:
      return is_integral(t) ? ", " + sign : "";
    case Opcode::Pow:
      return is_integral(t) ? ", " + sign + ", " + bits : "";
    case Opcode::Shl:
    case Opcode::Shr:
      return ", " + bits;
    default:
      return "";
  }
}

/// Whether the function takes a bare number as its second operand.
bool takes_literal(Opcode op) {
  return op == Opcode::Maximum || op == Opcode::Minimum || op == Opcode::Fmax || op == Opcode::Fmin ||
         op == Opcode::Div;
}

std::string infix_text(const char* op, Opcode opcode, DType t, std::span<const Operand> args) {
  const bool bitwise = loops::opcode_class(opcode) == 'l';
  if (is_half(t))  // comparisons
    return cast(args[0].typed, t, DType::Float32) + " " + op + " " + cast(args[1].typed, t, DType::Float32);
  const bool bare = literal_is_typed(t) && !bitwise && args[0].constant != args[1].constant;
  const auto text = [&](const Operand& a) { return bare ? a.name : a.typed; };
  return text(args[0]) + " " + op + " " + text(args[1]);
}

}  // namespace

std::string scalar_op(Opcode op, DType t, std::span<const Operand> args) {
  const std::string name(loops::opcode_name(op));
  type_name(t);  // there is one
  if (loops::is_c_math(op)) throw Unsupported(name + " gives the C library's own bits, which a GPU does not have");
  if (const char* between = infix(op, t)) return infix_text(between, op, t, args);
  const std::string a = args[0].typed;
  const bool single = t == DType::Float32;
  const auto inverse = [&](const std::string& of) { return single ? "tl.div_rn(1.0, " + of + ")" : "1.0 / " + of; };
  const std::string root = (single ? "tl.sqrt_rn(" : "tl.sqrt(") + a + ")";
  if (t == DType::Bool && op != Opcode::Not) throw Unsupported(name + " of bools in Triton");
  switch (op) {
    case Opcode::Neg:
      return is_floating(t) ? a + " * -1.0" : "0 - " + a;  // Triton's own minus loses the sign of zero
    case Opcode::Not:
      return "~" + a;
    case Opcode::Sqrt:
      return root;
    case Opcode::Rsqrt:
      return inverse(root);
    case Opcode::Reciprocal:
      return inverse(a);
    default:
      break;
  }
  const char* function = function_name(op, is_floating(t));
  if (!function) throw Unsupported(name + " in Triton");
  // Of equal zeros the operand is taken, not the bound (relu keeps the sign of zero).
  const bool bound = (op == Opcode::Maximum || op == Opcode::Minimum) && args[1].constant && !args[0].constant &&
                     args[1].name.find("nan") == std::string::npos;
  if (bound) return std::string(function) + "(" + args[1].name + ", " + a + ")";
  std::string text = std::string(function) + "(" + a;
  for (size_t k = 1; k < args.size(); ++k)
    text += ", " + (takes_literal(op) && literal_is_typed(t) && !args[0].constant ? args[k].name : args[k].typed);
  return text + dtype_arguments(op, t) + ")";
}

ReduceForm reduce_form(ReduceKind kind, DType t, bool wide) {
  const bool flag = t == DType::Bool;
  const DType sum = wide ? DType::Float64 : t;
  const std::string zero = is_floating(t) ? "0.0" : flag ? "False" : "0";
  switch (kind) {
    case ReduceKind::Sum:
      return {flag ? "either" : "add", {sum}, {zero}};
    case ReduceKind::Prod:
      return {flag ? "both" : "multiply", {t}, {is_floating(t) ? "1.0" : flag ? "True" : "1"}};
    case ReduceKind::Max:
      return {flag ? "either" : "maximum", {t}, {extreme(t, false)}};
    case ReduceKind::Min:
      return {flag ? "both" : "minimum", {t}, {extreme(t, true)}};
    case ReduceKind::Any:
      return {"either", {t}, {zero}};
    case ReduceKind::All:
      return {"both", {t}, {flag ? "True" : "1"}};
    case ReduceKind::ArgMax:
      return {"first_maximum", {t, DType::Int64}, {extreme(t, false), extreme(DType::Int64, true)}};
    case ReduceKind::ArgMin:
      return {"first_minimum", {t, DType::Int64}, {extreme(t, true), extreme(DType::Int64, true)}};
    case ReduceKind::Welford:
    case ReduceKind::WelfordCombine:
      return {"moments", {t, t, t}, {"0.0", "0.0", "0.0"}};
    case ReduceKind::OnlineSoftmax:
    case ReduceKind::OnlineSoftmaxCombine:
      return {"softmax_sum", {t, t}, {"float(\"-inf\")", "0.0"}};
  }
  throw InternalError("a reduction of no kind");
}

std::vector<std::string> reduce_state(ReduceKind kind, DType t, std::vector<std::string> args, bool wide) {
  if (wide) args[0] = cast(args[0], t, DType::Float64);
  // Infinities have no squared difference from their mean.
  if (kind == ReduceKind::Welford) return {args[0], args[0] + " - " + args[0], full("1.0", t)};
  if (kind == ReduceKind::OnlineSoftmax) return {args[0], full("1.0", t)};
  return args;
}

}  // namespace kiln::codegen::triton
