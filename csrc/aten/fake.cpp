#include "aten/fake.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "aten/convert.h"
#include "aten/infer.h"
#include "aten/probe.h"
#include "base/error.h"
#include "base/log.h"
#include "ops/ops.h"

namespace kiln::aten {
namespace {

thread_local FakeObserver* observer = nullptr;

/// grad_fn of a fake that stands for a non-leaf: the graph behind it is not the trace's business.
struct FakeInput final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  std::string name() const override { return "FakeInput"; }
};

/// Whoever asks for a fake's address (numpy(), data_ptr()) gets an error in place of a null pointer.
void deny_data(const c10::Storage& storage) {
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_("a traced tensor has no data");
}

at::Tensor fake_over(c10::Storage storage, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     int64_t offset, c10::Device device) {
  c10::DispatchKeySet keys(c10::DispatchKey::Meta);
  if (device.is_meta()) keys = keys.add(c10::DispatchKey::Fake);  // set_fake_device does that for devices with data
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  if (!device.is_meta()) t.unsafeGetTensorImpl()->set_fake_device(device);
  return t;
}

c10::Storage storage_of(size_t nbytes) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  deny_data(storage);
  return storage;
}

/// A plain meta tensor like `t`, fake or real: what native Meta kernels take.
at::Tensor plain_meta(const at::Tensor& t) {
  at::Tensor m = at::Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
  return m;
}

void to_plain_meta(c10::IValue& v) {
  v = v.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : map_tensors(v, plain_meta);
}

/// Marks tensors that a Meta kernel made as fakes on `device`.
void adopt(const c10::IValue& v, c10::Device device) {
  for_each_tensor(v, [&](const at::Tensor& t) {
    if (t.defined()) t.unsafeGetTensorImpl()->set_fake_device(device);
  });
}

/// The device of results: the one asked for, else that of the fakes; 0-dim CPU tensors follow the others.
c10::Device result_device(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  std::optional<c10::Device> asked, from_tensors, from_scalars;
  for (const c10::IValue& v : args) {
    if (v.isDevice()) asked = v.toDevice();
    for_each_tensor(v, [&](const at::Tensor& t) {
      if (!t.defined()) return;
      auto& slot = t.dim() == 0 ? from_scalars : from_tensors;
      if (!slot) slot = t.device();
    });
  }
  c10::Device d = asked ? *asked : from_tensors ? *from_tensors : from_scalars ? *from_scalars : c10::Device(c10::kCPU);
  return d;
}

/// Results as the schema's return types want them, from their tensors in order.
void push_results(const OpInfo& op, std::vector<at::Tensor> tensors, torch::jit::Stack& stack) {
  size_t next = 0;
  const auto& returns = op.schema().returns();
  for (const c10::Argument& ret : returns) {
    if (ret.type()->kind() == c10::TypeKind::ListType) {
      KILN_CHECK(returns.size() == 1, op.op.name() + ": a list among several results");
      stack.push_back(c10::IValue(std::move(tensors)));
      return;
    }
    KILN_CHECK(next < tensors.size(), op.op.name() + ": too few results");
    stack.push_back(std::move(tensors[next++]));
  }
}

void push_fakes(const OpInfo& op, const std::vector<graph::TensorMeta>& metas, torch::jit::Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const graph::TensorMeta& m : metas) tensors.push_back(m.defined ? make_fake(m) : at::Tensor());
  push_results(op, std::move(tensors), stack);
}

