#include "aten/trace.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <unordered_set>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/functional_form.h"
#include "aten/modes.h"
#include "aten/overlap.h"
#include "aten/pch.h"
#include "aten/probe.h"
#include "aten/transforms.h"
#include "base/error.h"
#include "ops/ops.h"

namespace kiln::aten {

using c10::DispatchKey;
constexpr DispatchKey kKey = DispatchKey::TESTING_ONLY_GenericMode;

namespace {
/// Elements of results up to which calls are tried out on real tensors.
constexpr int64_t kMaxProbedResult = 1 << 16;

thread_local Trace* current = nullptr;
thread_local int operator_depth = 0;
/// The results being bound come from an op without tensor arguments.
thread_local bool making_from_nothing = false;

/// Tensors of the last trace on this thread. They outlive the Python objects that wrap them, until the next trace
/// begins.
std::vector<at::Tensor>& held() {
  thread_local auto* tensors = new std::vector<at::Tensor>();  // never destroyed: the interpreter may be gone by then
  return *tensors;
}

struct InsideOperator {
  InsideOperator() { ++operator_depth; }
  ~InsideOperator() { --operator_depth; }
};

/// Throws so that the call fails, leaving the reason where the caller finds it.
[[noreturn]] void fail(Trace& trace, std::string id, std::string cause) {
  trace.failure = Trace::Failure{std::move(id), cause};
  throw Unsupported(std::move(cause));
}

void collect(const c10::IValue& v, std::vector<at::Tensor>& out, bool& list) {
  if (v.isTensor()) {
    out.push_back(v.toTensor());
  } else if (v.isTensorList()) {
    list = true;
    for (const at::Tensor& t : v.toTensorList()) out.push_back(t);
  }
}

/// Whether some result is a number, a bool or a string.
bool returns_others(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
    const auto kind = r.type()->kind();
    return kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType || kind == c10::TypeKind::FloatType ||
           kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType || kind == c10::TypeKind::StringType;
  });
}

/// Whether a call of as_strided or its like counts elements from where memory begins that the graph has a part of: that
/// of an input, or a tensor that begins behind it.
bool counts_from_memory(const Trace& trace, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> args) {
  if (!schema.name().starts_with("aten::as_strided")) return false;
  const auto offset = schema.argumentIndexWithName("storage_offset");
  if (!offset || args[static_cast<size_t>(*offset)].isNone()) return false;
  const at::Tensor& t = args[0].toTensor();
  const graph::Value base = trace.find(t.is_view() ? at::Tensor(t._base()) : t);
  return t.storage_offset() != 0 || !base || base.node->kind == graph::NodeKind::Placeholder;
}

/// Why a call of an operator stays outside of graphs; empty if nothing speaks against it.
std::string refusal(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  const auto& schema = op.schema();
  const std::string& name = op.operator_name().name;
  if (name == "aten::_make_dual" || name == "aten::_unpack_dual") return name + " is of forward-mode differentiation";
  if (!name.starts_with("aten::") && returns_tensors(schema) && returns_others(schema))
    return name + " returns other things than tensors";
  if (!schema.is_mutable()) return "";
  if (name == "aten::set_") return name + " gives a tensor other memory";
  if ((name == "aten::resize_" || name == "aten::resize_as_") && args[0].toTensor().requires_grad())
    return name + " of a tensor that requires grad";
  if (name == "aten::resize_" && !args[0].toTensor().is_contiguous()) return name + " of a tensor with gaps";
  // PyTorch's functionalization has no form of these for empty lists among what they write.
  if (name.starts_with("aten::_fused_")) return name + " updates lists of tensors in place";
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Functionalize) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return writes_shared_memory(op_info(op), args) ? name + " changes a tensor in place that shares memory"
                                                   : make_functional_form(op);
  return "";
}

bool needs_gradient(const c10::IValue& v) {
  return grad_enabled() && v.isTensor() && v.toTensor().defined() && v.toTensor().requires_grad();
}

