// Sizes that are left open (kiln.compile(dynamic=True), kiln.mark_dynamic): captured code that asks a tensor for its
// shape sees kiln._sizes.Size in the place of ints. Arithmetic gives another; a comparison gives a truth and a
// condition on the sizes for which the graph is right; whatever else wants the number gets it and pins it by a
// condition. So C code that knows nothing of Size is as good as any: it asks for an index.
#include "aten/sizes.h"

#include <torch/csrc/Size.h>
#include <torch/csrc/utils/python_symnode.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/machine.h"
#include "python/capture/sizes.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

using aten::Sizes;
using symbolic::Expr;
using symbolic::Real;

namespace {
PyTypeObject* type_of_sizes = nullptr;
Machine* capturing = nullptr;  // the capture whose sizes these are; under the GIL

PyObject* node_name() {
  static PyObject* name = PyUnicode_InternFromString("node");
  return name;
}
}  // namespace

PyTypeObject* size_type() { return type_of_sizes; }
Sizes* sizes_of_capture() { return capturing ? capturing->trace.sizes.get() : nullptr; }

c10::SymNode node_of(PyObject* number) {
  const py::Ref node = py::check(PyObject_GetAttr(number, node_name()));
  return pybind11::handle(node.get()).cast<c10::SymNode>();
}

std::optional<Expr> expr_of(PyObject* o) {
  if (PyLong_Check(o)) {
    int overflow = 0;
    const long long n = PyLong_AsLongLongAndOverflow(o, &overflow);
    constexpr long long kMost = 1LL << 40;
    if (overflow || n > kMost || n < -kMost) return std::nullopt;
    return Expr(static_cast<int64_t>(n));
  }
  if (Py_TYPE(o) != type_of_sizes) return std::nullopt;
  const Expr* e = Sizes::expr_of(node_of(o));
  return e ? std::optional(*e) : std::nullopt;
}

PyObject* made_with_node(PyTypeObject* type, const pybind11::object& node) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made && PyObject_SetAttr(made, node_name(), node.ptr()) < 0) Py_CLEAR(made);
  return made;
}

PyObject* make_size(const Expr& e) {
  const c10::SymInt n = sizes_of_capture()->symint(e);
  if (!n.is_heap_allocated()) return PyLong_FromLongLong(n.expect_int());
  return made_with_node(type_of_sizes, pybind11::cast(n.toSymNode()));
}

PyObject* pinned(PyObject* o) {
  if (Py_TYPE(o) != type_of_sizes && Py_TYPE(o) != real_type()) return Py_NewRef(o);
  if (!capturing) {
    PyErr_SetString(PyExc_RuntimeError, "a number of a program that is no longer captured");
    return nullptr;
  }
  Sizes& sizes = *capturing->trace.sizes;
  const bool of_numpy = is_of_numpy(o);
  const py::Ref value =
      py::Ref::steal(Py_TYPE(o) == type_of_sizes ? PyLong_FromLongLong(sizes.pin(expr_of(o).value()))
                                                 : PyFloat_FromDouble(sizes.pin(as_real(o).value()).value()));
  return of_numpy && value ? PyObject_CallOneArg(class_of(o).get(), value.get()) : value.new_ref();
}

bool is_of_numpy(PyObject* o) {
  return capturing && (Py_TYPE(o) == type_of_sizes || Py_TYPE(o) == real_type()) &&
         capturing->computed_of_numpy(capturing->open_number(o));
}

namespace {
PyObject* numpy_class(const char* name) {
  return py::check(PyObject_GetAttrString(py::check(py::import_module("numpy")).get(), name)).release();
}
}  // namespace

bool keeps_class(PyObject* a, PyObject* b, const symbolic::Number& result) {
  return capturing->computed_of_numpy(result) || !(is_of_numpy(a) || is_of_numpy(b));
}

bool asked_by_torch() { return capturing && capturing->torch_depth > 0; }

py::Ref class_of(PyObject* number) {
  static PyObject* whole = nullptr;
  static PyObject* real = nullptr;
  const bool size = Py_TYPE(number) == type_of_sizes;
  if (!is_of_numpy(number)) return py::Ref::borrow(reinterpret_cast<PyObject*>(size ? &PyLong_Type : &PyFloat_Type));
  PyObject*& known = size ? whole : real;
  if (!known) known = numpy_class(size ? "int64" : "float64");
  return py::Ref::borrow(known);
}

PyObject* truth_of_numpy(PyObject* truth) {
  static PyObject* const type = numpy_class("bool_");
  return PyObject_CallOneArg(type, truth);
}

PyObject* truth_between(PyObject* a, PyObject* b, PyObject* truth) {
  if (!truth || !PyBool_Check(truth) || !(is_of_numpy(a) || is_of_numpy(b))) return truth;
  return truth_of_numpy(py::Ref::steal(truth).get());
}

PyObject* on_numbers(PyObject* a, PyObject* b, BinaryFunction f) {
  const py::Ref x = py::Ref::steal(pinned(a)), y = x ? py::Ref::steal(pinned(b)) : py::Ref();
  return y ? f(x.get(), y.get()) : nullptr;
}

PyObject* power_of_numbers(PyObject* a, PyObject* b) { return PyNumber_Power(a, b, Py_None); }

PyObject* attribute_of_number(PyObject* number, PyObject* name) {
  const py::Ref own = class_of(number);
  auto* const type = reinterpret_cast<PyTypeObject*>(own.get());
  if (!_PyType_Lookup(type, name)) {
    PyErr_Format(PyExc_AttributeError, "'%s' object has no attribute %R", type->tp_name, name);
    return nullptr;
  }
  const py::Ref n = py::Ref::steal(pinned(number));
  return n ? PyObject_GetAttr(n.get(), name) : nullptr;
}

