// Reads and writes at places held in tensors.
#include "base/error.h"
#include "lower/lowering.h"
#include "lower/scatter.h"

namespace kiln::lower {
namespace {

bool is_index(const Tensor& t) { return t.dtype == DType::Int64 || t.dtype == DType::Int32; }

/// Whether `a` is a number that a tensor of this dtype takes as it is.
bool is_of_kind(const Arg& a, DType t) { return a.is_number() && (is_floating(t) || !a.is<double>()); }

std::string out_of_bounds(int64_t dim, int64_t size) {
  return "index out of range in self: dimension " + std::to_string(dim) + " has size " + std::to_string(size);
}

// x[indices]: which dims have an index tensor, and where the indexed block stands in the result.
struct Advanced {
  std::vector<std::optional<Tensor>> indices;  // by dim of self; dims beyond the list have none
  Sizes block;                                 // the indices' broadcast sizes
  size_t block_at = 0;                         // its first dim in the result
  std::vector<Tensor> tensors;

  /// False for masks and other dtypes of indices.
  bool read(const Lowering& l, const Tensor& self, const Arg& list) {
    indices.resize(self.sizes.size());
    std::vector<size_t> dims;
    for (size_t i = 0; i < list.list().size(); ++i) {
      const Arg& a = list.list()[i];
      if (!a.is_value() || !a.value()) continue;
      const Tensor t = l.get(a);
      if (!is_index(t) || i >= indices.size() || self.sizes[i] == 0) return false;
      indices[i] = t;
      dims.push_back(i);
      tensors.push_back(t);
      if (t.sizes.size() > block.size()) block.insert(block.begin(), t.sizes.size() - block.size(), 1);
    }
    if (dims.empty()) return false;
    for (const Tensor& t : tensors)
      for (size_t i = 0; i < t.sizes.size(); ++i) {
        int64_t& b = block[block.size() - t.sizes.size() + i];
        if (t.sizes[i] != 1) b = t.sizes[i];
      }
    // Index tensors side by side: the block stands in their place; otherwise in front.
    const bool adjacent = dims.back() - dims.front() + 1 == dims.size();
    block_at = adjacent ? dims.front() : 0;
    return true;
  }

  Sizes result_sizes(const Tensor& self) const {
    Sizes sizes;
    for (size_t i = 0; i < indices.size(); ++i)
      if (!indices[i]) sizes.push_back(self.sizes[i]);
    sizes.insert(sizes.begin() + block_at, block.begin(), block.end());
    return sizes;
  }

