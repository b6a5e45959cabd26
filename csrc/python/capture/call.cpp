// Calls: Python functions come back through the frame hook; C functions by their policy.
#include <algorithm>
#include <string_view>

#include "aten/fake.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/sizes.h"
#include "python/capture/user_rules.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

std::string describe(PyObject* callable) {
  PyObject* shown = callable;
  py::Ref name = py::Ref::steal(PyObject_GetAttr(shown, names().qualname));
  if (!name) PyErr_Clear();
  py::Ref module = py::Ref::steal(PyObject_GetAttr(shown, names().module));
  if (!module) PyErr_Clear();
  if (!name || !PyUnicode_Check(name.get())) return std::string("an object of class ") + Py_TYPE(callable)->tp_name;
  std::string s;
  if (module && PyUnicode_Check(module.get())) s = std::string(PyUnicode_AsUTF8(module.get())) + ".";
  return s + PyUnicode_AsUTF8(name.get());
}

namespace {
/// Functions of torch.nn.functional and torch.functional are one node at torch level, whatever they call.
bool is_functional_leaf(PyObject* f) {
  static auto* known = new std::unordered_map<PyObject*, bool>();  // by code object, which is kept
  auto* function = reinterpret_cast<PyFunctionObject*>(f);
  auto it = known->find(function->func_code);
  if (it != known->end()) return it->second;
  PyObject* module = function->func_module;
  const bool leaf = module && PyUnicode_Check(module) && PyUnicode_READ_CHAR(function->func_name, 0) != '_' &&
                    (strcmp(PyUnicode_AsUTF8(module), "torch.nn.functional") == 0 ||
                     strcmp(PyUnicode_AsUTF8(module), "torch.functional") == 0);
  Py_INCREF(function->func_code);
  (*known)[function->func_code] = leaf;
  return leaf;
}

bool is_named(PyObject* callable, const char* name) { return strcmp(name_of(callable), name) == 0; }

/// Whether the one named argument of torch's function is a number that scales another: alpha, or value.
bool takes_factor(PyObject* callable, PyObject* kwnames) {
  PyObject* keyword = PyTuple_GET_ITEM(kwnames, 0);
  const auto any = [&](std::initializer_list<const char*> functions) {
    return std::any_of(functions.begin(), functions.end(), [&](const char* f) { return is_named(callable, f); });
  };
  if (PyUnicode_CompareWithASCIIString(keyword, "alpha") == 0) return any({"add", "add_", "sub", "sub_"});
  return PyUnicode_CompareWithASCIIString(keyword, "value") == 0 && any({"addcmul", "addcmul_", "addcdiv", "addcdiv_"});
}

/// Whether it is a list, or a tuple, of tensors and numbers of Python's, those of the graph among them, or of such
/// lists.
bool holds_numbers(Machine& m, PyObject* o) {
  return !any_within(o, [&](PyObject* i) {
    if (py::is_tensor(i)) return false;
    if (m.is_open_number(i)) return is_of_numpy(i);
    PyObject* const type = m.is_number(i) ? m.class_of_number(i) : reinterpret_cast<PyObject*>(Py_TYPE(i));
    return type != reinterpret_cast<PyObject*>(&PyLong_Type) && type != reinterpret_cast<PyObject*>(&PyFloat_Type);
  });
}

bool is_lru_cache(PyTypeObject* t) { return strcmp(t->tp_name, "functools._lru_cache_wrapper") == 0; }
/// Whether C code may read the values of numbers among the arguments, without asking them for an index.
bool converts_numbers(Policy policy) {
  switch (policy) {
    case Policy::Torch:
    case Policy::TensorData:
    case Policy::Item:
    case Policy::Paused:
    case Policy::RequiresGrad:
    case Policy::ReadSetting:
    case Policy::WriteSetting:
    case Policy::Unknown:
      return true;
    default:
      return false;
  }
}

/// type.__new__(metaclass, name, bases, namespace) or __build_class__.
bool makes_class(PyObject* callable, PyObject* self, size_t count) {
  if (!PyCFunction_Check(callable)) return false;
  const std::string_view name = name_of(callable);
  if (name == "__new__")
    return self && PyType_Check(self) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(self), &PyType_Type) &&
           count > 4;
  return name == "__build_class__";
}
}  // namespace

/// A fake, or what a transform has wrapped around one.
static bool is_traced(const at::Tensor& t) { return aten::is_fake(t) || aten::is_wrapper(t); }

bool Machine::has_fake(PyObject* o, int level) {
  if (py::is_tensor(o)) return is_traced(THPVariable_Unpack(o));
  if (level > 3) return false;
  if (PyTuple_Check(o) || PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i)
      if (has_fake(PySequence_Fast_GET_ITEM(o, i), level + 1)) return true;
  } else if (PyDict_Check(o)) {
    Py_ssize_t pos = 0;
    PyObject *k, *v;
    while (PyDict_Next(o, &pos, &k, &v))
      if (has_fake(v, level + 1)) return true;
  }
  return false;
}

PyObject* Machine::after_c_call(PyObject* r) {
  if (trace.failure && !broken) {
    aten::Trace::Failure failure = *std::exchange(trace.failure, std::nullopt);
    if (!r && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) return nullptr;
    Py_XDECREF(r);
    return graph_break(failure.id.c_str(), failure.cause);
  }
  if (!r) return nullptr;
  if (broken) {  // C code swallowed the exception that carries the break
    Py_DECREF(r);
    if (!PyErr_Occurred()) PyErr_SetNone(graph_break_type());
    return nullptr;
  }
  const Class c = classify(r);
  if (c == Class::Constant || c == Class::Singleton || c == Class::Type) return r;
  if (Known* k = find(r)) {
    if (k->stand_in.get() != r) {
      Py_DECREF(r);
      r = k->stand_in.new_ref();
    }
    if (!observe(r)) Py_CLEAR(r);
    return r;
  }
  if (c == Class::Tensor && !is_traced(THPVariable_Unpack(r))) {
    Py_DECREF(r);
    return graph_break("tensor-from-c-code", "a tensor that came out of C code without a path to it");
  }
  return r;
}

