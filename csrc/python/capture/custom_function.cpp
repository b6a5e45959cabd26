// torch.autograd.Function: its forward is interpreted where it is called; its backward right after it, for gradients
// that are stand-ins, so that both are part of the graph. kiln::custom_function (joint.h) tells the joint trace which
// nodes are the backward's, and autograd there runs them when their gradients are there.
#include <set>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/own_ops.h"
#include "base/error.h"
#include "graph/passes/passes.h"
#include "joint/autograd_calls.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

PyObject* Machine::call_custom_function(py311::Frame* frame, bool* handled) {
  if (aten::inside_transform()) return graph_break("custom-function", "it is called inside a transform of torch.func");
  static PyObject* polyfill = PyObject_GetAttrString(polyfills(), "custom_function");
  static PyObject* target_of = PyUnicode_InternFromString("custom_function_target");
  PyObject *cls = frame->localsplus[0], *args = frame->localsplus[1], *kwargs = frame->localsplus[2];
  if (!polyfill || !cls || !PyType_Check(cls) || !PyTuple_Check(args) || !PyDict_Check(kwargs) ||
      PyDict_GET_SIZE(kwargs) > 0) {
    PyErr_Clear();
    *handled = false;
    return nullptr;
  }
  bool wanted = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && aten::grad_enabled(); ++i)
    wanted |= py::is_tensor(PyTuple_GET_ITEM(args, i)) && THPVariable_Unpack(PyTuple_GET_ITEM(args, i)).requires_grad();
  py::Ref given = py::Ref::steal(PyTuple_Pack(3, cls, args, wanted ? Py_True : Py_False));
  if (!given) return nullptr;
  const auto run = [&] { return call_ex(polyfill, given.get(), nullptr); };
  PyObject* r;
  if (wanted) {
    // One node at torch level: the call.
    py::Ref target;
    {
      Paused paused_here(*this);
      aten::RecordingPaused no_recording;
      target = py::Ref::steal(PyObject_CallMethodOneArg(polyfills(), target_of, cls));
    }
    if (!target) return nullptr;
    r = torch_call(target.get(), &PyTuple_GET_ITEM(args, 0), static_cast<size_t>(PyTuple_GET_SIZE(args)), nullptr, run);
  } else {
    r = run();
  }
  return unless_declined(r, handled);
}

PyObject* Machine::custom_function_step(PyObject* const* args, size_t n) {
  const std::string step = n > 0 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : "";
  if (step == "output" && n == 2 && py::is_tensor(args[1])) {
    const at::Tensor& t = THPVariable_Unpack(args[1]);
    // A view made under no_grad says that it requires grad as its base does.
    if (t.requires_grad() && !(t.is_view() && t.is_leaf()))
      return graph_break("custom-function", "its forward returns a tensor with a history");
    Py_RETURN_NONE;
  }
  if (step == "forward" && n == 1) {
    custom_function.forward = now();
    Py_RETURN_NONE;
  }
  if (step == "inside" && n == 1) return PyBool_FromLong(custom_function.node != nullptr);
  if (step == "begin" && n == 4) return begin_custom_function(args[1], args[2], args[3] == Py_True);
  if (step == "end" && n == 2) return end_custom_function(args[1]);
  return graph_break("custom-function",
                     step == "refuse" && n == 2 ? PyUnicode_AsUTF8(args[1]) : "a custom function of an unknown kind");
}

