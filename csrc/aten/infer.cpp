#include "aten/infer.h"

#include <ATen/core/Tensor.h>

#include <deque>

#include "aten/convert.h"
#include "ops/ops.h"

namespace kiln::aten {
namespace {

/// Raises what eager raises for the same mistake.
[[noreturn]] void raise(const ops::ShapeError& e) {
  switch (e.kind) {
    case ops::ShapeError::Kind::Index:
      C10_THROW_ERROR(IndexError, e.what());
    case ops::ShapeError::Kind::Type:
      C10_THROW_ERROR(TypeError, e.what());
    case ops::ShapeError::Kind::Value:
      C10_THROW_ERROR(ValueError, e.what());
    case ops::ShapeError::Kind::NotImplemented:
      C10_THROW_ERROR(NotImplementedError, e.what());
    case ops::ShapeError::Kind::Runtime:
      break;
  }
  C10_THROW_ERROR(Error, e.what());
}

}  // namespace

std::optional<std::vector<graph::TensorMeta>> infer(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  const ops::OpInfo* row = ops::lookup(op.op);
  if (!row || !row->rule) return std::nullopt;
  std::deque<graph::TensorMeta> metas;  // rules take pointers
  std::vector<MetaArg> rule_args;
  rule_args.reserve(args.size());
  const auto& arguments = op.schema().arguments();
  const MetaOf meta = [&](const at::Tensor& t) -> MetaArg {
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && !t.key_set().has(c10::DispatchKey::Fake)) {
      const at::Scalar s = wrapped_number_value(t);
      if (s.isBoolean()) return s.toBool();
      if (s.isIntegral(false)) return s.toLong();
      if (s.isFloatingPoint()) return s.toDouble();
      return std::complex<double>(s.toComplexDouble());
    }
    return &metas.emplace_back(meta_of(t));
  };
  const DType float_type = dtype_of(c10::get_default_dtype_as_scalartype());
  if (ops::default_dtype() != float_type) ops::set_default_dtype(float_type);
  try {
    for (size_t i = 0; i < args.size(); ++i) rule_args.push_back(from_ivalue(args[i], arguments[i].real_type(), meta));
    return ops::infer(op.op, rule_args);
  } catch (const ops::ShapeError& e) {
    raise(e);
  } catch (const Unsupported&) {
    return std::nullopt;  // an argument or a case that the rule does not cover
  }
}

}  // namespace kiln::aten
