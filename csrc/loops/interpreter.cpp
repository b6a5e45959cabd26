#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/half.h"
#include "loops/loops.h"

// The meaning of the loop IR, one scalar at a time. Slow and plain on purpose: emitters are tested against it.
namespace kiln::loops {
namespace {

/// A scalar of any dtype: floats as double (f32 results are rounded to f32 after each operation), integers as int64
/// already wrapped to their dtype.
struct Scalar {
  double f = 0;
  int64_t i = 0;
};

int64_t wrap(DType t, uint64_t v) {
  switch (t) {
    case DType::Bool:
      return v & 1;
    case DType::UInt8:
      return static_cast<uint8_t>(v);
    case DType::Int8:
      return static_cast<int8_t>(v);
    case DType::Int16:
      return static_cast<int16_t>(v);
    case DType::Int32:
      return static_cast<int32_t>(v);
    default:
      return static_cast<int64_t>(v);
  }
}

Scalar rounded(DType t, double v) {
  switch (t) {
    case DType::Float32:
      return {static_cast<double>(static_cast<float>(v))};
    case DType::BFloat16:
      return {static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(v))))};
    case DType::Float16:
      return {static_cast<double>(half_to_float(float_to_half(static_cast<float>(v))))};
    default:
      return {v};
  }
}

int64_t float_to_int(double v, DType t) {
  // The processor's conversions: the minimum for what does not fit in 32 (64) bits.
  if (t == DType::UInt8 || t == DType::Int64) {
    if (!(v >= -9223372036854775808.0 && v < 9223372036854775808.0)) return wrap(t, 1ull << 63);
    return wrap(t, static_cast<uint64_t>(static_cast<int64_t>(v)));
  }
  if (!(v > -2147483649.0 && v < 2147483648.0)) return wrap(t, static_cast<uint64_t>(int64_t{INT32_MIN}));
  return wrap(t, static_cast<uint64_t>(static_cast<int64_t>(v)));
}

Scalar cast(Scalar v, DType from, DType to) {
  if (is_floating(from)) {
    if (is_floating(to)) return rounded(to, v.f);
    if (to == DType::Bool) return {0, v.f != 0};
    return {0, float_to_int(v.f, to)};
  }
  if (is_floating(to)) {
    if (to == DType::Float64) return {static_cast<double>(v.i)};
    return rounded(to, static_cast<double>(static_cast<float>(v.i)));
  }
  if (to == DType::Bool) return {0, v.i != 0};
  return {0, wrap(to, static_cast<uint64_t>(v.i))};
}

Scalar read(const void* p, DType t, int64_t at) {
  const auto get = [&](auto x) {
    std::memcpy(&x, static_cast<const char*>(p) + at * static_cast<int64_t>(sizeof x), sizeof x);
    return x;
  };
  switch (t) {
    case DType::Bool:
      return {0, get(uint8_t{}) != 0};
    case DType::UInt8:
      return {0, get(uint8_t{})};
    case DType::Int8:
      return {0, get(int8_t{})};
    case DType::Int16:
      return {0, get(int16_t{})};
    case DType::Int32:
      return {0, get(int32_t{})};
    case DType::Int64:
      return {0, get(int64_t{})};
    case DType::Float16:
      return {half_to_float(get(uint16_t{}))};
    case DType::BFloat16:
      return {bf16_to_float(get(uint16_t{}))};
    case DType::Float32:
      return {get(float{})};
    case DType::Float64:
      return {get(double{})};
    default:
      throw Unsupported("interpreting " + std::string(dtype_name(t)));
  }
}

