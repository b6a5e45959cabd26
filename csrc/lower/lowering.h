#pragma once
#include "lower/lower.h"

// The state of one lowering, and what rules see of it.
namespace kiln::lower {

using graph::Arg;
using graph::Node;
using graph::TensorMeta;
using loops::BufferId;
using loops::Opcode;
using loops::Ops;
using loops::ReduceKind;
using loops::Val;
using symbolic::Expr;
using Index = std::span<const Expr>;
using Sizes = std::vector<int64_t>;

/// A value per point, not computed yet; consumers compute it in their own loops.
struct Lazy {
  loops::PointFn fn;
  int ops = 0;  // scalar operations per point, inlined producers included
  int loads = 0;
  int wide_loads = 0;             // those of tensors about as large as this one: not of a broadcast vector's elements
  bool recomputed = false;        // computes again what the forward had: not to be made before the backward
  bool may_raise = false;         // for some of its elements: all of them are to be computed
  std::vector<BufferId> buffers;  // what it reads, for the hazards of in-place writes
};

/// A lowered tensor: a strided window on a buffer, or a lazy value.
struct Tensor {
  DType dtype = DType::Float32;
  Sizes sizes;
  Sizes strides;  // of the window; empty vectors for lazy values of any rank
  int64_t offset = 0;
  BufferId buffer = -1;  // -1: lazy
  std::shared_ptr<const Lazy> lazy;

  bool strided() const { return buffer >= 0; }
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const;
  /// The element at `index`, of this->dtype.
  Val load(Ops& ops, Index index) const;
  bool may_raise() const { return lazy && lazy->may_raise; }
  int ops() const { return lazy ? lazy->ops : 0; }
  int loads() const { return lazy ? lazy->loads : 1; }
  int wide_loads() const { return lazy ? lazy->wide_loads : 1; }
};

class Lowering {
 public:
  Lowering(const graph::Graph& g, const LowerOptions& options);
  Lowered run();

  // --- what rules use
  // -------------------------------------------------------------------------------------------------
  const Tensor& get(graph::Value v) const { return values_.at(v); }
  const Tensor& get(const Arg& a) const { return get(a.value()); }
  /// The only result of the node being lowered, or its i-th. A lazy value that several nodes use is stored if it costs
  /// more than a load, unless `recompute`.
  void set(const Node& n, Tensor t, uint32_t i = 0, bool recompute = false);
  /// Whether the memory of the node's i-th result is the caller's.
  bool escapes(const Node& n, uint32_t i = 0) const { return escaping_.count({const_cast<Node*>(&n), i}) != 0; }
  /// Takes back what set() was given for `n`.
  void unset(const Node& n) {
    for (uint32_t i = 0; i < n.results.size(); ++i) values_.erase({const_cast<Node*>(&n), i});
  }
  bool is_used(const Node& n, uint32_t i) const { return uses_.count({const_cast<Node*>(&n), i}) != 0; }

