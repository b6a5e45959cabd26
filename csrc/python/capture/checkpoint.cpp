// torch.utils.checkpoint: the nodes of a checkpointed call are marked, and joint/rematerialize.cpp computes them again
// for the backward. A policy (create_selective_checkpoint_contexts) is interpreted, after each call, with the operators
// that the call has recorded, and says which of them keep their results.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
/// An operator's argument or result as a torch_dispatch function gets it.
py::Ref as_python(const c10::IValue& v, const c10::TypePtr& type) {
  if (v.isInt()) {
    PyObject* named = nullptr;
    const auto kind = type->kind() == c10::TypeKind::OptionalType
                          ? type->expectRef<c10::OptionalType>().getElementType()->kind()
                          : type->kind();
    if (kind == c10::TypeKind::ScalarTypeType)
      named = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(v.toInt())));
    if (kind == c10::TypeKind::LayoutType)
      named = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(v.toInt())));
    if (kind == c10::TypeKind::MemoryFormatType)
      named = torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(v.toInt()));
    if (named) return py::Ref::borrow(named);
  }
  return py::Ref::steal(torch::jit::toPyObject(v).release().ptr());
}

/// A call's arguments as a torch_dispatch function gets them, (args, kwargs): without those that are their defaults.
std::pair<py::Ref, py::Ref> call_as_python(const c10::FunctionSchema& schema, const torch::jit::Stack& given) {
  const auto is_default = [&](size_t i) {
    const auto& value = schema.arguments()[i].default_value();
    return value && *value == given[i];
  };
  size_t positional = 0;
  while (positional < given.size() && !schema.arguments()[positional].kwarg_only()) ++positional;
  py::Ref kwargs = py::check(PyDict_New());
  for (size_t i = positional; i < given.size(); ++i)
    if (const c10::Argument& a = schema.arguments()[i]; !is_default(i))
      PyDict_SetItemString(kwargs.get(), a.name().c_str(), as_python(given[i], a.real_type()).get());
  while (positional > 0 && is_default(positional - 1)) --positional;
  py::Ref args = py::check(PyTuple_New(static_cast<Py_ssize_t>(positional)));
  for (size_t i = 0; i < positional; ++i)
    PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i),
                     as_python(given[i], schema.arguments()[i].real_type()).release());
  return {std::move(args), std::move(kwargs)};
}

/// An operator's results as it returns them in Python.
py::Ref results_as_python(const c10::FunctionSchema& schema, const torch::jit::Stack& results) {
  if (results.size() == 1) return as_python(results[0], schema.returns()[0].real_type());
  py::Ref all = py::check(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (size_t i = 0; i < results.size(); ++i)
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i),
                     as_python(results[i], schema.returns()[i].real_type()).release());
  return all;
}
}  // namespace

PyObject* Machine::begin_checkpoint(PyObject* policy, bool same_numbers) {
  if (checkpoint.depth++ > 0) Py_RETURN_NONE;
  ++checkpoint.number;
  checkpoint.beginning = now();
  checkpoint.same_numbers = same_numbers;
  checkpoint.undecided.clear();
  checkpoint.policy = policy == Py_None ? py::Ref() : py::Ref::borrow(policy);
  if (checkpoint.policy)
    trace.on_operator = [this](graph::Node& n, const c10::OperatorHandle& op, torch::jit::Stack args,
                               torch::jit::Stack results) {
      checkpoint.undecided.push_back({&n, &op.schema(), std::move(args), std::move(results)});
    };
  Py_RETURN_NONE;
}

PyObject* Machine::end_checkpoint() {
  if (--checkpoint.depth > 0) Py_RETURN_NONE;
  if (!decide_kept()) return nullptr;
  trace.on_operator = nullptr;
  checkpoint.policy = {};
  if (const char* why = refusal_since(checkpoint.beginning, Region::Checkpointed))
    return graph_break("checkpoint", std::string("a checkpointed call that ") + why);
  if (!checkpoint.same_numbers && draws_since(checkpoint.beginning))
    return graph_break("checkpoint", "a checkpointed call that draws other random numbers in the backward");
  Py_RETURN_NONE;
}

PyObject* Machine::checkpoint_step(PyObject* const* args, size_t n) {
  KILN_CHECK(n > 0 && PyUnicode_Check(args[0]), "kiln._C._checkpoint takes what to do");
  const std::string_view step = PyUnicode_AsUTF8(args[0]);
  if (step == "refuse" && n == 2) return graph_break("checkpoint", PyUnicode_AsUTF8(args[1]));
  // A custom backend sees no marks.
  if (options.for_fx) return graph_break("checkpoint", "a checkpointed call in a graph for a custom backend");
  if (step == "begin" && n == 3) return begin_checkpoint(args[1], args[2] == Py_True);
  KILN_CHECK(step == "end", "an unknown step of a checkpoint");
  return end_checkpoint();
}

bool Machine::decide_kept() {
  static PyObject* const polyfill = PyObject_GetAttrString(polyfills(), "checkpoint_keeps");
  // What the policy computes itself is none of the call's operators.
  const auto undecided = std::exchange(checkpoint.undecided, {});
  const auto seen = std::exchange(trace.on_operator, nullptr);
  for (const Checkpoint::Operator& o : undecided) {
    const auto [args, kwargs] = call_as_python(*o.schema, o.args);
    const py::Ref out = results_as_python(*o.schema, o.results);
    const py::Ref given =
        py::Ref::steal(Py_BuildValue("(OOssOO)", checkpoint.policy.get(), out.get(), o.schema->name().c_str(),
                                     o.schema->overload_name().c_str(), args.get(), kwargs.get()));
    const py::Ref keeps = given ? py::Ref::steal(call_ex(polyfill, given.get(), nullptr)) : py::Ref();
    if (!keeps) return false;
    if (keeps.get() == Py_True) o.node->checkpoint = -checkpoint.number;
  }
  trace.on_operator = seen;
  return true;
}

}  // namespace kiln::capture
