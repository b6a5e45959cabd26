#include "lower/lowering.h"

#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"

namespace kiln::lower {

bool has_effect(const Node& n) {
  // An op of another library may do anything; ATen's functional ops do nothing besides drawing numbers and raising.
  const std::string& name = n.op.name();
  return draws_random(n.op) || graph::runs_unused(n) || !(name.starts_with("aten::") || name.starts_with("kiln::"));
}

namespace {

// Inlining limits: a value with one consumer is computed in its consumer's loops until it has grown this dear.
constexpr int kMaxOps = 160, kMaxLoads = 24;
// What is cheaper to compute again than to store and read back.
constexpr int kCheapOps = 4;
// What has so many times fewer elements than its reader stays in the caches.
constexpr int64_t kSmall = 8;
// Operations for an element that are worth a store and a load.
constexpr int64_t kSpreadOps = (kSmall - 1) * kCheapOps;

// Evaluating a lazy value twice at one point (x * x) must not double the work at every level of a chain: values are
// remembered per evaluation of a nest's function, that is per stage.
struct MemoKey {
  const Lazy* lazy;
  std::vector<Expr> index;
  bool operator==(const MemoKey&) const = default;
};
struct MemoHash {
  size_t operator()(const MemoKey& k) const {
    size_t h = std::hash<const void*>{}(k.lazy);
    for (const Expr& e : k.index) h = h * 31 + e.hash();
    return h;
  }
};
using Memo = std::unordered_map<MemoKey, Val, MemoHash>;
thread_local Memo* memo = nullptr;

std::unordered_map<graph::Op, Rule> make_rules() {
  std::unordered_map<graph::Op, Rule> rules;
  for (auto table : {pointwise_rules(), view_rules(), reduction_rules(), index_rules(), copy_rules(), pool_rules()})
    for (const RuleRow& row : table) rules[graph::Op(row.op)] = row.rule;
  return rules;
}
const std::unordered_map<graph::Op, Rule>& rules() {
  static const auto* table = new std::unordered_map<graph::Op, Rule>(make_rules());
  return *table;
}

}  // namespace

int64_t extent_of(const Sizes& sizes, const Sizes& strides) {
  int64_t n = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    n += (sizes[i] - 1) * strides[i];
  }
  return n;
}

bool same_layout(const Sizes& sizes, const Sizes& a, const Sizes& b) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] > 1 && a[i] != b[i]) return false;
  }
  return true;
}

Rule rule_of(const graph::Op& op) {
  const auto it = rules().find(op);
  return it == rules().end() ? nullptr : it->second;
}

bool has_rule(const graph::Op& op) { return rule_of(op) != nullptr; }

bool is_view(const graph::Op& op) {
  static const auto* views = [] {
    auto* s = new std::unordered_set<graph::Op>{graph::Op("aten::view_as_real"), graph::Op("aten::view_as_complex")};
    for (const RuleRow& row : view_rules()) s->insert(graph::Op(row.op));
    return s;
  }();
  return views->count(op) != 0;
}

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return n;
}

Val Tensor::load(Ops& ops, Index index) const {
  if (strided()) return ops.load(buffer, symbolic::linearize({index.begin(), index.end()}, strides, offset));
  if (!memo) return lazy->fn(ops, index);
  MemoKey key{lazy.get(), {index.begin(), index.end()}};
  if (auto it = memo->find(key); it != memo->end()) return it->second;
  const Val v = lazy->fn(ops, index);
  memo->emplace(std::move(key), v);
  return v;
}

EvalScope::EvalScope() : outer_(memo) { memo = new Memo; }
EvalScope::~EvalScope() {
  delete memo;
  memo = static_cast<Memo*>(outer_);
}

Val load_if(Ops& ops, const Tensor& t, Val mask, Index index, Val other) {
  KILN_CHECK(t.strided(), "a masked load needs memory");
  return ops.masked_load(t.buffer, symbolic::linearize({index.begin(), index.end()}, t.strides, t.offset), mask, other);
}

Val load_if(Ops& ops, const Tensor& t, Val mask, Index index, double other) {
  return load_if(ops, t, mask, index, constant_of(ops, Arg(other), t.dtype));
}