  /// A lazy value over `sizes`; `inputs` are the tensors that fn loads, `ops` its own operations per point.
  Tensor lazy(DType dtype, Sizes sizes, loops::PointFn fn, const std::vector<Tensor>& inputs, int ops) const;
  /// A view by index arithmetic: element p of the result is element map(p) of `base`.
  Tensor mapped(const Tensor& base, Sizes sizes, std::function<std::vector<Expr>(Index)> map) const;
  /// Memory for a result of the node being lowered, with the value's meta strides (inner layouts are dense).
  Tensor new_buffer(const Node& n, uint32_t i = 0);
  Tensor new_temp(std::string name, DType dtype, const Sizes& sizes);
  /// `t` in memory: itself if strided, otherwise stored into a new temp.
  Tensor in_memory(const Tensor& t, const std::string& name);
  /// `t` for a reader that leaves out some of its elements: in memory if those might have raised.
  Tensor whole(const Tensor& t, const Node& reader) {
    return t.may_raise() ? in_memory(t, name_of(reader) + "_in") : t;
  }
  /// `v`'s tensor in memory: with the strides that its meta has, if it was not yet there or `as_in_eager`.
  Tensor in_memory(graph::Value v, bool as_in_eager = false);
  /// Stores t into `to` (same sizes) by a nest.
  void store(const Tensor& t, const Tensor& to, const std::string& name);
  /// The same for several tensors of the same sizes, by one nest: {what, where}.
  void store_each(const std::vector<std::pair<Tensor, Tensor>>& stores, const std::string& name);
  /// The first argument of the node being lowered, if the node may write to its memory instead of a copy's: it then
  /// stores the elements that differ, and its result is this tensor.
  const std::optional<Tensor>& place() const { return place_; }
  /// What is to be done before the first of the elements at place() is written, whose places are computed.
  enum class Before {
    Nothing,
    Check,  // check_places(): nothing else raises later
    Keep    // keep_elements()
  };
  Before before_write() const { return before_write_; }
  /// Raises the errors of `places`, which are computed for each point that is written.
  void check_places(const Node& n, const Tensor& places);
  /// Keeps what `to` holds at `places` until the end of a run; both are values for each point that is written.
  void keep_elements(const Node& n, const Tensor& to, const Tensor& places, const Tensor& old);
  /// The part of `self`, a strided tensor, that slice_scatter, select_scatter or diagonal_scatter `n` writes.
  std::optional<Tensor> slice_of(const Node& n, const Tensor& self) const;
  void add_nest(loops::Nest nest) { add_nest(std::move(nest), recomputing_); }
  const std::vector<loops::Buffer>& buffers() const { return out_.program.buffers; }
  std::string name_of(const Node& n, uint32_t i = 0) const;

 private:
  bool is_live(const Node& n) const;
  void add_nest(loops::Nest nest, bool recomputes);
  void lower_inputs();
  void lower_node(const Node& n);
  void lower_extern(const Node& n);
  void lower_outputs();
  void find_users();
  /// Sets place_ for `n`, after what needs the old elements has been copied.
  void choose_place(const Node& n);
  bool is_used_after(graph::Value v, const Node& n, const std::vector<const Node*>& besides) const;
  /// The nodes that, in the end, put n's result back into the tensor that its first argument, at `place`, is a part of.
  std::vector<const Node*> put_back_by(const Node& n, Tensor place);
  /// A view's result, were its argument at `base`.
  std::optional<Tensor> view_at(const Node& view, const Tensor& base);
  /// Whether an element of t depends on another element of `to`'s buffer than the one that it would replace in `to`.
  bool reads_elsewhere(const Tensor& t, const Tensor& to) const;
  bool is_read_so_far(BufferId b);
  struct Write {
    Tensor value, to;
    std::string name;
  };
  /// Whether v is what is at `to` but for slices.
  bool is_partly_new(graph::Value v, const Tensor& to) const;
  /// The stores that make what is at `to` equal to v.
  void store_changes(graph::Value v, const Tensor& to, const std::string& name, std::vector<Write>& writes);
  void lower_mutations();
  /// Asks what Graph::asked says, before an input is written: as soon as the answer is known.
  void lower_asked();
  /// The graph's nodes, with the cheap ones that the answer is computed by as early as they can be.
  std::vector<const Node*> nodes_in_order() const;
  BufferId add_buffer(std::string name, const TensorMeta& meta, loops::BufferKind kind);
  TensorView view_of(const Tensor& t) const;

  const graph::Graph& g_;
  const LowerOptions& options_;
  Lowered out_;
  std::unordered_map<graph::Value, Tensor> values_;
  struct Uses {
    int readers = 0;
    int64_t widest = 0;  // elements of the largest result of a reader
  };
  std::unordered_map<graph::Value, Uses> uses_;
  bool recomputing_ = false;                   // the node being lowered is recomputed
  int backward_begins_ = 0;                    // at this item of the program
  std::unordered_set<graph::Value> escaping_;  // values whose memory the caller gets
  std::unordered_set<BufferId> mutated_;       // inputs that the graph changes

