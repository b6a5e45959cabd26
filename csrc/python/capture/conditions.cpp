// Conditions on numbers that are computed from the graph's inputs before the graph runs, when nothing has happened yet:
// whether Python raises an exception for them (a division by zero first of all), so that the call is to run in eager,
// and whether the program takes the branch that it took during the capture. A condition may depend on nothing that is
// dear to compute.
// And assertions, which may depend on anything: the graph computes them, and if one fails, the results are dropped and
// the call runs in eager, which raises. A graph that writes to its inputs asks them before it does so; one that calls
// operators of which nobody knows what they do can ask only those that are conditions as above.
// What depends on constants alone is computed during the capture.
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/own_ops.h"
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

bool is_input(const Node* n) { return n->kind == NodeKind::Placeholder; }

bool is_single(const graph::TensorMeta& t) {
  return t.defined && std::all_of(t.sizes.begin(), t.sizes.end(), [](int64_t size) { return size == 1; });
}

bool is_short(const graph::TensorMeta& t) {
  constexpr int64_t kSmall = 1 << 16;
  return t.defined && t.numel() <= kSmall;
}

/// Single elements, and what labels, masks and lengths are.
bool is_small(const graph::TensorMeta& t) { return is_short(t) && (is_single(t) || is_integral(t.dtype)); }

/// Operators that make a tensor of numbers, always the same one.
bool makes_constant(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::arange", "aten::eye",   "aten::full",
                                                        "aten::ones",   "aten::zeros", "aten::scalar_tensor"};
  return names.contains(name.substr(0, name.find('.')));
}

/// What makes masks of each other, at the cost of a look at each element. Of comparisons only those for equality:
/// larger or smaller is what a model's numbers are.
bool makes_mask(const Node& n, const aten::OpInfo& op) {
  static const std::unordered_set<std::string> others = {"aten::tril",       "aten::triu",
                                                         "aten::zeros_like", "aten::ones_like",
                                                         "aten::full_like",  "aten::masked_fill_.Scalar"};
  static const std::unordered_set<std::string> equality = {"aten::eq.Tensor", "aten::eq.Scalar", "aten::ne.Tensor",
                                                           "aten::ne.Scalar"};
  const std::string& name = op.op.name();
  if (op.kind == aten::OpKind::View || others.contains(name)) return true;
  if (!ops::is_pointwise(op.op) || n.results.empty()) return false;
  return n.results[0].dtype != DType::Bool || equality.contains(name);
}

bool is_known(const graph::Op& op) { return op.name().starts_with("aten::") || aten::is_own_op(op); }

/// Whether the shape or value of the call's result depends on data.
bool reads_data(const Node& n, const aten::OpInfo& op) {
  const auto has_mask = [&](size_t i) {
    bool mask = false;
    graph::for_each_value(n.arg(i), [&](Value v) { mask |= v && aten::is_mask(aten::scalar_type_of(v.meta().dtype)); });
    return mask;
  };
  return op.call_needs_data([&](size_t i) { return !n.arg(i).is_none(); }, has_mask);
}

/// What attention masks are: larger than what is small, but not the numbers of a model.
bool may_be_mask(const graph::TensorMeta& t) {
  constexpr int64_t kLargestMask = 1 << 20;
  return t.defined && t.numel() <= kLargestMask;
}

/// Whether the node may be run once more, by itself.
bool is_cheap(const Node& n, Reach reach) {
  const auto all = [&](bool (*of)(const graph::TensorMeta&)) {
    return std::all_of(n.results.begin(), n.results.end(), of);
  };
  if (!all(reach == Reach::Small ? is_small : may_be_mask)) return false;
  if (n.kind == NodeKind::Placeholder) return reach != Reach::Constants;
  if (n.op == constant_op()) return true;
  const aten::OpInfo* op = aten::find_op(n.op);
  if (op && op->factory && !op->random) return makes_constant(n.op.name());
  const bool looks = (reach == Reach::Constants && all(is_short)) || (op && makes_mask(n, *op));
  if (reach != Reach::Small && !looks) {
    bool small = all(is_small);
    for (const graph::Arg& a : n.args)
      graph::for_each_value(a, [&](Value v) { small &= !v || is_small(v.meta()) || v.meta().dtype == DType::Bool; });
    if (!small) return false;
  }
  return op && is_known(n.op) && !op->random && !reads_data(n, *op) && !op->factory &&
         (op->kind == aten::OpKind::Functional || op->kind == aten::OpKind::View || op->kind == aten::OpKind::InPlace);
}

/// Whether one of the conditions has its truth. `values` is not empty.
Value either_of(graph::Graph& g, const std::vector<std::pair<Value, bool>>& values) {
  static const graph::Op either("aten::logical_or"), negation("aten::logical_not");
  Value any;
  for (const auto& [value, wanted] : values) {
    Value one = value;
    if (!wanted) one = g.add_call(negation, {graph::Arg(one)}, {one.meta()})->out();
    any = any ? g.add_call(either, {graph::Arg(any), graph::Arg(one)}, {any.meta()})->out() : one;
  }
  return any;
}

