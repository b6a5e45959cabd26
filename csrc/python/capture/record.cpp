// The torch-level graph: one node for each call to torch that the user's program made.
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

#include <cctype>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/transforms.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
/// A placeholder's name from its path: L['self'].__dict__['_modules']['fc'].__dict__['_parameters']['weight'] is
/// l_self_modules_fc_parameters_weight_.
std::string input_name(const std::string& path) {
  std::string s = path, out;
  for (size_t at; (at = s.find(".__dict__")) != std::string::npos;) s.erase(at, 9);
  for (char c : s) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      out += c;
    else if (out.empty() || out.back() != '_')
      out += '_';
  }
  if (!out.empty() && out[0] == 'L') out[0] = 'l';
  if (!out.empty() && out[0] == 'G') out[0] = 'g';
  return out;
}
}  // namespace

/// The modes of a torch-level call, as they are now.
static void set_modes(graph::Node& node) {
  const aten::Modes now;
  node.grad_enabled = now.grad;
  node.autocast = now.autocast ? aten::dtype_of(now.autocast_dtype) : DType::Opaque;
}

bool is_module_state(const guards::Source& s) {
  if (s.kind != guards::Source::Kind::DictItem || !s.base || s.base->kind != guards::Source::Kind::DictItem)
    return false;
  PyObject* store = s.base->object.get();
  return PyUnicode_Check(store) &&
         (PyUnicode_Compare(store, names().parameters) == 0 || PyUnicode_Compare(store, names().buffers) == 0);
}

graph::Value Machine::input_value(const at::Tensor& t) {
  py::Ref o = py::Ref::steal(THPVariable_Wrap(t));
  if (o && aten::is_wrapper(t)) {  // what is left of a dual tensor when its level has ended is the tensor itself
    static PyObject* const functorch = PyObject_GetAttrString(PyImport_AddModule("torch._C"), "_functorch");
    const py::Ref inner = py::Ref::steal(PyObject_CallMethod(functorch, "unwrap_if_dead", "O", o.get()));
    if (inner && inner.get() != o.get()) return trace.value_of(THPVariable_Unpack(inner.get()));
    PyErr_Clear();
    return {};
  }
  Known* k = o ? find(o.get()) : nullptr;
  if (!k || k->kind != Known::Kind::Tensor) {
    PyErr_Clear();
    return {};
  }
  if (t.is_meta()) return {};  // a module without data, which torch.func.functional_call gives parameters
  activate(*k);
  const std::string name = input_name(k->source->text());
  graph::Node* node = trace.graph().add_input(name, aten::meta_of(t));
  node->frozen = is_module_state(*k->source);
  if (trace.sizes && open_dims(*k)) trace.sizes->open(node);
  graph::Node* twin = torch_level->add_input(name, node->results[0]);
  to_torch[node->out()] = twin->out();
  result.inputs.push_back({k->source, node->name});
  result.example_inputs.push_back(k->real);
  return node->out();
}

graph::Value Machine::torch_value_of(PyObject* tensor) {
  const graph::Value v = trace.value_of(THPVariable_Unpack(tensor));
  auto it = to_torch.find(v);
  return v && it != to_torch.end() ? it->second : graph::Value{};
}

namespace {
constexpr std::string_view kTarget = "target::", kSize = "size::";

std::optional<size_t> index_behind(std::string_view mark, std::string_view name) {
  if (!name.starts_with(mark)) return std::nullopt;
  return std::stoul(std::string(name.substr(mark.size())));
}
}  // namespace

std::optional<size_t> target_index(std::string_view name) { return index_behind(kTarget, name); }

std::optional<size_t> size_index(std::string_view name) { return index_behind(kSize, name); }

graph::Arg Machine::size_arg(const symbolic::Number& n) {
  result.torch_sizes.push_back(n);
  return graph::Arg(std::string(kSize) + std::to_string(result.torch_sizes.size() - 1));
}