/// Results of an op that makes fresh tensors. `args` are the call's arguments, fakes included.
void fresh_results(const OpInfo& op, c10::ArrayRef<c10::IValue> args, torch::jit::Stack& stack) {
  if (auto metas = infer(op, args)) {
    push_fakes(op, *metas, stack);
    return;
  }
  // The dispatcher looks for their fake kernels in Python, where there are none.
  if (!op.meta && op.op.name().starts_with("quantized::"))
    if (auto metas = results_in_eager(op, args)) return push_fakes(op, *metas, stack);
  const c10::Device device = result_device(op, args);
  const size_t first = stack.size();
  for (const c10::IValue& v : args) {
    stack.push_back(v);
    to_plain_meta(stack.back());
  }
  // An op without tensor arguments would otherwise be routed by the thread's included keys.
  c10::impl::ExcludeDispatchKeyGuard only_meta(c10::DispatchKeySet(
      {c10::DispatchKey::Fake, c10::DispatchKey::Functionalize, c10::DispatchKey::TESTING_ONLY_GenericMode}));
  if (op.meta) {
    op.meta->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } else {
    if (log_enabled(Topic::fallback))
      log_artifact(Topic::fallback, "shape from the dispatcher's Meta kernel", op.op.name());
    try {
      op.handle.callBoxed(stack);
    } catch (const c10::NotImplementedError&) {
      if (auto metas = results_in_eager(op, args)) {
        stack.resize(first);
        push_fakes(op, *metas, stack);
        return;
      }
      throw Unsupported(op.op.name() + " has neither a shape rule nor a Meta kernel");
    }
  }
  for (size_t i = first; i < stack.size(); ++i) adopt(stack[i], device);
}

void check_cast(c10::ScalarType result, c10::ScalarType out) {
  TORCH_CHECK(c10::canCast(result, out), "result type ", result, " can't be cast to the desired output type ", out);
}

/// What the op's Meta kernel, which it has, gives for the arguments as plain meta tensors.
torch::jit::Stack run_meta_kernel(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  torch::jit::Stack stack(args.begin(), args.end());
  for (c10::IValue& v : stack) to_plain_meta(v);
  op.meta->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  return stack;
}

/// Runs the in-place op's functional twin for its checks, where one is known: `x.add_(y)` fails for a y that does not
/// broadcast to x just as in eager.
void check_in_place(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  if (op.written_args.size() != 1 || op.written_args[0] != 0 || !args[0].isTensor()) return;
  const auto& name = op.handle.operator_name();
  if (name.name.empty() || name.name.back() != '_') return;
  const std::string twin = name.name.substr(0, name.name.size() - 1);
  const OpInfo* functional = find_op(graph::Op(name.overload_name.empty() ? twin : twin + "." + name.overload_name));
  // Some overloads are named in one form only: floor_divide_.Tensor and floor_divide, ldexp_ and ldexp.Tensor.
  if (!functional) functional = find_op(graph::Op(name.overload_name.empty() ? twin + ".Tensor" : twin));
  // pow_.Scalar takes the power of a tensor, pow.Scalar that of a number.
  const auto takes_tensor = [](const OpInfo* f) {
    return !f->schema().arguments().empty() && f->schema().arguments()[0].type()->kind() == c10::TypeKind::TensorType;
  };
  if (functional && !takes_tensor(functional)) functional = find_op(graph::Op(twin + ".Tensor_" + name.overload_name));
  if (!functional || functional->schema().arguments().size() != args.size()) return;
  const at::Tensor& self = args[0].toTensor();
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = self.scalar_type();
  if (auto metas = infer(*functional, args)) {
    if (metas->empty()) return;
    sizes = metas->front().sizes;
    if (ops::is_pointwise(functional->op)) dtype = scalar_type_of(metas->front().dtype);
  } else if (functional->meta) {
    const torch::jit::Stack stack = run_meta_kernel(*functional, args);
    if (!stack.back().isTensor()) return;
    sizes = stack.back().toTensor().sizes().vec();
  } else {
    return;
  }
  check_cast(dtype, self.scalar_type());
  TORCH_CHECK(self.sizes() == c10::IntArrayRef(sizes), "output with shape ", self.sizes(),
              " doesn't match the broadcast shape ", c10::IntArrayRef(sizes));
}

const OpInfo* find_functional_of_out(const OpInfo& op) {
  const auto& args = op.schema().arguments();
  size_t kept = 0;
  while (kept < args.size() && !args[kept].is_out()) ++kept;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name != op.handle.operator_name().name) continue;
    auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle || handle->schema().arguments().size() != kept) continue;
    bool same = true;
    for (size_t i = 0; i < kept && same; ++i) {
      const auto& a = handle->schema().arguments()[i];
      same = !a.alias_info() && a.name() == args[i].name() && *a.type() == *args[i].type();
    }
    if (same) return &op_info(*handle);
  }
  return nullptr;
}

