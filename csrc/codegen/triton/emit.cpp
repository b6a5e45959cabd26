#include "codegen/triton/emit.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/error.h"
#include "codegen/common/shape.h"
#include "codegen/common/source.h"
#include "codegen/triton/ops.h"

namespace kiln::codegen {

using loops::BufferId;
using loops::BufferKind;
using loops::Expr;
using loops::Inst;
using loops::Nest;
using loops::Opcode;
using loops::ReduceKind;
using loops::Stage;
using loops::ValueId;
using symbolic::AtomKind;

namespace {

/// Elements of a program's tensors at most.
constexpr int64_t kBlock = 1024;
/// Values that one accumulator of a sum of float32 takes before it needs the digits of float64.
constexpr int64_t kMostRounds = kStrip;

int64_t power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

/// The axes along which a value differs: outer points, inner points of the stage, both or none.
using Axes = unsigned;
constexpr Axes kX = 1, kR = 2;

/// The largest magnitude that an expression's parts take on the way to its value.
double magnitude(const Expr& e) {
  const auto of_atom = [](const symbolic::AtomNode& a) {
    double m = std::max(std::abs(static_cast<double>(a.range.lo)), std::abs(static_cast<double>(a.range.hi)));
    if (a.kind != AtomKind::Var) m = std::max(m, magnitude(a.a));
    if (a.kind == AtomKind::Min || a.kind == AtomKind::Max || a.kind == AtomKind::Product)
      m = std::max(m, magnitude(a.b));
    return m;
  };
  double total = std::abs(static_cast<double>(e.constant()));
  for (const symbolic::Term& t : e.terms()) total += std::abs(static_cast<double>(t.coef)) * of_atom(*t.atom);
  return total;
}

class Writer {
 public:
  Writer(const schedule::Kernel& k, const std::vector<loops::Buffer>& buffers, const std::string& symbol)
      : kernel_(k), n_(k.nest), buffers_(buffers) {
    out_.symbol = identifier(symbol);
    style_ = {"//", "floor_div", "floor_mod", "tl.minimum", "tl.maximum", [this](const symbolic::AtomNode& v) {
                return v.var_kind == symbolic::VarKind::Indirect ? "t" + std::to_string(v.id) : var_.at(v.id);
              }};
  }

  TritonKernel write() {
    const size_t num_segments = kernel_.segments.size();
    out_.segmented = num_segments > 0;
    out_.points = out_.segmented ? kernel_.segments : std::vector<int64_t>{n_.outer_size()};
    num_args_ = kernel_.args.size() / std::max<size_t>(num_segments, 1);
    names_ = name_buffers(kernel_, buffers_, num_args_);
    for (const schedule::KernelArg& a : kernel_.args) out_.buffers.push_back(memory(a.buffer));
    for (BufferId b : names_.scratch) out_.scratch.push_back(memory(b));
    for (const Stage& s : n_.stages)
      for (ValueId id : s.body) triton::type_name(type_of(id));  // there is one
    choose_blocks();
    wide_indices_ = indices_are_wide();
    outer_points();
    for (size_t k = 0; k < n_.stages.size(); ++k) {
      separate(n_.stages[k]);
      stage(n_.stages[k]);
    }
    out_.text = head() + body_;
    return std::move(out_);
  }

 private:
  // --- text ---
  void line(const std::string& text) { body_ += std::string(static_cast<size_t>(4 * depth_), ' ') + text + "\n"; }
  static std::string number(int64_t v) { return std::to_string(v); }
  static std::string list(const std::vector<std::string>& parts, const std::string& between = ", ") {
    std::string text;
    for (const std::string& p : parts) text += (text.empty() ? "" : between) + p;
    return text;
  }
  /// One name, or several in parentheses.
  static std::string tuple(const std::vector<std::string>& parts) {
    return parts.size() == 1 ? parts[0] : "(" + list(parts) + ")";
  }

