// Reductions and scans. Half types are summed in float32, as ATen does.
#include <cmath>
#include <limits>

#include "base/error.h"
#include "lower/lowering.h"

namespace kiln::lower {
namespace {

struct Dims {
  Sizes kept, reduced;  // sizes
  std::vector<int64_t> kept_dims, reduced_dims;
  bool keep = false;
};

Dims split_dims(const Tensor& t, std::vector<int64_t> dims, bool all, bool keep) {
  std::vector<bool> folded(t.sizes.size(), all);
  for (int64_t d : dims)
    if (t.dim() > 0) folded.at(wrap_dim(d, t.dim())) = true;
  Dims out;
  out.keep = keep;
  for (int64_t d = 0; d < t.dim(); ++d) {
    (folded[d] ? out.reduced : out.kept).push_back(t.sizes[d]);
    (folded[d] ? out.reduced_dims : out.kept_dims).push_back(d);
  }
  return out;
}

Dims dims_of(const Tensor& t, const Arg& dims, bool keep) {
  const bool all = dims.is_none() || (dims.is_list() && dims.list().empty());
  return split_dims(t, all ? std::vector<int64_t>{} : dims.to_ints(), all, keep);
}

std::vector<Expr> join(const Dims& d, Index outer, Index inner) {
  std::vector<Expr> index(d.kept_dims.size() + d.reduced_dims.size());
  for (size_t i = 0; i < d.kept_dims.size(); ++i) index[d.kept_dims[i]] = outer[i];
  for (size_t i = 0; i < d.reduced_dims.size(); ++i) index[d.reduced_dims[i]] = inner[i];
  return index;
}

int64_t count(const Dims& d) {
  int64_t n = 1;
  for (int64_t s : d.reduced) n *= s;
  return n;
}

// Address of a result at the kept dims' point: with keepdim the folded dims have size one.
Expr result_at(const Dims& d, const Tensor& to, Index outer) {
  std::vector<Expr> index;
  if (!d.keep) {
    index.assign(outer.begin(), outer.end());
  } else {
    index.assign(to.sizes.size(), Expr(0));
    for (size_t i = 0; i < d.kept_dims.size(); ++i) index[d.kept_dims[i]] = outer[i];
  }
  return symbolic::linearize(index, to.strides, to.offset);
}

using Epilogue = std::function<Val(Ops&, const std::vector<Val>&)>;

/// A nest over the kept dims: a reduction of fn over the others, then a store of each epilogue into its tensor.
void reduce(Lowering& l, const std::string& name, const Dims& d, ReduceKind kind,
            const std::function<std::vector<Val>(Ops&, const std::vector<Expr>& index, Index inner)>& fn,
            const std::vector<std::pair<Tensor, Epilogue>>& results) {
  for (int64_t s : d.kept)
    if (s == 0) return;
  loops::NestBuilder b(l.buffers(), name, d.kept);
  // A reduction runs over some loop, be it once.
  std::vector<Expr> inner = b.stage(d.reduced.empty() ? Sizes{1} : d.reduced);
  if (d.reduced.empty()) inner.clear();
  std::vector<Val> r;
  {
    EvalScope scope;
    r = b.reduce(kind, fn(b, join(d, b.outer(), inner), inner));
  }
  b.stage({});
  for (const auto& [to, epilogue] : results)
    b.store(to.buffer, result_at(d, to, b.outer()), cast_to(b, epilogue(b, r), to.dtype));
  l.add_nest(b.finish());
}

/// One operand, one result.
bool simple(Lowering& l, const Node& n, const Dims& d, ReduceKind kind, DType compute,
            std::function<Val(Ops&, Val)> before = nullptr, std::function<Val(Ops&, Val)> after = nullptr) {
  const Tensor t = l.get(n.arg(0));
  const Tensor to = l.new_buffer(n);
  reduce(l, l.name_of(n), d, kind,
         [&](Ops& ops, const std::vector<Expr>& index, Index) {
           const Val v = cast_to(ops, t.load(ops, index), compute);
           return std::vector<Val>{before ? before(ops, v) : v};
         },
         {{to, [&](Ops& ops, const std::vector<Val>& r) { return after ? after(ops, r[0]) : r[0]; }}});
  l.set(n, to);
  return true;
}

DType sum_type(const Node& n) { return compute_type(n.results[0].dtype); }

bool sum_all(Lowering& l, const Node& n) {
  const DType t = sum_type(n);
  if (t == DType::Bool) return false;
  return simple(l, n, dims_of(l.get(n.arg(0)), Arg(), false), ReduceKind::Sum, t);
}
bool sum_dims(Lowering& l, const Node& n) {
  const DType t = sum_type(n);
  if (t == DType::Bool) return false;
  return simple(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(2).to_bool()), ReduceKind::Sum, t);
}
bool mean(Lowering& l, const Node& n, const Dims& d) {
  const double size = static_cast<double>(count(d));
  return simple(l, n, d, ReduceKind::Sum, sum_type(n), nullptr,
                [size](Ops& o, Val v) { return o.Div(v, o.constant(v.dtype, size)); });
}
bool mean_all(Lowering& l, const Node& n) { return mean(l, n, dims_of(l.get(n.arg(0)), Arg(), false)); }
bool mean_dims(Lowering& l, const Node& n) {
  return mean(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(2).to_bool()));
}

