// Operators, containers, strings, functions and imports.
#include <string_view>

#include "python/capture/call_tools.h"
#include "python/capture/eval.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

PyObject* operator_object(const char* name) {
  static auto* cache = new std::unordered_map<std::string, PyObject*>();
  auto it = cache->find(name);
  if (it != cache->end()) return it->second;
  PyObject* module = py::import_module("operator");
  PyObject* f = module ? PyObject_GetAttrString(module, name) : nullptr;
  Py_XDECREF(module);
  cache->emplace(name, f);
  return f;
}

PyObject* operate_once(Machine& m, const char* op, PyObject* const* args, size_t n, PyObject* (*f)(PyObject* const*)) {
  const std::string_view name = op;
  if (n == 2 && name == "getitem")
    if (PyObject* masked = m.select_masked(args[0], args[1]); masked || PyErr_Occurred()) return masked;
  if (m.has_masked)
    if (PyObject* r = m.operate_on_masked(op, args, n); r || PyErr_Occurred()) return r;
  bool tensor = false, method = false;  // of a class in Python, which says what the operator does
  for (size_t i = 0; i < n; ++i) {
    tensor |= py::is_tensor(args[i]);
    method |= py::is_tensor(args[i])
                  ? m.has_own_operators(args[i])
                  : m.classify(args[i]) == Class::Instance && Py_TYPE(args[i])->tp_flags & Py_TPFLAGS_HEAPTYPE &&
                        !m.is_open_number(args[i]);
  }
  // PyTorch's bindings ask what is no int and no slice for its value.
  if (n == 2 && py::is_tensor(args[0]) && m.is_size(args[1]) && name == "getitem" && m.takes_open_sizes("select")) {
    static PyObject* select = PyObject_GetAttrString(PyImport_AddModule("torch"), "select");
    const py::Ref zero = py::Ref::steal(PyLong_FromLong(0));
    PyObject* const given[] = {args[0], zero.get(), args[1]};
    return m.call(select, given, 3, nullptr);
  }
  if (n >= 2 && py::is_tensor(args[0]) && (name == "getitem" || name == "setitem")) {
    const py::Ref pair = m.select_open(args[0], args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (pair) {
      PyObject *const view = PyTuple_GET_ITEM(pair.get(), 0), *const rest = PyTuple_GET_ITEM(pair.get(), 1);
      PyObject* const part[] = {view, rest, n == 3 ? args[2] : nullptr};
      return n == 2 && rest == Py_Ellipsis ? Py_NewRef(view) : operate_once(m, op, part, n, f);
    }
  }
  if (n == 2 && (name == "mod" ? PyUnicode_CheckExact(args[0]) && m.is_unknown(args + 1, 1)
                               : (name == "add" || name == "iadd") && (m.is_text(args[0]) || m.is_text(args[1]))))
    if (PyObject* text = m.make_text(operator_object(name == "mod" ? "mod" : "add"), args, 2); text || PyErr_Occurred())
      return text;
  const bool stores_size = n == 3 && m.is_open_number(args[2]);
  if (n == 3 && name == "setitem" && py::is_tensor(args[0]) && (stores_size || m.is_number(args[2])))
    return m.store_number(args, [&](PyObject* const* with_tensor) { return operate_once(m, op, with_tensor, 3, f); });
  if (tensor && (py::is_tensor(args[0]) || m.is_open_number(args[0])) && m.size_among(args, n) &&
      (stores_size || !m.takes_open_sizes(op)))
    return m.on_values(args, n, [&](PyObject* const* values) { return operate_once(m, op, values, n, f); });
  PyObject* const number = m.number_among(args, n);
  if ((number || m.size_among(args, n)) && numpy_among(args, n)) {
    if (number) {
      const size_t at = m.is_number(args[0]) ? 1 : 0;
      const py::Ref other = n == 2 ? m.number_of_numpy(args[at]) : py::Ref();
      if (!other) return PyErr_Occurred() ? nullptr : m.specialize(number);
      PyObject* numbers[] = {args[0], args[1]};
      numbers[at] = other.get();
      return operate_once(m, op, numbers, 2, f);
    }
    return m.on_values(args, n, [&](PyObject* const* values) { return operate_once(m, op, values, n, f); });
  }
  if (number && tensor) return n == 2 ? m.operate_on_numbers(op, args) : m.specialize(number);
  const bool item = name == "getitem" || name == "setitem";
  for (size_t i = 0; i < n; ++i) {
    if (!tensor && item && i == 2) continue;  // what a container is to keep
    const bool shallow = item && i == 0;      // of a container one element is asked for
    if (!m.reads(args[i], shallow ? -1 : 0)) return nullptr;
  }
  if (changes_operand(name)) {
    if (m.refuses_write(args[0])) return nullptr;
    m.note_write(args[0]);
  }
  if (!tensor) {
    if (std::any_of(args, args + n, is_array)) return operate_on_arrays(m, op, args, n, f);
    PyObject* r = f(args);
    if (item && m.refuses_view(args[0], r)) {
      Py_DECREF(r);
      return nullptr;
    }
    return m.after_c_call(r);
  }
  if (method) return m.after_c_call(f(args));
  if (item && is_array(args[0])) return operate_on_arrays(m, op, args, n, f);
  return m.torch_call(operator_object(op), args, n, nullptr, [&] { return f(args); });
}

PyObject* operate(Machine& m, const char* op, PyObject* const* args, size_t n, PyObject* (*f)(PyObject* const*)) {
  const int64_t before = m.instructions;
  PyObject* r = operate_once(m, op, args, n, f);
  return r ? r
           : m.retry_with_numbers(before, args, n, [&](PyObject* const* v) { return operate_once(m, op, v, n, f); });
}

namespace {
struct BinaryOp {
  const char* name;
  PyObject* (*run)(PyObject* const*);
};
#define KILN_NB(name, function) {name, [](PyObject* const* a) { return function(a[0], a[1]); }}
const BinaryOp kBinaryOps[] = {
    KILN_NB("add", PyNumber_Add),
    KILN_NB("and_", PyNumber_And),
    KILN_NB("floordiv", PyNumber_FloorDivide),
    KILN_NB("lshift", PyNumber_Lshift),
    KILN_NB("matmul", PyNumber_MatrixMultiply),
    KILN_NB("mul", PyNumber_Multiply),
    KILN_NB("mod", PyNumber_Remainder),
    KILN_NB("or_", PyNumber_Or),
    {"pow", [](PyObject* const* a) { return PyNumber_Power(a[0], a[1], Py_None); }},
    KILN_NB("rshift", PyNumber_Rshift),
    KILN_NB("sub", PyNumber_Subtract),
    KILN_NB("truediv", PyNumber_TrueDivide),
    KILN_NB("xor", PyNumber_Xor),
    KILN_NB("iadd", PyNumber_InPlaceAdd),
    KILN_NB("iand", PyNumber_InPlaceAnd),
    KILN_NB("ifloordiv", PyNumber_InPlaceFloorDivide),
    KILN_NB("ilshift", PyNumber_InPlaceLshift),
    KILN_NB("imatmul", PyNumber_InPlaceMatrixMultiply),
    KILN_NB("imul", PyNumber_InPlaceMultiply),
    KILN_NB("imod", PyNumber_InPlaceRemainder),
    KILN_NB("ior", PyNumber_InPlaceOr),
    {"ipow", [](PyObject* const* a) { return PyNumber_InPlacePower(a[0], a[1], Py_None); }},
    KILN_NB("irshift", PyNumber_InPlaceRshift),
    KILN_NB("isub", PyNumber_InPlaceSubtract),
    KILN_NB("itruediv", PyNumber_InPlaceTrueDivide),
    KILN_NB("ixor", PyNumber_InPlaceXor),
};
constexpr int kFirstInPlace = 13;
const BinaryOp kCompareOps[] = {
    {"lt", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_LT); }},
    {"le", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_LE); }},
    {"eq", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_EQ); }},
    {"ne", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_NE); }},
    {"gt", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_GT); }},
    {"ge", [](PyObject* const* a) { return PyObject_RichCompare(a[0], a[1], Py_GE); }},
};