PyObject* Machine::begin_custom_function(PyObject* inputs, PyObject* outputs, bool materialize) {
  std::vector<at::Tensor> in, out;
  if (!tensors_of(inputs, &in) || !tensors_of(outputs, &out)) return graph_break("custom-function", "not tensors");
  for (const at::Tensor& t : out) {
    const graph::Value v = trace.find(t);
    // A single view has a history of its own. Others that share memory are given back as views, with that of their
    // base.
    const bool shared = t.is_view() ? out.size() > 1 : t.storage().use_count() > 1;
    if (!v || v.node->kind == graph::NodeKind::Placeholder || shared)
      return graph_break("custom-function",
                         "its forward returns a tensor that it did not make, or one that shares memory with another");
  }
  const graph::Arg in_values = values_of(in), out_values = values_of(out);
  auto node = c10::make_intrusive<joint::FakeCustomFunction>();
  std::vector<at::Tensor> grads;
  {
    aten::RecordingPaused no_recording;
    grads = node->begin(in, out);
  }
  graph::Node* begin = trace.record(graph::Op("kiln::custom_function"),
                                    {in_values, out_values, graph::Arg(materialize)}, grads, "custom_function");
  begin->returns_list = true;
  custom_function.node = node;
  custom_function.begin = begin;
  custom_function.beginning = now();
  py::Ref result = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(grads.size())));
  for (size_t i = 0; result && i < grads.size(); ++i) {
    PyObject* o = THPVariable_Wrap(grads[i]);
    if (!o) return nullptr;
    PyTuple_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), o);
  }
  return result.release();
}

namespace {
/// The results of `begin` from which `v` is computed by operators that pass gradients on.
std::vector<size_t> results_behind(graph::Value v, const graph::Node& begin) {
  const auto passes = [](graph::Value value) {
    const DType dtype = value.meta().dtype;
    return is_floating(dtype) || is_complex(dtype);
  };
  std::set<size_t> found;
  std::set<std::pair<const graph::Node*, uint32_t>> seen;
  std::vector<graph::Value> todo;
  const auto visit = [&](graph::Value value) {
    if (!value || !passes(value) || !seen.emplace(value.node, value.index).second) return;
    if (value.node == &begin)
      found.insert(size_t{value.index});
    else if (value.node->kind == graph::NodeKind::Call && value.node->op.name().find("detach") == std::string::npos)
      todo.push_back(value);
  };
  visit(v);
  while (!todo.empty()) {
    const graph::Node* node = todo.back().node;
    todo.pop_back();
    for (const graph::Arg& a : node->args) graph::for_each_value(a, visit);
    for (const auto& [name, a] : node->kwargs) graph::for_each_value(a, visit);
  }
  return {found.begin(), found.end()};
}
}  // namespace

void Machine::checkpoint_forward() {
  const std::vector<graph::Node*> backward = nodes_since(custom_function.beginning);
  const auto differentiates = [](const graph::Node* n) { return joint::differentiates(n->op); };
  if (checkpoint.depth > 0 || std::none_of(backward.begin(), backward.end(), differentiates)) return;
  ++checkpoint.number;
  // The last node comes first.
  const std::vector<graph::Node*> all = nodes_since(custom_function.forward);
  for (auto n = std::find(all.begin(), all.end(), custom_function.begin); n != all.end(); ++n)
    if (*n != custom_function.begin) (*n)->checkpoint = checkpoint.number;
}

PyObject* Machine::end_custom_function(PyObject* grads) {
  std::vector<at::Tensor> tensors;
  if (!custom_function.node || !tensors_of(grads, &tensors))
    return graph_break("custom-function", "its backward returns other things than tensors");
  if (const char* why = refusal_since(custom_function.beginning, Region::Backward))
    return graph_break("custom-function", std::string("its backward ") + why);
  checkpoint_forward();
  std::vector<std::vector<size_t>> given;
  for (const at::Tensor& t : tensors)
    given.push_back(t.defined() ? results_behind(trace.value_of(t), *custom_function.begin) : std::vector<size_t>());
  custom_function.node->end(tensors, std::move(given));
  custom_functions.push_back(custom_function.node);
  trace.record(graph::Op("kiln::custom_function_end"), {values_of(tensors)}, {});
  custom_function = {};
  Py_RETURN_NONE;
}

namespace {
void add_items(PyObject* dict, std::vector<const void*>& to) {
  Py_ssize_t at = 0;
  PyObject *key, *value;
  while (PyDict_Next(dict, &at, &key, &value)) to.insert(to.end(), {key, value});
}
}  // namespace

