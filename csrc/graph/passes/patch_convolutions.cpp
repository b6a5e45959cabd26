#include "graph/passes/patch_convolutions.h"

#include <map>

#include "graph/convolution.h"
#include "graph/passes/rewrite.h"

namespace kiln::graph {
namespace {

using Sizes = std::vector<int64_t>;

class Patcher {
 public:
  explicit Patcher(Graph& g) : g_(g) {}

  /// One value per result, null where it is undefined; nothing if a result would have other strides.
  std::vector<Value> run(Node& n) {
    Rewrite to(g_, n);
    std::vector<Value> results = is_convolution_backward(n) ? backward(n, to) : forward(n, to);
    if (take_layout(n, results, to)) return results;
    to.undo();
    std::erase_if(windows_, [&](const auto& w) { return w.second.second == &n; });
    return {};
  }

 private:
  std::vector<Value> forward(Node& n, Rewrite& to) {
    const Value weight = n.arg(1).value();
    const Sizes& result = n.results[0].sizes;
    const Value a = windows(n, to), b = to.call("aten::t", {as_matrix(weight, to)});
    const Value y = n.arg(2).is_value() && n.arg(2).value()
                        ? to.call("aten::addmm", {n.arg(2), a, b, Arg(int64_t{1}), Arg(int64_t{1})})
                        : to.call("aten::mm", {a, b});
    Sizes sizes{result[0]};
    sizes.insert(sizes.end(), result.begin() + 2, result.end());
    sizes.push_back(result[1]);
    return {channels_second(to.call("aten::view", {y, Arg::ints(sizes)}), to)};
  }

  std::vector<Value> backward(Node& n, Rewrite& to) {
    const Value weight = n.arg(2).value();
    const TensorMeta& input = n.arg(1).value().meta();
    const Sizes& kernel = weight.meta().sizes;
    const size_t dims = kernel.size() - 2;
    // The gradient of the output with its channels last, a row per window.
    Sizes order{0};
    for (size_t d = 0; d < dims; ++d) order.push_back(static_cast<int64_t>(2 + d));
    order.push_back(1);
    Value dy = to.call("aten::permute", {n.arg(0), Arg::ints(order)});
    const Sizes outputs = dy.meta().sizes;
    dy = as_rows(to.dense(dy), outputs.back(), to);
    std::vector<Value> results(n.results.size());
    if (n.results[0].defined) {
      Sizes sizes(outputs.begin(), outputs.end() - 1);
      sizes.insert(sizes.end(), kernel.begin() + 1, kernel.end());
      const Value dx = to.call("aten::mm", {dy, as_matrix(weight, to)});
      const Value split = to.call("aten::view", {dx, Arg::ints(sizes)});  // n, windows..., channels, taps...
      const bool last = n.results[0].strides != contiguous_strides(input.sizes);
      Sizes joined{0};
      const auto channels = static_cast<int64_t>(dims + 1);
      if (!last) joined.push_back(channels);
      for (size_t d = 0; d < dims; ++d) {
        joined.push_back(static_cast<int64_t>(1 + d));
        joined.push_back(static_cast<int64_t>(dims + 2 + d));
      }
      if (last) joined.push_back(channels);
      const Value copy = to.dense(to.call("aten::permute", {split, Arg::ints(joined)}));
      Sizes whole{input.sizes[0]};
      if (!last) whole.push_back(input.sizes[1]);
      whole.insert(whole.end(), input.sizes.begin() + 2, input.sizes.end());
      if (last) whole.push_back(input.sizes[1]);
      results[0] = to.call("aten::view", {copy, Arg::ints(whole)});
      if (last) results[0] = channels_second(results[0], to);
    }
    if (n.results[1].defined) {
      const Value dw = to.call("aten::mm", {to.call("aten::t", {dy}), windows(n, to)});
      results[1] = to.call("aten::view", {dw, Arg::ints(kernel)});
    }
    if (n.results[2].defined) results[2] = to.call("aten::sum.dim_IntList", {dy, Arg::ints({0}), Arg(false), Arg()});
    return results;
  }

