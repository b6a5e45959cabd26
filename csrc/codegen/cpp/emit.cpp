#include "codegen/cpp/emit.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/error.h"
#include "codegen/common/shape.h"
#include "codegen/common/source.h"

namespace kiln::codegen {

using loops::BufferId;
using loops::BufferKind;
using loops::Expr;
using loops::Inst;
using loops::Nest;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

namespace {

const char* type_name(DType t) {
  switch (t) {
    case DType::Bool:
      return "bool";
    case DType::UInt8:
      return "uint8_t";
    case DType::Int8:
      return "int8_t";
    case DType::Int16:
      return "int16_t";
    case DType::Int32:
      return "int32_t";
    case DType::Int64:
      return "int64_t";
    case DType::Float16:
      return "kiln::half";
    case DType::BFloat16:
      return "kiln::bfloat16";
    case DType::Float32:
      return "float";
    case DType::Float64:
      return "double";
    default:
      throw Unsupported("C++ for " + std::string(dtype_name(t)));
  }
}

/// The function of an opcode that C++ has no operator for.
const char* function_name(Opcode op) {
  switch (op) {
    case Opcode::Add:
      return "kiln::add";
    case Opcode::Sub:
      return "kiln::sub";
    case Opcode::Mul:
      return "kiln::mul";
    case Opcode::FloorDiv:
      return "kiln::floor_divide";
    case Opcode::TruncDiv:
      return "kiln::trunc_divide";
    case Opcode::Remainder:
      return "kiln::remainder";
    case Opcode::Fmod:
      return "kiln::fmod";
    case Opcode::Maximum:
      return "kiln::maximum";
    case Opcode::Minimum:
      return "kiln::minimum";
    case Opcode::Fmax:
      return "kiln::fmax";
    case Opcode::Fmin:
      return "kiln::fmin";
    case Opcode::Pow:
    case Opcode::PowScalar:
      return "kiln::power";
    case Opcode::Atan2:
      return "std::atan2";
    case Opcode::Hypot:
      return "std::hypot";
    case Opcode::Copysign:
      return "std::copysign";
    case Opcode::Nextafter:
      return "std::nextafter";
    case Opcode::Neg:
      return "kiln::neg";
    case Opcode::Abs:
      return "kiln::abs";
    case Opcode::Sign:
      return "kiln::sign";
    case Opcode::Sqrt:
      return "std::sqrt";
    case Opcode::Floor:
      return "std::floor";
    case Opcode::Ceil:
      return "std::ceil";
    case Opcode::Trunc:
      return "std::trunc";
    case Opcode::Round:
      return "std::nearbyint";
    case Opcode::Exp:
    case Opcode::ExpScalar:
      return "std::exp";
    case Opcode::Exp2:
      return "std::exp2";
    case Opcode::Expm1:
    case Opcode::Expm1Scalar:
      return "std::expm1";
    case Opcode::Log:
    case Opcode::LogScalar:
      return "std::log";
    case Opcode::Log2:
    case Opcode::Log2Scalar:
      return "std::log2";
    case Opcode::Log10:
    case Opcode::Log10Scalar:
      return "std::log10";
    case Opcode::Log1p:
    case Opcode::Log1pScalar:
      return "std::log1p";
    case Opcode::Sin:
    case Opcode::SinScalar:
      return "std::sin";
    case Opcode::Cos:
    case Opcode::CosScalar:
      return "std::cos";
    case Opcode::Tan:
    case Opcode::TanScalar:
      return "std::tan";
    case Opcode::Asin:
      return "std::asin";
    case Opcode::Acos:
      return "std::acos";
    case Opcode::Atan:
      return "std::atan";
    case Opcode::Sinh:
      return "std::sinh";
    case Opcode::Cosh:
      return "std::cosh";
    case Opcode::Tanh:
    case Opcode::TanhScalar:
      return "std::tanh";
    case Opcode::Asinh:
      return "std::asinh";
    case Opcode::Acosh:
      return "std::acosh";
    case Opcode::Atanh:
      return "std::atanh";
    case Opcode::Erf:
      return "std::erf";
    case Opcode::Erfc:
      return "std::erfc";
    case Opcode::Lgamma:
      return "std::lgamma";
    case Opcode::Sigmoid:
      return "kiln::sigmoid";
    case Opcode::Fma:
      return "std::fma";
    case Opcode::Not:
      return "kiln::bit_not";
    case Opcode::Shl:
      return "kiln::shift_left";
    case Opcode::Shr:
      return "kiln::shift_right";
    default:
      return nullptr;
  }
}

/// The operator between two operands, where it means what the opcode means.
const char* infix(Opcode op, DType t) {
  switch (op) {
    case Opcode::Add:
      return is_floating(t) ? "+" : nullptr;
    case Opcode::Sub:
      return is_floating(t) ? "-" : nullptr;
    case Opcode::Mul:
      return is_floating(t) ? "*" : nullptr;
    case Opcode::Div:
      return "/";
    default:
      return shared_infix(op);
  }
}

/// Elements of the innermost loop that are one unit at most.
constexpr int64_t kBlock = 8192;

std::string integer(int64_t v) { return v == INT64_MIN ? "INT64_MIN" : std::to_string(v); }

std::string floating(double v, DType t) {
  if (is_half(t)) return std::string("kiln::cast<") + type_name(t) + ">(" + floating(v, DType::Float32) + ")";
  const char* type = type_name(t);
  if (std::isnan(v)) return std::string("std::numeric_limits<") + type + ">::quiet_NaN()";
  if (std::isinf(v)) return std::string(v < 0 ? "-" : "") + "std::numeric_limits<" + type + ">::infinity()";
  return float_digits(v, t) + (t == DType::Float32 ? "f" : "");
}

class Writer {
 public:
  Writer(const schedule::Kernel& k, const std::vector<loops::Buffer>& buffers, const std::string& symbol)
      : kernel_(k), n_(k.nest), buffers_(buffers) {
    out_.symbol = identifier(symbol);
  }