/// Whether gradients go through what the kernel of an operator from elsewhere calls, since it has no autograd kernel.
bool differentiates_inside(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  if (!grad_enabled() || op.operator_name().name.starts_with("aten::")) return false;
  for (const auto key : {c10::DispatchKey::Autograd, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                         c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return false;
  bool found = false;
  for (const c10::IValue& v : args)
    for_each_tensor(v, [&](const at::Tensor& t) { found |= t.defined() && t.requires_grad(); });
  return found;
}

/// Why the gradient of a call has a shape that depends on data; empty if it has not.
std::string backward_needs_data(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  const std::string& name = op.operator_name().name;
  if ((name == "aten::index_put" || name == "aten::index_put_") && needs_gradient(args[2]) && has_mask(args[1]))
    return "the gradient of " + name + " by a mask needs the mask's data";
  if ((name == "aten::index_fill" || name == "aten::index_fill_") && needs_gradient(args[3]))
    return "the gradient of " + name + " needs the index's data";
  return "";
}

/// Whether eager refuses the gradient of a call in place, which is made of the result: below zero that tells too
/// little.
bool has_refused_gradient(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  const std::string& name = op.operator_name().name;
  return (name == "aten::elu_" || name == "aten::leaky_relu_") && needs_gradient(args[0]) &&
         args[1].toScalar().toDouble() < 0;
}

/// Whether the gradient of an embedding, or of gather, would be a sparse tensor.
bool has_sparse_gradient(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  for (const char* name : {"sparse", "sparse_grad"})
    if (const std::optional<int> sparse = op.schema().argumentIndexWithName(name))
      return args[static_cast<size_t>(*sparse)].isBool() && args[static_cast<size_t>(*sparse)].toBool() &&
             needs_gradient(args[0]);
  return false;
}

/// Whether one of a call's arguments is of a transform, which may have ended (the tensors that a vjp function keeps).
bool has_wrapper(const torch::jit::Stack& stack, size_t num_args) {
  bool found = false;
  for (size_t i = stack.size() - num_args; i < stack.size(); ++i)
    for_each_tensor(stack[i], [&](const at::Tensor& t) { found |= is_wrapper(t); });
  return found;
}

/// Puts the traced call's numbers into the places of open ones among a call's arguments, and says where they were.
std::vector<Sizes::Argument> take_sizes(Trace& trace, c10::ArrayRef<c10::IValue> args, c10::IValue* stack) {
  std::vector<Sizes::Argument> taken;
  if (!trace.sizes) return taken;
  const auto number = [&](const c10::SymInt& n, size_t arg, int64_t item) {
    const Sizes::Expr* e = Sizes::expr_of(n);
    if (!e) return n.expect_int();
    taken.push_back({nullptr, arg, item, *e});
    return trace.sizes->hint(*e);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isSymFloat()) {
      const c10::SymFloat x = args[i].toSymFloat();
      const Sizes::Real* r =
          x.is_symbolic() && trace.unwrap ? Sizes::real_of(trace.unwrap(x.toSymNodeImpl())) : nullptr;
      if (r) taken.push_back({nullptr, i, -1, *r});
      stack[i] = r ? *trace.sizes->hint(*r) : x.expect_float();
    } else if (args[i].isSymInt()) {
      stack[i] = number(args[i].toSymInt(), i, -1);
    } else if (args[i].isSymIntList()) {
      c10::List<int64_t> list;
      int64_t item = 0;
      for (const c10::SymInt& n : args[i].toSymIntVector()) list.push_back(number(n, i, item++));
      stack[i] = std::move(list);
    } else if (args[i].isTensor() && args[i].toTensor().defined() && trace.number_behind) {
      const at::Tensor& t = args[i].toTensor();
      if (is_fake(t) || is_wrapper(t) || !t.unsafeGetTensorImpl()->is_wrapped_number() || !t.has_storage()) continue;
      const bool stands_in = t.scalar_type() == at::kLong     ? *t.const_data_ptr<int64_t>() == Trace::kSizeStandIn
                             : t.scalar_type() == at::kDouble ? std::isnan(*t.const_data_ptr<double>())
                                                              : false;
      if (const auto n = stands_in ? trace.number_behind(t) : std::nullopt) {
        const auto* e = std::get_if<Sizes::Expr>(&*n);
        stack[i] =
            e ? wrapped_number(trace.sizes->hint(*e)) : wrapped_number(*trace.sizes->hint(std::get<Sizes::Real>(*n)));
        taken.push_back({nullptr, i, -1, *n});
      }
    }
  }
  return taken;
}

/// Whether a call's arguments have open sizes.
bool takes_open(const Trace& trace, const torch::jit::Stack& stack, size_t num_args) {
  bool found = false;
  for (size_t i = stack.size() - num_args; i < stack.size(); ++i)
    for_each_tensor(stack[i],
                    [&](const at::Tensor& t) { found |= t.defined() && trace.sizes->is_open(trace.find(t)); });
  return found;
}

void record_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Trace* trace = current;
  std::vector<Sizes::Argument> sizes;
  const auto pin_sizes = [&] {
    for (const Sizes::Argument& a : sizes) trace->sizes->pin(a.number);
  };
  if (trace && trace->sizes) {
    const size_t num_args = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> args = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - num_args);
    sizes = take_sizes(*trace, args, stack->data() + (stack->size() - num_args));
  }
  if (trace && (inside_transform() || has_wrapper(*stack, op.schema().arguments().size()))) {
    if (trace->sizes) trace->sizes->refuse("a transform of torch.func");
    pin_sizes();
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  const bool open =
      trace && trace->sizes && trace->sizes->any_open() && takes_open(*trace, *stack, op.schema().arguments().size());
  const auto refuse_open = [&](const char* why) {
    if (open) trace->sizes->refuse(why);
    pin_sizes();
  };
  if (trace && trace->replace && trace->replace(op, *stack))
    return refuse_open("an operator whose result's shape depends on data");
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_mode(kKey);
  if (!trace) {
    op.callBoxed(*stack);
    return;
  }
  if (stack->size() && op.operator_name().name == "aten::lift_fresh" && stack->back().isTensor() &&
      !is_fake(stack->back().toTensor())) {
    // A number that PyTorch's bindings made a tensor of (x[0] = 1), or an array (x[array]).
    const at::Tensor data = stack->back().toTensor();
    if (!can_be_constant(data)) fail(*trace, "tensor-constructor", "a tensor made of much data");
    if (data.dim() > 1 && !data.is_contiguous()) fail(*trace, "tensor-constructor", "a tensor with an array's strides");
    stack->back() = record_constant(*trace, data.contiguous());
    return;
  }
  const std::string& called = op.operator_name().name;
  const bool asks_truth = called == "aten::is_nonzero";  // of C code: max(), sorted()
  if ((asks_truth || called == "aten::item" || called == "aten::_local_scalar_dense") &&
      is_fake(stack->back().toTensor()))
    if (const auto value = trace->known_value ? trace->known_value(stack->back().toTensor()) : std::nullopt) {
      stack->back() = asks_truth ? c10::IValue(value->toBool()) : c10::IValue(*value);
      return;
    }
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const size_t first = stack->size() - num_args;
  const c10::ArrayRef<c10::IValue> given = c10::ArrayRef<c10::IValue>(*stack).slice(first);
  std::vector<graph::Arg> args;
  const bool recorded = returns_tensors(schema);
  if (recorded) {
    try {
      args = to_args(schema, given, [&](const at::Tensor& t) -> graph::Arg {
        if (t.unsafeGetTensorImpl()->is_wrapped_number() && !is_fake(t)) return number_arg(wrapped_number_value(t));
        const graph::Value v = trace->value_of(t);
        if (!v) throw Unsupported("a tensor that the captured code did not make and that no path leads to");
        return v;
      });
    } catch (const Unsupported& e) {
      fail(*trace, "unsupported-operator-argument", op.operator_name().name + ": " + e.what());
    }
  }
  if (const std::string why = refusal(op, given); !why.empty()) fail(*trace, "unsupported-operator", why);
  if (counts_from_memory(*trace, schema, given))
    fail(*trace, "unsupported-operator",
         op.operator_name().name + " of a part of memory, with an offset into the whole");
  if (const std::string why = backward_needs_data(op, given); !why.empty()) fail(*trace, "operator-needs-data", why);
  if (differentiates_inside(op, given))
    fail(*trace, "unsupported-operator",
         op.operator_name().name + " has no autograd kernel and is to be differentiated");
  if (has_sparse_gradient(op, given))
    fail(*trace, "unsupported-operator", op.operator_name().name + " with a sparse gradient");
  if (has_refused_gradient(op, given))
    fail(*trace, "unsupported-operator", op.operator_name().name + " with a gradient that eager refuses");
  const OpInfo& info = op_info(op);
  if (const std::string why = order_matters(info, given); !why.empty()) fail(*trace, "unsupported-operator", why);
  const auto refuse = [&](c10::ArrayRef<c10::IValue> call) {
    std::string why;
    {
      InsideOperator inside;
      why = refused_by_eager(info, call);
    }
    if (!why.empty()) fail(*trace, "unsupported-operator", why);
  };
  bool from_tensors = false;
  for (const graph::Arg& a : args) graph::for_each_value(a, [&](const graph::Value&) { from_tensors = true; });
  torch::jit::Stack call;
  if (recorded) call.assign(stack->begin() + static_cast<int64_t>(first), stack->end());
  // What is written cannot be taken back, what is returned may be large.
  if (info.kind == OpKind::InPlace) refuse(call);
  const bool differentiable = grad_enabled();
  restore_devices(given);
  const bool composite = recorded && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  // Of such a one, the schema does not say whether it returns its argument (pad, contiguous).
  const bool may_return_argument = composite && info.kind == OpKind::Functional;
  std::unordered_set<const void*> memory;
  for (size_t i = 0; may_return_argument && i < given.size(); ++i)
    for_each_tensor(given[i], [&](const at::Tensor& t) {
      if (t.defined() && t.has_storage()) memory.insert(t.storage().unsafeGetStorageImpl());
    });
  const bool has_parts = composite && (info.kind == OpKind::Functional || info.kind == OpKind::View);
  bool in_parts = has_parts && trace->on_operator;
  if (!in_parts) {
    InsideOperator inside;
    FakeModeGuard fakes;  // factories make fakes too
    try {
      call_on_fakes(op, *stack);
    } catch (const NeedsData& e) {
      in_parts = has_parts;
      if (!in_parts) fail(*trace, "operator-needs-data", e.what());
    } catch (const Unsupported& e) {
      fail(*trace, "unsupported-operator", op.operator_name().name + ": " + e.what());
    } catch (const c10::Error& e) {
      // The program may catch it and read it, and Meta kernels have other words than eager's. Views have one kernel.
      const bool is_view = info.kind == OpKind::View || info.kind == OpKind::InPlaceView;
      if (recorded && !is_view && !refused_by_eager(info, call).ends_with(e.what_without_backtrace()))
        fail(*trace, "exception", op.operator_name().name + " raises " + e.what_without_backtrace());
      throw;
    } catch (const std::exception&) {
      // The fake kernel of an operator from elsewhere, in Python: it may want what fakes do not have (sizes that data
      // decide). If the arguments are wrong, the operator itself says so.
      if (const std::string& name = op.operator_name().name; !name.starts_with("aten::"))
        trace->failure = Trace::Failure{"operator-needs-data", "the fake kernel of " + name + " raises"};
      throw;
    }
  }
  if (in_parts) {
    refuse_open("an operator that is recorded in its parts");
    // What it asks of data may be known (quantile: whether q lies between 0 and 1): so its parts are recorded.
    stack->resize(first);
    stack->insert(stack->end(), call.begin(), call.end());
    no_mode.reset();
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  if (!recorded) return pin_sizes();
  std::vector<at::Tensor> tensors;
  bool list = false;
  const size_t num_results = schema.returns().size();
  restore_devices(c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - num_results));
  for (size_t i = stack->size() - num_results; i < stack->size(); ++i) collect((*stack)[i], tensors, list);
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.layout() != at::kStrided)
      fail(*trace, "unsupported-operator",
           op.operator_name().name + " gives a tensor of layout " + c10::str(t.layout()));
  // What a graph makes has no other memory than its elements'.
  if (called == "aten::empty_strided" || called == "aten::new_empty_strided")
    for (const at::Tensor& t : tensors)
      if (t.numel() > 0 && !t.is_non_overlapping_and_dense())
        fail(*trace, "unsupported-operator", called + " of a tensor whose elements overlap, or lie apart");
  // It was computed from numbers alone: torch.div(8, 4).
  if (!info.factory && !from_tensors && tensors.size() == 1 && tensors[0].defined() && !is_fake(tensors[0]) &&
      can_be_constant(tensors[0]) && !tensors[0].unsafeGetTensorImpl()->is_wrapped_number()) {
    pin_sizes();
    stack->back() = record_constant(*trace, tensors[0]);
    return;
  }
  if (info.kind == OpKind::Functional) {
    int64_t elements = 0;
    for (const at::Tensor& t : tensors) elements += t.defined() ? t.numel() : 0;
    if (elements <= kMaxProbedResult) refuse(call);
  }
  if (!trace->on_operator) call.clear();
  // Forward-mode differentiation has tensors that are zero without memory; what is computed from them is known here.
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0]._is_zerotensor()) {
    pin_sizes();
    const at::Tensor& t = tensors[0];
    making_from_nothing = true;
    trace
        ->record(graph::Op("aten::zeros"),
                 {graph::Arg::ints(t.sizes().vec()), graph::Arg(dtype_of(t.scalar_type())), graph::Arg(),
                  graph::Arg(device_of(t.device())), graph::Arg()},
                 tensors)
        ->grad_enabled = differentiable;
    making_from_nothing = false;
    return;
  }
  std::string name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) name += "." + op.operator_name().overload_name;
  // PyTorch's bindings of factories copy what they made if anyone else holds it, and the copy would be unknown.
  making_from_nothing = !from_tensors || op.operator_name().name.ends_with("_like");
  graph::Node* node = trace->record(graph::Op(name), std::move(args), tensors);
  making_from_nothing = false;
  for (Sizes::Argument& a : sizes) {
    a.node = node;
    trace->sizes->open(node);
    trace->sizes->note_argument(std::move(a));
  }
  node->returns_list = list;
  node->grad_enabled = differentiable;
  node->fresh = may_return_argument && std::none_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
                  return t.defined() && (!t.has_storage() || memory.contains(t.storage().unsafeGetStorageImpl()));
                });
  if (trace->on_operator)
    trace->on_operator(*node, op, std::move(call),
                       {stack->end() - static_cast<std::ptrdiff_t>(num_results), stack->end()});
}
}  // namespace