bool Machine::refuses_iterator(PyObject* o) {
  static PyObject* name = PyUnicode_InternFromString("__next__");
  PyTypeObject* t = Py_TYPE(o);
  if (!(PyIter_Check(o) || PyCoro_CheckExact(o)) || !find_plain(o)) return false;
  if (PyObject* next = _PyType_Lookup(t, name); next && PyFunction_Check(next)) return false;  // captured itself
  graph_break("iterator-from-outside",
              std::string("a use of a ") + t->tp_name + " that was made before the captured code");
  return true;
}

bool Machine::refuses_arguments(PyObject* const* args, size_t nargsf, PyObject* kwnames, bool iterators) {
  for (size_t i = 0; iterators && i < static_cast<size_t>(PyVectorcall_NARGS(nargsf)); ++i)
    if (refuses_iterator(args[i])) return true;
  for (size_t i = 0; i < count_of(nargsf, kwnames); ++i)
    if (refuses_callback(args[i])) return true;
  return false;
}

bool Machine::overrides_among(PyObject* const* args, size_t n) const {
  static PyObject* has_override = PyObject_GetAttrString(PyImport_AddModule("torch._C"), "_has_torch_function_unary");
  for (size_t i = 0; i < n; ++i) {
    PyObject* o = args[i];
    if (PyTuple_Check(o) || PyList_Check(o)) {
      if (overrides_among(PySequence_Fast_ITEMS(o), static_cast<size_t>(PySequence_Fast_GET_SIZE(o)))) return true;
    } else if (!is_number(o) && !is_open_number(o)) {
      const py::Ref has = py::Ref::steal(PyObject_CallOneArg(has_override, o));
      if (has.get() == Py_True) return true;
    }
  }
  return false;
}

bool Machine::reshapes_input(PyObject* o) {
  if (!py::is_tensor(o) || !index.contains(o)) return false;
  const auto& nodes = trace.graph().nodes();
  const aten::OpInfo* op = nodes.empty() ? nullptr : aten::find_op(nodes.back()->op);
  return op && op->kind == aten::OpKind::InPlaceView && nodes.back()->args.size() > 0 &&
         nodes.back()->arg(0).is_value() && nodes.back()->arg(0).value() == trace.value_of(THPVariable_Unpack(o));
}

PyObject* Machine::call_ex(PyObject* callable, PyObject* args, PyObject* kwargs) {
  const Py_ssize_t n = PyTuple_GET_SIZE(args), nk = kwargs ? PyDict_GET_SIZE(kwargs) : 0;
  std::vector<PyObject*> flat(static_cast<size_t>(1 + n + nk));
  for (Py_ssize_t i = 0; i < n; ++i) flat[1 + i] = PyTuple_GET_ITEM(args, i);
  py::Ref kwnames;
  if (nk) {
    kwnames = py::Ref::steal(PyTuple_New(nk));
    if (!kwnames) return nullptr;
    Py_ssize_t pos = 0, i = 0;
    PyObject *k, *v;
    while (PyDict_Next(kwargs, &pos, &k, &v)) {
      if (!PyUnicode_Check(k)) {
        PyErr_SetString(PyExc_TypeError, "keywords must be strings");
        return nullptr;
      }
      PyTuple_SET_ITEM(kwnames.get(), i, Py_NewRef(k));
      flat[1 + n + i++] = v;
    }
  }
  return call(callable, flat.data() + 1, static_cast<size_t>(n) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames.get());
}

PyObject* Machine::constant_result(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  const size_t all = count_of(n, kwnames);
  std::vector<PyObject*> given(args, args + all);
  for (PyObject*& o : given) {
    if (!has_fake(o)) continue;
    PyObject* real = py::is_tensor(o) ? real_of(o) : nullptr;
    const auto written = [](const at::Tensor& t) { return t.is_inference() || t._version() != 0; };
    if (!real || new_data(o) || written(THPVariable_Unpack(o)))
      return graph_break("call-that-breaks",
                         "a call of " + describe(callable) + " with tensors that are computed here");
    o = real;
  }
  Paused paused_here(*this);
  aten::RecordingPaused no_recording;
  const py::Ref result = py::Ref::steal(PyObject_Vectorcall(callable, given.data(), n, kwnames));
  return result ? see(result.get(), child(guards::Source::Kind::Const, nullptr, result.get())) : nullptr;
}

namespace {
/// The Python function that torch.jit.script compiled, or nothing for any other object. torch.jit.trace leaves one,
/// too, but has run it for its examples alone; it gives no name to what it makes.
py::Ref function_behind_script(PyObject* o) {
  static PyObject* const script = PyObject_GetAttrString(PyImport_AddModule("torch.jit"), "ScriptFunction");
  static PyObject* const behind = PyUnicode_InternFromString("_torchdynamo_inline");
  PyObject** const dict = reinterpret_cast<PyObject*>(Py_TYPE(o)) == script ? _PyObject_GetDictPtr(o) : nullptr;
  if (!dict || !*dict || !PyDict_Contains(*dict, names().name)) return {};
  PyObject* const function = PyDict_GetItem(*dict, behind);
  return function && PyFunction_Check(function) ? py::Ref::borrow(function) : py::Ref();
}
}  // namespace