/// The functional overload of an out= op: same name, same arguments without the out ones. Looking for it goes through
/// all operators.
const OpInfo* functional_of_out(const OpInfo& op) {
  thread_local std::unordered_map<const OpInfo*, const OpInfo*> known;
  const auto [at, fresh] = known.try_emplace(&op, nullptr);
  if (fresh) at->second = find_functional_of_out(op);
  return at->second;
}

void run_out(const OpInfo& op, c10::ArrayRef<c10::IValue> args, torch::jit::Stack& stack) {
  const OpInfo* functional = functional_of_out(op);
  if (!functional) throw Unsupported(op.op.name() + " has no functional form");
  const size_t kept = functional->schema().arguments().size();
  torch::jit::Stack fresh;
  fresh_results(*functional, args.slice(0, kept), fresh);
  const std::vector<at::Tensor> results = flatten_tensors(fresh);
  size_t next = 0;
  for (size_t i = kept; i < args.size(); ++i)
    for_each_tensor(args[i], [&](const at::Tensor& out) {
      KILN_CHECK(next < results.size(), "more out arguments than results");
      const at::Tensor& result = results[next++];
      if (out.scalar_type() != result.scalar_type()) {  // whether eager casts, the Meta kernel checks in the same way
        if (!op.meta) throw Unsupported("out= of another dtype than the result");
        run_meta_kernel(op, args);
      }
      if (out.sizes() == result.sizes()) return;
      if (out.numel() != 0) throw Unsupported("out= of another size than the result");
      NoFakeGuard no_fake;
      out.resize_(result.sizes());
    });
  for (int from : op.written_return) {
    KILN_CHECK(from >= 0, op.op.name() + ": an out= op that returns a fresh tensor");
    stack.push_back(args[from]);
  }
}

void run_fake(const OpInfo& op, c10::ArrayRef<c10::IValue> args, torch::jit::Stack& stack) {
  switch (op.kind) {
    case OpKind::View:
    case OpKind::InPlaceView: {
      // Native Meta kernels of views work on the fake itself, so results share its storage and version counter.
      const c10::Device device = result_device(op, args);
      const size_t first = stack.size();
      stack.insert(stack.end(), args.begin(), args.end());
      {
        NoFakeGuard no_fake;
        // resize_ and set_ handle the storage itself.
        if (op.kind == OpKind::InPlaceView)
          args[0].toTensor().storage().unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
        op.handle.callBoxed(stack);
        if (op.kind == OpKind::InPlaceView) deny_data(args[0].toTensor().storage());
      }
      for (size_t i = first; i < stack.size(); ++i) adopt(stack[i], device);
      return;
    }
    case OpKind::InPlace: {
      check_in_place(op, args);
      bool all_written = true;
      for (int from : op.written_return) all_written &= from >= 0;
      if (!all_written) {  // returns fresh tensors besides what it writes, as _native_batch_norm_legit does
        const size_t first = stack.size();
        fresh_results(op, args, stack);
        for (size_t i = 0; i < op.written_return.size(); ++i)
          if (op.written_return[i] >= 0) stack[first + i] = args[op.written_return[i]];
        return;
      }
      for (int from : op.written_return) stack.push_back(args[from]);
      return;
    }
    case OpKind::Out:
      run_out(op, args, stack);
      return;
    case OpKind::Functional:
      fresh_results(op, args, stack);
      return;
  }
}

thread_local bool shapes_only = false;

