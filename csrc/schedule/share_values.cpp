#include "base/error.h"
#include "base/hash.h"
#include "schedule/fuse.h"
#include "schedule/groups.h"

// Passes over one row often compute the same costly value: softmax's exponentials for the sum, and again for the
// result. The first pass keeps them in a scratch row, the later ones read it.
namespace kiln::schedule {
namespace {

constexpr int64_t kMostBytes = 256 << 10;  // of one row: it should stay in the cache

/// Finds for the values of stage `k` the equal ones of an earlier stage `j` with the same loops.
class Matcher {
 public:
  Matcher(const Nest& n, size_t j, size_t k) : n_(n), j_(j), k_(k) {
    for (size_t s = j; s <= k; ++s)
      for (ValueId id : n.stages[s].body)
        if (n.insts[id].op == Opcode::Store) written_.push_back(n.insts[id].buffer);
    for (ValueId id : n.stages[k].body)
      if (const ValueId m = find(id); m >= 0) match_[id] = m;
  }
  ValueId match(ValueId id) const {
    const auto it = match_.find(id);
    return it == match_.end() ? -1 : it->second;
  }

 private:
  ValueId find(ValueId id) const {
    const Inst& y = n_.insts[id];
    const bool pure = is_scalar_op(y.op) || y.op == Opcode::ConstInt || y.op == Opcode::ConstFloat ||
                      y.op == Opcode::IndexValue || y.op == Opcode::InRange || y.op == Opcode::Cast ||
                      y.op == Opcode::Bitcast || y.op == Opcode::Where || y.op == Opcode::Load ||
                      y.op == Opcode::MaskedLoad;
    if (!pure || symbolic::has_indirect(y.index)) return -1;
    if (y.buffer >= 0 && std::count(written_.begin(), written_.end(), y.buffer)) return -1;
    const Stage &from = n_.stages[k_], &to = n_.stages[j_];
    const Expr index =
        y.index.is_constant() ? y.index : substitute(y.index, [&](const symbolic::AtomNode& v, Expr& out) {
          if (v.var_kind != symbolic::VarKind::Loop) return false;
          for (size_t i = 0; i < from.vars.size(); ++i)
            if (from.vars[i] == v.id) {
              out = n_.var(to.vars[i]);
              return true;
            }
          return false;
        });
    loops::Operands args;
    for (ValueId a : y.args) {
      const bool local = std::count(from.body.begin(), from.body.end(), a) != 0;
      const ValueId m = local ? match(a) : a;
      if (m < 0) return -1;
      args.push_back(m);
    }
    for (ValueId other : to.body) {
      const Inst& x = n_.insts[other];
      if (x.op == y.op && x.dtype == y.dtype && x.args == args && x.buffer == y.buffer && x.index == index &&
          x.imm == y.imm && x.imm2 == y.imm2 && std::bit_cast<int64_t>(x.fimm) == std::bit_cast<int64_t>(y.fimm))
        return other;
    }
    return -1;
  }

  const Nest& n_;
  size_t j_, k_;
  std::vector<BufferId> written_;
  std::unordered_map<ValueId, ValueId> match_;
};

bool makes_costly(const Nest& n, const Stage& s, ValueId id) {
  if (std::find(s.body.begin(), s.body.end(), id) == s.body.end()) return false;
  if (loops::is_math(n.insts[id].op)) return true;
  return std::any_of(n.insts[id].args.begin(), n.insts[id].args.end(),
                     [&](ValueId a) { return makes_costly(n, s, a); });
}

Expr row_index(const Nest& n, const Stage& s) {
  Expr e(0);
  for (int v : s.vars) e = e * Expr(n.extents[v]) + n.var(v);
  return e;
}

}  // namespace

void share_costly_values(Nest& n, std::vector<Buffer>& buffers) {
  if (prefer_columns(n)) return;
  for (size_t k = 1; k < n.stages.size(); ++k)
    for (size_t j = 0; j < k; ++j) {
      const std::vector<int>&from = n.stages[k].vars, &to = n.stages[j].vars;
      const int64_t size = n.stage_size(n.stages[k]);
      bool same_loops = !from.empty() && from.size() == to.size() && size > 1;
      for (size_t i = 0; same_loops && i < from.size(); ++i) same_loops = n.extents[from[i]] == n.extents[to[i]];
      if (!same_loops) continue;
      const Matcher matcher(n, j, k);
      const std::vector<ValueId> body = n.stages[k].body;
      for (ValueId id : body) {
        const ValueId first = matcher.match(id);
        const DType t = n.insts[id].dtype;
        if (first < 0 || n.insts[id].op == Opcode::Load || size * dtype_size(t) > kMostBytes ||
            !makes_costly(n, n.stages[k], id))
          continue;
        // Only what something unmatched uses: the rest goes with it.
        const bool needed = std::any_of(body.begin(), body.end(), [&](ValueId user) {
          const auto& args = n.insts[user].args;
          return matcher.match(user) < 0 && std::count(args.begin(), args.end(), id);
        });
        if (!needed) continue;
        Buffer row;
        row.name = "shared" + std::to_string(buffers.size());
        row.dtype = t;
        row.numel = size;
        row.kind = loops::BufferKind::Scratch;
        buffers.push_back(row);
        Inst store;
        store.op = Opcode::Store;
        store.dtype = t;
        store.buffer = static_cast<BufferId>(buffers.size()) - 1;
        store.index = row_index(n, n.stages[j]);
        store.args = {first};
        Inst load;
        load.op = Opcode::Load;
        load.dtype = t;
        load.buffer = store.buffer;
        load.index = row_index(n, n.stages[k]);
        n.stages[j].body.push_back(n.add(std::move(store)));
        const ValueId loaded = n.add(std::move(load));
        auto& now = n.stages[k].body;
        now.insert(std::find(now.begin(), now.end(), id), loaded);
        for (ValueId user : body)
          for (ValueId& a : n.insts[user].args)
            if (a == id) a = loaded;
      }
    }
  compact(n);
}

}  // namespace kiln::schedule
