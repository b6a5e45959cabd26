#include "ops/rules/nn.h"

namespace kiln::ops::rules {
namespace {

struct Window {
  Ints stride, padding, dilation, output_padding;
  bool transposed = false;
  int64_t groups = 1;
};

Window window(Args args, size_t from, size_t spatial) {
  Window w;
  w.stride = expand_param(args[from], spatial, {1});
  w.padding = expand_param(args[from + 1], spatial, {0});
  w.dilation = expand_param(args[from + 2], spatial, {1});
  w.transposed = args[from + 3].to_bool();
  w.output_padding = expand_param(args[from + 4], spatial, {0});
  w.groups = args[from + 5].to_int();
  decline_unless_usable(w.stride);
  decline_unless_usable(w.dilation);
  decline_unless_usable({w.groups});
  return w;
}

Ints output_sizes(const TensorMeta& input, const TensorMeta& weight, const Window& w) {
  Ints out{input.sizes[0], w.transposed ? weight.sizes[1] * w.groups : weight.sizes[0]};
  for (size_t d = 2; d < input.sizes.size(); ++d) {
    const size_t i = d - 2;
    const int64_t kernel = w.dilation[i] * (weight.sizes[d] - 1) + 1;
    if (w.transposed)
      out.push_back((input.sizes[d] - 1) * w.stride[i] - 2 * w.padding[i] + kernel + w.output_padding[i]);
    else
      out.push_back((input.sizes[d] + 2 * w.padding[i] - kernel) / w.stride[i] + 1);
  }
  return out;
}

/// A line as a picture with one row, which is how ATen runs 1-d convolutions.
TensorMeta as_picture(TensorMeta t) {
  t.strides.insert(t.strides.begin() + 2, t.sizes[2] * t.strides[2]);
  t.sizes.insert(t.sizes.begin() + 2, 1);
  return t;
}

bool any_above_one(const Ints& values) {
  return std::any_of(values.begin(), values.end(), [](int64_t v) { return v != 1; });
}

/// Whether ATen's own kernels run, not oneDNN: in float64, for a single small image, for few images where there is one
/// thread and the kernel's last two dims are one element, and for transposed ones whose output padding is large.
bool past_onednn(const TensorMeta& input, const TensorMeta& weight, const Window& w) {
  if (input.dtype != DType::Float32) return input.dtype == DType::Float64;
  for (size_t d = 0; w.transposed && d < w.stride.size(); ++d)
    if (w.output_padding[d] >= w.stride[d]) return true;
  constexpr int64_t kSmallImage = 20480, kFew = 16;
  const Ints& kernel = weight.sizes;
  const auto [smaller, larger] = std::minmax(kernel[kernel.size() - 1], kernel[kernel.size() - 2]);
  int64_t image = 1;  // of a volume one slice
  for (size_t d = 0; d < std::min<size_t>(input.sizes.size(), 4); ++d) image *= input.sizes[d];
  const bool small = input.sizes[0] == 1 && image <= kSmallImage && smaller <= 3 && w.groups == 1;
  const bool alone =
      one_thread() && input.sizes[0] < kFew && larger == 1 && !any_above_one(w.stride) && !any_above_one(w.dilation);
  return small || alone;
}

// The CPU kernels compute in channels-last if either operand is, but where oneDNN has no part only those of pictures. A
// line is made contiguous first; with one channel it may look like both.
MemoryFormat backend_format(const TensorMeta& input, const TensorMeta& weight, const Window& w) {
  const bool line = input.dim() == 3;
  const MemoryFormat a = !line                   ? suggest_format(input)
                         : input.is_contiguous() ? suggest_format(as_picture(input))
                                                 : MemoryFormat::Contiguous;
  const MemoryFormat b = suggest_format(line ? as_picture(weight) : weight);
  for (const MemoryFormat f : {MemoryFormat::ChannelsLast, MemoryFormat::ChannelsLast3d}) {
    if (input.sizes.size() + line != (f == MemoryFormat::ChannelsLast ? 4u : 5u)) continue;
    if (a != f && b != f) continue;
    if (f == MemoryFormat::ChannelsLast3d && past_onednn(input, weight, w)) continue;
    return f;
  }
  return MemoryFormat::Contiguous;
}

/// A result in that format; lines lose the dim that as_picture() gave them.
TensorMeta result_in(MemoryFormat f, const TensorMeta& like, const Ints& sizes) {
  TensorMeta out = formatted(like, sizes, sizes.size() == 3 ? MemoryFormat::Contiguous : f);
  if (sizes.size() == 3 && f == MemoryFormat::ChannelsLast) out.strides = {sizes[1] * sizes[2], 1, sizes[1]};
  return out;
}

void check(const TensorMeta& input, const TensorMeta& weight, const TensorMeta* bias, const Window& w,
           const Ints& out) {
  const int64_t channels = w.transposed ? weight.sizes[0] : weight.sizes[1] * w.groups;
  if (weight.dim() != input.dim()) shape_error("weight should have at least three dimensions");
  if (input.sizes[1] != channels)
    shape_error("Given " + std::string(w.transposed ? "transposed=1, " : "groups=" + std::to_string(w.groups) + ", ") +
                "weight of size " + sizes_text(weight.sizes) + ", expected input" + sizes_text(input.sizes) +
                " to have " + std::to_string(channels) + " channels, but got " + std::to_string(input.sizes[1]) +
                " channels instead");
  if (bias && (bias->dim() != 1 || bias->sizes[0] != out[1]))
    shape_error("Given " + std::string(w.transposed ? "transposed=1, " : "") + "weight of size " +
                sizes_text(weight.sizes) + ", expected bias to be 1-dimensional with " + std::to_string(out[1]) +
                " elements, but got bias of size " + sizes_text(bias->sizes) + " instead");
  if (input.dtype != weight.dtype)
    shape_error("Input type (" + dtype_label(input.dtype) + ") and weight type (" + dtype_label(weight.dtype) +
                ") should be the same");
  if (w.transposed) return;
  std::string padded, kernel;
  bool small = false;
  for (size_t d = 2; d < input.sizes.size(); ++d) {
    const int64_t p = input.sizes[d] + 2 * w.padding[d - 2], k = w.dilation[d - 2] * (weight.sizes[d] - 1) + 1;
    padded += (padded.empty() ? "" : " x ") + std::to_string(p);
    kernel += (kernel.empty() ? "" : " x ") + std::to_string(k);
    small |= p < k;
  }
  if (small)
    shape_error("Calculated padded input size per channel: (" + padded + "). Kernel size: (" + kernel +
                "). Kernel size can't be greater than actual input size");
}

}  // namespace

Metas convolution(const OpInfo&, Args args) {
  const TensorMeta &input = tensor(args, 0), &weight = tensor(args, 1);
  if (weight.dim() < 3) shape_error("weight should have at least three dimensions");
  if (input.dim() < 3) throw Unsupported("convolution of an unbatched input");
  const Window w = window(args, 3, input.sizes.size() - 2);
  if (input.dim() != weight.dim())
    shape_error("Expected " + std::to_string(weight.dim()) + "-dimensional input for " + std::to_string(weight.dim()) +
                "-dimensional weight " + sizes_text(weight.sizes) + ", but got " + std::to_string(input.dim()) +
                "-dimensional input of size " + sizes_text(input.sizes) + " instead");
  const Ints out = output_sizes(input, weight, w);
  check(input, weight, maybe_tensor(args, 2), w, out);
  return one(result_in(backend_format(input, weight, w), input, out));
}

/// Whether the gradient of the weight has the weight's own strides, whatever the format: where oneDNN has no part it
/// has those of the weight that is computed with, and one that counts as channels-last as it is (a kernel of one
/// element, one channel) is that.
bool keeps_weight_strides(const TensorMeta& input, const TensorMeta& weight, const Window& w, MemoryFormat f) {
  const TensorMeta picture = input.dim() == 3 ? as_picture(weight) : weight;
  if (f != MemoryFormat::ChannelsLast || !picture.is_contiguous(f)) return false;
  return past_onednn(input, picture, w) && (!any_above_one(w.dilation) || w.transposed);
}

Metas convolution_backward(const OpInfo&, Args args) {
  const TensorMeta &grad = tensor(args, 0), &input = tensor(args, 1), &weight = tensor(args, 2);
  const Window w = window(args, 4, input.sizes.size() - 2);
  const auto mask = args[10].to_ints();
  const MemoryFormat f = backend_format(input, weight, w);
  Metas out;
  out.push_back(mask[0] ? result_in(f, input, input.sizes) : undefined_meta());
  out.push_back(!mask[1]                                    ? undefined_meta()
                : keeps_weight_strides(input, weight, w, f) ? like(weight)
                                                            : result_in(f, weight, weight.sizes));
  out.push_back(mask[2] ? contiguous(grad, {grad.sizes[1]}) : undefined_meta());
  return out;
}

}  // namespace kiln::ops::rules
