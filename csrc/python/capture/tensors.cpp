// What tensors do outside the dispatcher: gradients, constants made from Python numbers, attributes that are written.
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_set>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/guards/checks.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;
using GK = Guard::Kind;

namespace {
struct Reached {
  std::vector<at::Tensor> leaves;
  bool hooks = false;    // Python hooks would run
  bool outside = false;  // it goes on through an input that has a history of its own
};

/// What a backward from `roots` meets.
Reached reached_by_backward(const std::vector<at::Tensor>& roots) {
  Reached reached;
  // Held: a leaf does not own the node that accumulates into it.
  torch::autograd::edge_list edges;
  for (const at::Tensor& t : roots) edges.push_back(torch::autograd::impl::gradient_edge(t));
  for (torch::autograd::Node* node : aten::nodes_behind(edges)) {
    // Hooks on the gradients of tensors are the capture's own: gradient_hooks.cpp.
    if (!node->pre_hooks().empty() || !node->post_hooks().empty()) reached.hooks = true;
    reached.outside |= aten::is_history_of_input(*node);
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) reached.leaves.push_back(leaf->variable);
  }
  return reached;
}
}  // namespace

bool tensors_of(PyObject* o, std::vector<at::Tensor>* out) {
  if (!PyTuple_Check(o) && !PyList_Check(o)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) {
    PyObject* t = PySequence_Fast_GET_ITEM(o, i);
    if (t == Py_None)
      out->emplace_back();
    else if (py::is_tensor(t))
      out->push_back(THPVariable_Unpack(t));
    else
      return false;
  }
  return true;
}

bool has_or_views(const std::vector<at::Tensor>& tensors, const at::Tensor& t) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& seen) {
    return seen.is_same(t) || (seen.is_view() && seen._base().is_same(t));
  });
}

graph::Arg Machine::values_of(const std::vector<at::Tensor>& tensors) {
  graph::Arg::List list;
  for (const at::Tensor& t : tensors) list.push_back(t.defined() ? graph::Arg(trace.value_of(t)) : graph::Arg());
  return graph::Arg(std::move(list));
}

bool Machine::ensure_grad(PyObject* fake, bool look) {
  Known* k = find(fake);
  if (!k || k->kind != Known::Kind::Tensor) return true;
  auto [it, first] = grads_.try_emplace(fake);
  if (!first) return true;  // known, or written before it was read: what it was does not matter
  grad_order.push_back(py::Ref::borrow(fake));
  it->second.looked = look;
  const at::Tensor real = THPVariable_Unpack(k->real.get());
  if (!real.is_leaf() && !real.retains_grad()) return true;
  const SourcePtr source = child(SK::Attr, k->source, names().grad);
  const at::Tensor& grad = real.grad();
  if (!grad.defined()) {
    if (look) guard(GK::Is, source, Py_None);
    return true;
  }
  py::Ref real_grad = py::Ref::steal(THPVariable_Wrap(grad));
  py::Ref stand = py::Ref::steal(look ? see(real_grad.get(), source) : stand_in(real_grad.get(), source));
  if (!stand) return false;
  THPVariable_Unpack(fake).mutable_grad() = THPVariable_Unpack(stand.get());
  grads_[fake].initial = stand;
  return true;
}

PyObject* Machine::load_grad(PyObject* o) {
  if (!ensure_grad(o, true)) return nullptr;
  const at::Tensor t = THPVariable_Unpack(o);
  if (!t.is_leaf() && !t.retains_grad()) return after_c_call(PyObject_GetAttr(o, names().grad));  // with its warning
  const at::Tensor& grad = t.grad();
  return grad.defined() ? THPVariable_Wrap(grad) : Py_NewRef(Py_None);
}