  CppKernel write() {
    const size_t num_segments = kernel_.segments.size();
    const size_t num_args = kernel_.args.size() / std::max<size_t>(num_segments, 1);
    names_ = name_buffers(kernel_, buffers_, num_args);
    const bool runs = n_.outer_size() > 0;
    // Without loops of its own in a stage, the last outer variable is the innermost loop; else a unit is one point.
    const bool pointwise =
        std::all_of(n_.stages.begin(), n_.stages.end(), [](const Stage& s) { return s.vars.empty(); });
    std::vector<int> unit_vars = n_.outer;
    int lane = -1;
    if (pointwise && !unit_vars.empty()) {
      lane = unit_vars.back();
      unit_vars.pop_back();
    }
    const int64_t blocks = lane < 0 || num_segments ? 1 : (n_.extents[lane] + kBlock - 1) / kBlock;
    out_.units = runs ? blocks : 0;
    for (int v : unit_vars) out_.units *= n_.extents[v];
    if (num_segments) out_.units = static_cast<int64_t>(num_segments);

    line("// " + n_.name);
    line("extern \"C\" int32_t " + out_.symbol +
         "(void* const* buffers, const int64_t*, int64_t begin, int64_t end, void*) {");
    ++depth_;
    if (!num_segments) declare_pointers(num_args, "");
    line("int32_t failed = 0;");
    line("#pragma omp parallel for reduction(max : failed)");
    line("for (int64_t unit = begin; unit < end; ++unit) {");
    ++depth_;
    if (num_segments) {
      std::string extents;
      for (int64_t e : kernel_.segments) extents += (extents.empty() ? "" : ", ") + integer(e);
      line("static const int64_t extents[] = {" + extents + "};");
      declare_pointers(num_args, "unit * " + std::to_string(num_args) + " + ");
    } else {
      int64_t below = blocks;
      for (auto v = unit_vars.rbegin(); v != unit_vars.rend(); ++v) {
        const bool first = v + 1 == unit_vars.rend();
        std::string place = below == 1 ? "unit" : "unit / " + integer(below);
        if (!first) place = (below == 1 ? place : "(" + place + ")") + " % " + integer(n_.extents[*v]);
        line("const int64_t " + var(*v) + " = " + place + ";");
        below *= n_.extents[*v];
      }
    }
    scratch();
    if (lane >= 0 && blocks > 1) {
      const std::string block = unit_vars.empty() ? "unit" : "unit % " + integer(blocks);
      line("const int64_t from = " + block + " * " + integer(kBlock) + ", to = std::min<int64_t>(from + " +
           integer(kBlock) + ", " + integer(n_.extents[lane]) + ");");
      open_loop(lane, "from", "to", n_.stages);
    } else if (lane >= 0) {
      open_loop(lane, "0", num_segments ? "extents[unit]" : integer(n_.extents[lane]), n_.stages);
    }
    for (const Stage& s : n_.stages) stage(s);
    if (lane >= 0) close();
    close();
    line("return failed;");
    close();
    return std::move(out_);
  }