  // For writes in place (in_place.cpp); empty if the graph has no node that could.
  std::unordered_map<graph::Value, std::vector<const Node*>> users_;  // null: outputs and mutations
  std::unordered_map<const Node*, int> position_;                     // in the graph
  int last_raise_ = -1;                                               // position of the last node that may raise
  std::unordered_set<BufferId> read_;                                 // by the first `scanned_` items of the program
  size_t scanned_ = 0;
  std::unordered_map<BufferId, bool> writes_same_;  // by input that is written: Lowered::Mutated::writes_same
  std::optional<Tensor> place_;
  Before before_write_ = Before::Nothing;
  int kept_ = 0;          // old elements that were copied, for the copies' names
  bool ordered_ = false;  // the nests that are added write an input: loops::Nest::after_errors
};

/// False: this node's arguments are outside the rule; the node becomes an extern.
using Rule = bool (*)(Lowering& l, const Node& n);
struct RuleRow {
  const char* op;
  Rule rule;
};
/// Null if there is none.
Rule rule_of(const graph::Op& op);
/// The same for nodes that read or make complex numbers, whose tensors lie in memory: pairs of real numbers there.
Rule complex_rule_of(const graph::Op& op);
// One table a family, in the file of its name.
std::span<const RuleRow> pointwise_rules();
std::span<const RuleRow> view_rules();
std::span<const RuleRow> reduction_rules();
std::span<const RuleRow> index_rules();
std::span<const RuleRow> copy_rules();
std::span<const RuleRow> pool_rules();
/// True if rows of `view_rules` for this op share their argument's memory.
bool is_view(const graph::Op& op);
/// The out= overload of an op that libraries run, or null: its results go into planned memory.
const char* out_overload(const graph::Op& op);
/// Ops whose results depend on, or change, a random generator: kept in order.
bool draws_random(const graph::Op& op);
/// Ops that run although nobody reads their results, in the graph's order.
bool has_effect(const Node& n);

// Shared by rules.
/// While one lives, each lazy value is computed once per point. Rules that build nests hold one per open stage: values
/// of one stage mean nothing in another.
class EvalScope {
 public:
  EvalScope();
  ~EvalScope();
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

 private:
  void* outer_;
};
/// t[index] where mask is true, `other` elsewhere; index may be out of range there. `t` must be in memory.
Val load_if(Ops& ops, const Tensor& t, Val mask, Index index, Val other);
Val load_if(Ops& ops, const Tensor& t, Val mask, Index index, double other);
/// A number of the graph as torch.full takes it: of a fraction, integers take the whole part.
Val constant_of(Ops& ops, const Arg& number, DType t);
/// dtype in which ATen computes on `t`: float32 for half types, else t.
DType compute_type(DType t);
/// Cast if needed.
Val cast_to(Ops& ops, Val v, DType t);
/// Index of an operand of `sizes` broadcast to the point `index`.
std::vector<Expr> broadcast_index(const Sizes& sizes, Index index);
int64_t wrap_dim(int64_t dim, int64_t rank);
/// Where a slice of a dimension of `size` begins whose start is `start`, a number or None.
int64_t slice_start(const Arg& start, int64_t size);
/// Views: elements start + i*step of `dim`; those at `at` of it; those on a diagonal of dims a and b, of which the last
/// dim, `length` long, then runs along it.
Tensor sliced(const Lowering& l, const Tensor& t, int64_t dim, int64_t start, int64_t step, int64_t size);
Tensor without_dim(const Lowering& l, const Tensor& t, int64_t dim, int64_t at);
Tensor diagonal_of(const Lowering& l, const Tensor& t, int64_t offset, int64_t a, int64_t b, int64_t length);
/// Complex numbers in memory as pairs of real ones, along a last dimension.
Tensor as_real(const Tensor& t);
/// Their real numbers (0) or the imaginary ones (1).
Tensor part_of(const Lowering& l, const Tensor& t, int64_t part);
/// Whether a is a strided tensor of b's elements.
bool same_place(const Tensor& a, const Tensor& b);
/// Whether tensors of `sizes` with strides `a` and `b` have each element in the same place.
bool same_layout(const Sizes& sizes, const Sizes& a, const Sizes& b);

}  // namespace kiln::lower