void write(void* p, DType t, int64_t at, Scalar v) {
  const auto put = [&](auto x) {
    std::memcpy(static_cast<char*>(p) + at * static_cast<int64_t>(sizeof x), &x, sizeof x);
  };
  switch (t) {
    case DType::Bool:
      return put(static_cast<uint8_t>(v.i != 0));
    case DType::UInt8:
      return put(static_cast<uint8_t>(v.i));
    case DType::Int8:
      return put(static_cast<int8_t>(v.i));
    case DType::Int16:
      return put(static_cast<int16_t>(v.i));
    case DType::Int32:
      return put(static_cast<int32_t>(v.i));
    case DType::Int64:
      return put(v.i);
    case DType::Float16:
      return put(float_to_half(static_cast<float>(v.f)));
    case DType::BFloat16:
      return put(float_to_bf16(static_cast<float>(v.f)));
    case DType::Float32:
      return put(static_cast<float>(v.f));
    case DType::Float64:
      return put(v.f);
    default:
      throw Unsupported("interpreting " + std::string(dtype_name(t)));
  }
}

template <class T>
T remainder_of(T a, T b) {
  T r = std::fmod(a, b);
  if (r != 0 && (b < 0) != (r < 0)) r += b;
  return r;
}
template <class T>
T floor_divide(T a, T b) {
  if (b == 0) return a / b;
  const T rest = std::fmod(a, b);
  T q = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) q -= 1;
  if (q == 0) return std::copysign(T(0), a / b);
  T down = std::floor(q);
  if (q - down > T(0.5)) down += 1;
  return down;
}

template <class T>
T float_op(Opcode op, T a, T b, T c) {
  switch (op) {
    case Opcode::Add:
      return a + b;
    case Opcode::Sub:
      return a - b;
    case Opcode::Mul:
      return a * b;
    case Opcode::Div:
      return a / b;
    case Opcode::FloorDiv:
      return floor_divide(a, b);
    case Opcode::TruncDiv:
      return std::trunc(a / b);
    case Opcode::Remainder:
      return remainder_of(a, b);
    case Opcode::Fmod:
      return std::fmod(a, b);
    case Opcode::Maximum:
      return std::isnan(a) ? a : std::isnan(b) ? b : a > b ? a : b;
    case Opcode::Minimum:
      return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? a : b;
    case Opcode::Fmax:
      return std::isnan(b) ? a : a > b ? a : b;
    case Opcode::Fmin:
      return std::isnan(b) ? a : a < b ? a : b;
    case Opcode::Pow:
    case Opcode::PowScalar:
      return std::pow(a, b);
    case Opcode::Atan2:
      return std::atan2(a, b);
    case Opcode::Hypot:
      return std::hypot(a, b);
    case Opcode::Copysign:
      return std::copysign(a, b);
    case Opcode::Nextafter:
      return std::nextafter(a, b);
    case Opcode::Neg:
      return -a;
    case Opcode::Abs:
      return std::fabs(a);
    case Opcode::Sign:
      return T(a > 0) - T(a < 0);
    case Opcode::Sqrt:
      return std::sqrt(a);
    case Opcode::Rsqrt:
      return T(1) / std::sqrt(a);
    case Opcode::Reciprocal:
      return T(1) / a;
    case Opcode::Floor:
      return std::floor(a);
    case Opcode::Ceil:
      return std::ceil(a);
    case Opcode::Trunc:
      return std::trunc(a);
    case Opcode::Round:
      return std::nearbyint(a);
    case Opcode::Exp:
    case Opcode::ExpScalar:
      return std::exp(a);
    case Opcode::Exp2:
      return std::exp2(a);
    case Opcode::Expm1:
    case Opcode::Expm1Scalar:
      return std::expm1(a);
    case Opcode::Log:
    case Opcode::LogScalar:
      return std::log(a);
    case Opcode::Log2:
    case Opcode::Log2Scalar:
      return std::log2(a);
    case Opcode::Log10:
    case Opcode::Log10Scalar:
      return std::log10(a);
    case Opcode::Log1p:
    case Opcode::Log1pScalar:
      return std::log1p(a);
    case Opcode::Sin:
    case Opcode::SinScalar:
      return std::sin(a);
    case Opcode::Cos:
    case Opcode::CosScalar:
      return std::cos(a);
    case Opcode::Tan:
    case Opcode::TanScalar:
      return std::tan(a);
    case Opcode::Asin:
      return std::asin(a);
    case Opcode::Acos:
      return std::acos(a);
    case Opcode::Atan:
      return std::atan(a);
    case Opcode::Sinh:
      return std::sinh(a);
    case Opcode::Cosh:
      return std::cosh(a);
    case Opcode::Tanh:
    case Opcode::TanhScalar:
      return std::tanh(a);
    case Opcode::Asinh:
      return std::asinh(a);
    case Opcode::Acosh:
      return std::acosh(a);
    case Opcode::Atanh:
      return std::atanh(a);
    case Opcode::Erf:
      return std::erf(a);
    case Opcode::Erfc:
      return std::erfc(a);
    case Opcode::Lgamma:
      return std::lgamma(a);
    case Opcode::Sigmoid:
      return T(1) / (T(1) + std::exp(-a));
    case Opcode::Fma:
      return std::fma(a, b, c);
    default:
      throw InternalError(std::string(opcode_name(op)) + " on floats");
  }
}

