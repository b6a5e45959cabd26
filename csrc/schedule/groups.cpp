#include "schedule/groups.h"

#include <limits>
#include <numeric>
#include <set>

#include "base/error.h"
#include "schedule/fuse.h"

namespace kiln::schedule {

namespace {
void add_once(std::vector<BufferId>& list, BufferId b) {
  if (std::find(list.begin(), list.end(), b) == list.end()) list.push_back(b);
}
}  // namespace

bool Group::raises(const std::vector<loops::Extern>& externs) const {
  if (is_extern) return externs[extern_index].raises;
  return std::any_of(nest.stages.begin(), nest.stages.end(), [&](const Stage& s) {
    return std::any_of(s.body.begin(), s.body.end(), [&](ValueId id) { return nest.insts[id].op == Opcode::Indirect; });
  });
}

Touches touches(const Group& g, const std::vector<loops::Extern>& externs) {
  Touches t;
  if (g.is_extern) {
    t.reads = externs[g.extern_index].reads;
    t.writes = externs[g.extern_index].writes;
    return t;
  }
  for (const Stage& s : g.nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = g.nest.insts[id];
      if (i.buffer < 0) continue;
      if (i.op == Opcode::Store) {
        add_once(t.writes, i.buffer);
        if (i.mode == loops::StoreMode::Add) add_once(t.reads, i.buffer);
      } else {
        add_once(t.reads, i.buffer);
      }
    }
  return t;
}

namespace {

/// The greedy fusion of groups over their dependency graph.
class Grouper {
 public:
  Grouper(const loops::Program& p, const Options& o) : p_(p), options_(o) {}

  std::vector<Group> run() {
    make_groups();
    make_edges();
    if (options_.fusion) {
      find_spine();
      for (int rounds = 0; rounds < 2; ++rounds) {
        bool changed = false;
        for (size_t g = 0; g < groups_.size(); ++g) changed |= absorb(static_cast<int>(g));
        if (!changed) break;
      }
    }
    return in_order();
  }

 private:
  void make_groups() {
    for (size_t k = 0; k < p_.items.size(); ++k) {
      Group g;
      g.first_item = static_cast<int>(k);
      if (p_.items[k].is_nest) {
        g.nest = p_.nests[p_.items[k].index];
        g.not_before = std::exchange(g.nest.not_before, 0);
        if (is_empty(g.nest)) continue;
        reuse_values(g.nest);
        compact(g.nest);
        if (g.nest.stages.empty()) continue;
        if (options_.fusion) {
          expand_two_pass(g.nest, options_);
          split_divided_vars(g.nest);
        }
      } else {
        g.is_extern = true;
        g.extern_index = p_.items[k].index;
      }
      touches_.push_back(touches(g, p_.externs));
      groups_.push_back(std::move(g));
    }
    alive_.assign(groups_.size(), true);
    succ_.resize(groups_.size());
    pred_.resize(groups_.size());
    marks_.assign(groups_.size(), 0);
    order_.resize(groups_.size());
    std::iota(order_.begin(), order_.end(), 0);
    at_ = order_;
  }

  void edge(int from, int to) {
    if (from == to || from < 0) return;
    succ_[from].insert(to);
    pred_[to].insert(from);
  }

  void make_edges() {
    std::unordered_map<BufferId, int> writer;
    std::unordered_map<BufferId, std::vector<int>> readers;
    int last_effect = -1;
    std::vector<int> raising;
    for (size_t k = 0; k < groups_.size(); ++k) {
      const int g = static_cast<int>(k);
      if (groups_[k].nest.after_errors)
        for (int r : raising) edge(r, g);
      if (groups_[k].raises(p_.externs)) raising.push_back(g);
      for (BufferId b : touches_[k].reads) {
        if (const auto it = writer.find(b); it != writer.end()) edge(it->second, g);
        readers[b].push_back(g);
      }
      for (BufferId b : touches_[k].writes) {
        if (const auto it = writer.find(b); it != writer.end()) edge(it->second, g);
        for (int r : readers[b]) edge(r, g);
        readers[b].clear();
        writer[b] = g;
      }
      if (groups_[k].is_extern && p_.externs[groups_[k].extern_index].effect) {
        edge(last_effect, g);
        last_effect = g;
      }
      for (BufferId b : touches_[k].reads) users_[b].push_back(g);
      for (BufferId b : touches_[k].writes)
        if (users_[b].empty() || users_[b].back() != g) users_[b].push_back(g);
    }
  }