/// What ShapesOnly says of a call; false if it says nothing.
bool answer_without_data(const OpInfo& op, c10::ArrayRef<c10::IValue> args, torch::jit::Stack& stack) {
  if (!shapes_only) return false;
  const std::string& name = op.op.name();
  if (name == "aten::_local_scalar_dense" || name == "aten::item") {
    const at::ScalarType type = args[0].toTensor().scalar_type();
    stack.emplace_back(type == at::kBool           ? at::Scalar(false)
                       : c10::isFloatingType(type) ? at::Scalar(0.0)
                       : c10::isComplexType(type)  ? at::Scalar(c10::complex<double>(0))
                                                   : at::Scalar(0));
    return true;
  }
  if (name == "aten::nonzero") {
    graph::TensorMeta meta = meta_of(args[0].toTensor());
    meta.sizes = {0, static_cast<int64_t>(meta.sizes.size())};
    meta.strides = graph::contiguous_strides(meta.sizes);
    meta.offset = 0;
    meta.dtype = DType::Int64;
    meta.requires_grad = false;
    stack.emplace_back(make_fake(meta));
    return true;
  }
  return false;
}

void check_data_need(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  if (op.call_needs_data([&](size_t i) { return !args[i].isNone(); }, [&](size_t i) { return has_mask(args[i]); }))
    throw NeedsData(op.op);
}

/// Whether a fake is moved to the meta device, as kernels do that want to know a shape.
bool moves_to_meta(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  return (op.kind == OpKind::View || op.kind == OpKind::Functional) &&
         std::any_of(args.begin(), args.end(),
                     [](const c10::IValue& v) { return v.isDevice() && v.toDevice().is_meta(); });
}

/// The results are no fakes.
void run_on_meta(const OpInfo& op, torch::jit::Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); ++i) to_plain_meta(stack[i]);
  NoFakeGuard no_fake;
  op.handle.callBoxed(stack);
}

/// A derivative formula asks for a tensor like one that was saved, whose device is lost (restore_devices): it gets that
/// of the node's gradients.
void restore_asked_device(torch::jit::Stack& args) {
  for (c10::IValue& v : args)
    if (v.isDevice() && v.toDevice().is_meta())
      if (const auto node = torch::autograd::get_current_node(); node && node->num_inputs() > 0)
        v = node->input_metadata(0).device();
}

void fake_fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const OpInfo& op = op_info(handle);
  const size_t nargs = handle.schema().arguments().size();
  const size_t first = stack->size() - nargs;
  bool any_fake = false, any_real = false;
  for (size_t i = first; i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const at::Tensor& t) {
      if (!t.defined()) return;
      if (is_fake(t))
        any_fake = true;
      else if (t.numel() > kMaxConstant || !t.is_cpu() || t.requires_grad())
        any_real = true;
    });
  if (!any_fake && !op.factory) {  // constants among themselves: compute
    NoFakeGuard no_fake;
    handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake), stack);
    return;
  }
  if (any_fake && moves_to_meta(op, c10::ArrayRef<c10::IValue>(*stack).slice(first))) {
    run_on_meta(op, *stack, first);
    return;
  }
  if (any_real) throw Unsupported("a tensor with data met a traced one in " + op.op.name());
  for (int i : op.written_args)
    for_each_tensor((*stack)[first + static_cast<size_t>(i)], [&](const at::Tensor& t) {
      if (t.defined() && !is_fake(t))
        throw Unsupported(op.op.name() + " writes a traced value into a tensor with data");
    });
  torch::jit::Stack args(std::make_move_iterator(stack->begin() + static_cast<int64_t>(first)),
                         std::make_move_iterator(stack->end()));
  torch::jit::drop(*stack, nargs);
  restore_devices(args);
  if (op.factory) restore_asked_device(args);
  if (answer_without_data(op, args, *stack)) return;
  check_data_need(op, args);
  // Functionalization knows no view but ATen's.
  if (op.kind == OpKind::View && !op.op.name().starts_with("aten::"))
    throw Unsupported(op.op.name() + " returns views of its arguments and is no ATen operator");
  const size_t results = stack->size();
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    run_fake(op, args, *stack);
  }
  if (observer) observer->called(op, args, c10::ArrayRef<c10::IValue>(*stack).slice(results));
}

}  // namespace

ShapesOnly::ShapesOnly(bool only) : before_(std::exchange(shapes_only, only)) {}
ShapesOnly::~ShapesOnly() { shapes_only = before_; }

