#include "graph/graph.h"

#include <cctype>

namespace kiln::graph {
namespace {

// "aten::add.Tensor" -> "add", "method.view" -> "view", "torch._C._nn.linear" -> "linear", "target::3" -> "target".
std::string hint_of(const Op& op) {
  const std::string& name = op.name();
  if (const size_t colons = name.find("::"); colons != std::string::npos) {
    const std::string rest = name.substr(colons + 2);
    if (rest.empty() || std::isdigit(static_cast<unsigned char>(rest[0]))) return name.substr(0, colons);
    return rest.substr(0, rest.find('.'));
  }
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

std::string sanitize(std::string hint) {
  for (char& c : hint)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') c = '_';
  if (hint.empty()) return "_";
  if (std::isdigit(static_cast<unsigned char>(hint[0]))) return "_" + hint;
  return hint;
}

}  // namespace

const TensorMeta& Value::meta() const {
  KILN_CHECK(node != nullptr, "a null value has no metadata");
  KILN_CHECK(index < node->results.size(), node->name + " has no result " + std::to_string(index));
  return node->results[index];
}

std::string Graph::unique_name(std::string hint) {
  hint = sanitize(std::move(hint));
  if (names_.try_emplace(hint, 0).second) return hint;
  for (int n = names_[hint] + 1;; ++n) {
    std::string candidate = hint + "_" + std::to_string(n);
    if (!names_.try_emplace(candidate, 0).second) continue;
    names_[hint] = n;  // the next search starts here
    return candidate;
  }
}

Node* Graph::add_input(std::string name, TensorMeta meta) {
  auto node = std::make_unique<Node>();
  node->kind = NodeKind::Placeholder;
  node->op = Op("placeholder");
  node->name = unique_name(std::move(name));
  node->results.push_back(std::move(meta));
  Node* raw = node.get();
  // Placeholders stand before all calls, also when one is added late.
  auto at = inputs_.empty() ? nodes_.begin() : std::next(where_.at(inputs_.back()));
  where_[raw] = nodes_.insert(at, std::move(node));
  inputs_.push_back(raw);
  return raw;
}

Node* Graph::add_call(Op op, std::vector<Arg> args, std::vector<TensorMeta> results, std::string name_hint) {
  auto node = std::make_unique<Node>();
  node->op = op;
  node->name = unique_name(name_hint.empty() ? hint_of(op) : std::move(name_hint));
  node->args = std::move(args);
  node->results = std::move(results);
  Node* raw = node.get();
  where_[raw] = nodes_.insert(insert_at_, std::move(node));
  return raw;
}

Node* Graph::add_copy(const Node& call, std::vector<Arg> args) {
  Node* node = add_call(call.op, std::move(args), call.results, call.name);
  node->kwargs = call.kwargs;
  node->returns_list = call.returns_list;
  node->grad_enabled = call.grad_enabled;
  node->autocast = call.autocast;
  node->fresh = call.fresh;
  node->backward = call.backward;
  node->checkpoint = call.checkpoint;
  node->recomputed = call.recomputed;
  node->stack = call.stack;
  node->module_path = call.module_path;
  return node;
}

void Graph::set_insert_point(Node* node) { insert_at_ = node ? where_.at(node) : nodes_.end(); }

void Graph::erase(Node* node) {
  if (node->kind == NodeKind::Placeholder) {
    const auto it = std::find(inputs_.begin(), inputs_.end(), node);
    KILN_CHECK(it != inputs_.end(), "erased placeholder is not of this graph");
    inputs_.erase(it);
  }
  const auto it = where_.find(node);
  KILN_CHECK(it != where_.end(), "erased node is not of this graph");
  names_.erase(node->name);
  if (insert_at_ == it->second) ++insert_at_;
  nodes_.erase(it->second);
  where_.erase(it);
}

void Graph::erase_input(size_t index) { erase(inputs_.at(index)); }

void Graph::replace_all_uses(Value from, Value to) {
  auto swap = [&](Value& v) {
    if (v == from) v = to;
  };
  for (auto& node : nodes_) {
    for (Arg& a : node->args) for_each_value(a, swap);
    for (auto& [key, a] : node->kwargs) for_each_value(a, swap);
  }
  for (Arg& a : outputs_) for_each_value(a, swap);
  for (Mutation& m : mutations_) {
    swap(m.input);
    swap(m.value);
  }
}

void Graph::replace_uses(const std::unordered_map<const Node*, std::vector<Value>>& map) {
  auto swap = [&](Value& v) {
    // A replacement may itself have been replaced; a chain longer than the map is a cycle.
    for (size_t steps = 0; v.node != nullptr; ++steps) {
      const auto it = map.find(v.node);
      if (it == map.end()) return;
      KILN_CHECK(v.index < it->second.size(), "no replacement for a result of " + v.node->name);
      const Value next = it->second[v.index];
      if (next == v) return;
      KILN_CHECK(steps <= map.size(), "replacements form a cycle at " + v.node->name);
      v = next;
    }
  };
  for (auto& node : nodes_) {
    for (Arg& a : node->args) for_each_value(a, swap);
    for (auto& [key, a] : node->kwargs) for_each_value(a, swap);
  }
  for (Arg& a : outputs_) for_each_value(a, swap);
  for (Mutation& m : mutations_) {
    swap(m.input);
    swap(m.value);
  }
}

std::unordered_map<const Node*, int> Graph::use_counts() const {
  std::unordered_map<const Node*, int> counts;
  auto count = [&](const Value& v) {
    if (v) ++counts[v.node];
  };
  for (const auto& node : nodes_) {
    for (const Arg& a : node->args) for_each_value(a, count);
    for (const auto& [key, a] : node->kwargs) for_each_value(a, count);
  }
  for (const Arg& a : outputs_) for_each_value(a, count);
  for (const Mutation& m : mutations_) {
    count(m.input);
    count(m.value);
  }
  return counts;
}

std::unique_ptr<Graph> Graph::clone(std::unordered_map<const Node*, Node*>* map) const {
  std::unordered_map<const Node*, Node*> local;
  auto& to = map ? *map : local;
  to.clear();
  auto copy = std::make_unique<Graph>();
  copy->name = name;
  auto moved = [&](Value& v) {
    if (v) v.node = to.at(v.node);
  };
  for (const auto& node : nodes_) {
    auto twin = std::make_unique<Node>(*node);
    for (Arg& a : twin->args) for_each_value(a, moved);
    for (auto& [key, a] : twin->kwargs) for_each_value(a, moved);
    Node* raw = twin.get();
    to[node.get()] = raw;
    copy->where_[raw] = copy->nodes_.insert(copy->nodes_.end(), std::move(twin));
  }
  for (const Node* input : inputs_) copy->inputs_.push_back(to.at(input));
  copy->outputs_ = outputs_;
  for (Arg& a : copy->outputs_) for_each_value(a, moved);
  copy->asked = asked;
  copy->mutations_ = mutations_;
  for (Mutation& m : copy->mutations_) {
    moved(m.input);
    moved(m.value);
  }
  copy->names_ = names_;
  return copy;
}

}  // namespace kiln::graph