  /// Numbers a longest path of the graph, and tells for each group where one comes from it to the path first, and from
  /// where on the path one last comes to it.
  void find_spine() {
    const size_t n = groups_.size();
    std::vector<int> length(n, 0), next(n, -1), place(n, -1);
    size_t at = 0;
    for (size_t g = n; g-- > 0;) {
      for (int s : succ_[g])
        if (length[s] >= length[g]) length[g] = length[s] + 1, next[g] = s;
      if (length[g] >= length[at]) at = g;
    }
    if (n > 0)
      for (int g = static_cast<int>(at), k = 0; g >= 0; g = next[g]) place[g] = k++;
    reaches_.assign(n, std::numeric_limits<int>::max());
    reached_.assign(n, -1);
    for (size_t g = n; g-- > 0;) {
      if (place[g] >= 0) reaches_[g] = place[g];
      for (int s : succ_[g]) reaches_[g] = std::min(reaches_[g], reaches_[s]);
    }
    for (size_t g = 0; g < n; ++g) {
      if (place[g] >= 0) reached_[g] = place[g];
      for (int p : pred_[g]) reached_[g] = std::max(reached_[g], reached_[p]);
    }
  }

  /// Whether a long path leads from `a` to `b`, without walking it: the forward and the backward of one step of a loop
  /// have the other steps between them.
  bool far_apart(int a, int b) const {
    constexpr int kLong = 64;  // more than one group holds of the path
    return reaches_[a] < reached_[b] && reached_[b] - reaches_[a] > kLong;
  }

  /// Whether a path leads from `a` to `b` over others. If not, marks what can be reached from `a` among the groups that
  /// stand before `b` in order_.
  bool indirect_path(int a, int b) {
    ++mark_;
    std::vector<int> work{a};
    while (!work.empty()) {
      const int g = work.back();
      work.pop_back();
      for (int s : succ_[g]) {
        if (s == b && g != a) return true;
        if (order_[s] >= order_[b] || marks_[s] == mark_) continue;
        marks_[s] = mark_;
        work.push_back(s);
      }
    }
    return false;
  }

  /// Gives `y` a place in order_ that suits the edges of `first` as well, which the last indirect_path(first, second)
  /// started from: what follows from `first` moves behind.
  void reorder(int first, int second, int y) {
    const int begin = order_[first], end = order_[second];
    std::vector<int> after;
    int to = begin;
    for (int k = begin; k <= end; ++k) {
      const int g = at_[k];
      if (g < 0 || g == first || g == second) continue;
      if (marks_[g] == mark_)
        after.push_back(g);
      else
        at_[to++] = g;
    }
    at_[to++] = y;
    for (int g : after) at_[to++] = g;
    while (to <= end) at_[to++] = -1;
    for (int k = begin; k <= end; ++k)
      if (at_[k] >= 0) order_[at_[k]] = k;
  }