  std::string head() const {
    std::vector<std::string> parameters, shapes;
    for (size_t i = 0; i < num_args_; ++i) {
      const schedule::KernelArg& a = kernel_.args[i];
      parameters.push_back(names_.of.at(a.buffer));
      shapes.push_back(shape(a.buffer) + (!a.written ? "" : a.read ? " (read and written)" : " (written)"));
    }
    for (BufferId b : names_.scratch) {
      parameters.push_back(names_.of.at(b));
      shapes.push_back(shape(b) + " (scratch, for each outer point)");
    }
    if (out_.segmented) parameters.push_back("xnumel");
    if (!out_.errors.empty()) parameters.push_back("error_");
    parameters.push_back("XBLOCK: tl.constexpr");
    if (out_.rblock) parameters.push_back("RBLOCK: tl.constexpr");
    return "@triton.jit\ndef " + out_.symbol + "(" + list(parameters) + "):\n    # " + n_.name + ": " + domain() +
           "\n    # " + list(shapes) + "\n";
  }
  std::string shape(BufferId b) const {
    const loops::Buffer& buffer = buffers_.at(static_cast<size_t>(b));
    return names_.of.at(b) + " " + std::string(dtype_name(buffer.dtype)) +
           (out_.segmented ? "[]" : "[" + number(buffer.numel) + "]");
  }
  std::string domain() const {
    if (out_.segmented) return "xnumel points, " + number(static_cast<int64_t>(out_.points.size())) + " launches";
    const auto extents = [&](const std::vector<int>& vars) {
      std::vector<std::string> parts;
      for (int v : vars) parts.push_back(number(n_.extents[v]));
      return parts.empty() ? "1" : list(parts, " x ");
    };
    std::string text = extents(n_.outer) + " points";
    std::vector<std::string> inner;
    for (const Stage& s : n_.stages)
      if (!s.vars.empty() && (inner.empty() || inner.back() != extents(s.vars))) inner.push_back(extents(s.vars));
    return text + (inner.empty() ? "" : ", inner loops of " + list(inner, ", then "));
  }

  // --- blocks ---
  TritonKernel::Memory memory(BufferId b) const {
    const loops::Buffer& buffer = buffers_.at(static_cast<size_t>(b));
    return {buffer.dtype, buffer.numel};
  }
  const Inst& inst(ValueId id) const { return n_.insts[static_cast<size_t>(id)]; }
  DType type_of(ValueId id) const { return inst(id).dtype; }
  static bool has(const Nest& n, const Stage& s, Opcode op) {
    return std::any_of(s.body.begin(), s.body.end(), [&](ValueId id) { return n.insts[id].op == op; });
  }
  /// Inner points that a stage takes in one loop: with a scan those of the last variable, else all.
  int64_t loop_size(const Stage& s) const {
    return has(n_, s, Opcode::Scan) ? n_.extents[s.vars.back()] : n_.stage_size(s);
  }
  void choose_blocks() {
    const int64_t points = *std::max_element(out_.points.begin(), out_.points.end());
    int64_t inner = 0;
    for (const Stage& s : n_.stages)
      if (!s.vars.empty()) inner = std::max(inner, std::max<int64_t>(1, loop_size(s)));
    if (inner) out_.rblock = std::min(power_of_two(inner), kBlock);
    out_.xblock = std::min(power_of_two(points), kBlock / std::max<int64_t>(out_.rblock, 1));
    x_ragged_ = out_.segmented || points % out_.xblock != 0;
  }
  /// Whether some index has no room in 32 bits.
  bool indices_are_wide() const {
    constexpr double kRoom = 2147483647.0 - 2 * kBlock;
    double most = static_cast<double>(*std::max_element(out_.points.begin(), out_.points.end()));
    for (const TritonKernel::Memory& m : out_.scratch)
      most = std::max(most, static_cast<double>(out_.points[0] + out_.xblock) * static_cast<double>(m.numel));
    for (const Stage& s : n_.stages) {
      most = std::max(most, static_cast<double>(n_.stage_size(s)));
      for (ValueId id : s.body) most = std::max(most, magnitude(inst(id).index));
      for (ValueId id : s.body)
        if (inst(id).op == Opcode::Indirect) most = std::max(most, static_cast<double>(inst(id).imm));
    }
    return most > kRoom;
  }
  std::string index_type() const { return wide_indices_ ? "tl.int64" : "tl.int32"; }
  std::string full_shape() const { return out_.rblock ? "(XBLOCK, RBLOCK)" : "(XBLOCK,)"; }

