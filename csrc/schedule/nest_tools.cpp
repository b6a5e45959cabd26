#include "schedule/nest_tools.h"

#include "base/error.h"
#include "base/hash.h"

namespace kiln::schedule {

using loops::BufferId;
using symbolic::AtomKind;
using symbolic::AtomNode;
using symbolic::VarKind;

bool has_effect(const Inst& i) { return i.op == Opcode::Store || i.op == Opcode::Indirect; }
bool is_pointwise(const Nest& n) { return n.stages.size() == 1 && n.stages[0].vars.empty(); }
bool is_empty(const Nest& n) { return n.outer_size() == 0; }

const Expr& Substitution::operator()(const Expr& e) {
  if (e.is_constant()) return e;
  const auto [it, fresh] = made_.try_emplace(e);
  if (fresh) it->second = substitute(e, f_);
  return it->second;
}

void substitute_vars(Nest& n, const std::function<bool(int, Expr&)>& f, size_t first) {
  Substitution replaced([&](const AtomNode& v, Expr& out) { return v.var_kind == VarKind::Loop && f(v.id, out); });
  for (size_t s = first; s < n.stages.size(); ++s)
    for (ValueId id : n.stages[s].body) n.insts[id].index = replaced(n.insts[id].index);
}

namespace {
void replace_in_lists(Nest& n, int v, const std::vector<int>& by) {
  const auto edit = [&](std::vector<int>& list) {
    const auto it = std::find(list.begin(), list.end(), v);
    if (it == list.end()) return;
    const auto at = list.erase(it);
    list.insert(at, by.begin(), by.end());
  };
  edit(n.outer);
  for (Stage& s : n.stages) edit(s.vars);
}
}  // namespace

bool scans(const Nest& n, const Stage& s) {
  return std::any_of(s.body.begin(), s.body.end(), [&](ValueId id) { return n.insts[id].op == Opcode::Scan; });
}

bool is_scanned(const Nest& n, int v) {
  return std::any_of(n.stages.begin(), n.stages.end(),
                     [&](const Stage& s) { return !s.vars.empty() && s.vars.back() == v && scans(n, s); });
}

std::pair<int, int> split_var(Nest& n, int v, int64_t inner_extent) {
  KILN_CHECK(inner_extent > 0 && n.extents[v] % inner_extent == 0, "split of i" + std::to_string(v));
  KILN_CHECK(!is_scanned(n, v), "split of a scan's i" + std::to_string(v));
  const int outer = n.add_var(n.extents[v] / inner_extent);
  const int inner = n.add_var(inner_extent);
  const Expr e = n.var(outer) * Expr(inner_extent) + n.var(inner);
  substitute_vars(n, [&](int var, Expr& out) {
    if (var != v) return false;
    out = e;
    return true;
  });
  replace_in_lists(n, v, {outer, inner});
  return {outer, inner};
}

namespace {
/// The innermost loop is the one along the lanes of vectors: split to a few elements it would leave them empty.
constexpr int64_t kLeastLane = 4;

/// Finds `v // d` or `v % d` with d dividing v's extent inside e.
bool find_divided(const Nest& n, const Expr& e, int& var, int64_t& by) {
  for (const symbolic::Term& t : e.terms()) {
    const AtomNode& a = *t.atom;
    if (a.kind == AtomKind::Var) continue;
    if (find_divided(n, a.a, var, by) || find_divided(n, a.b, var, by)) return true;
    if (a.kind != AtomKind::FloorDiv && a.kind != AtomKind::Mod) continue;
    const int v = a.a.as_loop_var();
    if (v < 0 || a.divisor >= n.extents[v] || n.extents[v] % a.divisor != 0 || is_scanned(n, v)) continue;
    if (a.divisor < kLeastLane && !n.outer.empty() && v == n.outer.back()) continue;
    var = v;
    by = a.divisor;
    return true;
  }
  return false;
}
}  // namespace

void split_divided_vars(Nest& n) {
  for (int round = 0; round < 16; ++round) {
    int var = -1;
    int64_t by = 0;
    bool found = false;
    for (const Stage& s : n.stages)
      for (ValueId id : s.body)
        if (!found && find_divided(n, n.insts[id].index, var, by)) found = true;
    if (!found) return;
    split_var(n, var, by);
  }
}

std::optional<Affine> as_affine(const Expr& e) {
  Affine out;
  out.offset = e.constant();
  for (const symbolic::Term& t : e.terms()) {
    if (t.atom->kind != AtomKind::Var || t.atom->var_kind != VarKind::Loop || t.coef <= 0) return std::nullopt;
    out.digits.push_back({t.coef, t.atom->id});
  }
  std::sort(out.digits.begin(), out.digits.end(), [](const Digit& a, const Digit& b) { return a.stride < b.stride; });
  return out;
}

bool digit_is(const Nest& n, const Expr& e, int64_t stride, int v) {
  const int64_t extent = n.extents[v];
  if (extent <= 1) return true;
  return mod(floordiv(e, stride), extent) == n.var(v);
}

bool determines(const Nest& n, const Expr& e, int v, int64_t& stride) {
  const std::optional<int64_t> found = stride_along(e, v);
  if (!found || *found <= 0) return false;
  stride = *found;
  return digit_is(n, e, stride, v);
}

namespace {
/// True if every use of (u, v), u just outside v, becomes a plain use of one variable u*extent(v) + v.
bool mergeable(const Nest& n, const std::vector<const Stage*>& stages, int u, int v) {
  const int64_t inner = n.extents[v];
  for (const Stage* s : stages)
    for (ValueId id : s->body) {
      const Expr& e = n.insts[id].index;
      if (e.is_constant()) continue;
      const std::optional<int64_t> cu = stride_along(e, u), cv = stride_along(e, v);
      if (!cu || !cv || *cu != *cv * inner) return false;
    }
  return true;
}

void merge_list(Nest& n, std::vector<int>& list, const std::vector<const Stage*>& stages) {
  for (size_t k = 0; k + 1 < list.size();) {
    const int u = list[k], v = list[k + 1];
    if (!mergeable(n, stages, u, v)) {
      ++k;
      continue;
    }
    const int w = n.add_var(n.extents[u] * n.extents[v]);
    const int64_t inner = n.extents[v];
    const Expr e = n.var(w);
    for (const Stage* s : stages)
      for (ValueId id : s->body) {
        Expr& index = n.insts[id].index;
        int64_t cu, cv;
        Expr without_u, rest;
        if (index.is_constant() || !split_linear(index, v, cv, without_u) || cv == 0) continue;
        split_linear(without_u, u, cu, rest);
        index = rest + e * Expr(cv);
      }
    (void)inner;
    list[k] = w;
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(k) + 1);
    if (k > 0) --k;
  }
}
}  // namespace

