#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include "runtime/call_template.h"
#include "runtime/plan.h"

// The kinds of steps that need no generated code.
namespace kiln::runtime {

/// Calls an ATen op through the dispatcher, below autograd. Constants are converted when the step is made.
class AtenStep final : public Step {
 public:
  using SlotOf = CallTemplate::SlotOf;
  /// What becomes of the tensors that the op returns: they are the slots' from then on; so they are, but for those that
  /// share an argument's memory, which (an arena's) may be used again; or they are copied to the slots' own memory.
  enum class Results { Taken, TakenApart, Copied };
  /// `results` are the slots of the node's tensor results, kNoSlot for the ones that nobody reads.
  AtenStep(const graph::Node& node, const SlotOf& slot_of, std::vector<Slot> results, const Plan& plan,
           Results taken = Results::Taken);
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  bool shares_memory(const Frame& frame, const at::Tensor& t) const;

  CallTemplate call_;
  std::vector<Slot> results_;
  std::vector<graph::TensorMeta> metas_;
  Results taken_;
};

/// Calls the out= overload of an ATen op: the same arguments, then the slots that it writes, which keep their memory.
class AtenOutStep final : public Step {
 public:
  /// `op` is the out overload; `node` gives the arguments that the functional overload takes.
  AtenOutStep(c10::OperatorHandle op, const graph::Node& node, const AtenStep::SlotOf& slot_of, std::vector<Slot> outs);
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  c10::OperatorHandle op_;
  std::vector<c10::IValue> template_;
  std::vector<std::pair<size_t, Slot>> tensors_;
  std::vector<Slot> outs_;
};

/// Makes the tensor of a View slot whose base is not in the arena.
class ViewStep final : public Step {
 public:
  ViewStep(Slot slot, const Plan& plan);
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  Slot slot_, base_;
  graph::TensorMeta meta_;
};

/// Throws AssertionFailed if the slot holds true.
class AskStep final : public Step {
 public:
  explicit AskStep(Slot slot) : slot_(slot) {}
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override { f(slot_); }

 private:
  Slot slot_;
};

/// Allocates the memory of Fresh slots.
class AllocateStep final : public Step {
 public:
  AllocateStep(std::vector<Slot> slots, const Plan& plan);
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  std::vector<std::pair<Slot, graph::TensorMeta>> slots_;
};

/// Fills a slot with a copy of another (same sizes).
class CopyStep final : public Step {
 public:
  CopyStep(Slot to, Slot from) : to_(to), from_(from) {}
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  Slot to_, from_;
};

/// input := value for each pair, as if all at once: values that share memory with a written input are copied first.
class MutateStep final : public Step {
 public:
  struct Pair {
    Slot input, value;
  };
  /// `keep` are output slots, which must not see the change.
  MutateStep(std::vector<Pair> pairs, std::vector<Slot> keep) : pairs_(std::move(pairs)), keep_(std::move(keep)) {}
  void run(Frame& frame) const override;
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>& f) const override;

 private:
  std::vector<Pair> pairs_;
  std::vector<Slot> keep_;
};

class FreeStep final : public Step {
 public:
  explicit FreeStep(std::vector<Slot> slots) : slots_(std::move(slots)) {}
  void run(Frame& frame) const override {
    for (Slot s : slots_) frame.tensors[s] = at::Tensor();
  }
  std::string describe(const Plan& plan) const override;
  void for_each_slot(const std::function<void(Slot)>&) const override {}

 private:
  std::vector<Slot> slots_;
};

}  // namespace kiln::runtime
