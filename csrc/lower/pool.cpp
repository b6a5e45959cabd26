// Windows over images and volumes: pooling, its gradients, and nearest resampling. Most gradients gather: each input
// element adds up the windows that cover it, so that elements stay independent and no place is written twice.
#include <functional>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "lower/lowering.h"
#include "lower/scatter.h"

namespace kiln::lower {
namespace {

struct Window {
  int64_t kernel, stride, padding, dilation;
  int64_t in, out;  // sizes
  /// Elements that may lie inside of the image: a window may be much larger than that is, one over all of it, say.
  int64_t reached() const { return std::min(kernel, (in + padding + dilation - 1) / dilation); }
};

int64_t pick(const std::vector<int64_t>& v, size_t i, int64_t otherwise) {
  return v.empty() ? otherwise : v.size() == 1 ? v[0] : v.at(i);
}

// Those of the last dims, as many as are pooled.
using Windows = std::vector<Window>;

// The last `rank` dims' windows; arguments as in max_pool2d and avg_pool2d.
Windows windows(size_t rank, const Sizes& in, const Sizes& out, const Arg& kernel, const Arg& stride,
                const Arg& padding, const Arg* dilation) {
  const auto k = kernel.to_ints(), s = stride.to_ints(), p = padding.to_ints();
  const auto d = dilation ? dilation->to_ints() : std::vector<int64_t>{1};
  Windows w(rank);
  for (size_t i = 0; i < rank; ++i)
    w[i] = {pick(k, i, 1), pick(s, i, pick(k, i, 1)), pick(p, i, 0),
            pick(d, i, 1), in[in.size() - rank + i],  out[out.size() - rank + i]};
  return w;
}

Sizes reached(const Windows& w) {
  Sizes sizes;
  for (const Window& x : w) sizes.push_back(x.reached());
  return sizes;
}

// What element q of the window at output p lies at; dims in front stay.
std::vector<Expr> element(const Windows& w, const std::vector<Expr>& p, const std::vector<Expr>& q) {
  std::vector<Expr> at(p.begin(), p.end());
  for (size_t i = 0; i < w.size(); ++i) {
    Expr& x = at[at.size() - w.size() + i];
    x = x * Expr(w[i].stride) + q[i] * Expr(w[i].dilation) - Expr(w[i].padding);
  }
  return at;
}

Val inside(Ops& o, const Windows& w, const std::vector<Expr>& at) {
  std::optional<Val> all;
  for (size_t i = 0; i < w.size(); ++i) {
    const Val one = o.in_range(at[at.size() - w.size() + i], 0, w[i].in);
    all = all ? o.And(*all, one) : one;
  }
  return *all;
}

// Where it is in its image, counted row by row.
Expr place(const Windows& w, const std::vector<Expr>& at) {
  Expr place = at[at.size() - w.size()];
  for (size_t i = 1; i < w.size(); ++i) place = place * Expr(w[i].in) + at[at.size() - w.size() + i];
  return place;
}

double lowest(DType t) {
  if (is_floating(t)) return -std::numeric_limits<double>::infinity();
  switch (t) {
    case DType::Int8:
      return -128;
    case DType::Int16:
      return -32768;
    case DType::Int32:
      return -2147483648.0;
    case DType::Int64:
      return -9223372036854775808.0;
    default:
      return 0;
  }
}

template <size_t Rank>
bool max_pool(Lowering& l, const Node& n) {  // (self, kernel, stride, padding, dilation, ceil_mode) -> (max, index)
  const Tensor t = l.in_memory(n.arg(0).value());
  if (t.numel() == 0 || n.results[0].numel() == 0 || t.dim() < Rank + 1 || t.dtype == DType::Bool) return false;
  const Arg dilation = n.arg(4);
  const auto w = windows(Rank, t.sizes, n.results[0].sizes, n.arg(1), n.arg(2), n.arg(3), &dilation);
  const bool with_index = n.results.size() > 1 && l.is_used(n, 1);
  const Tensor to = l.new_buffer(n, 0);
  const Tensor index_to = with_index ? l.new_buffer(n, 1) : Tensor();
  const DType compute = compute_type(t.dtype);
  // Outer loops follow memory, channels last included.
  std::vector<size_t> order(to.sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return to.strides[a] > to.strides[b]; });
  Sizes outer;
  for (size_t d : order) outer.push_back(to.sizes[d]);
  loops::NestBuilder b(l.buffers(), l.name_of(n), outer);
  std::vector<Expr> p(order.size());
  for (size_t i = 0; i < order.size(); ++i) p[order[i]] = b.outer()[i];
  const std::vector<Expr> at = element(w, p, b.stage(reached(w)));
  const Val is_inside = inside(b, w, at);
  const Val v = cast_to(b, load_if(b, t, is_inside, at, lowest(t.dtype)), compute);
  std::vector<Val> r;
  if (with_index) {
    // Of equal values the least index is taken: never one of the padding. Of several NaNs eager takes the last, so that
    // these have their index, i, as -1 - i.
    const auto from_end = [&](Val i) { return b.Sub(b.constant_int(DType::Int64, -1), i); };
    Val index = b.index_value(place(w, at));
    if (is_floating(compute)) index = b.where(b.Ne(v, v), from_end(index), index);
    index = b.where(is_inside, index, b.constant_int(DType::Int64, std::numeric_limits<int64_t>::max()));
    r = b.reduce(ReduceKind::ArgMax, {v, index});
    b.stage({});
    index = b.where(b.Lt(r[1], b.constant_int(DType::Int64, 0)), from_end(r[1]), r[1]);
    b.store(index_to.buffer, symbolic::linearize(p, index_to.strides, index_to.offset), index);
  } else {
    r = b.reduce(ReduceKind::Max, {v});
    b.stage({});
  }
  b.store(to.buffer, symbolic::linearize(p, to.strides, to.offset), cast_to(b, r[0], to.dtype));
  l.add_nest(b.finish());
  l.set(n, to, 0);
  if (with_index) l.set(n, index_to, 1);
  return true;
}

// How many windows may cover an element, by dim.
Sizes covering(const Windows& w) {
  Sizes candidates;
  for (const Window& x : w)
    candidates.push_back(std::min((x.kernel + x.stride - 1) / x.stride, (x.in - 1 + x.padding) / x.stride + 1));
  return candidates;
}

// A nest over the input's elements and the windows that may cover each: sum of value(window position, mask).
bool gather_windows(
    Lowering& l, const Node& n, const Windows& w, DType compute,
    const std::function<Val(Ops&, const std::vector<Expr>& p, const std::vector<Expr>& at, Val mask)>& value) {
  for (const Window& x : w)
    if (x.dilation != 1) return false;
  const Tensor to = l.new_buffer(n, 0);
  if (to.numel() == 0) return false;
  std::vector<size_t> order(to.sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return to.strides[a] > to.strides[b]; });
  Sizes outer;
  for (size_t d : order) outer.push_back(to.sizes[d]);
  loops::NestBuilder b(l.buffers(), l.name_of(n), outer);
  std::vector<Expr> p(order.size());
  for (size_t i = 0; i < order.size(); ++i) p[order[i]] = b.outer()[i];
  const std::vector<Expr> q = b.stage(covering(w));
  std::vector<Expr> at(p.begin(), p.end());
  std::optional<Val> mask;
  for (size_t i = 0; i < w.size(); ++i) {
    const size_t d = p.size() - w.size() + i;
    const Expr padded = p[d] + Expr(w[i].padding);
    at[d] = symbolic::floordiv(padded, w[i].stride) - q[i];
    // Window `at` covers element p if p is less than a kernel behind its start.
    const Val covers =
        b.And(b.in_range(at[d], 0, w[i].out), b.in_range(padded - at[d] * Expr(w[i].stride), 0, w[i].kernel));
    mask = mask ? b.And(*mask, covers) : covers;
  }
  const Val sum = b.reduce(ReduceKind::Sum, {cast_to(b, value(b, p, at, *mask), compute)})[0];
  b.stage({});
  b.store(to.buffer, symbolic::linearize(p, to.strides, to.offset), cast_to(b, sum, to.dtype));
  l.add_nest(b.finish());
  l.set(n, to, 0);
  return true;
}