void merge_vars(Nest& n) {
  std::vector<const Stage*> all;
  for (const Stage& s : n.stages) all.push_back(&s);
  merge_list(n, n.outer, all);
  for (Stage& s : n.stages)
    if (!scans(n, s)) merge_list(n, s.vars, {&s});
}

void join_lanes(Nest& n) {
  constexpr int64_t kVector = 16;
  if (!is_pointwise(n) || n.outer.size() < 2) return;
  const int v = n.outer.back();
  const int64_t inner = n.extents[v];
  if (inner < 2 || inner >= kVector || kVector % inner != 0) return;
  int joined = -1;
  for (ValueId id : n.stages[0].body) {
    const Inst& i = n.insts[id];
    if (i.op == Opcode::Store && i.mode == loops::StoreMode::Add) return;
    for (int u : n.outer) {
      if (i.op != Opcode::Store || u == v || stride_along(i.index, v) != 1) continue;
      if (stride_along(i.index, u) == inner) joined = u;
    }
  }
  if (joined < 0) return;
  for (ValueId id : n.stages[0].body) {
    const Inst& i = n.insts[id];
    if (i.index.is_constant()) continue;
    const std::optional<int64_t> step = stride_along(i.index, v), outer_step = stride_along(i.index, joined);
    if (!step || !outer_step) return;
    if (i.op == Opcode::Store
            ? step != 1 || outer_step != inner
            : std::abs(*step) * inner + std::abs(*outer_step) * (kVector / inner) > kMostInterleaved * kVector)
      return;
  }
  const int w = n.add_var(n.extents[joined] * inner);
  substitute_vars(n, [&](int var, Expr& out) {
    if (var != v && var != joined) return false;
    out = var == v ? mod(n.var(w), inner) : floordiv(n.var(w), inner);
    return true;
  });
  n.outer.pop_back();
  std::erase(n.outer, joined);
  n.outer.push_back(w);
}

