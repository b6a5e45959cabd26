#include "aten/nonzero.h"

#include <torch/library.h>

#include "aten/pch.h"
#include "aten/schema.h"

namespace kiln::aten {

namespace {

at::Tensor compute(const at::Tensor& self, int64_t size) {
  at::Tensor found = self.nonzero();
  TORCH_CHECK(found.size(0) == size, "expected ", size, " elements that are not zero, found ", found.size(0));
  return found;
}

at::Tensor shape(const at::Tensor& self, int64_t size) {
  return at::empty_strided({size, self.dim()}, {1, size}, self.options().dtype(at::kLong));
}

}  // namespace

const graph::Op& nonzero_sized_op() {
  static const graph::Op op("kiln::nonzero_sized");
  return op;
}

at::Tensor nonzero_sized(const at::Tensor& self, int64_t size) {
  static const auto op = get_op(nonzero_sized_op()).handle.typed<at::Tensor(const at::Tensor&, int64_t)>();
  return op.call(self, size);
}

}  // namespace kiln::aten

TORCH_LIBRARY_FRAGMENT(kiln, m) { m.def("nonzero_sized(Tensor self, int size) -> Tensor"); }
TORCH_LIBRARY_IMPL(kiln, CPU, m) { m.impl("nonzero_sized", &kiln::aten::compute); }
TORCH_LIBRARY_IMPL(kiln, Meta, m) { m.impl("nonzero_sized", &kiln::aten::shape); }
