#include "compiler/freeze.h"

#include <unordered_set>

#include "graph/passes/passes.h"
#include "graph/passes/widen_half.h"
#include "ops/ops.h"

namespace kiln::compiler {
namespace {

using graph::Arg;
using graph::Graph;
using graph::Node;
using graph::NodeKind;
using graph::Value;

/// A new graph of some of the calls of another, in order.
class Extract {
 public:
  explicit Extract(const Graph& from, const std::string& suffix) : from_(from), to_(std::make_unique<Graph>()) {
    to_->name = from.name + suffix;
  }

  /// A placeholder for every input that `calls`, `outputs` or the mutations use, and one more per value of `given`.
  void build(const std::unordered_set<const Node*>& calls, const std::vector<Arg>& outputs,
             const std::vector<graph::Mutation>& mutations, const std::vector<Value>& given) {
    std::unordered_set<const Node*> used;
    const auto use = [&](const Value& v) { used.insert(v.node); };
    for (const auto& n : from_.nodes())
      if (calls.count(n.get()))
        for (const Arg& a : n->args) graph::for_each_value(a, use);
    for (const Arg& a : outputs) graph::for_each_value(a, use);
    for (const graph::Mutation& m : mutations) use(m.input), use(m.value);
    for (size_t i = 0; i < from_.inputs().size(); ++i) {
      const Node* in = from_.inputs()[i];
      if (!used.count(in)) continue;
      Node* twin = to_->add_input(in->name, in->results.at(0));
      twin->frozen = in->frozen;
      values_[Value{const_cast<Node*>(in), 0}] = twin->out();
      inputs.push_back(i);
    }
    for (const Value& v : given) {
      Node* twin = to_->add_input(v.node->name + "_frozen", v.meta());
      twin->frozen = true;
      values_[v] = twin->out();
    }
    for (const auto& n : from_.nodes()) {
      if (!calls.count(n.get())) continue;
      std::vector<Arg> args = n->args;
      for (Arg& a : args) translate(a);
      Node* twin = to_->add_copy(*n, std::move(args));
      for (uint32_t r = 0; r < n->results.size(); ++r) values_.try_emplace(Value{n.get(), r}, twin->out(r));
    }
    to_->outputs() = outputs;
    for (Arg& a : to_->outputs()) translate(a);
    to_->mutations() = mutations;
    for (graph::Mutation& m : to_->mutations()) m.input = values_.at(m.input), m.value = values_.at(m.value);
  }
  std::unique_ptr<Graph> take() { return std::move(to_); }
  std::vector<size_t> inputs;

 private:
  void translate(Arg& a) {
    graph::for_each_value(a, [&](Value& v) {
      if (v) v = values_.at(v);
    });
  }
  const Graph& from_;
  std::unique_ptr<Graph> to_;
  std::unordered_map<Value, Value> values_;
};

}  // namespace

namespace {

/// Bytes of float32 copies of half weights that are kept at most, since a packed form comes on top: a large model in
/// half precision has been made half as large for want of memory. Copies of more are made in each call.
constexpr int64_t kMostWidened = int64_t{256} << 20;

/// What depends on frozen inputs alone.
std::unordered_set<const Node*> constants(const Graph& g, bool keep_widened) {
  std::unordered_set<const Node*> constant;
  for (const auto& n : g.nodes()) {
    if (n->kind == NodeKind::Placeholder) {
      if (n->frozen) constant.insert(n.get());
      continue;
    }
    bool all = ops::lookup(n->op) && !graph::runs_unused(*n) && (keep_widened || !graph::is_widening_copy(*n)),
         any = false;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](const Value& v) {
        any |= static_cast<bool>(v);
        all = all && (!v || constant.count(v.node));
      });
    if (all && any) constant.insert(n.get());
  }
  return constant;
}

}  // namespace

std::optional<FrozenSplit> split_frozen(const Graph& g) {
  std::unordered_set<const Node*> constant = constants(g, /*keep_widened=*/true);
  int64_t widened = 0;
  for (const Node* n : constant)
    if (graph::is_widening_copy(*n)) widened += n->results[0].numel() * dtype_size(n->results[0].dtype);
  if (widened > kMostWidened) constant = constants(g, /*keep_widened=*/false);
  const auto leaves = [&](const Value& v) {
    if (v && v.node->kind == NodeKind::Call) constant.erase(v.node);
  };
  for (const Arg& a : g.outputs()) graph::for_each_value(a, leaves);
  for (const graph::Mutation& m : g.mutations()) leaves(m.value);

  // The rest's calls, and what they need: views are made again, other values come from the prologue.
  std::unordered_set<const Node*> rest;
  std::vector<Value> given;
  std::unordered_set<Value> seen;
  std::vector<const Node*> todo;
  const auto add = [&](const Node* n) {
    if (rest.insert(n).second) todo.push_back(n);
  };
  for (const auto& n : g.nodes())
    if (n->kind == NodeKind::Call && !constant.count(n.get())) add(n.get());
  // A constant that nothing uses belongs to nobody.
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](const Value& v) {
        if (!v || v.node->kind == NodeKind::Placeholder || !constant.count(v.node)) return;
        if (ops::is_view(v.node->op))
          add(v.node);
        else if (seen.insert(v).second)
          given.push_back(v);
      });
  }
  if (given.empty()) return std::nullopt;
  std::unordered_set<const Node*> prologue;
  std::vector<const Node*> needed;
  for (const Value& v : given) needed.push_back(v.node);
  while (!needed.empty()) {
    const Node* n = needed.back();
    needed.pop_back();
    if (n->kind == NodeKind::Placeholder || !prologue.insert(n).second) continue;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](const Value& v) {
        if (v) needed.push_back(v.node);
      });
  }
  FrozenSplit split;
  std::vector<Arg> outputs(given.begin(), given.end());
  Extract first(g, "_frozen"), second(g, "");
  first.build(prologue, outputs, {}, {});
  second.build(rest, g.outputs(), g.mutations(), given);
  split.prologue = first.take();
  split.prologue_inputs = std::move(first.inputs);
  split.rest = second.take();
  split.rest->asked = g.asked;
  split.rest_inputs = std::move(second.inputs);
  return split;
}

}  // namespace kiln::compiler