graph::Op Machine::target_op(PyObject* target) {
  auto it = target_index.find(target);
  if (it == target_index.end()) {
    it = target_index.emplace(target, static_cast<int>(result.torch_targets.size())).first;
    result.torch_targets.push_back(py::Ref::borrow(target));
  }
  return graph::Op(std::string(kTarget) + std::to_string(it->second));
}

bool Machine::to_arg(PyObject* o, graph::Arg* out) {
  using graph::Arg;
  if (o == Py_None) {
    *out = Arg();
  } else if (is_open_number(o)) {
    const symbolic::Number n = open_number(o);
    *out = options.for_fx ? size_arg(n) : aten::hint_arg(*trace.sizes, n);
  } else if (PyBool_Check(o)) {
    *out = Arg(o == Py_True);
  } else if (PyLong_Check(o)) {
    int overflow = 0;
    const long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (overflow) return false;
    *out = Arg(static_cast<int64_t>(v));
  } else if (PyFloat_Check(o)) {
    *out = Arg(PyFloat_AS_DOUBLE(o));
  } else if (PyComplex_Check(o)) {
    const Py_complex c = PyComplex_AsCComplex(o);
    *out = Arg(std::complex<double>(c.real, c.imag));
  } else if (is_numpy_scalar(Py_TYPE(o))) {
    py::Ref number = py::Ref::steal(PyObject_CallMethod(o, "item", nullptr));  // as operators take it
    if (number && !is_numpy_scalar(Py_TYPE(number.get()))) return to_arg(number.get(), out);
    PyErr_Clear();
    return false;
  } else if (PyUnicode_Check(o)) {
    *out = Arg(std::string(PyUnicode_AsUTF8(o)));
  } else if (py::is_tensor(o)) {
    const graph::Value v = torch_value_of(o);
    if (!v) return false;
    *out = Arg(v);
  } else if (THPDtype_Check(o)) {
    *out = Arg(aten::dtype_of(reinterpret_cast<THPDtype*>(o)->scalar_type));
  } else if (THPDevice_Check(o)) {
    *out = Arg(aten::device_of(reinterpret_cast<THPDevice*>(o)->device));
  } else if (THPLayout_Check(o)) {
    *out = Arg(aten::layout_of(reinterpret_cast<THPLayout*>(o)->layout));
  } else if (THPMemoryFormat_Check(o)) {
    *out = Arg(aten::memory_format_of(reinterpret_cast<THPMemoryFormat*>(o)->memory_format));
  } else if (PyTuple_Check(o) || PyList_Check(o)) {
    Arg::List list;
    if (PyTuple_Check(o)) list.emplace_back("tuple");  // x[0, 1] is not x[[0, 1]]
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) {
      Arg a;
      if (!to_arg(PySequence_Fast_GET_ITEM(o, i), &a)) return false;
      list.push_back(std::move(a));
    }
    *out = Arg(std::move(list));
  } else if (PySlice_Check(o)) {
    auto* s = reinterpret_cast<PySliceObject*>(o);
    Arg start, stop, step;
    if (!to_arg(s->start, &start) || !to_arg(s->stop, &stop) || !to_arg(s->step, &step)) return false;
    *out = Arg(Arg::List{Arg("slice"), start, stop, step});
  } else if (o == Py_Ellipsis) {
    *out = Arg("...");
  } else if (has_fake(o) || PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(o)), "__torch_function__")) {
    return false;  // the latter has the call done by what it calls in turn
  } else {
    *out = Arg(target_op(o).name());
  }
  return true;
}

