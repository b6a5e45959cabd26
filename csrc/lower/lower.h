#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "loops/loops.h"

// graph -> loops. Each op's rule makes a value per point (define-by-run) or a nest; view ops are index arithmetic on
// their producer; what has no rule, and what libraries do better (matrix products, convolutions, random numbers), is an
// Extern: a call to an ATen op on buffers.
namespace kiln::lower {

/// A strided window on a buffer.
struct TensorView {
  loops::BufferId buffer = -1;
  DType dtype = DType::Float32;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // in elements, from the buffer's start
};

/// One ATen call, Program::externs' payload.
struct ExternCall {
  const graph::Node* node = nullptr;  // null: Graph::asked is asked here, `results[0]`
  /// Where the node's tensor arguments are, by value.
  std::unordered_map<graph::Value, TensorView> inputs;
  /// Per result: the buffer that receives it; no value for results nobody reads.
  std::vector<std::optional<TensorView>> results;
  /// True: the op's out= overload writes into the results' planned memory. False: the call makes its own tensors.
  bool into = false;
};

struct Output {
  bool defined = false;
  TensorView view;
};

/// A lowered graph. Keeps pointers into the graph, which must outlive it.
struct Lowered {
  loops::Program program;
  std::vector<ExternCall> externs;      // by loops::Extern::index
  std::vector<loops::BufferId> inputs;  // one per graph input, in order
  std::vector<bool> frozen;             // by input: the graph says that it is a weight
  std::vector<Output> outputs;          // in the graph's order
  struct Mutated {
    size_t input = 0;        // its number
    bool uncounted = false;  // graph::Mutation::uncounted
    /// What is written depends on nothing that it replaces, and the program reads nothing of that: a run of it after
    /// one that was broken off finds what it needs.
    bool writes_same = false;
  };
  std::vector<Mutated> mutated;  // the inputs that the program writes, in order
  /// Elements of an input that the program overwrites although it may raise after that: `places`, int64, counts
  /// elements of the input from its first one, and `old` is what was there.
  struct KeptElements {
    loops::BufferId input = -1, places = -1, old = -1;
  };
  std::vector<KeptElements> kept_elements;  // in the order of the writes
  /// Buffers whose memory an extern call makes in each call (ExternCall::into is false for their call).
  std::vector<bool> dynamic;  // by BufferId
  /// Buffer -> the kiln::tensor_constant node that fills it, for Const buffers.
  std::vector<std::pair<loops::BufferId, const graph::Node*>> constants;
  /// Meta (sizes, strides) of the tensor that spans each buffer; graph outputs and extern results are made with it.
  std::vector<graph::TensorMeta> metas;  // by BufferId
};

struct LowerOptions {
  /// True for nodes that a kernel outside of lowering computes into memory that is planned for it (results as dense as
  /// their metas say). Null: none.
  std::function<bool(const graph::Node&)> has_library_kernel;
  /// For such a node, loops::Extern::rows of its first result; 0 if it is not made row by row.
  std::function<int64_t(const graph::Node&)> result_rows;
  bool in_place = true;  // write parts of tensors to the tensors' own memory
};
/// Lowers a decomposed functional graph. Never fails for an op: what has no rule becomes an Extern.
Lowered lower(const graph::Graph& g, const LowerOptions& options = {});
/// Elements from the first to the last of a tensor.
int64_t extent_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);
/// Whether the data may be such that the node, run as a call, raises an error.
bool call_may_raise(const graph::Node& n);
/// True if `op` has a lowering rule (it may still decline particular arguments).
bool has_rule(const graph::Op& op);

}  // namespace kiln::lower
