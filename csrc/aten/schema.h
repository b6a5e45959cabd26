#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "graph/graph.h"

// The one place that knows what an operator's schema says: interned graph::Op <-> OperatorHandle, and what kind of op
// it is.
namespace kiln::aten {

/// What an operator does with its arguments' storages, read off its schema.
enum class OpKind : uint8_t {
  Functional,   // results are fresh tensors
  View,         // results alias an argument and nothing is written ("Tensor(a)"), lists of views included
  InPlace,      // writes its arguments and returns them, or returns nothing
  InPlaceView,  // changes its argument's sizes, strides or offset (transpose_, resize_, set_, ...)
  Out,          // out= variants
};

/// One operator of the dispatcher. The record lives as long as the process, the operator may not.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& h) : handle(h) {}
  c10::OperatorHandle handle;  // not to be used once the operator is deregistered
  /// Its library was destroyed (a notebook's cell that defines it ran again). Another of its name has another record.
  std::atomic<bool> deregistered = false;
  graph::Op op;
  OpKind kind = OpKind::Functional;
  /// By return: the argument that a write alias ("Tensor(a!)") returns, or -1.
  std::vector<int> written_return;
  /// Arguments that are written ("Tensor(a!)"), by position.
  std::vector<int> written_args;
  /// Draws from a generator.
  bool random = false;
  /// The result's value or shape depends on the data (item, nonzero, unique, equal, ...).
  bool needs_data = false;
  /// No tensor among its arguments: an op that makes tensors from nothing (zeros, randn, arange, ...).
  bool factory = false;
  /// Native kernel for this op on meta tensors, or null; see meta_kernels.def.
  const c10::KernelFunction* meta = nullptr;
  const c10::FunctionSchema& schema() const { return handle.schema(); }
  /// needs_data as far as a call's arguments have a say: whether the argument at a position is not None, and whether it
  /// has masks among its tensors.
  bool call_needs_data(const std::function<bool(size_t)>& is_given, const std::function<bool(size_t)>& has_mask) const;
};

/// The record of a registered operator; made at its first use. Thread-safe.
const OpInfo& op_info(const c10::OperatorHandle& handle);
/// By interned name ("aten::add.Tensor"). Null if the dispatcher has no such operator ("kiln::backward", "torch.relu").
const OpInfo* find_op(graph::Op op);
/// As find_op; throws InternalError if there is none.
const OpInfo& get_op(graph::Op op);
const OpInfo& get_op(std::string_view name);

/// Whether calls give tensors or lists, or nothing (what they do is in their arguments then); else they give a dtype,
/// a number, a truth.
bool returns_tensors(const c10::FunctionSchema& schema);

/// Calls f(graph::Value) for each tensor that the call's operator writes, by its schema.
template <class F>
void for_each_written(const graph::Node& n, F&& f) {
  const OpInfo* op = n.kind == graph::NodeKind::Call ? find_op(n.op) : nullptr;
  if (!op) return;
  for (const int arg : op->written_args)
    if (static_cast<size_t>(arg) < n.args.size())
      graph::for_each_value(n.args[static_cast<size_t>(arg)], [&](const graph::Value& v) {
        if (v) f(v);
      });
}

}  // namespace kiln::aten
