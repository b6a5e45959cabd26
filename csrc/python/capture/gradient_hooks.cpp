// Hooks on gradients: those that captured code registers on what it computes, and those that parameters have, on what
// arrives or, once it is added, on their .grad (an optimizer, as a rule). The
// engine that runs a captured backward on fakes calls them, and each call is interpreted then and there. Its nodes
// stand before the backward's, between kiln::gradient_hook and kiln::gradient_hook_end (joint.h).
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/guards/checks.h"
#include "python/pch.h"

namespace kiln::capture {
namespace {

int64_t last_number = 0;

/// The error that is set, as one that passes through the engine.
[[noreturn]] void throw_through_engine() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace

PyObject* Machine::gradient_hook_step(PyObject* const* args, size_t n) {
  const std::string step = n > 1 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : "";
  if (step == "remove") {
    for (GradientHook& h : gradient_hooks)
      if (PyLong_Check(args[1]) && PyLong_AsLongLong(args[1]) == h.number) remove_gradient_hook(h);
    Py_RETURN_NONE;
  }
  const at::Tensor t =
      step == "register" && n == 3 && py::is_tensor(args[1]) ? THPVariable_Unpack(args[1]) : at::Tensor();
  // That of a leaf, or of a tensor from outside, would stay.
  if (!t.defined() || options.for_fx || aten::inside_transform() || aten::is_wrapper(t) || !t.requires_grad() ||
      t.is_leaf() || find(args[1]) || !trace.find(t) || !PyCallable_Check(args[2]))
    return graph_break("autograd", "a call of register_hook()");
  add_gradient_hook(t, args[2]);
  return PyLong_FromLongLong(gradient_hooks.back().number);
}

void Machine::add_gradient_hook(const at::Tensor& t, PyObject* function) {
  const size_t at = gradient_hooks.size();
  t.register_hook([this, at](const at::Tensor& grad) {
    return gradient_hooks[at].removed ? at::Tensor() : run_gradient_hook(at, grad);
  });
  const graph::Value value = trace.value_of(t);
  trace.record(graph::Op("kiln::register_hook"), {graph::Arg(value), graph::Arg(static_cast<int64_t>(at))}, {});
  gradient_hooks.push_back({t.grad_fn(), py::Ref::borrow(function), root_instruction, ++last_number, value});
  // fx has no place for it.
  torch_level_ok = false;
}

void Machine::add_accumulated_hook(const at::Tensor& leaf, PyObject* function) {
  const size_t at = gradient_hooks.size();
  aten::after_accumulation(leaf, [this, at] { run_gradient_hook(at, {}); });
  trace.record(graph::Op("kiln::register_accumulated_hook"),
               {graph::Arg(trace.value_of(leaf)), graph::Arg(static_cast<int64_t>(at))}, {});
  gradient_hooks.push_back({nullptr, py::Ref::borrow(function), root_instruction, ++last_number, {}, false, leaf});
  torch_level_ok = false;
}

void Machine::remove_gradient_hook(GradientHook& h) {
  if (h.removed) return;
  h.removed = true;
  if (h.accumulated.defined()) torch::autograd::impl::set_post_acc_grad_hooks(h.accumulated, nullptr);
  trace.record(graph::Op("kiln::remove_hook"), {graph::Arg(static_cast<int64_t>(&h - gradient_hooks.data()))}, {});
}

bool Machine::add_hooks_of(const at::Tensor& fake, const Known& k) {
  const at::Tensor& real = THPVariable_Unpack(k.real.get());
  const auto& own = torch::autograd::impl::hooks(real);
  // Others than register_hook()'s, which are all in one.
  if (guards::has_accumulator_hooks(k.real.get()) || own.size() > 1 ||
      (own.size() == 1 && !reinterpret_cast<THPVariable*>(k.real.get())->backward_hooks))
    return graph_break("autograd", "a backward that runs hooks of a parameter that PyTorch's register_... did not add");
  static PyObject* const list = PyObject_GetAttrString(polyfills(), "hooks_in");
  const auto add_all = [&](const char* attribute, void (Machine::*add)(const at::Tensor&, PyObject*)) {
    const py::Ref name = py::Ref::steal(PyUnicode_InternFromString(attribute));
    const py::Ref held = py::Ref::steal(name ? PyObject_GetAttr(k.real.get(), name.get()) : nullptr);
    const SourcePtr source = held ? child(guards::Source::Kind::Attr, k.source, name.get()) : nullptr;
    const py::Ref hooks = py::Ref::steal(held ? see(held.get(), source) : nullptr);
    if (!list || !hooks) return false;
    PyObject* args[] = {nullptr, hooks.get()};
    const py::Ref functions = py::Ref::steal(call(list, args + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!functions) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(functions.get()); ++i)
      (this->*add)(fake, PyTuple_GET_ITEM(functions.get(), i));
    return true;
  };
  return add_all("_backward_hooks", &Machine::add_gradient_hook) &&
         add_all("_post_accumulate_grad_hooks", &Machine::add_accumulated_hook);
}

void Machine::note_gradients(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) {
    const at::Tensor& grad = t.grad();
    if (!grad.defined() || trace.find(grad)) continue;
    c10::IValue value(grad);
    aten::restore_devices(c10::ArrayRef<c10::IValue>(&value, 1));
    trace.record(graph::Op("kiln::grad"), {graph::Arg(trace.value_of(t))}, {grad}, "grad");
  }
}

at::Tensor Machine::run_gradient_hook(size_t at, const at::Tensor& given) {
  const pybind11::gil_scoped_acquire gil;
  const int were_paused = std::exchange(paused, 0);
  running_hook = true;
  const auto end = c10::make_scope_exit([&] {
    paused = were_paused;
    running_hook = false;
  });
  const aten::RecordingResumed recording;
  const GradientHook hook = gradient_hooks[at];
  std::vector<graph::Arg> mark{graph::Arg(static_cast<int64_t>(at))};
  at::Tensor subject = hook.accumulated;  // what the hook is given
  if (subject.defined()) {
    trace.record(graph::Op("kiln::gradient_hook"), std::move(mark), {});
  } else {
    c10::IValue value(given);
    aten::restore_devices(c10::ArrayRef<c10::IValue>(&value, 1));
    subject = value.toTensor();
    const bool known = static_cast<bool>(trace.find(subject));
    mark.emplace_back(hook.value);  // whose sizes the gradient has
    graph::Node* begin = trace.record(graph::Op("kiln::gradient_hook"), std::move(mark), {subject}, "grad");
    if (known) trace.rebind(subject, begin->out());
  }
  note_gradients(backward_leaves);  // what leaves have got by now may be looked at
  const py::Ref object = py::Ref::steal(THPVariable_Wrap(subject));
  PyObject* args[] = {nullptr, object.get()};
  const auto fail = [&](const char* why) {
    PyErr_Clear();
    graph_break("autograd", why);
    throw_through_engine();
  };
  const py::Ref result = py::Ref::steal(
      object ? call(hook.function.get(), args + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr) : nullptr);
  // What other leaves have got by then is not the graph's to tell.
  if (!result && !break_pending()) fail("a hook on a gradient that raises an exception");
  if (!result) throw_through_engine();
  at::Tensor out;
  graph::Arg returned;
  if (result.get() != Py_None) {
    if (hook.accumulated.defined()) fail("a hook after an accumulation that returns something");
    if (!py::is_tensor(result.get())) fail("a hook on a gradient that returns something else than a tensor");
    out = THPVariable_Unpack(result.get());
    const graph::Value value = trace.value_of(out);
    if (!value) fail("a hook on a gradient that returns an unknown tensor");
    returned = graph::Arg(value);
  }
  trace.record(graph::Op("kiln::gradient_hook_end"), {std::move(returned)}, {});
  hooks_ran = true;
  return out;
}

int Machine::hook_behind(const at::Tensor& result) const {
  // Once a backward has run hooks, the joint trace knows whether another may.
  if (gradient_hooks.empty() || hooks_ran || !result.requires_grad()) return -1;
  torch::autograd::edge_list root;
  try {
    root.push_back(torch::autograd::impl::gradient_edge(result));
  } catch (const c10::Error&) {
    return -1;  // as in leaf_behind
  }
  const std::vector<torch::autograd::Node*> behind = aten::nodes_behind(root);
  for (const GradientHook& h : gradient_hooks)
    if (!h.removed && std::find(behind.begin(), behind.end(), h.node.get()) != behind.end()) return h.instruction;
  return -1;
}

}  // namespace kiln::capture
