#include "ops/rules/nn.h"

namespace kiln::ops::rules {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

int64_t pooled(int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, bool ceil_mode) {
  decline_unless_usable({kernel, stride, dilation});
  if (pad < 0) shape_error("pad must be non-negative, but got pad: " + std::to_string(pad));
  if (pad > ((kernel - 1) * dilation + 1) / 2)
    shape_error("pad should be at most half of effective kernel size, but got pad=" + std::to_string(pad) +
                ", kernel_size=" + std::to_string(kernel) + " and dilation=" + std::to_string(dilation));
  int64_t out = floor_div(size + 2 * pad - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0), stride) + 1;
  // The last window must start inside the image or its left padding.
  if (ceil_mode && (out - 1) * stride >= size + pad) --out;
  return out;
}

struct Pool {
  Ints sizes;
  MemoryFormat format;
};

Pool pool_sizes(size_t spatial, const TensorMeta& t, const Ints& kernel, const Ints& stride, const Ints& pad,
                const Ints& dilation, bool ceil_mode) {
  if (t.sizes.size() < spatial + 1) throw Unsupported("pooling of too few dims");
  Pool p{t.sizes, MemoryFormat::Contiguous};
  const size_t first = t.sizes.size() - spatial;
  for (size_t i = 0; i < spatial; ++i) {
    p.sizes[first + i] = pooled(t.sizes[first + i], kernel[i], stride[i], pad[i], dilation[i], ceil_mode);
    if (p.sizes[first + i] < 1) {
      std::string in, out;
      for (size_t d = first - 1; d < t.sizes.size(); ++d) {
        in += (in.empty() ? "" : "x") + std::to_string(t.sizes[d]);
        const int64_t o = d < first ? t.sizes[d]
                                    : pooled(t.sizes[d], kernel[d - first], stride[d - first], pad[d - first],
                                             dilation[d - first], ceil_mode);
        out += (out.empty() ? "" : "x") + std::to_string(o);
      }
      shape_error("Given input size: (" + in + "). Calculated output size: (" + out + "). Output size is too small");
    }
  }
  if (t.sizes.size() == spatial + 2) p.format = suggest_format(t);
  return p;
}

/// `out` in the format of `t`: maxima of volumes have that without a batch, too.
TensorMeta volume_in_format_of(const TensorMeta& t, TensorMeta out) {
  if (t.sizes.size() != 4) return out;
  const auto with_batch = [](TensorMeta m) {
    m.strides.insert(m.strides.begin(), product(m.sizes, 0));
    m.sizes.insert(m.sizes.begin(), 1);
    return m;
  };
  const TensorMeta batch = with_batch(t);
  if (batch.is_contiguous() || !batch.is_contiguous(MemoryFormat::ChannelsLast3d)) return out;
  const Ints strides = strides_for(with_batch(out).sizes, MemoryFormat::ChannelsLast3d);
  out.strides.assign(strides.begin() + 1, strides.end());
  return out;
}

TensorMeta in_own_format(const TensorMeta& t, Ints sizes, size_t spatial) {
  const bool batched = t.sizes.size() == spatial + 2;
  return formatted(t, std::move(sizes), batched ? suggest_format(t) : MemoryFormat::Contiguous);
}

}  // namespace

Metas max_pool_nd(size_t spatial, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints kernel = expand_param(args[1], spatial);
  const Ints stride = expand_param(arg(args, 2), spatial, kernel);
  const Pool p = pool_sizes(spatial, t, kernel, stride, expand_param(arg(args, 3), spatial, {0}),
                            expand_param(arg(args, 4), spatial, {1}), bool_or(args, 5, false));
  TensorMeta out = formatted(t, p.sizes, p.format);
  if (spatial == 3) out = volume_in_format_of(t, out);
  TensorMeta indices = out;
  indices.dtype = DType::Int64;
  return many(out, indices);
}

// Averages over three dims are row-major whatever the input is.
Metas avg_pool_nd(size_t spatial, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints kernel = expand_param(args[1], spatial);
  const Ints stride = expand_param(arg(args, 2), spatial, kernel);
  if (int_or(args, 6, 1) == 0) throw Unsupported("averages divided by zero");
  const Pool p = pool_sizes(spatial, t, kernel, stride, expand_param(arg(args, 3), spatial, {0}), Ints(spatial, 1),
                            bool_or(args, 4, false));
  return one(formatted(t, p.sizes, spatial == 3 ? MemoryFormat::Contiguous : p.format));
}

Metas contiguous_pool_backward(const OpInfo&, Args args) {
  return one(contiguous(tensor(args, 1), tensor(args, 1).sizes));
}