namespace {

enum class Sign { Add, Sub, Mul, Div, Mod };
template <Sign sign>
PyObject* arithmetic(PyObject* a, PyObject* b) {
  constexpr auto f = sign == Sign::Add   ? &PyNumber_Add
                     : sign == Sign::Sub ? &PyNumber_Subtract
                     : sign == Sign::Mul ? &PyNumber_Multiply
                     : sign == Sign::Div ? &PyNumber_FloorDivide
                                         : &PyNumber_Remainder;
  const auto is_int = [](PyObject* o) { return Py_TYPE(o) == type_of_sizes || PyLong_Check(o); };
  if (!is_int(a) || !is_int(b)) {
    // A tensor's arithmetic, or a list's, is its own.
    if (!PyFloat_Check(a) && !PyFloat_Check(b)) Py_RETURN_NOTIMPLEMENTED;
    constexpr auto op = sign == Sign::Add   ? Real::Op::Add
                        : sign == Sign::Sub ? Real::Op::Sub
                        : sign == Sign::Mul ? Real::Op::Mul
                        : sign == Sign::Div ? Real::Op::FloorDiv
                                            : Real::Op::Mod;
    return real_arithmetic(op, a, b, f);
  }
  if (const auto x = expr_of(a), y = expr_of(b); capturing && x && y) {
    std::optional<Expr> result;
    if constexpr (sign == Sign::Add) result = *x + *y;
    if constexpr (sign == Sign::Sub) result = *x - *y;
    if constexpr (sign == Sign::Mul) result = *x * *y;
    if constexpr (sign == Sign::Div || sign == Sign::Mod) {
      const int64_t d = capturing->trace.sizes->pin(*y);
      if (d > 0) result = sign == Sign::Div ? symbolic::floordiv(*x, d) : symbolic::mod(*x, d);
    }
    if (result && capturing->trace.sizes->fits(*result) && keeps_class(a, b, *result)) return make_size(*result);
  }
  return on_numbers(a, b, f);
}

/// Arithmetic that needs the values.
template <PyObject* (*f)(PyObject*, PyObject*)>
PyObject* with_value(PyObject* a, PyObject* b) {
  if (!PyNumber_Check(b) || py::is_tensor(b)) Py_RETURN_NOTIMPLEMENTED;
  return on_numbers(a, b, f);
}
PyObject* true_quotient(PyObject* a, PyObject* b) { return real_arithmetic(Real::Op::Div, a, b, &PyNumber_TrueDivide); }
/// A small power of an int is a product; a negative one, or a float's, is a float's power.
PyObject* power(PyObject* a, PyObject* b) {
  constexpr int64_t kMostFactors = 4;
  const auto base = expr_of(a);
  const auto exponent = PyLong_CheckExact(b) ? expr_of(b) : std::nullopt;
  if (capturing && base && exponent && exponent->constant() >= 0) {
    if (exponent->constant() > kMostFactors) return on_numbers(a, b, &power_of_numbers);
    Expr product(1);
    for (int64_t i = 0; i < exponent->constant(); ++i) product = product * *base;
    return capturing->trace.sizes->fits(product) && keeps_class(a, b, product) ? make_size(product)
                                                                               : on_numbers(a, b, &power_of_numbers);
  }
  // Whether an int's power is an int depends on an open exponent's sign.
  if (exponent || PyFloat_Check(a) || PyFloat_Check(b) || Py_TYPE(a) == real_type() || Py_TYPE(b) == real_type())
    return real_arithmetic(Real::Op::Pow, a, b, &power_of_numbers);
  return with_value<&power_of_numbers>(a, b);
}
/// pow() with a modulus, too.
PyObject* power_of(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n == 1) return power(self, args[0]);
  const py::Ref base = n == 2 ? py::Ref::steal(pinned(self)) : py::Ref();
  const py::Ref exponent = base ? py::Ref::steal(pinned(args[0])) : py::Ref();
  const py::Ref modulus = exponent ? py::Ref::steal(pinned(args[1])) : py::Ref();
  if (n != 2) PyErr_SetString(PyExc_TypeError, "pow expected 2 or 3 arguments");
  return modulus ? PyNumber_Power(base.get(), exponent.get(), modulus.get()) : nullptr;
}
/// What else an int has.
PyObject* attribute(PyObject* self, PyObject* name) { return attribute_of_number(self, name); }

template <PyObject* (*f)(PyObject*, PyObject*)>
PyObject* forward(PyObject* self, PyObject* o) {
  return f(self, o);
}
template <PyObject* (*f)(PyObject*, PyObject*)>
PyObject* reflected(PyObject* self, PyObject* o) {
  if (py::is_tensor(o)) Py_RETURN_NOTIMPLEMENTED;
  return f(o, self);
}

template <int op>
PyObject* compare_ints(PyObject* self, PyObject* o) {
  const auto a = expr_of(self), b = expr_of(o);
  if (!capturing || !a || !b) return compare_reals(self, o, op);
  Sizes& sizes = *capturing->trace.sizes;
  const bool swap = op == Py_GT || op == Py_GE;
  const Expr difference = swap ? *b - *a : *a - *b;
  const Sizes::Relation relation = op == Py_EQ                  ? Sizes::Relation::Equal
                                   : op == Py_NE                ? Sizes::Relation::NotEqual
                                   : op == Py_LT || op == Py_GT ? Sizes::Relation::Less
                                                                : Sizes::Relation::LessEqual;
  return PyBool_FromLong(sizes.decide(difference, relation));
}

