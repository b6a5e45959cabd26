#include "schedule/fuse.h"

#include <algorithm>

#include "base/error.h"

namespace kiln::schedule {

using loops::BufferId;
using symbolic::AtomNode;
using symbolic::VarKind;

namespace {
/// What a row of so many elements is worth, by element: one of two or three (a pooling window's) leaves the lanes
/// empty.
double filled(int64_t extent) { return extent < 4 ? static_cast<double>(extent * extent) / 16 : 1; }

/// Up to how many elements a row is better held by one lane, in tiles, than spread over the lanes: those of one vector
/// cost as much as the sums across it, and a logarithm or the like once a row as much as a few vectors.
int64_t short_row(const Nest& n) {
  for (const Stage& s : n.stages)
    for (ValueId id : s.body) {
      const Inst& i = n.insts[id];
      if (!loops::is_math(i.op)) continue;
      const Opcode of = n.insts[i.args[0]].op;
      if (s.vars.empty() || of == Opcode::Reduce || of == Opcode::Project) return 128;
    }
  return 15;
}
}  // namespace

bool prefer_columns(const Nest& n) {
  if (n.outer.empty()) return false;
  bool inner = false;
  for (const Stage& s : n.stages) inner |= !s.vars.empty();
  if (!inner) return true;
  // Count accesses that are contiguous one way or the other, weighed by how often they run; loads in small steps count
  // less.
  double columns = 0, rows = 0;
  const int64_t few = n.extents[n.outer.back()] >= 16 ? short_row(n) : 0;
  for (const Stage& s : n.stages) {
    // Sums at places that data tells: along a row they are made one by one.
    const bool scattered = std::any_of(s.body.begin(), s.body.end(), [&](ValueId id) {
      const Inst& i = n.insts[id];
      return i.op == loops::Opcode::Store && i.mode == loops::StoreMode::Add && symbolic::has_indirect(i.index);
    });
    const bool scanned = scans(n, s);  // along a row: one by one, too
    for (ValueId id : s.body) {
      const Inst& i = n.insts[id];
      if (i.buffer < 0) continue;
      const double weight = static_cast<double>(n.stage_size(s));
      // The strides of a column's and a row's elements, -1 if they are no such.
      const auto along_var = [&](int var) { return stride_along(i.index, var).value_or(-1); };
      const int64_t most = i.op == loops::Opcode::Store ? 1 : kMostInterleaved;  // a store in steps is a scatter
      const int64_t across = along_var(n.outer.back()), along = s.vars.empty() ? -1 : along_var(s.vars.back());
      // What is one element in the other direction is no gather there.
      const double as_columns = along == 0 ? weight / 4 : weight, as_rows = across == 0 ? weight / 4 : weight;
      if (across >= 1 && across <= most) columns += across == 1 ? as_columns : as_columns / 2;
      if (along < 1 || along > most) continue;
      if (scanned)
        columns += as_rows / 2 * filled(n.extents[n.outer.back()]);  // turned in tiles
      else if (!scattered && n.extents[s.vars.back()] <= few)
        columns += as_rows / 2, rows += as_rows / 4 * filled(n.extents[s.vars.back()]);
      else if (!scattered)
        rows += (along == 1 ? as_rows : as_rows / 2) * filled(n.extents[s.vars.back()]);
    }
  }
  return columns > rows;
}

int64_t parallelism(const Nest& n) {
  const int64_t points = n.outer_size();
  return prefer_columns(n) ? (points + 63) / 64 : points;
}

namespace {

/// Bytes from memory under which separate passes of a row find it still in the cache.
constexpr int64_t kRowBytes = 1 << 20;

class Fuser {
 public:
  Fuser(const Nest& a, const Nest& b, const std::vector<Buffer>& buffers, const Options& options)
      : a_(a), b_(b), buffers_(buffers), options_(options) {}

  std::optional<Nest> run() {
    if (is_empty(a_) || is_empty(b_) || too_long()) return std::nullopt;
    join();
    align();
    if (!share_outer() || !points_are_independent()) return std::nullopt;
    merge_stages();
    Nest out = std::move(n_);
    reuse_values(out);
    if (!worthwhile(out)) return std::nullopt;
    return out;
  }

 private:
  struct Access {
    const Inst* inst;
    int stage;
  };

  /// Whether both together have too many instructions, told without fusing them: what they have in common, as a rule,
  /// are loads and constants.
  bool too_long() const {
    int64_t all = 0;
    for (const Nest* n : {&a_, &b_})
      for (const Stage& s : n->stages)
        for (ValueId id : s.body) {
          const Opcode op = n->insts[id].op;
          all += op != Opcode::Load && op != Opcode::ConstInt && op != Opcode::ConstFloat && op != Opcode::IndexValue;
        }
    return all > options_.max_ops;
  }

