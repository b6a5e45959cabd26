// Floats and ints that changed between calls, and those that item() gives: the graph has them as 0-dim tensors, and the
// program sees kiln._numbers.Number in their place. Whatever needs the value ends the attempt; the next one takes that
// number for a constant again, and has a guard on what that call of item() gives, or breaks there.
#include <numeric>

#include "aten/fake.h"
#include "base/error.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/machine.h"
#include "python/capture/sizes.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
PyObject* member(const char* name) { return member_of("kiln._numbers", name); }
PyTypeObject* number_type() {
  static PyObject* t = member("Number");
  return reinterpret_cast<PyTypeObject*>(t);
}

/// What the element of an int tensor cannot exceed in magnitude.
uint64_t largest_magnitude(const aten::Trace& trace, const at::Tensor& t) {
  // How many of so many are true: a metric, as a rule.
  static const graph::Op sum("aten::sum"), count("aten::count_nonzero");
  const graph::Value v = trace.find(t);
  if (v && !t.is_inference() && t._version() == 0 && v.node->kind == graph::NodeKind::Call &&
      (v.node->op == sum || v.node->op == count)) {
    const graph::TensorMeta& of = v.node->arg(0).value().meta();
    const int64_t number = std::accumulate(of.sizes.begin(), of.sizes.end(), int64_t{1}, std::multiplies<>());
    if (v.node->op == count || of.dtype == DType::Bool) return static_cast<uint64_t>(number);
  }
  return uint64_t{1} << (8 * t.element_size() - 1 + (t.scalar_type() == at::kByte));
}
}  // namespace

void load_numbers() {
  number_type();
  text_type();
  masked_type();
}

bool Machine::is_number(PyObject* o) const { return has_numbers && Py_TYPE(o) == number_type(); }

PyObject* Machine::class_of_number(PyObject* number) {
  if (Py_TYPE(number) == text_type()) {
    const py::Ref sample = py::check(PyObject_GetAttrString(number, "sample"));
    return reinterpret_cast<PyObject*>(Py_TYPE(sample.get()));
  }
  const py::Ref bound = py::check(PyObject_GetAttrString(number, "bound"));
  const py::Ref of_numpy = py::check(PyObject_GetAttrString(number, "numpy"));
  if (of_numpy.get() != Py_None) return of_numpy.get();  // the class is NumPy's, and lives on
  return reinterpret_cast<PyObject*>(bound.get() == Py_None ? &PyFloat_Type : &PyLong_Type);
}

bool Machine::is_changing(PyObject* o, const SourcePtr& source) const {
  if (!options.changing_numbers || options.changing_numbers->empty()) return false;
  const auto changes = [&](const SourcePtr& s) {
    const std::string text = s->id();
    return options.changing_numbers->count(text) &&
           (options.constant_numbers_break || !options.constant_numbers.count(text));
  };
  const auto may = [&](PyObject* x) {
    if (py::is_float(x)) return options.floats_change;
    return (options.ints_change || options.constant_numbers_break) && guards::is_small_int(x);
  };
  const auto is = [&](PyObject* x, const SourcePtr& s) { return opens_int(x, s) || (may(x) && changes(s)); };
  if (!PyTuple_CheckExact(o)) return is(o, source);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i)
    if (is(PyTuple_GET_ITEM(o, i), guards::list_item(source, i))) return true;
  return false;
}