// Whether an element may lie in several windows.
bool meet(const Windows& w) {
  return std::any_of(w.begin(), w.end(), [](const Window& x) { return x.stride < (x.kernel - 1) * x.dilation + 1; });
}

// To each place that a maximum came from, image by image: the planes of one apart, or all its channels together where
// these lie side by side. False where a gather is better: it asks every window that may cover an element, for places
// that lie `stride` apart, but all images and channels at once.
bool scatter_gradients(Lowering& l, const Node& n, const Windows& w, const Tensor& grad, const Tensor& index) {
  const TensorMeta& to = n.results[0];
  const size_t rank = to.sizes.size(), images = rank - w.size();
  if (to.numel() == 0 || !meet(w)) return false;
  const bool planes = to.strides == graph::contiguous_strides(to.sizes);
  if (!planes) {
    constexpr int64_t kFewWindows = 4;
    const Sizes c = covering(w);
    const int64_t windows = std::accumulate(c.begin(), c.end(), int64_t{1}, std::multiplies<>());
    if (rank != 4 || !to.is_contiguous(graph::MemoryFormat::ChannelsLast) || windows <= kFewWindows ||
        compute_type(to.dtype) != to.dtype)
      return false;
  }
  int64_t elements = 1;
  for (const Window& x : w) elements *= x.in;
  // The order of the loops: n, c, h, w or n, h, w, c.
  const std::vector<size_t> order = planes ? std::vector<size_t>{0, 1, 2, 3, 4} : std::vector<size_t>{0, 2, 3, 1};
  Sizes ranges;
  for (size_t d = 0; d < rank; ++d) ranges.push_back(grad.sizes[order[d]]);
  const auto point = [=](Index p) {
    std::vector<Expr> at(p.size());
    for (size_t d = 0; d < rank; ++d) at[order[d]] = p[d];
    return at;
  };
  return scatter_into(l, n, zeros(l, to.dtype, to.sizes),
                      {.ranges = ranges,
                       .mode = loops::StoreMode::Add,
                       .apart = [&](size_t d) { return d < (planes ? images : 1); },
                       .place =
                           [&](Ops& o, Index p) {
                             // The image's elements are numbered row by row: the number is a place in a row as long as
                             // the image.
                             std::vector<Expr> at = point(p);
                             const Expr place =
                                 o.indirect(index.load(o, at), elements, false, "index of a maximum out of its image");
                             std::fill(at.begin() + static_cast<std::ptrdiff_t>(images), at.end(), Expr(0));
                             at.back() = place;
                             return at;
                           },
                       .value = [&](Ops& o, Index p) { return grad.load(o, point(p)); },
                       .wide = true});
}

