#include "base/error.h"
#include "loops/loops.h"

namespace kiln::loops {
namespace {

class Verifier {
 public:
  Verifier(const Nest& n, const std::vector<Buffer>& buffers) : n_(n), buffers_(buffers) {}
  void run() {
    std::vector<bool> seen(n_.extents.size());
    const auto claim = [&](int v) {
      check(v >= 0 && v < static_cast<int>(n_.extents.size()), "unknown loop variable");
      check(!seen[v], "loop variable i" + std::to_string(v) + " twice");
      seen[v] = true;
    };
    for (int v : n_.outer) claim(v);
    for (const Stage& s : n_.stages)
      for (int v : s.vars) claim(v);
    for (int64_t e : n_.extents) check(e >= 0, "negative extent");
    visible_.assign(n_.insts.size(), false);
    bound_.assign(n_.indirect_vars, 0);
    for (const Stage& s : n_.stages) stage(s);
  }

 private:
  void check(bool ok, const std::string& what) {
    if (!ok) throw InternalError("loop nest " + n_.name + ": " + what + "\n" + print(n_, buffers_));
  }
  void stage(const Stage& s) {
    std::vector<ValueId> local;
    std::vector<int> bound_here;
    for (ValueId id : s.body) {
      check(id >= 0 && id < static_cast<int>(n_.insts.size()), "unknown instruction");
      const Inst& i = n_.insts[id];
      for (ValueId a : i.args) {
        check(a >= 0 && a < static_cast<int>(n_.insts.size()) && visible_[a],
              std::string(opcode_name(i.op)) + " uses a value that is not there");
        check(n_.insts[a].op != Opcode::Store && n_.insts[a].op != Opcode::Indirect,
              "use of an instruction without a value");
      }
      inst(s, i, id);
      const bool in_place = i.op != Opcode::Reduce;  // a reduction's result exists after its stage only
      if (in_place && !(i.op == Opcode::Project && n_.insts[i.args[0]].op == Opcode::Reduce))
        visible_[id] = true;
      else if (i.op == Opcode::Reduce)
        visible_[id] = true, reducing_.push_back(id);
      local.push_back(id);
      if (i.op == Opcode::Indirect) bound_here.push_back(i.var);
    }
    reducing_.clear();
    for (ValueId id : local) {
      const Inst& i = n_.insts[id];
      const bool result =
          i.op == Opcode::Reduce || (i.op == Opcode::Project && n_.insts[i.args[0]].op == Opcode::Reduce);
      visible_[id] = s.vars.empty() || result;
    }
    if (!s.vars.empty())
      for (int v : bound_here) bound_[v] = 0;
  }
  void inst(const Stage& s, const Inst& i, ValueId id) {
    const auto type_of = [&](size_t k) { return n_.insts[i.args.at(k)].dtype; };
    for (ValueId a : i.args)
      check(i.op == Opcode::Project || std::find(reducing_.begin(), reducing_.end(), a) == reducing_.end(),
            "a reduction's result is used in its own stage");
    if (is_scalar_op(i.op)) {
      check(static_cast<int>(i.args.size()) == arity(i.op), "wrong number of operands");
      const DType t = type_of(0);
      for (size_t k = 1; k < i.args.size(); ++k) check(type_of(k) == t, "operands of different dtypes");
      const char c = opcode_class(i.op);
      check(i.dtype == (c == 'c' ? DType::Bool : t), "wrong result dtype of " + std::string(opcode_name(i.op)));
      const bool half = is_floating(t) && dtype_size(t) == 2;
      check(c == 'c' || !half, "arithmetic on a half type");
      check(c != 'f' || is_floating(t), std::string(opcode_name(i.op)) + " on integers");
      check((c != 'l' && c != 'i') || is_integral(t), std::string(opcode_name(i.op)) + " on floats");
      return;
    }
    switch (i.op) {
      case Opcode::ConstInt:
        check(is_integral(i.dtype), "ConstInt of a float dtype");
        break;
      case Opcode::ConstFloat:
        check(is_floating(i.dtype), "ConstFloat of an integer dtype");
        break;
      case Opcode::IndexValue:
        check(i.dtype == DType::Int64, "IndexValue is i64"), index(s, i.index);
        break;
      case Opcode::InRange:
        check(i.dtype == DType::Bool, "InRange is bool"), index(s, i.index);
        break;
      case Opcode::Bitcast:
        check(dtype_size(type_of(0)) == dtype_size(i.dtype), "Bitcast between sizes");
        break;
      case Opcode::Where:
        check(i.args.size() == 3 && type_of(0) == DType::Bool && type_of(1) == i.dtype && type_of(2) == i.dtype,
              "Where");
        break;
      case Opcode::Load:
      case Opcode::MaskedLoad:
        access(s, i, i.op == Opcode::MaskedLoad);
        if (i.op == Opcode::MaskedLoad)
          check(i.args.size() == 2 && type_of(0) == DType::Bool && type_of(1) == i.dtype, "MaskedLoad");
        break;
      case Opcode::Store:
        check(!i.args.empty() && type_of(0) == i.dtype, "Store of another dtype");
        check(i.args.size() < 2 || type_of(1) == DType::Bool, "Store's condition");
        access(s, i, i.args.size() > 1);
        break;
      case Opcode::Indirect:
        check(is_integral(type_of(0)), "Indirect of a float");
        check(i.var >= 0 && i.var < n_.indirect_vars && !bound_[i.var], "Indirect variable");
        bound_[i.var] = 1;
        break;
      case Opcode::Reduce:
      case Opcode::Scan:
        check(static_cast<int>(i.args.size()) == operand_count(i.reduce), "operands of a reduction");
        check(type_of(0) == i.dtype && !(is_floating(i.dtype) && dtype_size(i.dtype) == 2), "dtype of a reduction");
        check(i.op == Opcode::Reduce || !s.vars.empty(), "Scan without a loop");
        break;
      case Opcode::Project: {
        const Opcode of = n_.insts[i.args.at(0)].op;
        check(of == Opcode::Reduce || of == Opcode::Scan, "Project of something else");
        check(i.imm >= 0 && i.imm < result_count(n_.insts[i.args[0]].reduce), "Project's number");
        break;
      }
      default:
        break;
    }
  }
  void index(const Stage& s, const Expr& e) {
    for_each_var(e, [&](const symbolic::AtomNode& v) {
      if (v.var_kind == symbolic::VarKind::Indirect) {
        check(v.id < n_.indirect_vars && bound_[v.id], "unbound indirect variable");
        return;
      }
      const bool outer = std::find(n_.outer.begin(), n_.outer.end(), v.id) != n_.outer.end();
      const bool inner = std::find(s.vars.begin(), s.vars.end(), v.id) != s.vars.end();
      check(outer || inner, "i" + std::to_string(v.id) + " is not a variable of this stage");
      check(v.range.hi < std::max<int64_t>(n_.extents[v.id], 1), "range of i" + std::to_string(v.id));
    });
  }
  void access(const Stage& s, const Inst& i, bool guarded) {
    check(i.buffer >= 0 && i.buffer < static_cast<int>(buffers_.size()), "unknown buffer");
    check(buffers_[i.buffer].dtype == i.dtype, "dtype of an access to " + buffers_[i.buffer].name);
    index(s, i.index);
    const symbolic::Range r = i.index.range();
    if (!guarded && n_.total_size() > 0 && n_.stage_size(s) > 0)
      check(r.lo >= 0 && r.hi < buffers_[i.buffer].numel, "index " + print(i.index) + " can leave " +
                                                              buffers_[i.buffer].name + " of " +
                                                              std::to_string(buffers_[i.buffer].numel));
  }

  const Nest& n_;
  const std::vector<Buffer>& buffers_;
  std::vector<bool> visible_;
  std::vector<char> bound_;
  std::vector<ValueId> reducing_;
};

}  // namespace

void verify(const Nest& n, const std::vector<Buffer>& buffers) { Verifier(n, buffers).run(); }

void verify(const Program& p) {
  std::unordered_set<std::string> names;
  for (const Buffer& b : p.buffers)
    if (!names.insert(b.name).second) throw InternalError("two buffers are named " + b.name);
  for (const Nest& n : p.nests) verify(n, p.buffers);
  for (size_t k = 0; k < p.items.size(); ++k)
    if (p.items[k].is_nest && p.nests[p.items[k].index].not_before > static_cast<int>(k))
      throw InternalError("nest " + p.nests[p.items[k].index].name +
                          " stands before the item that it is not to precede");
  for (const Extern& e : p.externs)
    for (const auto* list : {&e.reads, &e.writes})
      for (BufferId b : *list)
        if (b < 0 || b >= static_cast<int>(p.buffers.size()))
          throw InternalError("extern " + e.name + ": unknown buffer");
}

}  // namespace kiln::loops
