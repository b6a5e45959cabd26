#include "joint/partition/partition.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "graph/passes/passes.h"
#include "graph/passes/widen_half.h"
#include "joint/partition/min_cut.h"
#include "ops/ops.h"

namespace kiln::joint {

using graph::Arg;
using graph::Node;
using graph::NodeKind;
using graph::Value;

namespace {

int64_t bytes_of(Value v) { return v.meta().defined ? v.meta().numel() * dtype_size(v.meta().dtype) : 0; }

/// Pointwise ops whose cost is in the arithmetic: on a CPU keeping their result is cheaper than computing it again.
bool is_transcendental(const graph::Op& op) {
  static const auto& names = *[] {
    auto* s = new std::unordered_set<graph::Op>();
    for (const char* n : {"exp",
                          "exp2",
                          "expm1",
                          "log",
                          "log2",
                          "log10",
                          "log1p",
                          "sin",
                          "cos",
                          "tan",
                          "tanh",
                          "sinh",
                          "cosh",
                          "asin",
                          "acos",
                          "atan",
                          "atan2",
                          "erf",
                          "erfc",
                          "erfinv",
                          "sigmoid",
                          "gelu",
                          "silu",
                          "mish",
                          "softplus",
                          "pow.Tensor_Tensor",
                          "pow.Tensor_Scalar",
                          "pow.Scalar",
                          "lgamma",
                          "digamma",
                          "logit",
                          "elu",
                          "logaddexp",
                          "logaddexp2",
                          "xlogy.Tensor"})
      s->insert(graph::Op(std::string("aten::") + n));
    return s;
  }();
  return names.count(op) != 0;
}

class Partitioner {
 public:
  Partitioner(const Joint& joint, PartitionMode mode) : joint_(joint), graph_(*joint.graph), mode_(mode) {}
  Parts run();

 private:
  void mark();
  std::vector<Value> choose_by_cut();
  std::vector<Value> prefer_roots(std::vector<Value> saved);
  bool recomputable(const Node& n) const;
  bool fusible(const Node& n) const;
  void extract(const std::vector<Value>& saved, Parts& parts);

  template <class F>
  static void for_args(const Node& n, F&& f) {
    for (const Arg& a : n.args)
      graph::for_each_value(a, [&](Value v) {
        if (v) f(v);
      });
  }

