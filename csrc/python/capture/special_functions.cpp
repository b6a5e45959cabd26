// Python functions in whose place something else happens: marks, polyfills, what is deferred, and the wrappers that
// keep PyTorch's own compiler away from a function.
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/cpython/bound_arguments.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
/// The positional arguments of a call whose frame has not started, for code without keyword-only arguments; `rest` is
/// then the place of its **keywords.
std::vector<PyObject*> positional_arguments(py311::Frame* frame, int* rest) {
  PyCodeObject* code = frame->f_code;
  std::vector<PyObject*> out(frame->localsplus, frame->localsplus + code->co_argcount);
  *rest = code->co_argcount;
  if (code->co_flags & CO_VARARGS) {
    PyObject* more = frame->localsplus[(*rest)++];
    out.insert(out.end(), &PyTuple_GET_ITEM(more, 0), &PyTuple_GET_ITEM(more, 0) + PyTuple_GET_SIZE(more));
  }
  return out;
}

/// What torch.compiler.is_compiling() says to the code of `caller`: yes, but not where PyTorch's own code computes
/// something else then, or refuses to.
bool tells_compiling(const py311::Frame* caller, bool item_numbers) {
  const auto in = [](const py311::Frame* f, std::string_view file) {
    return f && std::string_view(PyUnicode_AsUTF8(f->f_code->co_filename)).find(file) != std::string_view::npos;
  };
  const auto named = [](const py311::Frame* f, const char* name) {
    return strcmp(PyUnicode_AsUTF8(f->f_code->co_name), name) == 0;
  };
  if (in(caller, "/torch/nn/modules/module.py")) return true;
  if (in(caller, "/torch/nn/modules/") || in(caller, "/torch/nn/functional.py") ||
      in(caller, "/torch/autograd/graph.py"))
    return false;
  // Optimizers compute with tensors then in place of floats, with fewer digits; this one gives such a tensor to an
  // operator that takes numbers.
  if (in(caller, "/torch/optim/optimizer.py") && named(caller, "_get_value"))
    return !item_numbers && !in(caller->previous, "/torch/optim/adamax.py");
  if (in(caller, "/torch/optim/optimizer.py") && named(caller, "_stack_if_compiling")) return !item_numbers;
  return true;
}
/// Whether PyTorch itself has the function, which it keeps from a compiler of its own.
bool is_of_torch(PyObject* function) {
  const py::Ref module = py::Ref::steal(PyObject_GetAttrString(function, "__module__"));
  if (!module) PyErr_Clear();
  if (!module || !PyUnicode_Check(module.get())) return false;
  const std::string_view name = PyUnicode_AsUTF8(module.get());
  return name == "torch" || name.starts_with("torch.");
}
}  // namespace

PyObject* Machine::call_python_special(py311::Frame* frame, bool* handled) {
  *handled = false;
  PyCodeObject* code = frame->f_code;
  const Policy policy = policy_of_code(code);
  if (policy == Policy::Interpret) {
    // Wrappers that keep another compiler away from a function: the function itself is called.
    const PeerCode peer = peer_code(code);
    if (peer == PeerCode::None) return nullptr;
    *handled = true;
    if (peer == PeerCode::Polyfill) return call_polyfill(frame, handled);
    if (peer == PeerCode::Marker) return Py_NewRef(Py_None);
    if (peer == PeerCode::Other)
      return graph_break("call-that-breaks", std::string("a call of ") + PyUnicode_AsUTF8(code->co_qualname));
    py::Ref fn;
    PyObject* closure = frame->f_func->func_closure;
    for (Py_ssize_t i = 0; closure && i < PyTuple_GET_SIZE(closure); ++i) {
      const char* name = py311::local_name(code, code->co_nlocalsplus - code->co_nfreevars + static_cast<int>(i));
      for (const char* wrapped : {"fn", "func", "init", "setstate", "traceable_fn"})
        if (strcmp(name, wrapped) == 0) fn = py::Ref::steal(load_cell(PyTuple_GET_ITEM(closure, i), nullptr));
    }
    if (PyErr_Occurred()) return nullptr;
    if (!fn) return graph_break("call-that-breaks", "a wrapper of an unknown kind");
    if (peer == PeerCode::Disabled && !is_of_torch(fn.get()))
      return graph_break("call-that-breaks",
                         "a call of " + describe(fn.get()) + ", which is under torch.compiler.disable");
    int rest = 0;
    std::vector<PyObject*> given = positional_arguments(frame, &rest);
    py::Ref wrapped_step;
    if (peer == PeerCode::StepWrapper) {
      static PyObject* step = PyObject_GetAttrString(polyfills(), "optimizer_step");
      wrapped_step = std::exchange(fn, py::Ref::borrow(step));
      given.insert(given.begin(), wrapped_step.get());
    }
    py::Ref args = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(given.size())));
    for (size_t i = 0; args && i < given.size(); ++i)
      PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i), Py_NewRef(given[i]));
    PyObject* kwargs = code->co_flags & CO_VARKEYWORDS ? frame->localsplus[rest] : nullptr;
    return args ? call_ex(fn.get(), args.get(), kwargs) : nullptr;
  }
  *handled = true;
  switch (policy) {
    case Policy::Skip:
      return Py_NewRef(Py_None);
    case Policy::SkipSelf:
      return Py_NewRef(frame->localsplus[0]);
    case Policy::True:
      return Py_NewRef(Py_True);
    case Policy::False:
      return Py_NewRef(Py_False);
    case Policy::IsCompiling:
      return PyBool_FromLong(tells_compiling(ts->cframe->current_frame, options.item_numbers));
    case Policy::Polyfill:
    case Policy::StandIn:
      return call_polyfill(frame, handled);
    case Policy::CustomFunction:
      return call_custom_function(frame, handled);
    case Policy::Defer:
      return defer_call(frame);
    case Policy::Warn:
      return defer_shown_warning(frame->localsplus[0]);
    case Policy::Loads:
      return call_loader(frame);
    case Policy::Paused: {
      for (int i = 0; trace.sizes && i < code->co_nlocals; ++i) {
        PyObject*& local = frame->localsplus[i];
        if (PyObject* number = local ? with_values(local) : nullptr) Py_SETREF(local, number);
      }
      Paused paused_here(*this);
      aten::RecordingPaused no_recording;
      return after_c_call(_PyEval_EvalFrameDefault(ts, frame, 0));
    }
    default:
      return graph_break("call-that-breaks", std::string("a call of ") + PyUnicode_AsUTF8(code->co_qualname));
  }
}

