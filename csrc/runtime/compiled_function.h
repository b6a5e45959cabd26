#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "joint/joint.h"
#include "joint/partition/partition.h"
#include "runtime/compiled_graph.h"

// A traced program on real tensors: artifacts below autograd, one C++ autograd node above them.
namespace kiln::runtime {

/// What computes the gradients when certain tangents are defined.
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
  std::vector<bool> forward_requires_grad, forward_freed;
  std::vector<graph::TensorMeta> forward_metas;
  std::vector<int64_t> tangent_of;
  std::vector<int64_t> grad_of;
  std::vector<graph::TensorMeta> tangent_metas;
  std::vector<joint::Parts::Saved> saved;

  /// By what is saved: the tangents whose gradients read it. By tangent: which ones a backward of it uses up.
  std::vector<joint::TangentSet> readers_of_saved, uses_up;

  std::shared_ptr<Artifact> forward;
  /// Makes the backward pass for some tangents, at its first use. Does not fail for want of support.
  std::function<BackwardPass(const joint::TangentSet& defined)> make_backward;
  /// Runs the program in eager above autograd; differentiates a second time (create_graph=True).
  joint::Program eager;

  const BackwardPass& backward(const joint::TangentSet& defined) {
    std::lock_guard<std::mutex> lock(backward_mutex_);
    auto it = backward_.find(defined);
    if (it == backward_.end()) it = backward_.emplace(defined, make_backward(defined)).first;
    return it->second;
  }
  bool trains() const { return !tangent_of.empty(); }

 private:
  std::mutex backward_mutex_;
  std::map<joint::TangentSet, BackwardPass> backward_;
};

/// The callable of one set of parts.
std::shared_ptr<CompiledFunction> make_compiled_function(std::shared_ptr<CompiledParts> parts);

}  // namespace kiln::runtime
