// Floats that captured code computes of open sizes (n / 2, math.sqrt(n), 0.75 * n) and ints that it makes of those: it
// sees kiln._sizes.Real in the place of a float. Arithmetic and functions of `math` give another; what makes an int
// gives an open size; a comparison gives a truth and a condition. Whatever else wants the value gets it, and the sizes
// below are pinned by conditions.
#include "aten/sizes.h"
#include "base/error.h"
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/capture/sizes.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

using symbolic::Expr;
using symbolic::Real;
using Op = symbolic::Real::Op;

namespace {
PyTypeObject* type_of_reals = nullptr;

/// Whether the program may go on with `r`: Python raises no exception there in this call, and it is not too long.
bool fits(const Real& r) {
  constexpr int64_t kMostNodes = 64;
  return sizes_of_capture() && r.num_nodes() < kMostNodes && sizes_of_capture()->hint(r);
}

template <Op op>
constexpr auto kFunctionOf = op == Op::Add        ? &PyNumber_Add
                             : op == Op::Sub      ? &PyNumber_Subtract
                             : op == Op::Mul      ? &PyNumber_Multiply
                             : op == Op::Div      ? &PyNumber_TrueDivide
                             : op == Op::FloorDiv ? &PyNumber_FloorDivide
                             : op == Op::Mod      ? &PyNumber_Remainder
                                                  : &power_of_numbers;

template <Op op>
PyObject* forward(PyObject* self, PyObject* o) {
  return real_arithmetic(op, self, o, kFunctionOf<op>);
}
template <Op op>
PyObject* reflected(PyObject* self, PyObject* o) {
  return real_arithmetic(op, o, self, kFunctionOf<op>);
}

PyObject* whole(PyObject* self, Op op) {
  const std::optional<Real> r = as_real(self);
  if (r && !is_of_numpy(self) && fits(Real(op, *r))) return make_size(sizes_of_capture()->whole(Real(op, *r)));
  const py::Ref x = py::Ref::steal(pinned(self));
  if (!x) return nullptr;
  const char* const name = op == Op::Floor   ? "__floor__"
                           : op == Op::Ceil  ? "__ceil__"
                           : op == Op::Trunc ? "__trunc__"
                                             : "__round__";
  return PyObject_CallMethod(x.get(), name, nullptr);
}
template <Op op>
PyObject* rounded(PyObject* self, PyObject*) {
  return whole(self, op);
}
PyObject* round_of(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n == 0 || (n == 1 && args[0] == Py_None)) return whole(self, Op::Round);
  const py::Ref x = py::Ref::steal(pinned(self));
  const py::Ref digits = x && n == 1 ? py::Ref::steal(pinned(args[0])) : py::Ref();
  if (n != 1) PyErr_SetString(PyExc_TypeError, "round expected at most 1 argument");
  return digits ? PyObject_CallMethod(x.get(), "__round__", "O", digits.get()) : nullptr;
}

template <Op op>
PyObject* unary(PyObject* self, PyObject*) {
  const std::optional<Real> r = as_real(self);
  if (r && fits(Real(op, *r))) return make_real(Real(op, *r));
  return on_numbers(self, self,
                    [](PyObject* a, PyObject*) { return op == Op::Neg ? PyNumber_Negative(a) : PyNumber_Absolute(a); });
}
PyObject* same(PyObject* self, PyObject*) { return Py_NewRef(self); }
PyObject* value(PyObject* self, PyObject*) {
  const py::Ref x = py::Ref::steal(pinned(self));
  return x ? PyNumber_Float(x.get()) : nullptr;
}
/// float(real)
PyObject* as_float(PyObject* self, PyObject*) { return is_of_numpy(self) ? value(self, nullptr) : Py_NewRef(self); }
PyObject* truth(PyObject* self, PyObject*) {
  const py::Ref zero = py::Ref::steal(PyFloat_FromDouble(0));
  const py::Ref differs = py::Ref::steal(compare_reals(self, zero.get(), Py_NE));
  return differs ? PyBool_FromLong(PyObject_IsTrue(differs.get())) : nullptr;
}
template <int op>
PyObject* compare(PyObject* self, PyObject* o) {
  return truth_between(self, o, compare_reals(self, o, op));
}
PyObject* quotient_and_rest(PyObject* self, PyObject* o) {
  if (!PyNumber_Check(o) || py::is_tensor(o)) Py_RETURN_NOTIMPLEMENTED;
  return on_numbers(self, o, &PyNumber_Divmod);
}
PyObject* reflected_quotient_and_rest(PyObject* self, PyObject* o) {
  if (!PyNumber_Check(o) || py::is_tensor(o)) Py_RETURN_NOTIMPLEMENTED;
  return on_numbers(o, self, &PyNumber_Divmod);
}

