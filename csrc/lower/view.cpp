// View ops: index arithmetic on the producer. A window on memory stays a window where strides can say it, so that
// library calls get transposed or sliced operands without a copy.
#include "base/error.h"
#include "lower/lowering.h"

namespace kiln::lower {
namespace {

// The same memory with other sizes, strides and offset.
Tensor window(const Tensor& t, Sizes sizes, Sizes strides, int64_t offset) {
  Tensor out = t;
  out.sizes = std::move(sizes);
  out.strides = std::move(strides);
  out.offset = offset;
  return out;
}

/// Strides of a strided tensor seen with other sizes, as Tensor.view computes them; nullopt where a copy is needed.
std::optional<Sizes> view_strides(const Sizes& sizes, const Sizes& strides, const Sizes& to) {
  int64_t numel = 1;
  for (int64_t s : sizes) numel *= s;
  Sizes out(to.size());
  if (numel == 0) return graph::contiguous_strides(to);
  int64_t d = static_cast<int64_t>(to.size()) - 1;
  int64_t chunk_stride = strides.empty() ? 1 : strides.back(), chunk = 1, seen = 1;
  if (sizes.empty()) {
    for (auto& s : out) s = 1;
    return out;
  }
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
    chunk *= sizes[i];
    if (i == 0 || (sizes[i - 1] != 1 && strides[i - 1] != chunk * chunk_stride)) {
      while (d >= 0 && (seen < chunk || to[d] == 1)) {
        out[d] = seen * chunk_stride;
        seen *= to[d];
        --d;
      }
      if (seen != chunk) return std::nullopt;
      if (i > 0) {
        chunk_stride = strides[i - 1];
        chunk = 1;
        seen = 1;
      }
    }
  }
  return d == -1 ? std::optional(out) : std::nullopt;
}

Tensor reshaped(const Lowering& l, const Tensor& t, const Sizes& to) {
  if (t.sizes == to) return t;
  if (t.strided())
    if (auto strides = view_strides(t.sizes, t.strides, to)) return window(t, to, *strides, t.offset);
  const Sizes from = t.sizes;
  if (t.numel() == 0) return l.mapped(t, to, [from](Index) { return std::vector<Expr>(from.size(), Expr(0)); });
  return l.mapped(t, to, [from, to, strides = graph::contiguous_strides(to)](Index p) {
    return symbolic::delinearize(symbolic::linearize({p.begin(), p.end()}, strides), from);
  });
}

bool reshape(Lowering& l, const Node& n) {
  l.set(n, reshaped(l, l.get(n.arg(0)), n.results[0].sizes));
  return true;
}

Tensor permuted(const Lowering& l, const Tensor& t, const std::vector<int64_t>& dims) {
  Sizes sizes, strides;
  for (int64_t d : dims) {
    sizes.push_back(t.sizes[d]);
    if (t.strided()) strides.push_back(t.strides[d]);
  }
  if (t.strided()) return window(t, sizes, strides, t.offset);
  return l.mapped(t, sizes, [dims](Index p) {
    std::vector<Expr> index(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) index[dims[i]] = p[i];
    return index;
  });
}

bool permute(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  std::vector<int64_t> dims = n.arg(1).to_ints();
  for (int64_t& d : dims) d = wrap_dim(d, t.dim());
  l.set(n, permuted(l, t, dims));
  return true;
}

bool transpose(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  std::vector<int64_t> dims(t.sizes.size());
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = static_cast<int64_t>(i);
  if (t.dim() > 0) {
    const bool matrix = n.args.size() < 3;  // t()
    const int64_t a = matrix ? 0 : wrap_dim(n.arg(1).to_int(), t.dim());
    const int64_t b = matrix ? t.dim() - 1 : wrap_dim(n.arg(2).to_int(), t.dim());
    std::swap(dims[a], dims[b]);
  }
  l.set(n, permuted(l, t, dims));
  return true;
}

bool expand(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const Sizes to = n.results[0].sizes;
  const size_t skip = to.size() - t.sizes.size();
  if (t.strided()) {
    Sizes strides(to.size(), 0);
    for (size_t i = 0; i < t.sizes.size(); ++i)
      strides[skip + i] = t.sizes[i] == 1 && to[skip + i] != 1 ? 0 : t.strides[i];
    l.set(n, window(t, to, strides, t.offset));
  } else {
    l.set(n, l.mapped(t, to, [from = t.sizes](Index p) { return broadcast_index(from, p); }));
  }
  return true;
}

}  // namespace