PyObject* Machine::number_for(PyObject* o, const SourcePtr& source) {
  if (opens_int(o, source)) return open_int(o, source);
  const std::string text = source->id();
  if (auto it = numbers.find(text); it != numbers.end()) return it->second.new_ref();
  const bool whole = PyLong_CheckExact(o);
  py::Ref real, fake;
  {
    aten::RecordingPaused paused;
    real = py::Ref::steal(THPVariable_Wrap(py::graph_input(o)));
  }
  if (!real) return nullptr;
  fake = py::Ref::steal(make_fake(real.get(), source));
  if (!fake) return nullptr;
  find(fake.get())->active = true;  // the number is found again, not a tensor: its type is the only guard
  if (whole)
    guard(Guard::Kind::SmallInt, source);
  else
    guard(Guard::Kind::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
  has_numbers = true;
  Paused plainly(*this);
  py::Ref bound = whole ? py::Ref::steal(PyLong_FromLongLong(guards::kSmallInt - 1)) : py::Ref::borrow(Py_None);
  const bool of_numpy = !whole && !PyFloat_CheckExact(o);
  py::Ref number = py::Ref::steal(PyObject_CallFunction(reinterpret_cast<PyObject*>(number_type()), "O(s)OOO",
                                                        fake.get(), text.c_str(), Py_False, bound.get(),
                                                        of_numpy ? reinterpret_cast<PyObject*>(Py_TYPE(o)) : Py_None));
  if (!number) return nullptr;
  number_sources[number.get()] = source;
  return (numbers[text] = number).new_ref();
}

py::Ref Machine::number_of_numpy(PyObject* o) {
  if (!py::is_float(o) || PyFloat_CheckExact(o) || !reads(o)) return {};
  static PyObject* const of_numpy = member("of_numpy");
  const py::Ref plain = py::Ref::steal(PyFloat_FromDouble(PyFloat_AS_DOUBLE(o)));
  return py::Ref::steal(PyObject_CallFunctionObjArgs(of_numpy, plain.get(), Py_TYPE(o), nullptr));
}

PyObject* Machine::number_step(PyObject* const* args, size_t n) {
  KILN_CHECK(n >= 2 && PyUnicode_Check(args[0]), "kiln._C._number takes what to do and an object");
  if (PyUnicode_CompareWithASCIIString(args[0], "is") == 0) return Py_NewRef(is_number(args[1]) ? Py_True : Py_False);
  if (PyUnicode_CompareWithASCIIString(args[0], "masked") == 0)
    return Py_NewRef(is_masked(args[1]) ? Py_True : Py_False);
  if (PyUnicode_CompareWithASCIIString(args[0], "eager_if") == 0) {
    KILN_CHECK(n == 3 && py::is_tensor(args[1]), "a condition is a tensor");
    const at::Tensor condition = THPVariable_Unpack(args[1]);
    const bool asked = add_eager_condition(condition) || assert_that(condition, /*wanted=*/false);
    return asked ? Py_NewRef(Py_None) : need_values(args[2]);
  }
  if (PyUnicode_CompareWithASCIIString(args[0], "decide") == 0) {
    KILN_CHECK(n == 4 && py::is_tensor(args[1]), "a condition is a tensor");
    const at::Tensor condition = THPVariable_Unpack(args[1]);
    std::optional<bool> truth = asserted_truth();
    if (!truth || !assert_that(condition, *truth)) truth = decide(condition);
    if (!truth) return need_values(args[2]);
    PyObject* const of_python = *truth ? Py_True : Py_False;
    return args[3] == Py_None ? Py_NewRef(of_python) : truth_of_numpy(of_python);
  }
  if (PyUnicode_CompareWithASCIIString(args[0], "numpy") == 0) return PyBool_FromLong(capture::is_of_numpy(args[1]));
  if (PyUnicode_CompareWithASCIIString(args[0], "open_class") == 0) {
    if (!is_open_number(args[1])) return Py_NewRef(Py_None);
    return Py_NewRef(reinterpret_cast<PyObject*>(is_size(args[1]) ? &PyLong_Type : &PyFloat_Type));
  }
  if (PyUnicode_CompareWithASCIIString(args[0], "text") == 0) return need_text();
  return need_values(args[1]);
}

std::optional<bool> Machine::asserted_truth() const {
  // What runs is decide(), called by the comparison's method or by what stands for math.isnan, called by the program.
  py311::Frame* f = ts->cframe->current_frame;
  for (int i = 0; i < 2 && f && f != root; ++i) f = f->previous;
  const uint8_t* units = f ? py311::plain_code(f->f_code) : nullptr;
  int at = units ? py311::last_instruction(f) : -1;
  if (at < 0 || (units[2 * at] != COMPARE_OP && units[2 * at] != CALL)) return std::nullopt;
  at += 1 + py311::cache_units(units[2 * at]);
  const uint8_t op = units[2 * at];
  if (op != POP_JUMP_FORWARD_IF_TRUE && op != POP_JUMP_FORWARD_IF_FALSE) return std::nullopt;
  return truth_that_goes_on(f->f_code, at + 1, units[2 * at + 1], op == POP_JUMP_FORWARD_IF_TRUE);
}

PyObject* Machine::need_values(PyObject* sources) {
  // A break at item() may spare the floats.
  for (const bool items : {true, false}) {
    if (!needed_items.empty()) break;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); ++i) {
      const std::string source = PyUnicode_AsUTF8(PyTuple_GET_ITEM(sources, i));
      if ((source.starts_with(kItem) || source.starts_with(kMask)) != items) continue;
      (items ? needed_items : needed_numbers).insert(source);
      if (auto number = numbers.find(source); number != numbers.end())
        needed_int |= class_of_number(number->second.get()) == reinterpret_cast<PyObject*>(&PyLong_Type);
    }
  }
  return graph_break("symbolic-branch", "the value of a number that the graph computes with is needed");
}