template <int op>
PyObject* compare(PyObject* self, PyObject* o) {
  return truth_between(self, o, compare_ints<op>(self, o));
}

/// torch.sym_min and torch.sym_max.
template <Expr (*f)(const Expr&, const Expr&)>
PyObject* extreme(PyObject* self, PyObject* o) {
  const auto a = expr_of(self), b = expr_of(o);
  if (!capturing || !a || !b) return extreme_of_reals(self, o, f == &symbolic::min);
  const Expr result = f(*a, *b);
  return capturing->trace.sizes->fits(result) ? make_size(result)
                                              : PyLong_FromLongLong(capturing->trace.sizes->pin(result));
}

PyObject* truth(PyObject* self, PyObject*) {
  const py::Ref zero = py::Ref::steal(PyLong_FromLong(0));
  return compare_ints<Py_NE>(self, zero.get());
}
PyObject* same(PyObject* self, PyObject*) { return Py_NewRef(self); }
/// What int(), math.floor() and the like give.
PyObject* as_int(PyObject* self, PyObject*) {
  if (!is_of_numpy(self)) return Py_NewRef(self);
  const auto whole = capturing->as_int(expr_of(self).value());
  const py::Ref n = whole ? py::Ref() : py::Ref::steal(pinned(self));
  return whole ? make_size(*whole) : n ? PyNumber_Long(n.get()) : nullptr;
}
PyObject* value(PyObject* self, PyObject*) {
  const py::Ref n = py::Ref::steal(pinned(self));
  return n ? PyNumber_Index(n.get()) : nullptr;
}
PyObject* negative(PyObject* self, PyObject*) {
  const auto e = expr_of(self);
  return capturing && e ? make_size(Expr(0) - *e)
                        : on_numbers(self, self, [](PyObject* a, PyObject*) { return PyNumber_Negative(a); });
}
/// float(size), and torch.sym_float().
PyObject* to_float(PyObject* self, PyObject*) {
  const py::Ref whole = py::Ref::steal(as_int(self, nullptr));
  if (!whole) return nullptr;
  self = whole.get();
  const auto r = as_real(self);
  return capturing && r && capturing->trace.sizes->hint(*r) ? make_real(*r) : PyNumber_Float(self);
}
PyObject* absolute(PyObject* self, PyObject*) {
  const py::Ref zero = py::Ref::steal(PyLong_FromLong(0));
  const py::Ref below = py::Ref::steal(compare_ints<Py_LT>(self, zero.get()));
  return !below ? nullptr : below.get() == Py_True ? negative(self, nullptr) : Py_NewRef(self);
}

KILN_METHOD_OF_NUMBER(hash)
KILN_METHOD_OF_NUMBER(str)
KILN_METHOD_OF_NUMBER(repr)
KILN_METHOD_OF_NUMBER(format)
KILN_METHOD_OF_NUMBER(float)
KILN_METHOD_OF_NUMBER(invert)
KILN_METHOD_OF_NUMBER(round)
KILN_METHOD_OF_NUMBER(reduce_ex)

#define KILN_BINARY(name, f) \
  {"__" name "__", &forward<f>, METH_O, nullptr}, { "__r" name "__", &reflected<f>, METH_O, nullptr }
