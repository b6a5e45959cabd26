#pragma once
#include <Python.h>

#include <memory>
#include <vector>

#include "graph/graph.h"
#include "python/capture/capture.h"
#include "python/cpython/ref.h"
#include "python/frame/python_graph.h"

// kiln's graphs as torch.fx.GraphModule, the form in which custom backends and AOT compilers get and return programs.
// All functions need the GIL and throw py::PythonError with a Python exception set.
namespace kiln::bindings {

/// A torch-level graph as a GraphModule such as PyTorch users expect: placeholders, call_function nodes with the real
/// callables, call_method nodes, `output` of a tuple. Op "target::N" calls targets[N]; "method.NAME" is a call_method;
/// any other op is a dotted path that is imported ("torch.relu", "operator.add") or an ATen op. Objects that torch.fx
/// has no text for are attributes of the module (_constantN), Python's bool, int, float and complex are dtypes. Nodes
/// have meta["tensor_meta"] (torch.fx's TensorMetadata), meta["val"] and meta["example_value"] (a tensor on the meta
/// device of the same shape, strides and dtype), meta["stack_trace"] and meta["nn_module_stack"] where known. Where a
/// call was captured in another grad mode, or another state of the CPU's autocast, than holds now, calls before it set
/// that (torch._C._set_grad_enabled, torch.amp's _enter_autocast); the last ones put it back.
py::Ref to_fx(const graph::Graph& g, const std::vector<py::Ref>& targets);

/// What a backend is given of a capture: its torch-level graph (to_fx), or the traced one (aten_to_fx) if it has none.
/// `inputs` are the placeholders. Those that are sizes or ints have a torch.SymInt as meta["val"], and what the program
/// computes of them is computed by nodes (operator.add, ...; Tensor.size() of what has such sizes).
py::Ref captured_to_fx(const capture::CaptureResult& captured, const std::vector<frame::FxInput>& inputs);

/// An ATen-level graph (functional, or traced) as a GraphModule of torch.ops.aten calls, named as in the graph (AOT
/// compilers see primals_1, tangents_1, ...). Keyword-only arguments become kwargs; arguments equal to their defaults
/// are left out. Mutations of inputs become copy_ calls at the end, constants attributes (_tensor_constantN) that
/// lift_fresh_copy copies. `modes`: as to_fx does, for traced graphs.
py::Ref aten_to_fx(const graph::Graph& g, bool modes = false);

/// A GraphModule of ATen calls as a graph: the inverse of aten_to_fx, for compilers that hand a changed module back.
/// `inputs`: metadata of the placeholders, in order. Results' metadata come from the nodes' meta["val"] where it is a
/// tensor, else from the ops' shape rules. Throws Unsupported for nodes that are no ATen calls.
std::unique_ptr<graph::Graph> from_fx(PyObject* gm, const std::vector<graph::TensorMeta>& inputs);

}  // namespace kiln::bindings
