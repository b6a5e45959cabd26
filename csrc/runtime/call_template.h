#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <vector>

#include "graph/graph.h"
#include "runtime/plan.h"

namespace kiln::runtime {

/// The dispatcher's handle of an op's name. Throws Unsupported if no such op is registered.
c10::OperatorHandle find_op(const graph::Op& op);

/// A call of an operator with all but its tensors filled in.
class CallTemplate {
 public:
  using SlotOf = std::function<Slot(graph::Value)>;
  /// Throws Unsupported if there is no such operator.
  CallTemplate(const graph::Node& node, const SlotOf& slot_of);
  /// The call's arguments, in schema order; tensors by slot.
  void fill(const std::vector<at::Tensor>& tensors, std::vector<c10::IValue>& stack) const;
  void for_each_slot(const std::function<void(Slot)>& f) const;
  const c10::OperatorHandle& op() const { return op_; }

 private:
  struct TensorArg {
    size_t arg;
    Slot slot;
  };
  struct ListArg {
    size_t arg;
    bool optional;
    std::vector<Slot> slots;  // kNoSlot: None
  };
  c10::OperatorHandle op_;
  std::vector<c10::IValue> template_;
  std::vector<TensorArg> tensors_;
  std::vector<ListArg> lists_;
};

/// Calls f(Tensor) on each tensor among the results of a boxed call, those in lists too.
void for_each_result(std::vector<c10::IValue>& stack, const std::function<void(at::Tensor)>& f);

}  // namespace kiln::runtime