void compact(Nest& n) {
  std::vector<bool> live(n.insts.size(), false);
  std::vector<ValueId> work;
  const auto mark = [&](ValueId id) {
    if (!live[id]) live[id] = true, work.push_back(id);
  };
  std::vector<ValueId> binds(n.indirect_vars, -1);
  for (const Stage& s : n.stages)
    for (ValueId id : s.body) {
      if (has_effect(n.insts[id])) mark(id);
      if (n.insts[id].op == Opcode::Indirect) binds[n.insts[id].var] = id;
    }
  while (!work.empty()) {
    const ValueId id = work.back();
    work.pop_back();
    for (ValueId a : n.insts[id].args) mark(a);
  }
  // Zero-trip stages still give their reductions' identities, so only empty bodies go.
  Nest out;
  out.name = n.name;
  out.after_errors = n.after_errors;
  std::vector<int> var_of(n.extents.size(), -1);
  const auto keep_vars = [&](const std::vector<int>& list) {
    std::vector<int> kept;
    for (int v : list) {
      if (n.extents[v] == 1 && !is_scanned(n, v)) continue;
      var_of[v] = out.add_var(n.extents[v]);
      kept.push_back(var_of[v]);
    }
    return kept;
  };
  out.outer = keep_vars(n.outer);
  std::vector<ValueId> value_of(n.insts.size(), -1);
  std::vector<int> indirect_of(n.indirect_vars, -1);
  Substitution renumbered([&](const AtomNode& v, Expr& e) {
    if (v.var_kind == VarKind::Size) return false;
    if (v.var_kind == VarKind::Indirect)
      e = Expr::var(indirect_of[v.id], v.range, VarKind::Indirect);
    else
      e = n.extents[v.id] <= 1 ? Expr(0) : out.var(var_of[v.id]);
    return true;
  });
  for (const Stage& s : n.stages) {
    Stage kept;
    bool any = false;
    for (ValueId id : s.body) any |= live[id];
    if (!any) continue;
    kept.vars = keep_vars(s.vars);
    for (ValueId id : s.body) {
      if (!live[id]) continue;
      Inst i = std::move(n.insts[id]);
      for (ValueId& a : i.args) a = value_of[a];
      if (i.op == Opcode::Indirect) i.var = indirect_of[i.var] = out.indirect_vars++;
      i.index = renumbered(i.index);
      value_of[id] = out.add(std::move(i));
      kept.body.push_back(value_of[id]);
    }
    // Stages that run once per outer point and follow each other are one.
    if (kept.vars.empty() && s.vars.empty() && !out.stages.empty() && out.stages.back().vars.empty()) {
      const Stage& last = out.stages.back();
      const bool reduces = std::any_of(last.body.begin(), last.body.end(),
                                       [&](ValueId id) { return out.insts[id].op == Opcode::Reduce; });
      if (!reduces) {
        out.stages.back().body.insert(out.stages.back().body.end(), kept.body.begin(), kept.body.end());
        continue;
      }
    }
    out.stages.push_back(std::move(kept));
  }
  n = std::move(out);
}