Val constant_of(Ops& ops, const Arg& number, DType t) {
  if (is_floating(t)) return ops.constant_float(t, number.to_double());
  if (t == DType::Bool) return ops.constant_int(t, number.to_double() != 0);
  return ops.constant_int(t, number.is<double>() ? static_cast<int64_t>(number.to_double()) : number.to_int());
}

DType compute_type(DType t) { return t == DType::Float16 || t == DType::BFloat16 ? DType::Float32 : t; }

Val cast_to(Ops& ops, Val v, DType t) { return v.dtype == t ? v : ops.cast(v, t); }

std::vector<Expr> broadcast_index(const Sizes& sizes, Index index) {
  std::vector<Expr> out;
  const size_t skip = index.size() - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) out.push_back(sizes[i] == 1 ? Expr(0) : index[skip + i]);
  return out;
}

int64_t slice_start(const Arg& a, int64_t size) {
  int64_t start = a.is_none() ? 0 : a.to_int();
  if (start < 0) start += size;
  return std::clamp<int64_t>(start, 0, size);
}

int64_t wrap_dim(int64_t dim, int64_t rank) { return dim < 0 ? dim + std::max<int64_t>(rank, 1) : dim; }

Lowering::Lowering(const graph::Graph& g, const LowerOptions& options) : g_(g), options_(options) {
  // Consumers are counted from the last node on, through views (a view's consumers are its base's), and only for nodes
  // that somebody needs; the others are never lowered.
  std::unordered_set<graph::Value> seen;
  int64_t width = 0;
  auto consume = [&](graph::Value v) {
    if (!v || !seen.insert(v).second) return;
    Uses& uses = uses_[v];
    ++uses.readers;
    uses.widest = std::max(uses.widest, width);
  };
  for (const Arg& a : g.outputs()) graph::for_each_value(a, consume);
  for (const auto& m : g.mutations()) ++uses_[m.value].readers;
  for (auto it = g.nodes().rbegin(); it != g.nodes().rend(); ++it) {
    const Node& n = **it;
    if (!is_live(n)) continue;
    if (lower::is_view(n.op) && n.args.at(0).is_value()) {
      for (uint32_t i = 0; i < n.results.size(); ++i)
        if (auto u = uses_.find({const_cast<Node*>(&n), i}); u != uses_.end()) {
          const Uses through = u->second;
          Uses& uses = uses_[n.args[0].value()];
          uses.readers += through.readers;
          uses.widest = std::max(uses.widest, through.widest);
        }
      continue;
    }
    seen.clear();
    width = 0;
    for (const TensorMeta& m : n.results)
      if (m.defined) width = std::max(width, m.numel());
    for (const Arg& a : n.args) graph::for_each_value(a, consume);
  }
  for (const Arg& a : g.outputs()) {
    if (!a.is_value() || !a.value()) continue;
    graph::Value v = a.value();
    const auto bytes = [](graph::Value of) { return of.meta().numel() * dtype_size(of.meta().dtype); };
    const int64_t whole = bytes(v);
    escaping_.insert(v);
    while (v.node->kind == graph::NodeKind::Call && lower::is_view(v.node->op) && v.node->args.at(0).is_value()) {
      v = v.node->args[0].value();
      if (bytes(v) == whole) escaping_.insert(v);
    }
  }
}

bool Lowering::is_live(const Node& n) const {
  for (uint32_t i = 0; i < n.results.size(); ++i)
    if (is_used(n, i)) return true;
  return has_effect(n);
}

std::string Lowering::name_of(const Node& n, uint32_t i) const {
  return n.results.size() > 1 ? n.name + "_" + std::to_string(i) : n.name;
}

BufferId Lowering::add_buffer(std::string name, const TensorMeta& meta, loops::BufferKind kind) {
  // Loops know complex numbers as pairs of real ones.
  const int64_t numel = extent_of(meta.sizes, meta.strides) * (is_complex(meta.dtype) ? 2 : 1);
  const BufferId b = out_.program.add_buffer(std::move(name), to_real(meta.dtype), numel, kind);
  out_.metas.push_back(meta);
  out_.metas.back().offset = 0;
  out_.dynamic.push_back(false);
  return b;
}