bool Machine::record_torch_level(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames, PyObject* r) {
  ++result.num_ops;
  if (!torch_level_ok) return true;
  std::vector<graph::Arg> list(n);
  for (size_t i = 0; i < n; ++i)
    if (!to_arg(args[i], &list[i])) return torch_level_ok = false, true;
  std::vector<std::pair<std::string, graph::Arg>> kwargs;
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i) {
    graph::Arg a;
    if (!to_arg(args[n + static_cast<size_t>(i)], &a)) return torch_level_ok = false, true;
    kwargs.emplace_back(PyUnicode_AsUTF8(PyTuple_GET_ITEM(kwnames, i)), std::move(a));
  }
  std::string hint = "call";
  if (py::Ref name = py::Ref::steal(PyObject_GetAttr(target, names().name)); name && PyUnicode_Check(name.get()))
    hint = PyUnicode_AsUTF8(name.get());
  else
    PyErr_Clear();
  if (hint == "getattr" && n == 2 && PyUnicode_Check(args[1])) hint = PyUnicode_AsUTF8(args[1]);
  std::vector<PyObject*> tensors;
  const bool sequence = PyTuple_Check(r) || PyList_Check(r);
  if (py::is_tensor(r)) tensors.push_back(r);
  for (Py_ssize_t i = 0; sequence && i < PySequence_Fast_GET_SIZE(r); ++i) {
    PyObject* o = PySequence_Fast_GET_ITEM(r, i);
    if (py::is_tensor(o))
      tensors.push_back(o);
    else if (o != Py_None)
      return torch_level_ok = false, true;
  }
  std::vector<graph::TensorMeta> metas;
  for (PyObject* o : tensors) metas.push_back(aten::meta_of(THPVariable_Unpack(o)));
  graph::Node* node = torch_level->add_call(target_op(target), std::move(list), std::move(metas), hint);
  node->kwargs = std::move(kwargs);
  node->returns_list = sequence;
  set_modes(*node);
  if (trace.stack_trace) node->stack = trace.stack_trace();
  uint32_t i = 0;
  for (PyObject* o : tensors) {
    const graph::Value v = trace.value_of(THPVariable_Unpack(o));
    const graph::Value made = node->out(i++);
    if (!v) continue;
    if (const auto [twin, fresh] = to_torch.try_emplace(v, made); !fresh) {
      made_as.emplace(v, twin->second);
      twin->second = made;
    }
  }
  return true;
}

/// An operator call that no instruction's call stands for: it appears at torch level under its own name.
void Machine::mirror_node(graph::Node& traced) {
  if (torch_depth > 0 || !torch_level_ok) return;
  std::vector<graph::Arg> args = traced.args;
  for (graph::Arg& a : args)
    graph::for_each_value(a, [&](graph::Value& v) {
      auto it = to_torch.find(v);
      if (it == to_torch.end())
        torch_level_ok = !v;
      else
        v = it->second;
    });
  if (!torch_level_ok) return;
  graph::Node* node = torch_level->add_call(traced.op, std::move(args), traced.results);
  node->returns_list = traced.returns_list;
  set_modes(*node);
  node->stack = traced.stack;
  for (uint32_t i = 0; i < traced.results.size(); ++i) to_torch[traced.out(i)] = node->out(i);
  ++result.num_ops;
}

/// What a torch-level graph has to know to be right for other sizes, too.
void Machine::finish_torch_sizes() {
  const auto twin_of = [&](graph::Value v) {
    const auto it = v ? to_torch.find(v) : to_torch.end();
    return it == to_torch.end() ? graph::Value() : it->second;
  };
  // Of mirrored calls: the others' arguments are the user's.
  for (const aten::Sizes::Argument& a : trace.sizes->arguments()) {
    const graph::Value twin =
        a.node->results.empty() ? graph::Value() : twin_of(const_cast<graph::Node*>(a.node)->out());
    if (!twin || twin.node->op != a.node->op) continue;
    graph::Arg& arg = twin.node->args.at(a.arg);
    if (a.item >= 0)
      std::get<graph::Arg::List>(arg.data).at(static_cast<size_t>(a.item)) = size_arg(a.number);
    else
      arg = size_arg(a.number);
  }
  // A size may be asked for before a write.
  for (const aten::Sizes::Leaf& leaf : trace.sizes->leaves()) {
    const auto first = made_as.find(leaf.value);
    result.torch_leaves.push_back(first != made_as.end() ? first->second : twin_of(leaf.value));
  }
}

}  // namespace kiln::capture
