#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "codegen/common/shape.h"

// Which numbers of a kernel its code need not know.
namespace kiln::codegen {

using loops::Nest;
using loops::Stage;
using loops::ValueId;
using symbolic::Expr;

namespace {

/// Whether e divides something that depends on `v` and is negative or larger than 32 bits somewhere. Other code divides
/// where it is neither, and how far v goes decides.
bool divides_any_number(const Expr& e, int v) {
  for (const symbolic::Term& t : e.terms()) {
    const symbolic::AtomNode& n = *t.atom;
    if (n.kind == symbolic::AtomKind::Var) continue;
    const bool divides = n.kind == symbolic::AtomKind::FloorDiv || n.kind == symbolic::AtomKind::Mod;
    const symbolic::Range r = n.a.range();
    const bool small = r.lo >= 0 && r.hi <= std::numeric_limits<int32_t>::max();
    if (divides && !small && uses_var(n.a, v)) return true;
    if (divides_any_number(n.a, v) || divides_any_number(n.b, v)) return true;
  }
  return false;
}

/// Whether e moves by more than one element, and few, from one lane to the next: such accesses are woven together, and
/// how many lanes there are decides how.
bool is_interleaved(const Expr& e, int lane) {
  int64_t stride = 0;
  Expr rest;
  return split_linear(e, lane, stride, rest) && std::abs(stride) > 1 && std::abs(stride) <= schedule::kMostInterleaved;
}

/// Whether the indirect variable is part of what is divided, or compared: how far it goes may decide on the code then.
bool is_divided(const Expr& e, int indirect) {
  for (const symbolic::Term& t : e.terms()) {
    const symbolic::AtomNode& n = *t.atom;
    if (n.kind == symbolic::AtomKind::Var) continue;
    if (uses_var(n.a, indirect, symbolic::VarKind::Indirect) || uses_var(n.b, indirect, symbolic::VarKind::Indirect))
      return true;
  }
  return false;
}

/// Operators of which a constant operand's value makes no other code.
bool takes_any_constant(loops::Opcode op) {
  using loops::Opcode;
  switch (op) {
    case Opcode::Add:
    case Opcode::Sub:
    case Opcode::Mul:
    case Opcode::Div:
    case Opcode::Maximum:
    case Opcode::Minimum:
    case Opcode::Eq:
    case Opcode::Ne:
    case Opcode::Lt:
    case Opcode::Le:
    case Opcode::Gt:
    case Opcode::Ge:
    case Opcode::Where:
      return true;
    default:
      return false;
  }
}

class Generalizer {
 public:
  Generalizer(schedule::Kernel& kernel, KernelShape& shape) : nest_(kernel.nest), shape_(shape) {}

  void run() {
    std::vector<int> strided = shape_.unit_vars;  // variables whose strides become arguments
    strided.insert(strided.end(), shape_.inner_vars.begin(), shape_.inner_vars.end());
    if (shape_.row_var >= 0) strided.push_back(shape_.row_var);
    std::erase_if(strided, [&](int v) { return nest_.extents[v] <= 1 || !may_open(v) || is_cross(v); });
    for (int v : strided) open(v);
    if (shape_.row_var >= 0 && shape_.open[shape_.row_var] >= 0) shape_.open_row_blocks = argument(shape_.row_blocks);
    for (int v : shape_.stage_cross) {
      if (v < 0) continue;
      const bool outer = std::find(nest_.outer.begin(), nest_.outer.end(), v) != nest_.outer.end();
      if (outer) strided.push_back(v);
      if (!shape_.overlaps[v] || !may_open(v)) continue;
      open(v);
      if (outer) shape_.open_cross_blocks = argument(shape_.cross_blocks);
    }
    // Loops of few rounds are written out.
    const auto rounds = [&](int v, size_t stage) {
      return nest_.extents[v] / (static_cast<int64_t>(shape_.stage_width[stage]) * shape_.stage_unroll[stage]);
    };
    if (shape_.lane_var >= 0) {
      // Within other loops of a unit, a loop's start counts for more.
      const bool alone = shape_.inner_vars.empty() && shape_.row_var < 0;
      const bool several = rounds(shape_.lane_var, 0) >= 2 && (alone || shape_.lengths == Lengths::Any);
      if ((several || shape_.overlaps[shape_.lane_var]) && may_open(shape_.lane_var)) open_lanes(shape_.lane_var, 0);
      if (shape_.open[shape_.lane_var] >= 0) shape_.open_blocks = argument(shape_.blocks);
    }
    for (size_t k = 0; k < nest_.stages.size(); ++k) {
      const Stage& s = nest_.stages[k];
      if (s.vars.empty() || shape_.stage_cross[k] >= 0) continue;
      // A window, of a pooling say, is written out.
      constexpr int64_t kWindow = 64;
      if (s.vars.size() > 1 && nest_.stage_size(s) <= kWindow) continue;
      for (int v : s.vars) {
        if (nest_.extents[v] <= 1 || !may_open(v) || is_cross(v)) continue;
        const bool lanes = shape_.lane_var < 0 && v == s.vars.back();
        if (lanes && rounds(v, k) < 2) continue;
        lanes ? open_lanes(v, k) : open(v);
        if (v != s.vars.back() || shape_.lane_var >= 0) strided.push_back(v);
      }
    }
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) {
        generalize_index(nest_.insts[id].index, strided);
        if (shape_.crossing[id]) generalize_index(nest_.insts[id].index, {shape_.lane_var});
      }
    open_constants();
    if (shape_.lengths == Lengths::Any) open_tables();
  }