/// Replaces the two topmost by `o`.
Flow replace_two(Exec& e, PyObject* o) {
  if (!o) return Flow::Error;
  e.drop(2);
  return e.push_seen(o);
}

Flow unary(Exec& e, const char* name, PyObject* (*f)(PyObject* const*)) {
  PyObject* args[1] = {e.top()};
  return e.replace_top(operate(e.m, name, args, 1, f));
}
}  // namespace

bool changes_operand(std::string_view name) {
  if (name == "setitem" || name == "delitem" || name == "iconcat") return true;
  return std::any_of(std::begin(kBinaryOps) + kFirstInPlace, std::end(kBinaryOps),
                     [&](const BinaryOp& op) { return name == op.name; });
}

Flow op_binary_op(Exec& e, int arg) {
  const BinaryOp& op = kBinaryOps[arg];
  PyObject* args[2] = {e.top(1), e.top(0)};
  return replace_two(e, operate(e.m, op.name, args, 2, op.run));
}

Flow op_compare_op(Exec& e, int arg) {
  const BinaryOp& op = kCompareOps[arg];
  PyObject* args[2] = {e.top(1), e.top(0)};
  if ((arg == Py_EQ || arg == Py_NE) && !e.m.is_constant(args[0]) && !e.m.is_constant(args[1]))
    for (PyObject* o : args) e.m.pin(o);
  return replace_two(e, operate(e.m, op.name, args, 2, op.run));
}