bool Machine::store_tensor_attr(PyObject* o, PyObject* name, PyObject* value) {
  if (value && accessor_goes_elsewhere(o, name)) return PyObject_SetAttr(o, name, value) == 0 && !break_pending();
  if (PyUnicode_Compare(name, names().grad) == 0) {
    if (value && value != Py_None && !(py::is_tensor(value) && trace.value_of(THPVariable_Unpack(value)))) {
      graph_break("autograd", "a write of .grad");
      return false;
    }
    if (!value) value = Py_None;
    if (!ensure_grad(o, false)) return false;
    const at::Tensor x = THPVariable_Unpack(o);
    if (!x.grad().defined() && value == Py_None) return true;
    if (options.for_fx) {
      graph_break("autograd", "a write of .grad, in a graph for a backend that takes fx graphs");
      return false;
    }
    const DataWritten* const written = new_data(o);
    const graph::Value v = written ? written->before : trace.value_of(x);
    if (!v) {
      graph_break("autograd", "a write of .grad of an unknown tensor");
      return false;
    }
    if (PyObject_SetAttr(o, name, value) < 0) return false;
    std::vector<graph::Arg> args{graph::Arg(v), graph::Arg()};
    if (value != Py_None) args[1] = graph::Arg(trace.value_of(THPVariable_Unpack(value)));
    trace.record(graph::Op("kiln::set_grad"), std::move(args), {});
    return true;
  }
  if (PyUnicode_Compare(name, names().requires_grad) == 0) {
    const int wanted = value ? PyObject_IsTrue(value) : -1;
    PyObject* const real = real_of(o);
    const bool leaf = THPVariable_Unpack(real ? real : o).is_leaf();  // eager raises for others
    if (wanted >= 0 && leaf && set_requires_grad(o, wanted == 1)) return true;
    if (!break_pending()) graph_break("autograd", "a write of .requires_grad");
    return false;
  }
  if (PyUnicode_Compare(name, names().data) == 0 && value && (is_same_data(o, value) || replace_data(o, value)))
    return true;
  PyObject* descr = _PyType_Lookup(Py_TYPE(o), name);
  if (descr && Py_TYPE(descr)->tp_descr_set && Py_TYPE(descr) == &PyGetSetDescr_Type) {
    graph_break("write-to-c-attribute", std::string("writing a tensor's attribute ") + PyUnicode_AsUTF8(name));
    return false;
  }
  return generic_store_attr(o, name, value);
}

bool Machine::is_same_data(PyObject* tensor, PyObject* value) const {
  if (value == tensor) return true;
  if (!py::is_tensor(value)) return false;
  static const graph::Op data("aten::data"), detach("aten::detach"), alias("aten::alias");
  graph::Value v = trace.find(THPVariable_Unpack(value));
  while (v && (v.node->op == data || v.node->op == detach || v.node->op == alias)) v = v.node->arg(0).value();
  return v && v == trace.find(THPVariable_Unpack(tensor));
}

bool Machine::replace_data(PyObject* o, PyObject* value) {
  const Known* k = find(o);
  if (options.for_fx || !k || k->kind != Known::Kind::Tensor || !py::is_tensor(value) || !observe(o)) return false;
  const at::Tensor t = THPVariable_Unpack(o), real = THPVariable_Unpack(k->real.get()), now = THPVariable_Unpack(value);
  if (!t.is_leaf() || real.is_view() || !aten::is_fake(now) || !trace.value_of(t) || !trace.value_of(now)) return false;
  if (t.sizes() != now.sizes() || t.strides() != now.strides() || t.scalar_type() != now.scalar_type() ||
      t.device() != now.device() || may_be_saved(t))
    return false;
  const at::Tensor data = now.detach();
  py::Ref made = py::Ref::steal(THPVariable_Wrap(data));
  if (!made || !trace.find(data)) return false;
  {
    aten::RecordingPaused no_recording;
    t.set_data(data);
  }
  const DataWritten* const earlier = new_data(o);
  const graph::Value before = earlier ? earlier->before : trace.find(t);
  trace.rebind(t, trace.find(data));
  std::erase_if(data_written, [&](const DataWritten& w) { return w.tensor == o; });
  data_written.push_back({o, std::move(made), before});
  return true;
}

