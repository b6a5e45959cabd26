// Stores at places that are computed.
#include "lower/scatter.h"

namespace kiln::lower {
namespace {

/// Does what before_write() asks for, for a scattering into `to`.
void prepare(Lowering& l, const Node& n, const Tensor& to, const Scattering& s) {
  using Before = Lowering::Before;
  if (l.before_write() == Before::Nothing) return;
  const auto at = [&s, to](Ops& o, Index p) { return symbolic::linearize(s.place(o, p), to.strides, to.offset); };
  const bool keep = l.before_write() == Before::Keep;
  Sizes ranges = s.ranges;
  if (!keep && !s.whole)
    for (size_t d = 0; d < ranges.size(); ++d)
      if (s.apart(d)) ranges[d] = 1;
  const Tensor places = l.lazy(DType::Int64, ranges, [at](Ops& o, Index p) { return o.index_value(at(o, p)); }, {}, 4);
  if (!keep) return l.check_places(n, places);
  const Tensor old =
      l.lazy(to.dtype, ranges, [at, b = to.buffer](Ops& o, Index p) { return o.load(b, at(o, p)); }, {}, 4);
  l.keep_elements(n, to, places, old);
}

}  // namespace

Tensor zeros(const Lowering& l, DType t, const Sizes& sizes) {
  return l.lazy(t, sizes, [t](Ops& o, Index) { return o.constant(t, 0); }, {}, 0);
}

bool scatter_into(Lowering& l, const Node& n, const Tensor& self, const Scattering& s) {
  const auto cast = [&](const Tensor& t, DType dtype) {
    return l.lazy(dtype, t.sizes, [t, dtype](Ops& o, Index p) { return cast_to(o, t.load(o, p), dtype); }, {t}, 1);
  };
  const DType sums = s.wide ? compute_type(self.dtype) : self.dtype;
  Tensor to;
  if (l.place()) {
    to = *l.place();
  } else {
    to = sums == self.dtype ? l.new_buffer(n) : l.new_temp(l.name_of(n) + "_sums", sums, self.sizes);
    l.store(sums == self.dtype ? self : cast(self, sums), to, l.name_of(n) + "_base");
  }
  bool empty = false;
  for (int64_t size : s.ranges) empty |= size == 0;
  if (!empty) {
    prepare(l, n, to, s);
    Sizes outer, inner;
    for (size_t d = 0; d < s.ranges.size(); ++d) (s.apart(d) ? outer : inner).push_back(s.ranges[d]);
    loops::NestBuilder b(l.buffers(), l.name_of(n), outer);
    const std::vector<Expr> inside = b.stage(inner);
    std::vector<Expr> p;
    for (size_t d = 0, o = 0, i = 0; d < s.ranges.size(); ++d) p.push_back(s.apart(d) ? b.outer()[o++] : inside[i++]);
    EvalScope scope;
    const Val v = cast_to(b, s.value(b, p), to.dtype);
    const std::optional<Val> c = s.condition ? s.condition(b, p) : std::nullopt;
    const Expr at = symbolic::linearize(s.place(b, p), to.strides, to.offset);
    if (c)
      b.store_if(*c, to.buffer, at, v, s.mode);
    else
      b.store(to.buffer, at, v, s.mode);
    l.add_nest(b.finish());
  }
  l.set(n, sums == self.dtype ? to : cast(to, self.dtype));
  return true;
}

}  // namespace kiln::lower
