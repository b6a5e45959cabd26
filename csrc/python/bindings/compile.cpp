// kiln._C.compile and what belongs to it.
#include "python/frame/compile.h"

#include <torch/csrc/autograd/python_hook.h>

#include "python/bindings/bindings.h"
#include "python/bindings/fx.h"
#include "python/capture/capture.h"
#include "python/frame/callable.h"
#include "python/frame/errors.h"
#include "python/frame/records.h"
#include "runtime/autograd_node.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

/// Runs `f` and hands its C++ exceptions to Python.
template <class F>
pb::object guarded(F&& f) {
  try {
    return pb::reinterpret_steal<pb::object>(f().release());
  } catch (...) {
    frame::set_python_error(std::current_exception());
    throw pb::error_already_set();
  }
}

OptionValue option_value(pb::handle value) {
  if (PyBool_Check(value.ptr())) return value.cast<bool>();
  if (PyLong_Check(value.ptr())) return value.cast<int64_t>();
  return value.cast<std::string>();
}

pb::dict record_dict(const frame::Record& r) {
  pb::dict d;
  d["function"] = r.function;
  d["file"] = r.file;
  d["line"] = r.line;
  d["graph"] = r.graph.empty() ? pb::object(pb::none()) : pb::object(pb::str(r.graph));
  d["ops"] = r.ops;
  d["guards"] = r.guards;
  if (r.has_break) {
    pb::dict b;
    b["id"] = r.reason.id;
    b["cause"] = r.reason.cause;
    b["hint"] = r.reason.hint;
    b["stack"] = r.reason.stack;
    b["file"] = r.reason.file;
    b["line"] = r.reason.line;
    d["break"] = b;
  } else {
    d["break"] = pb::none();
  }
  pb::list stages;
  for (const StageTime& t : r.stages) stages.append(pb::make_tuple(t.name, t.seconds));
  d["stages"] = stages;
  d["aten"] = r.aten;
  d["bytecode"] = r.bytecode.empty() ? pb::object(pb::none()) : pb::object(pb::str(r.bytecode));
  d["artifact"] = r.artifact.empty() ? pb::object(pb::none()) : pb::object(pb::str(r.artifact));
  d["dot"] = r.dot;
  return d;
}

}  // namespace

KILN_BINDINGS(compile) {
  frame::set_to_fx(&captured_to_fx);
  runtime::set_calls_something([](const torch::autograd::FunctionPreHook& hook) {
    // By name: PyTorch does not export what a dynamic_cast compares.
    if (std::string_view(typeid(hook).name()).find("PyFunctionTensorPreHook") == std::string_view::npos) return true;
    const pb::gil_scoped_acquire gil;
    return PyDict_Size(static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hook).dict) > 0;
  });
  m.attr("CompiledCallable") = pb::handle(reinterpret_cast<PyObject*>(frame::compiled_type()));
  m.attr("ModeCallable") = pb::handle(reinterpret_cast<PyObject*>(frame::mode_type()));
  m.def(
      "compile",
      [](pb::handle f, pb::object backend, bool fullgraph, pb::object dynamic, pb::dict options, bool alone,
         pb::object name) {
        return guarded([&] {
          frame::Config config;
          if (!backend.is_none()) config.backend = kiln::py::Ref::borrow(backend.ptr());
          config.fullgraph = fullgraph;
          if (!dynamic.is_none()) config.dynamic = dynamic.cast<bool>();
          config.alone = alone;
          for (const auto& [key, value] : options) config.options.emplace(key.cast<std::string>(), option_value(value));
          return frame::make_compiled(f.ptr(), frame::intern_config(std::move(config)));
        });
      },
      pb::arg("f"), pb::kw_only(), pb::arg("backend") = pb::none(), pb::arg("fullgraph") = false,
      pb::arg("dynamic") = pb::none(), pb::arg("options") = pb::dict(), pb::arg("alone") = false,
      pb::arg("name") = pb::none(),
      "A CompiledCallable for a Python function or bound method. backend: None for kiln's own compiler, or "
      "backend(gm, example_inputs) -> callable. options: values of the option table while this callable compiles. "
      "alone: nothing is shared with other callables, and what is compiled is forgotten with this one.");
  m.def(
      "disable",
      [](pb::handle f, bool recursive) { return guarded([&] { return frame::make_disabled(f.ptr(), recursive); }); },
      pb::arg("f"), pb::arg("recursive") = true, "A callable that runs f in eager.");
  m.def(
      "run", [](pb::handle f) { return guarded([&] { return frame::make_run(f.ptr()); }); }, pb::arg("f"),
      "A callable that runs f with what is compiled already and compiles nothing new.");
  m.def("reset", &frame::reset_caches, "Forgets every compiled entry and every warning given once.");
  m.def("is_compiling", &capture::is_capturing, "True while this thread captures the code that asks.");
  m.def("set_record", &frame::set_recording, pb::arg("on"), "Switches records of compiles on or off.");
  m.def(
      "take_records",
      [] {
        pb::list list;
        for (const frame::Record& r : frame::take_records()) list.append(record_dict(r));
        return list;
      },
      "Records of all compiles since the last call, as dicts.");
  m.def(
      "stage_times",
      [] {
        pb::list times;
        for (const StageTime& t : stage_times()) times.append(pb::make_tuple(t.name, t.seconds));
        return times;
      },
      "Times of the last compile on this thread, as pairs (stage, seconds).");
}

}  // namespace kiln::bindings
