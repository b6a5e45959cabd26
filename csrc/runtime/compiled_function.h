#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "joint/joint.h"
#include "joint/partition/partition.h"
#include "joint/partition/tangents.h"
#include "runtime/compiled_graph.h"

// A traced program on real tensors: artifacts below autograd, one C++ autograd node above them.
namespace kiln::runtime {

/// A saved-tensor hook of the program's raised: what the call is to raise, also where it could be run again.
struct HookRaised {
  std::exception_ptr error;
};

/// What computes a part of the gradients.
struct BackwardPass {
  std::shared_ptr<Artifact> artifact;
  std::vector<size_t> inputs;  // the artifact's: of what is saved, then the tangents
};

/// Everything that a call and its backward need; immutable once made, shared by the function and the nodes of live
/// graphs.
struct CompiledParts {
  // The signature (joint::Joint without its graph).
  size_t num_primals = 0;
  size_t num_forward = 0;
  std::vector<joint::Output> outputs;
  std::vector<joint::VisibleMutation> mutations;
  std::vector<bool> forward_requires_grad;
  std::vector<graph::TensorMeta> forward_metas;
  std::vector<joint::TangentOf> tangent_of;
  std::vector<int64_t> grad_of;
  std::vector<graph::TensorMeta> tangent_metas;
  std::vector<joint::Parts::Saved> saved;

  /// By what is saved: the tangents whose gradients read it. By tangent: which ones a backward of it uses up, and to
  /// whose results' gradients it contributes.
  std::vector<joint::TangentSet> readers_of_saved, uses_up, contributes_to;
  /// By gradient of grad_of: the tangents that reach it, and those for which it is zeros if they are missing.
  std::vector<joint::TangentSet> reached_from, zeros_from;
  /// Tangents in the order in which the program computes their results, those that one contributes to before it.
  std::vector<size_t> in_order;
  /// A forward output whose graph was freed, and what it is computed from, by position: inputs, forward outputs that
  /// require grad, and outputs of the program that are views.
  struct Freed {
    size_t forward = 0;
    std::vector<size_t> primals, forwards, views;
  };
  /// Each after those that it is computed from.
  std::vector<Freed> freed;

  std::shared_ptr<Artifact> forward;
  /// Makes a part of the backward pass, at its first use. Fails for want of support only if the part is cut.
  std::function<BackwardPass(const joint::Part&)> make_backward;
  /// The graph of such a part, for who traces the backward into a larger one.
  std::function<joint::Narrowed(const joint::Part&)> graph_of_backward;
  /// No other parts in the process have this number.
  uint64_t id = 0;
  /// Runs the program in eager above autograd; differentiates a second time (create_graph=True). For it are kept, at
  /// each call, the generator's state if the program draws numbers, and copies of the inputs `copied`, which it reads
  /// and writes. `written`: all that it writes; the second run writes to copies.
  joint::Program eager;
  bool draws = false;
  std::vector<size_t> written, copied;
  /// By primal: the tangents whose results are computed from it.
  std::vector<joint::TangentSet> results_of;

  const BackwardPass& backward(const joint::Part& part) {
    std::lock_guard<std::mutex> lock(backward_mutex_);
    auto it = backward_.find(part);
    if (it == backward_.end()) it = backward_.emplace(part, make_backward(part)).first;
    return it->second;
  }
  joint::TangentSet no_tangents() const { return joint::TangentSet(tangent_of.size()); }
  bool trains() const { return !tangent_of.empty(); }

 private:
  std::mutex backward_mutex_;
  std::map<joint::Part, BackwardPass> backward_;
};

/// The callable of one set of parts.
std::shared_ptr<CompiledFunction> make_compiled_function(std::shared_ptr<CompiledParts> parts);

}  // namespace kiln::runtime
