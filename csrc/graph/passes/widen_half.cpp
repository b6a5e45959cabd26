#include "graph/passes/widen_half.h"

#include <unordered_set>

#include "graph/passes/rewrite.h"

namespace kiln::graph {
namespace {

/// Up to so many rows a product with a matrix whose columns are dense reads it as it lies (runtime/gemm/few_rows.h).
constexpr int64_t kFewRows = 8;

const std::unordered_set<std::string> kProducts{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                                "aten::addbmm"};
const std::unordered_set<std::string> kOthers{"aten::convolution",
                                              "aten::convolution_backward",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                                              "aten::_transformer_encoder_layer_fwd",
                                              "aten::_native_multi_head_attention"};

class Widening {
 public:
  Widening(Graph& g, const std::function<bool(DType)>& slow) : g_(g), slow_(slow) {
    for (const auto& n : g.nodes())
      if (is_product(*n)) rows_[factors(*n).second] += rows(*n);
  }

  bool takes(const Node& n) const {
    if (is_product(n)) return slow(factors(n).first.meta()) && !is_fast(n);
    if (has_one_query(n)) return is_half(n.results[0].dtype);
    return n.kind == NodeKind::Call && kOthers.contains(n.op.name()) &&
           std::any_of(n.results.begin(), n.results.end(), [&](const TensorMeta& m) { return slow(m); });
  }

  std::vector<Value> widened(Node& n) const {
    Rewrite to(g_, n);
    std::vector<Arg> args = n.args;
    for (Arg& a : args)
      if (a.is_value() && a.value() && is_half(a.value().meta().dtype)) a = Arg(cast(a.value(), DType::Float32, to));
    Node* wide = to.node(n.op.name(), std::move(args));
    std::vector<Value> results(n.results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (!n.results[i].defined) continue;
      results[i] = Value{wide, static_cast<uint32_t>(i)};
      if (is_half(n.results[i].dtype)) results[i] = cast(results[i], n.results[i].dtype, to);
    }
    if (take_layout(n, results, to)) return results;
    to.undo();
    return {};
  }

 private:
  static bool is_product(const Node& n) { return n.kind == NodeKind::Call && kProducts.contains(n.op.name()); }
  /// Attention of one new word, which ATen cuts among its threads by queries.
  static bool has_one_query(const Node& n) {
    return n.kind == NodeKind::Call && n.op.name() == "aten::_scaled_dot_product_flash_attention_for_cpu" &&
           n.arg(0).value().meta().sizes[2] == 1;
  }
  /// Behind what is added, in products that add something.
  static std::pair<Value, Value> factors(const Node& n) {
    const size_t left = n.op.name().find("add") == std::string::npos ? 0 : 1;
    return {n.arg(left).value(), n.arg(left + 1).value()};
  }
  static int64_t rows(const Node& n) {
    const TensorMeta& a = factors(n).first.meta();
    return a.sizes[a.sizes.size() - 2];
  }
  /// Of a factor that several products read, one copy serves all.
  bool is_fast(const Node& n) const {
    const auto [a, b] = factors(n);
    const size_t columns = a.meta().sizes.size() - 1;
    const bool dense = a.meta().strides[columns] == 1 && b.meta().strides[columns - 1] == 1;
    return dense && rows_.at(b) <= kFewRows;
  }
  bool slow(const TensorMeta& m) const { return m.defined && slow_(m.dtype); }
  static Value cast(Value v, DType dtype, Rewrite& to) {
    return to.call("aten::_to_copy", {v, Arg(dtype), Arg(), Arg(), Arg(), Arg(false), Arg()});
  }

  Graph& g_;
  const std::function<bool(DType)>& slow_;
  std::unordered_map<Value, int64_t> rows_;  // of the products with this right factor
};

}  // namespace

bool has_slow_products(DType dtype) {
#ifdef __x86_64__
  if (dtype == DType::Float16) return !__builtin_cpu_supports("avx512fp16");
  if (dtype == DType::BFloat16)
    return !(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq"));
#endif
  return false;
}

bool is_widening_copy(const Node& n) {
  static const Op to_copy("aten::_to_copy");
  return n.kind == NodeKind::Call && n.op == to_copy && is_half(n.arg(0).value().meta().dtype) &&
         dtype_size(n.results[0].dtype) > 2;
}

bool widen_half(Graph& g, const std::function<bool(DType)>& slow) {
  const Widening widening(g, slow);
  return replace_each(
      g, [&](const Node& n) { return widening.takes(n); }, [&](Node& n) { return widening.widened(n); });
}

}  // namespace kiln::graph
