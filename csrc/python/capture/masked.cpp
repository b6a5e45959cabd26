// Masks as indices (`x[mask]`): the program sees a kiln._masked.Masked, so that how many elements there are decides
// nothing. Where that is not enough the attempt ends; the next one takes the index as it is: see data_shapes.cpp.
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/transforms.h"
#include "ops/ops.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/leaver.h"
#include "python/capture/machine.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
PyObject* member(const char* name) { return member_of("kiln._masked", name); }

py::Ref attribute(PyObject* masked, const char* name) { return py::check(PyObject_GetAttrString(masked, name)); }

/// Whether isinstance() says of a tensor that it is of `type`, a class or a tuple of such; none if it must be asked.
std::optional<bool> is_of_class(PyObject* type, PyObject* tensor_type) {
  if (PyTuple_CheckExact(type)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type); ++i)
      if (const auto is = is_of_class(PyTuple_GET_ITEM(type, i), tensor_type); is.value_or(true)) return is;
    return false;
  }
  if (type == tensor_type || type == reinterpret_cast<PyObject*>(&PyBaseObject_Type)) return true;
  // Other metaclasses have checks of their own; what derives from Tensor is none of a plain one's.
  if (Py_TYPE(type) != &PyType_Type) return std::nullopt;
  return PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(tensor_type), reinterpret_cast<PyTypeObject*>(type)) != 0;
}

/// Whether C code that is called so looks into lists and tuples for tensors.
bool looks_inside(Policy policy) {
  switch (policy) {
    case Policy::Torch:
    case Policy::TensorData:
    case Policy::Polyfill:
    case Policy::Item:
    case Policy::Paused:
    case Policy::RunBackward:
    case Policy::CustomFunction:
    case Policy::GradientHook:
    case Policy::Branch:
    case Policy::Checkpoint:
    case Policy::OfConstants:
    case Policy::MakeParameter:
    case Policy::RequiresGrad:
    case Policy::Unknown:
      return true;
    default:
      return false;
  }
}
}  // namespace

PyTypeObject* masked_type() {
  static PyObject* t = member("Masked");
  return reinterpret_cast<PyTypeObject*>(t);
}

bool Machine::is_masked(PyObject* o) const { return has_masked && o && Py_TYPE(o) == masked_type(); }

PyObject* Machine::masked_among(PyObject* const* args, size_t n, bool nested) const {
  for (size_t i = 0; has_masked && i < n; ++i) {
    if (is_masked(args[i])) return args[i];
    if (!nested || !args[i] || !(PyList_CheckExact(args[i]) || PyTuple_CheckExact(args[i]))) continue;
    PyObject** items = PySequence_Fast_ITEMS(args[i]);
    if (PyObject* masked = masked_among(items, static_cast<size_t>(Py_SIZE(args[i])), nested)) return masked;
  }
  return nullptr;
}

PyObject* Machine::specialize_masked(PyObject* masked) {
  const py::Ref selection = attribute(masked, "_selection");
  return need_values(attribute(selection.get(), "sources").get());
}

bool Machine::may_select(PyObject* x, PyObject* mask) {
  if (!options.masks || !options.item_numbers || options.for_fx || aten::inside_transform() ||
      py::function_mode_active() || !py::is_tensor(x) || !py::is_tensor(mask) || !is_plain_tensor(mask) ||
      asks_class(x) || Py_TYPE(x) != reinterpret_cast<PyTypeObject*>(names().tensor_type))
    return false;
  const at::Tensor of = THPVariable_Unpack(x), m = THPVariable_Unpack(mask);
  if (!aten::is_fake(of) || !aten::is_fake(m) || m.scalar_type() != at::kBool || m.is_inference() ||
      of.is_inference() || m.dim() == 0 || m.dim() > of.dim() || m.sizes() != of.sizes().slice(0, m.dim()) ||
      of.is_complex() || !of.device().is_cpu() || !m.device().is_cpu())
    return false;
  // One mask that is the same in all calls selects as many elements in all of them.
  if (!options.masks_change && may_decide(m)) return false;
  return !options.breaking_items.contains(kMask + call_site());
}

py::Ref Machine::mask_of_key(PyObject* key) {
  if (!PyTuple_CheckExact(key) || PyTuple_GET_SIZE(key) < 2) return {};
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(key); ++i)
    if (PyObject* const o = PyTuple_GET_ITEM(key, i); !PySlice_Check(o) && !PyLong_CheckExact(o)) return {};
  return py::Ref::borrow(PyTuple_GET_ITEM(key, 0));
}

