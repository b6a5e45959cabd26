// torch.utils.checkpoint: the nodes of a checkpointed call are marked, and joint/rematerialize.cpp computes them again
// for the backward. A policy (create_selective_checkpoint_contexts) is interpreted, after each call, with the operators
// that the call has recorded, and says which of them keep their results.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "aten/schema.h"
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
  if (const char* why = refusal_since(checkpoint.beginning, /*checkpointed=*/true))
    return graph_break("checkpoint", std::string("a checkpointed call that ") + why);
  const auto draws = [&](const std::unique_ptr<graph::Node>& n) {
    const aten::OpInfo* op = n->checkpoint ? aten::find_op(n->op) : nullptr;
    return op && std::abs(n->checkpoint) == checkpoint.number && op->random;
  };
  if (!checkpoint.same_numbers && std::any_of(trace.graph().nodes().begin(), trace.graph().nodes().end(), draws))
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
    const c10::FunctionSchema& schema = *o.schema;
    py::Ref args = py::Ref::steal(PyList_New(0)), kwargs = py::Ref::steal(PyDict_New()), out;
    for (size_t i = 0; i < o.args.size(); ++i) {
      const c10::Argument& a = schema.arguments()[i];
      const py::Ref v = as_python(o.args[i], a.real_type());
      if (!v) return false;
      if (!a.kwarg_only())
        PyList_Append(args.get(), v.get());
      else if (!a.default_value() || *a.default_value() != o.args[i])
        PyDict_SetItemString(kwargs.get(), a.name().c_str(), v.get());
    }
    // Trailing arguments that are their defaults are left out.
    for (size_t i = PyList_GET_SIZE(args.get()); i-- > 0;) {
      const auto& value = schema.arguments()[i].default_value();
      if (!value || *value != o.args[i]) break;
      PyList_SetSlice(args.get(), static_cast<Py_ssize_t>(i), static_cast<Py_ssize_t>(i + 1), nullptr);
    }
    args = py::Ref::steal(PyList_AsTuple(args.get()));
    if (o.results.size() == 1)
      out = as_python(o.results[0], schema.returns()[0].real_type());
    else if (!!(out = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(o.results.size())))))
      for (size_t i = 0; i < o.results.size(); ++i)
        PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(i),
                         as_python(o.results[i], schema.returns()[i].real_type()).release());
    const py::Ref name = py::Ref::steal(PyUnicode_FromString(schema.name().c_str())),
                  overload = py::Ref::steal(PyUnicode_FromString(schema.overload_name().c_str()));
    const py::Ref given = py::Ref::steal(
        PyTuple_Pack(6, checkpoint.policy.get(), out.get(), name.get(), overload.get(), args.get(), kwargs.get()));
    const py::Ref keeps = given ? py::Ref::steal(call_ex(polyfill, given.get(), nullptr)) : py::Ref();
    if (!keeps) return false;
    if (keeps.get() == Py_True) o.node->checkpoint = -checkpoint.number;
  }
  trace.on_operator = seen;
  return true;
}

}  // namespace kiln::capture
