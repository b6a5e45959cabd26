#include <ATen/core/LegacyTypeDispatch.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "compiler/compile_traced.h"
#include "joint/finish.h"
#include "python/bindings/bindings.h"
#include "python/bindings/py_program.h"
#include "python/cpython/tensor.h"

// Doors into single stages for tests: fakes, and what their fallback sees.
namespace kiln {
namespace {

/// Writes one line per op: name, then the results' sizes.
class LineObserver : public aten::FakeObserver {
 public:
  void called(const aten::OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) override {
    std::ostringstream line;
    line << op.op.name();
    for (const c10::IValue& r : results)
      aten::for_each_tensor(r, [&](const at::Tensor& t) {
        if (t.defined())
          line << ' ' << t.sizes();
        else
          line << " none";
      });
    lines.push_back(line.str());
  }
  std::vector<std::string> lines;
};

/// Runs fn(*args) with tensors replaced by fakes and fakes made by factories; returns (result, lines).
pybind11::tuple run_on_fakes(const pybind11::function& fn, const pybind11::args& args) {
  pybind11::tuple fakes(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    if (py::is_tensor(args[i].ptr()))
      fakes[i] = aten::make_fake(THPVariable_Unpack(args[i].ptr()));
    else
      fakes[i] = args[i];
  }
  LineObserver observer;
  pybind11::object result;
  {
    aten::FakeModeGuard mode;
    aten::FakeObserverGuard guard(&observer);
    result = fn(*fakes);
  }
  return pybind11::make_tuple(result, observer.lines);
}

joint::PartitionMode mode_of(const std::string& name) {
  if (name == "min_cut") return joint::PartitionMode::MinCut;
  if (name == "default") return joint::PartitionMode::SaveAll;
  throw UserError("unknown partition " + name);
}

/// Texts of the graphs of fn at args: joint, and forward and backward if it has a backward.
pybind11::dict trace(const pybind11::object& fn, const std::vector<at::Tensor>& args, const std::string& partition) {
  joint::Joint joint = bindings::trace_program(fn, args);
  joint::remove_dead(*joint.graph);
  joint::separate_outputs(joint);
  graph::verify(*joint.graph, /*functional=*/true);
  pybind11::dict out;
  out["joint"] = graph::print(*joint.graph);
  if (joint.has_backward()) {
    joint::Parts parts = joint::partition(joint, mode_of(partition));
    out["forward"] = graph::print(*parts.forward);
    out["backward"] = graph::print(*parts.backward);
    out["num_saved"] = parts.saved.size();
    std::vector<std::string> saved;
    for (size_t i = 0; i < parts.saved.size(); ++i) saved.push_back(parts.backward->inputs()[i]->name);
    out["saved"] = saved;
  }
  return out;
}

/// fn compiled at args: a callable of a list of tensors.
pybind11::object compile(const pybind11::object& fn, const std::vector<at::Tensor>& args,
                         const std::string& partition) {
  auto compiled = compiler::compile_joint(bindings::trace_program(fn, args), nullptr, mode_of(partition),
                                          bindings::python_program(fn));
  return pybind11::cpp_function(
      [compiled](std::vector<at::Tensor> inputs) { return compiled->call(std::move(inputs)); });
}

}  // namespace
}  // namespace kiln

KILN_BINDINGS(debug_joint) {
  m.def("_make_fake", [](const at::Tensor& t) { return kiln::aten::make_fake(t); });
  m.def("_run_on_fakes", &kiln::run_on_fakes);
  m.def("_joint_trace", &kiln::trace, pybind11::arg("fn"), pybind11::arg("args"),
        pybind11::arg("partition") = "min_cut");
  m.def("_joint_compile", &kiln::compile, pybind11::arg("fn"), pybind11::arg("args"),
        pybind11::arg("partition") = "min_cut");
}