int64_t integer_op(Opcode op, DType t, int64_t a, int64_t b) {
  const uint64_t ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
  const int bits = t == DType::Bool ? 1 : dtype_size(t) * 8;
  const bool divides = loops::divides(op);
  if (divides && b == 0) throw KernelError("ZeroDivisionError");
  const int64_t q = divides ? (b == -1 ? static_cast<int64_t>(0 - ua) : a / b) : 0;
  const int64_t r = divides ? (b == -1 ? 0 : a % b) : 0;
  const bool adjust = r != 0 && ((r < 0) != (b < 0));
  switch (op) {
    case Opcode::Add:
      return t == DType::Bool ? a | b : wrap(t, ua + ub);
    case Opcode::Sub:
      return wrap(t, ua - ub);
    case Opcode::Mul:
      return wrap(t, ua * ub);
    case Opcode::FloorDiv:
      return wrap(t, q - adjust);
    case Opcode::TruncDiv:
      return wrap(t, q);
    case Opcode::Remainder:
      return wrap(t, adjust ? r + b : r);
    case Opcode::Fmod:
      return wrap(t, r);
    case Opcode::Maximum:
      return std::max(a, b);
    case Opcode::Minimum:
      return std::min(a, b);
    case Opcode::Neg:
      return wrap(t, 0 - ua);
    case Opcode::Abs:
      return a < 0 ? wrap(t, 0 - ua) : a;
    case Opcode::Sign:
      return (a > 0) - (a < 0);
    case Opcode::And:
      return a & b;
    case Opcode::Or:
      return a | b;
    case Opcode::Xor:
      return wrap(t, ua ^ ub);
    case Opcode::Not:
      return wrap(t, ~ua);
    case Opcode::Shl:
      return b < 0 || b >= bits ? 0 : wrap(t, ua << b);
    case Opcode::Shr:
      return b < 0 || b >= bits ? (a < 0 ? -1 : 0) : a >> b;
    case Opcode::Pow: {
      if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
      uint64_t result = 1, base = ua;
      for (uint64_t e = ub; e; e >>= 1, base *= base)
        if (e & 1) result *= base;
      return wrap(t, result);
    }
    default:
      throw InternalError(std::string(opcode_name(op)) + " on integers");
  }
}

bool compare(Opcode op, DType t, Scalar a, Scalar b) {
  const auto c = [&](auto x, auto y) {
    switch (op) {
      case Opcode::Eq:
        return x == y;
      case Opcode::Ne:
        return x != y;
      case Opcode::Lt:
        return x < y;
      case Opcode::Le:
        return x <= y;
      case Opcode::Gt:
        return x > y;
      default:
        return x >= y;
    }
  };
  return is_floating(t) ? c(a.f, b.f) : c(a.i, b.i);
}