const Machine::DataWritten* Machine::new_data(PyObject* o) const {
  const auto found =
      std::find_if(data_written.begin(), data_written.end(), [&](const DataWritten& w) { return w.tensor == o; });
  return found == data_written.end() ? nullptr : &*found;
}

bool Machine::differentiates_new_data(PyObject* const* args, size_t n, PyObject* result) const {
  if (data_written.empty() || !at::GradMode::is_enabled()) return false;
  const auto needs_gradient = [](PyObject* o) { return py::is_tensor(o) && THPVariable_Unpack(o).requires_grad(); };
  return any_within(result, needs_gradient) && std::any_of(args, args + n, [&](PyObject* arg) {
           return any_within(arg, [&](PyObject* o) { return needs_gradient(o) && new_data(o); });
         });
}

bool Machine::make_leaf(const at::Tensor& t) {
  if (options.for_fx || !trace.find(t) || !(t.is_floating_point() || t.is_complex())) return false;
  trace.record(graph::Op("kiln::set_requires_grad"), {graph::Arg(trace.value_of(t)), graph::Arg(true)}, {});
  t.set_requires_grad(true);
  leaves_made.emplace_back(t, root_instruction);
  return true;
}

bool Machine::set_requires_grad(PyObject* o, bool wanted) {
  if (!observe(o)) return false;
  const at::Tensor t = THPVariable_Unpack(o);
  if (t.requires_grad() == wanted) return true;
  const Known* k = find(o);
  if (!k && wanted) return make_leaf(t);
  if (!k || new_data(o) || k->kind != Known::Kind::Tensor || options.for_fx || !t.is_leaf()) return false;
  const at::Tensor real = THPVariable_Unpack(k->real.get());
  if (real.is_view() || !trace.value_of(t)) return false;
  if (std::find(flags_written.begin(), flags_written.end(), o) == flags_written.end()) flags_written.push_back(o);
  if (wanted && !real.requires_grad()) return make_leaf(t);
  trace.record(graph::Op("kiln::set_requires_grad"), {graph::Arg(trace.value_of(t)), graph::Arg(wanted)}, {});
  t.set_requires_grad(wanted);
  return true;
}

int Machine::leaf_behind(const at::Tensor& result, const std::vector<at::Tensor>& leaving) const {
  if (leaves_made.empty() || !result.requires_grad()) return -1;
  try {
    (void)result.grad_fn();
  } catch (const c10::Error&) {
    return -1;  // a view made without gradients of what was written since: autograd refuses it
  }
  const auto is_known = [&](const at::Tensor& t) {
    const py::Ref o = py::Ref::steal(THPVariable_Wrap(t));
    return o && index.contains(o.get());
  };
  for (const at::Tensor& leaf : reached_by_backward({result}).leaves)
    for (const auto& [made, instruction] : leaves_made)
      if (leaf.is_same(made) && !(leaf.is_same(result) && !leaf.grad().defined()) &&
          (is_known(leaf) || has_or_views(leaving, leaf) ||
           (leaf.grad().defined() && has_or_views(leaving, leaf.grad()))))
        return instruction;
  return -1;
}

PyObject* Machine::call_requires_grad(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  PyObject* self = PyCFunction_Check(callable) ? PyCFunction_GET_SELF(callable) : args[0];
  const size_t n = PyVectorcall_NARGS(nargsf) + (PyCFunction_Check(callable) ? 1 : 0);
  PyObject* flag = Py_True;
  if (kwnames && PyTuple_GET_SIZE(kwnames) == 1)
    flag = args[PyVectorcall_NARGS(nargsf)];
  else if (n == 2)
    flag = args[PyCFunction_Check(callable) ? 0 : 1];
  if (py::is_tensor(self) && aten::is_wrapper(THPVariable_Unpack(self)))
    return after_c_call(PyObject_Vectorcall(callable, args, nargsf, kwnames));
  if (py::is_tensor(self) && PyBool_Check(flag) && set_requires_grad(self, flag == Py_True)) return Py_NewRef(self);
  return break_pending() ? nullptr : graph_break("autograd", "requires_grad_() that changes something");
}

