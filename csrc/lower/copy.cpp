// Ops that move elements or make them from nothing: concatenation, padding, triangles, constants, ranges.
#include "base/error.h"
#include "lower/lowering.h"

namespace kiln::lower {
namespace {

bool cat(Lowering& l, const Node& n) {
  const std::vector<graph::Value> list = n.arg(0).to_values();
  const Sizes& sizes = n.results[0].sizes;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), static_cast<int64_t>(sizes.size()));
  std::vector<Tensor> parts;
  for (graph::Value v : list) {
    const Tensor t = l.get(v);
    // torch.cat skips empty one-dimensional tensors, whatever the others' rank.
    if (t.dim() == 1 && t.sizes[0] == 0) continue;
    if (t.sizes.size() != sizes.size()) return false;
    parts.push_back(t);
  }
  const Tensor to = l.new_buffer(n);
  int64_t start = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    Tensor window = to;
    window.sizes = parts[i].sizes;
    window.offset = start * to.strides[dim];
    l.store(parts[i], window, l.name_of(n) + "_" + std::to_string(i));
    start += parts[i].sizes[dim];
  }
  l.set(n, to);
  return true;
}

// So many parts, of so few operations each, are stored by one nest: they are often parts of one tensor, or lie between
// each other.
constexpr size_t kMostTogether = 4;
constexpr int kCheapPart = 16;

bool stack(Lowering& l, const Node& n) {
  const std::vector<graph::Value> list = n.arg(0).to_values();
  const Tensor to = l.new_buffer(n);
  const int64_t dim = wrap_dim(n.arg(1).to_int(), to.dim());
  std::vector<std::pair<Tensor, Tensor>> stores;
  bool together = list.size() <= kMostTogether;
  for (size_t i = 0; i < list.size(); ++i) {
    stores.emplace_back(l.get(list[i]), without_dim(l, to, dim, static_cast<int64_t>(i)));
    together &= stores.back().first.ops() <= kCheapPart;
  }
  if (together) {
    l.store_each(stores, l.name_of(n));
  } else {
    for (size_t i = 0; i < list.size(); ++i)
      l.store(stores[i].first, stores[i].second, l.name_of(n) + "_" + std::to_string(i));
  }
  l.set(n, to);
  return true;
}

bool pad(Lowering& l, const Node& n) {  // constant_pad_nd(self, pad, value): pairs from the last dim on
  const Tensor t = l.in_memory(l.get(n.arg(0)), n.name + "_in");
  const std::vector<int64_t> pads = n.arg(1).to_ints();
  if (!n.arg(2).is_number()) return false;
  const Arg value = n.arg(2);
  std::vector<int64_t> before(t.sizes.size(), 0);
  for (size_t i = 0; i < pads.size() / 2; ++i) before[t.sizes.size() - 1 - i] = pads[2 * i];
  l.set(n, l.lazy(
               t.dtype, n.results[0].sizes,
               [=](Ops& o, Index p) {
                 std::vector<Expr> index;
                 Val mask = o.constant_int(DType::Bool, 1);
                 bool first = true;
                 for (size_t i = 0; i < p.size(); ++i) {
                   index.push_back(p[i] - Expr(before[i]));
                   if (index[i].range().lo >= 0 && index[i].range().hi < t.sizes[i]) continue;
                   const Val in = o.in_range(index[i], 0, t.sizes[i]);
                   mask = first ? in : o.And(mask, in);
                   first = false;
                 }
                 return load_if(o, t, mask, index, constant_of(o, value, t.dtype));
               },
               {t}, 3));
  return true;
}

// Gradient of a slice: the slice's elements in zeros. Element p comes from (p - start) / step.
Tensor in_zeros(Lowering& l, const Node& n, const Tensor& slice, int64_t dim, int64_t start, int64_t step,
                const std::optional<Tensor>& background) {
  const Tensor t = l.in_memory(slice, n.name + "_in");
  std::vector<Tensor> inputs{t};
  if (background) inputs.push_back(*background);
  return l.lazy(
      t.dtype, n.results[0].sizes,
      [=](Ops& o, Index p) {
        std::vector<Expr> index(p.begin(), p.end());
        const Expr from = index[dim] - Expr(start);
        Val mask = o.in_range(from, 0, t.sizes[dim] * step);
        if (step != 1) {
          const Val rest = o.index_value(symbolic::mod(from, step));
          mask = o.And(mask, o.Eq(rest, o.constant_int(DType::Int64, 0)));
        }
        index[dim] = step == 1 ? from : symbolic::floordiv(from, step);
        const Val v = load_if(o, t, mask, index, 0);
        return background ? o.where(mask, v, background->load(o, p)) : v;
      },
      inputs, 3);
}

