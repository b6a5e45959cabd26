#include "graph/passes/channels_last.h"

#include "base/error.h"
#include "base/pass.h"
#include "graph/convolution.h"
#include "graph/infer.h"
#include "graph/passes/volume_convolutions.h"
#include "ops/ops.h"
#include "ops/rules/iterator.h"

namespace kiln::graph {
namespace {

bool is_convolution(const Node& n) {
  return (is_float_convolution(n, 4) && (!is_transposed(n) || groups_of(n) == 1)) ||
         (pass_enabled("joint.volume_convolutions") && is_volume_convolution(n));
}

/// ATen's kernels for the weight's gradient of transposed convolutions in groups leave some taps of it unwritten if the
/// volumes are channels-last (PyTorch 2.13: kernel 7, stride 2, input 4 x 4 x 4): they get the layout of eager.
bool keeps_layout(const Node& n) { return is_float_convolution(n, 5) && is_transposed(n) && groups_of(n) > 1; }

MemoryFormat channels_last_of(int64_t rank) {
  return rank == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
}

class Converter {
 public:
  explicit Converter(Graph& g) : g_(g) {}

  bool run() {
    std::vector<Node*> order;
    for (const auto& n : g_.nodes()) order.push_back(n.get());
    bool found = false;
    for (Node* n : order) found |= is_convolution(*n);
    if (!found) return false;
    for (Node* n : order)
      if (n->kind == NodeKind::Call) visit(*n);
    g_.set_insert_point(nullptr);
    for (Arg& out : g_.outputs())
      for_each_value(out, [&](Value& v) {
        if (v) v = restored(v);
      });
    return true;
  }

 private:
  void visit(Node& n) {
    g_.set_insert_point(&n);
    if (is_convolution(n)) return convert(n);
    bool touched = false;
    for (const Arg& a : n.args) for_each_value(a, [&](Value v) { touched |= v && original_.count(v); });
    if (!touched) return;
    // Random numbers are drawn in the order of memory.
    if (keeps_layout(n) || ops::is_random(n.op) || !follow(n))
      for (Arg& a : n.args)
        for_each_value(a, [&](Value& v) {
          if (v) v = restored(v);
        });
  }

  /// Gives a convolution channels-last activations. Its weight's gradient keeps its layout: the kernels write any.
  void convert(Node& n) {
    for (size_t i = 0; i + 1 < operands(n); ++i) n.args[i] = channels_last(n.args[i].value());
    const std::vector<TensorMeta> before = n.results;
    // The gradient of a network's input is often not wanted.
    if (before[0].defined && before[0].dim() >= 4)
      set_strides(n, 0, strides_for(before[0].sizes, channels_last_of(before[0].dim())));
  }

  /// Recomputes the strides of a node's results; false if its rule does not take the new layouts.
  bool follow(Node& n) {
    static const Op as_strided("aten::as_strided");
    const ops::OpInfo* info = ops::lookup(n.op);
    if (!info || n.op == as_strided) return false;
    std::vector<TensorMeta> metas;
    try {
      metas = infer(n.op, n.args);
    } catch (const UserError&) {
      return false;  // a view that the new strides do not allow
    } catch (const Unsupported&) {
      return false;
    }
    if (metas.size() != n.results.size()) return false;
    for (size_t i = 0; i < metas.size(); ++i)
      if (metas[i].sizes != n.results[i].sizes || metas[i].dtype != n.results[i].dtype) return false;
    for (uint32_t i = 0; i < metas.size(); ++i) {
      if (ops::is_view(n.op)) remember(n, i), n.results[i].offset = metas[i].offset;
      set_strides(n, i, metas[i].strides);
    }
    return true;
  }

  void remember(Node& n, uint32_t i) { original_.emplace(Value{&n, i}, n.results[i]); }

  void set_strides(Node& n, uint32_t i, std::vector<int64_t> strides) {
    if (n.results[i].strides == strides) return;
    remember(n, i);
    n.results[i].strides = std::move(strides);
  }

  Value clone(Value v, MemoryFormat format, TensorMeta meta) {
    static const Op op("aten::clone");
    meta.offset = 0;
    meta.requires_grad = v.meta().requires_grad;
    Node* n = g_.add_call(op, {v, format}, {std::move(meta)}, v.node->name + "_layout");
    n->backward = v.node->backward;
    n->stack = v.node->stack;
    return n->out();
  }

  Value channels_last(Value v) {
    const MemoryFormat format = channels_last_of(v.meta().dim());
    if (v.meta().is_contiguous(format)) return v;
    const auto found = channels_last_.find(v);
    if (found != channels_last_.end()) return found->second;
    TensorMeta meta = v.meta();
    meta.strides = strides_for(meta.sizes, format);
    return channels_last_[v] = clone(v, format, std::move(meta));
  }

  /// `v` with the strides that it had before the pass.
  Value restored(Value v) {
    const auto it = original_.find(v);
    if (it == original_.end() || it->second.strides == v.meta().strides) return v;
    const auto found = restored_.find(v);
    if (found != restored_.end()) return found->second;
    TensorMeta meta = it->second;
    // A view of the old layout becomes a dense copy, in its order, unless its strides already are one's.
    meta.strides = ops::preserved_strides(meta);
    return restored_[v] = clone(v, MemoryFormat::Contiguous, std::move(meta));
  }

  Graph& g_;
  std::unordered_map<Value, TensorMeta> original_;
  std::unordered_map<Value, Value> channels_last_, restored_;
};

}  // namespace

bool convert_to_channels_last(Graph& g) { return Converter(g).run(); }

}  // namespace kiln::graph
