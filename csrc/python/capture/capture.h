#pragma once
#include <Python.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aten/sizes.h"
#include "graph/graph.h"
#include "python/capture/recipe.h"
#include "python/guards/guard.h"

struct _PyInterpreterFrame;

namespace kiln::capture {

/// An input of the captured graph: a tensor found by `source`.
struct GraphInput {
  guards::SourcePtr source;
  std::string name;  // as the graph's placeholder
};

/// N of a torch-level graph's "target::N", the name of an op or, among arguments, of an object.
std::optional<size_t> target_index(std::string_view name);
/// N of a torch-level graph's "size::N", an argument that is an open size.
std::optional<size_t> size_index(std::string_view name);

/// All that one captured region yields. Plain data; holds references, so it lives and dies under the GIL.
struct CaptureResult {
  std::vector<guards::Guard> guards;          // in the order of observation
  std::shared_ptr<graph::Graph> traced;       // ATen ops above autograd; null if the region has no tensor op
  std::shared_ptr<graph::Graph> torch_level;  // the same program as the user wrote it, for fx
  std::vector<py::Ref> torch_targets;         // op "target::N" of torch_level calls torch_targets[N]
  std::vector<symbolic::Number> torch_sizes;  // argument "size::N" of torch_level is torch_sizes[N]
  std::vector<graph::Value> torch_leaves;     // the values of sizes->leaves() in torch_level; none where it has none
  std::vector<GraphInput> inputs;             // one per placeholder of both graphs
  std::vector<py::Ref> example_inputs;        // the real tensors of this call, in the order of `inputs`
  std::vector<SideEffect> side_effects;
  Exit exit;
  int64_t num_ops = 0;  // torch-level calls recorded
  std::unordered_set<std::string>
      constant_numbers;                            // of CaptureOptions::changing_numbers, those that must be constants
  std::unordered_set<std::string> breaking_items;  // calls of item() that must break the graph
  /// What was made in inference mode, by index among the graphs' outputs: tensors, or else views of other ones.
  struct InferenceOutput {
    int64_t index;
    bool view;
  };
  std::vector<InferenceOutput> inference_outputs;
  /// Asked before the graph runs. Its one output is a bool.
  struct Condition {
    std::shared_ptr<graph::Graph> graph;       // null: there is none
    std::vector<size_t> inputs;                // by index in CaptureResult::inputs
    std::shared_ptr<const aten::Sizes> sizes;  // what `graph` is given of those of `traced`; null: nothing
  };
  Condition eager_condition;  // this call is to run in eager
  Condition other_branch;     // a guard that fails: the program takes another branch than the captured one
  /// A value of `traced`, a 0-dim bool, or none: if it is true after the graph has run, an assertion of the program has
  /// failed. The graph has changed nothing then but the generator, and the call is to run in eager.
  graph::Value failed;
  std::vector<std::pair<py::Ref, int>> expected_jumps;  // those assertions that CaptureOptions::expected_jump made
  std::shared_ptr<aten::Sizes> sizes;                   // of `traced`, if some are left open
  struct OpenInt {
    guards::SourcePtr source;
    py::Ref value;
    bool of_numpy = false;  // the program is given np.int64
  };
  std::vector<OpenInt> open_ints;  // what `sizes` is given
  bool failed_is_asked = false;    // the graph writes to its inputs, which it must not before
};

/// For a value of a traced graph, the node whose result's memory it may share; its own if that is fresh. An operator
/// that is not in the table may return its argument, whatever its schema says. Keeps the answers: what loops write in
/// place are long chains.
class Bases {
 public:
  graph::Node* of(graph::Value v);