PyMethodDef methods[] = {
    KILN_BINARY("add", arithmetic<Sign::Add>),
    KILN_BINARY("sub", arithmetic<Sign::Sub>),
    KILN_BINARY("mul", arithmetic<Sign::Mul>),
    KILN_BINARY("floordiv", arithmetic<Sign::Div>),
    KILN_BINARY("mod", arithmetic<Sign::Mod>),
    KILN_BINARY("truediv", true_quotient),
    KILN_BINARY("divmod", with_value<&PyNumber_Divmod>),
    {"__pow__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&power_of)), METH_FASTCALL, nullptr},
    {"__rpow__", &reflected<power>, METH_O, nullptr},
    {"__getattr__", &attribute, METH_O, nullptr},
    KILN_BINARY("and", with_value<&PyNumber_And>),
    KILN_BINARY("or", with_value<&PyNumber_Or>),
    KILN_BINARY("xor", with_value<&PyNumber_Xor>),
    KILN_BINARY("lshift", with_value<&PyNumber_Lshift>),
    KILN_BINARY("rshift", with_value<&PyNumber_Rshift>),
    {"__eq__", &compare<Py_EQ>, METH_O, nullptr},
    {"__ne__", &compare<Py_NE>, METH_O, nullptr},
    {"__lt__", &compare<Py_LT>, METH_O, nullptr},
    {"__le__", &compare<Py_LE>, METH_O, nullptr},
    {"__gt__", &compare<Py_GT>, METH_O, nullptr},
    {"__ge__", &compare<Py_GE>, METH_O, nullptr},
    {"__bool__", &truth, METH_NOARGS, nullptr},
    {"__neg__", &negative, METH_NOARGS, nullptr},
    {"__pos__", &same, METH_NOARGS, nullptr},
    {"__abs__", &absolute, METH_NOARGS, nullptr},
    {"__index__", &value, METH_NOARGS, nullptr},
    {"__int__", &value, METH_NOARGS, nullptr},
    {"__trunc__", &as_int, METH_NOARGS, nullptr},
    {"__floor__", &as_int, METH_NOARGS, nullptr},
    {"__ceil__", &as_int, METH_NOARGS, nullptr},
    {"__sym_float__", &to_float, METH_NOARGS, nullptr},
    {"__sym_min__", &extreme<&symbolic::min>, METH_O, nullptr},
    {"__sym_max__", &extreme<&symbolic::max>, METH_O, nullptr},
};
#undef KILN_BINARY

/// isinstance(size, int)
PyObject* class_of_size(PyObject* self, void*) {
  if (asked_by_torch()) return Py_NewRef(reinterpret_cast<PyObject*>(&PyLong_Type));
  return class_of(self).release();
}
PyGetSetDef class_getter = {"__class__", &class_of_size, nullptr, nullptr, nullptr};

/// Attributes of tensors, and functions of them that give no tensor, that do not tell sizes.
bool tells_no_size(std::string_view name) {
  static const auto* names = new std::unordered_set<std::string_view>{
      // Of the tensor, whatever its sizes.
      "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_cuda", "is_cpu", "is_meta",
      "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_complex", "itemsize",
      "element_size", "dim", "is_floating_point", "is_conj", "is_neg", "names", "name", "get_device", "_is_view",
      "ndimension", "is_signed", "is_inference", "result_type", "can_cast", "retains_grad", "requires_grad_",
      "is_sparse_csr", "data", "grad", "volatile", "is_vulkan", "is_maia", "is_ipu", "is_mtia",
      "_has_symbolic_sizes_strides", "is_coalesced", "promote_types", "is_tensor", "get_autocast_dtype", "__class__",
      // Conversions to what it is.
      "to", "float", "double", "half", "bfloat16", "long", "int", "bool", "type", "type_as", "cpu", "real", "detach",
      "as_subclass", "__getattribute__"};
  return names->contains(name);
}

/// Functions of PyTorch whose ints are sizes that its bindings take as symbolic ones.
bool takes_sizes(std::string_view name) {
  static const auto* names = new std::unordered_set<std::string_view>{
      "view", "reshape", "expand", "broadcast_to", "zeros", "ones", "empty", "full", "rand", "randn", "randint",
      "new_zeros", "new_ones", "new_empty", "new_full", "arange", "narrow", "repeat", "tile", "split_with_sizes",
      "select", "eye", "constant_pad_nd", "pad", "layer_norm", "unflatten", "upsample_nearest1d", "upsample_nearest2d",
      "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "adaptive_avg_pool2d",
      "_adaptive_avg_pool2d", "_unsafe_view", "roll", "as_strided", "full_like", "split", "unsafe_split", "topk",
      "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
      "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "randperm", "multinomial", "tril", "triu",
      "tril_", "triu_", "kthvalue", "affine_grid_generator", "slice_scatter", "select_scatter", "narrow_copy",
      "empty_strided", "new_empty_strided", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d", "upsample_nearest3d", "_upsample_bilinear2d_aa",
      "_upsample_bicubic2d_aa", "repeat_interleave", "cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d",
      // As numbers (Trace::size_behind).
      "add", "sub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "rsub", "eq", "ne", "lt", "le", "gt",
      "ge", "where", "clamp", "clamp_min", "clamp_max", "clamp_", "clamp_min_", "clamp_max_", "masked_fill",
      "masked_fill_", "fill_", "floor_divide", "remainder", "pow", "add_", "sub_", "mul_", "div_", "truediv",
      "floordiv", "mod", "iadd", "isub", "imul", "itruediv", "getitem", "setitem", "__pow__", "__add__", "__radd__",
      "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__iadd__", "__isub__", "__imul__", "__itruediv__",
      "__getitem__"};
  return names->contains(name);
}

/// What is called, or the attribute that is read.
std::string_view asked_name(PyObject* target, PyObject* const* args, size_t n) {
  const std::string_view name = name_of(target);
  return name == "getattr" && n == 2 && PyUnicode_Check(args[1]) ? PyUnicode_AsUTF8(args[1]) : name;
}

bool has_size(PyObject* o, int depth = 0) {
  if (Py_TYPE(o) == type_of_sizes || Py_TYPE(o) == real_type()) return true;
  if (PySlice_Check(o)) {
    auto* s = reinterpret_cast<PySliceObject*>(o);
    return has_size(s->start) || has_size(s->stop) || has_size(s->step);
  }
  if (depth > 3 || !(PyTuple_Check(o) || PyList_CheckExact(o))) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
    if (has_size(PySequence_Fast_GET_ITEM(o, i), depth + 1)) return true;
  return false;
}

/// `o` with the numbers, as `number_of` has them, in the places of sizes; `o` itself if there are none. New reference.
PyObject* with_numbers(PyObject* o, PyObject* (*number_of)(PyObject*) = &pinned) {
  if (Py_TYPE(o) == type_of_sizes || Py_TYPE(o) == real_type()) return number_of(o);
  if (!has_size(o)) return Py_NewRef(o);
  if (PySlice_Check(o)) {
    auto* s = reinterpret_cast<PySliceObject*>(o);
    const py::Ref start = py::Ref::steal(with_numbers(s->start, number_of)),
                  stop = py::Ref::steal(with_numbers(s->stop, number_of)),
                  step = py::Ref::steal(with_numbers(s->step, number_of));
    return start && stop && step ? PySlice_New(start.get(), stop.get(), step.get()) : nullptr;
  }
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
  if (PyList_CheckExact(o)) {  // the list itself: it may be written
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* item = with_numbers(PyList_GET_ITEM(o, i), number_of);
      if (!item || PyList_SetItem(o, i, item) < 0) return nullptr;
    }
    return Py_NewRef(o);
  }
  py::Ref tuple = py::Ref::steal(PyTuple_New(n));
  for (Py_ssize_t i = 0; tuple && i < n; ++i) {
    PyObject* item = with_numbers(PySequence_Fast_GET_ITEM(o, i), number_of);
    if (!item) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i, item);
  }
  if (!tuple || PyTuple_CheckExact(o)) return tuple.release();
  return PyObject_CallOneArg(reinterpret_cast<PyObject*>(Py_TYPE(o)), tuple.get());  // torch.Size
}