template <bool min>
PyObject* extreme(PyObject* self, PyObject* o) {
  return extreme_of_reals(self, o, min);
}

KILN_METHOD_OF_NUMBER(hash)
KILN_METHOD_OF_NUMBER(str)
KILN_METHOD_OF_NUMBER(repr)
KILN_METHOD_OF_NUMBER(format)
KILN_METHOD_OF_NUMBER(reduce_ex)

/// What torch.SymFloat has of a float's.
PyObject* method_of_value(PyObject* self, void* name) {
  const py::Ref x = py::Ref::steal(pinned(self));
  return x ? PyObject_GetAttrString(x.get(), static_cast<const char*>(name)) : nullptr;
}
#define KILN_METHOD(name) {name, &method_of_value, nullptr, nullptr, const_cast<char*>(name)}
PyGetSetDef value_methods[] = {KILN_METHOD("is_integer"), KILN_METHOD("as_integer_ratio"), KILN_METHOD("conjugate"),
                               KILN_METHOD("hex")};
#undef KILN_METHOD

PyObject* attribute(PyObject* self, PyObject* name) { return attribute_of_number(self, name); }

/// torch.sym_sqrt and its like.
template <const char* const& name>
PyObject* function_of(PyObject* self, PyObject*) {
  const std::string_view plain = std::string_view(name).substr(6, std::string_view(name).size() - 8);
  const std::optional<Real> x = is_of_numpy(self) ? std::nullopt : as_real(self);
  if (x)
    if (const Real r(Real::find_function(plain), *x); fits(r)) return make_real(r);
  static PyObject* const math = py::import_module("math");
  const py::Ref value = py::Ref::steal(pinned(self));
  return value ? PyObject_CallMethod(math, std::string(plain).c_str(), "O", value.get()) : nullptr;
}
#define KILN_SYM(id)                                \
  const char* const k_sym_##id = "__sym_" #id "__"; \
  PyMethodDef m_sym_##id = {k_sym_##id, &function_of<k_sym_##id>, METH_NOARGS, nullptr};
KILN_SYM(sqrt)
KILN_SYM(cos)
KILN_SYM(cosh)
KILN_SYM(sin)
KILN_SYM(sinh)
KILN_SYM(tan)
KILN_SYM(tanh)
KILN_SYM(asin)
KILN_SYM(acos)
KILN_SYM(atan)
KILN_SYM(log2)
#undef KILN_SYM

#define KILN_BINARY(name, op) \
  {"__" name "__", &forward<op>, METH_O, nullptr}, { "__r" name "__", &reflected<op>, METH_O, nullptr }