Tensor Lowering::new_buffer(const Node& n, uint32_t i) {
  TensorMeta meta = n.results.at(i);
  if (!meta.is_non_overlapping_and_dense()) meta.strides = graph::contiguous_strides(meta.sizes);
  Tensor t;
  t.dtype = meta.dtype;
  t.sizes = meta.sizes;
  t.strides = meta.strides;
  t.buffer = add_buffer(name_of(n, i), meta, escapes(n, i) ? loops::BufferKind::Output : loops::BufferKind::Temp);
  return t;
}

Tensor Lowering::new_temp(std::string name, DType dtype, const Sizes& sizes) {
  TensorMeta meta;
  meta.dtype = dtype;
  meta.sizes = sizes;
  meta.strides = graph::contiguous_strides(sizes);
  Tensor t;
  t.dtype = dtype;
  t.sizes = sizes;
  t.strides = meta.strides;
  t.buffer = add_buffer(std::move(name), meta, loops::BufferKind::Temp);
  return t;
}

void Lowering::store(const Tensor& t, const Tensor& to, const std::string& name) {
  KILN_CHECK(t.sizes == to.sizes, "store between different sizes in " + name);
  if (!is_complex(to.dtype))
    store_each({{t, to}}, name);
  else if (same_layout(t.sizes, t.strides, to.strides))
    store_each({{as_real(t), as_real(to)}}, name);
  else
    store_each({{part_of(*this, t, 0), part_of(*this, to, 0)}, {part_of(*this, t, 1), part_of(*this, to, 1)}}, name);
}

void Lowering::store_each(const std::vector<std::pair<Tensor, Tensor>>& stores, const std::string& name) {
  const Tensor& first = stores.at(0).second;
  if (first.numel() == 0) return;
  // Loops follow the destination's memory order.
  std::vector<size_t> order(first.sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return first.strides[a] > first.strides[b]; });
  Sizes ranges;
  for (size_t d : order) ranges.push_back(first.sizes[d]);
  loops::NestBuilder nest(buffers(), name, ranges);
  nest.stage({});
  std::vector<Expr> index(order.size());
  for (size_t i = 0; i < order.size(); ++i) index[order[i]] = nest.outer()[i];
  EvalScope scope;
  bool recomputed = recomputing_;
  for (const auto& [t, to] : stores) {
    KILN_CHECK(t.sizes == first.sizes && to.sizes == first.sizes, "stores of different sizes in " + name);
    nest.store(to.buffer, symbolic::linearize(index, to.strides, to.offset),
               cast_to(nest, t.load(nest, index), to.dtype));
    recomputed |= t.lazy && t.lazy->recomputed;
  }
  add_nest(nest.finish(), recomputed);
}

void Lowering::add_nest(loops::Nest nest, bool recomputes) {
  if (recomputes) nest.not_before = backward_begins_;
  nest.after_errors = ordered_;
  out_.program.add_nest(std::move(nest));
}

Tensor Lowering::in_memory(const Tensor& t, const std::string& name) {
  if (t.strided()) return t;
  Tensor to = new_temp(name, t.dtype, t.sizes);
  store(t, to, name);
  return to;
}

Tensor Lowering::in_memory(graph::Value v, bool as_in_eager) {
  const Tensor t = get(v);
  const bool dense = v.meta().is_non_overlapping_and_dense();
  if (t.strided() && !(as_in_eager && dense && !same_layout(t.sizes, t.strides, v.meta().strides))) return t;
  // Libraries choose their way by strides: give them the ones that eager has here.
  Tensor to = new_temp(name_of(*v.node, v.index) + "_mem", t.dtype, t.sizes);
  if (dense) {
    to.strides = v.meta().strides;
    out_.metas[to.buffer].strides = to.strides;
  }
  store(t, to, name_of(*v.node, v.index) + "_mem");
  return values_[v] = std::move(to);
}

