#include "graph/passes/volume_convolutions.h"

#include <map>

#include "graph/convolution.h"
#include "graph/passes/patch_convolutions.h"
#include "graph/passes/rewrite.h"

namespace kiln::graph {
namespace {

using Sizes = std::vector<int64_t>;

/// A convolution's settings along one dim.
struct Taps {
  int64_t kernel, stride, padding, dilation;

  auto operator<=>(const Taps&) const = default;
  /// Before the first place that tap `k` reads, counted from the volume's first slice.
  int64_t first(int64_t k) const { return k * dilation - padding; }
};

Taps taps_of(const Node& n) {
  const size_t at = first_setting(n);
  return {n.arg(operands(n) - 1).value().meta().sizes[2], setting_of(n.arg(at).to_ints(), 0),
          setting_of(n.arg(at + 1).to_ints(), 0), setting_of(n.arg(at + 2).to_ints(), 0)};
}

class Flattener {
 public:
  explicit Flattener(Graph& g) : g_(g) {}

  /// One value per result, null where it is undefined; nothing if a result would have other strides.
  std::vector<Value> run(Node& n) {
    Rewrite to(g_, n);
    std::vector<Value> results = is_convolution_backward(n) ? backward(n, to) : forward(n, to);
    if (take_layout(n, results, to)) return results;
    to.undo();
    std::erase_if(stacks_, [&](const auto& s) { return s.second.second == &n; });
    return {};
  }

 private:
  /// The arguments behind the operands, for pictures; that of the bias is `bias`.
  static std::vector<Arg> settings_of(const Node& n, Arg bias) {
    std::vector<Arg> settings(n.args.begin() + static_cast<long>(operands(n)), n.args.end());
    settings[0] = std::move(bias);
    for (const size_t i : {1, 2, 3, 5}) {  // stride, padding, dilation, output_padding
      const Sizes all = settings[i].to_ints();
      settings[i] = Arg::ints({setting_of(all, 1), setting_of(all, 2)});
    }
    return settings;
  }

  std::vector<Value> forward(Node& n, Rewrite& to) {
    const Taps taps = taps_of(n);
    const Sizes& result = n.results[0].sizes;
    const Value x = n.arg(0).value();
    const bool transposed = is_transposed(n);
    const Value pictures = transposed ? flat(x, to) : stacked(x, taps, result[2], n, to);
    std::vector<Arg> args{pictures, weight_of(n, to)};
    // A transposed one's slices are added up first.
    for (Arg& a : settings_of(n, transposed ? Arg() : n.arg(2))) args.push_back(std::move(a));
    const Value y = picture_result(to.node(n.op.name(), std::move(args)));
    if (!transposed) return {volume(y, result[0], to)};
    Value sum = folded(y, taps, result[0], result[2], to);
    if (n.arg(2).is_value() && n.arg(2).value())
      sum = to.call("aten::add.Tensor", {sum, to.call("aten::view", {n.arg(2), Arg::ints({-1, 1, 1, 1})}), Arg(1)});
    return {sum};
  }

  std::vector<Value> backward(Node& n, Rewrite& to) {
    const Taps taps = taps_of(n);
    const Value dy = n.arg(0).value(), x = n.arg(1).value();
    const Sizes &in = x.meta().sizes, &out = dy.meta().sizes;
    const Sizes weight = n.arg(2).value().meta().sizes;
    const bool transposed = is_transposed(n);
    const bool wants_bias = n.results[2].defined;
    std::vector<Arg> args{transposed ? stacked(dy, taps, in[2], n, to) : flat(dy, to),
                          transposed ? flat(x, to) : stacked(x, taps, out[2], n, to), weight_of(n, to)};
    for (Arg& a : settings_of(n, n.arg(3))) args.push_back(std::move(a));
    if (transposed) args.back() = Arg(Arg::List{Arg(n.results[0].defined), Arg(n.results[1].defined), Arg(false)});
    std::vector<Value> results(3);
    if (n.results[0].defined || n.results[1].defined || !transposed) {
      Node* pictures = to.node(n.op.name(), std::move(args));
      if (n.results[0].defined) {
        const Value dx = picture_result(pictures);
        results[0] = transposed ? volume(dx, in[0], to) : folded(dx, taps, in[0], in[2], to);
      }
      if (n.results[1].defined) {
        const Sizes split{weight[0], weight[2], weight[1], weight[3], weight[4]};
        const Value dw = to.call("aten::view", {Value{pictures, 1}, Arg::ints(split)});
        results[1] = to.call("aten::permute", {dw, Arg::ints({0, 2, 1, 3, 4})});
      }
      if (wants_bias && !transposed) results[2] = {pictures, 2};
    }
    if (wants_bias && transposed)
      results[2] = to.call("aten::sum.dim_IntList", {dy, Arg::ints({0, 2, 3, 4}), Arg(false), Arg()});
    return results;
  }