PyMethodDef methods[] = {
    KILN_BINARY("add", Op::Add),
    KILN_BINARY("sub", Op::Sub),
    KILN_BINARY("mul", Op::Mul),
    KILN_BINARY("truediv", Op::Div),
    KILN_BINARY("floordiv", Op::FloorDiv),
    KILN_BINARY("mod", Op::Mod),
    KILN_BINARY("pow", Op::Pow),
    {"__divmod__", &quotient_and_rest, METH_O, nullptr},
    {"__rdivmod__", &reflected_quotient_and_rest, METH_O, nullptr},
    {"__eq__", &compare<Py_EQ>, METH_O, nullptr},
    {"__ne__", &compare<Py_NE>, METH_O, nullptr},
    {"__lt__", &compare<Py_LT>, METH_O, nullptr},
    {"__le__", &compare<Py_LE>, METH_O, nullptr},
    {"__gt__", &compare<Py_GT>, METH_O, nullptr},
    {"__ge__", &compare<Py_GE>, METH_O, nullptr},
    {"__bool__", &truth, METH_NOARGS, nullptr},
    {"__neg__", &unary<Op::Neg>, METH_NOARGS, nullptr},
    {"__abs__", &unary<Op::Abs>, METH_NOARGS, nullptr},
    {"__pos__", &same, METH_NOARGS, nullptr},
    {"__sym_float__", &as_float, METH_NOARGS, nullptr},
    {"__float__", &value, METH_NOARGS, nullptr},
    {"__int__", &rounded<Op::Trunc>, METH_NOARGS, nullptr},
    {"__sym_int__", &rounded<Op::Trunc>, METH_NOARGS, nullptr},
    {"__trunc__", &rounded<Op::Trunc>, METH_NOARGS, nullptr},
    {"__floor__", &rounded<Op::Floor>, METH_NOARGS, nullptr},
    {"__ceil__", &rounded<Op::Ceil>, METH_NOARGS, nullptr},
    {"__round__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&round_of)), METH_FASTCALL, nullptr},
    {"__sym_min__", &extreme<true>, METH_O, nullptr},
    {"__sym_max__", &extreme<false>, METH_O, nullptr},
    {"__getattr__", &attribute, METH_O, nullptr},
};
#undef KILN_BINARY

/// isinstance(real, float)
PyObject* class_of_real(PyObject* self, void*) {
  if (asked_by_torch()) return Py_NewRef(reinterpret_cast<PyObject*>(&PyFloat_Type));
  return class_of(self).release();
}
PyGetSetDef class_getter = {"__class__", &class_of_real, nullptr, nullptr, nullptr};
}  // namespace

PyTypeObject* real_type() { return type_of_reals; }

void load_reals(PyObject* module) {
  type_of_reals = reinterpret_cast<PyTypeObject*>(py::check(PyObject_GetAttrString(module, "Real")).release());
  std::vector<PyMethodDef*> all;
  for (PyMethodDef& def : methods) all.push_back(&def);
  for (PyMethodDef* def :
       {&m_hash, &m_str, &m_repr, &m_format, &m_reduce_ex, &m_sym_sqrt, &m_sym_cos, &m_sym_cosh, &m_sym_sin,
        &m_sym_sinh, &m_sym_tan, &m_sym_tanh, &m_sym_asin, &m_sym_acos, &m_sym_atan, &m_sym_log2})
    all.push_back(def);
  std::vector<PyGetSetDef*> getters{&class_getter};
  for (PyGetSetDef& def : value_methods) getters.push_back(&def);
  add_members(type_of_reals, all, getters);
}

std::optional<Real> as_real(PyObject* o) {
  if (Py_TYPE(o) == type_of_reals) {
    const Real* r = aten::Sizes::real_of(node_of(o));
    return r ? std::optional(*r) : std::nullopt;
  }
  if (PyFloat_CheckExact(o)) return Real(PyFloat_AS_DOUBLE(o));
  if (Py_TYPE(o) != size_type() && !PyLong_CheckExact(o) && !PyBool_Check(o)) return std::nullopt;
  const std::optional<Expr> e = expr_of(o);
  return e ? std::optional(Real(*e)) : std::nullopt;
}