  /// Whether any index of these stages names the variable.
  bool uses(const std::vector<Stage>& stages, int v) const {
    for (const Stage& s : stages)
      for (ValueId id : s.body)
        if (symbolic::uses_var(inst(id).index, v)) return true;
    return false;
  }
  /// Names `vars`, of which `whole` counts all points in row-major order; defines those that `stages` use. Variables
  /// that are the same part of it have one name.
  void split(const std::vector<int>& vars, const std::string& whole, Axes axis, const std::vector<Stage>& stages) {
    int64_t below = 1;
    for (int v : vars) below *= n_.extents[v];
    for (size_t k = 0; k < vars.size(); ++k) {
      const int v = vars[k];
      axes_of_var_[v] = axis;
      var_[v] = vars.size() == 1 ? whole : "i" + number(v);
      below /= std::max<int64_t>(n_.extents[v], 1);
      if (vars.size() == 1 || !uses(stages, v)) continue;
      std::string place = below == 1 ? whole : whole + " // " + number(below);
      if (k > 0) place = (below == 1 ? place : "(" + place + ")") + " % " + number(n_.extents[v]);
      const auto [known, fresh] = parts_.try_emplace(place, var_[v]);
      if (fresh)
        line(var_[v] + " = " + place);
      else
        var_[v] = known->second;
    }
  }
  void outer_points() {
    const std::string program = wide_indices_ ? "tl.program_id(0).to(tl.int64)" : "tl.program_id(0)";
    const std::string lanes = program + " * XBLOCK + tl.arange(0, XBLOCK)";
    line("xindex = " + (out_.rblock ? "(" + lanes + ")[:, None]" : lanes));
    if (x_ragged_) line("xmask = xindex < " + (out_.segmented ? "xnumel" : number(n_.outer_size())));
    split(n_.outer, "xindex", kX, n_.stages);
  }

  /// Waits for the program's other threads where a stage touches memory that earlier ones wrote, or writes what they
  /// read.
  void separate(const Stage& s) {
    bool conflict = false;
    const auto each = [&](const auto& f) {
      for (ValueId id : s.body)
        if (inst(id).buffer >= 0) f(place_of(inst(id).buffer), inst(id).op == Opcode::Store);
    };
    each([&](BufferId b, bool stores) { conflict |= written_.count(b) || (stores && read_.count(b)); });
    if (conflict) barrier();
  }
  void barrier() {
    line("tl.debug_barrier()");
    written_.clear();
    read_.clear();
  }
  BufferId place_of(BufferId b) const {
    for (const schedule::KernelArg& a : kernel_.args)
      if (a.buffer == b && a.place >= 0) return a.place;
    return b;
  }