Machine::PeerCode Machine::peer_code(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, PeerCode>();
  auto it = known->find(code);
  if (it != known->end()) return it->second;
  const std::string name = PyUnicode_AsUTF8(code->co_qualname), file = PyUnicode_AsUTF8(code->co_filename);
  PeerCode kind = PeerCode::None;
  if (file.find("/torch/_dynamo/") != std::string::npos) {
    const bool polyfilled = name == "TransformGetItemToIndex.__torch_function__" || name == "OptimizedModule.__call__";
    kind = polyfilled ? PeerCode::Polyfill : PeerCode::Other;
    // What it was to compile is captured with what is around it. Two tag modules for that compiler's own use.
    for (const char* wrapper :
         {"_TorchDynamoContext.__call__.<locals>.compile_wrapper", "wrap_dunder_call_ctx_manager.<locals>.inner",
          "install_generation_tagging_init.<locals>.patched_init",
          "install_generation_tagging_init.<locals>.patched_setstate", "nonstrict_trace.<locals>.wrapped",
          "wrap_inline.<locals>.inner"})
      if (name == wrapper) kind = PeerCode::Wrapper;
    if (name == "DisableContext.__call__.<locals>._fn") kind = PeerCode::Disabled;
    if (name == "OptimizedModule.__getattr__") kind = PeerCode::None;
    for (const char* marker :
         {"graph_break", "mark_static_address", "mark_static", "mark_dynamic", "maybe_mark_dynamic"})
      if (name == marker) kind = PeerCode::Marker;
  } else if (name == "_disable_dynamo.<locals>.inner" && file.find("/torch/_compile.py") != std::string::npos) {
    kind = PeerCode::Wrapper;
  } else if (name == "_use_grad_for_differentiable.<locals>._use_grad" &&
             file.find("/torch/optim/optimizer.py") != std::string::npos) {
    kind = PeerCode::StepWrapper;  // it imports the other compiler, to break its graphs
  }
  Py_INCREF(code);
  return (*known)[code] = kind;
}

PyObject* Machine::defer_call(py311::Frame* frame) {
  PyCodeObject* code = frame->f_code;
  if (code->co_kwonlyargcount) return graph_break("call-that-breaks", "a call with keyword-only arguments");
  int rest = 0;
  const std::vector<PyObject*> args = positional_arguments(frame, &rest);
  if ((code->co_flags & CO_VARKEYWORDS) && PyDict_GET_SIZE(frame->localsplus[rest]))
    return graph_break("call-that-breaks",
                       std::string("a call with keywords of ") + PyUnicode_AsUTF8(code->co_qualname));
  // A message is made of what the arguments are now.
  for (size_t i = 1; i < args.size(); ++i)
    if (PyObject* a = args[i];
        !is_constant(a) && !py::is_tensor(a) && !is_number(a) && !is_open_number(a) && !is_text(a))
      return graph_break("call-that-breaks", std::string("a call of ") + PyUnicode_AsUTF8(code->co_qualname) +
                                                 " with what may change until it is made, a " + Py_TYPE(a)->tp_name);
  return defer(py::Ref::borrow(reinterpret_cast<PyObject*>(frame->f_func)), args);
}

uint32_t Machine::versions_of(const std::vector<py::Ref>& objects) {
  uint32_t sum = 0;
  for (const py::Ref& o : objects)
    if (py::is_tensor(o.get()) && !THPVariable_Unpack(o.get()).is_inference())
      sum += static_cast<uint32_t>(THPVariable_Unpack(o.get())._version());
  return sum;
}

PyObject* Machine::defer(py::Ref callable, const std::vector<PyObject*>& args, bool made) {
  Deferred call{std::move(callable), {}, made};
  for (PyObject* a : args) call.args.push_back(py::Ref::borrow(a));
  call.instruction = root_instruction;
  call.versions = versions_of(call.args);
  deferred.push_back(std::move(call));
  Py_RETURN_NONE;
}

PyObject* Machine::call_polyfill(py311::Frame* frame, bool* handled) {
  const py::Ref polyfill = polyfill_of(frame->f_code);
  const py::BoundArguments given(frame->f_code, frame->localsplus);
  return unless_declined(call_ex(polyfill.get(), given.args.get(), given.kwargs.get()), handled);
}

PyObject* Machine::unless_declined(PyObject* result, bool* handled) {
  if (result != Py_NotImplemented) return result;
  Py_DECREF(result);
  *handled = false;
  return nullptr;
}

}  // namespace kiln::capture