std::string Machine::call_site() {
  std::string text;
  for (py311::Frame* f = ts->cframe->current_frame; f; f = f->previous) {
    const graph::StackFrame& at = *place_of(f);
    text += (text.empty() ? "" : ", called at ") + at.file + ":" + std::to_string(at.line) + " in " + at.function +
            " [" + std::to_string(py311::last_instruction(f)) + "]";
    if (f == root) break;
  }
  return text;
}

PyObject* Machine::item_number(PyObject* o) {
  if (options.for_fx || !py::is_tensor(o)) return nullptr;
  const at::Tensor t = THPVariable_Unpack(o);
  if (!aten::is_fake(t) || t.numel() != 1 || !t.device().is_cpu()) return nullptr;
  const at::ScalarType type = t.scalar_type();
  // The truth of what is cheap to compute is a branch, whoever asks for it.
  if (type == at::kBool && t.dim() == 0)
    if (const std::optional<bool> truth = decide(t)) return PyBool_FromLong(*truth);
  const bool whole = c10::isIntegralType(type, /*includeBool=*/false) && c10::elementSize(type) <= 8;
  if (!whole && type != at::kDouble && type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return nullptr;
  if (const auto known = constant_value(t))
    return known->isFloatingPoint() ? PyFloat_FromDouble(known->toDouble()) : PyLong_FromLongLong(known->toLong());
  const std::string source = kItem + call_site();
  if (!options.item_numbers || options.breaking_items.count(source)) {
    const at::Tensor now = whole ? decide_numbers(t) : at::Tensor();
    return now.defined() ? PyLong_FromLongLong(now.item().toLong()) : nullptr;
  }
  static PyObject* item = member("item");
  has_numbers = true;
  const py::Ref bound =
      whole ? py::check(PyLong_FromUnsignedLongLong(largest_magnitude(trace, t))) : py::Ref::borrow(Py_None);
  return PyObject_CallFunction(item, "OsO", o, source.c_str(), bound.get());
}

bool Machine::grows_with(PyObject* container, PyObject* number) {
  if (is_text(number)) return find(container);
  if (!is_number(number) || !find(container)) return false;
  const py::Ref sources = py::check(PyObject_GetAttrString(number, "sources"));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources.get()); ++i)
    if (std::string_view(PyUnicode_AsUTF8(PyTuple_GET_ITEM(sources.get(), i))).starts_with(kItem)) return true;
  return false;
}

PyObject* Machine::call_number_function(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  static PyObject* functions = member("FUNCTIONS");
  PyObject* function = PyDict_GetItem(functions, callable);
  if (function && text_among(args, count_of(nargsf, kwnames))) return need_text();
  return function ? PyObject_Vectorcall(function, args, nargsf, kwnames) : nullptr;
}

PyObject* Machine::specialize(PyObject* number) {
  if (is_text(number)) return need_text();
  py::Ref sources = py::Ref::steal(PyObject_GetAttrString(number, "sources"));
  static PyObject* what = PyUnicode_InternFromString("specialize");
  PyObject* args[] = {what, sources.get()};
  return sources ? number_step(args, 2) : nullptr;
}

PyObject* Machine::result_of_slot(const py311::Frame* frame, PyObject* result) {
  if (!is_number(result) && !is_text(result) && !is_open_number(result)) return result;
  static const auto slots = [] {
    std::vector<PyObject*> names;
    for (const char* name : {"__hash__", "__index__", "__int__", "__float__", "__complex__", "__format__", "__str__",
                             "__repr__", "__length_hint__"})
      names.push_back(PyUnicode_InternFromString(name));
    return names;
  }();
  PyObject* self = frame->f_code->co_argcount > 0 ? frame->localsplus[0] : nullptr;
  if (self && PyCell_Check(self)) self = PyCell_GET(self);
  const auto is_slot = [&](PyObject* name) {
    return _PyType_Lookup(Py_TYPE(self), name) == reinterpret_cast<PyObject*>(frame->f_func);
  };
  if (!self || std::none_of(slots.begin(), slots.end(), is_slot)) return result;
  const py::Ref held = py::Ref::steal(result);
  return is_open_number(result) ? with_values(result) : specialize(result);
}