  // --- stages ---
  struct Reduction {
    ValueId id;
    triton::ReduceForm form;
    bool wide = false;
    std::vector<std::string> states;
  };
  void stage(const Stage& s) {
    if (s.vars.empty()) {
      for (ValueId id : s.body) step(id);
      return;
    }
    const bool scans = has(n_, s, Opcode::Scan);
    const int64_t size = loop_size(s);
    const int64_t rounds = (size + out_.rblock - 1) / out_.rblock;
    const size_t around = scans ? s.vars.size() - 1 : 0;  // variables with loops of their own
    rounds_ = rounds;
    looped_ = rounds > 1 || around > 0;
    inner_ = true;
    reductions_.clear();
    for (ValueId id : s.body)
      if (inst(id).op == Opcode::Reduce) begin(id, n_.stage_size(s));
    if (n_.stage_size(s) > 0) {
      const int depth = depth_;
      for (size_t k = 0; k < around; ++k) open_around(s.vars[k]);
      for (ValueId id : s.body)
        if (inst(id).op == Opcode::Scan && has_carry(inst(id))) begin_scan(id);
      open_rounds(size, rounds);
      split(std::vector<int>(s.vars.begin() + static_cast<int64_t>(around), s.vars.end()), "rindex", kR, {s});
      for (ValueId id : s.body) step(id);
      depth_ = depth;
    }
    for (ValueId id : s.body)
      if (inst(id).op == Opcode::Reduce) finish(id);
    inner_ = looped_ = r_ragged_ = false;
  }
  void open_around(int v) {
    line("for k" + number(v) + " in range(0, " + number(n_.extents[v]) + "):");
    ++depth_;
    var_[v] = "i" + number(v);
    axes_of_var_[v] = 0;
    line(var_[v] + " = tl.full((), 0, " + index_type() + ") + k" + number(v));
  }
  void open_rounds(int64_t size, int64_t rounds) {
    std::string lanes = "tl.arange(0, RBLOCK)[None, :]";
    if (wide_indices_) lanes += ".to(tl.int64)";
    if (rounds > 1) {
      line("for start in range(0, " + number(size) + ", RBLOCK):");
      ++depth_;
      lanes = "start + " + lanes;
    }
    r_ragged_ = size % out_.rblock != 0;
    const int64_t defined = looped_ ? -1 : size;
    if (defined >= 0 && defined == defined_inner_) return;  // by the stage before
    defined_inner_ = defined;
    std::erase_if(parts_, [](const auto& part) { return part.first.find("rindex") != std::string::npos; });
    line("rindex = " + lanes);
    if (r_ragged_) line("rmask = rindex < " + number(size));
  }
  /// What selects the points that there are, of a value along these axes; empty: all.
  std::string mask(Axes axes) const {
    const bool x = (axes & kX) && x_ragged_, r = (axes & kR) && r_ragged_;
    return x && r ? "xmask & rmask" : x ? "xmask" : r ? "rmask" : "";
  }