  /// The groups before `g` that have buffers in common with it, by how many bytes. Of the groups that touch one buffer
  /// (a weight, in a loop that was unrolled) only the nearest ones.
  std::vector<std::pair<int64_t, int>> sharing(int g, const std::set<int>& but) {
    constexpr size_t kNearest = 64, kMost = 8;
    std::vector<std::pair<int64_t, int>> found;
    std::unordered_map<int, size_t> place;
    std::vector<BufferId> touched = touches_[g].reads;
    for (BufferId b : touches_[g].writes) add_once(touched, b);
    for (BufferId b : touched) {
      const int64_t bytes = std::max<int64_t>(p_.buffers[b].numel, 1) * dtype_size(p_.buffers[b].dtype);
      std::vector<int>& users = users_[b];
      std::erase_if(users, [&](int other) { return !alive_[other]; });
      std::vector<int> near;
      for (auto it = users.rbegin(); it != users.rend() && near.size() < kNearest; ++it)
        if (!groups_[*it].is_extern && groups_[*it].first_item < groups_[g].first_item && !but.contains(*it))
          near.push_back(*it);
      for (auto it = near.rbegin(); it != near.rend(); ++it) {
        const auto [entry, fresh] = place.emplace(*it, found.size());
        if (fresh) found.push_back({0, *it});
        found[entry->second].first += bytes;
      }
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    if (found.size() > kMost) found.resize(kMost);
    return found;
  }

  bool absorb(int g) {
    if (!alive_[g] || groups_[g].is_extern) return false;
    bool changed = false;
    std::set<int> failed;
    for (bool again = true; again;) {
      again = false;
      for (const auto& [bytes, other] : sharing(g, failed)) {
        if (try_fuse(other, g)) {
          changed = again = true;
          break;
        }
        failed.insert(other);
      }
    }
    return changed;
  }

  /// Fuses x and y into y.
  bool try_fuse(int x, int y) {
    const int first = order_[x] < order_[y] ? x : y, second = first == x ? y : x;
    if (far_apart(first, second) || indirect_path(first, second)) return false;
    const int not_before = std::max(groups_[x].not_before, groups_[y].not_before);
    if (std::min(groups_[x].first_item, groups_[y].first_item) < not_before) return false;
    const auto divided = [&](int a, int b) { return groups_[a].nest.after_errors && groups_[b].raises(p_.externs); };
    if (divided(x, y) || divided(y, x)) return false;
    const bool turned = succ_[y].contains(x);
    std::optional<Nest> fused =
        fuse_nests(groups_[turned ? y : x].nest, groups_[turned ? x : y].nest, p_.buffers, options_);
    if (!fused) return false;
    compact(*fused);
    fused->after_errors = groups_[x].nest.after_errors || groups_[y].nest.after_errors;
    reorder(first, second, y);
    groups_[y].nest = std::move(*fused);
    groups_[y].not_before = not_before;
    reaches_[y] = std::min(reaches_[x], reaches_[y]);
    reached_[y] = std::max(reached_[x], reached_[y]);
    groups_[y].first_item = std::min(groups_[x].first_item, groups_[y].first_item);
    alive_[x] = false;
    for (int s : succ_[x]) {
      pred_[s].erase(x);
      edge(y, s);
    }
    for (int s : pred_[x]) {
      succ_[s].erase(x);
      edge(s, y);
    }
    succ_[x].clear();
    pred_[x].clear();
    succ_[y].erase(y);
    pred_[y].erase(y);
    for (const auto* list : {&touches_[x].reads, &touches_[x].writes})
      for (BufferId b : *list) add_user(b, y);
    // Loads that were forwarded are gone, but their edges stay: harmless, and the order is right.
    touches_[y] = touches(groups_[y], p_.externs);
    return true;
  }

  void add_user(BufferId b, int g) {
    std::vector<int>& list = users_[b];
    if (std::find(list.begin(), list.end(), g) == list.end()) list.push_back(g);
  }

  /// By when each group is wanted, as a program position: a fused one stands where its first member stood, and what
  /// the others of its members wait for is wanted by then.
  std::vector<int> wanted() const {
    std::vector<int> at(groups_.size()), waiting(groups_.size()), work;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (!alive_[g]) continue;
      at[g] = groups_[g].first_item;
      waiting[g] = static_cast<int>(succ_[g].size());
      if (waiting[g] == 0) work.push_back(static_cast<int>(g));
    }
    while (!work.empty()) {
      const int g = work.back();
      work.pop_back();
      for (int s : succ_[g]) at[g] = std::min(at[g], at[s]);
      at[g] = std::max(at[g], groups_[g].not_before);
      for (int p : pred_[g])
        if (--waiting[p] == 0) work.push_back(p);
    }
    return at;
  }

  std::vector<Group> in_order() {
    const std::vector<int> position = wanted();
    std::vector<int> waiting(groups_.size());
    std::set<std::pair<int, int>> ready;  // (position, group)
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (!alive_[g]) continue;
      waiting[g] = static_cast<int>(pred_[g].size());
      if (waiting[g] == 0) ready.insert({position[g], static_cast<int>(g)});
    }
    std::vector<Group> out;
    size_t alive = 0;
    for (size_t g = 0; g < groups_.size(); ++g) alive += alive_[g];
    while (!ready.empty()) {
      const int g = ready.begin()->second;
      ready.erase(ready.begin());
      for (int s : succ_[g])
        if (--waiting[s] == 0) ready.insert({position[s], s});
      out.push_back(std::move(groups_[g]));
    }
    KILN_CHECK(out.size() == alive, "fusion made a cycle");
    return out;
  }

  const loops::Program& p_;
  const Options& options_;
  std::vector<Group> groups_;
  std::vector<Touches> touches_;
  std::vector<bool> alive_;
  std::vector<std::set<int>> succ_, pred_;
  std::vector<int> order_, at_;  // a topological order: places of groups, and the groups (-1: none) at the places
  std::vector<int> reaches_, reached_;  // places on the longest path
  std::vector<int> marks_;
  int mark_ = 0;
  std::unordered_map<BufferId, std::vector<int>> users_;
};

}  // namespace

std::vector<Group> group_program(const loops::Program& program, const Options& options) {
  return Grouper(program, options).run();
}

