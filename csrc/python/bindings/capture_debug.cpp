// kiln._C._debug_capture(fn, *args, **kwargs): what capture makes of one call, as text; for tests of capture alone.
#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/capture/callables.h"
#include "python/capture/capture.h"
#include "python/cpython/py311.h"

namespace kiln::bindings {
namespace {

struct Request {
  PyCodeObject* code = nullptr;
  bool done = false;
  capture::CaptureOptions options;
  capture::CaptureResult result;
  std::exception_ptr error;
};
thread_local Request* request = nullptr;
_PyFrameEvalFunction previous = nullptr;

PyObject* hook(PyThreadState* ts, _PyInterpreterFrame* frame, int throw_flag) {
  if (capture::is_capturing()) return capture::eval_captured_frame(ts, frame, throw_flag);
  if (request && !request->done && frame->f_code == request->code) {
    request->done = true;
    try {
      request->result = capture::capture_frame(ts, frame, request->options);
    } catch (...) {
      request->error = std::current_exception();
    }
    Py_RETURN_NONE;
  }
  return previous(ts, frame, throw_flag);
}

std::string show(const capture::RecipePtr& r, int depth = 0) {
  using K = capture::Recipe::Kind;
  if (!r) return "unbound";
  static const char* kNames[] = {"source", "output", "const", "null", "list",     "tuple",    "set",  "frozenset",
                                 "dict",   "slice",  "cell",  "call", "instance", "function", "item", "method"};
  std::string s = kNames[static_cast<int>(r->kind)];
  if (r->kind == K::Source) return r->source->text();
  if (r->kind == K::Output) return "out" + std::to_string(r->index);
  if (r->object) {
    py::Ref repr = py::Ref::steal(PyObject_Repr(r->object.get()));
    s = (r->kind == K::Constant ? "" : s + " ") + (repr ? PyUnicode_AsUTF8(repr.get()) : "?");
    PyErr_Clear();
    if (r->kind == K::Constant) return s;
  }
  if (depth > 6) return s + "(...)";
  s += "(";
  for (const auto& p : r->parts) s += show(p, depth + 1) + ", ";
  for (const auto& [name, value] : r->state)
    s += std::string(PyUnicode_AsUTF8(name.get())) + "=" + show(value, depth + 1) + ", ";
  for (const auto& p : r->elements) s += show(p, depth + 1) + ", ";
  return s + ")";
}

pybind11::dict debug_capture(const pybind11::function& fn, const pybind11::args& args, const pybind11::kwargs& kwargs) {
  PyInterpreterState* interp = PyInterpreterState_Get();
  Request r;
  pybind11::object code = fn.attr("__code__");
  r.code = reinterpret_cast<PyCodeObject*>(code.ptr());
  request = &r;
  previous = _PyInterpreterState_GetEvalFrameFunc(interp);
  _PyInterpreterState_SetEvalFrameFunc(interp, &hook);
  PyObject* out = PyObject_Call(fn.ptr(), args.ptr(), kwargs.ptr());
  _PyInterpreterState_SetEvalFrameFunc(interp, previous);
  request = nullptr;
  if (!out) throw pybind11::error_already_set();
  Py_DECREF(out);
  if (r.error) std::rethrow_exception(r.error);
  pybind11::dict d;
  const capture::CaptureResult& result = r.result;
  d["traced"] = result.traced ? graph::print(*result.traced) : "";
  d["torch_level"] = result.torch_level ? graph::print(*result.torch_level) : "";
  pybind11::list guards, effects, locals, stack;
  for (const auto& g : result.guards) guards.append(g.text());
  static const char* kEffects[] = {"setattr",       "delattr",      "setitem",     "delitem",
                                   "replace-list",  "replace-dict", "replace-set", "store-global",
                                   "delete-global", "store-cell",   "call"};
  for (const auto& e : result.side_effects) {
    std::string s = kEffects[static_cast<int>(e.kind)];
    s += " " + show(e.target);
    if (e.key) s += std::string(" [") + std::string(pybind11::str(pybind11::handle(e.key.get()))) + "]";
    if (e.key_recipe) s += " [" + show(e.key_recipe) + "]";
    effects.append(s + " = " + show(e.value));
  }
  d["guards"] = guards;
  d["effects"] = effects;
  d["num_ops"] = result.num_ops;
  d["inputs"] = result.inputs.size();
  d["exit"] = result.exit.kind == capture::Exit::Kind::Return ? "return" : "break";
  d["offset"] = result.exit.offset;
  d["value"] = show(result.exit.value);
  d["reason"] = result.exit.reason.id;
  d["cause"] = result.exit.reason.cause;
  d["user_stack"] = result.exit.reason.stack;
  for (const auto& l : result.exit.locals) locals.append(show(l));
  for (const auto& l : result.exit.stack) stack.append(show(l));
  d["locals"] = locals;
  d["stack"] = stack;
  return d;
}

}  // namespace

KILN_BINDINGS(capture_debug) {
  m.def("_debug_capture", &debug_capture);
  m.def("_unresolved_callables", [] {
    capture::load_callables();
    return capture::unresolved_callables();
  });
}

}  // namespace kiln::bindings
