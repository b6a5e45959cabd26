#include "base/error.h"
#include "schedule/fuse.h"
#include "schedule/groups.h"

namespace kiln::schedule {

using loops::ReduceKind;

namespace {

ValueId emit(Nest& n, std::vector<ValueId>& body, Opcode op, DType t, const loops::Operands& args) {
  Inst i;
  i.op = op;
  i.dtype = t;
  i.args = args;
  const ValueId id = n.add(std::move(i));
  body.push_back(id);
  return id;
}

ValueId reduce(Nest& n, std::vector<ValueId>& body, ReduceKind kind, DType t, const loops::Operands& args) {
  const ValueId id = emit(n, body, Opcode::Reduce, t, args);
  n.insts[id].reduce = kind;
  return id;
}

void replace_uses(Nest& n, size_t from_stage, ValueId old_value, ValueId new_value) {
  for (size_t k = from_stage; k < n.stages.size(); ++k)
    for (ValueId id : n.stages[k].body)
      for (ValueId& a : n.insts[id].args)
        if (a == old_value) a = new_value;
}

/// Copies what `root` needs of stage `s` into `to`, on fresh loop variables; shared values of outer stages stay.
ValueId copy_value(Nest& n, const Stage& s, const std::vector<int>& fresh, std::vector<ValueId>& to, ValueId root,
                   std::unordered_map<ValueId, ValueId>& done) {
  if (std::find(s.body.begin(), s.body.end(), root) == s.body.end()) return root;
  if (const auto it = done.find(root); it != done.end()) return it->second;
  Inst i = n.insts[root];
  for (ValueId& a : i.args) a = copy_value(n, s, fresh, to, a, done);
  if (!i.index.is_constant())
    i.index = substitute(i.index, [&](const symbolic::AtomNode& v, Expr& out) {
      if (v.var_kind != symbolic::VarKind::Loop) return false;
      for (size_t k = 0; k < s.vars.size(); ++k)
        if (s.vars[k] == v.id) {
          out = n.var(fresh[k]);
          return true;
        }
      return false;
    });
  const ValueId id = n.add(std::move(i));
  to.push_back(id);
  return done[root] = id;
}

/// True if the value can be computed a second time: no indirect indices, no scans in its making.
bool copyable(const Nest& n, const Stage& s, ValueId root) {
  if (std::find(s.body.begin(), s.body.end(), root) == s.body.end()) return true;
  const Inst& i = n.insts[root];
  if (i.op == Opcode::Scan || i.op == Opcode::Project || symbolic::has_indirect(i.index)) return false;
  return std::all_of(i.args.begin(), i.args.end(), [&](ValueId a) { return copyable(n, s, a); });
}

}  // namespace

void expand_two_pass(Nest& n, const Options& options) {
  // Too few rows for the threads: the one-pass form can be split.
  if (options.threads > 1 && parallelism(n) < 2 * options.threads && n.total_size() >= 32768) return;
  for (size_t k = 0; k < n.stages.size(); ++k) {
    const int64_t size = n.stage_size(n.stages[k]);
    if (n.stages[k].vars.empty() || size == 0) continue;
    ValueId found = -1;
    bool stores = false;
    int64_t bytes = 0;
    for (ValueId id : n.stages[k].body) {
      const Inst& i = n.insts[id];
      if (found < 0 && i.op == Opcode::Reduce &&
          (i.reduce == ReduceKind::Welford || i.reduce == ReduceKind::OnlineSoftmax) &&
          copyable(n, n.stages[k], i.args[0]))
        found = id;
      stores |= i.op == Opcode::Store;
      if (i.buffer >= 0) bytes += size * dtype_size(i.dtype) * (prefer_columns(n) ? 64 : 1);
    }
    if (found < 0 || stores || bytes > (int64_t{1} << 20)) continue;
    const Inst i = n.insts[found];
    const DType t = i.dtype;
    ValueId second = -1;
    for (ValueId id : n.stages[k].body)
      if (n.insts[id].op == Opcode::Project && n.insts[id].args[0] == found) second = id;
    std::erase(n.stages[k].body, second);
    const bool welford = i.reduce == ReduceKind::Welford;
    n.insts[found].reduce = welford ? ReduceKind::Sum : ReduceKind::Max;
    Stage mid, again;
    ValueId center = found;
    if (welford) {
      Inst c;
      c.op = Opcode::ConstFloat;
      c.dtype = t;
      c.fimm = static_cast<double>(size);
      const ValueId count = n.add(std::move(c));
      mid.body.push_back(count);
      center = emit(n, mid.body, Opcode::Div, t, {found, count});
    }
    const Stage source = n.stages[k];
    std::vector<int> fresh;
    for (int v : source.vars) fresh.push_back(n.add_var(n.extents[v]));
    again.vars = fresh;
    std::unordered_map<ValueId, ValueId> done;
    const ValueId x = copy_value(n, source, fresh, again.body, i.args[0], done);
    const ValueId delta = emit(n, again.body, Opcode::Sub, t, {x, center});
    ValueId term = -1;
    if (welford) {
      term = emit(n, again.body, Opcode::Mul, t, {delta, delta});
    } else {
      term = emit(n, again.body, Opcode::Exp, t, {delta});
    }
    const ValueId sum = reduce(n, again.body, ReduceKind::Sum, t, {term});
    if (welford) replace_uses(n, k + 1, found, center);
    if (second >= 0) replace_uses(n, k + 1, second, sum);
    const auto at = n.stages.begin() + static_cast<std::ptrdiff_t>(k) + 1;
    const auto after = n.stages.insert(at, std::move(again));
    if (!mid.body.empty()) n.stages.insert(after, std::move(mid));
  }
  compact(n);
}

namespace {
/// Sums of long columns of a large matrix, `size` rows of them. Cut into blocks of columns, each thread would jump from
/// row to row through all of it; cut into blocks of rows, it reads in order, and what it has written itself before.
bool sums_long_columns(const Nest& n, int64_t size, const Options& options) {
  return prefer_columns(n) && n.outer_size() / n.extents[n.outer.back()] < 2 * options.threads && size >= 512 &&
         size * n.outer_size() >= (1 << 18);
}
}  // namespace

std::optional<Nest> split_reduction(Nest& n, std::vector<Buffer>& buffers, const Options& options) {
  if (options.threads <= 1) return std::nullopt;
  // One stage of inner loops that reduces, then perhaps one without.
  if (n.stages.empty() || n.stages.size() > 2 || n.stages[0].vars.empty()) return std::nullopt;
  if (n.stages.size() == 2 && !n.stages[1].vars.empty()) return std::nullopt;
  const Stage& s = n.stages[0];
  const int64_t size = n.stage_size(s), outer = n.outer_size();
  if (size * outer < 32768 || size < 64) return std::nullopt;
  if (parallelism(n) >= 2 * options.threads && !sums_long_columns(n, size, options)) return std::nullopt;
  for (ValueId id : s.body) {
    const Inst& i = n.insts[id];
    if (i.op == Opcode::Scan || (i.op == Opcode::Store && i.mode == loops::StoreMode::Add)) return std::nullopt;
  }
  // Cut the outermost inner loop that can be cut evenly.
  const int64_t wanted = 4 * options.threads;
  int var = -1;
  int64_t parts = 1;
  for (int v : s.vars) {
    const int64_t e = n.extents[v];
    for (int64_t p = std::min(wanted * 2, e); p > 1 && p >= options.threads; --p)
      if (e % p == 0) {
        var = v, parts = p;
        break;
      }
    if (var >= 0) break;
  }
  if (var < 0) return std::nullopt;

  Nest combine;
  combine.name = n.name + "_combine";
  std::vector<int> var_of(n.extents.size(), -1);
  for (int v : n.outer) {
    var_of[v] = combine.add_var(n.extents[v]);
    combine.outer.push_back(var_of[v]);
  }
  const int part_var = combine.add_var(parts);
  combine.stages.emplace_back();
  combine.stages[0].vars = {part_var};

  const auto halves = split_var(n, var, n.extents[var] / parts);
  std::erase(n.stages[0].vars, halves.first);
  // Partial results: [part][outer point].
  Expr here(0), there(0);
  int64_t stride = 1;
  for (size_t k = n.outer.size(); k-- > 0;) {
    here += n.var(n.outer[k]) * Expr(stride);
    there += combine.var(combine.outer[k]) * Expr(stride);
    stride *= n.extents[n.outer[k]];
  }
  here += n.var(halves.first) * Expr(stride);
  there += combine.var(part_var) * Expr(stride);
  n.outer.insert(n.outer.begin(), halves.first);

  std::unordered_map<ValueId, ValueId> value_of;  // values of n's second stage in `combine`
  Stage store_partials;
  const auto new_buffer = [&](DType t) {
    Buffer b;
    b.name = "partial" + std::to_string(buffers.size());
    b.dtype = t;
    b.numel = parts * outer;
    b.kind = loops::BufferKind::Temp;
    buffers.push_back(b);
    return static_cast<BufferId>(buffers.size()) - 1;
  };
  const auto store = [&](ValueId v) {
    Inst i;
    i.op = Opcode::Store;
    i.dtype = n.insts[v].dtype;
    i.buffer = new_buffer(i.dtype);
    i.index = here;
    i.args = {v};
    store_partials.body.push_back(n.add(std::move(i)));
    return n.insts[store_partials.body.back()].buffer;
  };
  const auto load = [&](BufferId b) {
    Inst i;
    i.op = Opcode::Load;
    i.dtype = buffers[b].dtype;
    i.buffer = b;
    i.index = there;
    const ValueId id = combine.add(std::move(i));
    combine.stages[0].body.push_back(id);
    return id;
  };
  const Stage body = n.stages[0];
  for (ValueId id : body.body) {
    const Inst i = n.insts[id];
    if (i.op != Opcode::Reduce) continue;
    ValueId second = -1;
    for (ValueId other : body.body)
      if (n.insts[other].op == Opcode::Project && n.insts[other].args[0] == id) second = other;
    if (loops::result_count(i.reduce) == 2 && second < 0) {
      Inst p;
      p.op = Opcode::Project;
      p.imm = 1;
      p.args = {id};
      p.dtype = i.reduce == ReduceKind::ArgMax || i.reduce == ReduceKind::ArgMin ? DType::Int64 : i.dtype;
      second = n.add(std::move(p));
      n.stages[0].body.push_back(second);
    }
    ReduceKind kind = i.reduce;
    loops::Operands args{load(store(id))};
    if (second >= 0) args.push_back(load(store(second)));
    if (kind == ReduceKind::Welford || kind == ReduceKind::WelfordCombine) {
      if (kind == ReduceKind::WelfordCombine) return std::nullopt;
      kind = ReduceKind::WelfordCombine;
      Inst c;
      c.op = Opcode::ConstFloat;
      c.dtype = i.dtype;
      c.fimm = static_cast<double>(size / parts);
      args.push_back(combine.add(std::move(c)));
      combine.stages[0].body.push_back(args.back());
    }
    if (kind == ReduceKind::OnlineSoftmax) kind = ReduceKind::OnlineSoftmaxCombine;
    const ValueId total = reduce(combine, combine.stages[0].body, kind, i.dtype, args);
    value_of[id] = total;
    if (second >= 0) {
      const ValueId p = emit(combine, combine.stages[0].body, Opcode::Project, n.insts[second].dtype, {total});
      combine.insts[p].imm = 1;
      value_of[second] = p;
    }
  }
  // The rest of the nest moves behind the combination.
  if (n.stages.size() == 2) {
    combine.stages.emplace_back();
    for (ValueId id : n.stages[1].body) {
      Inst i = n.insts[id];
      for (ValueId& a : i.args) a = value_of.at(a);
      if (!i.index.is_constant())
        i.index = substitute(i.index, [&](const symbolic::AtomNode& v, Expr& out) {
          if (v.var_kind != symbolic::VarKind::Loop) return false;
          out = combine.var(var_of[v.id]);
          return true;
        });
      combine.indirect_vars = n.indirect_vars;
      value_of[id] = combine.add(std::move(i));
      combine.stages[1].body.push_back(value_of[id]);
    }
    n.stages.pop_back();
  }
  n.stages.push_back(std::move(store_partials));
  compact(n);
  compact(combine);
  return combine;
}

}  // namespace kiln::schedule