  // --- reductions ---
  void begin(ValueId id, int64_t size) {
    const Inst& i = inst(id);
    Reduction r{id, {}, false, {}};
    r.wide = i.reduce == ReduceKind::Sum && i.dtype == DType::Float32 && size / out_.rblock > kMostRounds;
    r.form = triton::reduce_form(i.reduce, i.dtype, r.wide);
    for (size_t k = 0; k < r.form.types.size(); ++k)
      r.states.push_back("r" + number(id) + (k ? "_" + number(static_cast<int64_t>(k)) : ""));
    if (looped_ || size == 0)
      for (size_t k = 0; k < r.states.size(); ++k)
        line(r.states[k] + " = tl.full(" + full_shape() + ", " + r.form.initial[k] + ", " +
             triton::type_name(r.form.types[k]) + ")");
    reductions_.push_back(std::move(r));
  }
  Reduction& reduction(ValueId id) {
    const auto found =
        std::find_if(reductions_.begin(), reductions_.end(), [&](const Reduction& r) { return r.id == id; });
    KILN_CHECK(found != reductions_.end(), "a reduction that did not begin");
    return *found;
  }
  /// The state of each point, as wide as the block.
  std::vector<std::string> point_states(const Inst& i, bool wide) const {
    std::vector<std::string> args;
    for (ValueId a : i.args) args.push_back(operand(a).typed);
    return triton::reduce_state(i.reduce, i.dtype, std::move(args), wide);
  }
  void accumulate(ValueId id, const Inst& i) {
    Reduction& r = reduction(id);
    const std::vector<std::string> points = point_states(i, r.wide);
    const std::string where = mask(kX | kR);
    if (!looped_) {
      // One round: no accumulator, points that there are not are neutral.
      for (size_t k = 0; k < r.states.size(); ++k) {
        std::string text = points[k];
        if (!mask(kR).empty()) text = "tl.where(" + mask(kR) + ", " + text + ", " + neutral(r.form, k) + ")";
        text = spread(text, i, k);
        if (text == points[k] && k < i.args.size())
          r.states[k] = text;
        else
          line(r.states[k] + " = " + text);
      }
      return;
    }
    std::vector<std::string> next = r.states;
    if (!where.empty())
      for (std::string& n : next) n += "_next";
    const auto both = [&] {
      std::vector<std::string> all = r.states;
      all.insert(all.end(), points.begin(), points.end());
      return list(all);
    };
    line(list(next) + " = " + r.form.combine + "(" + both() + ")");
    for (size_t k = 0; k < next.size(); ++k)
      if (!where.empty()) line(r.states[k] + " = tl.where(" + where + ", " + next[k] + ", " + r.states[k] + ")");
  }
  /// Without inner loops, what is reduced is one point.
  void reduce_point(ValueId id, const Inst& i) {
    const triton::ReduceForm form = triton::reduce_form(i.reduce, i.dtype, false);
    std::vector<std::string> args, results;
    for (size_t k = 0; k < form.types.size(); ++k) {
      args.push_back("tl.full((), " + form.initial[k] + ", " + triton::type_name(form.types[k]) + ")");
      results.push_back(k ? result(id, k) : define_name(id));
    }
    for (std::string& p : point_states(i, false)) args.push_back(std::move(p));
    line(list(results) + " = " + form.combine + "(" + list(args) + ")");
    axes_[id] = axes(i.args);
    bind_results(id);
  }
  /// A start value next to a tensor of its dtype.
  static std::string neutral(const triton::ReduceForm& form, size_t k) {
    return triton::literal_is_typed(form.types[k])
               ? form.initial[k]
               : "tl.full((), " + form.initial[k] + ", " + triton::type_name(form.types[k]) + ")";
  }
  /// A point's state as a whole block, where its operand may be less.
  std::string spread(const std::string& text, const Inst& i, size_t k) const {
    const bool whole = k < i.args.size() && axes(i.args[k]) == (kX | kR);
    return whole ? text : "tl.broadcast_to(" + text + ", " + full_shape() + ")";
  }
  void finish(ValueId id) {
    const Reduction& r = reduction(id);
    std::vector<std::string> results;
    for (size_t k = 0; k < r.states.size(); ++k) results.push_back(k ? result(id, k) : define_name(id));
    line(list(results) + " = tl.reduce(" + tuple(r.states) + ", 1, " + r.form.combine + ", keep_dims=True)" +
         from_zero(inst(id)));
    if (r.wide) line(results[0] + " = " + results[0] + ".to(tl.float32)");
    axes_[id] = kX;
    bind_results(id);
  }
  /// Sums begin with zero: of negative zeros alone they are zero, too.
  std::string from_zero(const Inst& i) const {
    return i.reduce == ReduceKind::Sum && is_floating(i.dtype) && !looped_ && (i.op == Opcode::Scan || mask(kR).empty())
               ? " + 0.0"
               : "";
  }
  static std::string result(ValueId id, size_t k) { return "r" + number(id) + "_" + number(static_cast<int64_t>(k)); }
  /// Every later name of a reduction's or scan's further results.
  void bind_results(ValueId of) {
    for (const Stage& s : n_.stages)
      for (ValueId id : s.body)
        if (inst(id).op == Opcode::Project && inst(id).args[0] == of) {
          names_of_values_[id] = inst(id).imm == 0 ? value_name(of) : result(of, static_cast<size_t>(inst(id).imm));
          axes_[id] = axes_[of];
        }
  }
  static std::string carry(ValueId id, size_t k) { return "c" + number(id) + "_" + number(static_cast<int64_t>(k)); }
  /// Whether a scan goes on from a state: that of the rounds before, or the first one, which makes NaN of a single
  /// point's infinity.
  bool has_carry(const Inst& i) const { return rounds_ > 1 || i.reduce >= ReduceKind::Welford; }
  void begin_scan(ValueId id) {
    const triton::ReduceForm form = triton::reduce_form(inst(id).reduce, inst(id).dtype, false);
    for (size_t k = 0; k < form.types.size(); ++k)
      line(carry(id, k) + " = tl.full((XBLOCK, 1), " + form.initial[k] + ", " + triton::type_name(form.types[k]) + ")");
  }
  void scan(ValueId id, const Inst& i) {
    const triton::ReduceForm form = triton::reduce_form(i.reduce, i.dtype, false);
    const std::vector<std::string> points = point_states(i, false);
    std::vector<std::string> states, results, carries;
    for (size_t k = 0; k < points.size(); ++k) {
      states.push_back(spread(points[k], i, k));
      if (states[k] != points[k] || k >= i.args.size()) {
        states[k] = "s" + number(id) + "_" + number(static_cast<int64_t>(k));
        line(states[k] + " = " + spread(points[k], i, k));
      }
      results.push_back(k ? result(id, k) : define_name(id));
      carries.push_back(carry(id, k));
    }
    line(list(results) + " = tl.associative_scan(" + tuple(states) + ", 1, " + form.combine + ")" + from_zero(i));
    if (has_carry(i)) line(list(results) + " = " + form.combine + "(" + list(carries) + ", " + list(results) + ")");
    if (rounds_ > 1) {
      // Points behind the last one are in no result that is used, and no round follows them.
      std::vector<std::string> totals;
      for (const std::string& c : carries) totals.push_back(c + "_more");
      line(list(totals) + " = tl.reduce(" + tuple(states) + ", 1, " + form.combine + ", keep_dims=True)");
      line(list(carries) + " = " + form.combine + "(" + list(carries) + ", " + list(totals) + ")");
    }
    axes_[id] = kX | kR;
    bind_results(id);
  }

