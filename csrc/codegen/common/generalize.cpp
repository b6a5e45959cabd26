#include <algorithm>
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

class Generalizer {
 public:
  Generalizer(schedule::Kernel& kernel, KernelShape& shape) : nest_(kernel.nest), shape_(shape) {}

  void run() {
    std::vector<int> strided = shape_.unit_vars;  // variables whose strides become arguments
    strided.insert(strided.end(), shape_.inner_vars.begin(), shape_.inner_vars.end());
    if (shape_.row_var >= 0) strided.push_back(shape_.row_var);
    std::erase_if(strided, [&](int v) { return nest_.extents[v] <= 1 || !may_open(v); });
    for (int v : strided) open(v);
    if (shape_.row_var >= 0 && shape_.open[shape_.row_var] >= 0) shape_.open_row_blocks = argument(shape_.row_blocks);
    for (int v : shape_.stage_cross)
      if (std::find(nest_.outer.begin(), nest_.outer.end(), v) != nest_.outer.end()) strided.push_back(v);
    // Loops of few rounds are written out.
    const auto rounds = [&](int v, size_t stage) {
      return nest_.extents[v] / (static_cast<int64_t>(shape_.stage_width[stage]) * shape_.stage_unroll[stage]);
    };
    if (shape_.lane_var >= 0) {
      if (shape_.inner_vars.empty() && shape_.row_var < 0 && rounds(shape_.lane_var, 0) >= 2 &&
          may_open(shape_.lane_var))
        open(shape_.lane_var);
      if (shape_.open[shape_.lane_var] >= 0) shape_.open_blocks = argument(shape_.blocks);
    }
    for (size_t k = 0; k < nest_.stages.size(); ++k) {
      const Stage& s = nest_.stages[k];
      if (s.vars.size() != 1 || shape_.stage_cross[k] >= 0) continue;
      const int v = s.vars[0];
      if ((shape_.lane_var >= 0 ? nest_.extents[v] > 1 : rounds(v, k) >= 2) && may_open(v)) open(v);
    }
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) generalize_index(nest_.insts[id].index, strided);
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

  void open(int v) { shape_.open[v] = argument(nest_.extents[v]); }

  bool may_open(int v) const {
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body)
        if (divides_any_number(nest_.insts[id].index, v)) return false;
    return std::find(shape_.stage_cross.begin(), shape_.stage_cross.end(), v) == shape_.stage_cross.end();
  }

  void generalize_index(Expr& index, const std::vector<int>& strided) {
    for (int v : strided) {
      int64_t stride = 0;
      Expr rest;
      if (!split_linear(index, v, stride, rest) || (stride >= -1 && stride <= 1)) continue;
      constexpr int64_t kAnySize = 1 << 20;
      const Expr size = Expr::var(stride_argument(stride), {0, kAnySize}, symbolic::VarKind::Size);
      index = rest + size * Expr::loop_var(v, nest_.extents[v]);
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