namespace {
size_t key_of(const Inst& i) {
  size_t h = static_cast<size_t>(i.op);
  hash_combine(h, static_cast<int>(i.dtype));
  for (ValueId a : i.args) hash_combine(h, a);
  hash_combine(h, i.buffer);
  hash_combine(h, i.index.hash());
  hash_combine(h, i.imm);
  hash_combine(h, i.imm2);
  hash_combine(h, std::bit_cast<int64_t>(i.fimm));
  hash_combine(h, static_cast<int>(i.reduce));
  return h;
}
bool same(const Inst& a, const Inst& b) {
  return a.op == b.op && a.dtype == b.dtype && a.args == b.args && a.buffer == b.buffer && a.index == b.index &&
         a.imm == b.imm && a.imm2 == b.imm2 && std::bit_cast<int64_t>(a.fimm) == std::bit_cast<int64_t>(b.fimm) &&
         a.reduce == b.reduce && a.wrap == b.wrap;
}

/// Values that are at hand, by what makes them.
class Known {
 public:
  explicit Known(const Nest& n) : n_(n) {}
  ValueId find(const Inst& i, size_t key) const {
    const auto [begin, end] = values_.equal_range(key);
    for (auto it = begin; it != end; ++it)
      if (same(n_.insts[it->second], i)) return it->second;
    return -1;
  }
  void add(ValueId v, size_t key) {
    values_.emplace(key, v);
    if (const BufferId b = n_.insts[v].buffer; b >= 0) loads_[b].push_back({key, v});
  }
  /// Drops what was loaded from `b`.
  void forget(BufferId b) {
    const auto loads = loads_.extract(b);
    if (loads.empty()) return;
    for (const auto& [key, v] : loads.mapped()) {
      const auto [begin, end] = values_.equal_range(key);
      for (auto it = begin; it != end; ++it)
        if (it->second == v) {
          values_.erase(it);
          break;
        }
    }
  }

 private:
  const Nest& n_;
  std::unordered_multimap<size_t, ValueId> values_;
  std::unordered_map<BufferId, std::vector<std::pair<size_t, ValueId>>> loads_;
};
}  // namespace

void reuse_values(Nest& n) {
  std::vector<ValueId> same_as(n.insts.size());
  for (size_t i = 0; i < same_as.size(); ++i) same_as[i] = static_cast<ValueId>(i);
  std::unordered_map<int, int> same_indirect;
  Known outer(n);
  // What memory holds: by buffer, where it was stored to last and the value, as seen by the code that follows.
  using Memory = std::unordered_map<BufferId, std::pair<Expr, ValueId>>;
  Memory outer_stored;
  for (Stage& s : n.stages) {
    const bool inner = !s.vars.empty();
    Known local(n);
    Memory stored;
    // A buffer written inside this stage's loops may change between the rounds.
    std::vector<BufferId> written;
    if (inner)
      for (ValueId id : s.body)
        if (n.insts[id].op == Opcode::Store) written.push_back(n.insts[id].buffer);
    for (BufferId b : written) {
      outer.forget(b);
      outer_stored.erase(b);
    }
    Known& known = inner ? local : outer;
    Memory& memory = inner ? stored : outer_stored;
    std::vector<ValueId> body;
    for (ValueId id : s.body) {
      Inst& i = n.insts[id];
      for (ValueId& a : i.args) a = same_as[a];
      if (!same_indirect.empty() && !i.index.is_constant())
        i.index = substitute(i.index, [&](const AtomNode& v, Expr& e) {
          if (v.var_kind != VarKind::Indirect) return false;
          const auto it = same_indirect.find(v.id);
          if (it == same_indirect.end()) return false;
          e = Expr::var(it->second, v.range, VarKind::Indirect);
          return true;
        });
      if (i.op == Opcode::Load) {
        ValueId value = -1;
        for (const Memory* m : {&std::as_const(memory), &std::as_const(outer_stored)})
          if (const auto it = m->find(i.buffer); it != m->end() && it->second.first == i.index)
            value = it->second.second;
        if (value >= 0) {
          same_as[id] = value;
          continue;
        }
      }
      if (i.op == Opcode::Store) {
        known.forget(i.buffer);
        memory.erase(i.buffer);
        if (i.mode == loops::StoreMode::Assign && i.args.size() == 1) memory[i.buffer] = {i.index, i.args[0]};
        body.push_back(id);
        continue;
      }
      const size_t key = key_of(i);
      ValueId found = known.find(i, key);
      if (found < 0 && inner && i.op != Opcode::Reduce && i.op != Opcode::Scan) found = outer.find(i, key);
      if (found >= 0 && i.op == Opcode::Indirect) {
        same_indirect[i.var] = n.insts[found].var;
        continue;
      }
      if (found >= 0) {
        same_as[id] = found;
        continue;
      }
      known.add(id, key);
      body.push_back(id);
    }
    s.body = std::move(body);
    if (!inner) continue;
    // Reductions' results are values of the outer level from here on.
    for (ValueId id : s.body) {
      const Inst& i = n.insts[id];
      if (i.op == Opcode::Project && n.insts[i.args[0]].op == Opcode::Reduce) outer.add(id, key_of(i));
    }
  }
}

