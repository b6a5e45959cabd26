#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>
#include <optional>
#include <string>

#include "aten/schema.h"
#include "graph/graph.h"

// Fake tensors: at::Tensors without data that report their true device, dtype, sizes and strides, so that PyTorch's own
// C++ (composite ops, autograd, functionalization) runs on them unchanged. The boxed fallback on DispatchKey::Fake
// computes results' metadata from, in this order: real views of the fake for view ops; kiln's shape rules; native C++
// Meta kernels; as a logged last resort, the dispatcher's Meta kernel, which may be Python.
namespace torch::autograd {
struct Node;
}

namespace kiln::aten {

/// Thrown by the Fake fallback for an op whose result depends on data (item, nonzero, equal, ...). Not a c10::Error: it
/// passes through PyTorch's C++ untouched; across Python it arrives as a RuntimeError with this message.
class NeedsData : public std::exception {
 public:
  explicit NeedsData(graph::Op op) : op_(op), message_(op.name() + " needs a tensor's data") {}
  graph::Op op() const { return op_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  graph::Op op_;
  std::string message_;
};

inline bool is_fake(const at::Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Fake); }

/// A fake with the sizes, strides, offset, dtype, device and storage size of `real`. It requires grad if `real` does;
/// one of a non-leaf has a grad_fn of its own (FakeInput), so that is_leaf, retain_grad and in-place rules are as for
/// `real`. Inference tensors give inference fakes. Throws Unsupported for what is not a plain strided tensor: sparse,
/// quantized, nested, named, conjugated or negated lazily, functorch wrappers, __torch_dispatch__ subclasses, numbers
/// that autograd has saved as tensors.
at::Tensor make_fake(const at::Tensor& real);
/// True for the grad_fn of such a fake: what is behind it happened before the trace.
bool is_history_of_input(const torch::autograd::Node& node);
/// The same without autograd: requires no grad.
at::Tensor make_plain_fake(const at::Tensor& real);
/// Makes `fake` (a leaf that requires no grad) require grad as `real` does: as a leaf, or with a grad_fn of its own.
void copy_autograd(const at::Tensor& real, const at::Tensor& fake);
/// A fake leaf of this metadata over a storage of its own.
at::Tensor make_fake(const graph::TensorMeta& meta);

/// While alive, ops without tensor arguments (zeros, randn, arange, ...) make fakes too. Nor does a profiler see the
/// ops: it would look into tensors without data.
class FakeModeGuard {
 public:
  FakeModeGuard() : guard_(c10::DispatchKeySet(c10::DispatchKey::Fake)) {}

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
  at::DisableRecordFunctionGuard not_profiled_;
};
/// While alive, the Fake key is out of the way: ops on real tensors compute, ops on fakes run as on meta tensors.
class NoFakeGuard {
 public:
  NoFakeGuard() : guard_(c10::DispatchKeySet(c10::DispatchKey::Fake)) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// While alive, who runs operators on fakes on this thread wants nothing but the metadata of what comes out, whichever
/// way data would decide: item() gives zero, and nonzero() finds nothing. Gradient formulas (of cumprod, prod, max over
/// all) ask such questions to save work.
class ShapesOnly {
 public:
  explicit ShapesOnly(bool only = true);
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;

 private:
  bool before_;
};

/// Gives fakes among these values their device again, which autograd's shallow copies of saved tensors have lost.
void restore_devices(c10::ArrayRef<c10::IValue> values);

/// Runs an operator on a stack of its arguments, fakes among them: as callBoxed does, but for composites that read the
/// memory of CPU tensors where those need no gradient, which the Fake fallback cannot see.
void call_on_fakes(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Sees every op that the Fake fallback runs, after it ran: its arguments (as they were passed) and results (fakes).
class FakeObserver {
 public:
  virtual ~FakeObserver() = default;
  virtual void called(const OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) = 0;
};
/// Installs an observer for this thread while alive; the one before is put back.
class FakeObserverGuard {
 public:
  explicit FakeObserverGuard(FakeObserver* observer);
  ~FakeObserverGuard();
  FakeObserverGuard(const FakeObserverGuard&) = delete;
  FakeObserverGuard& operator=(const FakeObserverGuard&) = delete;

 private:
  FakeObserver* before_;
};

}  // namespace kiln::aten