PyObject* Machine::part_behind_mask(PyObject* x, PyObject* key) {
  static PyObject* const part = member("part");
  const py::Ref rest = py::check(PyTuple_GetSlice(key, 1, PyTuple_GET_SIZE(key)));
  PyObject* const given[] = {x, PyTuple_GET_ITEM(key, 0), rest.get()};
  return call(part, given, 3, nullptr);
}

PyObject* Machine::select_masked(PyObject* x, PyObject* mask) {
  if (const py::Ref first = mask_of_key(mask); first && may_select(x, first.get())) {
    const py::Ref part = py::Ref::steal(part_behind_mask(x, mask));
    return part ? select_masked(part.get(), first.get()) : nullptr;
  }
  if (!may_select(x, mask)) return nullptr;
  has_masked = true;
  static PyObject *const first = member("select"), *const further = member("selected");
  py::Ref masked;
  if (const py::Ref selection = selection_of(mask)) {
    PyObject* const args[] = {x, mask, selection.get()};
    masked = py::Ref::steal(call(further, args, 3, nullptr));
  } else {
    const py::Ref text = py::check(PyUnicode_FromString((kMask + call_site()).c_str()));
    PyObject* const args[] = {x, mask, text.get()};
    masked = py::Ref::steal(call(first, args, 3, nullptr));
  }
  if (!masked) return nullptr;
  selected.push_back({masked, py::Ref::borrow(x), py::Ref::borrow(mask), attribute(masked.get(), "_values"),
                      writes_of(x), writes_of(mask)});
  return masked.release();
}

size_t Machine::writes_of(PyObject* tensor) {
  index_nodes();
  const graph::Value value = trace.find(THPVariable_Unpack(tensor));
  const auto written = value ? writers_.find(bases_.of(value)) : writers_.end();
  return written == writers_.end() ? 0 : written->second.size();
}

bool Machine::is_same_mask(PyObject* a, PyObject* b) {
  if (a == b) return true;
  index_nodes();
  const auto writers = [&](graph::Value v) -> const std::vector<graph::Node*>& {
    static const std::vector<graph::Node*> none;
    const auto it = writers_.find(bases_.of(v));
    return it == writers_.end() ? none : it->second;
  };
  const auto takes_size = [&](const graph::Node* n) {
    return trace.sizes && std::ranges::any_of(trace.sizes->arguments(), [&](const auto& a) { return a.node == n; });
  };
  // Computed alike, of memory that nothing writes in between.
  const std::function<bool(graph::Value, graph::Value)> same = [&](graph::Value x, graph::Value y) {
    if (x == y) return true;
    const graph::Node &m = *x.node, &n = *y.node;
    if (m.kind != graph::NodeKind::Call || m.op != n.op || m.results.size() != 1 || m.args.size() != n.args.size() ||
        !ops::is_pointwise(m.op) || !writers(x).empty() || !writers(y).empty() || takes_size(&m) || takes_size(&n))
      return false;
    const size_t from = node_order_.at(&m), to = node_order_.at(&n);
    for (size_t i = 0; i < m.args.size(); ++i) {
      const graph::Arg &p = m.arg(i), &q = n.arg(i);
      if (!p.is<graph::Value>() || !q.is<graph::Value>()) {
        if (p.is_list() || !(p == q)) return false;
        continue;
      }
      if (!p.value() || !q.value() || !same(p.value(), q.value())) return false;
      for (const graph::Node* w : writers(p.value()))
        if (const size_t at = node_order_.at(w); at > std::min(from, to) && at < std::max(from, to)) return false;
    }
    return true;
  };
  const graph::Value x = trace.find(THPVariable_Unpack(a)), y = trace.find(THPVariable_Unpack(b));
  return x && y && same(x, y) && writers(x).empty() && writers(y).empty();
}

py::Ref Machine::selection_of(PyObject* mask) {
  for (const Selected& s : selected)
    if (s.mask_writes == writes_of(s.mask.get()) && is_same_mask(s.mask.get(), mask))
      return attribute(s.masked.get(), "_selection");
  return {};
}

const Machine::Selected* Machine::unchanged_selection(PyObject* masked) {
  for (const Selected& s : selected)
    if (s.masked.get() == masked && s.values.get() == attribute(masked, "_values").get() &&
        s.x_writes == writes_of(s.x.get()) && s.mask_writes == writes_of(s.mask.get()))
      return &s;
  return nullptr;
}