void order_loops(Nest& n) {
  // Weight of a variable as innermost: accesses along it that are contiguous, minus those that jump. Without a gain
  // the order stays that of the strides, in which rows follow each other.
  const auto score = [&](int v, const std::vector<const Stage*>& stages) {
    double total = 0;
    for (const Stage* s : stages) {
      const double runs = static_cast<double>(std::max<int64_t>(n.stage_size(*s), 1));
      for (ValueId id : s->body) {
        const Inst& i = n.insts[id];
        if (i.buffer < 0) continue;
        const std::optional<int64_t> stride = stride_along(i.index, v);
        const double weight = runs * (i.op == Opcode::Store ? 1.5 : 1.0);
        if (!stride)
          total -= weight;
        else if (stride == 1)
          total += weight;
        else if (stride != 0)
          total -= weight * 0.5;
      }
    }
    return total * (n.extents[v] < 8 ? 0.25 : 1.0);
  };
  const auto biggest_stride = [&](int v, const std::vector<const Stage*>& stages) {
    int64_t best = 0;
    for (const Stage* s : stages)
      for (ValueId id : s->body) {
        if (n.insts[id].buffer < 0) continue;
        if (const auto stride = stride_along(n.insts[id].index, v)) best = std::max(best, *stride);
      }
    return best;
  };
  const auto order = [&](std::vector<int>& vars, const std::vector<const Stage*>& stages) {
    if (vars.size() < 2) return;
    std::unordered_map<int, int64_t> strides;
    for (int v : vars) strides[v] = biggest_stride(v, stages);
    std::stable_sort(vars.begin(), vars.end(), [&](int a, int b) { return strides[a] > strides[b]; });
    size_t best = vars.size() - 1;
    double best_score = score(vars[best], stages);
    for (size_t k = vars.size() - 1; k-- > 0;)
      if (const double s = score(vars[k], stages); s > best_score && s > 0) best = k, best_score = s;
    const int last = vars[best];
    vars.erase(vars.begin() + static_cast<std::ptrdiff_t>(best));
    vars.push_back(last);
  };
  std::vector<const Stage*> all;
  bool outer_free = true;
  for (const Stage& s : n.stages) {
    all.push_back(&s);
    for (ValueId id : s.body)
      if (n.insts[id].op == Opcode::Store && n.insts[id].mode == loops::StoreMode::Add) outer_free = false;
  }
  if (outer_free) order(n.outer, all);
  for (Stage& s : n.stages) {
    bool free = !scans(n, s);  // scans and adding stores are bound to their order
    for (ValueId id : s.body) free &= !(n.insts[id].op == Opcode::Store && n.insts[id].mode == loops::StoreMode::Add);
    if (free) order(s.vars, {&s});
  }
}

}  // namespace kiln::schedule