  /// a's and b's stages in one nest with distinct variables and values; owner_ says whose variable is whose.
  void join() {
    n_ = a_;
    n_.name = a_.name + "_" + b_.name;
    if (n_.name.size() > 60) n_.name.resize(60);
    owner_.assign(n_.extents.size(), 0);
    first_b_stage_ = static_cast<int>(n_.stages.size());
    const int vars = static_cast<int>(n_.extents.size()), values = static_cast<int>(n_.insts.size());
    const int indirect = n_.indirect_vars;
    n_.extents.insert(n_.extents.end(), b_.extents.begin(), b_.extents.end());
    owner_.resize(n_.extents.size(), 1);
    n_.indirect_vars += b_.indirect_vars;
    Substitution renumbered([&](const AtomNode& v, Expr& out) {
      if (v.var_kind == VarKind::Size) return false;
      out = Expr::var(v.id + (v.var_kind == VarKind::Loop ? vars : indirect), v.range, v.var_kind);
      return true;
    });
    n_.insts.reserve(a_.insts.size() + b_.insts.size());
    for (Inst i : b_.insts) {
      for (ValueId& arg : i.args) arg += values;
      if (i.var >= 0) i.var += indirect;
      i.index = renumbered(i.index);
      n_.add(std::move(i));
    }
    for (int v : b_.outer) n_.outer.push_back(v + vars);
    for (Stage s : b_.stages) {
      for (int& v : s.vars) v += vars;
      for (ValueId& id : s.body) id += values;
      n_.stages.push_back(std::move(s));
    }
    pair_.assign(n_.extents.size(), -1);
  }

  std::vector<Access> accesses(BufferId b, bool of_b) const {
    std::vector<Access> out;
    for (size_t k = 0; k < n_.stages.size(); ++k) {
      if ((static_cast<int>(k) >= first_b_stage_) != of_b) continue;
      for (ValueId id : n_.stages[k].body)
        if (n_.insts[id].buffer == b) out.push_back({&n_.insts[id], static_cast<int>(k)});
    }
    return out;
  }

  std::vector<BufferId> shared_buffers() const {
    std::vector<BufferId> a, both;
    const auto add = [](std::vector<BufferId>& list, BufferId b) {
      if (b >= 0 && std::find(list.begin(), list.end(), b) == list.end()) list.push_back(b);
    };
    for (int k = 0; k < first_b_stage_; ++k)
      for (ValueId id : n_.stages[k].body) add(a, n_.insts[id].buffer);
    for (size_t k = first_b_stage_; k < n_.stages.size(); ++k)
      for (ValueId id : n_.stages[k].body)
        if (std::find(a.begin(), a.end(), n_.insts[id].buffer) != a.end()) add(both, n_.insts[id].buffer);
    return both;
  }

  void split(int v, int64_t inner) {
    const int partner = pair_[v];
    const auto one = [&](int var) {
      const auto parts = split_var(n_, var, inner);
      owner_.resize(n_.extents.size(), owner_[var]);
      pair_.resize(n_.extents.size(), -1);
      return parts;
    };
    const auto mine = one(v);
    if (partner < 0) return;
    const auto theirs = one(partner);
    pair_[mine.first] = theirs.first;
    pair_[theirs.first] = mine.first;
    pair_[mine.second] = theirs.second;
    pair_[theirs.second] = mine.second;
  }

  /// Pairs variables that play the same part in two indices of one buffer; splits one where the other is finer.
  /// Returns false when it has split, and has to be called again on the new indices.
  bool pair_up(const Expr& ea, const Expr& eb) {
    const auto fa = as_affine(ea), fb = as_affine(eb);
    if (!fa || !fb || fa->offset != fb->offset) return true;
    size_t i = 0, j = 0;
    while (i < fa->digits.size() && j < fb->digits.size()) {
      const Digit x = fa->digits[i], y = fb->digits[j];
      if (x.stride != y.stride) {
        x.stride < y.stride ? ++i : ++j;
        continue;
      }
      const int64_t ex = n_.extents[x.var], ey = n_.extents[y.var];
      if (ex == ey) {
        if (pair_[x.var] < 0 && pair_[y.var] < 0) {
          pair_[x.var] = y.var;
          pair_[y.var] = x.var;
        }
        ++i, ++j;
        continue;
      }
      const bool split_b = ey > ex;
      const int64_t small = std::min(ex, ey), large = std::max(ex, ey);
      const auto& fine = split_b ? *fa : *fb;
      const size_t next = (split_b ? i : j) + 1;
      const int wide = split_b ? y.var : x.var;
      if (is_scanned(n_, wide) || (pair_[wide] >= 0 && is_scanned(n_, pair_[wide]))) return true;
      if (large % small != 0 || next >= fine.digits.size() || fine.digits[next].stride != x.stride * small) return true;
      split(wide, small);
      return false;
    }
    return true;
  }