Flow op_unary_positive(Exec& e, int) {
  return unary(e, "pos", [](PyObject* const* a) { return PyNumber_Positive(a[0]); });
}
Flow op_unary_negative(Exec& e, int) {
  return unary(e, "neg", [](PyObject* const* a) { return PyNumber_Negative(a[0]); });
}
Flow op_unary_invert(Exec& e, int) {
  return unary(e, "invert", [](PyObject* const* a) { return PyNumber_Invert(a[0]); });
}

Flow op_unary_not(Exec& e, int) {
  const int t = truth(e, e.top());
  if (t < 0) return Flow::Error;
  Py_SETREF(e.top(), Py_NewRef(t ? Py_False : Py_True));
  return Flow::Next;
}

/// `is` between ints of which one is an open size. Small ints are one object, others may be.
static Flow is_of_ints(Exec& e, int arg) {
  constexpr long kSmallest = -5, kLargest = 256;
  const py::Ref a = py::Ref::steal(e.m.with_values(e.top(1))), b = py::Ref::steal(e.m.with_values(e.top(0)));
  if (!a || !b) return Flow::Error;
  bool same = false;
  if (PyLong_CheckExact(a.get()) && PyLong_CheckExact(b.get()) &&
      PyObject_RichCompareBool(a.get(), b.get(), Py_EQ) == 1) {
    const long n = PyLong_AsLong(a.get());
    if (n < kSmallest || n > kLargest) {
      e.m.graph_break("symbolic-branch", "whether two ints are one object");
      return Flow::Error;
    }
    same = true;
  }
  e.drop(2);
  e.push(Py_NewRef(same != static_cast<bool>(arg) ? Py_True : Py_False));
  return Flow::Next;
}

Flow op_is_op(Exec& e, int arg) {
  const bool is = e.top(0) == e.top(1) || e.m.is_same_tuple(e.top(0), e.top(1));
  // Numbers of two places may be one object, as small ints are.
  const auto numeric = [&](PyObject* o) {
    return e.m.is_number(o) || e.m.is_open_number(o) || PyFloat_CheckExact(o) || PyLong_CheckExact(o);
  };
  if (!is && numeric(e.top(0)) && numeric(e.top(1))) {
    if (PyObject* number = e.m.number_among(&e.top(1), 2)) {
      e.m.specialize(number);
      return Flow::Error;
    }
    if (e.m.size_among(&e.top(1), 2)) return is_of_ints(e, arg);
  }
  e.m.distinguish(e.top(0), e.top(1));
  e.drop(2);
  e.push(Py_NewRef(is != static_cast<bool>(arg) ? Py_True : Py_False));
  return Flow::Next;
}

/// Whether `x in o` looks for x's hash.
static bool is_hashed(PyObject* o) {
  static PyObject* name = PyUnicode_InternFromString("__contains__");
  const auto has_that_of = [&](PyTypeObject* type) {
    return PyType_IsSubtype(Py_TYPE(o), type) && _PyType_Lookup(Py_TYPE(o), name) == _PyType_Lookup(type, name);
  };
  return has_that_of(&PyDict_Type) || has_that_of(&PySet_Type) || has_that_of(&PyFrozenSet_Type);
}

