#pragma once
#include <ATen/core/Tensor.h>

#include "graph/graph.h"

namespace torch::autograd {
struct Node;
}

namespace kiln::joint {

/// What a program may ask of the joint trace that runs it on this thread; outside of one, replaying is an ordinary
/// eager run.
class TraceState {
 public:
  /// Whether a trace runs on this thread. Without one, functionalization serves somebody else.
  static bool is_active();
  /// The nodes recorded from now on come from `node`.
  static void note_origin(const graph::Node& node);
  /// Sets the flag of a leaf, for as long as the program runs if the trace passed it in.
  static void set_requires_grad(const at::Tensor& t, bool wanted);
  /// The tensor of a kiln::tensor_constant node; outside of a trace, with its numbers.
  static at::Tensor constant(const std::vector<graph::Arg>& args, const graph::TensorMeta& meta);
  /// `value`, one that the trace records, with these strides; outside of a trace, as it is.
  static at::Tensor laid_out(const at::Tensor& value, const std::vector<int64_t>& strides);
  /// Gives a functional tensor's value these strides.
  static void lay_out(const at::Tensor& functional, const std::vector<int64_t>& strides);
  /// A hook that only the program itself can run was registered on the node, the grad_fn of a tensor, or removed.
  static void note_hook(const torch::autograd::Node* node, bool registered);
  /// While alive, nodes are the autograd engine's.
  class BackwardScope {
   public:
    BackwardScope();
    ~BackwardScope();
    BackwardScope(const BackwardScope&) = delete;
    BackwardScope& operator=(const BackwardScope&) = delete;

   private:
    bool before_ = false;
  };
};

}  // namespace kiln::joint
