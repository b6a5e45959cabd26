#pragma once
#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

// The two callables that the stages hand to each other at run time.
namespace kiln::runtime {

/// Ends the run of a graph that asks an output (graph::Graph::asked) for which it is true. No input is written yet.
struct AssertionFailed : std::exception {
  const char* what() const noexcept override { return "an assertion of the program failed"; }
};

/// After an artifact's run has raised on this thread: whether it had written to none of its inputs by then, so that the
/// program can be run from its beginning. Who wants to know sets it to false before the run.
bool& raised_before_writes();

/// A compiled functional graph: what the backend (lower .. codegen) makes of one forward, backward or whole-step graph.
/// Takes the graph's inputs in order (the vector is consumed, so that inputs can be freed early) and returns its
/// outputs in order, undefined tensors for None. Writes the graph's mutations into the inputs' storages itself.
/// Runs below autograd. Thread-safe: concurrent calls get their own arena.
class Artifact {
 public:
  virtual ~Artifact() = default;
  virtual std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) = 0;
  /// The steps (kernels, ATen calls), their buffers and the arena, as text; explain and KILN_LOGS=output_code show it.
  virtual std::string describe() const = 0;
};

/// A captured graph made callable on real tensors with autograd: inputs in the captured order, outputs as the user's
/// program made them (aliases, views, requires_grad and grad_fn as in eager; input mutations done).
class CompiledFunction {
 public:
  virtual ~CompiledFunction() = default;
  virtual std::vector<at::Tensor> call(std::vector<at::Tensor> inputs) = 0;
  virtual std::string describe() const = 0;
};

}  // namespace kiln::runtime
