#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_dtypes.h>

#include <list>

#include "aten/convert.h"
#include "aten/schema.h"
#include "ops/ops.h"
#include "python/bindings/bindings.h"
#include "python/cpython/tensor.h"

// A door to the operator table for tests and documentation: shape rules on real tensors' metadata, and rows.
namespace kiln {
namespace {

namespace pb = pybind11;

pb::object dtype_object(DType t) {
  return pb::reinterpret_borrow<pb::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(aten::scalar_type_of(t))));
}

/// Results of `name` called with `args` (schema order, all given), as the table's rule sees them: None, or a tuple
/// (dtype, sizes, strides, offset) each. Raises Unsupported where there is no rule.
pb::list infer(const std::string& name, const pb::list& args) {
  const aten::OpInfo& op = aten::get_op(name);
  const auto& arguments = op.schema().arguments();
  if (args.size() != arguments.size())
    throw UserError(name + " takes " + std::to_string(arguments.size()) + " arguments");
  std::list<graph::TensorMeta> metas;  // rules hold pointers to these
  const aten::MetaOf meta_of = [&](const at::Tensor& t) -> aten::MetaArg {
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      const at::Scalar s = aten::wrapped_number_value(t);
      if (s.isBoolean()) return s.toBool();
      if (s.isIntegral(false)) return s.toLong();
      if (s.isComplex()) return std::complex<double>(s.toComplexDouble());
      return s.toDouble();
    }
    metas.push_back(aten::meta_of(t));
    return &metas.back();
  };
  std::vector<ops::Arg> converted;
  for (size_t i = 0; i < args.size(); ++i) {
    // A number in a tensor's place: what a wrapped number looks like below autograd.
    const bool tensor_wanted = arguments[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor());
    if (tensor_wanted && !py::is_tensor(args[i].ptr()) && !args[i].is_none()) {
      if (pb::isinstance<pb::bool_>(args[i]))
        converted.emplace_back(args[i].cast<bool>());
      else if (pb::isinstance<pb::int_>(args[i]))
        converted.emplace_back(args[i].cast<int64_t>());
      else if (PyComplex_Check(args[i].ptr()))
        converted.emplace_back(args[i].cast<std::complex<double>>());
      else
        converted.emplace_back(args[i].cast<double>());
      continue;
    }
    const c10::IValue value = torch::jit::toIValue(args[i], arguments[i].type());
    converted.push_back(aten::from_ivalue(value, arguments[i].real_type(), meta_of));
  }
  ops::set_default_dtype(aten::dtype_of(c10::get_default_dtype_as_scalartype()));
  pb::list out;
  for (const graph::TensorMeta& m : ops::infer(op.op, converted)) {
    if (!m.defined)
      out.append(pb::none());
    else
      out.append(pb::make_tuple(dtype_object(m.dtype), pb::tuple(pb::cast(m.sizes)), pb::tuple(pb::cast(m.strides)),
                                m.offset));
  }
  return out;
}

/// The rows of the table as (name, kind, flags) with readable flags.
pb::list op_table() {
  static constexpr const char* kKinds[] = {"pointwise", "reduction", "scan",    "softmax", "view",        "factory",
                                           "copy",      "gather",    "scatter", "matmul",  "convolution", "pool",
                                           "norm",      "attention", "sort",    "loss",    "other"};
  static constexpr std::pair<ops::Flag, const char*> kFlags[] = {
      {ops::kRandom, "random"},      {ops::kMutates, "mutates"},
      {ops::kMultiple, "list"},      {ops::kNondeterministic, "nondeterministic"},
      {ops::kMetaOnly, "meta-only"}, {ops::kDataDependent, "data-dependent"},
      {ops::kMayRaise, "may-raise"}};
  static constexpr const char* kCosts[] = {"free", "cheap", "dear", "never"};
  pb::list out;
  for (const ops::OpInfo& info : ops::table()) {
    pb::list flags;
    for (const auto& [flag, text] : kFlags)
      if (info.has(flag)) flags.append(text);
    out.append(pb::make_tuple(info.op.name(), kKinds[static_cast<size_t>(info.kind)], flags,
                              kCosts[static_cast<size_t>(ops::recompute_cost(info.op))]));
  }
  return out;
}

}  // namespace
}  // namespace kiln

KILN_BINDINGS(shapes) {
  m.def("_infer", &kiln::infer, pybind11::arg("name"), pybind11::arg("args"));
  m.def("_has_rule", [](const std::string& name) {
    const kiln::ops::OpInfo* row = kiln::ops::lookup(kiln::ops::Op(name));
    return row && row->rule;
  });
  m.def("_op_table", &kiln::op_table);
}
