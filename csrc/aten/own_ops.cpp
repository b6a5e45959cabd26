#include "aten/own_ops.h"

#include <torch/library.h>

#include <cmath>

#include "aten/pch.h"
#include "aten/schema.h"

namespace kiln::aten {

namespace {

at::Tensor found_nonzero(const at::Tensor& self, int64_t size) {
  at::Tensor found = self.nonzero();
  TORCH_CHECK(found.size(0) == size, "expected ", size, " elements that are not zero, found ", found.size(0));
  return found;
}

at::Tensor nonzero_shape(const at::Tensor& self, int64_t size) {
  return at::empty_strided({size, self.dim()}, {1, size}, self.options().dtype(at::kLong));
}

using Function = double (*)(double);

Function c_function(c10::string_view name) {
  static const std::unordered_map<std::string_view, Function> functions = {
#define KILN_C_MATH(f, opcode) {#f, &::f},
#include "ops/c_math.def"
#undef KILN_C_MATH
  };
  const auto it = functions.find(std::string_view(name.data(), name.size()));
  TORCH_CHECK(it != functions.end(), "kiln::c_math has no function ", name);
  return it->second;
}

at::Tensor c_math(const at::Tensor& self, c10::string_view function) {
  TORCH_CHECK(self.scalar_type() == at::kDouble, "kiln::c_math is for float64, not ", self.scalar_type());
  const Function f = c_function(function);
  at::Tensor out = self.clone();  // dense, whatever self is
  double* data = out.mutable_data_ptr<double>();
  std::transform(data, data + out.numel(), data, f);
  return out;
}

at::Tensor c_math_shape(const at::Tensor& self, c10::string_view) { return at::empty_like(self); }

const graph::Op& nonzero_sized_op() {
  static const graph::Op op("kiln::nonzero_sized");
  return op;
}
}  // namespace

bool is_own_op(const graph::Op& op) {
  static const graph::Op c_math("kiln::c_math");
  return op == nonzero_sized_op() || op == c_math;
}

at::Tensor nonzero_sized(const at::Tensor& self, int64_t size) {
  static const auto op = get_op(nonzero_sized_op()).handle.typed<at::Tensor(const at::Tensor&, int64_t)>();
  return op.call(self, size);
}

}  // namespace kiln::aten

TORCH_LIBRARY_FRAGMENT(kiln, m) {
  m.def("nonzero_sized(Tensor self, int size) -> Tensor");
  m.def("c_math(Tensor self, str function) -> Tensor");
}
TORCH_LIBRARY_IMPL(kiln, CPU, m) {
  m.impl("nonzero_sized", &kiln::aten::found_nonzero);
  m.impl("c_math", &kiln::aten::c_math);
}
TORCH_LIBRARY_IMPL(kiln, Meta, m) {
  m.impl("nonzero_sized", &kiln::aten::nonzero_shape);
  m.impl("c_math", &kiln::aten::c_math_shape);
}