  // --- values ---
  std::string value_name(ValueId id) const { return names_of_values_.at(id); }
  std::string define_name(ValueId id) {
    return names_of_values_[id] = "v" + number(static_cast<int64_t>(num_values_++));
  }
  void define(ValueId id, const std::string& text, Axes axes) {
    line(define_name(id) + " = " + text);
    axes_[id] = axes;
  }
  Axes axes(ValueId id) const {
    const auto found = axes_.find(id);
    return found == axes_.end() ? 0 : found->second;
  }
  Axes axes(const Expr& e) const {
    Axes all = 0;
    symbolic::for_each_var(e, [&](const symbolic::AtomNode& v) {
      all |= v.var_kind == symbolic::VarKind::Indirect ? axes_of_indirect_.at(v.id) : axes_of_var_.at(v.id);
    });
    return all;
  }
  Axes axes(const loops::Operands& ids) const {
    Axes all = 0;
    for (ValueId id : ids) all |= axes(id);
    return all;
  }
  triton::Operand operand(ValueId id) const {
    const Inst& i = inst(id);
    if (i.op == Opcode::ConstInt || i.op == Opcode::ConstFloat)
      return {triton::literal(i), triton::typed_constant(i), true};
    return {value_name(id), value_name(id), false};
  }
  /// A constant as a number where that keeps its dtype.
  std::string loose(ValueId id) const {
    const triton::Operand o = operand(id);
    return triton::literal_is_typed(type_of(id)) ? o.name : o.typed;
  }
  std::string index(const Expr& e) const { return index_text(e, style_); }