  /// Index into self of the result's point p.
  std::vector<Expr> place(Ops& ops, Index p, const Sizes& self) const {
    const Index inside = p.subspan(block_at, block.size());
    std::vector<Expr> rest(p.begin(), p.begin() + block_at);
    rest.insert(rest.end(), p.begin() + block_at + block.size(), p.end());
    std::vector<Expr> index;
    size_t next = 0;
    for (size_t i = 0; i < indices.size(); ++i) {
      if (!indices[i]) {
        index.push_back(rest[next++]);
        continue;
      }
      const Val v = indices[i]->load(ops, broadcast_index(indices[i]->sizes, inside));
      index.push_back(ops.indirect(v, self[i], /*wrap_negative=*/true, out_of_bounds(i, self[i])));
    }
    return index;
  }
};

bool index_tensor(Lowering& l, const Node& n) {
  Tensor self = l.get(n.arg(0));
  Advanced a;
  if (!a.read(l, self, n.arg(1)) || a.result_sizes(self) != n.results[0].sizes) return false;
  if (self.ops() > 4 || self.may_raise()) self = l.in_memory(self, n.name + "_in");
  std::vector<Tensor> inputs = a.tensors;
  inputs.push_back(self);
  l.set(n, l.lazy(
               self.dtype, n.results[0].sizes,
               [a, self](Ops& ops, Index p) { return self.load(ops, a.place(ops, p, self.sizes)); }, inputs, 6));
  return true;
}

bool index_put(Lowering& l, const Node& n) {  // (self, indices, values, accumulate, ...)
  const Tensor self = l.get(n.arg(0)), values = l.get(n.arg(2));
  const bool accumulate = n.arg(3).to_bool();
  const auto& list = n.arg(1).list();
  if (list.size() == 1 && list[0].is_value() && list[0].value() && !accumulate && values.numel() == 1) {
    const Tensor mask = l.get(list[0]);
    // x[mask] = number: no index is needed.
    if (mask.dtype == DType::Bool && mask.dim() <= self.dim() &&
        std::equal(mask.sizes.begin(), mask.sizes.end(), self.sizes.begin())) {
      const DType t = self.dtype;
      l.set(n, l.lazy(
                   t, self.sizes,
                   [=](Ops& o, Index p) {
                     const std::vector<Expr> zero(values.sizes.size(), Expr(0));
                     return o.where(mask.load(o, p.first(mask.sizes.size())), cast_to(o, values.load(o, zero), t),
                                    self.load(o, p));
                   },
                   {self, values, mask}, 1));
      return true;
    }
  }
  Advanced a;
  if (!a.read(l, self, n.arg(1)) || values.dim() > static_cast<int64_t>(a.result_sizes(self).size())) return false;
  return scatter_into(l, n, self,
                      {.ranges = a.result_sizes(self),
                       .mode = accumulate ? loops::StoreMode::Add : loops::StoreMode::Assign,
                       .apart = [&](size_t d) { return d < a.block_at || d >= a.block_at + a.block.size(); },
                       .place = [&](Ops& o, Index p) { return a.place(o, p, self.sizes); },
                       .value = [&](Ops& o, Index p) { return values.load(o, broadcast_index(values.sizes, p)); }});
}

bool index_select(Lowering& l, const Node& n) {
  Tensor self = l.get(n.arg(0));
  const Tensor index = l.get(n.arg(2));
  if (!is_index(index) || self.dim() == 0) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), self.dim());
  if (self.sizes[dim] == 0) return false;
  if (self.ops() > 4 || self.may_raise()) self = l.in_memory(self, n.name + "_in");
  l.set(n, l.lazy(
               self.dtype, n.results[0].sizes,
               [=](Ops& o, Index p) {
                 std::vector<Expr> at(p.begin(), p.end());
                 const Val v = index.dim() == 0 ? index.load(o, {}) : index.load(o, p.subspan(dim, 1));
                 at[dim] = o.indirect(v, self.sizes[dim], false, out_of_bounds(dim, self.sizes[dim]));
                 return self.load(o, at);
               },
               {self, index}, 4));
  return true;
}

bool embedding(Lowering& l, const Node& n) {  // (weight, indices, padding_idx, scale_grad_by_freq, sparse)
  const Tensor weight = l.in_memory(l.get(n.arg(0)), n.name + "_weight"), indices = l.get(n.arg(1));
  if (!is_index(indices) || weight.dim() != 2 || weight.sizes[0] == 0) return false;
  l.set(n, l.lazy(
               weight.dtype, n.results[0].sizes,
               [=](Ops& o, Index p) {
                 const Val v = indices.load(o, p.first(p.size() - 1));
                 const Expr row = o.indirect(v, weight.sizes[0], false, "index out of range in self");
                 const Expr at[] = {row, p.back()};
                 return weight.load(o, at);
               },
               {weight, indices}, 4));
  return true;
}

bool embedding_dense_backward(Lowering& l, const Node& n) {  // (grad, indices, num_weights, padding_idx, scale)
  const Tensor grad = l.get(n.arg(0)), indices = l.get(n.arg(1));
  const int64_t rows = n.arg(2).to_int(), padding = n.arg(3).to_int();
  if (!is_index(indices) || n.arg(4).to_bool() || rows == 0) return false;
  return scatter_into(l, n, zeros(l, n.results[0].dtype, n.results[0].sizes),
                      {.ranges = grad.sizes,
                       .mode = loops::StoreMode::Add,
                       .apart = [&](size_t d) { return d + 1 == grad.sizes.size(); },
                       .place =
                           [&](Ops& o, Index p) {
                             const Val v = indices.load(o, p.first(p.size() - 1));
                             return std::vector<Expr>{o.indirect(v, rows, false, "index out of range in self"),
                                                      p.back()};
                           },
                       .value = [&](Ops& o, Index p) { return grad.load(o, p); },
                       .condition = [&](Ops& o, Index p) -> std::optional<Val> {
                         if (padding < 0) return std::nullopt;
                         const Val v = indices.load(o, p.first(p.size() - 1));
                         return o.Ne(v, o.constant_int(v.dtype, padding));
                       }});
}

