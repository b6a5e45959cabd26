// Conditions under which a call runs in eager although its guards hold: Python raises an exception for these numbers, a
// division by zero first of all. They are computed from the graph's inputs before the graph runs, when nothing has
// happened yet; a condition may therefore depend on nothing that is dear to compute.
#include "aten/schema.h"
#include "base/error.h"
#include "ops/ops.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

using graph::Node;
using graph::NodeKind;
using graph::Value;

namespace {

const graph::Op& constant_op() {
  static const graph::Op op("kiln::tensor_constant");
  return op;
}

bool is_single(const graph::TensorMeta& t) {
  return t.defined && std::all_of(t.sizes.begin(), t.sizes.end(), [](int64_t size) { return size == 1; });
}

/// The node whose result's memory `v` may share; `v`'s own if that is fresh. An operator that is not in the table may
/// return its argument, whatever its schema says.
Node* base_of(Value v) {
  for (;;) {
    Node* n = v.node;
    if (n->kind == NodeKind::Placeholder || n->op == constant_op()) return n;
    const aten::OpInfo* op = aten::find_op(n->op);
    if (op && op->kind == aten::OpKind::Functional && ops::lookup(n->op)) return n;
    Value first;
    for (const graph::Arg& a : n->args)
      graph::for_each_value(a, [&](Value x) {
        if (!first) first = x;
      });
    if (!first) return n;
    v = first;
  }
}

/// Whether the node may be run once more, by itself.
bool is_cheap(const Node& n) {
  if (!std::all_of(n.results.begin(), n.results.end(), is_single)) return false;
  if (n.kind == NodeKind::Placeholder || n.op == constant_op()) return true;
  const aten::OpInfo* op = aten::find_op(n.op);
  return op && n.op.name().starts_with("aten::") && !op->random && !op->needs_data && !op->factory &&
         (op->kind == aten::OpKind::Functional || op->kind == aten::OpKind::View || op->kind == aten::OpKind::InPlace);
}

}  // namespace

bool Machine::add_eager_condition(const at::Tensor& condition) {
  const auto& nodes = trace.graph().nodes();
  KILN_CHECK(num_nodes_seen_ <= nodes.size(), "nodes of a trace are gone");
  for (auto it = std::next(nodes.begin(), static_cast<long>(num_nodes_seen_)); it != nodes.end(); ++it) {
    ++num_nodes_seen_;
    const aten::OpInfo* op = (*it)->kind == NodeKind::Call ? aten::find_op((*it)->op) : nullptr;
    if (!op) continue;
    for (int arg : op->written_args)
      if (static_cast<size_t>(arg) < (*it)->args.size())
        graph::for_each_value((*it)->arg(static_cast<size_t>(arg)), [&](Value v) {
          if (v) writers_[base_of(v)].push_back(it->get());
        });
  }
  const Value value = trace.find(condition);
  if (!value) return false;
  std::unordered_set<const Node*> found;
  std::vector<Node*> todo;
  const auto visit = [&](Node* n) {
    if (found.insert(n).second) todo.push_back(n);
  };
  visit(value.node);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (!is_cheap(*n)) return false;
    for (const graph::Arg& a : n->args)
      graph::for_each_value(a, [&](Value v) {
        if (v) visit(v.node);
      });
    // Whatever wrote there so far: the nodes keep their order.
    if (n->results.empty()) continue;
    if (auto it = writers_.find(base_of(n->out())); it != writers_.end())
      for (Node* w : it->second) visit(w);
  }
  condition_nodes_.insert(found.begin(), found.end());
  eager_conditions.push_back(value);
  return true;
}

void Machine::make_eager_condition() {
  if (eager_conditions.empty()) return;
  static const graph::Op clone("aten::clone"), either("aten::logical_or");
  auto made = std::make_shared<graph::Graph>();
  made->name = "eager_condition";
  std::unordered_map<Value, Value> map;
  const graph::Graph& from = trace.graph();
  for (size_t i = 0; i < from.inputs().size(); ++i) {
    Node* input = from.inputs()[i];
    if (!condition_nodes_.count(input)) continue;
    result.eager_condition_inputs.push_back(i);
    map[input->out()] = made->add_input(input->name, input->results[0])->out();
  }
  // The inputs themselves stay as they are.
  for (Node* input : from.inputs())
    if (map.count(input->out()) && writers_.count(input)) {
      graph::TensorMeta meta = input->results[0];
      meta.offset = 0;
      Value& own = map[input->out()];
      own = made->add_call(clone, {graph::Arg(own), graph::Arg()}, {meta})->out();
    }
  for (const auto& n : from.nodes()) {
    if (n->kind == NodeKind::Placeholder || !condition_nodes_.count(n.get())) continue;
    std::vector<graph::Arg> args = n->args;
    for (graph::Arg& a : args)
      graph::for_each_value(a, [&](Value& v) {
        if (v) v = map.at(v);
      });
    Node* copy = made->add_copy(*n, std::move(args));
    for (uint32_t i = 0; i < n->results.size(); ++i) map[n->out(i)] = copy->out(i);
  }
  Value any;
  for (Value v : eager_conditions) {
    const Value one = map.at(v);
    any = any ? made->add_call(either, {graph::Arg(any), graph::Arg(one)}, {any.meta()})->out() : one;
  }
  made->outputs().emplace_back(any);
  result.eager_condition = std::move(made);
}

}  // namespace kiln::capture
