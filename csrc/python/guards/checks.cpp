#include "python/guards/checks.h"

#include <algorithm>
#include <cstring>

#include "aten/convert.h"
#include "base/hash.h"
#include "python/cpython/tensor.h"
#include "python/guards/contents.h"
#include "python/guards/text.h"
#include "python/pch.h"

namespace kiln::guards {
namespace {

/// None for a view that autograd refuses to tell the history of: its base was written where that is forbidden.
std::optional<bool> leaf(const c10::TensorImpl* impl, const at::Tensor& t) {
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
  if (!meta) return true;
  // A view's grad_fn is made anew after its base was written; only the slow path knows that.
  try {
    if (meta->is_view_) return t.grad_fn() == nullptr;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return meta->grad_fn_ == nullptr;
}

}  // namespace

TensorFacts tensor_facts(const Guard& guard) {
  TensorFacts f;
  f.type = reinterpret_cast<PyTypeObject*>(guard.object.get());
  f.key_set = guard.number;
  f.scalar_type = guard.meta.dtype == DType::Opaque ? -1 : static_cast<int16_t>(aten::scalar_type_of(guard.meta.dtype));
  const bool known = guard.meta.device.type != graph::DeviceType::Other;
  f.device_type = known ? static_cast<int16_t>(aten::to_device(guard.meta.device).type()) : -1;
  f.device_index = guard.meta.device.index;
  f.dim = static_cast<int16_t>(guard.meta.sizes.size());
  f.requires_grad = guard.meta.requires_grad;
  f.is_leaf = guard.is_leaf;
  f.any_dims = guard.any_dims;
  std::vector<int64_t> all = guard.meta.sizes;
  all.insert(all.end(), guard.meta.strides.begin(), guard.meta.strides.end());
  f.has_strides = guard.meta.strides.size() == guard.meta.sizes.size() && !f.any_dims;
  if (f.dim <= 4)
    std::copy(all.begin(), all.end(), f.few.begin());
  else
    f.many = std::move(all);
  return f;
}

bool check_tensor(PyObject* o, const TensorFacts& f) {
  if (f.type ? Py_TYPE(o) != f.type : !py::is_tensor(o)) return false;
  const at::Tensor& t = THPVariable_Unpack(o);
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (f.key_set && impl->key_set().raw_repr() != f.key_set) return false;
  if (f.scalar_type >= 0 && static_cast<int16_t>(impl->dtype().toScalarType()) != f.scalar_type) return false;
  if (impl->has_symbolic_sizes_strides() || impl->dim() != f.dim) return false;
  if (f.device_type >= 0) {
    const c10::Device device = impl->device();
    if (static_cast<int16_t>(device.type()) != f.device_type || device.index() != f.device_index) return false;
  }
  const size_t bytes = static_cast<size_t>(f.dim) * sizeof(int64_t);
  if (f.any_dims) {
    if (impl->layout() != at::kStrided) return false;
    for (int64_t i = 0; i < f.dim; ++i)
      if (!(f.any_dims >> i & 1) && impl->sizes()[static_cast<size_t>(i)] != f.sizes_strides()[i]) return false;
  } else if (f.dim) {
    if (std::memcmp(impl->sizes().data(), f.sizes_strides(), bytes) != 0) return false;
    if (f.has_strides && impl->layout() == at::kStrided &&
        std::memcmp(impl->strides().data(), f.sizes_strides() + f.dim, bytes) != 0)
      return false;
  }
  if (impl->requires_grad() != f.requires_grad || impl->is_wrapped_number()) return false;
  return leaf(impl, t) == f.is_leaf;
}

std::optional<uint64_t> other_sizes(PyObject* o, const TensorFacts& f) {
  if (!py::is_tensor(o)) return std::nullopt;
  const c10::TensorImpl* impl = THPVariable_Unpack(o).unsafeGetTensorImpl();
  if (f.key_set && impl->key_set().raw_repr() != f.key_set) return std::nullopt;  // a nested tensor has no sizes
  if (impl->has_symbolic_sizes_strides() || impl->dim() != f.dim || impl->layout() != at::kStrided) return std::nullopt;
  TensorFacts own = f;
  int64_t* values = f.dim <= 4 ? own.few.data() : own.many.data();
  std::copy(impl->sizes().begin(), impl->sizes().end(), values);
  if (f.has_strides) std::copy(impl->strides().begin(), impl->strides().end(), values + f.dim);
  if (!check_tensor(o, own)) return std::nullopt;
  size_t hash = 0;
  for (int64_t i = 0; i < f.dim * (f.has_strides ? 2 : 1); ++i) hash_combine(hash, values[i]);
  return hash;
}

uint64_t other_dims(PyObject* o, const TensorFacts& f) {
  if (!other_sizes(o, f)) return 0;
  const c10::IntArrayRef sizes = THPVariable_Unpack(o).sizes();
  uint64_t dims = 0;
  for (size_t i = 0; i < sizes.size() && i < 64; ++i)
    if (sizes[i] != f.sizes_strides()[i]) dims |= uint64_t{1} << i;
  return dims;
}

std::string explain_tensor(PyObject* o, const TensorFacts& f) {
  const auto differ = [](const std::string& what, const std::string& expected, const std::string& got) {
    return what + ": expected " + expected + ", got " + got;
  };
  if (!py::is_tensor(o)) return differ("type", "a tensor", Py_TYPE(o)->tp_name);
  if (f.type && Py_TYPE(o) != f.type) return differ("class", f.type->tp_name, Py_TYPE(o)->tp_name);
  const at::Tensor& t = THPVariable_Unpack(o);
  if (f.scalar_type >= 0 && static_cast<int16_t>(t.scalar_type()) != f.scalar_type)
    return differ("dtype", c10::toString(static_cast<at::ScalarType>(f.scalar_type)), c10::toString(t.scalar_type()));
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides()) return "its sizes are symbolic";
  const auto keys_differ = [&] {
    return differ("dispatch keys", c10::toString(c10::DispatchKeySet(c10::DispatchKeySet::RAW, f.key_set)),
                  c10::toString(impl->key_set()));
  };
  if (impl->key_set().has(c10::DispatchKey::NestedTensor)) return keys_differ();  // it has no sizes
  if (impl->dim() != f.dim) return differ("rank", std::to_string(f.dim), std::to_string(impl->dim()));
  for (int64_t i = 0; i < f.dim; ++i)
    if (!(f.any_dims >> i & 1) && impl->sizes()[i] != f.sizes_strides()[i])
      return differ("size " + std::to_string(i), std::to_string(f.sizes_strides()[i]),
                    std::to_string(impl->sizes()[i]));
  if (impl->layout() == at::kStrided && f.has_strides)
    for (int64_t i = 0; i < f.dim; ++i)
      if (impl->strides()[i] != f.sizes_strides()[f.dim + i])
        return differ("stride " + std::to_string(i), std::to_string(f.sizes_strides()[f.dim + i]),
                      std::to_string(impl->strides()[i]));
  if (f.device_type >= 0 &&
      (static_cast<int16_t>(impl->device().type()) != f.device_type || impl->device().index() != f.device_index))
    return "device differs, got " + impl->device().str();
  if (impl->requires_grad() != f.requires_grad)
    return differ("requires_grad", f.requires_grad ? "True" : "False", f.requires_grad ? "False" : "True");
  const std::optional<bool> is_leaf = leaf(impl, t);
  if (!is_leaf) return "a view of what was written, which autograd refuses";
  if (*is_leaf != f.is_leaf) return f.is_leaf ? "it is no longer a leaf" : "it is a leaf now";
  if (f.key_set && impl->key_set().raw_repr() != f.key_set) return keys_differ();
  return "";
}

namespace {
const torch::autograd::AutogradMeta* autograd_meta_of(PyObject* tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(THPVariable_Unpack(tensor).unsafeGetTensorImpl()->autograd_meta());
}
}  // namespace

bool has_gradient_hooks(PyObject* o) {
  if (!py::is_tensor(o)) return true;
  const auto* meta = autograd_meta_of(o);
  return meta && (!meta->hooks_.empty() || meta->post_acc_grad_hooks_ || has_accumulator_hooks(o));
}

bool has_accumulator_hooks(PyObject* o) {
  if (!py::is_tensor(o)) return true;
  const auto* meta = autograd_meta_of(o);
  if (!meta || meta->grad_accumulator_.expired()) return false;
  const auto node = meta->grad_accumulator_.lock();
  return node && (!node->pre_hooks().empty() || !node->post_hooks().empty());
}

bool same_constant(PyObject* a, PyObject* b) {
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  // Checks of base classes: with the types equal, what a derived class adds is not its value.
  if (PyFloat_Check(a)) {
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a == b) return true;
  if (PyLong_Check(a)) {
    const Py_ssize_t n = Py_SIZE(a);
    if (n != Py_SIZE(b)) return false;
    const auto* x = reinterpret_cast<PyLongObject*>(a);
    const auto* y = reinterpret_cast<PyLongObject*>(b);
    return std::memcmp(x->ob_digit, y->ob_digit, static_cast<size_t>(n < 0 ? -n : n) * sizeof(digit)) == 0;
  }
  if (PyUnicode_Check(a)) return PyUnicode_Compare(a, b) == 0;
  if (PyBytes_Check(a))
    return Py_SIZE(a) == Py_SIZE(b) &&
           std::memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), static_cast<size_t>(Py_SIZE(a))) == 0;
  if (PyComplex_Check(a)) {
    const Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (PyTuple_Check(a)) {
    // torch.Size is a tuple of ints as well.
    const Py_ssize_t n = PyTuple_GET_SIZE(a);
    if (n != PyTuple_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!same_constant(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
    return true;
  }
  if (PySlice_Check(a)) {
    auto* x = reinterpret_cast<PySliceObject*>(a);
    auto* y = reinterpret_cast<PySliceObject*>(b);
    return same_constant(x->start, y->start) && same_constant(x->stop, y->stop) && same_constant(x->step, y->step);
  }
  if (PyFrozenSet_CheckExact(a)) {
    if (PySet_GET_SIZE(a) != PySet_GET_SIZE(b)) return false;
    // Both orders follow the hashes; equal sets built alike iterate alike, and others are told apart at worst.
    Py_ssize_t i = 0, j = 0;
    PyObject *x, *y;
    Py_hash_t hash;
    while (_PySet_NextEntry(a, &i, &x, &hash)) {
      if (!_PySet_NextEntry(b, &j, &y, &hash) || !same_constant(x, y)) return false;
    }
    return true;
  }
  if (PyObject_CheckBuffer(a)) return same_contents(a, b);  // NumPy's scalars
  if (Py_TYPE(a)->tp_flags & Py_TPFLAGS_HEAPTYPE) return false;
  if (strcmp(Py_TYPE(a)->tp_name, "decimal.Decimal") == 0) {  // 1.0 == 1.00, but they are not alike
    py::Ref x = py::Ref::steal(PyObject_Str(a)), y = py::Ref::steal(PyObject_Str(b));
    if (!x || !y) PyErr_Clear();
    return x && y && PyUnicode_Compare(x.get(), y.get()) == 0;
  }
  py::Ref r = py::Ref::steal(PyObject_RichCompare(a, b, Py_EQ));
  if (!r) {
    PyErr_Clear();
    return false;
  }
  return r.get() == Py_True;
}

bool is_c_accessor(PyObject* descr) {
  PyTypeObject* t = Py_TYPE(descr);
  if (t == &PyGetSetDescr_Type || t == &PyMemberDescr_Type) return true;
  if (!t->tp_descr_get || !t->tp_descr_set) return false;
  static PyObject* name = PyUnicode_InternFromString("__get__");
  if (!PyType_IsSubtype(t, &PyProperty_Type)) {
    PyObject* get = _PyType_Lookup(t, name);
    return get && !PyFunction_Check(get);
  }
  const py::Ref getter = py::Ref::steal(PyObject_GetAttrString(descr, "fget"));
  PyErr_Clear();
  return getter && PyCFunction_Check(getter.get());
}

}  // namespace kiln::guards
