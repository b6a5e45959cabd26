#include "joint/recorder.h"

#include "aten/convert.h"
#include "aten/trace.h"
#include "base/error.h"

namespace kiln::joint {

using graph::Arg;
using graph::Value;

graph::Node* Recorder::add(graph::Op op, std::vector<Arg> args, std::vector<graph::TensorMeta> metas) {
  graph::Node* node = graph_.add_call(op, std::move(args), std::move(metas));
  node->backward = backward;
  node->checkpoint = backward ? 0 : checkpoint;
  node->grad_enabled = true;
  node->stack = stack;
  node->module_path = module_path;
  return node;
}

void Recorder::bind(const at::Tensor& t, Value v) {
  // A fake is bound once: an op that returns its argument (a detach that is none below autograd) keeps the value it
  // had.
  if (values_.emplace(t.unsafeGetTensorImpl(), v).second) alive_.push_back(t);
}

Value Recorder::value_of(const at::Tensor& t) {
  if (auto it = values_.find(t.unsafeGetTensorImpl()); it != values_.end()) return it->second;
  if (aten::is_fake(t)) throw Unsupported("a traced tensor of another trace");
  if (t.layout() != c10::kStrided || !t.is_cpu() || t.numel() > aten::kMaxConstant)
    throw Unsupported("a tensor with data that is no input of the graph");
  // Python made it while tracing (torch.tensor(2.0)): its numbers are the program's.
  aten::NoFakeGuard no_fake;
  Arg numbers = aten::numbers_of(t);
  const graph::TensorMeta meta = aten::constant_meta(t);
  if (t.scalar_type() != at::kBool && meta.dtype == DType::Opaque) throw Unsupported("a constant of an unknown dtype");
  graph::Node* node = add(graph::Op("kiln::tensor_constant"), aten::constant_args(std::move(numbers), meta), {meta});
  bind(t, node->out());
  return node->out();
}

at::Tensor Recorder::constant(std::vector<Arg> args, const graph::TensorMeta& meta) {
  graph::TensorMeta plain = meta;
  plain.requires_grad = false;
  at::Tensor fake = aten::make_fake(plain);
  bind(fake, add(graph::Op("kiln::tensor_constant"), std::move(args), {plain})->out());
  return fake;
}

at::Tensor Recorder::laid_out(const at::Tensor& t, const std::vector<int64_t>& strides) {
  graph::TensorMeta meta = aten::meta_of(t);
  meta.strides = strides;
  meta.offset = 0;
  meta.requires_grad = false;
  at::Tensor fake = aten::make_fake(meta);
  bind(fake, add(graph::Op("aten::clone"), {Arg(value_of(t)), Arg()}, {meta})->out());
  return fake;
}

std::vector<at::Tensor> Recorder::call(graph::Op function, std::vector<Arg> args,
                                       std::vector<graph::TensorMeta> results, bool returns_list) {
  std::vector<at::Tensor> fakes;
  for (const graph::TensorMeta& meta : results) fakes.push_back(meta.defined ? aten::make_fake(meta) : at::Tensor());
  graph::Node* node = add(function, std::move(args), std::move(results));
  node->returns_list = returns_list;
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (fakes[i].defined()) bind(fakes[i], node->out(i));
  return fakes;
}

void Recorder::called(const aten::OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) {
  using aten::OpKind;
  const bool writes = op.kind == OpKind::InPlace || op.kind == OpKind::Out;
  if (op.kind != OpKind::Functional && op.kind != OpKind::View && !(in_place && writes))
    throw Unsupported(op.op.name() + " writes in place and has no functional form");
  if (!aten::returns_tensors(op.schema())) return;  // who asked has the answer
  const std::vector<at::Tensor> tensors = aten::flatten_tensors(results);
  static const graph::Op kDetach("aten::detach"), kAlias("aten::alias"), kLift("aten::lift_fresh"),
      kLiftCopy("aten::lift");
  if (op.op == kDetach || op.op == kAlias || op.op == kLift || op.op == kLiftCopy) {
    bind(tensors.at(0), value_of(args[0].toTensor()));
    return;
  }
  std::vector<Arg> graph_args = aten::to_args(op.schema(), args, [&](const at::Tensor& t) -> Arg {
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && !aten::is_fake(t))
      return aten::number_arg(aten::wrapped_number_value(t));
    return value_of(t);
  });
  std::vector<graph::TensorMeta> metas;
  metas.reserve(tensors.size());
  for (const at::Tensor& t : tensors) metas.push_back(t.defined() ? aten::meta_of(t) : ops::undefined_meta());
  graph::Node* node = add(op.op, std::move(graph_args), std::move(metas));
  const auto& returns = op.schema().returns();
  node->returns_list =
      returns.size() > 1 || (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType);
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].defined()) bind(tensors[i], node->out(i));
}

}  // namespace kiln::joint