PyObject* Machine::call(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  PyTypeObject* t = Py_TYPE(callable);
  const size_t n = PyVectorcall_NARGS(nargsf);
  const size_t all = n + (kwnames ? static_cast<size_t>(PyTuple_GET_SIZE(kwnames)) : 0);
  auto native = [&] { return PyObject_Vectorcall(callable, args, nargsf, kwnames); };
  auto prepend = [&](PyObject* function, PyObject* self) {
    std::vector<PyObject*> flat(all + 2);
    flat[1] = self;
    std::copy(args, args + all, flat.begin() + 2);
    return call(function, flat.data() + 1, (n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
  };
  const UserRule rule = user_rule(callable);
  if (PyObject* number = rule == UserRule::None ? nullptr : number_among(args, all)) return specialize(number);
  if (PyObject* masked = rule == UserRule::None ? nullptr : masked_among(args, all, /*nested=*/true))
    return specialize_masked(masked);
  if ((rule != UserRule::None || is_torch_operator(callable)) && size_among(args, all))
    return on_values(args, all, [&](PyObject* const* values) { return call(callable, values, n, kwnames); });
  switch (rule) {
    case UserRule::None:
      break;
    case UserRule::Disallow:
      return graph_break("call-that-breaks", "a call of " + describe(callable));
    case UserRule::AllowInGraph:
      return torch_call(callable, args, n, kwnames, [&] {
        Paused paused_here(*this);
        return native();
      });
    case UserRule::ConstantResult:
      return constant_result(callable, args, n, kwnames);
  }
  if (t == &PyFunction_Type) {
    PyObject* const masked = masked_among(args, all, /*nested=*/false);
    if (masked)
      if (PyObject* r = call_on_masked(callable, {args, args + all}, kwnames); r || PyErr_Occurred()) return r;
    if (!masked && torch_depth == 0 && all > 0 && is_functional_leaf(callable)) {
      bool fake = false;
      for (size_t i = 0; i < all && !fake; ++i) fake = has_fake(args[i]);
      if (fake && !number_among(args, all)) return torch_call(callable, args, n, kwnames, native);
    }
    if (PyObject* r = call_numpy(callable, args, nargsf, kwnames); r || PyErr_Occurred()) return r;
    return native();
  }
  if (t == &PyMethod_Type) {
    py::Ref function, self;
    if (find_plain(callable)) {
      function = py::Ref::steal(load_attr(callable, names().func));
      self = py::Ref::steal(load_attr(callable, names().self));
      if (!function || !self) return nullptr;
    } else {
      function = py::Ref::borrow(PyMethod_GET_FUNCTION(callable));
      self = py::Ref::borrow(PyMethod_GET_SELF(callable));
    }
    return prepend(function.get(), self.get());
  }
  if (PyType_Check(callable)) return call_type(callable, args, nargsf, kwnames);
  if (reinterpret_cast<PyObject*>(t) == names().partial) return call_partial(callable, args, nargsf, kwnames);
  if (t == &PyCFunction_Type || t == &PyCMethod_Type || t == &PyMethodDescr_Type || t == &PyWrapperDescr_Type ||
      t == &_PyMethodWrapper_Type || t == &PyClassMethodDescr_Type) {
    const int64_t before = instructions;
    PyObject* r = call_c(callable, args, nargsf, kwnames);
    return r ? r : retry_with_numbers(before, args, all, [&](PyObject* const* v) {
      return call_c(callable, v, n, kwnames);
    });
  }
  if (is_torch_operator(callable)) {
    if (has_ways_of_its_own(callable)) return graph_break("call-that-breaks", "a call of " + describe(callable));
    guard_identity(callable);
    if (PyObject* number = number_among(args, all)) return specialize(number);
    if (PyObject* masked = masked_among(args, all, /*nested=*/true)) return specialize_masked(masked);
    if (!reads_arguments(callable, args, all)) return nullptr;
    return torch_call(callable, args, n, kwnames, [&] {
      Paused paused_here(*this);
      return native();
    });
  }
  if (options.look_through && options.look_through(callable)) {
    static PyObject* wrapped_name = PyUnicode_InternFromString("_kiln_wrapped");
    py::Ref wrapped = py::Ref::steal(load_attr(callable, wrapped_name));
    if (!wrapped) return nullptr;
    if (Known* k = find_plain(callable)) guard(Guard::Kind::Is, k->source, callable);
    return call(wrapped.get(), args, nargsf, kwnames);
  }
  // An instance with __call__ in Python comes back through the hook.
  PyObject* method = _PyType_Lookup(t, names().call);
  if (method && Py_TYPE(method) == &PyStaticMethod_Type) {
    py::Ref function = py::Ref::steal(PyObject_GetAttrString(method, "__func__"));
    if (!function) return nullptr;
    if (classify(function.get()) == Class::Instance) remember_constant(function.get());
    return call(function.get(), args, nargsf, kwnames);
  }
  if (method && PyFunction_Check(method)) {
    py::Ref hold = py::Ref::borrow(method);
    return prepend(method, callable);
  }
  if (t == &_PyWeakref_RefType) return call_weakref(callable);
  if (is_lru_cache(t)) return call_cached(callable, args, nargsf, kwnames);
  if (all == 1 && !kwnames && is_getter(t)) return call_getter(callable, args[0]);
  if (method && Py_TYPE(method) == &PyWrapperDescr_Type && policy_of(method) == Policy::Pure && !find_plain(callable)) {
    PyObject* const result = native();
    note_writes(args, all);
    return after_c_call(result);
  }
  if (const py::Ref scripted = function_behind_script(callable)) {
    guard_identity(callable);
    remember_constant(scripted.get());
    return call(scripted.get(), args, nargsf, kwnames);
  }
  if (size_among(args, all))
    return on_values(args, all, [&](PyObject* const* values) { return call(callable, values, n, kwnames); });
  if (PyObject* r = call_numpy(callable, args, nargsf, kwnames); r || PyErr_Occurred()) return r;
  return graph_break("call-of-unknown-object", "a call of " + describe(callable));
}

PyObject* Machine::call_weakref(PyObject* ref) {
  PyObject* o = PyWeakref_GetObject(ref);
  Known* k = find(ref);
  if (!k || o == Py_None) return after_c_call(Py_NewRef(o));
  return see(o, child(guards::Source::Kind::WeakRef, k->source, nullptr));
}

PyObject* Machine::call_partial(PyObject* partial, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  static PyObject *func = PyUnicode_InternFromString("func"), *bound = PyUnicode_InternFromString("args"),
                  *keywords = PyUnicode_InternFromString("keywords");
  py::Ref f = py::Ref::steal(load_attr(partial, func));
  py::Ref first = f ? py::Ref::steal(load_attr(partial, bound)) : py::Ref();
  py::Ref kw = first ? py::Ref::steal(load_attr(partial, keywords)) : py::Ref();
  if (!kw) return nullptr;
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf), nb = PyTuple_GET_SIZE(first.get());
  py::Ref all = py::Ref::steal(PyTuple_New(nb + n));
  py::Ref merged = py::Ref::steal(PyDict_Copy(kw.get()));
  if (!all || !merged) return nullptr;
  for (Py_ssize_t i = 0; i < nb; ++i) PyTuple_SET_ITEM(all.get(), i, Py_NewRef(PyTuple_GET_ITEM(first.get(), i)));
  for (Py_ssize_t i = 0; i < n; ++i) PyTuple_SET_ITEM(all.get(), nb + i, Py_NewRef(args[i]));
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i)
    if (PyDict_SetItem(merged.get(), PyTuple_GET_ITEM(kwnames, i), args[n + i]) < 0) return nullptr;
  return call_ex(f.get(), all.get(), merged.get());
}

