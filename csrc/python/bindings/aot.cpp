// kiln.aot: ahead-of-time tracing of Python functions, with compilers written in Python.
#include <ATen/core/LegacyTypeDispatch.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "base/error.h"
#include "compiler/compile_traced.h"
#include "ops/types.h"
#include "python/bindings/bindings.h"
#include "python/bindings/fx.h"
#include "python/bindings/py_program.h"
#include "runtime/plan.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

/// A Python callable as an artifact: boxed ones (f._boxed_call is true) take one list, others positional tensors.
class PythonArtifact : public runtime::Artifact {
 public:
  PythonArtifact(const pb::object& callable, const graph::Graph& g)
      : callable_(hold(callable)), text_(graph::print(g)) {
    for (const graph::Arg& a : g.outputs())
      outputs_.push_back(a.is_value() && a.value() ? a.value().meta() : ops::undefined_meta());
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
    if (out.size() != outputs_.size())
      throw UserError("an AOT compiler's callable returned " + std::to_string(out.size()) +
                      " values where the graph has " + std::to_string(outputs_.size()));
    static const std::string kWhat = "an AOT compiler's result";
    // Views of results and what the backward reads count on the graph's strides, whatever the callable made of them.
    for (size_t i = 0; i < out.size(); ++i)
      if (const graph::TensorMeta& m = outputs_[i]; is_as_traced(out[i], m))
        out[i] = runtime::with_meta(out[i], m, kWhat);
    // Below autograd nobody counts in-place changes.
    for (const at::Tensor& t : changed)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    return out;
  }
  std::string describe() const override { return text_; }

 private:
  /// Whether `t` has the sizes and the dtype that the graph says; a compiler may change these at its own risk.
  static bool is_as_traced(const at::Tensor& t, const graph::TensorMeta& m) {
    return t.defined() && m.defined && t.sizes() == at::IntArrayRef(m.sizes) &&
           aten::dtype_of(t.scalar_type()) == m.dtype;
  }

  Held callable_;
  std::string text_;
  std::vector<graph::TensorMeta> outputs_;
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
  const auto strides = compiler ? compiler::Strides::Traced : compiler::Strides::Free;
  auto compiled =
      compiler::compile_joint(std::move(joint), std::move(compiler), mode_of(partition), python_program(fn), strides);
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