Metas contiguous_upsample_backward(const OpInfo&, Args args) {
  return one(contiguous(tensor(args, 0), args[2].to_ints()));
}

Metas adaptive_pool_nd(size_t spatial, bool indices, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints target = expand_param(args[1], spatial);
  if (t.sizes.size() < spatial + 1) throw Unsupported("pooling of too few dims");
  Ints sizes = t.sizes;
  for (size_t i = 0; i < spatial; ++i) sizes[sizes.size() - spatial + i] = target[i];
  const TensorMeta out = spatial == 3 ? contiguous(t, sizes) : in_own_format(t, sizes, spatial);
  if (!indices) return one(out);
  TensorMeta where = out;
  where.dtype = DType::Int64;
  return many(out, where);
}

Metas pool_backward_nd(size_t spatial, Args args) {
  const TensorMeta& t = tensor(args, 1);
  const TensorMeta out = in_own_format(t, t.sizes, spatial);
  return one(spatial == 3 ? volume_in_format_of(t, out) : out);
}

Metas upsample_nd(size_t spatial, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints target = args[1].to_ints();
  if (t.sizes.size() != spatial + 2 || target.size() != spatial) throw Unsupported("resampling of another rank");
  Ints sizes{t.sizes[0], t.sizes[1]};
  for (int64_t s : target) {
    if (s <= 0) throw Unsupported("resampling to an empty size");
    sizes.push_back(s);
  }
  return one(in_own_format(t, sizes, spatial));
}

Metas upsample_backward_nd(size_t spatial, Args args) {
  const TensorMeta& grad = tensor(args, 0);
  return one(in_own_format(grad, args[2].to_ints(), spatial));
}

namespace {
int64_t blocks(int64_t size, int64_t kernel, int64_t dilation, int64_t pad, int64_t stride) {
  return (size + 2 * pad - (dilation * (kernel - 1) + 1)) / stride + 1;
}
}  // namespace

Metas im2col(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints k = expand_param(args[1], 2), d = expand_param(args[2], 2), p = expand_param(args[3], 2),
             s = expand_param(args[4], 2);
  for (const Ints& v : {k, d, s}) decline_unless_usable(v);
  if (t.dim() != 3 && t.dim() != 4) throw Unsupported("im2col of another rank");
  const size_t c = t.sizes.size() - 3;
  Ints sizes(t.sizes.begin(), t.sizes.begin() + static_cast<int64_t>(c));
  sizes.push_back(t.sizes[c] * k[0] * k[1]);
  sizes.push_back(blocks(t.sizes[c + 1], k[0], d[0], p[0], s[0]) * blocks(t.sizes[c + 2], k[1], d[1], p[1], s[1]));
  for (int64_t v : sizes)
    if (v < 0) throw Unsupported("im2col without a whole window");
  return one(contiguous(t, sizes));
}

Metas col2im(const OpInfo&, Args args) {
  const TensorMeta& t = tensor(args, 0);
  const Ints out = expand_param(args[1], 2), k = expand_param(args[2], 2);
  decline_unless_usable(k);
  if (t.dim() != 2 && t.dim() != 3) throw Unsupported("col2im of another rank");
  const size_t c = t.sizes.size() - 2;
  Ints sizes(t.sizes.begin(), t.sizes.begin() + static_cast<int64_t>(c));
  sizes.push_back(t.sizes[c] / (k[0] * k[1]));
  sizes.insert(sizes.end(), out.begin(), out.end());
  return one(contiguous(t, sizes));
}

Metas grid_sampler(const OpInfo&, Args args) {
  const TensorMeta &t = tensor(args, 0), &grid = tensor(args, 1);
  Ints sizes{t.sizes.at(0), t.sizes.at(1)};
  sizes.insert(sizes.end(), grid.sizes.begin() + 1, grid.sizes.end() - 1);
  return one(contiguous(t, sizes));
}

Metas grid_sampler_backward(const OpInfo&, Args args) {
  const TensorMeta &t = tensor(args, 1), &grid = tensor(args, 2);
  const auto mask = args.back().to_ints();
  return many(mask.at(0) ? contiguous(t, t.sizes) : undefined_meta(), contiguous(grid, grid.sizes));
}

Metas affine_grid(const OpInfo&, Args args) {
  const TensorMeta& theta = tensor(args, 0);
  const Ints size = args[1].to_ints();
  Ints sizes{size.at(0)};
  sizes.insert(sizes.end(), size.begin() + 2, size.end());
  sizes.push_back(static_cast<int64_t>(size.size()) - 2);
  return one(contiguous(theta, sizes));
}

}  // namespace kiln::ops::rules