Flow op_contains_op(Exec& e, int arg) {
  const int looked_up = e.m.looks_up(e.top(0), e.top(1), Machine::LookUp::Presence);
  if (looked_up < 0 || e.m.refuses_iterator(e.top(0))) return Flow::Error;
  if (PyObject* masked = e.m.masked_among(&e.top(1), 2, /*nested=*/true)) {
    e.m.specialize_masked(masked);
    return Flow::Error;
  }
  const Machine::Hashing hashing(e.m, looked_up ? e.top(1) : nullptr);
  const bool apart = e.m.tell_apart(e.top(0), e.top(1));
  if ((!apart && !e.m.reads(e.top(0), looked_up ? -1 : 0)) || !e.m.reads(e.top(1))) return Flow::Error;
  if (!apart) e.m.pin_lookup(e.top(0), e.top(1));
  int has;
  if (apart) {
    has = e.m.look_up_apart(PySet_Contains, e.top(0), e.top(1));
  } else if (e.m.is_number(e.top(1)) && is_hashed(e.top(0))) {
    const py::Ref key = e.m.key_of_number(e.top(0), e.top(1));
    has = !key ? -1 : key.get() != Py_None;
  } else {
    has = PySequence_Contains(e.top(0), e.top(1));
  }
  if (has < 0) {
    e.m.after_c_call(nullptr);
    return Flow::Error;
  }
  e.drop(2);
  e.push(Py_NewRef((has != 0) != static_cast<bool>(arg) ? Py_True : Py_False));
  return Flow::Next;
}

Flow op_binary_subscr(Exec& e, int) {
  PyObject* container = e.top(1);
  PyObject* args[2] = {container, e.top(0)};
  if (PyType_Check(container)) {  // list[int], Generic[T]
    return replace_two(e, PyObject_GetItem(container, e.top(0)));
  }
  if (PyDict_Check(container)) e.m.pin_lookup(container, e.top(0));
  py::Ref key;
  if (e.m.is_number(e.top(0)) && PyDict_Check(container)) {
    if (!e.m.reads(container)) return Flow::Error;
    key = e.m.key_of_number(container, e.top(0));
    if (!key) return Flow::Error;
    if (key.get() != Py_None) args[1] = key.get();
  }
  const int looked_up = e.m.looks_up(container, args[1], Machine::LookUp::Item);
  if (looked_up < 0) return Flow::Error;
  const Loading loading(e);
  if (looked_up && PyDict_Check(container)) {
    const Machine::Hashing hashing(e.m, args[1]);
    return replace_two(e, e.m.after_c_call(PyObject_GetItem(container, args[1])));
  }
  return replace_two(e,
                     operate(e.m, "getitem", args, 2, [](PyObject* const* a) { return PyObject_GetItem(a[0], a[1]); }));
}

Flow op_store_subscr(Exec& e, int) {
  PyObject* args[3] = {e.top(1), e.top(0), e.top(2)};  // container, key, value
  if (PySlice_Check(args[1]) && e.m.refuses_iterator(args[2])) return Flow::Error;
  if (PyDict_Check(args[0])) e.m.pin_lookup(args[0], args[1]);
  if (PyDict_Check(args[0]) && e.m.is_constant(args[1]) && !PyDict_Contains(args[0], args[1]) &&
      e.m.grows_with(args[0], args[2])) {
    e.m.specialize(args[2]);
    return Flow::Error;
  }
  const int looked_up = e.m.looks_up(args[0], args[1], Machine::LookUp::Presence);
  if (looked_up < 0) return Flow::Error;
  const Machine::Hashing hashing(e.m, looked_up ? args[1] : nullptr);
  const auto set = [](PyObject* const* a) {
    return PyObject_SetItem(a[0], a[1], a[2]) < 0 ? nullptr : Py_NewRef(Py_None);
  };
  PyObject* done = looked_up ? e.m.after_c_call(set(args)) : operate(e.m, "setitem", args, 3, set);
  if (looked_up && done) e.m.note_item_written(args[0], args[1]);
  if (!done) return Flow::Error;
  Py_DECREF(done);
  e.drop(3);
  return Flow::Next;
}

Flow op_delete_subscr(Exec& e, int) {
  if (e.m.refuses_write(e.top(1)) || !e.m.reads(e.top(0))) return Flow::Error;
  if (PyDict_Check(e.top(1))) e.m.pin_lookup(e.top(1), e.top(0));
  e.m.note_write(e.top(1));
  if (PyObject_DelItem(e.top(1), e.top(0)) < 0) return Flow::Error;
  e.drop(2);
  return Flow::Next;
}

// --- containers --------------------------------------------------------------------------------------------------

Flow op_build_tuple(Exec& e, int arg) {
  PyObject* t = PyTuple_New(arg);
  if (!t) return Flow::Error;
  while (--arg >= 0) PyTuple_SET_ITEM(t, arg, e.pop());
  e.push(t);
  return Flow::Next;
}