  const Joint& joint_;
  const graph::Graph& graph_;
  const PartitionMode mode_;
  std::unordered_set<const Node*> tangent_;   // needs a tangent, tangents included
  std::unordered_set<const Node*> forward_;   // needed by forward outputs or mutations
  std::unordered_set<const Node*> wanted_;    // needed by gradients
  std::unordered_set<const Node*> changing_;  // whose memory changes, or may change before the backward
  std::unordered_set<Value> outputs_;         // forward outputs
  std::unordered_set<const Node*> held_;      // read by a dear op of the backward: in memory there anyway
};

void Partitioner::mark() {
  const auto& inputs = graph_.inputs();
  for (size_t i = joint_.num_primals; i < inputs.size(); ++i) tangent_.insert(inputs[i]);
  for (const auto& n : graph_.nodes())
    for_args(*n, [&](Value v) {
      if (tangent_.count(v.node)) tangent_.insert(n.get());
    });
  std::vector<Value> todo;
  auto reach = [&](std::unordered_set<const Node*>& set) {
    while (!todo.empty()) {
      const Node* n = todo.back().node;
      todo.pop_back();
      if (set.insert(n).second) for_args(*n, [&](Value v) { todo.push_back(v); });
    }
  };
  const auto& outs = graph_.outputs();
  for (size_t i = 0; i < joint_.num_forward; ++i)
    if (outs[i].is_value() && outs[i].value()) {
      todo.push_back(outs[i].value());
      if (joint_.output_kept.at(i))
        outputs_.insert(outs[i].value());
      else
        changing_.insert(graph::storage_root(outs[i].value()).node);
    }
  for (const graph::Mutation& m : graph_.mutations()) {
    todo.push_back(m.value);
    changing_.insert(m.input.node);
  }
  for (const VisibleMutation& m : joint_.mutations) changing_.insert(inputs[static_cast<size_t>(m.input)]);
  for (size_t i = 0; i < joint_.num_primals; ++i)
    if (!joint_.primal_kept.at(i)) changing_.insert(inputs[i]);
  // Draws from the generator happen in the order of the program, so those of the forward pass stay in it even if
  // unused; what may raise raises there.
  for (const auto& n : graph_.nodes())
    if (!n->backward && graph::runs_unused(*n)) todo.push_back({n.get(), 0});
  reach(forward_);
  for (size_t i = joint_.num_forward; i < outs.size(); ++i)
    if (outs[i].is_value() && outs[i].value()) todo.push_back(outs[i].value());
  reach(wanted_);
  for (const Node* n : forward_) KILN_CHECK(!tangent_.count(n), "a forward output depends on a tangent: " + n->name);
  // Only the nodes that some tangent-dependent library call reads, looking through views and copies of half types in
  // wider ones.
  for (const auto& n : graph_.nodes()) {
    if (!tangent_.count(n.get()) || fusible(*n)) continue;
    for_args(*n, [&](Value v) {
      const Node* at = v.node;
      while (at && !tangent_.count(at)) {
        const bool widens = graph::is_widening_copy(*at);  // what it copies takes half as much memory
        if (!widens) held_.insert(at);
        if (!(widens || ops::is_view(at->op)) || at->args.empty() || !at->args[0].is_value()) break;
        at = at->args[0].value().node;
      }
    });
  }
}

bool Partitioner::fusible(const Node& n) const {
  const ops::Recompute cost = ops::recompute_cost(n.op);
  return cost == ops::Recompute::Free || cost == ops::Recompute::Cheap;
}

bool Partitioner::recomputable(const Node& n) const {
  if (n.kind == NodeKind::Placeholder) return false;
  if (n.recomputed) return true;
  if (ops::is_random(n.op)) return false;
  const ops::Recompute cost = ops::recompute_cost(n.op);
  if (cost == ops::Recompute::Free) return true;
  if (!forward_.count(&n) && cost != ops::Recompute::Never)
    return true;  // the forward does not need it: compute it late
  return mode_ == PartitionMode::MinCut && cost == ops::Recompute::Cheap && !is_transcendental(n.op) &&
         !held_.count(&n);
}

std::vector<Value> Partitioner::choose_by_cut() {
  FlowNetwork net;
  std::vector<Value> tags;
  std::unordered_map<const Node*, int> vertex;
  std::unordered_map<Value, int> leaves;  // value -> the vertex it is read from
  auto vertex_of = [&](const Node& n) { return vertex.at(&n); };
  for (const auto& n : graph_.nodes()) {
    if (tangent_.count(n.get())) {
      if (!wanted_.count(n.get())) continue;
      for_args(*n, [&](Value v) {
        if (!tangent_.count(v.node)) net.add_edge(leaves.at(v), FlowNetwork::kSink, FlowNetwork::kInfinite);
      });
      continue;
    }
    if (!forward_.count(n.get()) && !wanted_.count(n.get()) && n->kind != NodeKind::Placeholder) continue;
    const int at = vertex[n.get()] = net.add_vertex();
    if (!recomputable(*n)) net.add_edge(FlowNetwork::kSource, at, FlowNetwork::kInfinite);
    for_args(*n, [&](Value v) { net.add_edge(leaves.at(v), at, FlowNetwork::kInfinite); });
    for (uint32_t i = 0; i < n->results.size(); ++i) {
      const Value v{n.get(), i};
      const int out = net.add_vertex();
      int64_t cost = bytes_of(v) * 100 + 100;
      if (n->recomputed)
        cost = FlowNetwork::kInfinite;
      else if (n->kind == NodeKind::Placeholder && !changing_.count(n.get()))
        cost /= 10;
      else if (outputs_.count(v))
        cost /= 20;
      net.add_edge(vertex_of(*n), out, cost, static_cast<int>(tags.size()));
      tags.push_back(v);
      leaves[v] = out;
    }
  }
  const auto& outs = graph_.outputs();
  for (size_t i = joint_.num_forward; i < outs.size(); ++i)
    if (outs[i].is_value() && outs[i].value() && !tangent_.count(outs[i].value().node))
      net.add_edge(leaves.at(outs[i].value()), FlowNetwork::kSink, FlowNetwork::kInfinite);
  std::vector<Value> saved;
  for (int tag : net.min_cut()) saved.push_back(tags[static_cast<size_t>(tag)]);
  return saved;
}

/// Saved views become their roots where the root is kept anyway (a placeholder, an output, saved itself) or is no
/// larger.
std::vector<Value> Partitioner::prefer_roots(std::vector<Value> saved) {
  std::unordered_set<Value> kept(saved.begin(), saved.end());
  std::vector<Value> out;
  std::unordered_set<Value> seen;
  for (Value v : saved) {
    Value best = v;
    for (Value at = v; at.node->kind == NodeKind::Call && ops::is_view(at.node->op) && at.node->arg(0).is_value();) {
      at = at.node->arg(0).value();
      const bool placeholder = at.node->kind == NodeKind::Placeholder && !changing_.count(at.node);
      if (placeholder || outputs_.count(at) || kept.count(at) || bytes_of(at) <= bytes_of(v)) best = at;
    }
    if (seen.insert(best).second) out.push_back(best);
  }
  return out;
}

void Partitioner::extract(const std::vector<Value>& saved, Parts& parts) {
  const auto& inputs = graph_.inputs();
  // Copies the nodes of `set` into `to`; `map` holds what exists there already.
  auto copy = [&](graph::Graph& to, std::unordered_map<Value, Value>& map, const std::unordered_set<const Node*>& set) {
    auto mapped = [&](Arg arg) {
      graph::for_each_value(arg, [&](Value& v) {
        if (!v) return;
        auto it = map.find(v);
        KILN_CHECK(it != map.end(), "partition: " + v.node->name + " is not available in " + to.name);
        v = it->second;
      });
      return arg;
    };
    for (const auto& n : graph_.nodes()) {
      if (n->kind == NodeKind::Placeholder || !set.count(n.get())) continue;
      bool done = !n->results.empty();
      for (uint32_t i = 0; i < n->results.size(); ++i) done &= map.count({n.get(), i}) != 0;
      if (done) continue;
      std::vector<Arg> args;
      for (const Arg& a : n->args) args.push_back(mapped(a));
      Node* made = to.add_copy(*n, std::move(args));
      for (uint32_t i = 0; i < n->results.size(); ++i) map.emplace(Value{n.get(), i}, made->out(i));
    }
    return mapped;
  };

  parts.forward = std::make_unique<graph::Graph>();
  parts.forward->name = "forward";
  std::unordered_map<Value, Value> fmap;
  for (size_t i = 0; i < joint_.num_primals; ++i)
    fmap[inputs[i]->out()] = parts.forward->add_input(inputs[i]->name, inputs[i]->results[0])->out();
  std::unordered_set<const Node*> need = forward_;
  std::vector<Value> todo(saved);
  while (!todo.empty()) {
    const Node* n = todo.back().node;
    todo.pop_back();
    if (need.insert(n).second) for_args(*n, [&](Value v) { todo.push_back(v); });
  }
  auto in_forward = copy(*parts.forward, fmap, need);
  const auto& outs = graph_.outputs();
  for (size_t i = 0; i < joint_.num_forward; ++i) parts.forward->outputs().push_back(in_forward(outs[i]));
  parts.forward->asked = graph_.asked;
  for (const graph::Mutation& m : graph_.mutations())
    parts.forward->mutations().push_back({fmap.at(m.input), fmap.at(m.value), m.uncounted});

  parts.backward = std::make_unique<graph::Graph>();
  parts.backward->name = "backward";
  std::unordered_map<Value, Value> bmap;
  std::unordered_map<Value, int64_t> output_at, output_in;  // by value, by its root
  for (size_t i = 0; i < joint_.num_forward; ++i)
    if (outs[i].is_value() && outs[i].value()) {
      output_at.emplace(outs[i].value(), static_cast<int64_t>(i));
      output_in.emplace(graph::storage_root(outs[i].value()), static_cast<int64_t>(i));
    }
  std::unordered_map<const Node*, int64_t> primal_at;
  for (size_t i = 0; i < joint_.num_primals; ++i) primal_at[inputs[i]] = static_cast<int64_t>(i);
  for (Value v : saved) {
    graph::TensorMeta meta = v.meta();
    meta.requires_grad = false;
    bmap[v] =
        parts.backward->add_input(v.index ? v.node->name + "_" + std::to_string(v.index) : v.node->name, meta)->out();
    const Value root = graph::storage_root(v);
    const bool changes = changing_.count(root.node) != 0;
    if (auto p = primal_at.find(v.node); p != primal_at.end() && !changes) {
      parts.saved.push_back({.primal = true, .index = p->second});
    } else if (auto o = output_at.find(v); o != output_at.end() && !changes) {
      parts.saved.push_back({.primal = false, .index = o->second});
    } else {
      Value kept = fmap.at(v);
      if (changes) {
        graph::TensorMeta copied = meta;
        copied.offset = 0;
        if (!copied.is_non_overlapping_and_dense()) copied.strides = graph::contiguous_strides(copied.sizes);
        bmap[v].node->results[0] = copied;
        kept = parts.forward->add_call(graph::Op("aten::clone"), {Arg(kept), Arg()}, {copied}, v.node->name + "_saved")
                   ->out();
      }
      const auto shared = changes ? output_in.end() : output_in.find(root);
      parts.saved.push_back({.primal = false,
                             .index = static_cast<int64_t>(parts.forward->outputs().size()),
                             .shares = shared == output_in.end() ? -1 : shared->second});
      parts.forward->outputs().push_back(Arg(kept));
    }
  }
  for (size_t i = joint_.num_primals; i < inputs.size(); ++i)
    bmap[inputs[i]->out()] = parts.backward->add_input(inputs[i]->name, inputs[i]->results[0])->out();
  std::unordered_set<const Node*> late;
  std::vector<Value> wanted;
  for (size_t i = joint_.num_forward; i < outs.size(); ++i)
    if (outs[i].is_value() && outs[i].value()) wanted.push_back(outs[i].value());
  while (!wanted.empty()) {
    const Value v = wanted.back();
    wanted.pop_back();
    if (bmap.count(v)) continue;
    if (late.insert(v.node).second) for_args(*v.node, [&](Value a) { wanted.push_back(a); });
  }
  // A node of which one result is saved and another is not would run again; its saved result stays the saved one.
  auto in_backward = copy(*parts.backward, bmap, late);
  for (size_t i = joint_.num_forward; i < outs.size(); ++i) parts.backward->outputs().push_back(in_backward(outs[i]));
}

Parts Partitioner::run() {
  mark();
  Parts parts;
  extract(prefer_roots(choose_by_cut()), parts);
  return parts;
}

}  // namespace

Parts partition(const Joint& joint, PartitionMode mode) {
  KILN_CHECK(joint.has_backward(), "partition of a graph without a backward");
  Parts parts = Partitioner(joint, mode).run();
  return parts;
}

}  // namespace kiln::joint