bool Machine::refuses_stand_in() const {
  PyObject* value = ts->curexc_value;
  if (!(has_numbers || has_masked) || ts->curexc_type != PyExc_TypeError || !value) return false;
  // C code's message is a str: no other is asked for its text, which may be the program's to make.
  if (PyExceptionInstance_Check(value)) {
    PyObject* args = reinterpret_cast<PyBaseExceptionObject*>(value)->args;
    value = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : nullptr;
  }
  if (!value || !PyUnicode_CheckExact(value)) return false;
  static PyObject* const number = PyUnicode_FromString(number_type()->tp_name);
  static PyObject* const text = PyUnicode_FromString(text_type()->tp_name);
  static PyObject* const masked = PyUnicode_FromString(masked_type()->tp_name);
  return PyUnicode_Contains(value, number) == 1 || PyUnicode_Contains(value, text) == 1 ||
         (has_masked && PyUnicode_Contains(value, masked) == 1);
}

PyObject* Machine::retry_with_numbers(int64_t before, PyObject* const* args, size_t n,
                                      const std::function<PyObject*(PyObject* const*)>& again) {
  if (broken || !(PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_AttributeError)))
    return nullptr;
  PyObject* number = number_among(args, n, /*nested=*/true);
  if (!number && (instructions != before || !size_among(args, n))) return nullptr;
  PyErr_Clear();
  return number ? specialize(number) : on_values(args, n, again);
}

PyObject* Machine::number_among(PyObject* const* args, size_t n, bool nested) const {
  for (size_t i = 0; has_numbers && i < n; ++i) {
    if (!args[i]) continue;
    if (is_number(args[i]) || is_text(args[i])) return args[i];
    if (!nested || !(PyList_CheckExact(args[i]) || PyTuple_CheckExact(args[i]))) continue;
    PyObject** items = PySequence_Fast_ITEMS(args[i]);
    if (PyObject* number = number_among(items, static_cast<size_t>(Py_SIZE(args[i])), nested)) return number;
  }
  return nullptr;
}

py::Ref Machine::key_of_number(PyObject* container, PyObject* number) {
  static PyObject* key_in = member("key_in");
  return py::Ref::steal(PyObject_CallFunctionObjArgs(key_in, container, number, nullptr));
}

PyObject* Machine::operate_on_numbers(const char* op, PyObject* const* args) {
  if (text_among(args, 2)) return need_text();
  static PyObject* binary = member("binary");
  return PyObject_CallFunction(binary, "sOO", op, args[0], args[1]);
}

PyObject* Machine::store_number(PyObject* const* args, const std::function<PyObject*(PyObject* const*)>& store) {
  static PyObject* stored = member("stored");
  PyObject* const given[] = {args[0], args[2]};
  const py::Ref tensor = py::Ref::steal(call(stored, given, 2, nullptr));
  if (!tensor) return nullptr;
  PyObject* const with_tensor[] = {args[0], args[1], tensor.get()};
  return store(with_tensor);
}

PyObject* Machine::call_with_numbers(PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames) {
  static PyObject* function = member("call");
  return text_among(args.data(), args.size()) ? need_text() : call_instead(function, callable, args, kwnames);
}

PyObject* call_instead(PyObject* function, PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames) {
  const size_t named = kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0, n = args.size() - named;
  const py::Ref positional = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(n)));
  const py::Ref keywords = py::Ref::steal(PyDict_New());
  if (!positional || !keywords) return nullptr;
  for (size_t i = 0; i < n; ++i) PyTuple_SET_ITEM(positional.get(), i, Py_NewRef(args[i]));
  for (size_t i = 0; i < named; ++i)
    if (PyDict_SetItem(keywords.get(), PyTuple_GET_ITEM(kwnames, i), args[n + i]) < 0) return nullptr;
  return PyObject_CallFunctionObjArgs(function, callable, positional.get(), keywords.get(), nullptr);
}

PyObject* member_of(const char* module, const char* name) {
  const py::Ref imported = py::check(py::import_module(module));
  return py::check(PyObject_GetAttrString(imported.get(), name)).release();
}

PyObject* number_value_function() {
  static PyObject* f = member("value");
  return f;
}

}  // namespace kiln::capture
