// kiln.aot: ahead-of-time tracing of Python functions, with compilers written in Python.
#include <ATen/core/LegacyTypeDispatch.h>

#include "aten/fake.h"
#include "base/error.h"
#include "compiler/compile_traced.h"
#include "python/bindings/bindings.h"
#include "python/bindings/fx.h"
#include "python/bindings/py_program.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

/// A Python callable as an artifact: boxed ones (f._boxed_call is true) take one list, others positional tensors.
class PythonArtifact : public runtime::Artifact {
 public:
  PythonArtifact(const pb::object& callable, const graph::Graph& g)
      : callable_(hold(callable)), text_(graph::print(g)), num_outputs_(g.outputs().size()) {
    for (const graph::Arg& a : g.outputs()) strides_.push_back(strides_of(a));
    boxed_ = pb::bool_(pb::getattr(callable, "_boxed_call", pb::bool_(false)));
    for (const graph::Mutation& m : g.mutations())
      for (size_t i = 0; i < g.inputs().size(); ++i)
        if (g.inputs()[i] == m.input.node && !m.uncounted) counted_.push_back(i);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) override {
    std::vector<at::Tensor> changed;
    for (size_t i : counted_) changed.push_back(inputs[i]);
    const PythonScope python;
    at::AutoGradMode no_grad(false);
    pb::object result;
    {
      pb::list list(inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i)
        list[i] = pb::reinterpret_steal<pb::object>(THPVariable_Wrap(inputs[i]));
      inputs.clear();
      result = boxed_ ? (*callable_)(list) : (*callable_)(*pb::tuple(list));
    }
    std::vector<at::Tensor> out = to_tensors(result);
    if (out.size() != num_outputs_)
      throw UserError("an AOT compiler's callable returned " + std::to_string(out.size()) +
                      " values where the graph has " + std::to_string(num_outputs_));
    for (size_t i = 0; i < out.size(); ++i) lay_out(out[i], strides_[i]);
    // Below autograd nobody counts in-place changes.
    for (const at::Tensor& t : changed)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    return out;
  }
  std::string describe() const override { return text_; }

 private:
  static std::vector<int64_t> strides_of(const graph::Arg& output) {
    if (!output.is_value() || !output.value()) return {};
    return output.value().meta().strides;
  }
  /// Views of results and what the backward reads count on the graph's strides, whatever the callable made of them.
  static void lay_out(at::Tensor& t, const std::vector<int64_t>& strides) {
    if (!t.defined() || t.layout() != at::kStrided || t.strides().size() != strides.size()) return;
    for (size_t d = 0; d < strides.size(); ++d)
      if (t.size(static_cast<int64_t>(d)) > 1 && t.stride(static_cast<int64_t>(d)) != strides[d]) {
        t = at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
        return;
      }
  }

  Held callable_;
  std::string text_;
  size_t num_outputs_;
  std::vector<std::vector<int64_t>> strides_;  // of the outputs
  bool boxed_ = false;
  std::vector<size_t> counted_;
};

compiler::GraphCompiler python_compiler(pb::object forward_compiler, pb::object backward_compiler) {
  return [forward = hold(std::move(forward_compiler)), backward = hold(std::move(backward_compiler))](
             const graph::Graph& g, const std::string& which) -> std::shared_ptr<runtime::Artifact> {
    const PythonScope python;
    pb::object gm;
    try {
      gm = pb::reinterpret_steal<pb::object>(aten_to_fx(g).release());
    } catch (const py::PythonError&) {
      throw pb::error_already_set();
    }
    pb::list examples;
    for (const graph::Node* in : g.inputs()) {
      graph::TensorMeta meta = in->results.at(0);
      meta.requires_grad = false;
      examples.append(pb::reinterpret_steal<pb::object>(THPVariable_Wrap(aten::make_fake(meta))));
    }
    pb::object callable = (which == "backward" ? *backward : *forward)(gm, examples);
    if (!PyCallable_Check(callable.ptr())) throw UserError("an AOT compiler must return a callable");
    return std::make_shared<PythonArtifact>(callable, g);
  };
}

joint::PartitionMode mode_of(const std::string& name) {
  if (name == "min_cut") return joint::PartitionMode::MinCut;
  if (name == "default") return joint::PartitionMode::SaveAll;
  throw UserError("unknown partition '" + name + "': 'min_cut' or 'default'");
}

pb::object aot_compile(const pb::object& fn, const std::vector<at::Tensor>& examples, const pb::object& forward,
                       const pb::object& backward, const std::string& partition) {
  joint::Joint joint = trace_program(fn, examples);
  compiler::GraphCompiler compiler;
  if (!forward.is_none()) compiler = python_compiler(forward, backward.is_none() ? forward : backward);
  auto compiled =
      compiler::compile_joint(std::move(joint), std::move(compiler), mode_of(partition), python_program(fn));
  return pb::cpp_function([compiled](std::vector<at::Tensor> inputs) { return compiled->call(std::move(inputs)); });
}

}  // namespace
}  // namespace kiln::bindings

KILN_BINDINGS(aot) {
  m.def("aot_compile", &kiln::bindings::aot_compile, pb::arg("fn"), pb::arg("examples"), pb::arg("fw_compiler"),
        pb::arg("bw_compiler"), pb::arg("partition"),
        "Traces fn(*tensors) -> tensors ahead of time at `examples`; returns a callable of a list of tensors. "
        "Compilers are "
        "called with (GraphModule of ATen ops, fake inputs); None for kiln's own.");
}