/// How many slices among an index select, or may select, less than all of a dimension.
int count_slices(PyObject* index) {
  if (PySlice_Check(index)) {
    auto* s = reinterpret_cast<PySliceObject*>(index);
    const auto is = [](PyObject* o, long n) { return o == Py_None || (PyLong_CheckExact(o) && PyLong_AsLong(o) == n); };
    return !is(s->start, 0) || s->stop != Py_None || !is(s->step, 1);
  }
  int n = 0;
  for (Py_ssize_t i = 0; PyTuple_Check(index) && i < PyTuple_GET_SIZE(index); ++i)
    n += PySlice_Check(PyTuple_GET_ITEM(index, i)) ? count_slices(PyTuple_GET_ITEM(index, i)) : 0;
  return n;
}

/// An end of a slice, or nothing if it is none; false if only the program's code knows it.
bool end_of_slice(PyObject* o, std::optional<int64_t>* end) {
  end->reset();
  if (o == Py_None) return true;
  if (!PyLong_CheckExact(o)) return false;
  int overflow = 0;
  *end = PyLong_AsLongLongAndOverflow(o, &overflow);
  return overflow == 0;
}

/// Says that the slices of `index` that select all of their dimensions of `t` do. False if that is not all that the
/// sizes of `t`, whose value is `v`, decide, or if there are others than `left` of them.
bool note_whole_slices(aten::Sizes& sizes, graph::Value v, const at::Tensor& t, PyObject* index, int left) {
  const py::Ref items = PyTuple_Check(index) ? py::Ref::borrow(index) : py::Ref::steal(PyTuple_Pack(1, index));
  const Py_ssize_t n = PyTuple_GET_SIZE(items.get());
  int64_t named = 0, dim = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* const o = PyTuple_GET_ITEM(items.get(), i);
    if (!PySlice_Check(o) && !PyLong_CheckExact(o) && o != Py_None && o != Py_Ellipsis) return false;
    named += PySlice_Check(o) || PyLong_CheckExact(o);
  }
  std::vector<aten::Sizes::Expr> not_positive;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* const o = PyTuple_GET_ITEM(items.get(), i);
    if (o == Py_Ellipsis) dim += t.dim() - named;
    if (o == Py_Ellipsis || o == Py_None) continue;
    const int64_t d = dim++;
    if (count_slices(o) == 0) continue;
    auto* s = reinterpret_cast<PySliceObject*>(o);
    std::optional<int64_t> start, stop, step;
    if (!end_of_slice(s->start, &start) || !end_of_slice(s->stop, &stop) || !end_of_slice(s->step, &step)) return false;
    const int64_t size = t.size(d);
    if (size == 0) return false;
    const bool whole = step.value_or(1) == 1 && start.value_or(0) <= 0 &&
                       (start.value_or(0) == 0 || size + *start <= 0) && stop.value_or(size) >= size;
    if (!whole) continue;
    --left;
    if (start.value_or(0) < 0) not_positive.push_back(sizes.size(v, d, size) + aten::Sizes::Expr(*start));
    if (stop) not_positive.push_back(sizes.size(v, d, size) - aten::Sizes::Expr(*stop));
  }
  if (left != 0) return false;
  for (const auto& e : not_positive) sizes.decide(e, aten::Sizes::Relation::LessEqual);
  return true;
}
}  // namespace

void add_members(PyTypeObject* type, const std::vector<PyMethodDef*>& methods,
                 const std::vector<PyGetSetDef*>& getters) {
  for (PyMethodDef* def : methods) {
    const py::Ref descr = py::check(PyDescr_NewMethod(type, def));
    if (PyObject_SetAttrString(reinterpret_cast<PyObject*>(type), def->ml_name, descr.get()) < 0)
      throw py::PythonError{};
  }
  // By the dictionary: the type has a __class__ of its own, which an assignment would be for.
  for (PyGetSetDef* def : getters) {
    const py::Ref getter = py::check(PyDescr_NewGetSet(type, def));
    if (PyDict_SetItemString(type->tp_dict, def->name, getter.get()) < 0) throw py::PythonError{};
  }
  PyType_Modified(type);
}

void load_sizes() {
  if (type_of_sizes) return;
  const py::Ref module = py::check(py::import_module("kiln._sizes"));
  type_of_sizes = reinterpret_cast<PyTypeObject*>(py::check(PyObject_GetAttrString(module.get(), "Size")).release());
  std::vector<PyMethodDef*> all;
  for (PyMethodDef& def : methods) all.push_back(&def);
  for (PyMethodDef* def : {&m_hash, &m_str, &m_repr, &m_format, &m_float, &m_invert, &m_round, &m_reduce_ex})
    all.push_back(def);
  add_members(type_of_sizes, all, {&class_getter});
  load_reals(module.get());
}