PyObject* Machine::call_type(PyObject* type, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  auto* t = reinterpret_cast<PyTypeObject*>(type);
  if (t == &PyUnicode_Type)
    if (PyObject* text = text_of_call(type, args, count_of(nargsf, kwnames), kwnames); text || PyErr_Occurred())
      return text;
  if (PyObject* number = number_among(args, count_of(nargsf, kwnames))) {
    if (t == &PyType_Type && count_of(nargsf, kwnames) == 1) return Py_NewRef(class_of_number(number));
    if (PyObject* r = call_number_function(type, args, nargsf, kwnames); r || PyErr_Occurred()) return r;
    if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE) && t != &PyDict_Type) return specialize(number);
  }
  if (PyObject* masked = masked_among(args, count_of(nargsf, kwnames), /*nested=*/false)) {
    if (t == &PyType_Type && count_of(nargsf, kwnames) == 1) return Py_NewRef(names().tensor_type);
    if (PyType_IsSubtype(t, reinterpret_cast<PyTypeObject*>(names().tensor_type))) return specialize_masked(masked);
  }
  if (count_of(nargsf, kwnames) == 1 && !kwnames && is_open_number(args[0])) {
    const bool whole = is_size(args[0]);
    if (t == &PyType_Type) return class_of(args[0]).release();
    if (t == (whole ? &PyLong_Type : &PyFloat_Type) && !capture::is_of_numpy(args[0])) return Py_NewRef(args[0]);
    if (t == &PyFloat_Type) return PyObject_CallMethod(args[0], "__sym_float__", nullptr);
    if (t == &PyLong_Type) return PyObject_CallMethod(args[0], "__trunc__", nullptr);
  }
  if (strcmp(t->tp_name, "decimal.Decimal") == 0 && size_among(args, count_of(nargsf, kwnames)))
    return on_values(args, count_of(nargsf, kwnames), [&](PyObject* const* values) {
      return call_type(type, values, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    });
  const bool converts = count_of(nargsf, kwnames) == 1 && !kwnames && py::is_tensor(args[0]);
  if (converts && (t == &PyFloat_Type ? THPVariable_Unpack(args[0]).is_floating_point()
                                      : t == &PyLong_Type && !THPVariable_Unpack(args[0]).is_floating_point()))
    if (py::Ref number = py::Ref::steal(item_number(args[0])); number || PyErr_Occurred())
      return number && PyBool_Check(number.get()) ? PyNumber_Long(number.get()) : number.release();
  if (converts && t == &PyBool_Type)
    if (const auto known = decide_truth(THPVariable_Unpack(args[0]))) return PyBool_FromLong(*known);
  auto native = [&]() -> PyObject* {
    if (refuses_arguments(args, nargsf, kwnames, /*iterators=*/true)) return nullptr;
    const auto stands_in = [this](PyObject* o) { return is_open_number(o) || is_number(o) || is_text(o); };
    if (t == &PyMap_Type && PyVectorcall_NARGS(nargsf) == 2 && args[0] == reinterpret_cast<PyObject*>(&PyType_Type) &&
        any_within(args[1], stands_in))
      return graph_break("call-that-breaks", "map(type, ...) of numbers of the graph, for which C sees stand-ins");
    // Containers keep what they are given; type() and super() ask for no value.
    const bool keeps = is_container(classify_type(t)) || (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE) && t->tp_iternext);
    for (size_t i = 0; t != &PyType_Type && t != &PySuper_Type && i < count_of(nargsf, kwnames); ++i)
      if (!reads(args[i], keeps ? -1 : 0)) return nullptr;
    if (PyType_IsSubtype(t, &PyDict_Type) || PyType_IsSubtype(t, &PySet_Type) || PyType_IsSubtype(t, &PyFrozenSet_Type))
      for (Py_ssize_t i = 0; i < PyVectorcall_NARGS(nargsf); ++i)  // keywords are values of strings
        pin(args[i], /*values=*/!PyDict_Check(args[i]));
    PyObject* made = after_c_call(PyObject_Vectorcall(type, args, nargsf, kwnames));
    if (made && PyType_IsSubtype(t, &PyType_Type) && count_of(nargsf, kwnames) > 1) remember_made_type(made);
    if (made) remember_finalizer(made);
    if (made && (t == &PyFunction_Type || is_lru_cache(t)) && made_functions.insert(made).second)
      alive.push_back(py::Ref::borrow(made));
    return made;
  };
  if (py::Ref function = py::Ref::steal(polyfilled_class(t))) return call(function.get(), args, nargsf, kwnames);
  if (is_numpy_scalar(t) && !kwnames && PyVectorcall_NARGS(nargsf) == 1 && is_constant(args[0])) return native();
  if (makes_dtype(*this, t, args, count_of(nargsf, kwnames))) return native();
  if (t == &PyType_Type || constructs_purely(t) || Py_TYPE(type) != &PyType_Type) {
    if (Py_TYPE(type) == &PyType_Type || constructs_purely(t)) return native();
    // Enumerations and other metaclasses in Python.
    PyObject* method = _PyType_Lookup(Py_TYPE(type), names().call);
    if (method && PyFunction_Check(method)) return native();
  }
  if (!kwnames && (type == names().tensor_type || strcmp(Py_TYPE(type)->tp_name, "torch.tensortype") == 0))
    return call_tensor_class(type, args, static_cast<size_t>(PyVectorcall_NARGS(nargsf)));
  // Their __new__ is Python's, and ends in detach() or _make_subclass().
  if (type == names().parameter_type || type == names().buffer_type) return native();
  if (PyType_IsSubtype(t, reinterpret_cast<PyTypeObject*>(names().tensor_type)))
    return call_tensor_subclass(type, args, nargsf, kwnames);
  // The constructors that run are those in Python; of C's only tp_new of a base that is not known remains.
  PyTypeObject* base = t;
  while (base && (base->tp_flags & Py_TPFLAGS_HEAPTYPE)) base = base->tp_base;
  if (base == &PyBaseObject_Type) return native();
  return graph_break("call-of-unknown-class", std::string("a call of the class ") + t->tp_name);
}

