#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "aten/sizes.h"
#include "graph/graph.h"
#include "joint/autograd_calls.h"
#include "runtime/call_template.h"

namespace kiln::runtime {

/// The traced call's conditions do not hold for the sizes of another.
struct SizesDiffer : std::exception {
  const char* what() const noexcept override { return "these sizes take the program another way"; }
};

/// A traced graph whose sizes were left open (aten::Sizes), run call by call as eager would, above autograd and without
/// Python: what a call of sizes that nothing is compiled for is done by. Immutable; thread-safe.
class SizedProgram {
 public:
  /// Why other sizes cannot be run: calls that the dispatcher does not know, tensors whose sizes change in place, sizes
  /// of what is no longer in the graph. Empty if they can.
  static std::string refusal(const graph::Graph& traced, const aten::Sizes& sizes);
  /// Throws InternalError where there is a refusal(). `changes`: which calls change what was there before; all of them
  /// if it is not given.
  static std::shared_ptr<const SizedProgram> make(std::shared_ptr<const graph::Graph> traced, const aten::Sizes& sizes,
                                                  const std::function<bool(const graph::Node&)>& changes = {});
  size_t num_inputs() const { return graph_->inputs().size(); }
  /// Whether run() is possible. What is the joint trace's to run (custom functions, hooks on gradients) cannot be made
  /// call by call, and checkpointed calls would keep what they are not to keep: such programs are to be compiled.
  bool runs() const { return runs_; }
  static bool runs(const graph::Graph& traced);
  /// What the program is given beside the graph's inputs: the ints of leaves that are given. And what it delivers
  /// beside the outputs: ints, and floats' bits.
  using Ints = std::vector<int64_t>;
  /// The graph's outputs; `sizes`: gets those of Sizes::outputs(). Throws SizesDiffer as soon as a condition fails:
  /// inputs, and gradients of leaves, may be written to by then; raised_before_writes() tells, after any exception.
  /// Needs runs().
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes) const;
  /// Whether the conditions on the inputs alone hold. Cheap.
  bool may_fit(const std::vector<at::Tensor>& inputs, const Ints& ints) const;
  /// Whether run() gives sizes.
  bool delivers() const { return !sizes_.empty(); }
  /// Whether there is more to ask: conditions on sizes of what is computed, and whether calls take their arguments.
  bool asks_inside() const { return last_asked_ > 0; }
  /// Whether something is asked when something may have been changed.
  bool asks_behind_changes() const { return last_asked_ >= first_change_; }
  /// Whether all conditions hold for inputs like `inputs`, which are not touched: runs on fakes as far as there are
  /// any.
  bool fits(const std::vector<at::Tensor>& inputs, const Ints& ints) const;
  /// The graph as a trace at inputs like `inputs` gives it. Throws SizesDiffer.
  std::shared_ptr<graph::Graph> trace_at(const std::vector<at::Tensor>& inputs, const Ints& ints, Ints* sizes) const;

 private:
  struct SizeArg {
    size_t arg;
    int64_t item;
    symbolic::Number number;
  };
  struct LeafAt {
    Slot slot;
    int64_t dim;
    int leaf;
  };
  struct Check {
    const aten::Sizes::Condition* condition;
    Slot slot;  // of a Layout or Contiguous one
  };
  /// A call of the dispatcher, a kiln::tensor_constant, a call of autograd (joint/autograd_calls.h), or a mark
  /// (joint/marks.h).
  struct Step {
    const graph::Node* node = nullptr;  // null: before the first
    std::optional<CallTemplate> call;
    at::Tensor constant;
    std::vector<SizeArg> sizes;
    std::vector<Slot> results, frees;
    std::vector<LeafAt> leaves;
    std::vector<std::pair<size_t, symbolic::Real>> computed;  // leaves that are ints of floats
    std::vector<Check> checks;
  };
  /// How a run on fakes makes its calls.
  struct OnFakes {
    std::function<void(const graph::Node&)> before;
    std::function<at::Tensor(const at::Tensor&)> constant;
    std::function<std::vector<at::Tensor>(const graph::Node&, const joint::TensorOf&)> autograd_call;  // marks, too
    std::function<void(const c10::OperatorHandle&, std::vector<c10::IValue>&)> call;
  };
  /// Makes the calls of steps_ up to `end`, asking the conditions. `fakes`: null for real tensors.
  struct State {
    std::vector<at::Tensor> tensors;
    std::vector<int64_t> leaves;
  };
  /// `at`: always the step that runs.
  State run_steps(std::vector<at::Tensor> inputs, const Ints& ints, size_t end, const OnFakes* fakes, size_t& at) const;
  std::vector<at::Tensor> results(const State& state, Ints* sizes) const;
  /// Values of leaves, those of ints filled in.
  std::vector<int64_t> first_leaves(const Ints& ints) const;
  /// Values, and a delivered number's bits. Throw SizesDiffer if there is none.
  static int64_t value(const symbolic::Expr& e, const std::vector<int64_t>& leaves);
  static double value(const symbolic::Real& r, const std::vector<int64_t>& leaves);
  static int64_t bits(const symbolic::Number& n, const std::vector<int64_t>& leaves);
  /// Notes the sizes that are known after `step` and asks the conditions on them. False if one does not hold.
  bool check(const Step& step, const std::vector<at::Tensor>& tensors, std::vector<int64_t>& leaves) const;

  std::shared_ptr<const graph::Graph> graph_;
  std::vector<aten::Sizes::Condition> conditions_;
  std::vector<symbolic::Number> sizes_;          // delivered
  std::vector<std::pair<size_t, size_t>> ints_;  // leaf, number of the int
  size_t num_leaves_ = 0, num_slots_ = 0;
  std::vector<Step> steps_;
  std::unordered_map<graph::Value, Slot> slots_;
  std::vector<Slot> outputs_;
  size_t last_asked_ = 0;           // the last step that something is asked of
  size_t first_change_ = SIZE_MAX;  // the first step that changes what was there before
  bool autocast_ = false, runs_ = true;
};

}  // namespace kiln::runtime
