#pragma once
#include <complex>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/dtype.h"

// The graph IR: a straight list of operator calls on tensors, used at three levels that differ only in their ops:
//   torch-level   what the user wrote ("torch.relu", "method.view"), for custom backends and printouts
//   traced        ATen ops as the dispatcher saw them above autograd ("aten::linear", "aten::add_.Tensor"), may mutate
//   functional    ATen ops below autograd after functionalization: no mutation, no aliasing between values
// A node holds no PyObject and no OperatorHandle: ops are interned names, side tables live in csrc/aten and csrc/python.
namespace kiln::graph {

/// Interned operator name, spelled as the dispatcher does: "aten::add.Tensor", "aten::relu". Compares by id.
class Op {
 public:
  Op() = default;
  explicit Op(std::string_view name);
  const std::string& name() const;
  uint32_t id() const { return id_; }
  bool operator==(const Op& o) const { return id_ == o.id_; }

 private:
  uint32_t id_ = 0;
};

enum class DeviceType : uint8_t { CPU, CUDA, Meta, Other };
struct Device {
  DeviceType type = DeviceType::CPU;
  int8_t index = -1;  // -1: none given
  bool operator==(const Device&) const = default;
};
enum class Layout : uint8_t { Strided, Sparse, Mkldnn, Other };
enum class MemoryFormat : uint8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };

/// What is known of a tensor without its data. sizes, strides in elements; offset in elements into its storage.
struct TensorMeta {
  DType dtype = DType::Float32;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  Device device;
  bool requires_grad = false;

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const;
  bool is_contiguous(MemoryFormat format = MemoryFormat::Contiguous) const;
  /// Each element has its own address and they fill one block, in any order of dims.
  bool is_non_overlapping_and_dense() const;
  bool operator==(const TensorMeta&) const = default;
};
/// Row-major strides of `sizes`, in elements.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);
/// Strides of `sizes` in the given format (Preserve is not a format here: InternalError).
std::vector<int64_t> strides_for(const std::vector<int64_t>& sizes, MemoryFormat format);

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
class Arg {
 public:
  using List = std::vector<Arg>;
  using Storage = std::variant<std::monostate, Value, bool, int64_t, double, std::complex<double>, std::string, DType,
                               Layout, Device, MemoryFormat, List>;
  Arg() = default;
  Arg(Value v) : data(v) {}
  Arg(bool v) : data(v) {}
  Arg(int v) : data(static_cast<int64_t>(v)) {}
  Arg(int64_t v) : data(v) {}
  Arg(double v) : data(v) {}
  Arg(std::complex<double> v) : data(v) {}
  Arg(std::string v) : data(std::move(v)) {}
  Arg(const char* v) : data(std::string(v)) {}
  Arg(DType v) : data(v) {}
  Arg(Layout v) : data(v) {}
  Arg(Device v) : data(v) {}
  Arg(MemoryFormat v) : data(v) {}
  Arg(List v) : data(std::move(v)) {}
  static Arg ints(const std::vector<int64_t>& values);
  static Arg values(const std::vector<Value>& values);

  template <class T>
  bool is() const { return std::holds_alternative<T>(data); }
  bool is_none() const { return is<std::monostate>(); }
  bool is_value() const { return is<Value>(); }
  bool is_list() const { return is<List>(); }
  /// A number: bool, int64 or double.
  bool is_number() const { return is<bool>() || is<int64_t>() || is<double>(); }
  template <class T>
  const T& as() const { return std::get<T>(data); }
  Value value() const { return std::get<Value>(data); }
  const List& list() const { return std::get<List>(data); }
  int64_t to_int() const;    // from bool or int64; InternalError otherwise
  double to_double() const;  // from bool, int64 or double
  bool to_bool() const;      // from bool or int64
  std::vector<int64_t> to_ints() const;    // a list of ints, or one int as a list of one
  std::vector<Value> to_values() const;    // a list of values; None entries become null Values
  bool operator==(const Arg&) const = default;

  Storage data;
};
/// Calls f(Value&) on every value in `arg`, lists included.
template <class F>
void for_each_value(Arg& arg, F&& f) {
  if (auto* v = std::get_if<Value>(&arg.data)) f(*v);
  else if (auto* l = std::get_if<Arg::List>(&arg.data))
    for (Arg& a : *l) for_each_value(a, f);
}
template <class F>
void for_each_value(const Arg& arg, F&& f) {
  if (auto* v = std::get_if<Value>(&arg.data)) f(*v);
  else if (auto* l = std::get_if<Arg::List>(&arg.data))
    for (const Arg& a : *l) for_each_value(a, f);
}

/// Where the user's code made a node: innermost frame last.
struct StackFrame {
  std::string file, function;
  int line = 0;
};
using StackTrace = std::vector<StackFrame>;

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
  bool grad_enabled = true;  // traced graphs: grad mode at the call
  bool backward = false;     // joint graphs: made while the autograd engine ran
  std::shared_ptr<const StackTrace> stack;
  std::string module_path;   // "layers.0.attn", from nn.Module calls; may be empty

  Value out(uint32_t i = 0) { return {this, i}; }
  const Arg& arg(size_t i) const { return args.at(i); }
};

/// `input` (a placeholder) holds `value` after the call: an in-place change of an input, made functional.
struct Mutation {
  Value input;
  Value value;
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

  Node* add_input(std::string name, TensorMeta meta);
  /// Appends a call at the insertion point (the end, unless set_insert_point was called). Results' metas are the caller's.
  Node* add_call(Op op, std::vector<Arg> args, std::vector<TensorMeta> results, std::string name_hint = "");
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

/// Text form, one line a node; parse(print(g)) prints the same text. Grammar in docs/ir/graph.md.
std::string print(const Graph& g);
/// Throws UserError with line and column for a malformed text.
std::unique_ptr<Graph> parse(std::string_view text);
/// Throws InternalError on: use before definition, foreign nodes, bad result index, duplicate names, a mutation whose
/// input is no placeholder. With `functional`, also on ops that mutate.
void verify(const Graph& g, bool functional = false);
/// Graphviz text of the graph (drawn to SVG by Graphviz on the Python side).
std::string to_dot(const Graph& g);

}  // namespace kiln::graph

template <>
struct std::hash<kiln::graph::Op> {
  size_t operator()(const kiln::graph::Op& o) const noexcept { return o.id(); }
};
template <>
struct std::hash<kiln::graph::Value> {
  size_t operator()(const kiln::graph::Value& v) const noexcept {
    return std::hash<const void*>{}(v.node) * 31 + v.index;
  }
};