Tensor Lowering::lazy(DType dtype, Sizes sizes, loops::PointFn fn, const std::vector<Tensor>& inputs, int ops) const {
  auto l = std::make_shared<Lazy>();
  l->fn = std::move(fn);
  l->ops = ops;
  l->recomputed = recomputing_;
  Tensor result;
  result.dtype = dtype;
  result.sizes = std::move(sizes);
  for (const Tensor& t : inputs) {
    l->ops += t.ops();
    l->may_raise |= t.may_raise();
    l->recomputed |= t.lazy && t.lazy->recomputed;
    l->loads += t.loads();
    if (t.numel() * kSmall > result.numel()) l->wide_loads += t.wide_loads();
    if (t.strided())
      l->buffers.push_back(t.buffer);
    else
      l->buffers.insert(l->buffers.end(), t.lazy->buffers.begin(), t.lazy->buffers.end());
  }
  std::sort(l->buffers.begin(), l->buffers.end());
  l->buffers.erase(std::unique(l->buffers.begin(), l->buffers.end()), l->buffers.end());
  l->loads = std::min<int>(l->loads, static_cast<int>(std::max<size_t>(l->buffers.size(), 1)) * 4);
  if (l->buffers.empty()) l->loads = l->wide_loads = 0;
  result.lazy = std::move(l);
  return result;
}

Tensor Lowering::mapped(const Tensor& base, Sizes sizes, std::function<std::vector<Expr>(Index)> map) const {
  return lazy(
      base.dtype, std::move(sizes), [base, map](Ops& ops, Index p) { return base.load(ops, map(p)); }, {base}, 0);
}

void Lowering::set(const Node& n, Tensor t, uint32_t i, bool recompute) {
  const graph::Value v{const_cast<Node*>(&n), i};
  KILN_CHECK(t.sizes == n.results.at(i).sizes,
             "lowering of " + n.op.name() + " gave other sizes than " + n.name + "'s");
  KILN_CHECK(t.dtype == n.results[i].dtype, "lowering of " + n.op.name() + " gave another dtype than " + n.name + "'s");
  if (!t.strided() && !t.lazy->may_raise && graph::may_raise(n)) {
    auto raising = std::make_shared<Lazy>(*t.lazy);
    raising->may_raise = true;
    t.lazy = std::move(raising);
  }
  if (!t.strided() && !lower::is_view(n.op)) {
    const auto u = uses_.find(v);
    const Uses uses = u == uses_.end() ? Uses{} : u->second;
    const bool cheap = t.lazy->loads == 0 ? t.lazy->ops <= 8 : t.lazy->wide_loads <= 1 && t.lazy->ops <= kCheapOps;
    // A value for each channel, say, is not computed for each pixel, nor a power of a distance for each coordinate.
    const int64_t size = t.numel(), times = size > 0 ? uses.widest / size : 0;
    const bool spread =
        size > 1 && times > 1 && t.lazy->loads > 0 && t.lazy->ops > kCheapOps && (times - 1) * t.lazy->ops > kSpreadOps;
    const bool kept = !recompute && (spread || (uses.readers > 1 && !cheap));
    if (escapes(n, i) || kept || t.lazy->ops > kMaxOps || t.lazy->loads > kMaxLoads) {
      Tensor to = new_buffer(n, i);
      store(t, to, name_of(n, i));
      t = std::move(to);
    }
  }
  values_[v] = std::move(t);
}

TensorView Lowering::view_of(const Tensor& t) const { return {t.buffer, t.dtype, t.sizes, t.strides, t.offset}; }

void Lowering::lower_inputs() {
  for (const Node* in : g_.inputs()) {
    const TensorMeta& meta = in->results.at(0);
    const BufferId b = add_buffer(in->name, meta, loops::BufferKind::Input);
    out_.inputs.push_back(b);
    out_.frozen.push_back(in->frozen);
    Tensor t;
    t.dtype = meta.dtype;
    t.sizes = meta.sizes;
    t.strides = meta.strides;
    t.buffer = b;
    values_[{const_cast<Node*>(in), 0}] = std::move(t);
  }
  for (const auto& m : g_.mutations()) mutated_.insert(get(m.input).buffer);
}