Flow op_build_list(Exec& e, int arg) {
  PyObject* l = PyList_New(arg);
  if (!l) return Flow::Error;
  while (--arg >= 0) PyList_SET_ITEM(l, arg, e.pop());
  e.push(l);
  return Flow::Next;
}

Flow op_build_set(Exec& e, int arg) {
  py::Ref s = py::Ref::steal(PySet_New(nullptr));
  if (!s) return Flow::Error;
  for (int i = arg - 1; i >= 0; --i) {
    e.m.pin(e.top(i));
    if (PySet_Add(s.get(), e.top(i)) < 0) return Flow::Error;
  }
  e.drop(arg);
  e.push(s.release());
  return Flow::Next;
}

Flow op_build_map(Exec& e, int arg) {
  py::Ref d = py::Ref::steal(PyDict_New());
  if (!d) return Flow::Error;
  for (int i = arg - 1; i >= 0; --i) {
    e.m.pin(e.top(2 * i + 1));
    if (PyDict_SetItem(d.get(), e.top(2 * i + 1), e.top(2 * i)) < 0) return Flow::Error;
  }
  e.drop(2 * arg);
  e.push(d.release());
  return Flow::Next;
}

Flow op_build_const_key_map(Exec& e, int arg) {
  PyObject* keys = e.top();
  py::Ref d = py::Ref::steal(PyDict_New());
  if (!d) return Flow::Error;
  for (int i = 0; i < arg; ++i)
    if (PyDict_SetItem(d.get(), PyTuple_GET_ITEM(keys, i), e.top(arg - i)) < 0) return Flow::Error;
  e.drop(arg + 1);
  e.push(d.release());
  return Flow::Next;
}

Flow op_build_slice(Exec& e, int arg) {
  PyObject* step = arg == 3 ? e.top(0) : nullptr;
  PyObject* s = PySlice_New(e.top(arg - 1), e.top(arg - 2), step);
  if (!s) return Flow::Error;
  e.drop(arg);
  e.push(s);
  return Flow::Next;
}

Flow op_build_string(Exec& e, int arg) {
  static PyObject* empty = PyUnicode_New(0, 0);
  PyObject* s = nullptr;
  if (e.m.number_among(e.sp - arg, static_cast<size_t>(arg))) {
    static PyObject* join = py::check(PyObject_GetAttrString(empty, "join")).release();
    const py::Ref pieces = py::Ref::steal(PyTuple_New(arg));
    for (int i = 0; pieces && i < arg; ++i) PyTuple_SET_ITEM(pieces.get(), i, Py_NewRef(e.sp[i - arg]));
    PyObject* const given[] = {pieces.get()};
    s = pieces ? e.m.make_text(join, given, 1) : nullptr;
  } else {
    s = _PyUnicode_JoinArray(empty, e.sp - arg, arg);
  }
  if (!s) return Flow::Error;
  e.drop(arg);
  e.push(s);
  return Flow::Next;
}

namespace {
/// What FORMAT_VALUE gives for a number or a size; null without an error if it is to be made now.
PyObject* format_unknown(Machine& m, PyObject* value, PyObject* spec, int conversion) {
  static constexpr const char* kConversions[] = {"", "str", "repr", "ascii"};
  static PyObject* format = PyDict_GetItemString(PyEval_GetBuiltins(), "format");
  static PyObject* empty = PyUnicode_New(0, 0);
  PyObject* given[] = {value, spec ? spec : empty};
  if (!m.is_unknown(given, 2)) return nullptr;
  py::Ref converted;
  if (conversion) {
    converted =
        py::Ref::steal(m.make_text(PyDict_GetItemString(PyEval_GetBuiltins(), kConversions[conversion]), &value, 1));
    if (!converted) return nullptr;
    given[0] = converted.get();
  }
  return m.make_text(format, given, 2);
}
}  // namespace