bool prod_all(Lowering& l, const Node& n) {
  const DType t = sum_type(n);
  return t != DType::Bool && simple(l, n, dims_of(l.get(n.arg(0)), Arg(), false), ReduceKind::Prod, t);
}
bool prod_dim(Lowering& l, const Node& n) {
  const DType t = sum_type(n);
  return t != DType::Bool && simple(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(2).to_bool()), ReduceKind::Prod, t);
}

template <ReduceKind Kind>
bool extremum(Lowering& l, const Node& n, const Dims& d) {
  const DType in = l.get(n.arg(0)).dtype;
  if (count(d) == 0 || in == DType::Bool) return false;
  return simple(l, n, d, Kind, compute_type(in));
}
template <ReduceKind Kind>
bool extremum_dims(Lowering& l, const Node& n) {
  return extremum<Kind>(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(2).to_bool()));
}
template <ReduceKind Kind>
bool extremum_all(Lowering& l, const Node& n) {
  return extremum<Kind>(l, n, dims_of(l.get(n.arg(0)), Arg(), false));
}

template <ReduceKind Kind>
bool truth(Lowering& l, const Node& n, const Dims& d) {
  const Tensor t = l.get(n.arg(0));
  const DType in = compute_type(t.dtype);
  if (n.results[0].dtype != DType::Bool) return false;  // uint8 gives uint8
  return simple(l, n, d, Kind, in,
                [](Ops& o, Val v) { return v.dtype == DType::Bool ? v : o.Ne(v, o.constant(v.dtype, 0)); });
}
template <ReduceKind Kind>
bool truth_all(Lowering& l, const Node& n) {
  return truth<Kind>(l, n, dims_of(l.get(n.arg(0)), Arg(), false));
}
template <ReduceKind Kind>
bool truth_dims(Lowering& l, const Node& n) {
  // Unlike the other reductions these fold nothing for dim=[].
  const bool all = n.arg(1).is_none();
  return truth<Kind>(
      l, n, split_dims(l.get(n.arg(0)), all ? std::vector<int64_t>{} : n.arg(1).to_ints(), all, n.arg(2).to_bool()));
}

// Place of the extremum as int64, counted row-major over the folded dims.
template <ReduceKind Kind>
void arg_reduce(Lowering& l, const Node& n, const Dims& d, const Tensor* value_to, const Tensor& index_to) {
  const Tensor t = l.get(n.arg(0));
  std::vector<std::pair<Tensor, Epilogue>> results;
  if (value_to) results.emplace_back(*value_to, [](Ops&, const std::vector<Val>& r) { return r[0]; });
  results.emplace_back(index_to, [](Ops&, const std::vector<Val>& r) { return r[1]; });
  reduce(
      l, l.name_of(n), d, Kind,
      [&](Ops& ops, const std::vector<Expr>& index, Index inner) {
        const Val v = cast_to(ops, t.load(ops, index), compute_type(t.dtype));
        const Expr at = symbolic::linearize({inner.begin(), inner.end()}, graph::contiguous_strides(d.reduced));
        return std::vector<Val>{v, ops.index_value(at)};
      },
      results);
}