  /// The first result of a convolution of pictures, which is channels-last as its operands are.
  static Value picture_result(Node* n) {
    n->results[0].strides = strides_for(n->results[0].sizes, MemoryFormat::ChannelsLast);
    return n->out();
  }

  /// a, taps and b channels in place of a, b channels, taps: what a picture's channels are multiplied by.
  static Value weight_of(Node& n, Rewrite& to) {
    const Value w = n.arg(operands(n) - 1).value();
    const Sizes& s = w.meta().sizes;
    const Value turned = to.call("aten::permute", {w, Arg::ints({0, 2, 1, 3, 4})});
    return to.call("aten::view", {to.dense(turned), Arg::ints({s[0], s[2] * s[1], s[3], s[4]})});
  }

  /// n, channels, depth, height, width -> n, depth, height, width, channels.
  static Value channels_behind(Value v, Rewrite& to) {
    return to.dense(to.call("aten::permute", {v, Arg::ints({0, 2, 3, 4, 1})}));
  }
  /// n, depth, height, width, then channels in one dim or more -> a channels-last picture for each n and depth.
  static Value as_pictures(Value v, Rewrite& to) {
    const Sizes& s = v.meta().sizes;
    int64_t channels = 1;
    for (size_t d = 4; d < s.size(); ++d) channels *= s[d];
    const Value joined = to.call("aten::view", {v, Arg::ints({s[0] * s[1], s[2], s[3], channels})});
    return to.call("aten::permute", {joined, Arg::ints({0, 3, 1, 2})});
  }
  static Value flat(Value v, Rewrite& to) { return as_pictures(channels_behind(v, to), to); }
  /// Channels-last pictures -> n, depth, height, width, channels.
  static Value slices(Value v, int64_t n, Rewrite& to) {
    const Sizes s = v.meta().sizes;
    const Value turned = to.call("aten::permute", {v, Arg::ints({0, 2, 3, 1})});
    return to.call("aten::view", {turned, Arg::ints({n, s[0] / n, s[2], s[3], s[1]})});
  }
  static Value channels_second(Value v, Rewrite& to) {
    return to.call("aten::permute", {v, Arg::ints({0, 4, 1, 2, 3})});
  }
  static Value volume(Value v, int64_t n, Rewrite& to) { return channels_second(slices(v, n, to), to); }

  /// For each of `count` places along the depth the slices of `v` that the taps read there, zeros where there is none.
  /// The gradients of a convolution find those that it made.
  Value stacked(Value v, const Taps& taps, int64_t count, Node& n, Rewrite& to) {
    auto& [found, maker] = stacks_[{v.node, v.index, taps, count}];
    if (found) return found;
    maker = &n;
    const Value all = channels_behind(v, to);
    const int64_t depth = all.meta().sizes[1], reach = (count - 1) * taps.stride + 1;
    std::vector<Value> read;
    for (int64_t k = 0; k < taps.kernel; ++k) {
      const Value part = shifted(all, -taps.first(k), taps.first(k) + reach - depth, to);
      read.push_back(taps.stride == 1
                         ? part
                         : to.call("aten::slice.Tensor", {part, Arg(1), Arg(0), Arg(reach), Arg(taps.stride)}));
    }
    const Value together = read.size() == 1 ? to.dense(read[0]) : to.call("aten::stack", {Arg::values(read), Arg(4)});
    return found = as_pictures(together, to);
  }