 private:
  int argument(int64_t value) {
    shape_.args.push_back(value);
    return static_cast<int>(shape_.args.size()) - 1;
  }

  int stride_argument(int64_t stride) {
    const auto [it, fresh] = strides_.try_emplace(stride, -1);
    if (fresh) it->second = argument(stride);
    return it->second;
  }

  Expr size_of(int64_t stride) {
    constexpr int64_t kAnySize = 1 << 20;
    return Expr::var(stride_argument(stride), {0, kAnySize}, symbolic::VarKind::Size);
  }

  void open(int v) { shape_.open[v] = argument(nest_.extents[v]); }

  /// The same for a variable that lanes run along in a stage.
  void open_lanes(int v, size_t stage) {
    open(v);
    const int64_t step = static_cast<int64_t>(shape_.stage_width[stage]) * shape_.stage_unroll[stage];
    bool plain = shape_.lengths == Lengths::Any && !shape_.overlaps[v] && nest_.extents[v] % step != 0 &&
                 std::has_single_bit(static_cast<uint64_t>(step)) && !shape_.has_tiles();
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) plain &= !is_interleaved(nest_.insts[id].index, v);
    shape_.open_rest[v] = plain;
  }

  /// Constants that sizes make, as a rule: integers of some size, what divides, small factors, and all that is computed
  /// once for a whole loop.
  void open_constants() {
    constexpr int64_t kSmall = 16;  // in magnitude: what programs count by
    const bool loops =
        std::any_of(nest_.stages.begin(), nest_.stages.end(), [](const Stage& s) { return !s.vars.empty(); });
    std::vector<bool> any(nest_.insts.size(), true);
    std::vector<bool> divides(nest_.insts.size(), false), scales(nest_.insts.size(), true);
    std::vector<bool> once(nest_.insts.size(), true);  // used outside of the loops alone
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) {
        const loops::Inst& i = nest_.insts[id];
        for (size_t k = 0; k < i.args.size(); ++k) {
          const ValueId arg = i.args[k];
          any[arg] = any[arg] && takes_any_constant(i.op);
          once[arg] = once[arg] && s.vars.empty() && loops;
          scales[arg] = scales[arg] && i.op == loops::Opcode::Mul;
          divides[arg] = divides[arg] || (i.op == loops::Opcode::Div && k == 1);
        }
      }
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) {
        const loops::Inst& i = nest_.insts[id];
        if (!once[id] && shape_.lengths == Lengths::Few) continue;
        if (i.op == loops::Opcode::InRange && std::max(std::abs(i.imm), std::abs(i.imm2)) > kSmall) {
          shape_.open_constant[id] = argument(i.imm);
          argument(i.imm2);
        }
        if (!any[id]) continue;
        if (i.op == loops::Opcode::ConstInt && (i.dtype == DType::Int64 || i.dtype == DType::Int32) &&
            std::abs(i.imm) > kSmall)
          shape_.open_constant[id] = argument(i.imm);
        if (i.op != loops::Opcode::ConstFloat || (i.dtype != DType::Float32 && i.dtype != DType::Float64)) continue;
        // A division by a power of two is a multiplication.
        int exponent = 0;
        const bool power = std::abs(std::frexp(i.fimm, &exponent)) == 0.5;
        const bool of_sizes = (divides[id] && !power) || (scales[id] && std::abs(i.fimm) < 0.125);
        if (once[id] || (of_sizes && std::isfinite(i.fimm) && i.fimm != 0))
          shape_.open_constant[id] = argument(std::bit_cast<int64_t>(i.fimm));
      }
  }

  bool is_cross(int v) const {
    return std::find(shape_.stage_cross.begin(), shape_.stage_cross.end(), v) != shape_.stage_cross.end();
  }

  bool may_open(int v) const {
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body)
        if (divides_any_number(nest_.insts[id].index, v)) return false;
    return true;
  }

  void generalize_index(Expr& index, const std::vector<int>& strided) {
    for (int v : strided) {
      int64_t stride = 0;
      Expr rest;
      if (!split_linear(index, v, stride, rest) || (stride >= -1 && stride <= 1)) continue;
      index = rest + size_of(stride) * Expr::loop_var(v, nest_.extents[v]);
    }
  }

  /// How many elements a loaded index may choose from, and how far these are from each other.
  void open_tables() {
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) {
        const loops::Inst& i = nest_.insts[id];
        if (i.op != loops::Opcode::Indirect) continue;
        bool divided = false;
        for (const Stage& other : nest_.stages)
          for (ValueId user : other.body) divided |= is_divided(nest_.insts[user].index, i.var);
        if (divided) continue;
        shape_.open_constant[id] = argument(i.imm);
        for (const Stage& other : nest_.stages)
          for (ValueId user : other.body) open_stride(nest_.insts[user].index, i.var);
      }
  }

  void open_stride(Expr& index, int indirect) {
    for (const symbolic::Term& t : index.terms()) {
      const symbolic::AtomNode& n = *t.atom;
      if (n.kind != symbolic::AtomKind::Var || n.var_kind != symbolic::VarKind::Indirect || n.id != indirect) continue;
      if (t.coef >= -1 && t.coef <= 1) return;
      const Expr v = Expr::var(n.id, n.range, n.var_kind);
      index = index - v * Expr(t.coef) + size_of(t.coef) * v;
      return;
    }
  }

  Nest& nest_;
  KernelShape& shape_;
  std::unordered_map<int64_t, int> strides_;  // which argument each is
};

}  // namespace

void generalize(schedule::Kernel& kernel, KernelShape& shape) {
  if (!shape.segmented) Generalizer(kernel, shape).run();
}

}  // namespace kiln::codegen