template <ReduceKind Kind>
bool arg_extremum(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const bool all = n.arg(1).is_none();
  const Dims d = dims_of(t, n.arg(1), n.arg(2).to_bool());
  if (count(d) == 0 || t.dtype == DType::Bool || (all && d.keep && t.dim() == 0)) return false;
  const Tensor to = l.new_buffer(n);
  arg_reduce<Kind>(l, n, d, nullptr, to);
  l.set(n, to);
  return true;
}

// (values, indices) along one dim.
template <ReduceKind Kind>
bool extremum_dim(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const Dims d = dims_of(t, n.arg(1), n.arg(2).to_bool());
  if (count(d) == 0 || t.dtype == DType::Bool) return false;
  const Tensor value = l.new_buffer(n, 0), index = l.new_buffer(n, 1);
  arg_reduce<Kind>(l, n, d, &value, index);
  l.set(n, value, 0);
  l.set(n, index, 1);
  return true;
}

// var and mean by Welford's recurrence; `correction` counts out of the divisor.
bool variance(Lowering& l, const Node& n, const Dims& d, double correction, bool root, bool with_mean) {
  const Tensor t = l.get(n.arg(0));
  const DType out = n.results[0].dtype;
  if (!is_floating(t.dtype) || count(d) == 0) return false;
  const double divisor = std::max(0.0, static_cast<double>(count(d)) - correction);
  const Tensor var = l.new_buffer(n, 0);
  std::vector<std::pair<Tensor, Epilogue>> results;
  results.emplace_back(var, [=](Ops& o, const std::vector<Val>& r) {
    const Val v = o.Div(r[1], o.constant(r[1].dtype, divisor));
    return root ? o.Sqrt(v) : v;
  });
  Tensor m;
  if (with_mean) {
    m = l.new_buffer(n, 1);
    results.emplace_back(m, [](Ops&, const std::vector<Val>& r) { return r[0]; });
  }
  reduce(
      l, l.name_of(n), d, ReduceKind::Welford,
      [&](Ops& ops, const std::vector<Expr>& index, Index) {
        return std::vector<Val>{cast_to(ops, t.load(ops, index), compute_type(out))};
      },
      results);
  l.set(n, var, 0);
  if (with_mean) l.set(n, m, 1);
  return true;
}

template <bool Root, bool WithMean>
bool var_correction(Lowering& l, const Node& n) {
  const double correction = n.arg(2).is_none() ? 1 : n.arg(2).to_double();
  return variance(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(3).to_bool()), correction, Root, WithMean);
}
template <bool Root, bool WithMean>
bool var_dim(Lowering& l, const Node& n) {  // (self, dim, unbiased, keepdim)
  return variance(l, n, dims_of(l.get(n.arg(0)), n.arg(1), n.arg(3).to_bool()), n.arg(2).to_bool() ? 1 : 0, Root,
                  WithMean);
}
template <bool Root, bool WithMean>
bool var_all(Lowering& l, const Node& n) {
  return variance(l, n, dims_of(l.get(n.arg(0)), Arg(), false), n.arg(1).to_bool() ? 1 : 0, Root, WithMean);
}

// linalg.vector_norm(self, ord, dim, keepdim, dtype) for the usual orders.
bool vector_norm(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  if (!n.arg(1).is_number() || !is_floating(t.dtype)) return false;
  const double p = n.arg(1).to_double();
  const Dims d = dims_of(t, n.arg(2), n.arg(3).to_bool());
  const DType c = compute_type(n.results[0].dtype);
  auto abs = [](Ops& o, Val v) { return o.Abs(v); };
  if (p == 2)
    return simple(
        l, n, d, ReduceKind::Sum, c, [](Ops& o, Val v) { return o.Mul(v, v); },
        [](Ops& o, Val v) { return o.Sqrt(v); });
  if (p == 1) return simple(l, n, d, ReduceKind::Sum, c, abs);
  if (std::isinf(p) && count(d) > 0) return simple(l, n, d, p > 0 ? ReduceKind::Max : ReduceKind::Min, c, abs);
  return false;
}

// Rows that are passed over twice are computed once, if that costs more than reading them back.
Tensor for_two_passes(Lowering& l, const Tensor& t, const Node& n) {
  return t.ops() > 6 ? l.in_memory(t, n.name + "_in") : t;
}

enum class Softmax : uint8_t { Plain, Log, Safe };

