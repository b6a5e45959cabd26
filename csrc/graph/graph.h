#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ops/types.h"

// The graph IR: a straight list of operator calls on tensors, used at three levels that differ only in their ops:
//   torch-level   what the user wrote ("torch.relu", "method.view"), for custom backends and printouts
//   traced        ATen ops as the dispatcher saw them above autograd ("aten::linear", "aten::add_.Tensor"), may mutate
//   functional    ATen ops below autograd after functionalization: no mutation, no aliasing between values
// A node holds no PyObject and no OperatorHandle: ops are interned names, side tables live in csrc/aten and
// csrc/python.
namespace kiln::graph {

using ops::contiguous_strides;
using ops::Device;
using ops::DeviceType;
using ops::Layout;
using ops::MemoryFormat;
using ops::Op;
using ops::strides_for;
using ops::TensorMeta;
using ops::undefined_meta;

class Node;
/// The `index`-th result of a node; a null node is "no tensor" (an undefined tensor).
struct Value {
  Node* node = nullptr;
  uint32_t index = 0;
  explicit operator bool() const { return node != nullptr; }
  bool operator==(const Value&) const = default;
  const TensorMeta& meta() const;
};

/// One argument: None, a tensor, a constant, or a list of arguments.
using Arg = ops::BasicArg<Value>;
/// Calls f(Value&) on every value in `arg`, lists included.
template <class F>
void for_each_value(Arg& arg, F&& f) {
  if (auto* v = std::get_if<Value>(&arg.data))
    f(*v);
  else if (auto* l = std::get_if<Arg::List>(&arg.data))
    for (Arg& a : *l) for_each_value(a, f);
}
template <class F>
void for_each_value(const Arg& arg, F&& f) {
  if (auto* v = std::get_if<Value>(&arg.data))
    f(*v);
  else if (auto* l = std::get_if<Arg::List>(&arg.data))
    for (const Arg& a : *l) for_each_value(a, f);
}

/// Where the user's code made a node: innermost frame last. Nodes have most of their frames in common.
struct StackFrame {
  std::string file, function;
  int line = 0;
};
using StackTrace = std::vector<std::shared_ptr<const StackFrame>>;

enum class NodeKind : uint8_t { Placeholder, Call };

/// A placeholder (one result) or an op call. Positional `args` follow the op's schema with all defaults filled in for
/// ATen ops (kwarg-only ones included, in schema order); `kwargs` is used only at torch level.
class Node {
 public:
  NodeKind kind = NodeKind::Call;
  Op op;
  std::string name;  // unique in its graph, a valid Python identifier
  std::vector<Arg> args;
  std::vector<std::pair<std::string, Arg>> kwargs;
  std::vector<TensorMeta> results;  // one per tensor result
  /// The results are one Python list/tuple although there may be a single one ("Tensor[]" or "(Tensor, Tensor)").
  bool returns_list = false;
  bool grad_enabled = true;        // traced graphs: grad mode at the call
  DType autocast = DType::Opaque;  // traced graphs: what the CPU's autocast casts to at the call; Opaque: it is off
  bool fresh = false;  // traced graphs: a composite operator that has returned none of its arguments, nor a view of one
  bool backward = false;    // joint graphs: made while the autograd engine ran
  int checkpoint = 0;       // the checkpointed call that made it, counted from 1; negative: that keeps it; 0: none
  bool recomputed = false;  // joint graphs: computes again for the backward what a checkpointed call computed
  bool frozen = false;      // placeholders: a module's state; what is made of it alone may be kept between calls
  std::shared_ptr<const StackTrace> stack;
  std::string module_path;  // "layers.0.attn", from nn.Module calls; may be empty

  Value out(uint32_t i = 0) { return {this, i}; }
  const Arg& arg(size_t i) const { return args.at(i); }
};

/// `input` (a placeholder) holds `value` after the call: an in-place change of an input, made functional.
struct Mutation {
  Value input;
  Value value;
  /// Its version does not count the change: it was made through .data only.
  bool uncounted = false;
  bool operator==(const Mutation&) const = default;
};

class Graph {
 public:
  std::string name = "graph";
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  std::unique_ptr<Graph> clone(std::unordered_map<const Node*, Node*>* map = nullptr) const;

  using NodeList = std::list<std::unique_ptr<Node>>;
  const NodeList& nodes() const { return nodes_; }
  const std::vector<Node*>& inputs() const { return inputs_; }
  /// What the graph returns, in order; entries may be None (an undefined gradient) or constants at torch level.
  std::vector<Arg>& outputs() { return outputs_; }
  const std::vector<Arg>& outputs() const { return outputs_; }
  std::vector<Mutation>& mutations() { return mutations_; }
  const std::vector<Mutation>& mutations() const { return mutations_; }
  /// The number of an output, a 0-dim bool. If it is true, running the graph ends before any input is written, with an
  /// AssertionFailed.
  std::optional<size_t> asked;

  Node* add_input(std::string name, TensorMeta meta);
  /// Appends a call at the insertion point (the end, unless set_insert_point was called). Results' metas are the
  /// caller's.
  Node* add_call(Op op, std::vector<Arg> args, std::vector<TensorMeta> results, std::string name_hint = "");
  /// Appends a copy of another graph's call with `args`, which are this graph's.
  Node* add_copy(const Node& call, std::vector<Arg> args);
  /// Later add_calls go before `node`; nullptr means the end.
  void set_insert_point(Node* node);
  /// Removes a node that has no users left (checked by the verifier, not here).
  void erase(Node* node);
  void erase_input(size_t index);
  /// Replaces every use of `from` (in args, outputs, mutations) by `to`. One sweep over the graph.
  void replace_all_uses(Value from, Value to);
  /// Replaces many values in one sweep; targets are looked up transitively.
  void replace_uses(const std::unordered_map<const Node*, std::vector<Value>>& map);
  std::unordered_map<const Node*, int> use_counts() const;
  std::string unique_name(std::string hint);

 private:
  NodeList nodes_;
  std::vector<Node*> inputs_;
  std::vector<Arg> outputs_;
  std::vector<Mutation> mutations_;
  std::unordered_map<std::string, int> names_;
  std::unordered_map<const Node*, NodeList::iterator> where_;
  NodeList::iterator insert_at_ = nodes_.end();
};

/// Text form, one line a node; parse(print(g)) prints the same text. Grammar in docs/ir/graph.md. With `stacks`, the
/// user's line that made a node stands before it as a comment.
std::string print(const Graph& g, bool stacks = false);
/// Throws UserError with line and column for a malformed text.
std::unique_ptr<Graph> parse(std::string_view text);
/// Throws InternalError on: use before definition, foreign nodes, bad result index, duplicate names, a mutation whose
/// input is no placeholder. With `functional`, also on ops that mutate.
void verify(const Graph& g, bool functional = false);
/// One type as the printer writes it: f32[2, 3], with strides, offset, device and `grad` where they are not the
/// default.
std::string print(const TensorMeta& t);
/// One argument as the printer writes it.
std::string print(const Arg& a);
/// Graphviz text of the graph (drawn to SVG by Graphviz on the Python side).
std::string to_dot(const Graph& g);

}  // namespace kiln::graph

template <>
struct std::hash<kiln::graph::Value> {
  size_t operator()(const kiln::graph::Value& v) const noexcept {
    return std::hash<const void*>{}(v.node) * 31 + v.index;
  }
};
