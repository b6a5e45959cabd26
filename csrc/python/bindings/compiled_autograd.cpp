// kiln.compiled_autograd: backwards given to a compiler written in Python.
#include "backward/compiled_autograd.h"

#include <torch/csrc/PyInterpreter.h>

#include "aten/convert.h"
#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/bindings/fx.h"
#include "python/bindings/py_program.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

pb::object wrap(const at::Tensor& t) { return pb::reinterpret_steal<pb::object>(THPVariable_Wrap(t)); }

pb::object number(const at::Scalar& s) {
  if (s.isComplex()) {
    const auto z = s.toComplexDouble();
    return pb::reinterpret_steal<pb::object>(PyComplex_FromDoubles(z.real(), z.imag()));
  }
  return s.isFloatingPoint() ? pb::cast(s.toDouble()) : s.isBoolean() ? pb::cast(s.toBool()) : pb::cast(s.toLong());
}

std::vector<at::Tensor> unwrap(const pb::sequence& list) {
  std::vector<at::Tensor> out;
  for (pb::handle item : list) out.push_back(item.is_none() ? at::Tensor() : THPVariable_Unpack(item.ptr()));
  return out;
}

/// Of a gradient that a Python function returns: (layout, device, dtype, size) of the input that it is for, or None.
std::optional<graph::TensorMeta> result_meta(pb::handle given) {
  if (given.is_none()) return std::nullopt;
  const auto fields = pb::cast<pb::tuple>(given);
  graph::TensorMeta m;
  m.dtype = aten::dtype_of(pb::cast<at::ScalarType>(fields[2]));
  m.sizes = pb::cast<std::vector<int64_t>>(fields[3]);
  m.strides = graph::contiguous_strides(m.sizes);
  return m;
}

/// The object whose methods PyTorch's nodes of Python functions, and hooks after an accumulation, call while they are
/// traced. The methods' names and arguments are PyTorch's.
struct NodeCompiler {
  backward::Tracer* tracer;

  pb::tuple proxy_call_backward(const pb::sequence& grads, const pb::sequence& metas, const pb::sequence& saved,
                                size_t context, const pb::object&, const pb::object&, const pb::list&) {
    pb::tuple out(metas.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = pb::none();
    try {
      std::vector<std::optional<graph::TensorMeta>> results;
      for (pb::handle meta : metas) results.push_back(result_meta(meta));
      const std::vector<at::Tensor> made = tracer->call_function(context, unwrap(saved), unwrap(grads), results);
      for (size_t i = 0; i < made.size(); ++i)
        if (made[i].defined()) out[i] = wrap(made[i]);
    } catch (...) {  // the node holds fakes: see Tracer::fail
      tracer->fail(std::current_exception());
    }
    return out;
  }
  pb::object post_acc_grad_hook(const pb::object& variable, size_t hook) {
    tracer->call_accumulated_hook(THPVariable_Unpack(variable.ptr()), hook);
    return variable;
  }
};

class PythonFrontend : public backward::Frontend {
 public:
  explicit PythonFrontend(pb::object compiler) : compiler_(hold(std::move(compiler))) {}

  void hold_gil(const std::function<void()>& body) override {
    const PythonScope python;
    body();
  }
  void with_compiler(backward::Tracer& tracer, const std::function<void(PyObject*)>& body) override {
    const pb::object compiler = pb::cast(NodeCompiler{&tracer});
    body(compiler.ptr());
  }
  Compiled compile(const graph::Graph& g, const backward::Call& call) override {
    pb::object gm;
    try {
      gm = pb::reinterpret_steal<pb::object>(aten_to_fx(g).release());
    } catch (const py::PythonError&) {
      throw pb::error_already_set();
    }
    pb::list kinds;
    for (const at::Tensor& t : call.collected.tensor_args.inputs)
      kinds.append(backward::is_number(t) ? "scalars" : backward::is_constant(t) ? "" : "inputs");
    return [callable = hold(module().attr("_compile")(*compiler_, gm, kinds))](backward::Call& call) {
      return run(*callable, call);
    };
  }
  void warn(const std::string& message) override { module().attr("_warn")(message); }

 private:
  static pb::object module() { return pb::module_::import("kiln.compiled_autograd"); }

  static std::vector<at::Tensor> run(const pb::object& callable, backward::Call& call) {
    auto& collected = call.collected;
    pb::list inputs, numbers;
    for (const at::Tensor& t : collected.tensor_args.inputs)
      if (backward::is_number(t))
        numbers.append(number(t.item()));
      else if (!backward::is_constant(t))
        inputs.append(wrap(t));
    // What is saved lives as long as its node, or as the list.
    pb::tuple hooks(collected.hooks.size() + collected.cpp_tensor_pre_hooks.size());
    size_t i = 0;
    for (const c10::SafePyObject& hook : collected.hooks)
      hooks[i++] = pb::reinterpret_borrow<pb::object>(hook.ptr(getPyInterpreter()));
    for (const auto& hook : collected.cpp_tensor_pre_hooks)
      hooks[i++] = pb::cpp_function([hook](const at::Tensor& grad) { return at::Tensor(hook(grad)); });
    const pb::object result = callable(inputs, pb::tuple(), pb::tuple(numbers), hooks, pb::tuple());
    return to_tensors(result);
  }

  Held compiler_;
};

}  // namespace
}  // namespace kiln::bindings

KILN_BINDINGS(compiled_autograd) {
  namespace kb = kiln::bindings;
  using kiln::backward::Session;
  pb::class_<kb::NodeCompiler>(m, "_NodeCompiler")
      .def("proxy_call_backward", &kb::NodeCompiler::proxy_call_backward)
      .def("post_acc_grad_hook", &kb::NodeCompiler::post_acc_grad_hook);
  pb::class_<Session, std::shared_ptr<Session>>(
      m, "BackwardSession", "The backwards that one compiler has compiled; for set_backward_session.")
      .def(pb::init([](const pb::object& compiler) {
        return std::make_shared<Session>(std::make_shared<kb::PythonFrontend>(compiler));
      }))
      .def("__len__", &Session::size);
  m.def("set_backward_session", &kiln::backward::set_session, pb::arg("session").none(true),
        "Gives all backwards of the process to a BackwardSession, or to PyTorch's engine (None). Returns the session "
        "before.");
}