Flow op_format_value(Exec& e, int arg) {
  py::Ref spec = (arg & 4) ? py::Ref::steal(e.pop()) : py::Ref();
  py::Ref value = py::Ref::steal(e.pop());
  // What torch.Tensor.__format__ gives for a tensor of one number.
  if (!(arg & 3) && reinterpret_cast<PyObject*>(Py_TYPE(value.get())) == names().tensor_type &&
      THPVariable_Unpack(value.get()).dim() == 0 && !py::function_mode_active()) {
    py::Ref number = py::Ref::steal(e.m.item_number(value.get()));
    if (number) value = std::move(number);
    if (PyErr_Occurred()) return Flow::Error;
  }
  if (PyObject* text = format_unknown(e.m, value.get(), spec.get(), arg & 3)) {
    e.push(text);
    return Flow::Next;
  }
  if (PyErr_Occurred()) return Flow::Error;
  if (!e.m.reads(value.get())) return Flow::Error;
  if (arg & 3) {
    PyObject* (*convert)(PyObject*) = (arg & 3) == 1 ? PyObject_Str : (arg & 3) == 2 ? PyObject_Repr : PyObject_ASCII;
    value = py::Ref::steal(e.m.after_c_call(convert(value.get())));
    if (!value) return Flow::Error;
  }
  if (PyUnicode_CheckExact(value.get()) && !spec) {
    e.push(value.release());
    return Flow::Next;
  }
  PyObject* s = e.m.after_c_call(PyObject_Format(value.get(), spec.get()));
  if (!s) return Flow::Error;
  e.push(s);
  return Flow::Next;
}

Flow op_list_append(Exec& e, int arg) {
  py::Ref v = py::Ref::steal(e.pop());
  return PyList_Append(e.top(arg - 1), v.get()) < 0 ? Flow::Error : Flow::Next;
}

Flow op_set_add(Exec& e, int arg) {
  py::Ref v = py::Ref::steal(e.pop());
  e.m.pin(v.get());
  return PySet_Add(e.top(arg - 1), v.get()) < 0 ? Flow::Error : Flow::Next;
}

Flow op_map_add(Exec& e, int arg) {
  py::Ref value = py::Ref::steal(e.pop()), key = py::Ref::steal(e.pop());
  e.m.pin(key.get());
  return PyDict_SetItem(e.top(arg - 1), key.get(), value.get()) < 0 ? Flow::Error : Flow::Next;
}

Flow op_list_extend(Exec& e, int arg) {
  py::Ref it = py::Ref::steal(e.pop());
  if (!e.m.iterates(it.get())) return Flow::Error;
  PyObject* none = _PyList_Extend(reinterpret_cast<PyListObject*>(e.top(arg - 1)), it.get());
  if (!none) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) && !Py_TYPE(it.get())->tp_iter && !PySequence_Check(it.get())) {
      PyErr_Clear();
      PyErr_Format(PyExc_TypeError, "Value after * must be an iterable, not %.200s", Py_TYPE(it.get())->tp_name);
    }
    return Flow::Error;
  }
  Py_DECREF(none);
  return Flow::Next;
}

Flow op_set_update(Exec& e, int arg) {
  py::Ref it = py::Ref::steal(e.pop());
  if (!e.m.iterates(it.get())) return Flow::Error;
  e.m.pin(it.get());
  return _PySet_Update(e.top(arg - 1), it.get()) < 0 ? Flow::Error : Flow::Next;
}

Flow op_dict_update(Exec& e, int arg) {
  py::Ref update = py::Ref::steal(e.pop());
  if (!e.m.reads(update.get(), -1)) return Flow::Error;
  e.m.pin(update.get(), /*values=*/false);
  if (PyDict_Update(e.top(arg - 1), update.get()) == 0) return Flow::Next;
  if (PyErr_ExceptionMatches(PyExc_AttributeError))
    PyErr_Format(PyExc_TypeError, "'%.200s' object is not a mapping", Py_TYPE(update.get())->tp_name);
  return Flow::Error;
}

Flow op_dict_merge(Exec& e, int arg) {
  py::Ref update = py::Ref::steal(e.pop());
  if (!e.m.reads(update.get(), -1)) return Flow::Error;
  if (_PyDict_MergeEx(e.top(arg - 1), update.get(), 2) == 0) return Flow::Next;
  PyObject* function = e.top(arg + 1);
  if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Format(PyExc_TypeError, "%R argument after ** must be a mapping, not %.200s", function,
                 Py_TYPE(update.get())->tp_name);
  } else if (PyErr_ExceptionMatches(PyExc_KeyError)) {
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    if (value && PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 1)
      PyErr_Format(PyExc_TypeError, "%R got multiple values for keyword argument '%S'", function,
                   PyTuple_GET_ITEM(value, 0));
    else
      PyErr_Format(PyExc_TypeError, "%R got multiple values for a keyword argument", function);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(tb);
  }
  return Flow::Error;
}