// The logarithm of the softmax of large rows that are in memory anyway, as of a language model's logits: only each
// row's statistics are stored, and whoever uses an element subtracts them. Another tensor as large as the logits would
// cost more in memory traffic than two subtractions.
bool log_softmax_by_statistics(Lowering& l, const Node& n, const Tensor& t, DType compute) {
  constexpr int64_t kLargeBytes = 1 << 20;
  if (t.numel() * dtype_size(t.dtype) < kLargeBytes || t.loads() > 1 || t.ops() > 1 || l.escapes(n)) return false;
  const Dims d = split_dims(t, {n.arg(1).to_int()}, false, false);
  const Tensor max = l.new_temp(n.name + "_max", compute, d.kept), log = l.new_temp(n.name + "_log", compute, d.kept);
  reduce(l, l.name_of(n), d, ReduceKind::OnlineSoftmax,
         [&](Ops& o, const std::vector<Expr>& index, Index) {
           return std::vector<Val>{cast_to(o, t.load(o, index), compute)};
         },
         {{max, [](Ops&, const std::vector<Val>& r) { return r[0]; }},
          {log, [](Ops& o, const std::vector<Val>& r) { return o.Log(r[1]); }}});
  const DType out = n.results[0].dtype;
  const auto value = [=](Ops& o, Index p) {
    std::vector<Expr> row;
    for (int64_t dim : d.kept_dims) row.push_back(p[dim]);
    return cast_to(o, o.Sub(o.Sub(cast_to(o, t.load(o, p), compute), max.load(o, row)), log.load(o, row)), out);
  };
  l.set(n, l.lazy(out, t.sizes, value, {t, max, log}, 2), 0, /*recompute=*/true);
  return true;
}

// Softmax of rows: (max, sum of exponentials) online, then a pass over the row. The safe one is 0 where all of a row is
// -inf.
template <Softmax Kind>
bool softmax(Lowering& l, const Node& n) {
  Tensor t = l.get(n.arg(0));
  const DType out = n.results[0].dtype, compute = compute_type(out);
  if (t.numel() == 0 || !is_floating(out) || t.dim() == 0) return false;
  if (Kind == Softmax::Log && log_softmax_by_statistics(l, n, t, compute)) return true;
  t = for_two_passes(l, t, n);
  const Dims d = split_dims(t, {n.arg(1).to_int()}, false, true);
  const Tensor to = l.new_buffer(n);
  loops::NestBuilder b(l.buffers(), l.name_of(n), d.kept);
  std::vector<Expr> inner = b.stage(d.reduced);
  auto at = [&](Ops& o) { return cast_to(o, t.load(o, join(d, b.outer(), inner)), compute); };
  std::vector<Val> r;
  {
    EvalScope scope;
    r = b.reduce(ReduceKind::OnlineSoftmax, {at(b)});
  }
  inner = b.stage(d.reduced);
  EvalScope scope;
  const Val x = b.Sub(at(b), r[0]);
  Val y = Kind == Softmax::Log ? b.Sub(x, b.Log(r[1])) : b.Div(b.Exp(x), r[1]);
  if (Kind == Softmax::Safe) {
    const double lowest = -std::numeric_limits<double>::infinity();
    y = b.where(b.Eq(r[0], b.constant(compute, lowest)), b.constant(compute, 0), y);
  }
  b.store(to.buffer, symbolic::linearize(join(d, b.outer(), inner), to.strides, to.offset), cast_to(b, y, out));
  l.add_nest(b.finish());
  l.set(n, to);
  return true;
}

// grad of softmax: y * (g - sum(g*y)); of log_softmax: g - exp(y) * sum(g).
template <bool Log>
bool softmax_backward(Lowering& l, const Node& n) {
  Tensor g = l.get(n.arg(0)), y = l.get(n.arg(1));
  const DType out = n.results[0].dtype, compute = compute_type(g.dtype);
  if (g.numel() == 0 || g.dim() == 0) return false;
  g = for_two_passes(l, g, n);
  y = for_two_passes(l, y, n);
  const Dims d = split_dims(g, {n.arg(2).to_int()}, false, true);
  const Tensor to = l.new_buffer(n);
  loops::NestBuilder b(l.buffers(), l.name_of(n), d.kept);
  std::vector<Expr> inner = b.stage(d.reduced);
  auto at = [&](const Tensor& t) { return cast_to(b, t.load(b, join(d, b.outer(), inner)), compute); };
  Val sum;
  {
    EvalScope scope;
    sum = b.reduce(ReduceKind::Sum, {Log ? at(g) : b.Mul(at(g), at(y))})[0];
  }
  inner = b.stage(d.reduced);
  EvalScope scope;
  const Val v = Log ? b.Sub(at(g), b.Mul(b.Exp(at(y)), sum)) : b.Mul(b.Sub(at(g), sum), at(y));
  b.store(to.buffer, symbolic::linearize(join(d, b.outer(), inner), to.strides, to.offset), cast_to(b, v, out));
  l.add_nest(b.finish());
  l.set(n, to);
  return true;
}

