#include "python/frame/python_graph.h"

#include <algorithm>

#include "aten/modes.h"
#include "base/error.h"
#include "base/timer.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/tensor.h"
#include "python/frame/errors.h"
#include "python/pch.h"
#include "runtime/sized_program.h"

namespace kiln::frame {

using capture::CaptureResult;

namespace {
ToFx to_fx = nullptr;

/// Puts the thread's modes back as they were.
struct ModesScope {
  ~ModesScope() { before.restore(); }
  aten::Modes before;
};

/// References held for a call, one after another as the call takes them: what it runs may let go of any elsewhere.
class Arguments {
 public:
  explicit Arguments(size_t most) { objects_.reserve(most); }
  ~Arguments() {
    for (PyObject* o : objects_) Py_DECREF(o);
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  /// Steals `o`.
  void add(PyObject* o) { objects_.push_back(o); }
  PyObject* const* data() const { return objects_.data(); }
  size_t size() const { return objects_.size(); }

 private:
  std::vector<PyObject*> objects_;
};

/// The dimensions of input `i` that are open, as bits.
uint64_t open_dims(const CaptureResult& captured, size_t i) {
  for (const guards::Guard& g : captured.guards)
    if (g.any_dims && g.kind == guards::Guard::Kind::Tensor && g.source == captured.inputs[i].source) return g.any_dims;
  return 0;
}

std::vector<FxInput> fx_inputs(const CaptureResult& captured, bool open) {
  std::vector<FxInput> inputs;
  for (size_t i = 0; i < captured.inputs.size(); ++i) {
    const at::Tensor& example = THPVariable_Unpack(captured.example_inputs[i].get());
    const uint64_t dims = open ? open_dims(captured, i) : 0;
    for (int64_t d = 0; d < example.dim(); ++d)
      if (dims >> d & 1) {
        const graph::Value value = captured.traced->inputs()[i]->out();
        inputs.push_back({FxInput::Kind::Size, i, d, captured.sizes->size(value, d, example.size(d))});
      }
    inputs.push_back({FxInput::Kind::Tensor, i, 0, {}});
  }
  for (size_t i = 0; open && i < captured.open_ints.size(); ++i) {
    const int64_t given = PyLong_AsLongLong(captured.open_ints[i].value.get());
    inputs.push_back({FxInput::Kind::Int, i, 0, captured.sizes->given(static_cast<int64_t>(i), given)});
  }
  return inputs;
}

/// The tensor itself, or one that shares all with an instance of a subclass: what its class makes of operators and
/// methods is in the graph already.
py::Ref as_plain(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return py::Ref::borrow(tensor);  // a parameter's are
  return py::check(THPVariable_Wrap(THPVariable_Unpack(tensor).alias()));
}

void close(const CaptureResult& captured, graph::Arg& a) {
  if (a.is<graph::Arg::List>()) {
    for (graph::Arg& item : std::get<graph::Arg::List>(a.data)) close(captured, item);
  } else if (a.is<std::string>()) {
    if (const auto n = capture::size_index(a.as<std::string>()))
      a = aten::hint_arg(*captured.sizes, captured.torch_sizes.at(*n));
  }
}
}  // namespace

void set_to_fx(ToFx f) { to_fx = f; }

std::string backend_refusal(const CaptureResult& captured) {
  if (!captured.torch_level) return "a call that no torch.fx graph has a node for";
  if (!runtime::SizedProgram::runs(*captured.traced)) return "a custom autograd function in a graph for a backend";
  // Functions that are one node there ask for sizes of what they compute: these need none.
  std::string unknown;
  for (const symbolic::Number& n : captured.torch_sizes)
    captured.sizes->for_each_leaf(n, [&](size_t leaf) {
      const graph::Value value = captured.sizes->leaves()[leaf].value;
      if (value && !captured.torch_leaves[leaf]) unknown = value.node->name;
    });
  return unknown.empty() ? "" : "a size of '" + unknown + "', which no node of the torch.fx graph computes";
}

void close_torch_sizes(CaptureResult& captured) {
  if (captured.torch_sizes.empty() || !captured.torch_level) return;
  for (const auto& n : captured.torch_level->nodes()) {
    for (graph::Arg& a : n->args) close(captured, a);
    for (auto& [name, a] : n->kwargs) close(captured, a);
  }
  captured.torch_sizes.clear();
}

PythonGraph::PythonGraph(const CaptureResult& captured, PyObject* backend, bool open)
    : inputs_(fx_inputs(captured, open)),
      num_tensors_(captured.inputs.size()),
      num_outputs_(captured.traced->outputs().size()) {
  KILN_CHECK(to_fx, "nothing converts graphs to torch.fx");
  py::Ref module, examples;
  {
    StageTimer timer("fx");
    module = to_fx(captured, inputs_);
    examples = py::check(PyList_New(0));
    for (const FxInput& in : inputs_) {
      const py::Ref one = in.kind == FxInput::Kind::Tensor
                              ? as_plain(captured.example_inputs[in.index].get())
                              : py::Ref::steal(pybind11::cast(captured.sizes->symint(in.size)).release().ptr());
      if (PyList_Append(examples.get(), one.get()) < 0) throw py::PythonError{};
    }
  }
  StageTimer timer("backend");
  PyObject* args[] = {module.get(), examples.get()};
  py::NoFunctionModes no_modes;
  callable_ = py::check(PyObject_Vectorcall(backend, args, 2, nullptr));
  if (!open) inputs_.clear();
}

std::vector<py::Ref> PythonGraph::run(PyObject* const* values) const {
  // The backend's own Python code is not to be compiled, and what modes it sets end with it.
  Scoped<ConfigPtr> quiet(mode().config, nullptr);
  const ModesScope modes;
  Arguments args(std::max(inputs_.size(), num_tensors_));
  const auto add_tensor = [&](PyObject* tensor) {
    if (THPVariable_CheckExact(tensor))
      args.add(Py_NewRef(tensor));
    else
      args.add(as_plain(tensor).release());
  };
  for (const FxInput& in : inputs_) {
    switch (in.kind) {
      case FxInput::Kind::Tensor:
        add_tensor(values[in.index]);
        break;
      case FxInput::Kind::Size:
        args.add(py::check(PyLong_FromLongLong(py::graph_input(values[in.index]).size(in.dim))).release());
        break;
      case FxInput::Kind::Int:
        args.add(Py_NewRef(values[num_tensors_ + in.index]));
        break;
    }
  }
  if (inputs_.empty())
    for (size_t i = 0; i < num_tensors_; ++i) add_tensor(values[i]);
  py::NoFunctionModes no_modes;
  const py::Ref result = py::check(PyObject_Vectorcall(callable_.get(), args.data(), args.size(), nullptr));
  if (!PyTuple_Check(result.get()) && !PyList_Check(result.get()))
    raise("BackendError", std::string("a backend's callable returned ") + Py_TYPE(result.get())->tp_name +
                              "; it must return a tuple or list of the graph's outputs");
  const Py_ssize_t n = PySequence_Size(result.get());
  if (n != static_cast<Py_ssize_t>(num_outputs_))
    raise("BackendError", "a backend's callable returned " + std::to_string(n) + " outputs; the graph has " +
                              std::to_string(num_outputs_));
  std::vector<py::Ref> outputs;
  outputs.reserve(num_outputs_);
  for (Py_ssize_t i = 0; i < n; ++i) outputs.push_back(py::check(PySequence_GetItem(result.get(), i)));
  return outputs;
}

}  // namespace kiln::frame