template <size_t Rank>
bool max_pool_backward(Lowering& l, const Node& n) {
  // (grad, self, kernel, stride, padding, dilation, ceil_mode, indices)
  const Tensor grad = l.in_memory(l.get(n.arg(0)), n.name + "_grad");
  const Tensor index = l.in_memory(l.get(n.arg(7)), n.name + "_index");
  if (grad.numel() == 0 || !is_floating(grad.dtype)) return false;
  const Arg dilation = n.arg(5);
  const auto w = windows(Rank, n.results[0].sizes, grad.sizes, n.arg(2), n.arg(3), n.arg(4), &dilation);
  if (scatter_gradients(l, n, w, grad, index)) return true;
  const DType compute = compute_type(grad.dtype);
  return gather_windows(l, n, w, compute,
                        [&](Ops& o, const std::vector<Expr>& p, const std::vector<Expr>& at, Val mask) {
                          const Val here = o.index_value(place(w, p));
                          const Val chosen = o.Eq(load_if(o, index, mask, at, -1), here);
                          const Val g = cast_to(o, load_if(o, grad, mask, at, 0), compute);
                          return o.where(chosen, g, o.constant(compute, 0));
                        });
}

// How many elements the window at output position `at` averages over, in one dim.
Val window_size(Ops& o, const Window& w, const Expr& at, bool count_padding, DType t) {
  const Expr start = at * Expr(w.stride) - Expr(w.padding);
  Expr end = symbolic::min(start + Expr(w.kernel), Expr(w.in + w.padding));
  Expr begin = start;
  if (!count_padding) {
    begin = symbolic::max(start, Expr(0));
    end = symbolic::min(end, Expr(w.in));
  }
  const Expr size = end - begin;
  return size.is_constant() ? o.constant(t, static_cast<double>(size.constant())) : o.cast(o.index_value(size), t);
}

struct Divisor {
  bool count_padding;
  std::optional<int64_t> fixed;
  Val of(Ops& o, const Windows& w, const std::vector<Expr>& at, DType t) const {
    if (fixed) return o.constant(t, static_cast<double>(*fixed));
    std::optional<Val> size;
    for (size_t i = 0; i < w.size(); ++i) {
      const Val one = window_size(o, w[i], at[at.size() - w.size() + i], count_padding, t);
      size = size ? o.Mul(*size, one) : one;
    }
    return *size;
  }
};