void drop_dead_stores(std::vector<Group>& groups, const std::vector<Buffer>& buffers,
                      const std::vector<loops::Extern>& externs) {
  std::vector<int> reads(buffers.size(), 0);
  for (const Group& g : groups)
    for (BufferId b : touches(g, externs).reads) ++reads[b];
  for (bool again = true; again;) {
    again = false;
    for (size_t k = groups.size(); k-- > 0;) {
      Group& g = groups[k];
      if (g.is_extern) continue;
      const Touches before = touches(g, externs);
      std::vector<BufferId> loaded;
      for (const Stage& s : g.nest.stages)
        for (ValueId id : s.body)
          if (const Inst& i = g.nest.insts[id]; i.op == Opcode::Load || i.op == Opcode::MaskedLoad)
            add_once(loaded, i.buffer);
      // An adding store reads its buffer, but that alone keeps nothing alive.
      const auto read_only_by_adding = [&](BufferId b) {
        return reads[b] == 1 && std::count(before.reads.begin(), before.reads.end(), b) &&
               !std::count(loaded.begin(), loaded.end(), b);
      };
      bool changed = false;
      for (Stage& s : g.nest.stages)
        std::erase_if(s.body, [&](ValueId id) {
          const Inst& i = g.nest.insts[id];
          const bool dead = i.op == Opcode::Store && buffers[i.buffer].kind == loops::BufferKind::Temp &&
                            (reads[i.buffer] == 0 || read_only_by_adding(i.buffer));
          changed |= dead;
          return dead;
        });
      if (!changed) continue;
      compact(g.nest);
      const Touches after = touches(g, externs);
      for (BufferId b : before.reads) --reads[b];
      for (BufferId b : after.reads) ++reads[b];
      again = true;
    }
  }
  std::erase_if(groups, [](const Group& g) { return !g.is_extern && g.nest.stages.empty(); });
}

void contract_temps(std::vector<Group>& groups, std::vector<Buffer>& buffers,
                    const std::vector<loops::Extern>& externs) {
  std::vector<int> users(buffers.size(), 0);
  for (const Group& g : groups) {
    const Touches t = touches(g, externs);
    std::vector<BufferId> all = t.reads;
    for (BufferId b : t.writes) add_once(all, b);
    for (BufferId b : all) ++users[b];
  }
  for (Group& g : groups) {
    if (g.is_extern || prefer_columns(g.nest)) continue;
    for (BufferId b : touches(g, externs).writes) {
      if (buffers[b].kind != loops::BufferKind::Temp || users[b] != 1) continue;
      // Every access must be the same outer part plus the same inner digits.
      std::optional<std::vector<std::pair<int64_t, int64_t>>> outer_digits,
          inner_digits;  // (stride, variable | extent)
      bool ok = true;
      std::vector<Inst*> accesses;
      for (Stage& s : g.nest.stages)
        for (ValueId id : s.body) {
          Inst& i = g.nest.insts[id];
          if (i.buffer != b) continue;
          accesses.push_back(&i);
          const auto f = as_affine(i.index);
          ok &= f.has_value() && i.mode == loops::StoreMode::Assign && i.op != Opcode::MaskedLoad && f->offset == 0;
          if (!ok) break;
          std::vector<std::pair<int64_t, int64_t>> out, in;
          for (const Digit& d : f->digits) {
            if (std::count(g.nest.outer.begin(), g.nest.outer.end(), d.var))
              out.push_back({d.stride, d.var});
            else
              in.push_back({d.stride, g.nest.extents[d.var]});
          }
          if (!outer_digits) outer_digits = out, inner_digits = in;
          ok &= *outer_digits == out && *inner_digits == in;
        }
      if (!ok || accesses.empty()) continue;
      int64_t size = 1;
      std::vector<std::pair<int64_t, int64_t>> dense;  // old stride -> new stride
      for (const auto& [stride, extent] : *inner_digits) {
        dense.push_back({stride, size});
        size *= extent;
      }
      if (size * dtype_size(buffers[b].dtype) > (int64_t{1} << 20)) continue;
      Buffer row = buffers[b];
      row.name += "_row";
      row.numel = size;
      row.kind = loops::BufferKind::Scratch;
      buffers.push_back(row);
      for (Inst* i : accesses) {
        Expr index(0);
        const Affine f = *as_affine(i->index);
        for (const Digit& d : f.digits)
          for (const auto& [old_stride, new_stride] : dense)
            if (d.stride == old_stride && !std::count(g.nest.outer.begin(), g.nest.outer.end(), d.var))
              index += g.nest.var(d.var) * Expr(new_stride);
        i->index = index;
        i->buffer = static_cast<BufferId>(buffers.size()) - 1;
      }
    }
  }
}

}  // namespace kiln::schedule