Tensor sliced(const Lowering& l, const Tensor& t, int64_t dim, int64_t start, int64_t step, int64_t size) {
  Sizes sizes = t.sizes;
  sizes[dim] = size;
  if (t.strided()) {
    Sizes strides = t.strides;
    strides[dim] *= step;
    return window(t, sizes, strides, t.offset + start * t.strides[dim]);
  }
  return l.mapped(t, sizes, [=](Index p) {
    std::vector<Expr> index(p.begin(), p.end());
    index[dim] = index[dim] * Expr(step) + Expr(start);
    return index;
  });
}

Tensor without_dim(const Lowering& l, const Tensor& t, int64_t dim, int64_t at) {
  Sizes sizes = t.sizes;
  sizes.erase(sizes.begin() + dim);
  if (t.strided()) {
    Sizes strides = t.strides;
    strides.erase(strides.begin() + dim);
    return window(t, sizes, strides, t.offset + at * t.strides[dim]);
  }
  return l.mapped(t, sizes, [=](Index p) {
    std::vector<Expr> index(p.begin(), p.end());
    index.insert(index.begin() + dim, Expr(at));
    return index;
  });
}

Tensor diagonal_of(const Lowering& l, const Tensor& t, int64_t offset, int64_t a, int64_t b, int64_t length) {
  const int64_t row = offset < 0 ? -offset : 0, col = offset > 0 ? offset : 0;
  Sizes to, strides;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (d == a || d == b) continue;
    to.push_back(t.sizes[d]);
    if (t.strided()) strides.push_back(t.strides[d]);
  }
  to.push_back(length);
  if (t.strided()) {
    strides.push_back(t.strides[a] + t.strides[b]);
    const int64_t shift = length == 0 ? 0 : row * t.strides[a] + col * t.strides[b];
    return window(t, to, strides, t.offset + shift);
  }
  return l.mapped(t, to, [=, rank = t.dim()](Index p) {
    std::vector<Expr> index;
    size_t next = 0;
    for (int64_t d = 0; d < rank; ++d)
      index.push_back(d == a ? p.back() + Expr(row) : d == b ? p.back() + Expr(col) : p[next++]);
    return index;
  });
}

namespace {

bool slice(Lowering& l, const Node& n) {
  const Tensor t = l.whole(l.get(n.arg(0)), n);
  const int64_t dim = wrap_dim(n.arg(1).to_int(), t.dim());
  const int64_t start = slice_start(n.arg(2), t.sizes.at(dim));
  const int64_t step = n.args.size() > 4 ? n.arg(4).to_int() : 1;
  l.set(n, sliced(l, t, dim, start, step, n.results[0].sizes[dim]));
  return true;
}

bool select(Lowering& l, const Node& n) {
  const Tensor t = l.whole(l.get(n.arg(0)), n);
  const int64_t dim = wrap_dim(n.arg(1).to_int(), t.dim());
  const int64_t at = n.arg(2).to_int();
  l.set(n, without_dim(l, t, dim, at < 0 ? at + t.sizes.at(dim) : at));
  return true;
}

bool unbind(Lowering& l, const Node& n) {
  const Tensor t = l.whole(l.get(n.arg(0)), n);
  const int64_t dim = wrap_dim(n.args.size() > 1 ? n.arg(1).to_int() : 0, t.dim());
  for (uint32_t i = 0; i < n.results.size(); ++i) l.set(n, without_dim(l, t, dim, i), i);
  return true;
}

// All the ways to cut a dim: the results' sizes say where.
bool split(Lowering& l, const Node& n) {
  const Tensor t = l.whole(l.get(n.arg(0)), n);
  const int64_t dim = wrap_dim(n.args.size() > 2 ? n.arg(2).to_int() : 0, t.dim());
  int64_t start = 0;
  for (uint32_t i = 0; i < n.results.size(); ++i) {
    const int64_t size = n.results[i].sizes.at(dim);
    l.set(n, sliced(l, t, dim, start, 1, size), i);
    start += size;
  }
  return true;
}

bool diagonal(Lowering& l, const Node& n) {
  const Tensor t = l.whole(l.get(n.arg(0)), n);
  l.set(n, diagonal_of(l, t, n.arg(1).to_int(), wrap_dim(n.arg(2).to_int(), t.dim()),
                       wrap_dim(n.arg(3).to_int(), t.dim()), n.results[0].sizes.back()));
  return true;
}

bool unfold(Lowering& l, const Node& n) {  // (self, dim, size, step)
  const Tensor t = l.get(n.arg(0));
  if (t.dim() == 0) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), t.dim()), step = n.arg(3).to_int();
  const Sizes to = n.results[0].sizes;
  if (t.strided()) {
    Sizes strides = t.strides;
    strides.push_back(strides[dim]);
    strides[dim] *= step;
    l.set(n, window(t, to, std::move(strides), t.offset));
  } else {
    l.set(n, l.mapped(t, to, [dim, step](Index p) {
      std::vector<Expr> index(p.begin(), p.end() - 1);
      index[dim] = index[dim] * Expr(step) + p.back();
      return index;
    }));
  }
  return true;
}