  /// The other way: each slice of the result is the sum of all that the taps write there.
  static Value folded(Value v, const Taps& taps, int64_t n, int64_t depth, Rewrite& to) {
    Value all = slices(v, n, to);
    Sizes split = all.meta().sizes;
    const int64_t count = split[1];
    split.back() /= taps.kernel;
    split.insert(split.end() - 1, taps.kernel);
    all = to.call("aten::view", {all, Arg::ints(split)});
    Value sum;
    for (int64_t k = 0; k < taps.kernel; ++k) {
      Value part = to.call("aten::select.int", {all, Arg(4), Arg(k)});
      int64_t length = count;
      if (taps.stride > 1) {  // zeros between
        part = to.call("aten::unsqueeze", {part, Arg(2)});
        part = to.call("aten::constant_pad_nd", {part, Arg::ints({0, 0, 0, 0, 0, 0, 0, taps.stride - 1}), Arg(0)});
        Sizes joined = part.meta().sizes;
        length = joined[1] *= joined[2];
        joined.erase(joined.begin() + 2);
        part = to.call("aten::view", {part, Arg::ints(joined)});
      }
      part = shifted(part, taps.first(k), depth - length - taps.first(k), to);
      sum = sum ? to.call("aten::add.Tensor", {sum, part, Arg(1)}) : part;
    }
    return channels_second(to.dense(sum), to);
  }

  /// n, depth, ... with so many slices of zeros more, or slices less, in front of the others and behind them.
  static Value shifted(Value v, int64_t before, int64_t behind, Rewrite& to) {
    if (before == 0 && behind == 0) return v;
    return to.call("aten::constant_pad_nd", {v, Arg::ints({0, 0, 0, 0, 0, 0, before, behind}), Arg(0)});
  }

  Graph& g_;
  // By volume, taps and places; and the node before which they were made.
  std::map<std::tuple<const Node*, uint32_t, Taps, int64_t>, std::pair<Value, const Node*>> stacks_;
};

/// Sizes of the convolution's result, which its gradients are computed from.
const Sizes& result_sizes(const Node& n) {
  return (is_convolution_backward(n) ? n.arg(0).value().meta() : n.results[0]).sizes;
}

/// Large kernels on pictures that are not tiny, with channels to fill its blocks: the library's direct convolution
/// comes within a tenth of the multipliers' rate then (5 x 5 x 5 with 16 channels: 0.7 of its time, with 64 on 8 x 8
/// pixels 0.75).
bool library_is_faster(const Node& n) {
  constexpr int64_t kOurs = 9, kFewChannels = 8, kTiny = 64;
  const Sizes& weight = n.arg(operands(n) - 1).value().meta().sizes;
  const Sizes& out = result_sizes(n);
  return weight[3] * weight[4] > kOurs && std::min(weight[0], weight[1]) >= kFewChannels && out[3] * out[4] >= kTiny;
}
}  // namespace

bool is_volume_convolution(const Node& n) {
  if (!is_float_convolution(n, 5) || groups_of(n) != 1 || !has_elements(n) || is_patch_convolution(n)) return false;
  int64_t read = n.arg(operands(n) - 2).value().meta().sizes[2];
  int64_t places = result_sizes(n)[2];
  if (is_transposed(n))
    std::swap(read, places);
  else if (library_is_faster(n))
    return false;
  const Taps taps = taps_of(n);
  // A tap that lies in the padding everywhere is not worth rules of its own.
  return places > 0 && taps.first(taps.kernel - 1) < read && taps.first(0) + (places - 1) * taps.stride >= 0;
}

bool volume_convolutions(Graph& g) {
  Flattener flattener(g);
  return replace_each(g, is_volume_convolution, [&](Node& n) { return flattener.run(n); });
}

}  // namespace kiln::graph