void Trace::bind(const at::Tensor& t, graph::Value v) {
  if (!values_.emplace(t.unsafeGetTensorImpl(), v).second) return;
  seen_.emplace_back(t.getIntrusivePtr());
  if (!making_from_nothing) held().push_back(t);
}

graph::Value Trace::find(const at::Tensor& t) const {
  auto it = values_.find(t.unsafeGetTensorImpl());
  return it == values_.end() ? graph::Value{} : it->second;
}

graph::Value Trace::value_of(const at::Tensor& t) {
  graph::Value v = find(t);
  if (!v && on_unknown) {
    v = on_unknown(t);
    if (v) bind(t, v);
  }
  return v;
}

graph::Node* Trace::record(graph::Op op, std::vector<graph::Arg> args, const std::vector<at::Tensor>& results,
                           const std::string& name_hint) {
  std::vector<graph::TensorMeta> metas;
  metas.reserve(results.size());
  for (const at::Tensor& t : results) metas.push_back(t.defined() ? meta_of(t) : graph::TensorMeta{});
  graph::Node* node = graph_->add_call(op, std::move(args), std::move(metas), name_hint);
  if (at::autocast::is_autocast_enabled(at::kCPU))
    node->autocast = dtype_of(at::autocast::get_autocast_dtype(at::kCPU));
  node->grad_enabled = grad_enabled();
  if (stack_trace) node->stack = stack_trace();
  if (sizes)
    for (const graph::Arg& a : node->args)
      graph::for_each_value(a, [&](graph::Value v) {
        if (sizes->is_open(v)) sizes->open(node);
      });
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined()) bind(results[i], node->out(static_cast<uint32_t>(i)));
  ++num_nodes;
  if (on_node) on_node(*node);
  return node;
}

