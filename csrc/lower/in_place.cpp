// Writes to memory that holds something already: inputs that the program changes, and parts of tensors. A functional
// graph says c[2:4] = x as slice_scatter(c, x), a new tensor. Where nobody needs the old one any more, only the part is
// written, to the old one's memory.
#include <algorithm>

#include "base/error.h"
#include "graph/passes/passes.h"
#include "lower/lowering.h"

namespace kiln::lower {
namespace {

// A part of a temporary that is not this many times smaller than the whole is computed in its readers' loops, as
// anything else: that may save the whole a place in memory.
constexpr int64_t kSmallPart = 4;

const graph::Op kSliceScatter("aten::slice_scatter"), kSelectScatter("aten::select_scatter"),
    kDiagonalScatter("aten::diagonal_scatter");

bool writes_slice(const Node& n) { return n.op == kSliceScatter || n.op == kSelectScatter || n.op == kDiagonalScatter; }

/// Whether the op writes elements of its first argument at places that are computed, by scatter_into().
bool writes_places(const Node& n) {
  static const auto* ops = new std::unordered_set<graph::Op>{
      graph::Op("aten::index_put"),
      graph::Op("aten::_unsafe_index_put"),
      graph::Op("aten::index_copy"),
      graph::Op("aten::scatter.src"),
      graph::Op("aten::scatter.value"),
      graph::Op("aten::scatter_add"),
      graph::Op("aten::index_add"),
      graph::Op("aten::index_fill.int_Scalar"),
      graph::Op("aten::index_fill.int_Tensor"),
      graph::Op("aten::put"),
  };
  return ops->count(n.op) != 0;
}

/// Whether writing twice leaves what writing once does.
bool assigns(const Node& n) {
  static const graph::Op kScatterAdd("aten::scatter_add"), kIndexAdd("aten::index_add");
  if (n.op == kScatterAdd || n.op == kIndexAdd) return false;
  static const graph::Op kIndexPut("aten::index_put"), kUnsafePut("aten::_unsafe_index_put"), kPut("aten::put");
  return (n.op != kIndexPut && n.op != kUnsafePut && n.op != kPut) || !n.arg(3).to_bool();
}

/// Whether the sums are formed in another memory, of a wider dtype (scatter_into's `wide`).
bool sums_wide(const Node& n) {
  static const graph::Op kScatterAdd("aten::scatter_add");
  return n.op == kScatterAdd && compute_type(n.results[0].dtype) != n.results[0].dtype;
}

/// Whether no two elements share a place.
bool is_injective(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (t.sizes[d] > 1) dims.emplace_back(t.strides[d], t.sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return false;
    extent = stride * (size - 1) + extent;
  }
  return true;
}

bool reads(const Tensor& t, BufferId b) {
  if (t.strided()) return t.buffer == b;
  return std::binary_search(t.lazy->buffers.begin(), t.lazy->buffers.end(), b);
}

}  // namespace

bool same_place(const Tensor& a, const Tensor& b) {
  return a.strided() && a.buffer == b.buffer && a.offset == b.offset && a.sizes == b.sizes &&
         same_layout(a.sizes, a.strides, b.strides);
}

bool call_may_raise(const Node& n) {
  // Of fitting shapes these never do.
  static const auto* never =
      new std::unordered_set<graph::Op>{graph::Op("aten::mm"),
                                        graph::Op("aten::addmm"),
                                        graph::Op("aten::bmm"),
                                        graph::Op("aten::baddbmm"),
                                        graph::Op("aten::convolution"),
                                        graph::Op("aten::convolution_backward"),
                                        graph::Op("aten::_scaled_dot_product_flash_attention_for_cpu"),
                                        graph::Op("aten::_scaled_dot_product_flash_attention_for_cpu_backward")};
  return !never->count(n.op);
}

void Lowering::find_users() {
  const auto writes_part = [](const auto& n) { return writes_slice(*n) || writes_places(*n); };
  if (!options_.in_place || std::none_of(g_.nodes().begin(), g_.nodes().end(), writes_part)) return;
  int at = 0;
  for (const auto& n : g_.nodes()) {
    position_[n.get()] = at++;
    if (n->kind != graph::NodeKind::Call || !is_live(*n)) continue;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](graph::Value v) {
        if (v) users_[v].push_back(n.get());
      });
    if (graph::may_raise(*n) || (!has_rule(n->op) && call_may_raise(*n))) last_raise_ = position_[n.get()];
  }
  for (const Arg& a : g_.outputs())
    graph::for_each_value(a, [&](graph::Value v) {
      if (v) users_[v].push_back(nullptr);
    });
  for (const auto& m : g_.mutations()) users_[m.value].push_back(nullptr);
}