Scalar apply(Opcode op, DType t, Scalar a, Scalar b, Scalar c) {
  if (opcode_class(op) == 'c') return {0, compare(op, t, a, b)};
  if (t == DType::Float32)
    return {float_op<float>(op, static_cast<float>(a.f), static_cast<float>(b.f), static_cast<float>(c.f))};
  if (t == DType::Float64) return {float_op<double>(op, a.f, b.f, c.f)};
  KILN_CHECK(is_integral(t), "arithmetic on " + std::string(dtype_name(t)));
  return {0, integer_op(op, t, a.i, b.i)};
}

class Interpreter {
 public:
  Interpreter(const Nest& n, const std::vector<Buffer>& buffers, const std::vector<void*>& pointers)
      : n_(n),
        buffers_(buffers),
        pointers_(pointers),
        vars_(n.extents.size()),
        values_(n.insts.size()),
        indirect_(n.indirect_vars) {
    for (const Stage& s : n.stages)
      for (ValueId id : s.body) {
        const BufferId b = n.insts[id].buffer;
        if (b >= 0 && buffers_[b].kind == BufferKind::Scratch && !scratch_.count(b)) {
          scratch_[b].assign(std::max<int64_t>(buffers_[b].numel, 1) * dtype_size(buffers_[b].dtype), 0);
          pointers_.resize(std::max<size_t>(pointers_.size(), b + 1));
          pointers_[b] = scratch_[b].data();
        }
      }
  }
  void run() {
    each(n_.outer, 0, [&] {
      for (const Stage& s : n_.stages) {
        for (ValueId id : s.body)
          if (n_.insts[id].op == Opcode::Reduce) begin(id);
        each(s.vars, 0, [&] {
          const bool first = s.vars.empty() || vars_[s.vars.back()] == 0;
          for (ValueId id : s.body) {
            if (n_.insts[id].op == Opcode::Scan && first) begin(id);
            step(id);
          }
        });
        for (ValueId id : s.body) {
          const Inst& i = n_.insts[id];
          if (i.op == Opcode::Reduce) values_[id] = state_[id][0];
        }
        for (ValueId id : s.body) {
          const Inst& i = n_.insts[id];
          if (i.op == Opcode::Project) values_[id] = state_[i.args[0]][i.imm];
        }
      }
    });
  }