bool slice_backward(Lowering& l, const Node& n) {  // (grad, input_sizes, dim, start, end, step)
  const Tensor grad = l.get(n.arg(0));
  if (n.results[0].numel() == 0) return false;
  const int64_t dim = wrap_dim(n.arg(2).to_int(), grad.dim());
  const int64_t start = slice_start(n.arg(3), n.results[0].sizes[dim]);
  l.set(n, in_zeros(l, n, grad, dim, start, n.arg(5).to_int(), std::nullopt));
  return true;
}

/// A part of memory that is there, replaced.
bool part_written(Lowering& l, const Node& n) {
  if (!l.place()) return false;
  const Tensor part = *l.slice_of(n, *l.place()), src = l.get(n.arg(1));
  if (!same_place(src, part)) l.store(src, part, l.name_of(n));
  l.set(n, *l.place());
  return true;
}

bool slice_scatter(Lowering& l, const Node& n) {  // (self, src, dim, start, end, step)
  if (part_written(l, n)) return true;
  const Tensor self = l.get(n.arg(0)), src = l.get(n.arg(1));
  if (n.results[0].numel() == 0 || src.dtype != self.dtype || src.dim() != self.dim()) return false;
  const int64_t dim = wrap_dim(n.arg(2).to_int(), self.dim());
  const int64_t start = slice_start(n.arg(3), self.sizes[dim]);
  for (int64_t d = 0; d < self.dim(); ++d)
    if (d != dim && src.sizes[d] != self.sizes[d]) return false;
  l.set(n, in_zeros(l, n, src, dim, start, n.arg(5).to_int(), self));
  return true;
}

// grad without `dim` as the only slice of a tensor with it.
bool select_into(Lowering& l, const Node& n, const Tensor& part, int64_t dim, int64_t at,
                 const std::optional<Tensor>& background) {
  Tensor t = l.in_memory(part, n.name + "_in");
  if (n.results[0].numel() == 0 || t.dtype != n.results[0].dtype) return false;
  Tensor slice = t;
  slice.sizes.insert(slice.sizes.begin() + dim, 1);
  slice.strides.insert(slice.strides.begin() + dim, 0);
  for (size_t d = 0; d < slice.sizes.size(); ++d)
    if (static_cast<int64_t>(d) != dim && slice.sizes[d] != n.results[0].sizes[d]) return false;
  l.set(n, in_zeros(l, n, slice, dim, at < 0 ? at + n.results[0].sizes[dim] : at, 1, background));
  return true;
}
bool select_backward(Lowering& l, const Node& n) {  // (grad, input_sizes, dim, index)
  const int64_t dim = wrap_dim(n.arg(2).to_int(), n.results[0].dim());
  return select_into(l, n, l.get(n.arg(0)), dim, n.arg(3).to_int(), std::nullopt);
}
bool select_scatter(Lowering& l, const Node& n) {  // (self, src, dim, index)
  if (part_written(l, n)) return true;
  const Tensor self = l.get(n.arg(0));
  return select_into(l, n, l.get(n.arg(1)), wrap_dim(n.arg(2).to_int(), self.dim()), n.arg(3).to_int(), self);
}

// `part` on a diagonal of a tensor with the node's sizes. Its last dim runs along the diagonal.
bool on_diagonal(Lowering& l, const Node& n, const Tensor& part, int64_t offset, int64_t row, int64_t column,
                 const std::optional<Tensor>& background) {
  if (n.results[0].numel() == 0 || part.dtype != n.results[0].dtype) return false;
  const Tensor t = l.in_memory(part, n.name + "_in");
  std::vector<Tensor> inputs{t};
  if (background) inputs.push_back(*background);
  l.set(n, l.lazy(
               t.dtype, n.results[0].sizes,
               [=](Ops& o, Index p) {
                 std::vector<Expr> index;
                 for (int64_t d = 0; d < static_cast<int64_t>(p.size()); ++d)
                   if (d != row && d != column) index.push_back(p[d]);
                 index.push_back(offset >= 0 ? p[row] : p[column]);
                 const Val mask = o.in_range(p[column] - p[row] - Expr(offset), 0, 1);
                 const Val v = load_if(o, t, mask, index, 0);
                 return background ? o.where(mask, v, background->load(o, p)) : v;
               },
               inputs, 3));
  return true;
}
bool diagonal_scatter(Lowering& l, const Node& n) {  // (self, src, offset, dim1, dim2)
  if (part_written(l, n)) return true;
  const Tensor self = l.get(n.arg(0));
  return on_diagonal(l, n, l.get(n.arg(1)), n.arg(2).to_int(), wrap_dim(n.arg(3).to_int(), self.dim()),
                     wrap_dim(n.arg(4).to_int(), self.dim()), self);
}
bool diagonal_backward(Lowering& l, const Node& n) {  // (grad, input_sizes, offset, dim1, dim2)
  const int64_t rank = n.results[0].dim();
  return on_diagonal(l, n, l.get(n.arg(0)), n.arg(2).to_int(), wrap_dim(n.arg(3).to_int(), rank),
                     wrap_dim(n.arg(4).to_int(), rank), std::nullopt);
}