bool Lowering::is_used_after(graph::Value v, const Node& n, const std::vector<const Node*>& besides) const {
  const auto it = users_.find(v);
  if (it == users_.end()) return false;
  const int at = position_.at(&n);
  return std::any_of(it->second.begin(), it->second.end(), [&](const Node* user) {
    return !user || (position_.at(user) > at && std::find(besides.begin(), besides.end(), user) == besides.end());
  });
}

std::optional<Tensor> Lowering::slice_of(const Node& n, const Tensor& self) const {
  if (!writes_slice(n) || !self.strided() || self.dim() == 0) return std::nullopt;
  const TensorMeta& src = n.arg(1).value().meta();
  const auto dim = [&](size_t arg) { return wrap_dim(n.arg(arg).to_int(), self.dim()); };
  Tensor to;
  if (n.op == kSelectScatter) {
    const int64_t index = n.arg(3).to_int();
    to = without_dim(*this, self, dim(2), index < 0 ? index + self.sizes[dim(2)] : index);
  } else if (src.dim() == 0) {
    return std::nullopt;
  } else if (n.op == kDiagonalScatter) {
    to = diagonal_of(*this, self, n.arg(2).to_int(), dim(3), dim(4), src.sizes.back());
  } else {
    if (src.dim() != self.dim()) return std::nullopt;
    to = sliced(*this, self, dim(2), slice_start(n.arg(3), self.sizes[dim(2)]), n.arg(5).to_int(), src.sizes[dim(2)]);
  }
  if (to.sizes != src.sizes || src.dtype != self.dtype) return std::nullopt;
  return to;
}

std::optional<Tensor> Lowering::view_at(const Node& view, const Tensor& base) {
  const Rule rule = rule_of(view.op);
  if (!rule || view.results.size() != 1) return std::nullopt;
  const graph::Value from = view.args[0].value(), to = const_cast<Node&>(view).out();
  const auto before = values_.find(from);
  std::optional<Tensor> kept;
  if (before != values_.end()) kept = before->second;
  values_[from] = base;
  std::optional<Tensor> result;
  const size_t items = out_.program.items.size();
  if (rule(*this, view) && values_.at(to).strided()) result = values_.at(to);
  KILN_CHECK(items == out_.program.items.size(), "a view of memory computed something: " + view.name);
  values_.erase(to);
  if (kept)
    values_[from] = *kept;
  else
    values_.erase(from);
  return result;
}

std::vector<const Node*> Lowering::put_back_by(const Node& n, Tensor place) {
  std::vector<const Node*> chain;
  graph::Value v = const_cast<Node&>(n).out();
  for (;;) {
    const auto it = users_.find(v);
    if (it == users_.end() || it->second.size() != 1 || !it->second[0]) return chain;
    const Node& user = *it->second[0];
    if (writes_slice(user) && user.arg(1).value() == v && user.arg(0).value() != v) {
      const auto self = values_.find(user.arg(0).value());
      if (self == values_.end()) return chain;
      const std::optional<Tensor> part = slice_of(user, self->second);
      if (!part || !same_place(*part, place)) return chain;
      chain.push_back(&user);
      place = self->second;
    } else if (is_view(user.op) && user.args.at(0).is_value() && user.args[0].value() == v) {
      const std::optional<Tensor> seen = view_at(user, place);
      if (!seen) return chain;
      place = *seen;
    } else {
      return chain;
    }
    v = const_cast<Node&>(user).out();
  }
}

bool Lowering::reads_elsewhere(const Tensor& t, const Tensor& to) const {
  if (t.strided()) return t.buffer == to.buffer && !same_place(t, to);
  if (!reads(t, to.buffer) || to.numel() == 0) return false;
  loops::NestBuilder probe(buffers(), "probe", to.sizes);
  probe.stage({});
  {
    EvalScope scope;
    t.load(probe, probe.outer());
  }
  const Expr at = symbolic::linearize(probe.outer(), to.strides, to.offset);
  const loops::Nest nest = probe.finish();
  return std::any_of(nest.insts.begin(), nest.insts.end(),
                     [&](const loops::Inst& i) { return i.buffer == to.buffer && !(i.index == at); });
}