  void align() {
    const std::vector<BufferId> shared = shared_buffers();
    for (const bool writes : {true, false})
      for (BufferId b : shared) {
        for (int round = 0; round < 8; ++round) {
          const auto in_a = accesses(b, false), in_b = accesses(b, true);
          bool done = true;
          for (const Access& x : in_a) {
            for (const Access& y : in_b) {
              const bool wrote = x.inst->op == Opcode::Store || y.inst->op == Opcode::Store;
              if (wrote != writes) continue;
              const Expr ea = x.inst->index, eb = y.inst->index;
              if (!pair_up(ea, eb)) {
                done = false;
                break;
              }
            }
            if (!done) break;
          }
          if (done) break;
        }
      }
  }

  bool pointwise(bool of_b) const {
    const int begin = of_b ? first_b_stage_ : 0, end = of_b ? static_cast<int>(n_.stages.size()) : first_b_stage_;
    return end - begin == 1 && n_.stages[begin].vars.empty();
  }

  /// Makes the paired outer variables the outer domain; what a pointwise nest has besides becomes inner loops.
  bool share_outer() {
    std::vector<int> common, left_a, left_b;
    for (int v : n_.outer) {
      const int partner = pair_[v];
      const bool both = partner >= 0 && std::find(n_.outer.begin(), n_.outer.end(), partner) != n_.outer.end();
      if (owner_[v] == 0)
        (both ? common : left_a).push_back(v);
      else if (!both)
        left_b.push_back(v);
    }
    const bool pa = pointwise(false), pb = pointwise(true);
    if (!left_a.empty() && (!pa || pb)) return false;
    if (!left_b.empty() && (!pb || pa)) return false;
    if (common.empty() && pa && pb && (!a_.outer.empty() || !b_.outer.empty())) return false;
    Names names;
    for (int v : common) names.push_back({pair_[v], v});
    rename(names);
    // Inner loops in the order in which the other side has them, so that equal loops look equal.
    if (!left_a.empty()) n_.stages[0].vars = left_a;
    if (!left_b.empty()) n_.stages[first_b_stage_].vars = left_b;
    n_.outer = common;
    return true;
  }

  using Names = std::vector<std::pair<int, int>>;  // of variables: (from, to)
  bool other_name(const Names& names, int v, Expr& out) const {
    for (const auto& [from, to] : names)
      if (v == from) {
        out = n_.var(to);
        return true;
      }
    return false;
  }
  /// Gives variables of b's stages other names.
  void rename(const Names& names) {
    substitute_vars(n_, [&](int v, Expr& out) { return other_name(names, v, out); }, first_b_stage_);
  }

  static bool conflict(const Inst& x, const Inst& y) {
    return x.buffer >= 0 && x.buffer == y.buffer && (x.op == Opcode::Store || y.op == Opcode::Store);
  }

  /// Each of `vars` has the same value whenever x and y touch one element.
  bool same_iteration(const Expr& x, const Expr& y, const std::vector<int>& vars) const {
    for (int v : vars) {
      if (n_.extents[v] <= 1) continue;
      int64_t stride = 0;
      if (determines(n_, x, v, stride) && digit_is(n_, y, stride, v)) continue;
      if (determines(n_, y, v, stride) && digit_is(n_, x, stride, v)) continue;
      return false;
    }
    return true;
  }

  bool points_are_independent() const {
    for (BufferId b : shared_buffers())
      for (const Access& x : accesses(b, false))
        for (const Access& y : accesses(b, true))
          if (conflict(*x.inst, *y.inst) && !same_iteration(x.inst->index, y.inst->index, n_.outer)) return false;
    return true;
  }

  /// Moves b's inner stages into a's that have the same loops, where nothing in between forbids it.
  void merge_stages() {
    for (size_t k = first_b_stage_; k < n_.stages.size();) {
      bool merged = false;
      if (!n_.stages[k].vars.empty())
        for (int j = first_b_stage_; j-- > 0 && !merged;) merged = merge_into(static_cast<int>(k), j);
      if (!merged) ++k;
    }
  }