bool flip(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  if (t.numel() == 0) return false;
  std::vector<int64_t> dims = n.arg(1).to_ints();
  for (int64_t& d : dims) d = wrap_dim(d, t.dim());
  l.set(n, l.mapped(t, t.sizes, [dims, sizes = t.sizes](Index p) {
    std::vector<Expr> index(p.begin(), p.end());
    for (int64_t d : dims)
      if (!sizes.empty()) index[d] = Expr(sizes[d] - 1) - index[d];  // a number has a dim to name, and none to flip
    return index;
  }));
  return true;
}

bool roll(Lowering& l, const Node& n) {  // (self, shifts, dims)
  const Tensor t = l.get(n.arg(0));
  const std::vector<int64_t> shifts = n.arg(1).to_ints(), dims = n.arg(2).to_ints();
  if (t.numel() == 0 || t.dim() == 0 || dims.empty() || dims.size() != shifts.size()) return false;
  // Element i of a dim is element (i + from) % size of the input.
  Sizes from(t.sizes.size(), 0);
  for (size_t i = 0; i < dims.size(); ++i) {
    const int64_t d = wrap_dim(dims[i], t.dim()), size = t.sizes[d];
    from[d] = ((from[d] - shifts[i]) % size + size) % size;
  }
  const auto place = [from, sizes = t.sizes](Index p) {
    std::vector<Expr> index(p.begin(), p.end());
    for (size_t d = 0; d < index.size(); ++d)
      if (from[d] != 0) index[d] = symbolic::mod(index[d] + Expr(from[d]), sizes[d]);
    return index;
  };
  const size_t last = t.sizes.size() - 1;
  if (from[last] == 0 || !t.strided()) {
    l.set(n, l.mapped(t, t.sizes, place));
    return true;
  }
  // Lanes run over the last dim: two loads of runs cost less than one of computed places.
  const int64_t size = t.sizes[last], turn = size - from[last];
  l.set(n, l.lazy(
               t.dtype, t.sizes,
               [t, place, last, size, turn](Ops& o, Index p) {
                 std::vector<Expr> index = place(p);
                 const Val head = o.in_range(p[last], 0, turn), tail = o.in_range(p[last], turn, size);
                 index[last] = p[last] + Expr(size - turn);
                 const Val a = load_if(o, t, head, index, 0);
                 index[last] = p[last] - Expr(turn);
                 return o.where(head, a, load_if(o, t, tail, index, 0));
               },
               {t, t}, 3));
  return true;
}

bool repeat(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  if (t.numel() == 0) return false;
  l.set(n, l.mapped(t, n.results[0].sizes, [sizes = t.sizes](Index p) {
    std::vector<Expr> index;
    const size_t skip = p.size() - sizes.size();
    for (size_t i = 0; i < sizes.size(); ++i) index.push_back(symbolic::mod(p[skip + i], sizes[i]));
    return index;
  }));
  return true;
}

// --- from nothing
// ------------------------------------------------------------------------------------------------------

bool filled(Lowering& l, const Node& n, const Arg& value) {
  const DType t = n.results[0].dtype;
  if (!value.is_number()) return false;
  l.set(n, l.lazy(t, n.results[0].sizes, [t, value](Ops& o, Index) { return constant_of(o, value, t); }, {}, 0));
  return true;
}
template <int Value>
bool fill_with(Lowering& l, const Node& n) {
  return filled(l, n, Arg(Value));
}
template <int At>
bool fill_arg(Lowering& l, const Node& n) {
  return filled(l, n, n.arg(At));
}

// fill(self, value) with a 0-dim tensor.
bool fill_tensor(Lowering& l, const Node& n) {
  const Tensor v = l.get(n.arg(1));
  const DType t = n.results[0].dtype;
  l.set(n, l.lazy(
               t, n.results[0].sizes,
               [=](Ops& o, Index) { return cast_to(o, v.load(o, std::vector<Expr>(v.sizes.size(), Expr(0))), t); }, {v},
               0));
  return true;
}