bool Lowering::is_read_so_far(BufferId b) {
  for (const auto& items = out_.program.items; scanned_ < items.size(); ++scanned_) {
    const loops::Program::Item& item = items[scanned_];
    if (item.is_nest) {
      for (const loops::Inst& i : out_.program.nests[item.index].insts)
        if (i.buffer >= 0 && i.op != Opcode::Store) read_.insert(i.buffer);
    } else {
      const auto& list = out_.program.externs[item.index].reads;
      read_.insert(list.begin(), list.end());
    }
  }
  return read_.count(b) != 0;
}

void Lowering::choose_place(const Node& n) {
  if (users_.empty() || !(writes_slice(n) || writes_places(n))) return;
  const graph::Value of = n.arg(0).value();
  const Tensor self = get(of);
  const bool fits = self.strided() && self.numel() > 0 && self.sizes == n.results[0].sizes &&
                    self.dtype == n.results[0].dtype && is_injective(self);
  if (!fits || sums_wide(n)) return;
  const BufferId b = self.buffer;
  const bool input = buffers()[b].kind == loops::BufferKind::Input;
  if (input ? !mutated_.count(b) || g_.asked.has_value() : buffers()[b].kind != loops::BufferKind::Temp) return;
  const std::optional<Tensor> part = slice_of(n, self);
  if (writes_slice(n) && (!part || (!input && part->numel() * kSmallPart > self.numel()))) return;

  if (part && same_place(get(n.arg(1)), *part)) {
    place_ = self;  // the part was written in place: nothing is left to do
    return;
  }

  // What needs the memory as it is: later nodes' arguments, and the node's own. It is computed now.
  std::vector<graph::Value> own, old;
  for (size_t i = 1; i < n.args.size(); ++i)
    graph::for_each_value(n.args[i], [&](graph::Value v) {
      if (v) own.push_back(v);
    });
  const auto is_own = [&](graph::Value v) { return std::find(own.begin(), own.end(), v) != own.end(); };
  const auto is_mask = [](graph::Value v) { return v.meta().dtype == DType::Bool; };
  if (is_own(of) || (self.dtype != DType::Bool && std::any_of(own.begin(), own.end(), is_mask))) return;
  const bool reads_itself = std::any_of(own.begin(), own.end(), [&](graph::Value v) { return reads(get(v), b); });
  const std::vector<const Node*> chain = put_back_by(n, self);
  int64_t copied = 0;
  for (const auto& [v, t] : values_) {
    const bool owned = is_own(v);
    bool stays = true;
    if (reads(t, b))
      stays = !is_used_after(v, n, chain) && !(owned && (!part || reads_elsewhere(t, *part)));
    else if (input && t.may_raise())  // eager has raised that error before it writes
      stays = !is_used_after(v, n, {}) && !owned;
    if (stays) continue;
    old.push_back(v);
    copied += t.numel();
  }
  if (copied * 2 > self.numel()) return;
  // After an error the call is run again in eager, which must find what was there before, or write the same.
  const bool again = assigns(n) && !reads_itself && !(input && is_read_so_far(b)) &&
                     std::none_of(old.begin(), old.end(), [&](graph::Value v) { return reads(get(v), b); });
  const bool restore = input && !again && last_raise_ >= position_.at(&n);
  const bool keep = restore && last_raise_ > position_.at(&n);
  if (keep)
    for (graph::Value v : own) copied += get(v).numel();
  if (copied * 2 > self.numel()) return;

  std::sort(old.begin(), old.end(), [&](graph::Value x, graph::Value y) {
    return std::pair(position_.at(x.node), x.index) < std::pair(position_.at(y.node), y.index);
  });
  for (graph::Value v : old) {
    const Tensor t = get(v);
    const std::string name = name_of(*v.node, v.index) + "_before_" + std::to_string(kept_++);
    Tensor copy = new_temp(name, t.dtype, t.sizes);
    store(t, copy, name);
    values_[v] = std::move(copy);
  }
  // Nobody may take what is no longer there.
  std::erase_if(values_, [&](const auto& item) {
    const auto& [v, t] = item;
    return reads(t, b) && v.node->kind == graph::NodeKind::Call && !(v == of) && !is_own(v) && !is_used_after(v, n, {});
  });
  if (input) writes_same_.emplace(b, true).first->second &= again || restore;
  if (restore && !part) before_write_ = keep ? Before::Keep : Before::Check;
  if (keep && part) {
    const auto at = [p = *part](Ops& o, Index i) {
      return o.index_value(symbolic::linearize({i.begin(), i.end()}, p.strides, p.offset));
    };
    keep_elements(n, self, lazy(DType::Int64, part->sizes, at, {}, 4), *part);
  }
  ordered_ = input;
  place_ = self;
}