bool is_history_of_input(const torch::autograd::Node& node) { return dynamic_cast<const FakeInput*>(&node) != nullptr; }

at::Tensor make_fake(const at::Tensor& real) {
  // Types are promoted as with a number: the graph's tensors cannot say that.
  if (real.unsafeGetTensorImpl()->is_wrapped_number())
    throw Unsupported("a number that autograd has saved as a tensor");
  c10::InferenceMode mode(real.is_inference());
  at::Tensor t = make_plain_fake(real);
  copy_autograd(real, t);
  return t;
}

at::Tensor make_plain_fake(const at::Tensor& real) {
  const c10::DispatchKeySet keys = real.key_set();
  if (real.layout() != c10::kStrided) throw Unsupported("a tensor of layout " + c10::str(real.layout()));
  if (real.is_quantized()) throw Unsupported("a quantized tensor");
  if (real.is_nested()) throw Unsupported("a nested tensor");
  if (real.is_conj() || real.is_neg()) throw Unsupported("a lazily conjugated or negated tensor");
  if (keys.has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize})))
    throw Unsupported("a tensor subclass or wrapper");
  if (real.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) throw Unsupported("a tensor with symbolic sizes");
  if (!real.has_storage()) throw Unsupported("a tensor without storage");
  at::Tensor t = fake_over(storage_of(real.storage().nbytes()), real.scalar_type(), real.sizes(), real.strides(),
                           real.storage_offset(), real.device());
  if (real.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

void copy_autograd(const at::Tensor& real, const at::Tensor& fake) {
  if (!real.requires_grad()) return;
  // Of a view whose base was written it is grad_fn() that knows, or refuses.
  if (!real.grad_fn())
    fake.set_requires_grad(true);
  else {
    auto node = c10::make_intrusive<FakeInput>();
    const uint32_t nr = node->add_input_metadata(fake);
    torch::autograd::impl::set_gradient_edge(fake, torch::autograd::Edge(std::move(node), nr));
  }
}

at::Tensor make_fake(const graph::TensorMeta& meta) {
  const at::ScalarType dtype = scalar_type_of(meta.dtype);
  const size_t itemsize = c10::elementSize(dtype);
  const size_t nbytes = at::detail::computeStorageNbytes(meta.sizes, meta.strides, itemsize, meta.offset);
  at::Tensor t = fake_over(storage_of(nbytes), dtype, meta.sizes, meta.strides, meta.offset, to_device(meta.device));
  if (meta.requires_grad) t.set_requires_grad(true);
  return t;
}

void restore_devices(c10::ArrayRef<c10::IValue> values) {
  for (const c10::IValue& v : values)
    for_each_tensor(v, [&](const at::Tensor& t) {
      if (!is_fake(t) || !t.device().is_meta()) return;
      const c10::DeviceType type = c10::dispatchKeyToDeviceType(c10::highestPriorityBackendTypeId(t.key_set()));
      t.unsafeGetTensorImpl()->set_fake_device(c10::Device(type));
    });
}

void call_on_fakes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  static const c10::OperatorName kMaxPool1d("aten::max_pool1d", "");
  const at::Tensor* self = op.operator_name() == kMaxPool1d ? &torch::jit::peek(stack, 0, 6).toTensor() : nullptr;
  if (!self || (at::GradMode::is_enabled() && self->requires_grad())) {
    op.callBoxed(stack);
    return;
  }
  // Eager has a kernel of its own for this case, which makes contiguous results.
  const auto args = torch::jit::pop(stack, 6);
  const auto ints = [&](size_t i) { return args[i].toIntVector(); };
  stack.push_back(
      std::get<0>(at::max_pool1d_with_indices(args[0].toTensor(), ints(1), ints(2), ints(3), ints(4), args[5].toBool()))
          .contiguous());
}

FakeObserverGuard::FakeObserverGuard(FakeObserver* o) : before_(std::exchange(observer, o)) {}
FakeObserverGuard::~FakeObserverGuard() { observer = before_; }

}  // namespace kiln::aten

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kiln::aten::fake_fallback>()); }