 private:
  void line(const std::string& text) {
    const bool pragma = text[0] == '#';
    out_.text += std::string(pragma ? 0 : static_cast<size_t>(2 * depth_), ' ') + text + "\n";
  }
  void close() {
    --depth_;
    line("}");
  }
  static std::string var(int v) { return "i" + std::to_string(v); }
  /// A value's name, or a constant itself.
  std::string value(ValueId id) const {
    const Inst& i = inst(id);
    if (i.op == Opcode::ConstFloat) return floating(i.fimm, i.dtype);
    if (i.op != Opcode::ConstInt) return "v" + std::to_string(numbers_.at(id));
    if (i.dtype == DType::Bool) return i.imm & 1 ? "true" : "false";
    return std::string("static_cast<") + type_name(i.dtype) + ">(" + integer(i.imm) + ")";
  }
  static std::string state(ValueId id) { return "r" + std::to_string(id); }

  // --- buffers ---
  void declare_pointers(size_t num_args, const std::string& from) {
    for (size_t i = 0; i < num_args; ++i) {
      const schedule::KernelArg& a = kernel_.args[i];
      const std::string type = type_name(buffers_.at(static_cast<size_t>(a.buffer)).dtype);
      line("auto* " + names_.of.at(a.buffer) + " = static_cast<" + (a.written ? "" : "const ") + type + "*>(buffers[" +
           from + std::to_string(i) + "]);");
    }
  }
  void scratch() {
    for (BufferId b : names_.scratch) {
      const loops::Buffer& buffer = buffers_.at(static_cast<size_t>(b));
      // A vector of bool has no memory of bools.
      const std::string type = buffer.dtype == DType::Bool ? "uint8_t" : type_name(buffer.dtype);
      line("std::vector<" + type + "> " + names_.of.at(b) + "(" + integer(std::max<int64_t>(buffer.numel, 1)) + ");");
    }
  }

  // --- indices ---
  static std::string index(const Expr& e) {
    static const IndexStyle style{"/",
                                  "kiln::floor_div",
                                  "kiln::floor_mod",
                                  "std::min<int64_t>",
                                  "std::max<int64_t>",
                                  [](const symbolic::AtomNode& v) {
                                    return (v.var_kind == symbolic::VarKind::Indirect ? "t" : "i") +
                                           std::to_string(v.id);
                                  }};
    return index_text(e, style);
  }
  std::string element(const Inst& i) const { return names_.of.at(i.buffer) + "[" + index(i.index) + "]"; }
  std::string loaded(const Inst& i) const {
    const bool packed = i.dtype == DType::Bool && buffers_[static_cast<size_t>(i.buffer)].kind == BufferKind::Scratch;
    return packed ? element(i) + " != 0" : element(i);
  }