template <ReduceKind Kind>
bool cumulative(Lowering& l, const Node& n) {
  const Tensor t = l.get(n.arg(0));
  const DType out = n.results[0].dtype;
  // ATen's accumulator: an error in float32 would grow along the row.
  const DType compute = out == DType::Float32 ? DType::Float64 : compute_type(out);
  if (t.numel() == 0 || t.dim() == 0 || out == DType::Bool) return false;
  const Dims d = split_dims(t, {n.arg(1).to_int()}, false, true);
  const Tensor to = l.new_buffer(n);
  loops::NestBuilder b(l.buffers(), l.name_of(n), d.kept);
  const std::vector<Expr> inner = b.stage(d.reduced);
  const std::vector<Expr> at = join(d, b.outer(), inner);
  const Val v = b.scan(Kind, {cast_to(b, t.load(b, at), compute)})[0];
  b.store(to.buffer, symbolic::linearize(at, to.strides, to.offset), cast_to(b, v, out));
  l.add_nest(b.finish());
  l.set(n, to);
  return true;
}

const RuleRow kRows[] = {
    {"aten::sum", sum_all},
    {"aten::sum.dim_IntList", sum_dims},
    {"aten::mean", mean_all},
    {"aten::mean.dim", mean_dims},
    {"aten::prod", prod_all},
    {"aten::prod.dim_int", prod_dim},
    {"aten::amax", extremum_dims<ReduceKind::Max>},
    {"aten::amin", extremum_dims<ReduceKind::Min>},
    {"aten::max", extremum_all<ReduceKind::Max>},
    {"aten::min", extremum_all<ReduceKind::Min>},
    {"aten::max.dim", extremum_dim<ReduceKind::ArgMax>},
    {"aten::min.dim", extremum_dim<ReduceKind::ArgMin>},
    {"aten::argmax", arg_extremum<ReduceKind::ArgMax>},
    {"aten::argmin", arg_extremum<ReduceKind::ArgMin>},
    {"aten::any", truth_all<ReduceKind::Any>},
    {"aten::any.dim", truth_dims<ReduceKind::Any>},
    {"aten::any.dims", truth_dims<ReduceKind::Any>},
    {"aten::all", truth_all<ReduceKind::All>},
    {"aten::_is_any_true", truth_all<ReduceKind::Any>},
    {"aten::_is_all_true", truth_all<ReduceKind::All>},
    {"aten::all.dim", truth_dims<ReduceKind::All>},
    {"aten::all.dims", truth_dims<ReduceKind::All>},
    {"aten::var.correction", var_correction<false, false>},
    {"aten::std.correction", var_correction<true, false>},
    {"aten::var_mean.correction", var_correction<false, true>},
    {"aten::std_mean.correction", var_correction<true, true>},
    {"aten::var.dim", var_dim<false, false>},
    {"aten::std.dim", var_dim<true, false>},
    {"aten::var_mean.dim", var_dim<false, true>},
    {"aten::var", var_all<false, false>},
    {"aten::std", var_all<true, false>},
    {"aten::linalg_vector_norm", vector_norm},
    {"aten::_softmax", softmax<Softmax::Plain>},
    {"aten::_safe_softmax", softmax<Softmax::Safe>},
    {"aten::_log_softmax", softmax<Softmax::Log>},
    {"aten::_softmax_backward_data", softmax_backward<false>},
    {"aten::_log_softmax_backward_data", softmax_backward<true>},
    {"aten::cumsum", cumulative<ReduceKind::Sum>},
    {"aten::cumprod", cumulative<ReduceKind::Prod>},
};

}  // namespace

std::span<const RuleRow> reduction_rules() { return kRows; }

}  // namespace kiln::lower