bool gather(Lowering& l, const Node& n) {
  Tensor self = l.get(n.arg(0));
  const Tensor index = l.get(n.arg(2));
  if (!is_index(index) || self.dim() == 0 || index.dim() != self.dim()) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), self.dim());
  if (self.sizes[dim] == 0) return false;
  if (self.ops() > 12 || self.may_raise()) self = l.in_memory(self, n.name + "_in");
  l.set(n, l.lazy(
               self.dtype, index.sizes,
               [=](Ops& o, Index p) {
                 std::vector<Expr> at(p.begin(), p.end());
                 at[dim] = o.indirect(index.load(o, p), self.sizes[dim], false, out_of_bounds(dim, self.sizes[dim]));
                 return self.load(o, at);
               },
               {self, index}, 4));
  return true;
}

/// Whether there is a source for each index; ATen's kernel, which runs otherwise, raises an error.
bool covers(const Tensor& source, const Tensor& index) {
  if (source.dim() != index.dim()) return false;
  for (size_t d = 0; d < index.sizes.size(); ++d)
    if (index.sizes[d] > source.sizes[d]) return false;
  return true;
}

template <loops::StoreMode Mode>
bool scatter(Lowering& l, const Node& n) {  // (self, dim, index, src or value)
  const Tensor self = l.get(n.arg(0)), index = l.get(n.arg(2));
  if (!is_index(index) || self.dim() == 0 || index.dim() != self.dim()) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), self.dim());
  if (self.sizes[dim] == 0 || (Mode == loops::StoreMode::Add && self.dtype == DType::Bool)) return false;
  std::optional<Tensor> src;
  if (n.arg(3).is_value())
    src = l.get(n.arg(3));
  else if (!is_of_kind(n.arg(3), self.dtype))
    return false;
  if (src && !covers(*src, index)) return false;
  return scatter_into(
      l, n, self,
      {.ranges = index.sizes,
       .mode = Mode,
       .apart = [&](size_t d) { return static_cast<int64_t>(d) != dim; },
       .place =
           [&](Ops& o, Index p) {
             std::vector<Expr> at(p.begin(), p.end());
             at[dim] = o.indirect(index.load(o, p), self.sizes[dim], false, out_of_bounds(dim, self.sizes[dim]));
             return at;
           },
       .value = [&](Ops& o, Index p) { return src ? src->load(o, p) : constant_of(o, n.arg(3), self.dtype); },
       .wide = Mode == loops::StoreMode::Add,
       .whole = true});
}

/// The rows of `self` along `dim` that a vector of indices names, written by `value`.
bool scatter_rows(Lowering& l, const Node& n, const Tensor& self, const Tensor& index, int64_t dim, bool wrap_negative,
                  loops::StoreMode mode, const loops::PointFn& value) {
  Sizes ranges = self.sizes;
  ranges[dim] = index.numel();
  return scatter_into(l, n, self,
                      {.ranges = std::move(ranges),
                       .mode = mode,
                       .apart = [&](size_t d) { return static_cast<int64_t>(d) != dim; },
                       .place =
                           [&](Ops& o, Index p) {
                             std::vector<Expr> at(p.begin(), p.end());
                             const Val v = index.dim() == 0 ? index.load(o, {}) : index.load(o, p.subspan(dim, 1));
                             const int64_t size = self.sizes[dim];
                             at[dim] = o.indirect(v, size, wrap_negative, out_of_bounds(dim, size));
                             return at;
                           },
                       .value = value});
}