  // --- memory ---
  bool is_scratch(BufferId b) const { return buffers_[static_cast<size_t>(b)].kind == BufferKind::Scratch; }
  Axes pointer_axes(const Inst& i) const { return axes(i.index) | (is_scratch(i.buffer) ? kX : 0); }
  /// The address of an access, spread over `all` axes.
  std::string pointer(const Inst& i, Axes all) const {
    const std::string name = names_.of.at(i.buffer);
    std::string offset = index(i.index);
    if (is_scratch(i.buffer))
      offset =
          "xindex * " + number(buffers_[static_cast<size_t>(i.buffer)].numel) + (offset == "0" ? "" : " + " + offset);
    const std::string text = offset == "0"                           ? name
                             : offset.find(' ') == std::string::npos ? name + " + " + offset
                                                                     : name + " + (" + offset + ")";
    if (pointer_axes(i) == all) return text;
    return "tl.broadcast_to(" + text + ", " + block_shape(all) + ")";
  }
  std::string block_shape(Axes all) const {
    if (!out_.rblock) return "(XBLOCK,)";
    return std::string("(") + (all & kX ? "XBLOCK" : "1") + ", " + (all & kR ? "RBLOCK" : "1") + ")";
  }
  static std::string with_mask(const std::string& pointer, const std::string& mask) {
    return mask.empty() ? pointer : pointer + ", mask=" + mask;
  }
  static std::string conjunction(const std::string& a, const std::string& b) {
    return a.empty() ? b : b.empty() ? a : a + " & " + b;
  }
  void before_load(BufferId b) {
    if (written_.count(place_of(b))) barrier();  // by this stage: other threads may hold the element
    read_.insert(place_of(b));
  }
  void load(ValueId id, const Inst& i) {
    before_load(i.buffer);
    const Axes all = pointer_axes(i);
    define(id, "tl.load(" + with_mask(pointer(i, all), mask(all)) + ")", all);
  }
  void masked_load(ValueId id, const Inst& i) {
    before_load(i.buffer);
    const Axes all = pointer_axes(i) | axes(i.args);
    // A number would pass through float32 on its way.
    const std::string other = i.dtype == DType::Float32 ? loose(i.args[1]) : operand(i.args[1]).typed;
    define(id,
           "tl.load(" + with_mask(pointer(i, all), conjunction(mask(all), operand(i.args[0]).typed)) +
               ", other=" + other + ")",
           all);
  }
  void store(const Inst& i) {
    const bool adds = i.mode == loops::StoreMode::Add;
    // Points that hold one value store it once; what they add counts for each.
    Axes all = pointer_axes(i) | axes(i.args);
    if (adds) all |= kX | (inner_ ? kR : 0);
    const std::string condition = i.args.size() > 1 ? operand(i.args[1]).typed : "";
    const std::string where = conjunction(mask(all), condition);
    if (adds) require_atomics(i.dtype);
    written_.insert(place_of(i.buffer));
    const std::string value = i.dtype == DType::Float32 ? loose(i.args[0]) : operand(i.args[0]).typed;
    line((adds ? "tl.atomic_add(" : "tl.store(") + pointer(i, all) + ", " + value +
         (where.empty() ? "" : ", mask=" + where) + (adds ? ", sem=\"relaxed\")" : ")"));
  }
  static void require_atomics(DType t) {
    if (t != DType::Float32 && t != DType::Float64 && t != DType::Int32 && t != DType::Int64)
      throw Unsupported("Triton adds to memory of " + std::string(dtype_name(t)) + " in no one step");
  }

  // --- instructions ---
  std::string error(const std::string& message) { return number(error_number(out_.errors, message)); }
  std::string mask_argument(Axes axes) const { return mask(axes).empty() ? "True" : mask(axes); }