void Lowering::check_places(const Node& n, const Tensor& places) {
  const bool ordered = std::exchange(ordered_, false);
  // Nobody reads them; their errors stay.
  store(places, new_temp(name_of(n) + "_places", places.dtype, places.sizes), name_of(n) + "_check");
  ordered_ = ordered;
}

void Lowering::keep_elements(const Node& n, const Tensor& to, const Tensor& places, const Tensor& old) {
  const bool ordered = std::exchange(ordered_, false);
  const auto keep = [&](const Tensor& t, const std::string& name) {
    const Tensor kept = new_temp(name, t.dtype, t.sizes);
    // Not in the arena: it is read after the last step.
    out_.program.buffers[kept.buffer].kind = loops::BufferKind::Output;
    store(t, kept, name);
    return kept.buffer;
  };
  const BufferId where = keep(places, name_of(n) + "_places"), what = keep(old, name_of(n) + "_old");
  out_.kept_elements.push_back({to.buffer, where, what});
  ordered_ = ordered;
}

bool Lowering::is_partly_new(graph::Value v, const Tensor& to) const {
  for (;;) {
    if (get(v).strided() || get(v).may_raise() || !slice_of(*v.node, to)) return false;
    const Node& n = *v.node;
    v = n.arg(0).value();
    if (!values_.count(v) || !values_.count(n.arg(1).value())) return false;
    if (same_place(get(v), to)) return true;
  }
}

void Lowering::store_changes(graph::Value v, const Tensor& to, const std::string& name, std::vector<Write>& writes) {
  const Tensor& t = get(v);
  if (same_place(t, to)) return;
  if (options_.in_place && is_partly_new(v, to)) {
    const std::optional<Tensor> part = slice_of(*v.node, to);
    store_changes(v.node->arg(0).value(), to, name, writes);
    store_changes(v.node->arg(1).value(), *part, name, writes);
  } else {
    writes.push_back({t, to, name});
  }
}

void Lowering::lower_mutations() {
  for (size_t i = 0; i < g_.inputs().size(); ++i)
    for (const auto& m : g_.mutations())
      if (m.input.node == g_.inputs()[i]) out_.mutated.push_back({i, m.uncounted});
  // First everything that still needs an old value of some input goes to a temp, then all inputs are written. What only
  // reads the element that it replaces (an optimizer's update) is computed in place.
  std::vector<Write> writes;
  for (const auto& m : g_.mutations()) store_changes(m.value, get(m.input), m.input.node->name + "_new", writes);
  std::unordered_map<BufferId, int> times;
  for (Write& w : writes)
    if (const int n = times[w.to.buffer]++) w.name += "_" + std::to_string(n);
  for (Write& w : writes) {
    const bool stale = std::any_of(mutated_.begin(), mutated_.end(), [&](BufferId b) {
      return reads(w.value, b) && (b != w.to.buffer || times[b] > 1 || reads_elsewhere(w.value, w.to));
    });
    writes_same_[w.to.buffer] = false;
    if (!stale) continue;
    Tensor temp = new_temp(w.name, w.value.dtype, w.value.sizes);
    store(w.value, temp, w.name);
    w.value = std::move(temp);
  }
  for (Lowered::Mutated& m : out_.mutated) {
    const auto same = writes_same_.find(out_.inputs[m.input]);
    m.writes_same = same != writes_same_.end() && same->second;
  }
  for (const Write& w : writes) {
    // A part is of something large, of which nothing is kept for an error. (The others may join what computes them.)
    ordered_ = w.to.numel() < buffers()[w.to.buffer].numel;
    store(w.value, w.to, w.name);
  }
  ordered_ = false;
}

}  // namespace kiln::lower