bool can_be_constant(const at::Tensor& t) {
  return t.numel() <= kMaxConstant && t.device().is_cpu() && t.layout() == at::kStrided && !t.requires_grad();
}

graph::TensorMeta constant_meta(const at::Tensor& t) {
  graph::TensorMeta meta = meta_of(t);
  meta.strides = graph::contiguous_strides(meta.sizes);
  meta.offset = 0;
  meta.requires_grad = false;
  return meta;
}

std::vector<graph::Arg> constant_args(graph::Arg numbers, const graph::TensorMeta& meta) {
  return {std::move(numbers), graph::Arg::ints(meta.sizes), graph::Arg(meta.dtype)};
}

at::Tensor record_constant(Trace& trace, const at::Tensor& t) {
  KILN_CHECK(t.is_contiguous(), "a constant's numbers are in the order of its dims");
  graph::Arg values;
  {
    RecordingPaused no_recording;
    InsideOperator inside;
    NoFakeGuard real;
    values = numbers_of(t);
  }
  at::Tensor stand;
  {
    RecordingPaused no_recording;
    stand = make_fake(t);
  }
  trace.record(graph::Op("kiln::tensor_constant"), constant_args(std::move(values), meta_of(stand)), {stand},
               "constant");
  return stand;
}

Trace* active_trace() { return current && !c10::impl::tls_is_dispatch_key_excluded(kKey) ? current : nullptr; }

Recording::Recording(Trace& trace) : outer_(current), was_included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  if (!outer_) held().clear();
  current = &trace;
  ops::set_one_thread(at::get_num_threads() == 1);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

Recording::~Recording() {
  c10::impl::tls_set_dispatch_key_included(kKey, was_included_);
  current = outer_;
}

RecordingPaused::RecordingPaused() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kKey)) {
  c10::impl::tls_set_dispatch_key_excluded(kKey, true);
}
RecordingPaused::~RecordingPaused() { c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_); }

RecordingResumed::RecordingResumed()
    : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kKey)),
      were_fakes_(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake)) {
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, false);
}
RecordingResumed::~RecordingResumed() {
  c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_);
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, were_fakes_);
}

bool inside_operator() { return operator_depth > 0; }

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_call>());
}

}  // namespace kiln::aten