/// The value whose memory the node's result may share; none if that is fresh.
Value lender_of(const Node& n) {
  if (is_input(&n) || n.op == constant_op() || n.fresh) return {};
  const aten::OpInfo* op = aten::find_op(n.op);
  // Of some views (aten::data) the schema does not tell that they are.
  if (op && op->kind == aten::OpKind::Functional && ops::lookup(n.op) && !ops::is_view(n.op)) return {};
  Value first;
  for (const graph::Arg& a : n.args)
    graph::for_each_value(a, [&](Value x) {
      if (!first) first = x;
    });
  return first;
}

/// Memory that existed before the graph.
bool is_outside(const Node* base) { return base->kind == NodeKind::Placeholder || base->op == constant_op(); }

}  // namespace

Node* Bases::of(Value v) {
  std::vector<const Node*> way;
  Node* n = v.node;
  for (;;) {
    if (const auto it = known_.find(n); it != known_.end()) {
      n = it->second;
      break;
    }
    way.push_back(n);
    const Value lender = lender_of(*n);
    if (!lender) break;
    n = lender.node;
  }
  for (const Node* passed : way) known_.emplace(passed, n);
  return n;
}

bool writes_to(const Node& n, Bases& bases, const std::function<bool(const Node*)>& counts) {
  const std::string& name = n.op.name();
  if (name.find("batch_norm") != std::string::npos || name.find("instance_norm") != std::string::npos)
    return name != "aten::batch_norm" || n.arg(5).to_bool();
  bool found = false;
  aten::for_each_written(n, [&](Value v) { found |= counts(bases.of(v)); });
  return found;
}

bool changes_nothing(const Node& n, Bases& bases) {
  // A custom operator may do what its schema does not tell, and a backward() writes gradients.
  const std::string& name = n.op.name();
  const bool known = n.kind == NodeKind::Placeholder || n.op == constant_op() || is_known(n.op) ||
                     name.starts_with("kiln::custom_function");
  return known && !writes_to(n, bases, is_outside);
}

namespace {
bool is_differentiated(const Node& n) {
  return std::any_of(n.results.begin(), n.results.end(),
                     [](const graph::TensorMeta& m) { return m.defined && m.requires_grad; });
}
}  // namespace

void Machine::note_released(const Node& n) {
  // roots, gradients, retain_graph, create_graph, inputs, accumulate
  static const graph::Op backward("kiln::backward");
  if (n.op != backward || n.arg(2).to_bool() || n.arg(3).to_bool() || !n.arg(4).is_none()) return;
  std::vector<Node*> todo;
  const auto visit = [&](Value v) {
    if (v && is_differentiated(*v.node) && released_.insert(v.node).second) todo.push_back(v.node);
  };
  graph::for_each_value(n.arg(0), visit);
  while (!todo.empty()) {
    const Node* const next = todo.back();
    todo.pop_back();
    for (const graph::Arg& a : next->args) graph::for_each_value(a, visit);
  }
}

void Machine::index_nodes() {
  const auto& nodes = trace.graph().nodes();
  KILN_CHECK(node_order_.size() <= nodes.size(), "nodes of a trace are gone");
  auto it = nodes.end();  // inputs, which stand before all calls, change nothing
  while (it != nodes.begin() && !is_input(std::prev(it)->get()) && !node_order_.contains(std::prev(it)->get())) --it;
  for (; it != nodes.end(); ++it) {
    Node* n = it->get();
    node_order_.emplace(n, node_order_.size());
    changes_ |= !capture::changes_nothing(*n, bases_);
    acts_ |= n->kind == NodeKind::Call && !is_known(n->op) && !n->op.name().starts_with("kiln::");
    aten::for_each_written(*n, [&](Value v) { writers_[bases_.of(v)].push_back(n); });
    note_released(*n);
  }
}

bool Machine::may_be_dropped() {
  index_nodes();
  return !acts_;
}

bool Machine::may_be_saved(const at::Tensor& t) {
  const Value value = trace.find(t);
  if (!value) return false;
  index_nodes();
  Node* const base = bases_.of(value);
  const auto& nodes = trace.graph().nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&](const auto& n) {
    const bool differentiated = is_differentiated(*n) && !released_.contains(n.get());
    bool reads = false;
    for (const graph::Arg& a : n->args)
      if (differentiated) graph::for_each_value(a, [&](Value v) { reads |= v && bases_.of(v) == base; });
    return reads && n->kind == NodeKind::Call;
  });
}