  bool merge_into(int k, int j) {
    Stage &from = n_.stages[k], &to = n_.stages[j];
    if (from.vars.size() != to.vars.size() || to.vars.empty()) return false;
    Names renames;
    for (int v : from.vars) {
      const int partner = pair_[v];
      if (partner < 0 || std::find(to.vars.begin(), to.vars.end(), partner) == to.vars.end()) return false;
      renames.push_back({v, partner});
    }
    // Scans and adding stores are bound to the order of their loops.
    for (const Stage* s : {&from, &to})
      for (ValueId id : s->body) {
        const Inst& i = n_.insts[id];
        if (i.op == Opcode::Scan || (i.op == Opcode::Store && i.mode == loops::StoreMode::Add)) return false;
      }
    // Values: everything `from` uses must exist before `to`.
    std::vector<bool> late(n_.insts.size(), false);
    for (size_t s = j; s < n_.stages.size(); ++s)
      if (static_cast<int>(s) != k)
        for (ValueId id : n_.stages[s].body) late[id] = true;
    for (ValueId id : from.body)
      for (ValueId arg : n_.insts[id].args)
        if (late[arg]) return false;
    // Memory: nothing between may touch what it writes, or write what it touches; in `to` itself only in the same
    // round.
    std::vector<int> vars = n_.outer;
    vars.insert(vars.end(), to.vars.begin(), to.vars.end());
    Substitution renamed(
        [&](const AtomNode& v, Expr& out) { return v.var_kind == VarKind::Loop && other_name(renames, v.id, out); });
    for (ValueId id : from.body) {
      const Inst& y = n_.insts[id];
      if (y.buffer < 0) continue;
      for (int s = j; s < k; ++s)
        for (ValueId other : n_.stages[s].body) {
          const Inst& x = n_.insts[other];
          if (!conflict(x, y)) continue;
          if (s != j || !same_iteration(x.index, renamed(y.index), vars)) return false;
        }
    }
    rename(renames);
    to.body.insert(to.body.end(), from.body.begin(), from.body.end());
    n_.stages.erase(n_.stages.begin() + k);
    return true;
  }

  static int inner_stages(const Nest& n) {
    int count = 0;
    for (const Stage& s : n.stages) count += !s.vars.empty();
    return count;
  }

  /// Elements that an access has side by side along these variables.
  static int64_t contiguous(const Nest& n, const std::vector<int>& vars, const Inst& i) {
    int64_t run = 1;
    for (size_t k = 0; k < vars.size(); ++k)
      for (int v : vars)
        if (n.extents[v] > 1 && stride_along(i.index, v) == run) run *= n.extents[v];
    return run;
  }
  /// Whether what a pointwise nest writes in whole vectors would be written in pieces of them, each many times a point:
  /// an image whose pixels hold the channels of several groups side by side, for one group.
  static bool breaks_runs(const Nest& part, const Nest& out) {
    constexpr int64_t kVector = 16, kOften = 64;
    if (!is_pointwise(part)) return false;
    for (ValueId id : part.stages[0].body) {
      const Inst& i = part.insts[id];
      if (i.op != Opcode::Store || contiguous(part, part.outer, i) < kVector) continue;
      for (const Stage& s : out.stages)
        for (ValueId other : s.body) {
          const Inst& o = out.insts[other];
          if (o.op != Opcode::Store || o.buffer != i.buffer) continue;
          const int64_t run = contiguous(out, s.vars.empty() ? out.outer : s.vars, o);
          if (run < kVector && out.stage_size(s) >= kOften * run) return true;
        }
    }
    return false;
  }

  bool worthwhile(const Nest& out) const {
    int64_t insts = 0;
    for (const Stage& s : out.stages) insts += static_cast<int64_t>(s.body.size());
    if (insts > options_.max_ops) return false;
    if (breaks_runs(a_, out) || breaks_runs(b_, out)) return false;
    const int passes = inner_stages(out);
    const bool columns = prefer_columns(out);
    if (passes > std::max(inner_stages(a_), inner_stages(b_)) && passes > 1) {
      // One more pass over the rows: only good while they stay in the cache.
      std::vector<BufferId> seen;
      int64_t bytes = 0;
      for (const Stage& s : out.stages)
        for (ValueId id : s.body) {
          const Inst& i = out.insts[id];
          if (i.buffer < 0 || s.vars.empty() || std::find(seen.begin(), seen.end(), i.buffer) != seen.end()) continue;
          seen.push_back(i.buffer);
          bytes += out.stage_size(s) * dtype_size(i.dtype) * (columns ? 64 : 1);
        }
      if (bytes > kRowBytes) return false;
    }
    // Work that filled all threads must not end up on a few.
    const int64_t wanted = 2 * options_.threads;
    const int64_t got = parallelism(out), before = std::max(parallelism(a_), parallelism(b_));
    const bool splittable = passes == 1 && out.stages.size() <= 2;
    if (options_.threads > 1 && got < wanted && before > got && out.total_size() > 16384 && !splittable) return false;
    return true;
  }

  const Nest &a_, &b_;
  const std::vector<Buffer>& buffers_;
  const Options& options_;
  Nest n_;
  std::vector<int> owner_, pair_;
  int first_b_stage_ = 0;
};

}  // namespace

std::optional<Nest> fuse_nests(const Nest& a, const Nest& b, const std::vector<Buffer>& buffers,
                               const Options& options) {
  return Fuser(a, b, buffers, options).run();
}

}  // namespace kiln::schedule