template <loops::StoreMode Mode>
bool index_rows(Lowering& l, const Node& n) {  // index_copy(self, dim, index, source), index_add(.., alpha)
  const Tensor self = l.get(n.arg(0)), index = l.get(n.arg(2)), source = l.get(n.arg(3));
  if (!is_index(index) || index.dim() != 1 || self.dim() == 0 || source.dtype != self.dtype) return false;
  constexpr bool kAdds = Mode == loops::StoreMode::Add;
  const bool scaled = kAdds && n.arg(4).to_double() != 1;
  // ATen rounds the products of half types; integers are not multiplied by fractions.
  if (kAdds && (self.dtype == DType::Bool || (scaled && compute_type(self.dtype) != self.dtype))) return false;
  if (scaled && !is_floating(self.dtype)) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), self.dim());
  if (self.sizes[dim] == 0) return false;
  // ATen's kernel raises an error then.
  if (source.dim() != self.dim() || index.sizes[0] != source.sizes[dim]) return false;
  for (int64_t d = 0; d < self.dim(); ++d)
    if (d != dim && source.sizes[d] != self.sizes[d]) return false;
  return scatter_rows(l, n, self, index, dim, false, Mode, [&](Ops& o, Index p) {
    const Val v = source.load(o, p);
    return scaled ? o.Mul(v, constant_of(o, n.arg(4), self.dtype)) : v;
  });
}

bool index_fill(Lowering& l, const Node& n) {  // (self, dim, index, value)
  const Tensor self = l.get(n.arg(0)), index = l.get(n.arg(2));
  if (!is_index(index) || index.dim() > 1 || self.dim() == 0) return false;
  const int64_t dim = wrap_dim(n.arg(1).to_int(), self.dim());
  if (self.sizes[dim] == 0) return false;
  std::optional<Tensor> value;
  if (n.arg(3).is_value())
    value = l.get(n.arg(3));
  else if (!is_of_kind(n.arg(3), self.dtype))
    return false;
  return scatter_rows(l, n, self, index, dim, true, loops::StoreMode::Assign,
                      [&](Ops& o, Index) { return value ? value->load(o, {}) : constant_of(o, n.arg(3), self.dtype); });
}

bool put(Lowering& l, const Node& n) {  // (self, index, source, accumulate): elements by their number
  const Tensor self = l.get(n.arg(0)), index = l.get(n.arg(1)), source = l.get(n.arg(2));
  const bool accumulate = n.arg(3).to_bool();
  if (!is_index(index) || self.numel() == 0 || source.sizes != index.sizes || source.dtype != self.dtype) return false;
  if (accumulate && self.dtype == DType::Bool) return false;
  return scatter_into(l, n, self,
                      {.ranges = index.sizes,
                       .mode = accumulate ? loops::StoreMode::Add : loops::StoreMode::Assign,
                       .apart = [](size_t) { return false; },
                       .place =
                           [&](Ops& o, Index p) {
                             const int64_t size = self.numel();
                             const Expr number = o.indirect(index.load(o, p), size, true,
                                                            "out of range: an index of put, where the tensor has " +
                                                                std::to_string(size) + " elements");
                             return symbolic::delinearize(number, self.sizes);
                           },
                       .value = [&](Ops& o, Index p) { return source.load(o, p); }});
}

const RuleRow kRows[] = {
    {"aten::index.Tensor", index_tensor},
    {"aten::_unsafe_index.Tensor", index_tensor},
    {"aten::index_put", index_put},
    {"aten::_unsafe_index_put", index_put},
    {"aten::index_select", index_select},
    {"aten::embedding", embedding},
    {"aten::embedding_dense_backward", embedding_dense_backward},
    {"aten::gather", gather},
    {"aten::scatter.src", scatter<loops::StoreMode::Assign>},
    {"aten::scatter.value", scatter<loops::StoreMode::Assign>},
    {"aten::scatter_add", scatter<loops::StoreMode::Add>},
    {"aten::index_add", index_rows<loops::StoreMode::Add>},
    {"aten::index_copy", index_rows<loops::StoreMode::Assign>},
    {"aten::index_fill.int_Scalar", index_fill},
    {"aten::index_fill.int_Tensor", index_fill},
    {"aten::put", put},
};

}  // namespace

std::span<const RuleRow> index_rules() { return kRows; }

}  // namespace kiln::lower