bool Machine::assert_that(const at::Tensor& condition, bool wanted) {
  if (!options.assertions || condition.scalar_type() != at::kBool || condition.dim() != 0) return false;
  if (custom_function.node) return false;  // what its backward computes has no value yet when the graph has run
  const Value value = trace.find(condition);
  if (!value) return false;
  if (options.assertions_in_graph && may_be_dropped()) {
    assertions_.emplace_back(value, !wanted);
    return true;
  }
  return add_eager_condition(condition, !wanted);
}

bool Machine::finish_assertions() {
  if (assertions_.empty()) return true;
  if (!may_be_dropped()) return false;
  // They are asked behind all calls, with the values that they had.
  for (const auto& [value, fails] : assertions_)
    if (writers_.contains(bases_.of(value))) return false;
  result.failed = either_of(trace.graph(), assertions_);
  result.failed_is_asked = changes_;
  if (changes_) {
    static const graph::Op clone("aten::clone");  // a value of its own, whatever else is returned
    result.failed =
        trace.graph().add_call(clone, {graph::Arg(result.failed), graph::Arg()}, {result.failed.meta()})->out();
  }
  return true;
}

bool Machine::trace_back(Value value, NodeSet* found, Reach reach) {
  index_nodes();
  std::vector<Node*> todo;
  const auto visit = [&](Node* n) {
    if (found->insert(n).second) todo.push_back(n);
  };
  visit(value.node);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (!is_cheap(*n, reach)) return false;
    for (const graph::Arg& a : n->args)
      graph::for_each_value(a, [&](Value v) {
        if (v) visit(v.node);
      });
    // Whatever wrote there so far: the nodes keep their order.
    if (n->results.empty()) continue;
    if (auto it = writers_.find(bases_.of(n->out())); it != writers_.end())
      for (Node* w : it->second) visit(w);
  }
  return true;
}

bool Machine::add_eager_condition(const at::Tensor& condition, bool truth) {
  const Value value = trace.find(condition);
  NodeSet nodes;
  if (!value || !trace_back(value, &nodes)) return false;
  take_sizes(&nodes);
  eager_conditions_.nodes.merge(nodes);
  eager_conditions_.values.emplace_back(value, truth);
  return true;
}

void Machine::take_sizes(NodeSet* nodes, bool open) {
  if (!trace.sizes) return;
  for (const aten::Sizes::Argument& a : trace.sizes->arguments()) {
    if (!nodes->count(const_cast<Node*>(a.node))) continue;
    std::vector<Node*> of;
    trace.sizes->for_each_leaf(a.number, [&](size_t leaf) {
      if (const Value v = trace.sizes->leaves()[leaf].value) of.push_back(v.node);
    });
    if (open && std::all_of(of.begin(), of.end(), is_input))
      nodes->insert(of.begin(), of.end());
    else
      trace.sizes->pin(a.number);
  }
}

std::optional<at::Scalar> Machine::constant_value(const at::Tensor& t) {
  if (options.for_fx || t.numel() != 1) return std::nullopt;
  NodeSet nodes;
  const at::Tensor now = evaluate(trace.find(t), &nodes, Reach::Constants);
  if (!now.defined()) return std::nullopt;
  take_sizes(&nodes, /*open=*/false);
  return now.item();
}

std::optional<at::Scalar> Machine::known_value(const at::Tensor& t) {
  if (t.scalar_type() == at::kBool) {
    const std::optional<bool> truth = decide_truth(t);
    return truth ? std::optional<at::Scalar>(*truth) : std::nullopt;
  }
  if (const auto known = constant_value(t)) return known;
  const at::Tensor now = t.numel() == 1 ? decide_numbers(t) : at::Tensor();
  return now.defined() ? std::optional<at::Scalar>(now.item()) : std::nullopt;
}

std::optional<bool> Machine::decide_truth(const at::Tensor& t) {
  if (options.for_fx || t.numel() != 1) return std::nullopt;
  if (t.scalar_type() == at::kBool && t.dim() == 0) return decide(t);
  return may_decide(t) ? decide(at::any(t)) : std::nullopt;
}

at::Tensor Machine::decide_numbers(const at::Tensor& t) {
  const Value value = options.for_fx || !options.data_branches ? Value() : trace.value_of(t);
  if (!value || !is_integral(value.meta().dtype)) return {};
  NodeSet nodes;
  at::Tensor now = evaluate(value, &nodes);
  if (!now.defined() || now.numel() > aten::kMaxConstant) return {};
  const bool is_asked = std::any_of(nodes.begin(), nodes.end(), is_input);
  take_sizes(&nodes, /*open=*/is_asked);
  if (is_asked) {
    branches_.nodes.merge(nodes);
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard real;
    branches_.numbers.emplace_back(value, aten::numbers_of(now));
  }
  return now;
}

