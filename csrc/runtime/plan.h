#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "runtime/compiled_graph.h"

// What an artifact runs: slots (where each tensor lives) and steps (what happens, in order). All decisions are taken
// when the plan is built; a call only patches pointers and runs the steps.
namespace kiln::runtime {

using Slot = int32_t;
constexpr Slot kNoSlot = -1;

struct SlotInfo {
  enum class Kind : uint8_t {
    Input,     // the caller's tensor
    Constant,  // made with the plan
    Arena,     // at a fixed offset of the frame's arena
    Fresh,     // allocated in each call, by the step that first writes it; graph outputs
    Dynamic,   // made by an ATen call in each call
    View,      // meta.offset elements behind the first element of `base`, with its own sizes and strides
  };
  Kind kind = Kind::Dynamic;
  std::string name;
  graph::TensorMeta meta;
  int64_t arena_offset = 0;  // Arena: in bytes, 64-byte aligned
  Slot base = kNoSlot;       // View: a slot of another kind
  bool frozen = false;       // Input: a weight; steps may keep packed forms of it
  at::Tensor constant = {};  // Constant
};

/// The state of one running call; kept between calls, so that arena wrappers and vectors are made once.
struct Frame {
  std::vector<at::Tensor> tensors;  // by slot; undefined while a slot has no tensor
  std::vector<char*> ptrs;          // by slot: its first element
  uint64_t arena_generation = 0;    // of the arena that slots point into; 0: none yet
  std::vector<c10::IValue> stack;   // scratch of the ATen steps
  std::vector<char> kept;           // what the inputs of Plan::undone held before the call

  void set(Slot s, at::Tensor t) {
    ptrs[s] = t.has_storage() ? static_cast<char*>(const_cast<void*>(t.const_data_ptr())) : nullptr;
    tensors[s] = std::move(t);
  }
};

struct Plan;

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Frame& frame) const = 0;
  /// One line or more for Artifact::describe.
  virtual std::string describe(const Plan& plan) const = 0;
  /// Calls f(slot) on every slot that the step reads or writes; the builder finds last uses with it.
  virtual void for_each_slot(const std::function<void(Slot)>& f) const = 0;
};

/// Bytes of inputs that a plan keeps in each run, so that they can be put back. A cache of keys and values is more, and
/// would be copied for each token.
constexpr int64_t kMostUndone = 1 << 20;

struct Plan {
  std::string name;
  std::vector<SlotInfo> slots;
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Slot> inputs;   // the slot of each input, in order
  std::vector<Slot> outputs;  // kNoSlot: None
  std::vector<Slot> mutated;  // input slots that the steps write
  std::vector<Slot> counted;  // those of them whose versions are bumped
  /// Those that are written although a step may raise after that: a run that raises puts back what they held. They are
  /// small (kMostUndone).
  std::vector<Slot> undone;
  /// Elements of inputs that are overwritten although a step may raise after that: a run that raises puts back `old`,
  /// at `places` (int64, in elements from the input's first one). In the order of the writes.
  struct KeptElements {
    Slot input, places, old;
    const Step* known;  // the first step that runs when `places` and `old` are complete
  };
  std::vector<KeptElements> kept_elements;
  /// The first step that writes another one. Null: none does.
  const Step* first_write = nullptr;
  int64_t arena_bytes = 0;

  Slot add_slot(SlotInfo info) {
    slots.push_back(std::move(info));
    return static_cast<Slot>(slots.size() - 1);
  }
  void add_mutated(Slot input, bool uncounted) {
    mutated.push_back(input);
    if (!uncounted) counted.push_back(input);
  }
  std::string slot_text(Slot s) const;
};

/// Ends a plan: puts a step behind the last use of every Dynamic, Fresh and Input slot that is no output, which drops
/// the tensor, so that memory is free for later steps.
void insert_frees(Plan& plan);
std::shared_ptr<Artifact> make_artifact(Plan plan);

/// A tensor with the meta's sizes and strides over pooled memory.
at::Tensor allocate(const graph::TensorMeta& m);
/// `t`, or a copy of it with the meta's strides if its own differ. Throws InternalError if sizes or dtype differ.
at::Tensor with_meta(at::Tensor t, const graph::TensorMeta& m, const std::string& what);

}  // namespace kiln::runtime