void Machine::open_sizes() {
  trace.sizes = std::make_shared<Sizes>();
  trace.number_behind = [](const at::Tensor& t) -> std::optional<symbolic::Number> {
    pybind11::gil_scoped_acquire gil;
    const py::Ref wrapped = py::Ref::steal(THPVariable_Wrap(t));
    const py::Ref open = py::Ref::steal(wrapped ? PyObject_GetAttrString(wrapped.get(), "_wrapped_number") : nullptr);
    const py::Ref node = py::Ref::steal(open ? PyObject_GetAttr(open.get(), node_name()) : nullptr);
    PyErr_Clear();
    if (!node) return std::nullopt;
    const auto behind = pybind11::handle(node.get()).cast<c10::SymNode>();
    if (const Expr* e = Sizes::expr_of(behind)) return *e;
    const Real* r = Sizes::real_of(behind);
    return r ? std::optional<symbolic::Number>(*r) : std::nullopt;
  };
  trace.unwrap = [](const c10::SymNode& n) {
    const auto* wrapped = dynamic_cast<torch::impl::PythonSymNodeImpl*>(n.get());
    if (!wrapped) return n;
    pybind11::gil_scoped_acquire gil;
    const pybind11::handle node = wrapped->getPyObj();
    return pybind11::isinstance<c10::SymNodeImpl>(node) ? node.cast<c10::SymNode>() : n;
  };
  capturing = this;
}

void Machine::close_sizes() {
  if (capturing == this) capturing = nullptr;
}

bool Machine::is_size(PyObject* o) const { return trace.sizes && Py_TYPE(o) == type_of_sizes; }

bool Machine::is_open_number(PyObject* o) const {
  return trace.sizes && (Py_TYPE(o) == type_of_sizes || Py_TYPE(o) == real_type());
}

void Machine::refuse_sizes(const char* why) {
  if (trace.sizes) trace.sizes->refuse(why);
}

bool Machine::size_among(PyObject* const* args, size_t n) const {
  if (!trace.sizes || trace.sizes->leaves().empty()) return false;  // none was made
  return std::any_of(args, args + n, [](PyObject* o) { return o && has_size(o); });
}

bool Machine::takes_open_sizes(const char* name) const { return takes_sizes(name) && !aten::inside_transform(); }

PyObject* Machine::with_hints(PyObject* o) {
  return with_numbers(o, [](PyObject* number) -> PyObject* {
    const Sizes& sizes = *capturing->trace.sizes;
    if (const auto e = expr_of(number)) return PyLong_FromLongLong(sizes.hint(*e));
    const auto r = sizes.hint(as_real(number).value());
    return r ? PyFloat_FromDouble(*r) : pinned(number);
  });
}

PyObject* Machine::with_values(PyObject* o) { return trace.sizes ? with_numbers(o) : Py_NewRef(o); }

PyObject* Machine::on_values(PyObject* const* args, size_t n,
                             const std::function<PyObject*(PyObject* const* values)>& f) {
  std::vector<py::Ref> held;
  std::vector<PyObject*> values(n + 1);  // one in front for who calls a method
  for (size_t i = 0; i < n; ++i) {
    held.push_back(py::Ref::steal(with_numbers(args[i])));
    if (!held.back()) return nullptr;
    values[i + 1] = held.back().get();
  }
  return f(values.data() + 1);
}

graph::Value Machine::open_value(PyObject* o) {
  if (!trace.sizes || !py::is_tensor(o)) return {};
  const at::Tensor& t = THPVariable_Unpack(o);
  if (!aten::is_fake(t)) return {};
  // An existing tensor that is asked for its shape alone becomes an input.
  const Known* k = find(o);
  const graph::Value v = k && k->kind == Known::Kind::Tensor && open_dims(*k) ? trace.value_of(t) : trace.find(t);
  return trace.sizes->is_open(v) ? v : graph::Value();
}

int64_t Machine::output_of(PyObject* number) { return trace.sizes->add_output(open_number(number)); }

bool Machine::opens_int(PyObject* o, const SourcePtr& source) const {
  if (!trace.sizes || !options.open_ints || !options.changing_numbers || options.changing_numbers->empty())
    return false;
  const bool of_numpy = py::is_numpy_int(o);
  if (!of_numpy && !PyLong_CheckExact(o)) return false;
  const py::Ref n = py::Ref::steal(PyNumber_Index(o));
  const std::string text = source->id();
  if (!guards::is_small_int(n.get()) || !options.changing_numbers->contains(text)) return false;
  // One of Python's is first tried as a number that the graph computes with.
  if (options.constant_numbers_break && !of_numpy) return false;
  return of_numpy ? !options.for_fx : !options.ints_change || options.constant_numbers.contains(text);
}