PyObject* make_real(const Real& r) {
  const auto now = sizes_of_capture()->hint(r);
  KILN_CHECK(now, "a float that Python does not compute");
  bool constant = true;
  symbolic::for_each_integer(r, [&](const Expr& e) { constant &= e.is_constant(); });
  return constant ? PyFloat_FromDouble(*now)
                  : made_with_node(type_of_reals, pybind11::cast(sizes_of_capture()->symfloat(r).toSymNodeImpl()));
}

PyObject* real_arithmetic(Op op, PyObject* a, PyObject* b, BinaryFunction f) {
  const auto is_of_python = [](PyObject* o) {
    return Py_TYPE(o) == size_type() || Py_TYPE(o) == type_of_reals || (PyNumber_Check(o) && !py::is_tensor(o));
  };
  if (!is_of_python(a) || !is_of_python(b)) Py_RETURN_NOTIMPLEMENTED;
  if (const auto x = as_real(a), y = as_real(b); x && y)
    if (const Real r(op, *x, *y); fits(r) && keeps_class(a, b, r)) return make_real(r);
  return on_numbers(a, b, f);
}

PyObject* compare_reals(PyObject* a, PyObject* b, int op) {
  const auto x = as_real(a), y = as_real(b);
  if (x && y) {
    const bool equality = op == Py_EQ || op == Py_NE, swap = op == Py_GT || op == Py_GE;
    const Op kind = equality ? Op::Equal : op == Py_LT || op == Py_GT ? Op::Less : Op::LessEqual;
    const Real holds = swap ? Real(kind, *y, *x) : Real(kind, *x, *y);
    if (fits(holds)) return PyBool_FromLong(sizes_of_capture()->decide(holds) != (op == Py_NE));
  }
  if (!PyLong_Check(b) && !PyFloat_Check(b) && Py_TYPE(b) != size_type() && Py_TYPE(b) != type_of_reals)
    Py_RETURN_NOTIMPLEMENTED;
  const py::Ref left = py::Ref::steal(pinned(a)), right = left ? py::Ref::steal(pinned(b)) : py::Ref();
  return right ? PyObject_RichCompare(left.get(), right.get(), op) : nullptr;
}

PyObject* extreme_of_reals(PyObject* a, PyObject* b, bool min) {
  const py::Ref other = py::Ref::steal(compare_reals(b, a, min ? Py_LT : Py_GT));
  if (!other || other.get() == Py_NotImplemented) return other.new_ref();
  PyObject* chosen = other.get() == Py_True ? b : a;
  const std::optional<Real> r = as_real(chosen);
  return r ? make_real(*r) : PyNumber_Float(chosen);
}

PyObject* Machine::call_on_reals(PyObject* callable, PyObject* const* args, size_t n) {
  static PyObject* const math = py::import_module("math");
  if (!PyCFunction_Check(callable) || PyCFunction_GET_SELF(callable) != math || n == 0 || n > 2 || !size_among(args, n))
    return nullptr;
  const std::string_view name = name_of(callable);
  const auto of_python = [&](PyObject* o) -> std::optional<Real> {
    if (!capture::is_of_numpy(o)) return as_real(o);
    const auto whole = is_size(o) ? as_int(expr_of(o).value()) : std::nullopt;
    return whole ? std::optional(Real(*whole)) : std::nullopt;
  };
  std::optional<Real> x = of_python(args[0]), y = n == 2 ? of_python(args[1]) : std::nullopt, r;
  if (!x || (n == 2 && !y)) return nullptr;
  if (name == "pow" && n == 2)
    r = Real(Op::Pow, *x, *y);
  else if (const Real::Function* f = Real::find_function(name); f && n == 1)
    r = Real(f, *x);
  else if (f && n == 2 && name == "log")
    r = Real(Op::Div, Real(f, *x), Real(f, *y));
  return r && fits(*r) ? make_real(*r) : nullptr;
}

}  // namespace kiln::capture