// copy(self, source): the source's values in self's dtype and sizes; a number where folding knows the source.
bool copy(Lowering& l, const Node& n) {
  if (n.arg(1).is_number()) return filled(l, n, n.arg(1));
  const Tensor t = l.get(n.arg(1));
  const DType out = n.results[0].dtype;
  l.set(n, l.lazy(
               out, n.results[0].sizes,
               [t, out](Ops& ops, Index p) { return cast_to(ops, t.load(ops, broadcast_index(t.sizes, p)), out); }, {t},
               t.dtype == out ? 0 : 1));
  return true;
}

template <int Start, int Step>
bool arange(Lowering& l, const Node& n) {
  const Arg start = Start < 0 ? Arg(0) : n.arg(Start), step = Step < 0 ? Arg(1) : n.arg(Step);
  const DType t = n.results[0].dtype;
  if (!start.is_number() || !step.is_number()) return false;
  const bool whole = !is_floating(t);
  if (whole && (start.is<double>() || step.is<double>())) return false;
  l.set(n, l.lazy(
               t, n.results[0].sizes,
               [=](Ops& o, Index p) {
                 if (whole) return cast_to(o, o.index_value(p[0] * Expr(step.to_int()) + Expr(start.to_int())), t);
                 // Counted in double, as ATen's accumulation type for ranges.
                 const Val i = o.cast(o.index_value(p[0]), DType::Float64);
                 const Val v = o.Add(o.constant_float(DType::Float64, start.to_double()),
                                     o.Mul(i, o.constant_float(DType::Float64, step.to_double())));
                 return cast_to(o, v, t);
               },
               {}, 3));
  return true;
}

// Element kept where column - row is at most (tril) or at least (triu) the diagonal.
template <bool Lower>
bool triangle(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const int64_t diagonal = n.arg(1).to_int();
  if (t.dim() < 2) return false;
  const int64_t big = std::max(t.sizes[t.dim() - 1], t.sizes[t.dim() - 2]) + 1;
  l.set(n, l.lazy(
               t.dtype, t.sizes,
               [=](Ops& o, Index p) {
                 const Expr d = p[p.size() - 1] - p[p.size() - 2];
                 const Val keep = Lower ? o.in_range(d, -big, diagonal + 1) : o.in_range(d, diagonal, big);
                 return o.where(keep, t.load(o, p), o.constant(t.dtype, 0));
               },
               {t}, 2));
  return true;
}

bool eye(Lowering& l, const Node& n) {
  const DType t = n.results[0].dtype;
  l.set(n,
        l.lazy(
            t, n.results[0].sizes,
            [t](Ops& o, Index p) { return o.where(o.in_range(p[0] - p[1], 0, 1), o.constant(t, 1), o.constant(t, 0)); },
            {}, 2));
  return true;
}

const RuleRow kRows[] = {
    {"aten::cat", cat},
    {"aten::stack", stack},
    {"aten::constant_pad_nd", pad},
    {"aten::slice_backward", slice_backward},
    {"aten::slice_scatter", slice_scatter},
    {"aten::select_backward", select_backward},
    {"aten::select_scatter", select_scatter},
    {"aten::diagonal_scatter", diagonal_scatter},
    {"aten::diagonal_backward", diagonal_backward},
    {"aten::flip", flip},
    {"aten::roll", roll},
    {"aten::repeat", repeat},
    {"aten::zeros", fill_with<0>},
    {"aten::ones", fill_with<1>},
    {"aten::zeros_like", fill_with<0>},
    {"aten::ones_like", fill_with<1>},
    {"aten::new_zeros", fill_with<0>},
    {"aten::new_ones", fill_with<1>},
    // What eager leaves undefined may be anything; zero is the cheapest.
    {"aten::empty.memory_format", fill_with<0>},
    {"aten::empty_like", fill_with<0>},
    {"aten::empty_strided", fill_with<0>},
    {"aten::empty_permuted", fill_with<0>},
    {"aten::new_empty", fill_with<0>},
    {"aten::new_empty_strided", fill_with<0>},
    {"aten::full", fill_arg<1>},
    {"aten::full_like", fill_arg<1>},
    {"aten::new_full", fill_arg<2>},
    {"aten::scalar_tensor", fill_arg<0>},
    {"aten::copy", copy},
    {"aten::fill.Scalar", fill_arg<1>},
    {"aten::fill.Tensor", fill_tensor},
    {"aten::arange", arange<-1, -1>},
    {"aten::arange.start", arange<0, -1>},
    {"aten::arange.start_step", arange<0, 2>},
    {"aten::tril", triangle<true>},
    {"aten::triu", triangle<false>},
    {"aten::eye", eye},
    {"aten::eye.m", eye},
};

}  // namespace

std::span<const RuleRow> copy_rules() { return kRows; }

}  // namespace kiln::lower