PyObject* Machine::open_int(PyObject* o, const SourcePtr& source) {
  py::Ref& size = open_ints[source->id()];
  if (!size) {
    const bool of_numpy = py::is_numpy_int(o);
    if (of_numpy)
      guard(Guard::Kind::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
    const SourcePtr whole = of_numpy ? child(guards::Source::Kind::Index, source, nullptr) : source;
    const py::Ref n = py::Ref::steal(PyNumber_Index(o));
    guard(Guard::Kind::SmallInt, whole);
    const auto number = static_cast<int64_t>(result.open_ints.size());
    result.open_ints.push_back({whole, n, of_numpy});
    size = py::Ref::steal(make_size(trace.sizes->given(number, PyLong_AsLongLong(n.get()))));
    if (of_numpy && size) number_sources[size.get()] = source;
  }
  return size ? size.new_ref() : nullptr;
}

PyObject* Machine::changing_shape(PyObject* o, const SourcePtr& source) {
  const Py_ssize_t n = PyTuple_GET_SIZE(o);
  if (!trace.sizes || !options.open_ints || !options.changing_numbers) return nullptr;
  const auto changes = [&](Py_ssize_t i) {
    return guards::is_small_int(PyTuple_GET_ITEM(o, i)) &&
           options.changing_numbers->contains(guards::list_item(source, i)->id());
  };
  bool any = false;
  for (Py_ssize_t i = 0; i < n; ++i) any |= changes(i);
  if (!any) return nullptr;
  guard(Guard::Kind::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
  guard(Guard::Kind::Length, source, nullptr, static_cast<uint64_t>(n));
  const py::Ref sizes = py::Ref::steal(PyTuple_New(n));
  for (Py_ssize_t i = 0; sizes && i < n; ++i) {
    PyObject* item = PyTuple_GET_ITEM(o, i);
    const SourcePtr at = child(guards::Source::Kind::ListItem, source, nullptr, i);
    if (!changes(i)) guard_constant(at, item);
    item = changes(i) ? open_int(item, at) : Py_NewRef(item);
    if (!item) return nullptr;
    PyTuple_SET_ITEM(sizes.get(), i, item);
  }
  return sizes ? PyObject_CallOneArg(names().size_type, sizes.get()) : nullptr;
}

bool Machine::computed_of_numpy(const symbolic::Number& n) const {
  bool found = false;
  trace.sizes->for_each_leaf(n, [&](size_t leaf) {
    const Sizes::Leaf& l = trace.sizes->leaves()[leaf];
    found |= l.is_given() && result.open_ints[static_cast<size_t>(l.dim)].of_numpy;
  });
  return found;
}

std::optional<Expr> Machine::as_int(const Expr& e) {
  const Expr whole = symbolic::substitute(e, [&](const symbolic::AtomNode& var, Expr& out) {
    const Sizes::Leaf l = trace.sizes->leaves()[static_cast<size_t>(var.id)];
    if (!l.is_given() || !result.open_ints[static_cast<size_t>(l.dim)].of_numpy) return false;
    const CaptureResult::OpenInt given = result.open_ints[static_cast<size_t>(l.dim)];
    auto& ints = result.open_ints;
    auto same =
        std::find_if(ints.begin(), ints.end(), [&](const auto& o) { return o.source == given.source && !o.of_numpy; });
    if (same == ints.end()) same = ints.insert(ints.end(), {given.source, given.value});
    out = trace.sizes->given(same - ints.begin(), l.hint);
    return true;
  });
  return computed_of_numpy(whole) ? std::nullopt : std::optional(whole);  // an int of NumPy's float stays
}

symbolic::Number Machine::open_number(PyObject* o) const {
  if (is_size(o)) return expr_of(o).value();
  return as_real(o).value();
}

uint64_t Machine::dims_of_owner(const Known& k) const {
  if (!options.changing_sizes || options.changing_sizes->empty()) return 0;
  const auto sizes = [](const Known& known) { return THPVariable_Unpack(known.real.get()).sizes(); };
  for (const guards::Source* s = k.source.get(); s; s = s->base.get())
    for (const SourcePtr& owner : {s->base, s->key_source})
      if (owner && options.changing_sizes->contains(owner->id()))
        for (const Known& other : knowns)
          if (other.kind == Known::Kind::Tensor && other.source == owner && sizes(other).equals(sizes(k)))
            return open_dims(other);
  return 0;
}

uint64_t Machine::open_dims(const Known& k) const {
  if (!trace.sizes || k.kind != Known::Kind::Tensor || is_module_state(*k.source)) return 0;
  PyObject* o = k.real.get();
  const at::Tensor& t = THPVariable_Unpack(o);
  // A module's, wherever it is found. What a loop over parameters is at differs from turn to turn.
  const bool of_module = PyType_IsSubtype(Py_TYPE(o), reinterpret_cast<PyTypeObject*>(names().parameter_type)) ||
                         reinterpret_cast<PyObject*>(Py_TYPE(o)) == names().buffer_type;
  if (!captures_class(o) || (of_module && k.source->kind != guards::Source::Kind::Local) || t.dim() > 64 ||
      t.layout() != at::kStrided)
    return 0;
  const auto marks = [&](const char* name) {
    uint64_t bits = 0;
    PyObject** dict = _PyObject_GetDictPtr(o);
    PyObject* set = dict && *dict ? PyDict_GetItemString(*dict, name) : nullptr;
    const py::Ref list = py::Ref::steal(set && PyAnySet_Check(set) ? PySequence_List(set) : nullptr);
    for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list.get()); ++i)
      bits |= uint64_t{1} << PyLong_AsLong(PyList_GET_ITEM(list.get(), i));
    PyErr_Clear();
    return bits;
  };
  const uint64_t all = t.dim() == 64 ? ~uint64_t{0} : (uint64_t{1} << t.dim()) - 1;
  uint64_t open = all;
  if (options.open_sizes == CaptureOptions::OpenSizes::Some) {
    // Those of torch._dynamo.mark_dynamic() too.
    open = marks("_kiln_dynamic_dims") | marks("_dynamo_dynamic_indices") | marks("_dynamo_weak_dynamic_indices");
    if (options.changing_sizes && !options.changing_sizes->empty())
      if (auto it = options.changing_sizes->find(k.source->id()); it != options.changing_sizes->end())
        open |= it->second;
    open |= dims_of_owner(k);
  }
  return open & ~marks("_kiln_static_dims") & ~marks("_dynamo_static_indices") & all;
}

PyObject* Machine::open_shape(PyObject* tensor, graph::Value v) {
  const at::Tensor& t = THPVariable_Unpack(tensor);
  py::Ref sizes = py::Ref::steal(PyTuple_New(t.dim()));
  for (int64_t d = 0; sizes && d < t.dim(); ++d) {
    PyObject* size = make_size(trace.sizes->size(v, d, t.size(d)));
    if (!size) return nullptr;
    PyTuple_SET_ITEM(sizes.get(), d, size);
  }
  return sizes ? PyObject_CallOneArg(names().size_type, sizes.get()) : nullptr;
}