std::vector<const void*> Machine::contents_now(const Known& k) {
  std::vector<const void*> out;
  PyObject* now = k.stand_in.get();
  if (PyDict_Check(now)) {
    add_items(now, out);
  } else if (py::Ref items = py::Ref::steal(PySequence_List(now))) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) out.push_back(PyList_GET_ITEM(items.get(), i));
  }
  if (k.attributes)
    if (py::Ref dict = py::Ref::steal(PyObject_GenericGetDict(now, nullptr))) add_items(dict.get(), out);
  PyErr_Clear();
  return out;
}

std::vector<const void*> Machine::effects_now(size_t num_knowns) {
  std::vector<const void*> out;
  const auto overlaid = [&](const Overlay& o) {
    for (const auto& [name, value] : o.entries) out.insert(out.end(), {name.get(), value.get()});
  };
  for (PyObject* o : overlay_order)
    if (const auto it = overlays.find(o); it != overlays.end()) overlaid(it->second);
  for (const auto& [dict, o] : globals_written) overlaid(o);
  for (const py::Ref& cell : cells_order)
    if (const auto it = cells_written.find(cell.get()); it != cells_written.end()) out.push_back(it->second.get());
  out.push_back(reinterpret_cast<const void*>(deferred.size()));
  for (size_t i = 0; i < num_knowns; ++i) {
    if (knowns[i].kind != Known::Kind::Shadow) continue;
    const std::vector<const void*> contents = contents_now(knowns[i]);
    out.insert(out.end(), contents.begin(), contents.end());
  }
  return out;
}

Machine::Moment Machine::now() {
  graph::Graph& g = trace.graph();
  return {g.nodes().size() - g.inputs().size(), knowns.size(), effects_now(knowns.size())};
}

std::vector<graph::Node*> Machine::nodes_since(const Moment& m) {
  std::vector<graph::Node*> nodes;
  const graph::Graph& g = trace.graph();
  size_t left = g.nodes().size() - g.inputs().size() - m.num_calls;
  for (auto at = g.nodes().rbegin(); left > 0; ++at, --left) nodes.push_back(at->get());
  return nodes;
}

bool Machine::draws_since(const Moment& m) {
  const std::vector<graph::Node*> nodes = nodes_since(m);
  return std::any_of(nodes.begin(), nodes.end(), [](const graph::Node* n) {
    const aten::OpInfo* op = aten::find_op(n->op);
    return op && op->random;
  });
}

const char* Machine::refusal_since(const Moment& m, Region kind) {
  const std::vector<graph::Node*> region = nodes_since(m);
  const std::unordered_set<const graph::Node*> own(region.begin(), region.end());
  static const graph::Op constant("kiln::tensor_constant"), leaf("kiln::set_requires_grad"),
      grad("kiln::autograd_grad");
  const auto is_foreign = [&](const graph::Node* base) { return !own.contains(base); };
  for (const graph::Node* n : region) {
    const std::string& name = n->op.name();
    bool plain = !name.starts_with("kiln::") || n->op == constant || aten::is_own_op(n->op);
    if (kind == Region::Backward) plain |= n->op == grad || (n->op == leaf && own.contains(n->arg(0).value().node));
    if (kind == Region::Checkpointed)
      plain |= name.starts_with("kiln::custom_function") ||
               (n->op == leaf && !is_foreign(graph::storage_root(n->arg(0).value()).node));
    if (!plain) return "uses autograd itself";
    if (writes_to(*n, bases_, is_foreign)) return "changes a tensor in place that it did not make";
  }
  return has_effects_since(m) ? "has side effects" : nullptr;
}

bool Machine::has_effects_since(const Moment& f) {
  if (effects_now(f.num_knowns) != f.effects) return true;
  // Containers that were first looked at since then.
  for (size_t i = f.num_knowns; i < knowns.size(); ++i) {
    const Known& k = knowns[i];
    if (k.kind != Known::Kind::Shadow || PyTuple_Check(k.stand_in.get())) continue;  // a tuple has no snapshot
    std::vector<const void*> before;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(k.snapshot.get()); ++j)
      before.push_back(PyList_GET_ITEM(k.snapshot.get(), j));
    if (k.attributes) add_items(k.attributes.get(), before);
    if (contents_now(k) != before) return true;
  }
  return false;
}

}  // namespace kiln::capture