RecipePtr Leaver::masked(PyObject* o) {
  static PyObject* const materialized = member("materialized");
  const py::Ref selection = attribute(o, "_selection"), values = attribute(o, "_values");
  if (attribute(o, "_alone").get() != Py_True) {
    m.specialize_masked(o);
    throw NotRebuildable{"elements that a mask selected and that share memory with others"};
  }
  RecipePtr r = begin(o, Recipe::Kind::Call);
  r->object = py::Ref::borrow(materialized);
  if (const Machine::Selected* s = m.unchanged_selection(o))
    r->parts = {recipe(s->x.get()), recipe(s->mask.get())};
  else
    r->parts = {recipe(values.get()), recipe(attribute(selection.get(), "mask").get())};
  r->parts.push_back(constant(THPVariable_Unpack(values.get()).requires_grad() ? Py_True : Py_False));
  return r;
}

PyObject* Machine::operate_on_masked(const char* op, PyObject* const* args, size_t n) {
  PyObject* const masked = masked_among(args, n, /*nested=*/false);
  const std::string_view name = op;
  if (name == "setitem") {
    if (!is_masked(args[0]) && !is_masked(args[1]) && !(py::is_tensor(args[0]) && masked)) return nullptr;
    static PyObject* const store = member("store");
    const py::Ref first = mask_of_key(args[1]);
    PyObject* const mask = first ? first.get() : args[1];
    const bool whole = py::is_tensor(args[0]) && py::is_tensor(mask) && is_masked(args[2]);
    const py::Ref selection = whole ? selection_of(mask) : py::Ref();
    if (!selection || selection.get() != attribute(args[2], "_selection").get()) return specialize_masked(masked);
    const py::Ref to = first ? py::Ref::steal(part_behind_mask(args[0], args[1])) : py::Ref::borrow(args[0]);
    PyObject* const given[] = {to.get(), args[2]};
    return to ? call(store, given, 2, nullptr) : nullptr;
  }
  if (name == "getitem" && !is_masked(args[0])) {
    PyObject* const inside = py::is_tensor(args[0]) ? masked_among(args + 1, n - 1, /*nested=*/true) : masked;
    return inside ? specialize_masked(inside) : nullptr;
  }
  if (!masked) return nullptr;
  if (name == "getitem") {
    static PyObject* const getitem = member("getitem");
    return call(getitem, args, 2, nullptr);
  }
  for (size_t i = 0; i < n; ++i)
    if (!is_masked(args[i]) && !py::is_tensor(args[i]) && !is_number(args[i]) && !is_open_number(args[i]) &&
        !PyFloat_CheckExact(args[i]) && !PyLong_CheckExact(args[i]) && !PyBool_Check(args[i]))
      return specialize_masked(masked);
  static PyObject* const operate = member("operate");
  const py::Ref text = py::check(PyUnicode_FromString(op));
  std::vector<PyObject*> given{text.get()};
  given.insert(given.end(), args, args + n);
  return call(operate, given.data(), given.size(), nullptr);
}

PyObject* Machine::call_on_masked(PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames) {
  static PyObject* const functions = member("FUNCTIONS");
  PyObject* const handler = PyDict_GetItem(functions, callable);
  return handler ? call_instead(handler, callable, args, kwnames) : nullptr;
}

PyObject* Machine::call_c_on_masked(PyObject* callable, PyObject* self, PyObject* const* args, size_t n,
                                    PyObject* kwnames) {
  const Policy policy = policy_of(callable);
  std::vector<PyObject*> all;
  if (self) all.push_back(self);
  all.insert(all.end(), args, args + count_of(n, kwnames));
  PyObject* const masked = masked_among(all.data(), all.size(), looks_inside(policy));
  if (!masked || policy == Policy::Number || policy == Policy::Break) return nullptr;
  // x.mul, whose receiver comes first.
  PyObject* function = callable;
  if (self && py::is_tensor(self))
    if (PyObject* method = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(names().tensor_type),
                                          py::Ref::steal(PyUnicode_InternFromString(name_of(callable))).get()))
      function = method;
  if (PyObject* r = call_on_masked(function, all, kwnames); r || PyErr_Occurred()) return r;
  // What only keeps it, or asks for its class.
  PyObject* const receiver = all[0];
  const std::string_view name = name_of(callable);
  const bool keeps =
      policy == Policy::Pure && !is_masked(receiver) && (PyList_Check(receiver) || PyDict_Check(receiver));
  const bool stores = policy == Policy::SetAttr || policy == Policy::ObjectSetAttr;
  if (keeps || stores) return nullptr;
  if (name == "isinstance" && all.size() == 2 && is_masked(all[0]))
    if (const auto is = is_of_class(all[1], names().tensor_type)) return PyBool_FromLong(*is);
  return specialize_masked(masked);
}

}  // namespace kiln::capture