void Lowering::lower_extern(const Node& n) {
  static const graph::Op kConstant("kiln::tensor_constant");
  if (n.op == kConstant) {
    Tensor t = new_buffer(n);
    out_.program.buffers[t.buffer].kind = loops::BufferKind::Const;
    out_.constants.emplace_back(t.buffer, &n);
    values_[{const_cast<Node*>(&n), 0}] = std::move(t);
    return;
  }
  log_artifact(Topic::fallback, "ATen call", n.op.name() + " (" + n.name + ")");
  ExternCall call;
  call.node = &n;
  loops::Extern e;
  e.name = n.op.name();
  auto add = [&](graph::Value v) {
    if (!v || call.inputs.count(v)) return;
    // Eager draws random numbers in the order of memory.
    const Tensor t = in_memory(v, /*as_in_eager=*/draws_random(n.op));
    call.inputs[v] = view_of(t);
    e.reads.push_back(t.buffer);
  };
  const bool own_kernel = options_.has_library_kernel && options_.has_library_kernel(n);
  // A kernel of ours that draws masks looks at no element of the tensor whose shape they take.
  static const graph::Op kBernoulli("aten::bernoulli.p");
  if (!(own_kernel && n.op == kBernoulli))
    for (const Arg& a : n.args) graph::for_each_value(a, add);
  call.into = out_overload(n.op) || own_kernel;
  for (uint32_t i = 0; i < n.results.size(); ++i) {
    const TensorMeta& m = n.results[i];
    if (m.defined && (m.device.type != graph::DeviceType::CPU || m.dtype == DType::Opaque || is_complex(m.dtype) ||
                      !m.is_non_overlapping_and_dense()))
      call.into = false;
  }
  for (uint32_t i = 0; i < n.results.size(); ++i) {
    const graph::Value v{const_cast<Node*>(&n), i};
    if (!n.results[i].defined || (!call.into && !uses_.count(v))) {
      call.results.push_back(std::nullopt);
      continue;
    }
    Tensor t;
    if (call.into) {
      t = new_buffer(n, i);
    } else {
      const TensorMeta& m = n.results[i];
      t.dtype = m.dtype;
      t.sizes = m.sizes;
      t.strides = m.strides;
      t.buffer = add_buffer(name_of(n, i), m, loops::BufferKind::Output);
      out_.dynamic[t.buffer] = true;
    }
    call.results.push_back(view_of(t));
    e.writes.push_back(t.buffer);
    values_[v] = std::move(t);
  }
  e.index = static_cast<int>(out_.externs.size());
  e.effect = has_effect(n);
  e.raises = call_may_raise(n);
  if (own_kernel && call.into && options_.result_rows && call.results[0]) e.rows = options_.result_rows(n);
  out_.externs.push_back(std::move(call));
  out_.program.add_extern(std::move(e));
}

void Lowering::lower_node(const Node& n) {
  bool known = true, complex = false;
  const auto look = [&](const TensorMeta& m) {
    known &= m.device.type == graph::DeviceType::CPU && m.dtype != DType::Opaque;
    complex |= is_complex(m.dtype);
  };
  for (const TensorMeta& m : n.results) look(m);
  for (const Arg& a : n.args)
    graph::for_each_value(a, [&](graph::Value v) {
      if (v) look(v.meta());
    });
  const Rule rule = complex ? complex_rule_of(n.op) : rule_of(n.op);
  const bool ours = known && rule;
  // Results that nobody reads would not be computed at all.
  bool used = false;
  for (uint32_t i = 0; i < n.results.size(); ++i) used |= is_used(n, i);
  // A rule declines before it has changed anything.
  if (ours && used) {
    if (!complex) choose_place(n);
    const bool done = rule(*this, n);
    place_.reset();
    before_write_ = Before::Nothing;
    ordered_ = false;
    if (done) return;
  }
  lower_extern(n);
}