std::optional<bool> Machine::decide(const at::Tensor& condition) {
  if (const auto known = constant_value(condition)) return known->toBool();
  const Value value = trace.value_of(condition);
  NodeSet nodes;
  const at::Tensor now = evaluate(value, &nodes, Reach::Masks, [&](const Node* n) {
    return options.data_branches || std::all_of(n->results.begin(), n->results.end(), is_single);
  });
  if (!now.defined()) return std::nullopt;
  const bool truth = now.item<bool>();
  take_sizes(&nodes);
  branches_.nodes.merge(nodes);
  branches_.values.emplace_back(value, !truth);
  return truth;
}

at::Tensor Machine::evaluate(Value value, NodeSet* nodes, Reach reach,
                             const std::function<bool(const Node*)>& may_run) {
  if (!value || !trace_back(value, nodes, reach)) return {};
  if (may_run && !std::all_of(nodes->begin(), nodes->end(), may_run)) return {};
  std::vector<Node*> order;
  for (Node* n : *nodes)
    if (!is_input(n)) order.push_back(n);
  std::sort(order.begin(), order.end(), [&](Node* a, Node* b) { return node_order_.at(a) < node_order_.at(b); });
  Paused paused_here(*this);
  aten::RecordingPaused no_recording;
  aten::NoFakeGuard real;
  at::NoGradGuard no_grad;
  std::unordered_map<Value, at::Tensor> now;
  const std::vector<Node*>& inputs = trace.graph().inputs();
  for (size_t i = 0; i < inputs.size(); ++i)
    if (nodes->count(inputs[i]))
      now[inputs[i]->out()] = THPVariable_Unpack(result.example_inputs.at(i).get()).detach().clone();
  try {
    for (Node* n : order) {
      if (n->op == constant_op()) {
        now[n->out()] = aten::constant_tensor(n->args);
        continue;
      }
      const aten::OpInfo& op = aten::get_op(n->op);
      torch::jit::Stack stack = aten::to_stack(op.schema(), n->args, [&](Value v) { return now.at(v); });
      op.handle.callBoxed(stack);
      const std::vector<at::Tensor> results = aten::flatten_tensors(stack);
      for (uint32_t i = 0; i < results.size(); ++i) now[n->out(i)] = results[i];
    }
  } catch (const c10::Error&) {  // a division by zero, which is another condition's business
    return {};
  }
  return now.at(value);
}

CaptureResult::Condition Machine::any_of(const Conditions& conditions, const char* name) {
  if (conditions.values.empty() && conditions.numbers.empty()) return {};
  static const graph::Op clone("aten::clone"), differ("aten::ne.Tensor"), any("aten::any");
  auto made = std::make_shared<graph::Graph>();
  std::vector<size_t> taken;
  made->name = name;
  std::unordered_map<Value, Value> map;
  std::unordered_map<const Node*, Node*> copies;
  const graph::Graph& from = trace.graph();
  for (size_t i = 0; i < from.inputs().size(); ++i) {
    Node* input = from.inputs()[i];
    if (!conditions.nodes.count(input)) continue;
    taken.push_back(i);
    copies[input] = made->add_input(input->name, input->results[0]);
    map[input->out()] = copies[input]->out();
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
    if (n->kind == NodeKind::Placeholder || !conditions.nodes.count(n.get())) continue;
    std::vector<graph::Arg> args = n->args;
    for (graph::Arg& a : args)
      graph::for_each_value(a, [&](Value& v) {
        if (v) v = map.at(v);
      });
    Node* copy = copies[n.get()] = made->add_copy(*n, std::move(args));
    for (uint32_t i = 0; i < n->results.size(); ++i) map[n->out(i)] = copy->out(i);
  }
  std::vector<std::pair<Value, bool>> values;
  for (const auto& [value, wanted] : conditions.values) values.emplace_back(map.at(value), wanted);
  for (const auto& [value, numbers] : conditions.numbers) {
    const Value found = map.at(value);
    graph::TensorMeta meta = found.meta();
    meta.strides = graph::contiguous_strides(meta.sizes);
    meta.offset = 0;
    const Value expected = made->add_call(constant_op(), aten::constant_args(numbers, meta), {meta})->out();
    meta.dtype = DType::Bool;
    const Value differs = made->add_call(differ, {graph::Arg(found), graph::Arg(expected)}, {meta})->out();
    meta.sizes.clear();
    meta.strides.clear();
    values.emplace_back(made->add_call(any, {graph::Arg(differs)}, {meta})->out(), true);
  }
  made->outputs().emplace_back(either_of(*made, values));
  const auto copy_of = [&](const Node* n) {
    const auto it = copies.find(n);
    return it == copies.end() ? nullptr : it->second;
  };
  return {std::move(made), std::move(taken), trace.sizes ? trace.sizes->for_copies(copy_of) : nullptr};
}

}  // namespace kiln::capture