py::Ref Machine::select_open(PyObject* tensor, PyObject* index) {
  if (!trace.sizes || !PyTuple_CheckExact(index) || !takes_open_sizes("select")) return {};
  int64_t open = 0, dims = 0, ellipses = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); ++i) {
    PyObject* const o = PyTuple_GET_ITEM(index, i);
    const bool places = py::is_tensor(o) && !aten::is_mask(THPVariable_Unpack(o).scalar_type());
    if (!is_size(o) && !places && !PyLong_CheckExact(o) && !PySlice_Check(o) && o != Py_None && o != Py_Ellipsis)
      return {};
    open += is_size(o);
    ellipses += o == Py_Ellipsis;
    dims += o != Py_None && o != Py_Ellipsis;
  }
  if (!open || ellipses > 1 || dims > THPVariable_Unpack(tensor).dim()) return {};
  static PyObject* const function = [] {
    const py::Ref module = py::check(py::import_module("kiln._sizes"));
    return py::check(PyObject_GetAttrString(module.get(), "select_open")).release();
  }();
  PyObject* const given[] = {tensor, index};
  return py::Ref::steal(call(function, given, 2, nullptr));
}

PyObject* Machine::open_length(PyObject* o) {
  const graph::Value v = aten::inside_transform() ? graph::Value() : open_value(o);
  if (!v || THPVariable_Unpack(o).dim() == 0) return nullptr;
  return make_size(trace.sizes->size(v, 0, THPVariable_Unpack(o).size(0)));
}

PyObject* Machine::ask_size(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames) {
  if (!trace.sizes || n == 0 || aten::inside_transform()) return nullptr;
  const graph::Value v = open_value(args[0]);
  if (!v) return nullptr;
  const std::string_view name = asked_name(target, args, n);
  const at::Tensor& t = THPVariable_Unpack(args[0]);
  if (name == "shape" || (name == "size" && n == 1 && !kwnames)) return open_shape(args[0], v);
  if (name == "size") {
    if (n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0) != 2) return nullptr;
    const py::Ref index = py::Ref::steal(PyNumber_Index(args[1]));
    if (!index) {
      PyErr_Clear();
      return nullptr;
    }
    int64_t d = PyLong_AsLongLong(index.get());
    if (d < -t.dim() || d >= t.dim()) return nullptr;  // eager's error
    if (d < 0) d += t.dim();
    return make_size(trace.sizes->size(v, d, t.size(d)));
  }
  if ((name == "numel" || name == "nelement") && n == 1) {
    Expr product(1);
    for (int64_t d = 0; d < t.dim(); ++d) product = product * trace.sizes->size(v, d, t.size(d));
    return make_size(product);
  }
  if (name == "is_contiguous" && n == 1 && !kwnames) {
    trace.sizes->note_contiguous(v, t.is_contiguous());
    return PyBool_FromLong(t.is_contiguous());
  }
  return nullptr;
}

void Machine::note_sizes_told(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames, PyObject* r,
                              int64_t nodes_before) {
  if (!trace.sizes) return;
  const std::string_view name = asked_name(target, args, n);
  const size_t all = n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0);
  // A tensor that comes without a call is the receiver: contiguous(), and conversions to what it is.
  bool told = !(r && trace.num_nodes != nodes_before) && !tells_no_size(name);
  if (told && r && name == "contiguous" && all == 1) {
    if (const graph::Value v = open_value(args[0])) trace.sizes->note_contiguous(v, true);
    told = false;
  }
  // PyTorch's bindings leave out a slice that selects all, and give what is stored the shape of its place.
  bool shapes = false;
  if (r && (name == "getitem" || name == "setitem") && n >= 2) {
    static const graph::Op slice("aten::slice.Tensor"), view("aten::view"), expand("aten::expand");
    int left = count_slices(args[1]);
    int64_t fresh = trace.num_nodes - nodes_before;
    const auto& nodes = trace.graph().nodes();
    told = false;
    for (auto it = nodes.rbegin(); it != nodes.rend() && fresh > 0; ++it, --fresh) {
      left -= (*it)->op == slice;
      shapes |= name == "setitem" && ((*it)->op == view || (*it)->op == expand);
    }
    const graph::Value v = left > 0 && !shapes ? open_value(args[0]) : graph::Value();
    told =
        shapes || (left > 0 && !(v && note_whole_slices(*trace.sizes, v, THPVariable_Unpack(args[0]), args[1], left)));
  }
  if (!told) return;
  const std::function<void(PyObject*, int)> note = [&](PyObject* o, int depth) {
    if (const graph::Value v = open_value(o)) {
      const at::Tensor& t = THPVariable_Unpack(o);
      for (int64_t d = 0; shapes && d < t.dim(); ++d) trace.sizes->pin(trace.sizes->size(v, d, t.size(d)));
      if (!shapes) trace.sizes->note_layout(v, aten::meta_of(t));
    } else if (depth < 3 && (PyTuple_Check(o) || PyList_CheckExact(o))) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) note(PySequence_Fast_GET_ITEM(o, i), depth + 1);
    }
  };
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  for (size_t i = 0; i < all; ++i) note(args[i], 0);
  for (size_t i = 0; !r && i < all; ++i) py::Ref::steal(with_numbers(args[i]));
  PyErr_Clear();
  PyErr_Restore(type, error, traceback);
}

}  // namespace kiln::capture
