#pragma once
#include "graph/graph.h"

// Reading aten::convolution and aten::convolution_backward.
namespace kiln::graph {

inline bool is_convolution_backward(const Node& n) {
  static const Op backward("aten::convolution_backward");
  return n.op == backward;
}
/// How many of the first arguments are tensors that it multiplies: (grad_output,) input, weight.
inline size_t operands(const Node& n) { return is_convolution_backward(n) ? 3 : 2; }
/// A convolution, or its gradients, whose operands are float32 on the CPU and have `rank` dims.
inline bool is_float_convolution(const Node& n, int64_t rank) {
  static const Op forward("aten::convolution");
  if (n.kind != NodeKind::Call || !(is_convolution_backward(n) || n.op == forward)) return false;
  for (size_t i = 0; i < operands(n); ++i) {
    const TensorMeta& m = n.arg(i).value().meta();
    if (m.dim() != rank || m.dtype != DType::Float32 || m.device.type != DeviceType::CPU) return false;
  }
  return true;
}
/// None of its operands is empty.
inline bool has_elements(const Node& n) {
  for (size_t i = 0; i < operands(n); ++i)
    if (n.arg(i).value().meta().numel() == 0) return false;
  return true;
}
/// Where a convolution's settings are among its arguments: stride, padding, dilation, transposed, output_padding,
/// groups.
inline size_t first_setting(const Node& n) { return operands(n) + 1; }
/// A setting's value for one of the spatial dims; one number may stand for all.
inline int64_t setting_of(const std::vector<int64_t>& setting, size_t dim) {
  return setting.size() == 1 ? setting[0] : setting[dim];
}
inline bool is_transposed(const Node& n) { return n.arg(first_setting(n) + 3).to_bool(); }
inline int64_t groups_of(const Node& n) { return n.arg(first_setting(n) + 5).to_int(); }
/// Whether each output channel reads the input channel of its own.
inline bool is_depthwise(const Node& n) {
  const TensorMeta& weight = n.arg(operands(n) - 1).value().meta();
  return !is_transposed(n) && groups_of(n) == weight.sizes[0] && weight.sizes[1] == 1;
}

}  // namespace kiln::graph