  /// The windows of a convolution's input as rows of a matrix: channels, then taps, as a weight has them. The gradients
  /// of a convolution find those that it made.
  Value windows(Node& n, Rewrite& to) {
    const Sizes& kernel = n.arg(operands(n) - 1).value().meta().sizes;
    const size_t dims = kernel.size() - 2;
    Value x = n.arg(operands(n) - 2).value();
    static const Op clone("aten::clone");  // of convert_to_channels_last
    if (x.node->op == clone) x = x.node->arg(0).value();
    auto& [found, maker] = windows_[{x.node, x.index, kernel}];
    if (found) return found;
    maker = &n;
    Value v = x;
    Sizes split{x.meta().sizes[0], x.meta().sizes[1]}, order{0};
    for (size_t d = 0; d < dims; ++d) {
      const int64_t size = x.meta().sizes[2 + d], count = size / kernel[2 + d];
      if (count * kernel[2 + d] < size)
        v = to.call("aten::slice.Tensor", {v, Arg(static_cast<int64_t>(2 + d)), Arg(int64_t{0}),
                                           Arg(count * kernel[2 + d]), Arg(int64_t{1})});
      split.push_back(count);
      split.push_back(kernel[2 + d]);
      order.push_back(static_cast<int64_t>(2 + 2 * d));
    }
    order.push_back(1);
    for (size_t d = 0; d < dims; ++d) order.push_back(static_cast<int64_t>(3 + 2 * d));
    v = to.call("aten::permute", {to.call("aten::view", {v, Arg::ints(split)}), Arg::ints(order)});
    int64_t length = 1;
    for (size_t i = 1; i < kernel.size(); ++i) length *= kernel[i];
    return found = as_rows(to.dense(v), length, to);
  }

  static Value as_rows(Value v, int64_t length, Rewrite& to) {
    return to.call("aten::view", {v, Arg::ints({v.meta().numel() / length, length})});
  }
  static Value as_matrix(Value weight, Rewrite& to) {
    return as_rows(to.dense(weight), weight.meta().numel() / weight.meta().sizes[0], to);
  }
  /// n, spatial dims, channels -> n, channels, spatial dims.
  static Value channels_second(Value v, Rewrite& to) {
    const int64_t rank = v.meta().dim();
    Sizes order{0, rank - 1};
    for (int64_t d = 1; d < rank - 1; ++d) order.push_back(d);
    return to.call("aten::permute", {v, Arg::ints(order)});
  }

  Graph& g_;
  // By input and kernel; and the node before which they were made.
  std::map<std::tuple<const Node*, uint32_t, Sizes>, std::pair<Value, const Node*>> windows_;
};

}  // namespace

bool is_patch_convolution(const Node& n) {
  // Its windows do not overlap, and a product serves it better than a convolution would.
  if (!(is_float_convolution(n, 4) || is_float_convolution(n, 5)) || groups_of(n) != 1 || is_transposed(n) ||
      !has_elements(n))
    return false;
  const Sizes& weight = n.arg(operands(n) - 1).value().meta().sizes;
  const Sizes& input = n.arg(operands(n) - 2).value().meta().sizes;
  const size_t at = first_setting(n), dims = weight.size() - 2;
  const auto stride = n.arg(at).to_ints(), padding = n.arg(at + 1).to_ints(), dilation = n.arg(at + 2).to_ints();
  int64_t taps = 1;
  for (size_t d = 0; d < dims; ++d) {
    if (setting_of(stride, d) != weight[2 + d] || setting_of(padding, d) != 0 ||
        (weight[2 + d] > 1 && setting_of(dilation, d) != 1))
      return false;
    // What the windows leave over at the end would need zeros in the gradient.
    if (is_convolution_backward(n) && n.results[0].defined && input[2 + d] % weight[2 + d] != 0) return false;
    taps *= weight[2 + d];
  }
  // Measured: the copy of the windows, in runs as long as a window is wide, costs less than short taps do in a
  // convolution. Convolutions of many channels, and with results of few columns, are the better ones.
  const int64_t channels = weight[1];
  return taps > 1 && taps * channels >= 32 && (channels <= 4 || (channels <= 16 && weight.back() >= 8));
}

bool patch_convolutions(Graph& g) {
  Patcher patcher(g);
  return replace_each(g, is_patch_convolution, [&](Node& n) { return patcher.run(n); });
}

}  // namespace kiln::graph