  void step(ValueId id) {
    const Inst& i = inst(id);
    switch (i.op) {
      case Opcode::ConstInt:
      case Opcode::ConstFloat:
        return;  // stands where it is used
      case Opcode::IndexValue:
        return define(id, whole_number(i.index), axes(i.index));
      case Opcode::InRange:
        return define(id, in_range(i), axes(i.index));
      case Opcode::Cast:
        return define(id, triton::cast(operand(i.args[0]).typed, type_of(i.args[0]), i.dtype), axes(i.args));
      case Opcode::Bitcast:
        return define(id, bitcast(i), axes(i.args));
      case Opcode::Where: {
        const bool bare = operand(i.args[1]).constant != operand(i.args[2]).constant;
        const auto text = [&](ValueId a) { return bare ? loose(a) : operand(a).typed; };
        return define(id,
                      "tl.where(" + operand(i.args[0]).typed + ", " + text(i.args[1]) + ", " + text(i.args[2]) + ")",
                      axes(i.args));
      }
      case Opcode::Load:
        return load(id, i);
      case Opcode::MaskedLoad:
        return masked_load(id, i);
      case Opcode::Indirect:
        return indirect(i);
      case Opcode::Store:
        return store(i);
      case Opcode::Reduce:
        return inner_ ? accumulate(id, i) : reduce_point(id, i);
      case Opcode::Scan:
        return scan(id, i);
      case Opcode::Project:
        return;  // has the name of the result
      default:
        return scalar(id, i);
    }
  }
  std::string whole_number(const Expr& e) const {
    if (e.is_constant()) return "tl.full((), " + index(e) + ", tl.int64)";
    const std::string text = index(e);
    return (text.find(' ') == std::string::npos ? text : "(" + text + ")") + ".to(tl.int64)";
  }
  std::string in_range(const Inst& i) const {
    const symbolic::Range range = i.index.range();
    const std::string e = index(i.index);
    const bool below = i.imm > range.lo, above = i.imm2 <= range.hi;
    if (i.index.is_constant() || i.imm > range.hi || i.imm2 <= range.lo || (!below && !above)) {
      const bool inside = range.lo >= i.imm && range.hi < i.imm2;
      return std::string("tl.full((), ") + (inside ? "True" : "False") + ", tl.int1)";
    }
    const std::string low = e + " >= " + number(i.imm), high = e + " < " + number(i.imm2);
    return below && above ? "(" + low + ") & (" + high + ")" : below ? low : high;
  }
  std::string bitcast(const Inst& i) const {
    const DType from = type_of(i.args[0]);
    const std::string text = operand(i.args[0]).typed;
    // One bit is not eight.
    if (from == DType::Bool || i.dtype == DType::Bool) return triton::cast(text, from, i.dtype);
    return text + ".to(" + triton::type_name(i.dtype) + ", bitcast=True)";
  }
  void indirect(const Inst& i) {
    const Axes own = axes(i.args[0]);
    std::string text = "bound(" + operand(i.args[0]).typed + ", " + number(i.imm) + ", " + (i.wrap ? "True" : "False") +
                       ", " + mask_argument(own) + ", error_, " + error(i.message) + ")";
    if (!wide_indices_) text += ".to(tl.int32)";
    line("t" + number(i.var) + " = " + text);
    axes_of_indirect_[i.var] = own;
  }
  void scalar(ValueId id, const Inst& i) {
    const DType t = type_of(i.args[0]);
    std::vector<triton::Operand> args;
    for (ValueId a : i.args) args.push_back(operand(a));
    if (loops::divides(i.op) && is_integral(t)) {
      const Axes own = axes(i.args[1]);
      const bool safe = args[1].constant && args[1].name != "0";
      if (!safe)
        args[1].name = args[1].typed =
            "divisor(" + args[1].typed + ", " + mask_argument(own) + ", error_, " + error(kDivisionByZero) + ")";
    }
    define(id, triton::scalar_op(i.op, t, args), axes(i.args));
  }

  const schedule::Kernel& kernel_;
  const Nest& n_;
  const std::vector<loops::Buffer>& buffers_;
  TritonKernel out_;
  std::string body_;
  int depth_ = 1;
  size_t num_args_ = 0;
  BufferNames names_;
  IndexStyle style_;
  bool wide_indices_ = false;
  bool x_ragged_ = false, r_ragged_ = false;  // whether a block may have points that there are not
  bool inner_ = false, looped_ = false;       // whether the stage at hand has inner points, and runs in a loop
  int64_t rounds_ = 1;
  int64_t defined_inner_ = -1;                // inner points that rindex and rmask are for, where no loop changes them
  std::unordered_map<int, std::string> var_;  // names of loop variables
  std::unordered_map<std::string, std::string> parts_;  // of indices that have a name, by their text
  std::unordered_map<int, Axes> axes_of_var_, axes_of_indirect_;
  std::unordered_map<ValueId, std::string> names_of_values_;
  std::unordered_map<ValueId, Axes> axes_;
  size_t num_values_ = 0;
  std::vector<Reduction> reductions_;  // of the stage at hand
  std::set<BufferId> written_, read_;  // since the last barrier
};

}  // namespace

TritonKernel emit_triton(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                         const std::string& symbol) {
  return Writer(kernel, buffers, symbol).write();
}

}  // namespace kiln::codegen