 private:
  std::unordered_map<const graph::Node*, graph::Node*> known_;
};
/// Whether the call writes to memory of which `counts` says so, by the node that made it. Schemas do not tell of batch
/// norms' statistics.
bool writes_to(const graph::Node& n, Bases& bases, const std::function<bool(const graph::Node*)>& counts);
/// Whether the call changes nothing that existed before its graph, random generators aside.
bool changes_nothing(const graph::Node& n, Bases& bases);

/// Options of one kiln.compile call that capture needs.
struct CaptureOptions {
  bool fullgraph = false;
  /// The graph goes to a backend that takes torch.fx graphs of the user's calls: these have no node for autograd's own.
  bool for_fx = false;
  /// The function, or bound method, that a call of an object which is compiled already stands for: null if it is no
  /// such object, or one that must keep to its own backend and options.
  std::function<PyObject*(PyObject*)> look_through;
  /// Offsets (root code) at which an earlier attempt found that it must break; capture breaks there at once.
  std::unordered_set<int> break_at;
  /// Sources (as text) of floats and ints that become inputs of the graph, if the program needs no more than arithmetic
  /// of them.
  const std::unordered_set<std::string>* changing_numbers = nullptr;
  bool floats_change = true, ints_change = true;  // whether these do
  /// Sources (as text) of functions that are made anew for each call (closures): any of the same code may stand there.
  const std::unordered_set<std::string>* changing_functions = nullptr;
  /// Sources (as text) of memory whose contents break the graph where they are needed, since they change.
  const std::unordered_set<std::string>* changing_contents = nullptr;
  /// Those numbers whose value was needed after all.
  std::unordered_set<std::string> constant_numbers;
  /// They are inputs all the same, and break the graph where their values are needed: enough was compiled for values.
  bool constant_numbers_break = false;
  /// item() gives a number that the graph computes with, except at these calls, where its value was needed: there it is
  /// decided (Machine::decide_numbers), or breaks the graph.
  bool item_numbers = false;
  std::unordered_set<std::string> breaking_items;
  /// What a mask selects need not be counted while the program computes no more than each element, or all, of it: where
  /// the number cannot be decided, and with `masks_change` also where it can.
  bool masks = false, masks_change = false;
  bool inference_modes = true;  // blocks of torch.inference_mode() do not break the graph
  bool dual_levels = true;      // forward_ad.dual_level() does not break the graph
  bool both_branches = true;    // torch.cond computes both and selects, where nothing but speed tells: branches.cpp
  bool texts = true;  // what is formatted of numbers and sizes is made when the graph has run (Machine::make_text)
  /// Branches on a tensor of which one side raises stay in the graph: see Machine::assert_that.
  bool assertions = false;
  /// Whether a jump (code, place in code units) on the value of a tensor is expected to be taken: if that can be an
  /// assertion, it is.
  std::function<std::optional<bool>(PyCodeObject*, int)> expected_jump;
  bool assertions_in_graph = true;  // else only those that can be asked before the graph runs
  /// Whether small tensors of integers decide by guards on branches, numbers and shapes; else only single elements do,
  /// on branches.
  bool data_branches = false;
  /// Which sizes of tensors that are no module's are left open: None; those of mark_dynamic() and of `changing_sizes`
  /// (sources as text, dimensions as bits); or All. Never those of mark_static().
  enum class OpenSizes : uint8_t { None, Some, All } open_sizes = OpenSizes::None;
  const std::unordered_map<std::string, uint64_t>* changing_sizes = nullptr;
  bool resumes = false;    // a resume function: its frame alone may hold what its variables and stack refer to
  bool open_ints = false;  // so are ints of `changing_numbers` whose values are needed
};

/// Runs the frame symbolically; `frame` is untouched. Restarts itself with a longer `break_at` when an inlined call
/// breaks. Throws Unsupported if the frame cannot be captured at all (run it in eager), InternalError on a bug,
/// py::PythonError never (a user's exception becomes a break at the instruction that raised it).
CaptureResult capture_frame(PyThreadState* tstate, _PyInterpreterFrame* frame, const CaptureOptions& options);

/// True while this thread captures (torch.compiler.is_compiling-like queries, hook re-entry).
bool is_capturing();
/// Called by the PEP 523 hook for every Python frame that starts or resumes while is_capturing(): interprets the frame
/// symbolically in place of CPython's evaluator. Same contract as _PyEval_EvalFrameDefault.
PyObject* eval_captured_frame(PyThreadState* tstate, _PyInterpreterFrame* frame, int throw_flag);

}  // namespace kiln::capture
