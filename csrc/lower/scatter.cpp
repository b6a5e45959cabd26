// Stores at places that are computed.
#include "lower/scatter.h"

namespace kiln::lower {

Tensor zeros(const Lowering& l, DType t, const Sizes& sizes) {
  return l.lazy(t, sizes, [t](Ops& o, Index) { return o.constant(t, 0); }, {}, 0);
}

bool scatter_into(Lowering& l, const Node& n, const Tensor& self, const Sizes& ranges, loops::StoreMode mode,
                  const std::function<bool(size_t dim)>& apart,
                  const std::function<std::vector<Expr>(Ops&, Index)>& place,
                  const std::function<Val(Ops&, Index)>& value,
                  const std::function<std::optional<Val>(Ops&, Index)>& condition, bool wide) {
  const auto cast = [&](const Tensor& t, DType dtype) {
    return l.lazy(dtype, t.sizes, [t, dtype](Ops& o, Index p) { return cast_to(o, t.load(o, p), dtype); }, {t}, 1);
  };
  const DType sums = wide ? compute_type(self.dtype) : self.dtype;
  Tensor to;
  if (l.place()) {
    to = *l.place();
  } else {
    to = sums == self.dtype ? l.new_buffer(n) : l.new_temp(l.name_of(n) + "_sums", sums, self.sizes);
    l.store(sums == self.dtype ? self : cast(self, sums), to, l.name_of(n) + "_base");
  }
  bool empty = false;
  for (int64_t s : ranges) empty |= s == 0;
  if (!empty) {
    Sizes outer, inner;
    for (size_t d = 0; d < ranges.size(); ++d) (apart(d) ? outer : inner).push_back(ranges[d]);
    loops::NestBuilder b(l.buffers(), l.name_of(n), outer);
    const std::vector<Expr> inside = b.stage(inner);
    std::vector<Expr> p;
    for (size_t d = 0, o = 0, i = 0; d < ranges.size(); ++d) p.push_back(apart(d) ? b.outer()[o++] : inside[i++]);
    EvalScope scope;
    const Val v = cast_to(b, value(b, p), to.dtype);
    const std::optional<Val> c = condition ? condition(b, p) : std::nullopt;
    const Expr at = symbolic::linearize(place(b, p), to.strides, to.offset);
    if (c)
      b.store_if(*c, to.buffer, at, v, mode);
    else
      b.store(to.buffer, at, v, mode);
    l.add_nest(b.finish());
  }
  l.set(n, sums == self.dtype ? to : cast(to, self.dtype));
  return true;
}

}  // namespace kiln::lower
