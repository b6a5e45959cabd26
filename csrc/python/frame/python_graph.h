#pragma once
#include <Python.h>

#include <memory>
#include <vector>

#include "python/capture/capture.h"
#include "python/frame/mode.h"

namespace kiln::frame {

/// What a placeholder of an fx graph takes: a tensor that the captured graph takes; the size of one in a dimension that
/// is left open; or an int that is.
struct FxInput {
  enum class Kind : uint8_t { Tensor, Size, Int } kind = Kind::Tensor;
  size_t index = 0;     // of the tensor; Int: of the int
  int64_t dim = 0;      // Size
  symbolic::Expr size;  // Size, Int: the variable of aten::Sizes
};

/// Makes a torch.fx.GraphModule of a capture for Python backends; set by the bindings.
using ToFx = py::Ref (*)(const capture::CaptureResult& captured, const std::vector<FxInput>& inputs);
void set_to_fx(ToFx to_fx);

/// Why a backend's graph cannot be for other sizes; empty if it can.
std::string backend_refusal(const capture::CaptureResult& captured);
/// Puts the captured call's sizes into the torch-level graph.
void close_torch_sizes(capture::CaptureResult& captured);

/// What a Python backend made of a captured graph. Needs the GIL; throws py::PythonError.
class PythonGraph {
 public:
  /// Calls the backend. `open`: sizes of the graph are left open, and are placeholders of their own, each before the
  /// first tensor that has it; ints stand behind the tensors.
  PythonGraph(const capture::CaptureResult& captured, PyObject* backend, bool open);
  /// `values`: the captured graph's inputs, and behind them the open ints. Returns the graph's outputs.
  std::vector<py::Ref> run(PyObject* const* values) const;

 private:
  std::vector<FxInput> inputs_;  // empty: the tensors alone
  size_t num_tensors_, num_outputs_;
  py::Ref callable_;
};

}  // namespace kiln::frame