void Lowering::lower_outputs() {
  std::unordered_map<std::string, int> outputs_of;  // of a node's results, and of one result that is returned twice
  for (const Arg& a : g_.outputs()) {
    Output out;
    if (a.is_value() && a.value()) {
      const graph::Value v = a.value();
      const TensorMeta& meta = v.meta();
      if (meta.defined) {
        Tensor t = get(v);
        const auto kind = t.strided() ? buffers()[t.buffer].kind : loops::BufferKind::Temp;
        const bool lives =
            kind == loops::BufferKind::Output || (kind == loops::BufferKind::Input && !mutated_.count(t.buffer));
        if (!t.strided() || !lives || !same_layout(t.sizes, t.strides, meta.strides)) {
          TensorMeta m = meta;
          if (!m.is_non_overlapping_and_dense()) m.strides = graph::contiguous_strides(m.sizes);
          Tensor to;
          to.dtype = m.dtype;
          to.sizes = m.sizes;
          to.strides = m.strides;
          std::string name = v.node->name + "_out";
          if (const int before = outputs_of[name]++) name += "_" + std::to_string(before);
          to.buffer = add_buffer(name, m, loops::BufferKind::Output);
          store(t, to, name);
          t = std::move(to);
        }
        t.strides = meta.is_non_overlapping_and_dense() ? meta.strides : t.strides;
        out.defined = true;
        out.view = view_of(t);
      }
    }
    out_.outputs.push_back(std::move(out));
  }
}

std::vector<const Node*> Lowering::nodes_in_order() const {
  std::vector<const Node*> order;
  for (const auto& n : g_.nodes()) order.push_back(n.get());
  if (!g_.asked) return order;
  std::unordered_set<const Node*> answer;
  std::vector<const Node*> todo{g_.outputs()[*g_.asked].value().node};
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    const bool light = n->kind == graph::NodeKind::Call && ops::recompute_cost(n->op) <= ops::Recompute::Cheap &&
                       !has_effect(*n) && !draws_random(n->op) && !graph::may_raise(*n);
    if (!light || !answer.insert(n).second) continue;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](graph::Value v) {
        if (v) todo.push_back(v.node);
      });
  }
  // What is moved comes right behind the last of its arguments that is not.
  std::unordered_map<const Node*, std::pair<size_t, bool>> places;
  for (size_t i = 0; i < order.size(); ++i) {
    std::pair<size_t, bool> place{i, false};
    if (answer.contains(order[i])) {
      place = {0, true};
      for (const Arg& a : order[i]->args)
        graph::for_each_value(a, [&](graph::Value v) {
          if (v) place.first = std::max(place.first, places.at(v.node).first);
        });
    }
    places.emplace(order[i], place);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](const Node* a, const Node* b) { return places.at(a) < places.at(b); });
  return order;
}

void Lowering::lower_asked() {
  // Takes part in the order as a call that reads the bool and writes all inputs that are written.
  loops::Extern e;
  e.index = static_cast<int>(out_.externs.size());
  e.name = "kiln::ask";
  ExternCall call;
  call.results.push_back(view_of(in_memory(g_.outputs()[*g_.asked].value())));
  e.reads = {call.results[0]->buffer};
  for (const auto& m : g_.mutations()) e.writes.push_back(get(m.input).buffer);
  e.effect = true;
  out_.externs.push_back(std::move(call));
  out_.program.add_extern(std::move(e));
}

Lowered Lowering::run() {
  lower_inputs();
  find_users();
  const Node* const asked = g_.asked ? g_.outputs()[*g_.asked].value().node : nullptr;
  if (asked && asked->kind != graph::NodeKind::Call) lower_asked();
  for (const Node* n : nodes_in_order()) {
    if (n->kind != graph::NodeKind::Call || !is_live(*n)) continue;
    if (n->backward && !backward_begins_) backward_begins_ = static_cast<int>(out_.program.items.size());
    recomputing_ = n->recomputed;
    lower_node(*n);
    if (n == asked) lower_asked();
  }
  recomputing_ = false;
  lower_outputs();
  lower_mutations();
  return std::move(out_);
}

Lowered lower(const graph::Graph& g, const LowerOptions& options) { return Lowering(g, options).run(); }

}  // namespace kiln::lower