 private:
  void each(const std::vector<int>& vars, size_t at, const std::function<void()>& body) {
    if (at == vars.size()) return body();
    for (int64_t k = 0; k < n_.extents[vars[at]]; ++k) {
      vars_[vars[at]] = k;
      each(vars, at + 1, body);
    }
  }
  int64_t eval(const Expr& e) {
    return symbolic::evaluate(e, [&](const symbolic::AtomNode& v) {
      return v.var_kind == symbolic::VarKind::Loop ? vars_.at(v.id) : indirect_.at(v.id);
    });
  }
  int64_t place(const Inst& i) {
    const int64_t at = eval(i.index);
    KILN_CHECK(at >= 0 && at < buffers_[i.buffer].numel,
               "index " + std::to_string(at) + " outside " + buffers_[i.buffer].name + " in " + n_.name);
    return at;
  }
  void begin(ValueId id) {
    const Inst& i = n_.insts[id];
    const bool f = is_floating(i.dtype);
    const double inf = std::numeric_limits<double>::infinity();
    const auto bound = [&](bool largest) -> Scalar {
      if (f) return {largest ? inf : -inf};
      const int bits = i.dtype == DType::Bool ? 1 : dtype_size(i.dtype) * 8;
      if (dtype_kind(i.dtype) != 'i') return {0, largest ? (int64_t{1} << bits) - 1 : 0};
      const int64_t max = static_cast<int64_t>(~uint64_t{0} >> (65 - bits));
      return {0, largest ? max : -max - 1};
    };
    std::array<Scalar, 3>& s = state_[id];
    s = {};
    switch (i.reduce) {
      case ReduceKind::Prod:
        s[0] = {1, 1};
        break;
      case ReduceKind::All:
        s[0] = {0, 1};
        break;
      case ReduceKind::Max:
      case ReduceKind::ArgMax:
      case ReduceKind::OnlineSoftmax:
      case ReduceKind::OnlineSoftmaxCombine:
        s[0] = bound(false);
        break;
      case ReduceKind::Min:
      case ReduceKind::ArgMin:
        s[0] = bound(true);
        break;
      default:
        break;
    }
    if (i.reduce == ReduceKind::ArgMax || i.reduce == ReduceKind::ArgMin) s[1] = {0, INT64_MAX};
  }
  void accumulate(ValueId id) {
    const Inst& i = n_.insts[id];
    const DType t = i.dtype;
    std::array<Scalar, 3>& s = state_[id];
    const auto arg = [&](size_t k) { return values_[i.args.at(k)]; };
    const auto op = [&](Opcode o, Scalar a, Scalar b) { return apply(o, t, a, b, {}); };
    const auto num = [&](double v) { return rounded(t, v); };
    switch (i.reduce) {
      case ReduceKind::Sum:
        s[0] = op(Opcode::Add, s[0], arg(0));
        break;
      case ReduceKind::Prod:
        s[0] = t == DType::Bool ? op(Opcode::And, s[0], arg(0)) : op(Opcode::Mul, s[0], arg(0));
        break;
      case ReduceKind::Max:
        s[0] = op(Opcode::Maximum, s[0], arg(0));
        break;
      case ReduceKind::Min:
        s[0] = op(Opcode::Minimum, s[0], arg(0));
        break;
      case ReduceKind::Any:
        s[0].i |= arg(0).i;
        break;
      case ReduceKind::All:
        s[0].i &= arg(0).i;
        break;
      case ReduceKind::ArgMax:
      case ReduceKind::ArgMin: {
        const Scalar x = arg(0), at = arg(1);
        const bool nx = is_floating(t) && std::isnan(x.f), ns = is_floating(t) && std::isnan(s[0].f);
        const bool better =
            nx ? !ns : !ns && compare(i.reduce == ReduceKind::ArgMax ? Opcode::Gt : Opcode::Lt, t, x, s[0]);
        const bool equal = (nx && ns) || compare(Opcode::Eq, t, x, s[0]);
        if (better || (equal && at.i < s[1].i)) s[0] = x, s[1] = at;
        break;
      }
      case ReduceKind::Welford: {
        const Scalar delta = op(Opcode::Sub, arg(0), s[0]);
        s[2].f += 1;
        s[0] = op(Opcode::Add, s[0], op(Opcode::Div, delta, s[2]));
        s[1] = op(Opcode::Add, s[1], op(Opcode::Mul, delta, op(Opcode::Sub, arg(0), s[0])));
        break;
      }
      case ReduceKind::WelfordCombine: {
        const double n = s[2].f + arg(2).f;
        if (n == 0) break;
        const Scalar delta = op(Opcode::Sub, arg(0), s[0]), share = num(arg(2).f / n);
        const Scalar cross = op(Opcode::Mul, op(Opcode::Mul, delta, delta), op(Opcode::Mul, s[2], share));
        s[0] = op(Opcode::Add, s[0], op(Opcode::Mul, delta, share));
        s[1] = op(Opcode::Add, op(Opcode::Add, s[1], arg(1)), cross);
        s[2].f = n;
        break;
      }
      case ReduceKind::OnlineSoftmax:
      case ReduceKind::OnlineSoftmaxCombine: {
        const Scalar x = arg(0), part = i.reduce == ReduceKind::OnlineSoftmax ? Scalar{1} : arg(1);
        const Scalar m = op(Opcode::Maximum, s[0], x);
        const auto scaled = [&](Scalar top, Scalar sum) {
          return top.f == m.f && !(m.f > std::numeric_limits<double>::max())
                     ? sum
                     : op(Opcode::Mul, sum, apply(Opcode::Exp, t, op(Opcode::Sub, top, m), {}, {}));
        };
        s[1] = op(Opcode::Add, scaled(s[0], s[1]), scaled(x, part));
        s[0] = m;
        break;
      }
    }
  }
  void step(ValueId id) {
    const Inst& i = n_.insts[id];
    const auto arg = [&](size_t k) -> Scalar& { return values_[i.args.at(k)]; };
    const auto type_of = [&](size_t k) { return n_.insts[i.args.at(k)].dtype; };
    Scalar& out = values_[id];
    switch (i.op) {
      case Opcode::ConstInt:
        out = {0, wrap(i.dtype, static_cast<uint64_t>(i.imm))};
        break;
      case Opcode::ConstFloat:
        out = rounded(i.dtype, i.fimm);
        break;
      case Opcode::IndexValue:
        out = {0, eval(i.index)};
        break;
      case Opcode::InRange: {
        const int64_t v = eval(i.index);
        out = {0, v >= i.imm && v < i.imm2};
        break;
      }
      case Opcode::Cast:
        out = cast(arg(0), type_of(0), i.dtype);
        break;
      case Opcode::Bitcast: {
        char bytes[8] = {};
        write(bytes, type_of(0), 0, arg(0));
        out = read(bytes, i.dtype, 0);
        break;
      }
      case Opcode::Where:
        out = arg(0).i ? arg(1) : arg(2);
        break;
      case Opcode::Load:
        out = read(pointers_[i.buffer], i.dtype, place(i));
        break;
      case Opcode::MaskedLoad:
        out = arg(0).i ? read(pointers_[i.buffer], i.dtype, place(i)) : arg(1);
        break;
      case Opcode::Indirect: {
        int64_t v = arg(0).i;
        if (i.wrap && v < 0) v += i.imm;
        if (v < 0 || v >= i.imm) throw KernelError(i.message);
        indirect_[i.var] = v;
        break;
      }
      case Opcode::Store: {
        if (i.args.size() > 1 && !arg(1).i) break;
        const int64_t at = place(i);
        Scalar v = arg(0);
        if (i.mode == StoreMode::Add) {
          const Scalar old = read(pointers_[i.buffer], i.dtype, at);
          if (dtype_size(i.dtype) == 2 && is_floating(i.dtype))
            v = cast(apply(Opcode::Add, DType::Float32, old, v, {}), DType::Float32, i.dtype);
          else
            v = apply(Opcode::Add, i.dtype, old, v, {});
        }
        write(pointers_[i.buffer], i.dtype, at, v);
        break;
      }
      case Opcode::Reduce:
        accumulate(id);
        break;
      case Opcode::Scan:
        accumulate(id);
        out = state_[id][0];
        break;
      case Opcode::Project:
        if (state_.count(i.args[0])) out = state_[i.args[0]][i.imm];
        break;
      default:
        out = apply(i.op, type_of(0), arg(0), i.args.size() > 1 ? arg(1) : Scalar{},
                    i.args.size() > 2 ? arg(2) : Scalar{});
    }
  }

  const Nest& n_;
  const std::vector<Buffer>& buffers_;
  std::vector<void*> pointers_;
  std::vector<int64_t> vars_;
  std::vector<Scalar> values_;
  std::vector<int64_t> indirect_;
  std::unordered_map<ValueId, std::array<Scalar, 3>> state_;
  std::unordered_map<BufferId, std::vector<char>> scratch_;
};

}  // namespace

void interpret(const Nest& n, const std::vector<Buffer>& buffers, const std::vector<void*>& pointers) {
  Interpreter(n, buffers, pointers).run();
}

}  // namespace kiln::loops