bool average(Lowering& l, const Node& n, const Windows& w, const Divisor& divisor) {
  const Tensor t = l.in_memory(n.arg(0).value());
  if (t.numel() == 0 || n.results[0].numel() == 0 || t.sizes.size() <= w.size() || !is_floating(t.dtype)) return false;
  const Tensor to = l.new_buffer(n, 0);
  const DType compute = compute_type(t.dtype);
  loops::NestBuilder b(l.buffers(), l.name_of(n), to.sizes);
  const std::vector<Expr> q = b.stage(reached(w));
  const std::vector<Expr>& p = b.outer();
  const std::vector<Expr> at = element(w, p, q);
  const Val v = load_if(b, t, inside(b, w, at), at, 0);
  const Val sum = b.reduce(ReduceKind::Sum, {cast_to(b, v, compute)})[0];
  b.stage({});
  const Val mean = b.Div(sum, divisor.of(b, w, p, compute));
  b.store(to.buffer, symbolic::linearize(p, to.strides, to.offset), cast_to(b, mean, to.dtype));
  l.add_nest(b.finish());
  l.set(n, to, 0);
  return true;
}

bool average_backward(Lowering& l, const Node& n, const Tensor& grad, const Windows& w, const Divisor& divisor) {
  if (grad.numel() == 0 || !is_floating(grad.dtype)) return false;
  const DType compute = compute_type(grad.dtype);
  return gather_windows(l, n, w, compute, [&](Ops& o, const std::vector<Expr>&, const std::vector<Expr>& at, Val mask) {
    const Val g = cast_to(o, load_if(o, grad, mask, at, 0), compute);
    return o.where(mask, o.Div(g, divisor.of(o, w, at, compute)), o.constant(compute, 0));
  });
}

template <size_t Rank>
bool avg_pool(Lowering& l, const Node& n) {
  // (self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
  const auto w = windows(Rank, l.get(n.arg(0)).sizes, n.results[0].sizes, n.arg(1), n.arg(2), n.arg(3), nullptr);
  Divisor d{n.arg(5).to_bool(), std::nullopt};
  if (!n.arg(6).is_none()) d.fixed = n.arg(6).to_int();
  return average(l, n, w, d);
}

template <size_t Rank>
bool avg_pool_backward(Lowering& l, const Node& n) {
  // (grad, self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
  const Tensor grad = l.in_memory(l.get(n.arg(0)), n.name + "_grad");
  const auto w = windows(Rank, n.results[0].sizes, grad.sizes, n.arg(2), n.arg(3), n.arg(4), nullptr);
  Divisor d{n.arg(6).to_bool(), std::nullopt};
  if (!n.arg(7).is_none()) d.fixed = n.arg(7).to_int();
  return average_backward(l, n, grad, w, d);
}

// Adaptive pooling where every window has one size.
std::optional<Windows> even_windows(size_t rank, const Sizes& in, const Sizes& out) {
  Windows w(rank);
  for (size_t i = 0; i < rank; ++i) {
    const int64_t a = in[in.size() - rank + i], b = out[out.size() - rank + i];
    if (b == 0 || a % b != 0) return std::nullopt;
    w[i] = {a / b, a / b, 0, 1, a, b};
  }
  return w;
}

int64_t volume(const Windows& w) {
  int64_t elements = 1;
  for (const Window& x : w) elements *= x.kernel;
  return elements;
}

template <size_t Rank>
bool adaptive_avg_pool(Lowering& l, const Node& n) {  // (self, output_size)
  const auto w = even_windows(Rank, l.get(n.arg(0)).sizes, n.results[0].sizes);
  return w && average(l, n, *w, {true, volume(*w)});
}

template <size_t Rank>
bool adaptive_avg_pool_backward(Lowering& l, const Node& n) {  // (grad, self)
  const Tensor grad = l.get(n.arg(0));
  const auto w = even_windows(Rank, n.results[0].sizes, grad.sizes);
  if (!w || grad.numel() == 0) return false;
  // Windows do not overlap: each element has exactly one.
  const DType compute = compute_type(grad.dtype), out = grad.dtype;
  l.set(n, l.lazy(
               out, n.results[0].sizes,
               [grad, w = *w, compute, out](Ops& o, Index p) {
                 std::vector<Expr> at(p.begin(), p.end());
                 for (size_t i = 0; i < Rank; ++i)
                   at[p.size() - Rank + i] = symbolic::floordiv(at[p.size() - Rank + i], w[i].kernel);
                 const Val g = cast_to(o, grad.load(o, at), compute);
                 return cast_to(o, o.Div(g, o.constant(compute, static_cast<double>(volume(w)))), out);
               },
               {grad}, 3));
  return true;
}