PyObject* Machine::call_c(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const size_t n = PyVectorcall_NARGS(nargsf);
  // The arguments with the receiver in front, however it was bound.
  PyObject* self = self_of(callable);
  const bool bound = self && !PyModule_Check(self) && Py_TYPE(callable) != &PyMethodDescr_Type &&
                     Py_TYPE(callable) != &PyWrapperDescr_Type;
  auto arg = [&](size_t i) -> PyObject* {
    if (bound) return i == 0 ? self : i - 1 < n ? args[i - 1] : nullptr;
    return i < n ? args[i] : nullptr;
  };
  const size_t count = n + (bound ? 1 : 0);
  auto native = [&] {
    PyObject* const result = PyObject_Vectorcall(callable, args, nargsf, kwnames);
    if (bound) note_writes(&self, 1);
    note_writes(args, count_of(nargsf, kwnames));
    return result;
  };
  if (has_masked)
    if (PyObject* r = call_c_on_masked(callable, bound ? self : nullptr, args, n, kwnames); r || PyErr_Occurred())
      return r;
  if (!kwnames && count == 2 && py::is_tensor(arg(0)) && py::is_tensor(arg(1)) && is_named(callable, "masked_select") &&
      THPVariable_Unpack(arg(0)).sizes() == THPVariable_Unpack(arg(1)).sizes())
    if (PyObject* masked = select_masked(arg(0), arg(1)); masked || PyErr_Occurred()) return masked;
  // What a mode is given as the function where a tensor's attribute is read.
  if (count == 2 && bound && Py_TYPE(self) == &PyGetSetDescr_Type && is_named(callable, "__get__") &&
      py::is_tensor(arg(1)))
    return load_attr(arg(1), PyDescr_NAME(self));
  if (count == 3 && bound && Py_TYPE(self) == &PyGetSetDescr_Type && is_named(callable, "__set__") &&
      py::is_tensor(arg(1)))
    return store_attr(arg(1), PyDescr_NAME(self), arg(2)) ? Py_NewRef(Py_None) : nullptr;
  if (count == 1 && !kwnames && is_len(callable)) {
    if (PyObject* length = length_of_unread(arg(0)); length || PyErr_Occurred()) return length;
    if (PyObject* length = length_by_method(arg(0)); length || PyErr_Occurred()) return length;
  }
  if (count == 2 && !kwnames)
    if (PyObject* done = append_unread(callable, arg(0), arg(1)); done || PyErr_Occurred()) return done;
  if (count >= 2 && !kwnames)
    if (PyObject* done = look_up_unread(callable, arg(0), arg(1), arg(2)); done || PyErr_Occurred()) return done;
  if (PyObject* text = text_of_call(callable, args, count_of(nargsf, kwnames), kwnames); text || PyErr_Occurred())
    return text;
  if (PyObject* number = kwnames ? nullptr : call_on_reals(callable, args, n); number || PyErr_Occurred())
    return number;
  const Policy policy = policy_of(callable);
  if (policy == Policy::TensorData && !bound && n == 1 &&
      (size_among(args, 1) || (!is_number(args[0]) && number_among(args, 1, /*nested=*/true))) &&
      (is_named(callable, "tensor") || is_named(callable, "as_tensor"))) {
    static PyObject* const of_size = PyObject_GetAttrString(polyfills(), "tensor_of_size");
    static PyObject* const of_list = PyObject_GetAttrString(polyfills(), "copied_tensor");
    if (is_open_number(args[0])) return call(of_size, args, n, kwnames);
    if (holds_numbers(*this, args[0])) return call(of_list, args, n, kwnames);
  }
  if (const size_t all = count_of(nargsf, kwnames);
      size_among(args, all) &&
      ((converts_numbers(policy) && !takes_open_sizes(name_of(callable))) || numpy_among(args, all)))
    return on_values(args, all, [&](PyObject* const* values) { return call_c(callable, values, n, kwnames); });
  if (is_len(callable) && n == 1 && !asks_class(args[0]))
    if (PyObject* length = open_length(args[0]); length || PyErr_Occurred()) return length;
  // A factor that is a tensor: PyTorch's bindings read its value.
  if (policy == Policy::Torch && kwnames && PyTuple_GET_SIZE(kwnames) == 1 && takes_factor(callable, kwnames))
    if (py::Ref number = py::Ref::steal(item_number(args[n])); number || PyErr_Occurred()) {
      std::vector<PyObject*> given(args, args + n + 1);
      given[n] = number.get();
      return number ? call_c(callable, given.data(), n, kwnames) : nullptr;
    }
  // The arguments of torch's own functions are converted in C, also those in lists.
  PyObject* number = number_among(args, count_of(nargsf, kwnames));
  const bool converts = policy == Policy::Torch || policy == Policy::TensorData || policy == Policy::Polyfill;
  const bool of_lists = !bound && strncmp(name_of(callable), "_foreach_", 9) == 0;
  if (PyObject* inner = !number && converts ? number_among(args, count_of(nargsf, kwnames), true) : nullptr) {
    if (!of_lists) return specialize(inner);
    return call_with_numbers(callable, std::vector<PyObject*>(args, args + count_of(nargsf, kwnames)), kwnames);
  }
  if (number && policy != Policy::Number) {
    bool tensor = of_lists || (bound && py::is_tensor(self));
    for (size_t i = 0; i < n; ++i) tensor = tensor || py::is_tensor(args[i]);
    if (tensor && (policy == Policy::Torch || policy == Policy::Operator || policy == Policy::Polyfill)) {
      std::vector<PyObject*> flat(args, args + count_of(nargsf, kwnames));
      if (!bound) return call_with_numbers(callable, flat, kwnames);
      flat.insert(flat.begin(), self);
      py::Ref method =
          py::Ref::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(self)), name_of(callable)));
      return method ? call_with_numbers(method.get(), flat, kwnames) : nullptr;
    }
    // What only keeps it, or asks for its class.
    const std::string_view name = name_of(callable);
    PyObject* receiver = arg(0);
    const bool keeps = receiver && !is_number(receiver) && (PyList_Check(receiver) || PyDict_Check(receiver)) &&
                       policy == Policy::Pure && n > 0;
    if (keeps && !PyDict_Check(receiver) && grows_with(receiver, number)) return specialize(number);
    const bool stores = policy == Policy::SetAttr || policy == Policy::ObjectSetAttr;
    const bool asks = name == "isinstance" || name == "__instancecheck__";
    // A call that breaks the graph anyway gets the number's value.
    const bool breaks = policy == Policy::Break || (policy == Policy::Unknown && !is_torch_operator(callable));
    if (PyObject* r = call_number_function(callable, args, nargsf, kwnames); r || PyErr_Occurred()) return r;
    if (!keeps && !stores && !asks && !breaks && policy != Policy::Operator) return specialize(number);
  }
  if (policy == Policy::Unknown)
    if (PyObject* r = call_numpy(callable, args, nargsf, kwnames); r || PyErr_Occurred()) return r;
  if (policy == Policy::TensorData && !bound)
    if (PyObject* shared = share_memory(callable, args, n, kwnames); shared || PyErr_Occurred()) return shared;
  if (policy == Policy::Pure || policy == Policy::Iter || policy == Policy::Next || policy == Policy::Operator ||
      policy == Policy::Torch || policy == Policy::TensorData || policy == Policy::Item) {
    if (bound && !reads_arguments(callable, &self, 1)) return nullptr;
    if (!reads_arguments(callable, args, count_of(nargsf, kwnames))) return nullptr;
    const bool method = bound || Py_TYPE(callable) == &PyMethodDescr_Type || Py_TYPE(callable) == &PyWrapperDescr_Type;
    if (method && count > 0 && refuses_method(callable, arg(0))) return nullptr;
  }
  const bool to_mode = py::function_mode_active();
  if (to_mode || goes_to_class(args, count_of(nargsf, kwnames)) || (bound && goes_to_class(&self, 1))) {
    if (policy == Policy::Item || policy == Policy::TensorData || policy == Policy::RequiresGrad ||
        policy == Policy::RetainGrad || policy == Policy::Polyfill)
      return after_c_call(native());
    if (to_mode && policy == Policy::False && std::string_view(name_of(callable)).starts_with("_has_torch_function"))
      Py_RETURN_TRUE;
  }
  if (policy == Policy::Polyfill && !options.for_fx && !aten::inside_transform()) {
    const py::Ref f = py::Ref::steal(PyObject_GetAttrString(polyfills(), name_of(callable)));
    std::vector<PyObject*> flat(args, args + count_of(nargsf, kwnames));
    if (bound) flat.insert(flat.begin(), self);
    bool handled = true;
    PyObject* r = f ? unless_declined(call(f.get(), flat.data(), count, kwnames), &handled) : nullptr;
    if (handled) return r;
  }
  switch (policy) {
    case Policy::Pure:
    case Policy::Iter:
    case Policy::Next: {
      if (policy != Policy::Iter && bound && refuses_iterator(self)) return nullptr;
      // That of a C function is its address, and nothing is called.
      const bool hashes = count == 1 && PyCFunction_Check(arg(0)) && is_named(callable, "hash");
      if (hashes) guard_identity(arg(0));
      if (!hashes && refuses_arguments(args, nargsf, kwnames, policy != Policy::Iter)) return nullptr;
      c10::SmallVector<PyObject*, 8> all(count);
      for (size_t i = 0; i < count; ++i) all[i] = arg(i);
      if (PyObject* reduced = reduce_existing(callable, all.data(), count)) return reduced;
      if (PyErr_Occurred() || reads_attributes(callable, all.data(), count)) return nullptr;
      if (count == 2 && !kwnames && is_named(callable, "add") && tell_apart(all[0], all[1])) {
        note_write(all[0]);
        if (look_up_apart(PySet_Add, all[0], all[1]) < 0) return after_c_call(nullptr);
        Py_RETURN_NONE;
      }
      pin_compared(callable, all.data(), count);
      static PyObject* is_instance = PyDict_GetItemString(PyEval_GetBuiltins(), "isinstance");
      if (callable == is_instance && count == 2 && capture::is_of_numpy(all[0])) {
        const int is = PyObject_IsSubclass(class_of(all[0]).get(), all[1]);
        return after_c_call(is < 0 ? nullptr : PyBool_FromLong(is));
      }
      if (callable == is_instance && count == 2 && py::is_tensor(all[0]) &&
          is_of_tensor_class(THPVariable_Unpack(all[0]), all[1]) == true)
        Py_RETURN_TRUE;
      static PyObject *is = operator_object("is_"), *is_not = operator_object("is_not");
      if (count == 2 && (callable == is || callable == is_not)) distinguish(all[0], all[1]);
      // A C method on an existing object of a container's subclass would read or write the object itself.
      PyObject* receiver = arg(0);
      if (receiver &&
          (bound || Py_TYPE(callable) == &PyMethodDescr_Type || Py_TYPE(callable) == &PyWrapperDescr_Type)) {
        if (find_plain(receiver) &&
            (PyDict_Check(receiver) || PyList_Check(receiver) || PyTuple_Check(receiver) || PyAnySet_Check(receiver)))
          return graph_break("container-from-outside",
                             std::string("a method of an existing ") + Py_TYPE(receiver)->tp_name);
      }
      PyObject* r = after_c_call(native());
      if (r && receiver && PyType_Check(receiver)) remember_finalizer(r);  // object.__new__
      return r && PyType_Check(r) && makes_class(callable, self, count) ? remember_made_type(r) : r;
    }
    case Policy::Operator: {
      bool tensor = false;
      for (size_t i = 0; i < count; ++i) tensor = tensor || py::is_tensor(arg(i));
      if (count && changes_operand(name_of(callable)) && refuses_write(arg(0))) return nullptr;
      if (!tensor && !bound) pin_compared(callable, args, n);
      if (!tensor) return after_c_call(native());
      return torch_call(callable, args, n, kwnames, native);
    }
    case Policy::Item:
      if (count == 1 && !kwnames)
        if (py::Ref number = py::Ref::steal(item_number(arg(0))); number || PyErr_Occurred()) {
          if (number && is_named(callable, "tolist"))
            for (int64_t d = THPVariable_Unpack(arg(0)).dim(); number && d > 0; --d)
              number = py::Ref::steal(Py_BuildValue("[O]", number.get()));
          if (!number || !is_named(callable, "__float__")) return number.release();
          PyObject* const given[] = {number.get()};
          return call(reinterpret_cast<PyObject*>(&PyFloat_Type), given, 1, nullptr);
        }
      if (is_named(callable, "tolist")) {
        if (PyObject* list = count == 1 ? decided_list(arg(0)) : nullptr; list || PyErr_Occurred()) return list;
        return graph_break("call-that-breaks", "a call of " + describe(callable));
      }
      [[fallthrough]];
    case Policy::Polyfill:
    case Policy::Torch: {
      if (!bound) return torch_call(callable, args, n, kwnames, native);
      if (!py::is_tensor(self)) return torch_call(callable, args, n, kwnames, native);
      // x.relu stored and called later: record the method with its receiver in front.
      std::vector<PyObject*> flat{self};
      flat.insert(flat.end(), args, args + count_of(nargsf, kwnames));
      PyObject* target = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(names().tensor_type),
                                        PyUnicode_InternFromString(name_of(callable)));
      return torch_call(target ? target : callable, flat.data(), n + 1, kwnames, native);
    }
    case Policy::TensorData:
      return call_tensor_data(callable, args, nargsf, kwnames);
    case Policy::Paused: {
      Paused paused_here(*this);
      return after_c_call(native());
    }
    case Policy::ReadSetting:
    case Policy::WriteSetting:
      return call_setting(callable, args, n, kwnames);
    case Policy::Global: {
      const std::string_view name = name_of(callable);
      // Tangents of graph inputs and results are nobody's business but eager's.
      if (name == "_enter_dual_level" && !aten::inside_transform())
        return graph_break("call-that-breaks", "a call of " + describe(callable));
      PyObject* r = after_c_call(native());
      if (r && name == "autocast_increment_nesting") ++autocast_nesting;
      if (r && name == "autocast_decrement_nesting") --autocast_nesting;
      return r;
    }
    case Policy::Skip:
      return Py_NewRef(Py_None);
    case Policy::SkipSelf:
      return Py_NewRef(arg(0) ? arg(0) : Py_None);
    case Policy::True:
      return Py_NewRef(Py_True);
    case Policy::False:
      if (std::string_view(name_of(callable)).starts_with("_has_torch_function") && overrides_among(args, n))
        Py_RETURN_TRUE;
      return Py_NewRef(Py_False);
    case Policy::Id: {
      if (count != 1) return native();
      PyObject* real = real_of(arg(0));
      if (arg(0) == hashed) return PyLong_FromVoidPtr(real ? real : arg(0));
      if (real) guard_identity(real);
      if (!real && !is_constant(arg(0))) made_ids[arg(0)] = {arg(0), root_instruction};
      return PyLong_FromVoidPtr(real ? real : arg(0));
    }
    case Policy::GetAttr: {
      if (kwnames || count < 2 || count > 3 || !PyUnicode_Check(arg(1))) return native();
      PyObject* v = load_attr(arg(0), arg(1), count == 3);
      if (v || PyErr_Occurred() || count == 2) return v;
      return Py_NewRef(arg(2));
    }
    case Policy::HasAttr: {
      if (kwnames || count != 2 || !PyUnicode_Check(arg(1))) return native();
      py::Ref v = py::Ref::steal(load_attr(arg(0), arg(1), true));
      if (!v && PyErr_Occurred()) return nullptr;
      return PyBool_FromLong(static_cast<bool>(v));
    }
    case Policy::SetAttr:
      if (kwnames || count != 3 || !PyUnicode_Check(arg(1))) return native();
      return store_attr(arg(0), arg(1), arg(2)) ? Py_NewRef(Py_None) : nullptr;
    case Policy::DelAttr:
      if (kwnames || count != 2 || !PyUnicode_Check(arg(1))) return native();
      return store_attr(arg(0), arg(1), nullptr) ? Py_NewRef(Py_None) : nullptr;
    case Policy::Vars:
      if (count != 1) return graph_break("vars-of-a-frame", "vars() without an argument");
      return instance_dict(arg(0));
    case Policy::TypeSetAttr:
      if (arg(0) && PyType_Check(arg(0)) && refuses_class_write(arg(0))) return nullptr;
      return after_c_call(native());
    case Policy::ObjectSetAttr:
      if (kwnames || count != 3 || !PyUnicode_Check(arg(1)) || PyType_Check(arg(0))) return native();
      return generic_store_attr(arg(0), arg(1), arg(2)) ? Py_NewRef(Py_None) : nullptr;
    case Policy::ObjectDelAttr:
      if (kwnames || count != 2 || !PyUnicode_Check(arg(1)) || PyType_Check(arg(0))) return native();
      return generic_store_attr(arg(0), arg(1), nullptr) ? Py_NewRef(Py_None) : nullptr;
    case Policy::ObjectGetAttr: {
      if (kwnames || count != 2 || !PyUnicode_Check(arg(1))) return native();
      Known* k = find_plain(arg(0));
      if (!k || classify(arg(0)) != Class::Instance) return after_c_call(native());
      return generic_load_attr(arg(0), k, arg(1), false);
    }
    case Policy::RequiresGrad:
      return call_requires_grad(callable, args, nargsf, kwnames);
    case Policy::RetainGrad:
      return call_retain_grad(PyCFunction_Check(callable) ? PyCFunction_GET_SELF(callable) : args[0]);
    case Policy::MakeParameter:
      return call_make_parameter(callable, args, n, kwnames);
    case Policy::CustomFunction:
      return custom_function_step(args, n);
    case Policy::GradientHook:
      return gradient_hook_step(args, n);
    case Policy::Branch:
      return branch_step(args, n);
    case Policy::Checkpoint:
      return checkpoint_step(args, n);
    case Policy::DualLevel:
      return dual_level_step(args, n);
    case Policy::InferenceMode:
      return inference_mode_step(args, n);
    case Policy::Number:
      return number_step(args, n);
    case Policy::RunBackward:
      return call_run_backward(callable, args, nargsf, kwnames);
    case Policy::Break:
      return graph_break("call-that-breaks", "a call of " + describe(callable));
    case Policy::Warn:
      return call_warn(args, n, kwnames);
    case Policy::OfConstants: {
      const auto plain = [&](PyObject* o) {
        const bool container = PyTuple_Check(o) || PyList_Check(o) || PyDict_Check(o) || PyAnySet_Check(o);
        return container ? PyObject_Size(o) == 0 && observe(o) : is_constant(o);
      };
      if (!std::all_of(args, args + count_of(nargsf, kwnames), plain)) break;
      return native();
    }
    case Policy::Defer:
      if (kwnames) break;
      return defer(py::Ref::borrow(callable), {args, args + n});
    case Policy::IsCompiling:
    case Policy::Loads:
    case Policy::StandIn:
    case Policy::Interpret:
    case Policy::Unknown:
      break;
  }
  // Methods that pybind11 made for operators, and operators of custom libraries, are tensor operations.
  if (PyCFunction_Check(callable) && is_torch_operator(callable)) return torch_call(callable, args, n, kwnames, native);
  return graph_break("call-of-unknown-c-function", "a call of the C function " + describe(callable));
}

void Machine::guard_identity(PyObject* real) {
  Known* k = find(real);
  if (k) guard(Guard::Kind::Is, k->source, real);
}

}  // namespace kiln::capture