PyObject* Machine::call_make_parameter(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  const bool wanted = n == 3 && args[2] == Py_True;
  if (!kwnames && !wanted && n >= 2 && PyType_Check(args[0]) && args[0] != names().parameter_type)
    return torch_call(callable, args, n, kwnames, [&] { return PyObject_Vectorcall(callable, args, n, nullptr); });
  if (kwnames || n < 2 || args[0] != names().parameter_type || !py::is_tensor(args[1]) ||
      (n > 2 && !PyBool_Check(args[2])) || options.for_fx || aten::inside_transform() ||
      aten::is_wrapper(THPVariable_Unpack(args[1])))
    return graph_break("tensor-constructor", "a call of " + describe(callable));
  if (!observe(args[1])) return nullptr;
  PyObject* const given[] = {args[0], args[1], Py_False};
  py::Ref made = py::Ref::steal(after_c_call(PyObject_Vectorcall(callable, given, 3, nullptr)));
  if (!made || !wanted || make_leaf(THPVariable_Unpack(made.get()))) return made.release();
  return graph_break("tensor-constructor", "a parameter that autograd cannot differentiate by");
}

PyObject* Machine::call_retain_grad(PyObject* o) {
  const at::Tensor t = py::is_tensor(o) ? THPVariable_Unpack(o) : at::Tensor();
  if (!t.defined() || options.for_fx || aten::inside_transform() || aten::is_wrapper(t) || !t.requires_grad() ||
      (!t.is_leaf() && (find(o) || !trace.find(t))))
    return graph_break("autograd", "a call of retain_grad()");
  if (t.is_leaf() || t.retains_grad()) Py_RETURN_NONE;
  trace.record(graph::Op("kiln::retain_grad"), {graph::Arg(trace.find(t))}, {});
  t.retain_grad();
  retained.emplace_back(t, root_instruction);
  Py_RETURN_NONE;
}

PyObject* Machine::legacy_tensor(const std::string& what, PyObject* dtype, PyObject* const* args, size_t n) {
  static PyObject* torch = PyImport_AddModule("torch");
  if (n == 1 && py::is_tensor(args[0])) {  // another view of it
    const py::Ref same = py::Ref::steal(dtype ? PyObject_GetAttrString(args[0], "dtype") : nullptr);
    PyErr_Clear();
    static PyObject* view_as = PyObject_GetAttrString(names().tensor_type, "view_as");
    PyObject* const both[] = {args[0], args[0]};
    if (!dtype || same.get() == dtype) return call(view_as, both, 2, nullptr);
  }
  const bool is_size = n == 1 && Py_TYPE(args[0]) == &THPSizeType;
  const bool data = n == 1 && !is_size && (PyList_CheckExact(args[0]) || PyTuple_CheckExact(args[0]));
  for (size_t i = 0; !data && i < n; ++i)
    if (!is_size && !PyLong_CheckExact(args[i]) && !this->is_size(args[i]))
      return graph_break("tensor-constructor", "a call of " + what);
  const py::Ref default_dtype =
      dtype ? py::Ref() : py::Ref::steal(PyObject_CallMethod(torch, "get_default_dtype", nullptr));
  const py::Ref function = py::Ref::steal(PyObject_GetAttrString(torch, data ? "tensor" : "empty"));
  const py::Ref options = py::Ref::steal(Py_BuildValue("{sO}", "dtype", dtype ? dtype : default_dtype.get()));
  py::Ref given = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(n ? n : 1)));
  if (!function || !options || !given) return nullptr;
  for (size_t i = 0; i < n; ++i) PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), Py_NewRef(args[i]));
  if (n == 0) PyTuple_SET_ITEM(given.get(), 0, PyLong_FromLong(0));
  return call_ex(function.get(), given.get(), options.get());
}