  // --- loops ---
  const Inst& inst(ValueId id) const { return n_.insts[static_cast<size_t>(id)]; }
  DType type_of(ValueId id) const { return inst(id).dtype; }

  /// Whether rounds of a loop over `stages` may run side by side in vector lanes.
  bool independent(const std::vector<Stage>& stages) const {
    for (const Stage& s : stages)
      for (ValueId id : s.body) {
        const Inst& i = inst(id);
        const bool adds = i.op == Opcode::Store && i.mode == loops::StoreMode::Add;
        if (adds || i.op == Opcode::Reduce || i.op == Opcode::Scan || i.op == Opcode::Indirect || may_fail(i))
          return false;
      }
    return true;
  }
  static bool may_fail(const Inst& i) { return loops::divides(i.op) && is_integral(i.dtype); }
  void open_loop(int v, const std::string& from, const std::string& to, const std::vector<Stage>& stages) {
    if (independent(stages)) line("#pragma omp simd");
    open_plain(v, from, to);
  }
  void open_plain(int v, const std::string& from, const std::string& to) {
    line("for (int64_t " + var(v) + " = " + from + "; " + var(v) + " < " + to + "; ++" + var(v) + ") {");
    ++depth_;
  }

  void stage(const Stage& s) {
    const auto declare = [&](Opcode op) {
      for (ValueId id : s.body)
        if (inst(id).op == op)
          line("kiln::" + std::string(loops::reduce_name(inst(id).reduce)) + "<" + type_name(inst(id).dtype) + "> " +
               state(id) + ";");
    };
    declare(Opcode::Reduce);
    for (size_t k = 0; k < s.vars.size(); ++k) {
      const bool last = k + 1 == s.vars.size();
      if (last) declare(Opcode::Scan);
      if (last)
        open_loop(s.vars[k], "0", integer(n_.extents[s.vars[k]]), {s});
      else
        open_plain(s.vars[k], "0", integer(n_.extents[s.vars[k]]));
    }
    std::vector<ValueId> after;  // results of the stage's reductions
    for (ValueId id : s.body) {
      const Inst& i = inst(id);
      const bool projects = i.op == Opcode::Project && inst(i.args[0]).op == Opcode::Reduce &&
                            std::find(s.body.begin(), s.body.end(), i.args[0]) != s.body.end();
      if (i.op == Opcode::Reduce || projects) after.push_back(id);
      if (!projects) step(id, i);
    }
    for (size_t k = 0; k < s.vars.size(); ++k) close();
    for (ValueId id : after) {
      const Inst& i = inst(id);
      if (i.op == Opcode::Reduce)
        define(id, state(id) + ".first()");
      else
        project(id, i);
    }
  }
  // --- instructions ---
  void define(ValueId id, const std::string& text) {
    numbers_.emplace(id, static_cast<int>(numbers_.size()));
    line(std::string("const ") + type_name(type_of(id)) + " " + value(id) + " = " + text + ";");
  }
  void project(ValueId id, const Inst& i) {
    define(id, "kiln::cast<" + std::string(type_name(i.dtype)) + ">(" + state(i.args[0]) +
                   (i.imm == 0 ? ".first())" : ".second())"));
  }
  std::string arguments(const Inst& i) const {
    std::string text;
    for (ValueId a : i.args) text += (text.empty() ? "" : ", ") + value(a);
    return text;
  }
  int error(const std::string& message) { return error_number(out_.errors, message); }