// as_strided speaks of the base's storage: only for bases that lie in memory as eager's do.
bool as_strided(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const TensorMeta& base = n.arg(0).value().meta();
  const bool in_order = !t.strided() && !t.may_raise() && base.is_contiguous();
  if (!in_order && (!t.strided() || t.strides != base.strides)) return false;
  const int64_t offset = n.args.size() > 3 && !n.arg(3).is_none() ? n.arg(3).to_int() : base.offset;
  const Sizes sizes = n.arg(1).to_ints(), strides = n.arg(2).to_ints();
  const int64_t first = t.offset + offset - base.offset;
  int64_t last = first;
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  // Outside of what the buffer spans there may be memory in eager; here there is none that is known.
  const int64_t known = in_order ? t.numel() : l.buffers()[t.buffer].numel;
  if (n.results[0].numel() > 0 && (first < 0 || last >= known)) return false;
  if (in_order && t.numel() == 0) return false;
  if (in_order)
    l.set(n, l.mapped(t, sizes, [from = t.sizes, strides, first](Index p) {
      return symbolic::delinearize(symbolic::linearize({p.begin(), p.end()}, strides, first), from);
    }));
  else
    l.set(n, window(t, sizes, strides, first));
  return true;
}

bool same(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  if (t.dtype != n.results[0].dtype || t.sizes != n.results[0].sizes) return false;
  l.set(n, t);
  return true;
}

const RuleRow kRows[] = {
    {"aten::view", reshape},
    {"aten::_unsafe_view", reshape},
    {"aten::reshape", reshape},
    {"aten::_reshape_alias", reshape},
    {"aten::flatten.using_ints", reshape},
    {"aten::unsqueeze", reshape},
    {"aten::squeeze", reshape},
    {"aten::squeeze.dim", reshape},
    {"aten::squeeze.dims", reshape},
    {"aten::permute", permute},
    {"aten::transpose.int", transpose},
    {"aten::t", transpose},
    {"aten::expand", expand},
    {"aten::slice.Tensor", slice},
    {"aten::select.int", select},
    {"aten::unbind.int", unbind},
    {"aten::split.Tensor", split},
    {"aten::split_with_sizes", split},
    {"aten::chunk", split},
    {"aten::unsafe_split.Tensor", split},
    {"aten::unsafe_chunk", split},
    {"aten::diagonal", diagonal},
    {"aten::unfold", unfold},
    {"aten::as_strided", as_strided},
    {"aten::alias", same},
    {"aten::data", same},
    {"aten::detach", same},
    {"aten::lift_fresh", same},
};

}  // namespace

std::span<const RuleRow> view_rules() { return kRows; }

}  // namespace kiln::lower