PyObject* Machine::call_tensor_class(PyObject* type, PyObject* const* args, size_t n) {
  const char* name = reinterpret_cast<PyTypeObject*>(type)->tp_name;
  const std::string what = std::string("the class ") + name;
  if (strncmp(name, "torch.cuda", 10) == 0 || strstr(name, "sparse"))
    return graph_break("tensor-constructor", "a call of " + what);
  const py::Ref dtype = type == names().tensor_type ? py::Ref() : py::Ref::steal(PyObject_GetAttrString(type, "dtype"));
  return PyErr_Occurred() ? nullptr : legacy_tensor(what, dtype.get(), args, n);
}

std::optional<bool> Machine::is_of_tensor_class(const at::Tensor& t, PyObject* classes) {
  if (PyTuple_Check(classes)) {
    std::optional<bool> known;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); ++i)
      if (const auto one = is_of_tensor_class(t, PyTuple_GET_ITEM(classes, i))) known = *one || known.value_or(false);
    return known;
  }
  if (strcmp(Py_TYPE(classes)->tp_name, "torch.tensortype") != 0) return std::nullopt;
  const py::Ref dtype = py::Ref::steal(PyObject_GetAttrString(classes, "dtype"));
  const char* name = reinterpret_cast<PyTypeObject*>(classes)->tp_name;
  return dtype && reinterpret_cast<THPDtype*>(dtype.get())->scalar_type == t.scalar_type() && t.device().is_cpu() &&
         t.layout() == at::kStrided && !strstr(name, "cuda") && !strstr(name, "sparse");
}

PyObject* Machine::call_new_tensor(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  // x.new_tensor(data, dtype=, device=, requires_grad=) is torch.tensor with what it leaves out taken from x.
  const bool bound = Py_TYPE(callable) != &PyMethodDescr_Type;
  PyObject* x = bound ? PyCFunction_GET_SELF(callable) : args[0];
  if (n != (bound ? 1 : 2)) return graph_break("tensor-constructor", "new_tensor without data");
  py::Ref given = py::Ref::steal(PyDict_New());
  for (const char* name : {"dtype", "device"}) {
    const py::Ref own = py::Ref::steal(PyObject_GetAttrString(x, name));
    if (!own || PyDict_SetItemString(given.get(), name, own.get()) < 0) return nullptr;
  }
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i)
    if (args[n + static_cast<size_t>(i)] != Py_None &&
        PyDict_SetItem(given.get(), PyTuple_GET_ITEM(kwnames, i), args[n + static_cast<size_t>(i)]) < 0)
      return nullptr;
  static PyObject* tensor = PyObject_GetAttrString(PyImport_AddModule("torch"), "tensor");
  const py::Ref data = py::Ref::steal(PyTuple_Pack(1, args[n - 1]));
  return data ? call_ex(tensor, data.get(), given.get()) : nullptr;
}

namespace {
/// Whether a list, or one within it, has arrays or scalars of NumPy's, which have dtypes of their own.
bool holds_numpy(PyObject* o) {
  return any_within(o, [](PyObject* i) { return numpy_among(&i, 1); });
}
}  // namespace

PyObject* Machine::share_memory(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  const std::string_view name = name_of(callable);
  const bool converts = name == "as_tensor";
  if (n == 0 || !(converts || name == "from_numpy")) return nullptr;
  py::Ref memory = py::Ref::steal(memory_of_array(args[0]));
  const size_t all = n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0);
  if (!memory || !converts || all == 1) return memory.release();
  std::vector<PyObject*> given(args, args + all);
  given[0] = memory.get();
  return call(callable, given.data(), n, kwnames);
}

