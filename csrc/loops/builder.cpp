#include "base/error.h"
#include "base/hash.h"
#include "loops/loops.h"

namespace kiln::loops {

int64_t Nest::outer_size() const {
  int64_t n = 1;
  for (int v : outer) n *= extents[v];
  return n;
}
int64_t Nest::stage_size(const Stage& s) const {
  int64_t n = 1;
  for (int v : s.vars) n *= extents[v];
  return n;
}
int64_t Nest::total_size() const {
  int64_t inner = 1;
  for (const Stage& s : stages) inner = std::max(inner, stage_size(s));
  return outer_size() * inner;
}

BufferId Program::add_buffer(std::string name, DType dtype, int64_t numel, BufferKind kind) {
  buffers.push_back({std::move(name), dtype, numel, kind});
  return static_cast<BufferId>(buffers.size()) - 1;
}
Nest& Program::add_nest(Nest nest) {
  items.push_back({true, static_cast<int>(nests.size())});
  nests.push_back(std::move(nest));
  return nests.back();
}
void Program::add_extern(Extern e) {
  items.push_back({false, static_cast<int>(externs.size())});
  externs.push_back(std::move(e));
}

Val Ops::constant(DType t, double v) {
  if (is_floating(t)) return constant_float(t, v);
  KILN_CHECK(v >= -9.3e18 && v <= 9.2e18 && v == static_cast<double>(static_cast<int64_t>(v)),
             "constant " + std::to_string(v) + " is not exact in " + std::string(dtype_name(t)));
  return constant_int(t, static_cast<int64_t>(v));
}

NestBuilder::NestBuilder(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& outer)
    : buffers_(buffers) {
  nest_.name = std::move(name);
  for (int64_t n : outer) {
    const int v = nest_.add_var(n);
    nest_.outer.push_back(v);
    // A variable of extent zero never runs; give its expressions a range that is not empty.
    outer_.push_back(Expr::loop_var(v, std::max<int64_t>(n, 1)));
  }
}

std::vector<Expr> NestBuilder::stage(const std::vector<int64_t>& inner) {
  Stage s;
  std::vector<Expr> vars;
  for (int64_t n : inner) {
    s.vars.push_back(nest_.add_var(n));
    vars.push_back(Expr::loop_var(s.vars.back(), std::max<int64_t>(n, 1)));
  }
  nest_.stages.push_back(std::move(s));
  seen_.clear();
  return vars;
}

namespace {
bool same_inst(const Inst& a, const Inst& b) {
  return a.op == b.op && a.dtype == b.dtype && a.args == b.args && a.buffer == b.buffer && a.index == b.index &&
         a.imm == b.imm && a.imm2 == b.imm2 && std::bit_cast<int64_t>(a.fimm) == std::bit_cast<int64_t>(b.fimm);
}
size_t hash_inst(const Inst& a) {
  size_t h = static_cast<size_t>(a.op);
  hash_combine(h, static_cast<int>(a.dtype));
  for (ValueId v : a.args) hash_combine(h, v);
  hash_combine(h, a.buffer);
  hash_combine(h, a.index.hash());
  hash_combine(h, a.imm);
  hash_combine(h, a.imm2);
  hash_combine(h, std::bit_cast<int64_t>(a.fimm));
  return h;
}
bool is_pure(const Inst& i) {
  return is_scalar_op(i.op) || i.op == Opcode::ConstInt || i.op == Opcode::ConstFloat || i.op == Opcode::IndexValue ||
         i.op == Opcode::InRange || i.op == Opcode::Cast || i.op == Opcode::Bitcast || i.op == Opcode::Where ||
         i.op == Opcode::Load || i.op == Opcode::MaskedLoad;
}
}  // namespace

Val NestBuilder::emit(Inst inst) {
  KILN_CHECK(!nest_.stages.empty(), "no stage is open");
  const DType t = inst.dtype;
  const bool pure = is_pure(inst);
  const size_t h = pure ? hash_inst(inst) : 0;
  if (pure)
    for (ValueId v : seen_[h])
      if (same_inst(nest_.insts[v], inst)) return {v, t};
  const bool writes = inst.op == Opcode::Store;
  const ValueId id = nest_.add(std::move(inst));
  nest_.stages.back().body.push_back(id);
  if (pure) seen_[h].push_back(id);
  if (writes) seen_.clear();  // a load after a store is another load
  return {id, t};
}

std::vector<Val> NestBuilder::reduce(ReduceKind kind, std::vector<Val> args) {
  Inst i;
  i.op = Opcode::Reduce;
  i.reduce = kind;
  i.dtype = args.at(0).dtype;
  for (Val v : args) i.args.push_back(v.id);
  const Val first = emit(std::move(i));
  std::vector<Val> out{first};
  for (int k = 1; k < result_count(kind); ++k) {
    Inst p;
    p.op = Opcode::Project;
    p.args = {first.id};
    p.imm = k;
    p.dtype = kind == ReduceKind::ArgMax || kind == ReduceKind::ArgMin ? DType::Int64 : first.dtype;
    out.push_back(emit(std::move(p)));
  }
  return out;
}

std::vector<Val> NestBuilder::scan(ReduceKind kind, std::vector<Val> args) {
  std::vector<Val> out = reduce(kind, std::move(args));
  nest_.insts[out[0].id].op = Opcode::Scan;
  return out;
}

void NestBuilder::store(BufferId b, const Expr& index, Val v, StoreMode mode) {
  Inst i;
  i.op = Opcode::Store;
  i.buffer = b;
  i.index = index;
  i.args = {v.id};
  i.mode = mode;
  i.dtype = v.dtype;
  KILN_CHECK(v.dtype == buffers_.at(b).dtype, "store of " + std::string(dtype_name(v.dtype)) + " into " +
                                                  buffers_[b].name + ":" + std::string(dtype_name(buffers_[b].dtype)));
  emit(std::move(i));
}

void NestBuilder::store_if(Val condition, BufferId b, const Expr& index, Val v, StoreMode mode) {
  store(b, index, v, mode);
  nest_.insts.back().args.push_back(condition.id);
}

Nest NestBuilder::finish() { return std::move(nest_); }

Val NestBuilder::constant_int(DType t, int64_t v) {
  KILN_CHECK(is_integral(t), "constant_int of a floating dtype");
  Inst i;
  i.op = Opcode::ConstInt;
  i.dtype = t;
  i.imm = v;
  return emit(std::move(i));
}
Val NestBuilder::constant_float(DType t, double v) {
  KILN_CHECK(is_floating(t), "constant_float of an integer dtype");
  Inst i;
  i.op = Opcode::ConstFloat;
  i.dtype = t;
  i.fimm = v;
  return emit(std::move(i));
}
Val NestBuilder::index_value(const Expr& e) {
  Inst i;
  i.op = Opcode::IndexValue;
  i.dtype = DType::Int64;
  i.index = e;
  return emit(std::move(i));
}
Val NestBuilder::in_range(const Expr& e, int64_t lo, int64_t hi) {
  if (e.range().lo >= lo && e.range().hi < hi) return constant_int(DType::Bool, 1);
  if (e.range().hi < lo || e.range().lo >= hi) return constant_int(DType::Bool, 0);
  Inst i;
  i.op = Opcode::InRange;
  i.dtype = DType::Bool;
  i.index = e;
  i.imm = lo;
  i.imm2 = hi;
  return emit(std::move(i));
}
Val NestBuilder::load(BufferId b, const Expr& index) {
  Inst i;
  i.op = Opcode::Load;
  i.dtype = buffers_.at(b).dtype;
  i.buffer = b;
  i.index = index;
  return emit(std::move(i));
}
Val NestBuilder::masked_load(BufferId b, const Expr& index, Val mask, Val other) {
  KILN_CHECK(mask.dtype == DType::Bool && other.dtype == buffers_.at(b).dtype, "masked_load operands");
  const Inst& m = nest_.insts[mask.id];
  if (m.op == Opcode::ConstInt) return m.imm ? load(b, index) : other;
  Inst i;
  i.op = Opcode::MaskedLoad;
  i.dtype = other.dtype;
  i.buffer = b;
  i.index = index;
  i.args = {mask.id, other.id};
  return emit(std::move(i));
}
Val NestBuilder::cast(Val v, DType t) {
  if (v.dtype == t) return v;
  Inst i;
  i.op = Opcode::Cast;
  i.dtype = t;
  i.args = {v.id};
  return emit(std::move(i));
}
Val NestBuilder::bitcast(Val v, DType t) {
  if (v.dtype == t) return v;
  KILN_CHECK(dtype_size(v.dtype) == dtype_size(t), "bitcast between sizes");
  Inst i;
  i.op = Opcode::Bitcast;
  i.dtype = t;
  i.args = {v.id};
  return emit(std::move(i));
}
Val NestBuilder::where(Val condition, Val a, Val b) {
  KILN_CHECK(condition.dtype == DType::Bool && a.dtype == b.dtype, "where operands");
  if (a.id == b.id) return a;
  const Inst& c = nest_.insts[condition.id];
  if (c.op == Opcode::ConstInt) return c.imm ? a : b;
  Inst i;
  i.op = Opcode::Where;
  i.dtype = a.dtype;
  i.args = {condition.id, a.id, b.id};
  return emit(std::move(i));
}
Expr NestBuilder::indirect(Val v, int64_t size, bool wrap_negative, const std::string& error_message) {
  Inst i;
  i.op = Opcode::Indirect;
  i.dtype = v.dtype;
  i.args = {v.id};
  i.imm = size;
  i.wrap = wrap_negative;
  i.message = error_message;
  i.var = nest_.indirect_vars++;
  const int var = i.var;
  emit(std::move(i));
  // Even of a dimension of size one the variable stays: its check has to be kept alive, and needs a user.
  return Expr::var(var, {0, std::max<int64_t>(size - 1, 0)}, symbolic::VarKind::Indirect);
}
Val NestBuilder::apply(Opcode op, std::span<const Val> args) {
  KILN_CHECK(is_scalar_op(op) && static_cast<int>(args.size()) == arity(op), "apply");
  for (Val v : args)
    KILN_CHECK(v.dtype == args[0].dtype, std::string(opcode_name(op)) + ": operands of " +
                                             std::string(dtype_name(args[0].dtype)) + " and " +
                                             std::string(dtype_name(v.dtype)));
  Inst i;
  i.op = op;
  i.dtype = opcode_class(op) == 'c' ? DType::Bool : args[0].dtype;
  for (Val v : args) i.args.push_back(v.id);
  return emit(std::move(i));
}

namespace {
std::vector<int64_t> row_major(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t s = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = s;
    s *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}
Expr store_index(const StoreTo& to, const std::vector<Expr>& point, const std::vector<int64_t>& ranges) {
  return to.index ? to.index(point) : symbolic::linearize(point, row_major(ranges));
}
}  // namespace

Nest pointwise(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& ranges,
               const PointFn& fn, StoreTo to) {
  NestBuilder b(buffers, std::move(name), ranges);
  b.stage({});
  const Val v = b.cast(fn(b, b.outer()), buffers.at(to.buffer).dtype);
  b.store(to.buffer, store_index(to, b.outer(), ranges), v, to.mode);
  return b.finish();
}

Nest reduction(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& ranges,
               const std::vector<int64_t>& reduced, ReduceKind kind, const PointFn& fn, StoreTo to,
               const std::function<Val(Ops&, Index, const std::vector<Val>&)>& epilogue) {
  NestBuilder b(buffers, std::move(name), ranges);
  const std::vector<Expr> inner = b.stage(reduced);
  std::vector<Expr> point = b.outer();
  point.insert(point.end(), inner.begin(), inner.end());
  std::vector<Val> args{fn(b, point)};
  if (kind == ReduceKind::ArgMax || kind == ReduceKind::ArgMin)
    args.push_back(b.index_value(symbolic::linearize(inner, row_major(reduced))));
  KILN_CHECK(static_cast<int>(args.size()) == operand_count(kind), "this reduction needs NestBuilder");
  const std::vector<Val> r = b.reduce(kind, args);
  b.stage({});
  const Val v = b.cast(epilogue ? epilogue(b, b.outer(), r) : r[0], buffers.at(to.buffer).dtype);
  b.store(to.buffer, store_index(to, b.outer(), ranges), v, to.mode);
  return b.finish();
}

Cost cost_of(const std::vector<Buffer>& buffers, const std::vector<int64_t>& ranges, const PointFn& fn) {
  NestBuilder b(buffers, "cost", ranges);
  b.stage({});
  fn(b, b.outer());
  Cost c;
  const Nest n = b.finish();
  for (ValueId id : n.stages[0].body) {
    const Opcode op = n.insts[id].op;
    if (op == Opcode::Load || op == Opcode::MaskedLoad)
      ++c.loads;
    else if (is_math(op))
      ++c.math;
    else if (op != Opcode::ConstInt && op != Opcode::ConstFloat)
      ++c.ops;
  }
  return c;
}

// --- tables
// ------------------------------------------------------------------------------------------------------------
namespace {
struct OpRow {
  std::string_view name;
  int arity;
  char cls;
};
constexpr OpRow kOps[] = {
#define KILN_OPCODE(name, arity, cls, help) {#name, arity, cls},
#include "loops/opcodes.def"
#undef KILN_OPCODE
    {"ConstInt", 0, 0}, {"ConstFloat", 0, 0}, {"IndexValue", 0, 0}, {"InRange", 0, 0},    {"Cast", 1, 0},
    {"Bitcast", 1, 0},  {"Where", 3, 0},      {"Load", 0, 0},       {"MaskedLoad", 2, 0}, {"Indirect", 1, 0},
    {"Store", 1, 0},    {"Reduce", 1, 0},     {"Project", 1, 0},    {"Scan", 1, 0},
};
}  // namespace

int arity(Opcode op) { return kOps[static_cast<size_t>(op)].arity; }
char opcode_class(Opcode op) { return kOps[static_cast<size_t>(op)].cls; }
std::string_view opcode_name(Opcode op) { return kOps[static_cast<size_t>(op)].name; }
bool is_scalar_op(Opcode op) { return op < Opcode::ConstInt; }
bool is_math(Opcode op) {
  return op == Opcode::Pow || op == Opcode::Fmod || is_c_math(op) || (op >= Opcode::Exp && op <= Opcode::Sigmoid);
}
bool divides(Opcode op) {
  return op == Opcode::FloorDiv || op == Opcode::TruncDiv || op == Opcode::Remainder || op == Opcode::Fmod;
}

bool is_c_math(Opcode op) { return op >= Opcode::PowScalar && op <= Opcode::TanhScalar; }
int result_count(ReduceKind k) { return k >= ReduceKind::ArgMax ? 2 : 1; }
int operand_count(ReduceKind k) {
  switch (k) {
    case ReduceKind::ArgMax:
    case ReduceKind::ArgMin:
    case ReduceKind::OnlineSoftmaxCombine:
      return 2;
    case ReduceKind::WelfordCombine:
      return 3;
    default:
      return 1;
  }
}

}  // namespace kiln::loops