Flow op_list_to_tuple(Exec& e, int) {
  PyObject* t = PyList_AsTuple(e.top());
  if (!t) return Flow::Error;
  Py_SETREF(e.top(), t);
  return Flow::Next;
}

Flow op_unpack_sequence(Exec& e, int arg) {
  py::Ref seq = py::Ref::steal(e.pop());
  PyObject* s = seq.get();
  if ((PyTuple_CheckExact(s) || PyList_CheckExact(s)) && PySequence_Fast_GET_SIZE(s) == arg) {
    PyObject** items = PySequence_Fast_ITEMS(s);
    for (int i = arg - 1; i >= 0; --i) {
      e.push(Py_NewRef(items[i]));
      if (!e.m.observe(items[i])) return Flow::Error;
    }
    return Flow::Next;
  }
  return op_unpack_ex(e, (e.push(seq.release()), arg | (1 << 30)));
}

Flow op_unpack_ex(Exec& e, int arg) {
  const bool exact = arg & (1 << 30);
  if (exact) arg &= ~(1 << 30);
  const int before = exact ? arg : arg & 0xFF, after = exact ? 0 : arg >> 8;
  py::Ref seq = py::Ref::steal(e.pop());
  if (!e.m.iterates(seq.get())) return Flow::Error;
  if (!Py_TYPE(seq.get())->tp_iter && !PySequence_Check(seq.get())) {
    PyErr_Format(PyExc_TypeError, "cannot unpack non-iterable %.200s object", Py_TYPE(seq.get())->tp_name);
    return Flow::Error;
  }
  py::Ref it = py::Ref::steal(PyObject_GetIter(seq.get()));
  if (!it) return Flow::Error;
  std::vector<py::Ref> items;
  for (;;) {
    if (exact && static_cast<int>(items.size()) > before) break;
    PyObject* v = PyIter_Next(it.get());
    if (!v) {
      if (PyErr_Occurred()) return Flow::Error;
      break;
    }
    items.push_back(py::Ref::steal(v));
  }
  const int n = static_cast<int>(items.size());
  if (n < before + after) {
    PyErr_Format(PyExc_ValueError, "not enough values to unpack (expected %s%d, got %d)", exact ? "" : "at least ",
                 before + after, n);
    return Flow::Error;
  }
  if (exact && n > before) {
    PyErr_Format(PyExc_ValueError, "too many values to unpack (expected %d)", before);
    return Flow::Error;
  }
  for (int i = n - 1; i >= n - after; --i) e.push(items[i].new_ref());
  if (!exact) {
    PyObject* rest = PyList_New(n - before - after);
    if (!rest) return Flow::Error;
    for (int i = before; i < n - after; ++i) PyList_SET_ITEM(rest, i - before, items[i].new_ref());
    e.push(rest);
  }
  for (int i = before - 1; i >= 0; --i) e.push(items[i].new_ref());
  for (const py::Ref& r : items)
    if (!e.m.observe(r.get())) return Flow::Error;
  return Flow::Next;
}

// --- functions, classes, imports -----------------------------------------------------------------------------------

Flow op_make_function(Exec& e, int arg) {
  py::Ref code = py::Ref::steal(e.pop());
  auto* f = reinterpret_cast<PyFunctionObject*>(PyFunction_New(code.get(), e.frame->f_globals));
  if (!f) return Flow::Error;
  if (arg & 8) f->func_closure = e.pop();
  if (arg & 4) f->func_annotations = e.pop();
  if (arg & 2) f->func_kwdefaults = e.pop();
  if (arg & 1) f->func_defaults = e.pop();
  e.m.made_functions.insert(reinterpret_cast<PyObject*>(f));
  e.m.alive.push_back(py::Ref::borrow(reinterpret_cast<PyObject*>(f)));
  e.push(reinterpret_cast<PyObject*>(f));
  return Flow::Next;
}

Flow op_load_build_class(Exec& e, int) {
  static PyObject* name = PyUnicode_InternFromString("__build_class__");
  PyObject* f = PyObject_GetItem(e.frame->f_builtins, name);
  if (!f) return Flow::Error;
  e.push(f);
  return Flow::Next;
}