  void step(ValueId id, const Inst& i) {
    const std::string type = i.op == Opcode::Store || i.op == Opcode::Indirect ? "" : type_name(i.dtype);
    switch (i.op) {
      case Opcode::ConstInt:
      case Opcode::ConstFloat:
        return;  // stands where it is used
      case Opcode::IndexValue:
        return define(id, index(i.index));
      case Opcode::InRange: {
        const std::string e = index(i.index);
        return define(id, integer(i.imm) + " <= " + e + " && " + e + " < " + integer(i.imm2));
      }
      case Opcode::Cast:
        return define(id, "kiln::cast<" + type + ">(" + value(i.args[0]) + ")");
      case Opcode::Bitcast:
        return define(id, "kiln::bitcast<" + type + ">(" + value(i.args[0]) + ")");
      case Opcode::Where:
        return define(id, value(i.args[0]) + " ? " + value(i.args[1]) + " : " + value(i.args[2]));
      case Opcode::Load:
        return define(id, loaded(i));
      case Opcode::MaskedLoad:
        return define(id, value(i.args[0]) + " ? " + (loaded(i) == element(i) ? element(i) : "(" + loaded(i) + ")") +
                              " : " + value(i.args[1]));
      case Opcode::Indirect:
        return line("const int64_t t" + std::to_string(i.var) + " = kiln::bound(" + value(i.args[0]) + ", " +
                    integer(i.imm) + ", " + (i.wrap ? "true" : "false") + ", " + std::to_string(error(i.message)) +
                    ", failed);");
      case Opcode::Store:
        return line((i.args.size() > 1 ? "if (" + value(i.args[1]) + ") " : "") + element(i) + " = " + stored(i) + ";");
      case Opcode::Reduce:
        return line(state(id) + ".add(" + arguments(i) + ");");
      case Opcode::Scan:
        line(state(id) + ".add(" + arguments(i) + ");");
        return define(id, state(id) + ".first()");
      case Opcode::Project:
        return project(id, i);
      default:
        return define(id, scalar(i));
    }
  }

  std::string stored(const Inst& i) {
    const std::string v = value(i.args[0]);
    if (i.mode != loops::StoreMode::Add) return v;
    if (!is_half(i.dtype)) return "kiln::add<" + std::string(type_name(i.dtype)) + ">(" + element(i) + ", " + v + ")";
    return "kiln::cast<" + std::string(type_name(i.dtype)) + ">(kiln::cast<float>(" + element(i) +
           ") + kiln::cast<float>(" + v + "))";
  }

  std::string scalar(const Inst& i) {
    const DType t = type_of(i.args[0]);
    if (const char* op = infix(i.op, t)) {
      const auto operand = [&](ValueId a) { return is_half(t) ? "kiln::cast<float>(" + value(a) + ")" : value(a); };
      const std::string text = operand(i.args[0]) + " " + op + " " + operand(i.args[1]);
      // Bitwise operators give an int.
      return loops::opcode_class(i.op) == 'l' ? "static_cast<" + std::string(type_name(i.dtype)) + ">(" + text + ")"
                                              : text;
    }
    const std::string one = floating(1, t == DType::Float64 ? t : DType::Float32);
    if (i.op == Opcode::Rsqrt) return one + " / std::sqrt(" + value(i.args[0]) + ")";
    if (i.op == Opcode::Reciprocal) return one + " / " + value(i.args[0]);
    const char* function = function_name(i.op);
    KILN_CHECK(function, "no C++ for " + std::string(loops::opcode_name(i.op)));
    if (may_fail(i))
      return std::string(function) + "(" + value(i.args[0]) + ", kiln::divisor(" + value(i.args[1]) + ", " +
             std::to_string(error(kDivisionByZero)) + ", failed))";
    return std::string(function) + "(" + arguments(i) + ")";
  }

  const schedule::Kernel& kernel_;
  const Nest& n_;
  const std::vector<loops::Buffer>& buffers_;
  CppKernel out_;
  int depth_ = 0;
  BufferNames names_;
  std::unordered_map<ValueId, int> numbers_;  // of values in their names
};

}  // namespace

CppKernel emit_cpp(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                   const std::string& symbol) {
  return Writer(kernel, buffers, symbol).write();
}

}  // namespace kiln::codegen