PyObject* Machine::memory_of_array(PyObject* array) {
  const Known* k = find_plain(array);
  // The guards make it where the function is entered: it would be no tensor of an inference mode in the function.
  if (c10::InferenceMode::is_enabled()) return nullptr;
  if (!k || !is_array(array) || !is_writeable(array) || holds_objects(array)) return nullptr;
  const SourcePtr source = k->source;
  static PyObject* const from_numpy = PyObject_GetAttrString(PyImport_AddModule("torch"), "from_numpy");
  static PyObject* const alias = PyObject_GetAttrString(names().tensor_type, "detach");
  py::Ref tensor;
  {
    Paused paused_here(*this);
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard real;
    tensor = py::Ref::steal(PyObject_CallOneArg(from_numpy, array));
  }
  if (!tensor) {  // a dtype that tensors have not
    PyErr_Clear();
    return nullptr;
  }
  guard(GK::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(array)), py311::type_version(Py_TYPE(array)));
  const py::Ref input = py::Ref::steal(see(tensor.get(), child(SK::ArrayMemory, source, nullptr)));
  // Each call makes a tensor of its own.
  PyObject* const made = input.get();
  return made ? call(alias, &made, 1, nullptr) : nullptr;
}

PyObject* Machine::call_tensor_data(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const size_t n = PyVectorcall_NARGS(nargsf);
  const size_t all = n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0);
  const char* name = name_of(callable);
  const bool unbound = Py_TYPE(callable) == &PyMethodDescr_Type;
  if (strcmp(name, "new") == 0) {
    PyObject* x = unbound ? args[0] : PyCFunction_GET_SELF(callable);
    const py::Ref dtype = py::Ref::steal(PyObject_GetAttrString(x, "dtype"));
    if (!dtype) return nullptr;
    if (kwnames) return graph_break("tensor-constructor", "new() with keywords");
    return legacy_tensor("Tensor.new", dtype.get(), args + unbound, n - unbound);
  }
  bool fake = false;
  for (size_t i = unbound ? 1 : 0; i < all; ++i) fake = fake || has_fake(args[i]);
  auto native = [&] { return PyObject_Vectorcall(callable, args, nargsf, kwnames); };
  if (fake) {
    // as_tensor of a tensor is that tensor, or a conversion; of a list it copies, as tensor() and new_tensor() do.
    const bool of_list =
        strcmp(name, "as_tensor") == 0 && n > 0 && (PyList_CheckExact(args[0]) || PyTuple_Check(args[0]));
    if (of_list || strcmp(name, "tensor") == 0 || strcmp(name, "new_tensor") == 0) {
      static PyObject* copy = PyObject_GetAttrString(polyfills(), "copied_tensor");
      static PyObject* copy_as = PyObject_GetAttrString(polyfills(), "new_tensor");
      if (strcmp(name, "new_tensor") != 0) return call(copy, args, nargsf, kwnames);
      if (unbound) return call(copy_as, args, nargsf, kwnames);
      const py::Ref of = py::Ref::steal(PyMethod_New(copy_as, PyCFunction_GET_SELF(callable)));
      return of ? call(of.get(), args, nargsf, kwnames) : nullptr;
    }
    if (all > 0 && py::is_tensor(args[0])) return torch_call(callable, args, n, kwnames, native);
    return graph_break("tensor-constructor", std::string("torch.") + name + " of tensors");
  }
  if (strcmp(name, "new_tensor") == 0) return call_new_tensor(callable, args, n, kwnames);
  if (all > 0 && PyCapsule_CheckExact(args[0]))
    return graph_break("tensor-constructor", std::string("torch.") + name + " of a capsule, which it uses up");
  const bool shares =
      all > 0 && strcmp(name, "tensor") != 0 && PyObject_CheckBuffer(args[0]) && classify(args[0]) != Class::Constant;
  if (shares && (!is_made_array(*this, args[0]) || !is_writeable(args[0])))
    return graph_break("tensor-constructor", std::string("torch.") + name + " of memory that it shares");
  const bool array_lives_on = shares && !is_held_once(args[0]);
  at::Tensor t, in_rows;
  bool wanted = false;  // requires_grad
  {
    Paused paused_here(*this);
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard real;
    py::Ref made = py::Ref::steal(native());
    // Levels of torch.func.grad and the like have wrapped it.
    if (!made) return nullptr;
    static PyObject* const unwrap = PyObject_GetAttrString(PyImport_AddModule("torch._C._functorch"), "get_unwrapped");
    while (made && aten::is_wrapper(THPVariable_Unpack(made.get())))
      made = py::Ref::steal(PyObject_CallOneArg(unwrap, made.get()));
    if (!made) return nullptr;
    t = THPVariable_Unpack(made.get());
    wanted = t.requires_grad();
    if (wanted) t = t.variable_data();  // no operator: it may be inside of torch.func.grad
    in_rows = t.contiguous();
  }
  // An array, or a scalar of NumPy's, cannot be written into an fx graph.
  if (all > 0 && (PyObject_CheckBuffer(args[0]) || holds_numpy(args[0]))) torch_level_ok = false;
  const bool of_array = all > 0 && is_array(args[0]) && t.device().is_cpu();
  if (!of_array && !aten::can_be_constant(t))
    return graph_break("tensor-constructor", std::string("torch.") + name + " of much data or with options");
  if (wanted && (options.for_fx || aten::inside_transform()))
    return graph_break("tensor-constructor", std::string("torch.") + name + " with requires_grad");
  py::Ref kept;  // what is too much for the graph's text
  if (of_array && t.numel() > aten::kMaxConstant) {
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard real;
    kept = py::check(THPVariable_Wrap(in_rows.clone()));
  }
  const py::Ref stand_in = kept ? py::Ref::steal(see(kept.get(), child(SK::Const, nullptr, kept.get()))) : py::Ref();
  if (kept && !stand_in) return nullptr;
  PyObject* const made = torch_call(callable, args, n, kwnames, [&] {
    at::Tensor numbers = stand_in ? THPVariable_Unpack(stand_in.get()).clone() : aten::record_constant(trace, in_rows);
    // The copy of an array lies in memory as the array does.
    if (!t.is_contiguous()) numbers = at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(numbers);
    if (wanted) numbers.set_requires_grad(true);  // as a factory's, which torch_call makes a leaf
    return THPVariable_Wrap(aten::inside_transform() ? at::lift_fresh(numbers) : numbers);
  });
  if (made && array_lives_on) shared_arrays.emplace_back(args[0], THPVariable_Unpack(made), root_instruction);
  return made;
}