// Whole factors by which the image's dims grow; others need float arithmetic on indices, which ATen does.
template <size_t Rank>
std::optional<std::array<int64_t, Rank>> factors(const Sizes& small, const Sizes& large) {
  std::array<int64_t, Rank> f;
  for (size_t i = 0; i < Rank; ++i) {
    const int64_t a = small[small.size() - Rank + i], b = large[large.size() - Rank + i];
    if (a == 0 || b % a != 0) return std::nullopt;
    f[i] = b / a;
  }
  return f;
}
// Explicit scales, the arguments from `at` on, must say the same as the sizes do.
template <size_t Rank>
bool same_scales(const Node& n, size_t at, const std::array<int64_t, Rank>& factors) {
  for (size_t i = 0; i < Rank; ++i)
    if (const Arg& a = n.arg(at + i);
        !a.is_none() && !(a.is_number() && a.to_double() == static_cast<double>(factors[i])))
      return false;
  return true;
}

template <size_t Rank>
bool upsample_nearest(Lowering& l, const Node& n) {  // (self, output_size, a scale for each dim)
  const Tensor t = l.get(n.arg(0));
  const auto f = factors<Rank>(t.sizes, n.results[0].sizes);
  if (!f || t.numel() == 0 || !same_scales(n, 2, *f)) return false;
  l.set(n, l.mapped(t, n.results[0].sizes, [f = *f](Index p) {
    std::vector<Expr> at(p.begin(), p.end());
    for (size_t i = 0; i < Rank; ++i) at[p.size() - Rank + i] = symbolic::floordiv(at[p.size() - Rank + i], f[i]);
    return at;
  }));
  return true;
}

template <size_t Rank>
bool upsample_nearest_backward(Lowering& l, const Node& n) {  // (grad, output_size, input_size, a scale for each dim)
  const Tensor grad = l.get(n.arg(0));
  const auto f = factors<Rank>(n.results[0].sizes, grad.sizes);
  if (!f || grad.numel() == 0 || !same_scales(n, 3, *f)) return false;
  const Tensor to = l.new_buffer(n);
  const DType compute = compute_type(grad.dtype);
  loops::NestBuilder b(l.buffers(), l.name_of(n), to.sizes);
  const std::vector<Expr> q = b.stage(Sizes(f->begin(), f->end()));
  std::vector<Expr> at = b.outer();
  for (size_t i = 0; i < Rank; ++i) at[at.size() - Rank + i] = at[at.size() - Rank + i] * Expr((*f)[i]) + q[i];
  Val sum;
  {
    EvalScope scope;
    sum = b.reduce(ReduceKind::Sum, {cast_to(b, grad.load(b, at), compute)})[0];
  }
  b.stage({});
  b.store(to.buffer, symbolic::linearize(b.outer(), to.strides, to.offset), cast_to(b, sum, to.dtype));
  l.add_nest(b.finish());
  l.set(n, to);
  return true;
}

const RuleRow kRows[] = {
    {"aten::max_pool2d_with_indices", max_pool<2>},
    {"aten::max_pool2d_with_indices_backward", max_pool_backward<2>},
    {"aten::max_pool3d_with_indices", max_pool<3>},
    {"aten::max_pool3d_with_indices_backward", max_pool_backward<3>},
    {"aten::avg_pool2d", avg_pool<2>},
    {"aten::avg_pool2d_backward", avg_pool_backward<2>},
    {"aten::avg_pool3d", avg_pool<3>},
    {"aten::avg_pool3d_backward", avg_pool_backward<3>},
    {"aten::_adaptive_avg_pool2d", adaptive_avg_pool<2>},
    {"aten::_adaptive_avg_pool2d_backward", adaptive_avg_pool_backward<2>},
    {"aten::_adaptive_avg_pool3d", adaptive_avg_pool<3>},
    {"aten::_adaptive_avg_pool3d_backward", adaptive_avg_pool_backward<3>},
    {"aten::upsample_nearest1d", upsample_nearest<1>},
    {"aten::upsample_nearest1d_backward", upsample_nearest_backward<1>},
    {"aten::upsample_nearest2d", upsample_nearest<2>},
    {"aten::upsample_nearest2d_backward", upsample_nearest_backward<2>},
    {"aten::upsample_nearest3d", upsample_nearest<3>},
    {"aten::upsample_nearest3d_backward", upsample_nearest_backward<3>},
};

}  // namespace

std::span<const RuleRow> pool_rules() { return kRows; }

}  // namespace kiln::lower
