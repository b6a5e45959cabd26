#pragma once
#include <memory>
#include <mutex>

#include "joint/joint.h"
#include "joint/partition/partition.h"
#include "runtime/compiled_graph.h"

// A traced program on real tensors: artifacts below autograd, one C++ autograd node above them.
namespace kiln::runtime {

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

  std::shared_ptr<Artifact> forward;
  /// Makes the backward artifact at its first use (under `backward_once`), or null without a backward.
  std::function<std::shared_ptr<Artifact>()> make_backward;
  std::once_flag backward_once;
  std::shared_ptr<Artifact> backward;
  /// Runs the program in eager above autograd; differentiates a second time (create_graph=True).
  joint::Program eager;

  Artifact& backward_artifact() {
    std::call_once(backward_once, [&] { backward = make_backward(); });
    return *backward;
  }
  bool trains() const { return !tangent_of.empty(); }
};

/// The callable of one set of parts.
std::shared_ptr<CompiledFunction> make_compiled_function(std::shared_ptr<CompiledParts> parts);

}  // namespace kiln::runtime