Flow op_setup_annotations(Exec& e, int) {
  static PyObject* name = PyUnicode_InternFromString("__annotations__");
  PyObject* locals = e.frame->f_locals;
  if (!locals) return Flow::Next;
  PyObject* a = PyObject_GetItem(locals, name);
  if (!a) {
    PyErr_Clear();
    a = PyDict_New();
    if (!a || PyObject_SetItem(locals, name, a) < 0) return Flow::Error;
  }
  Py_DECREF(a);
  return Flow::Next;
}

Flow op_print_expr(Exec& e, int) {
  e.m.graph_break("interactive-print", "an expression of the interactive prompt");
  return Flow::Error;
}

Flow op_import_star(Exec& e, int) {
  e.m.graph_break("import-star", "from module import *");
  return Flow::Error;
}

Flow op_import_name(Exec& e, int arg) {
  py::Ref from = py::Ref::steal(e.pop()), level = py::Ref::steal(e.pop());
  PyObject* module;
  {
    // Importing runs the module's own code, which is no part of the captured program.
    Machine::Paused paused(e.m);
    aten::RecordingPaused no_recording;
    module = PyImport_ImportModuleLevelObject(e.name(arg), e.frame->f_globals, nullptr, from.get(),
                                              static_cast<int>(PyLong_AsLong(level.get())));
  }
  if (!module) return Flow::Error;
  e.push(module);
  e.m.remember_constant(module);
  return Flow::Next;
}

Flow op_import_from(Exec& e, int arg) {
  PyObject* v = e.m.load_attr(e.top(), e.name(arg), true);
  if (!v && !PyErr_Occurred()) {
    py::Ref package = py::Ref::steal(e.m.load_attr(e.top(), names().name));
    if (!package) return Flow::Error;
    py::Ref full = py::Ref::steal(PyUnicode_FromFormat("%U.%U", package.get(), e.name(arg)));
    v = full ? PyImport_GetModule(full.get()) : nullptr;
    if (v) e.m.remember_constant(v);
    if (!v && !PyErr_Occurred())
      PyErr_Format(PyExc_ImportError, "cannot import name %R from %R", e.name(arg), package.get());
  }
  return e.push_seen(v);
}

// --- calls -----------------------------------------------------------------------------------------------------------

Flow op_kw_names(Exec& e, int arg) {
  e.kwnames = PyTuple_GET_ITEM(e.code->co_consts, arg);
  return Flow::Next;
}

Flow op_precall(Exec&, int) { return Flow::Next; }

Flow op_call(Exec& e, int arg) {
  PyObject* kwnames = std::exchange(e.kwnames, nullptr);
  const bool method = e.top(arg + 1) != nullptr;
  PyObject** args = e.sp - arg;
  PyObject* callable = method ? args[-2] : args[-1];
  const size_t total = static_cast<size_t>(arg) + (method ? 1 : 0) - (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
  PyObject* v = method ? e.m.call(callable, args - 1, total, kwnames)
                       : e.m.call(callable, args, total | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
  if (!v) return Flow::Error;
  e.drop(arg + 1);
  Py_XDECREF(e.pop());
  const Loading loading(e);
  return e.push_seen(v);
}

Flow op_call_function_ex(Exec& e, int arg) {
  py::Ref kwargs = (arg & 1) ? py::Ref::steal(e.pop()) : py::Ref();
  py::Ref args = py::Ref::steal(e.pop());
  PyObject* callable = e.top();
  if (!e.m.iterates(args.get())) return Flow::Error;
  if (kwargs && !e.m.reads(kwargs.get(), -1)) return Flow::Error;
  if (kwargs && !PyDict_CheckExact(kwargs.get())) {
    py::Ref d = py::Ref::steal(PyDict_New());
    if (!d || _PyDict_MergeEx(d.get(), kwargs.get(), 2) < 0) return Flow::Error;
    kwargs = std::move(d);
  }
  if (!PyTuple_CheckExact(args.get())) {
    if (!Py_TYPE(args.get())->tp_iter && !PySequence_Check(args.get())) {
      PyErr_Format(PyExc_TypeError, "%R argument after * must be an iterable, not %.200s", callable,
                   Py_TYPE(args.get())->tp_name);
      return Flow::Error;
    }
    args = py::Ref::steal(PySequence_Tuple(args.get()));
    if (!args) return Flow::Error;
  }
  PyObject* v = e.m.call_ex(callable, args.get(), kwargs.get());
  if (!v) return Flow::Error;
  e.drop(1);            // the function
  Py_XDECREF(e.pop());  // the NULL below it
  return e.push_seen(v);
}

}  // namespace kiln::capture
