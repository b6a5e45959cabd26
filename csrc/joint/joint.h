#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <boost/dynamic_bitset.hpp>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "graph/graph.h"

// The joint graph: a program with autograd in it, made one functional graph of ATen ops by running it on functional
// fakes with the real autograd engine, and a signature that says how its outputs relate to what the program returned.
namespace kiln::joint {

/// How one output of the program is made from the artifact's outputs and the inputs.
struct Output {
  enum class Kind : uint8_t {
    None,       // an undefined tensor
    Forward,    // forward output `index`
    Input,      // input `index` itself (the same tensor object)
    InputView,  // a view of input `index`
    View,       // a view of forward output `index`, which outputs of the program share
    Same,       // the same tensor object as the program's output `index`
  };
  Kind kind = Kind::None;
  int64_t index = 0;
  /// Views: geometry, in elements of the view; `offset` counts from the first element of the input (or forward output).
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // Undefined: that of what is viewed
  bool conjugate = false, negate = false;              // lazily, relative to what is viewed
  bool requires_grad = false;
  /// Requires gradients and has no history: made inside the program by a factory with requires_grad=True, or a view
  /// that was made without gradients.
  bool leaf = false;
  /// A leaf that autograd knows of as no view (detach().requires_grad_()).
  bool detached = false;
  /// Writes to it are not counted as writes to what it is a view of: it is a .data.
  bool uncounted = false;
  /// A view that autograd refuses from now on: made without gradients, and its base was written since.
  bool refused = false;
  /// How a view was made: autograd refuses writes to one of several results of an operator (unbind, split), to what a
  /// custom function made (also if it is none of the views above), and with gradients to what was made without.
  torch::autograd::CreationMeta creation = torch::autograd::CreationMeta::DEFAULT;
};

/// Input `input` holds forward output `forward` after the call, and autograd sees it: written by copy_ above autograd.
struct VisibleMutation {
  int64_t input = 0;
  int64_t forward = 0;
};

/// What a tangent is the gradient of: a forward output, or a view among the program's outputs. A view has one if a
/// gradient of another output passes by it; else autograd knows its gradient from what it is a view of.
struct TangentOf {
  int64_t forward = -1;  // -1 for a view
  int64_t view = -1;     // the program's output, of kind View or InputView
};

/// Some of a joint graph's tangents.
using TangentSet = boost::dynamic_bitset<>;

struct Joint {
  /// Placeholders: one per input of the program ("primals"), then one per tangent. Outputs: `num_forward` forward ones,
  /// then one per entry of `grad_of`, then one per entry of `total_of`. Graph::mutations(): input changes that autograd
  /// does not see.
  std::unique_ptr<graph::Graph> graph;
  size_t num_primals = 0;
  size_t num_forward = 0;
  std::vector<Output> outputs;             // one per output of the program
  std::vector<VisibleMutation> mutations;  // see VisibleMutation
  /// By forward output: the program could differentiate it.
  std::vector<bool> forward_requires_grad;
  /// By forward output that requires grad: the graph behind it was freed by a backward() inside the program.
  std::vector<bool> forward_freed;
  /// By such an output: the program's outputs, views, by which its gradient would pass.
  std::map<int64_t, std::vector<size_t>> views_behind_freed;
  /// By primal: the backward may read it where it lies. Autograd itself keeps it, and says so if it is written to
  /// before the backward. What eager makes of other inputs does not change with them.
  std::vector<bool> primal_kept;
  /// By forward output: so it is with the memory of the output. Nobody writes to one that is no output of the program.
  std::vector<bool> output_kept;
  std::vector<TangentOf> tangent_of;  // by tangent placeholder; those of views are last
  std::vector<int64_t> grad_of;       // by gradient output: its primal
  /// Tangents of outputs from which other outputs are computed: the whole gradient of such an output, its tangent and
  /// what the others contribute, is an output of the graph too. Hooks of the program's caller see it.
  std::vector<int64_t> total_of;
  /// By gradient output and total: the tangents that reach it. Without all of these eager gives no gradient, not zeros.
  std::vector<TangentSet> reached_from;
  /// The same of the tangents that reach it by a custom function that makes zeros of a gradient that is missing: eager
  /// gives zeros there also for a result of which a backward arrives with no gradient.
  std::vector<TangentSet> zeros_from;
  /// By tangent: the tangents that a backward of it without retain_graph uses up, since nodes on the way of both have
  /// saved tensors.
  std::vector<TangentSet> uses_up;
  bool has_backward() const { return !tangent_of.empty(); }
};

/// A program on tensors; called once, on functional fakes.
using Program = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Traces `program` at inputs like `examples` (real tensors or fakes; only metadata, leafness and requires_grad are
/// read). Throws Unsupported for programs whose effects cannot be expressed (metadata changes of inputs, set_, leaves
/// that are made inside and used further); exceptions of the program itself pass through.
Joint trace_joint(const Program& program, const std::vector<at::Tensor>& examples);

/// The program that a traced graph stands for. Besides ATen ops it knows
///   kiln::backward(Tensor[] tensors, Tensor?[] grad_tensors, bool retain_graph, bool create_graph, Tensor[] inputs)
///     as torch.autograd.backward; `inputs` empty: all leaves
///   kiln::autograd_grad(Tensor[] outputs, Tensor?[] grad_outputs, Tensor[] inputs, bool retain_graph, bool
///   create_graph,
///                       bool allow_unused) -> Tensor[]   as torch.autograd.grad
///   kiln::custom_function(Tensor[] inputs, Tensor[] outputs, bool materialize) -> Tensor[]
///     makes `outputs`, which have no history, those of a torch.autograd.Function of `inputs`. The nodes up to
///     kiln::custom_function_end(Tensor?[] grads), one per input, are its backward, and run when autograd calls it with
///     the gradients of `outputs`, which are the results; zeros for one that is missing, if `materialize`
///   kiln::register_hook(Tensor t, int hook)              a hook on the gradient of `t`
///   kiln::register_accumulated_hook(Tensor t, int hook)
///     one that runs when the gradient of a leaf was added to its .grad
///   kiln::remove_hook(int hook)
///   kiln::gradient_hook(int hook, Tensor t) -> Tensor
///     the gradient of `t` that a call of the hook gets in the next kiln::backward or kiln::autograd_grad (of an
///     accumulated one: no `t` and no result). The nodes up to
///     kiln::gradient_hook_end(Tensor? grad), what it returns, run when autograd calls it. The calls come in this order
///   kiln::grad(Tensor t) -> Tensor                       t.grad, which must be defined at that point
///   kiln::set_grad(Tensor t, Tensor? grad)
///     t.grad = grad; also how a .grad that is there on entry is known
///   kiln::set_requires_grad(Tensor t, bool value)        of a tensor made inside
///   kiln::tensor_constant(numbers, sizes, dtype) -> Tensor
/// `traced` must live as long as the program.
/// Whether it is the grad_fn of a custom function that takes zeros for a gradient that is missing.
bool makes_zeros(const torch::autograd::Node& node);
Program replay(const graph::Graph& traced, bool differentiable = true);
/// The same, where results may be differentiated after the program is gone.
Program replay(std::shared_ptr<const graph::Graph> traced, bool differentiable = true);

}  // namespace kiln::joint