PyObject* Machine::call_run_backward(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (options.for_fx) return graph_break("autograd", "a backward, in a graph for a backend that takes fx graphs");
  static const char* kNames[] = {"tensors", "grad_tensors",      "keep_graph",     "create_graph",
                                 "inputs",  "allow_unreachable", "accumulate_grad"};
  PyObject* a[7] = {};
  const size_t n = PyVectorcall_NARGS(nargsf);
  const size_t skip = Py_TYPE(callable) == &PyMethodDescr_Type ? 1 : 0;
  for (size_t i = skip; i < n && i - skip < 7; ++i) a[i - skip] = args[i];
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i)
    for (int j = 0; j < 7; ++j)
      if (strcmp(PyUnicode_AsUTF8(PyTuple_GET_ITEM(kwnames, i)), kNames[j]) == 0)
        a[j] = args[n + static_cast<size_t>(i)];
  std::vector<at::Tensor> roots, grads, inputs;
  if (!a[0] || !a[1] || !tensors_of(a[0], &roots) || !tensors_of(a[1], &grads) ||
      (a[4] && a[4] != Py_None && !tensors_of(a[4], &inputs)))
    return graph_break("autograd", "a backward over other things than tensors");
  const bool accumulate = a[6] && a[6] == Py_True;
  if (backward_waits_for_loader()) return put_off_for(missing_loader);
  // Of a transform of torch.func, gradients are what the engine's operators compute.
  if (aten::inside_transform() || std::any_of(roots.begin(), roots.end(), aten::is_wrapper))
    return after_c_call(PyObject_Vectorcall(callable, args, nargsf, kwnames));
  if (running_hook) return graph_break("autograd", "a hook on a gradient that runs a backward");
  const size_t own_hooks = gradient_hooks.size();
  Reached reached = reached_by_backward(roots);
  std::vector<at::Tensor>& leaves = reached.leaves;
  if (reached.outside)
    return graph_break("autograd", "a backward that goes on into what was computed before the captured part");
  for (const at::Tensor& t : leaves) {
    py::Ref o = py::Ref::steal(THPVariable_Wrap(t));
    if (!o) return nullptr;
    const Known* k = find(o.get());
    if (!k || k->kind != Known::Kind::Tensor) continue;
    if (new_data(o.get())) return graph_break("autograd", "a backward by a tensor whose .data was written since");
    if (!guards::has_gradient_hooks(k->real.get()))
      guard(GK::NoHooks, k->source);
    else if (!add_hooks_of(t, *k))
      return nullptr;
  }
  const auto without_hooks = c10::make_scope_exit([&, end = gradient_hooks.size()] {
    for (size_t i = own_hooks; i < end; ++i) remove_gradient_hook(gradient_hooks[i]);
  });
  if (reached.hooks) return graph_break("autograd", "a backward that runs Python hooks");
  if (accumulate && !inputs.empty()) leaves = inputs;
  const graph::Arg roots_arg = values_of(roots), grads_arg = values_of(grads), inputs_arg = values_of(inputs);
  std::vector<py::Ref> leaf_objects;
  if (accumulate) {
    for (const at::Tensor& t : leaves) {
      py::Ref o = py::Ref::steal(THPVariable_Wrap(t));
      if (!o || !ensure_grad(o.get(), true)) return nullptr;
      if (t.grad().defined()) trace.value_of(t.grad());
      trace.value_of(t);
      leaf_objects.push_back(std::move(o));
    }
  }
  backward_leaves = accumulate ? leaves : std::vector<at::Tensor>();
  PyObject* r;
  {
    Paused paused_here(*this);
    aten::RecordingPaused no_recording;
    aten::FakeModeGuard fakes;
    aten::ShapesOnly shapes;
    r = PyObject_Vectorcall(callable, args, nargsf, kwnames);
  }
  if (!r) {
    // The engine's own complaints are the user's; anything else surfaces when the instruction runs in eager.
    return nullptr;
  }
  auto flag = [&](int i) { return graph::Arg(a[i] && a[i] != Py_None && PyObject_IsTrue(a[i]) == 1); };
  std::vector<graph::Arg> node_args{roots_arg, grads_arg, flag(2), flag(3)};
  if (accumulate) {
    node_args.push_back(inputs.empty() ? graph::Arg() : inputs_arg);
    node_args.push_back(graph::Arg(true));
    trace.record(graph::Op("kiln::backward"), std::move(node_args), {});
    for (const auto& [t, instruction] : retained) leaves.push_back(t);
    note_gradients(leaves);
    return r;
  }
  // roots, grads, inputs, retain_graph, create_graph, allow_unused
  std::vector<at::Tensor> results;
  if (!tensors_of(r, &results)) {
    Py_DECREF(r);
    return graph_break("autograd", "torch.autograd.grad with unusual results");
  }
  trace
      .record(graph::Op("kiln::autograd_grad"), {roots_arg, grads_arg, inputs_arg, flag(2), flag(3), flag(5)}, results)
      ->returns_list = true;
  return r;
}

}  // namespace kiln::capture
