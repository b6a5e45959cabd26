// Existing containers that nobody looks at as a whole: a list that is only appended to, a dict or list of which some
// items are asked for, or how many there are. What else is in them may be another in the next call.
#include <algorithm>

#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/user_rules.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;
using GK = Guard::Kind;

namespace {

/// How many objects an instruction takes from the stack and puts there. Unknown: of one that may go on elsewhere, or
/// that changes the order of what is there.
struct Effect {
  int pops = 0, pushes = 0;
  bool known = true;
};

Effect effect_of(int opcode, int arg) {
  switch (opcode) {
    case CACHE:
    case NOP:
    case PRECALL:
    case KW_NAMES:
    case RESUME:
    case DELETE_FAST:
      return {};
    case LOAD_CONST:
    case LOAD_FAST:
    case LOAD_DEREF:
    case PUSH_NULL:
      return {0, 1};
    case LOAD_GLOBAL:
      return {0, 1 + (arg & 1)};
    case LOAD_ATTR:
    case UNARY_NEGATIVE:
    case UNARY_NOT:
      return {1, 1};
    case LOAD_METHOD:
      return {1, 2};
    case BINARY_OP:
    case BINARY_SUBSCR:
    case COMPARE_OP:
    case CONTAINS_OP:
    case IS_OP:
      return {2, 1};
    case CALL:
      return {arg + 2, 1};
    case FORMAT_VALUE:
      return {(arg & 4) ? 2 : 1, 1};
    case BUILD_STRING:
    case BUILD_TUPLE:
      return {arg, 1};
    default:
      return {0, 0, false};
  }
}

/// The methods that append_unread knows.
bool is_append(PyObject* o) {
  static PyObject* const methods[] = {PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyList_Type), "append"),
                                      PyObject_GetAttrString(names().deque, "append")};
  return std::find(std::begin(methods), std::end(methods), o) != std::end(methods);
}

/// Whether its frame is run by the machine, whatever its arguments are.
bool is_interpreted(Machine& m, PyObject* function) {
  auto* code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function));
  if (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) return false;
  if (user_rule(function) != UserRule::None || policy_of_code(code) != Policy::Interpret) return false;
  PyObject* const module = PyDict_GetItem(PyFunction_GET_GLOBALS(function), names().name);
  if (!module || !PyUnicode_Check(module)) return false;
  const std::string_view name = PyUnicode_AsUTF8(module);
  return name != "numpy" && !name.starts_with("numpy.") && !m.is_trusted_namespace(PyFunction_GET_GLOBALS(function)) &&
         Machine::peer_code(code) == Machine::PeerCode::None;
}

/// How a call uses its argument on which `above` others lie: a parameter of a function that is interpreted is a local
/// variable there.
Use use_as_argument(const Exec& e, int arg, int above, PyObject* keywords) {
  // The current instruction may have put the argument there, or still have its own operands in that place.
  int at = e.next - 1;
  while (at > e.at && e.units[2 * at] == CACHE) --at;
  const int current = e.units[2 * at];
  const bool loads = current == LOAD_FAST || current == LOAD_GLOBAL || current == LOAD_DEREF;
  if (!e.pushed && !loads && current != LOAD_ATTR && current != BINARY_SUBSCR) return Use::Other;
  const int operands = e.pushed ? 1 : loads ? 0 : current == LOAD_ATTR ? 1 : 2;
  const int argument = arg - 1 - above, below = argument + operands;
  if (argument < 0 || e.sp - 2 - below < py311::stack_base(e.frame)) return Use::Other;
  PyObject *callable = e.sp[-2 - below], *const self = e.sp[-1 - below];
  int place = argument + (callable ? 1 : 0);
  if (!self) return Use::Other;
  if (!callable) callable = self;
  if (PyMethod_Check(callable) && !e.m.find_plain(callable)) {
    callable = PyMethod_GET_FUNCTION(callable);
    ++place;
  }
  if (!PyFunction_Check(callable) || !is_interpreted(e.m, callable)) return Use::Other;
  auto* code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(callable));
  const int named = keywords ? static_cast<int>(PyTuple_GET_SIZE(keywords)) : 0;
  int most = code->co_argcount;
  if (argument >= arg - named) {
    most += code->co_kwonlyargcount;
    PyObject* const name = PyTuple_GET_ITEM(keywords, argument - (arg - named));
    for (place = code->co_posonlyargcount; place < most; ++place)
      if (PyUnicode_Compare(PyTuple_GET_ITEM(code->co_localsplusnames, place), name) == 0) break;
  }
  return place < most && !(py311::local_kind(code, place) & py311::KindCell) ? Use::Keep : Use::Other;
}

Use use_as_operand(const Exec& e, int opcode, int arg, int above, PyObject* keywords) {
  switch (opcode) {
    case BINARY_SUBSCR:
    case STORE_SUBSCR:
      return above == 1 ? Use::LookUp : Use::Other;
    case CONTAINS_OP:
      return above == 0 ? Use::LookUp : Use::Other;
    case LOAD_METHOD:
      for (const char* name : {"get", "__getitem__", "__contains__", "setdefault"})
        if (PyUnicode_CompareWithASCIIString(e.name(arg), name) == 0) return Use::LookUp;
      return PyUnicode_CompareWithASCIIString(e.name(arg), "append") == 0 ? Use::Append : Use::Other;
    case CALL:  // of `len`, which lies below the object, or below what the object is an attribute of
      if (arg == 1 && above == 0 && (is_len(e.sp[-1]) || is_len(e.sp[-2]))) return Use::Length;
      if (arg == 1 && above == 1) return is_append(e.sp[e.pushed ? -2 : -1]) ? Use::Append : Use::Other;
      return use_as_argument(e, arg, above, keywords);
    case POP_JUMP_FORWARD_IF_FALSE:
    case POP_JUMP_FORWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_FALSE:
    case POP_JUMP_BACKWARD_IF_TRUE:
    case UNARY_NOT:
      return Use::Length;
    case STORE_FAST:
      // LOAD_FAST asks again.
      return py311::local_kind(e.code, arg) & py311::KindCell ? Use::Other : Use::Keep;
    case POP_JUMP_FORWARD_IF_NONE:
    case POP_JUMP_FORWARD_IF_NOT_NONE:
      return Use::Keep;
    default:
      return Use::Other;
  }
}

/// Whether it is a class whose metaclass leaves comparing and hashing to object.
bool is_plain_class(PyObject* o) {
  const PyTypeObject *meta = Py_TYPE(o), *object = &PyBaseObject_Type;
  return PyType_Check(o) && meta->tp_richcompare == object->tp_richcompare && meta->tp_hash == object->tp_hash;
}

/// Whether C code hashes and compares it, and by its value or its identity alone.
bool is_plain_key(Machine& m, PyObject* key) {
  if (PyTuple_CheckExact(key)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i)
      if (!is_plain_key(m, PyTuple_GET_ITEM(key, i))) return false;
    return true;
  }
  return m.classify(key) == Class::Constant ? m.is_constant(key) && !PySlice_Check(key)
                                            : key == Py_None || PyBool_Check(key) || is_plain_class(key);
}

/// Whether a key of a dict is no other than a plain one that is looked up, as C code alone finds out.
bool is_told_apart(Machine& m, PyObject* own) {
  return is_plain_key(m, own) || PyFunction_Check(own) || PyCFunction_Check(own);
}

}  // namespace

Use use_of_top(const Exec& e) {
  constexpr int kFarthest = 48;  // instructions; who computes the key for longer than that has the dict guarded
  const int end = static_cast<int>(Py_SIZE(e.code));
  int above = 0;  // objects on the stack over that one
  int extended = 0;
  PyObject* keywords = nullptr;  // of the next call
  for (int i = e.next, steps = 0; i < end && steps < kFarthest; ++i, ++steps) {
    const int opcode = e.units[2 * i], arg = extended | e.units[2 * i + 1];
    extended = opcode == EXTENDED_ARG ? arg << 8 : 0;
    if (opcode == EXTENDED_ARG) continue;
    if (opcode == JUMP_FORWARD) {  // behind what a resume function puts on the stack
      i += arg;
      continue;
    }
    if (opcode == KW_NAMES) keywords = PyTuple_GET_ITEM(e.code->co_consts, arg);
    const Effect effect = effect_of(opcode, arg);
    if (!effect.known || effect.pops > above) return use_as_operand(e, opcode, arg, above, keywords);
    if (opcode == CALL) keywords = nullptr;
    above += effect.pushes - effect.pops;
  }
  return Use::Other;
}

bool loads_to_ask_for_none(const Exec& e, PyObject* name) {
  const int end = static_cast<int>(Py_SIZE(e.code));
  const auto arg_at = [&](int i) {
    const int low = e.units[2 * i + 1];
    return i > 0 && e.units[2 * (i - 1)] == EXTENDED_ARG ? low | e.units[2 * (i - 1) + 1] << 8 : low;
  };
  int at = e.next;
  const auto skip = [&] {
    while (at < end && (e.units[2 * at] == EXTENDED_ARG || e.units[2 * at] == CACHE || e.units[2 * at] == NOP)) ++at;
    return at < end ? e.units[2 * at] : NOP;
  };
  if (e.units[2 * e.at] != LOAD_ATTR || e.name(arg_at(e.at)) != name) return false;
  switch (skip()) {
    case POP_JUMP_FORWARD_IF_NONE:
    case POP_JUMP_FORWARD_IF_NOT_NONE:
    case POP_JUMP_BACKWARD_IF_NONE:
    case POP_JUMP_BACKWARD_IF_NOT_NONE:
      return true;
    case LOAD_CONST:
      if (PyTuple_GET_ITEM(e.code->co_consts, arg_at(at)) != Py_None) return false;
      ++at;
      return skip() == IS_OP;
    default:
      return false;
  }
}

bool Machine::may_stay_unread(PyObject* o) const {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(o));
  return PyList_CheckExact(o) || PyDict_CheckExact(o) || type == names().deque || type == names().ordered_dict ||
         type == names().default_dict;
}

bool Machine::stays_unread(Known& k) {
  PyObject* const o = k.real.get();
  if (!loading || k.kind != Known::Kind::Shadow || !may_stay_unread(o)) return false;
  // What is written to the attributes of an object is written to its __dict__.
  if (k.source->kind == SK::InstanceDict) return false;
  const Use use = use_of_top(*loading);
  const bool dict = PyDict_Check(o), list = PyList_CheckExact(o);
  if (use == Use::Other || (use == Use::Append && dict) || (use == Use::LookUp && !dict && !list)) return false;
  guard(GK::Type, k.source, reinterpret_cast<PyObject*>(Py_TYPE(o)), py311::type_version(Py_TYPE(o)));
  return true;
}

PyObject* Machine::length_of_unread(PyObject* container) {
  if (!may_stay_unread(container)) return nullptr;
  Known* k = find(container);
  if (!k || k->kind != Known::Kind::Shadow || k->active) return nullptr;
  k->looked_up = true;
  const Py_ssize_t n = base_size(k->real.get()), now = base_size(container);
  const py::Ref length = py::Ref::steal(PyLong_FromSsize_t(n));
  const SourcePtr source = child(SK::Length, k->source, nullptr);
  if (!is_changing(length.get(), source)) {
    guard(GK::Length, k->source, nullptr, static_cast<uint64_t>(n));
    return PyLong_FromSsize_t(now);
  }
  py::Ref number = py::Ref::steal(number_for(length.get(), source));
  if (!number || now == n) return number.release();
  if (k->appended) return activate(*k) ? PyLong_FromSsize_t(now) : nullptr;  // to a deque, which may be full
  const py::Ref more = py::Ref::steal(PyLong_FromSsize_t(now - n));
  return PyNumber_Add(number.get(), more.get());
}

PyObject* Machine::length_by_method(PyObject* o) {
  static PyObject* const name = PyUnicode_InternFromString("__len__");
  PyObject* const method = _PyType_Lookup(Py_TYPE(o), name);
  if (!method || !PyFunction_Check(method) || py::is_tensor(o)) return nullptr;
  py::Ref result = py::Ref::steal(call(method, &o, 1, nullptr));
  if (!result) return nullptr;
  // Of a container; what is computed may be negative.
  const bool open =
      std::ranges::any_of(open_ints, [&](const auto& known) { return known.second.get() == result.get(); });
  if (open || number_sources.contains(result.get())) return result.release();
  result = py::Ref::steal(is_number(result.get())        ? specialize(result.get())
                          : is_open_number(result.get()) ? with_values(result.get())
                                                         : PyNumber_Index(result.get()));
  if (!result) return nullptr;
  const Py_ssize_t n = PyNumber_AsSsize_t(result.get(), PyExc_OverflowError);
  if (n >= 0) return PyLong_FromSsize_t(n);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "__len__() should return >= 0");
  return nullptr;
}

PyObject* Machine::append_unread(PyObject* callable, PyObject* container, PyObject* item) {
  if (!is_append(callable) || PyDescr_TYPE(callable) != Py_TYPE(container)) return nullptr;
  Known* k = find(container);
  if (!k || k->kind != Known::Kind::Shadow || k->active) return nullptr;
  k->touched = true;
  if (PyList_CheckExact(container)) return PyList_Append(container, item) < 0 ? nullptr : Py_NewRef(Py_None);
  // What a full deque drops is what the real one drops.
  if (!k->appended) k->appended = py::check(PyList_New(0));
  return PyList_Append(k->appended.get(), item) < 0 ? nullptr
                                                    : PyObject_CallMethodOneArg(container, names().append, item);
}

bool Machine::guard_item(const Known& container, PyObject* value, const SourcePtr& source) {
  for (const auto& [at, again] : container.met_again)
    if (at == source && !py::Ref::steal(stand_in(again.get(), at))) return false;
  if (is_constant(value) && !is_changing(value, source)) guard_constant(source, value);
  return true;
}

bool Machine::guard_lookup_of_tensor(Known& k, PyObject* key, LookUp what) {
  const Known* const known_key = find(key);
  if (!known_key || known_key->kind != Known::Kind::Tensor) return false;
  PyObject *const real = k.real.get(), *const real_key = known_key->real.get();
  PyObject *own, *v, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(real, &at, &own, &v);) {
    if (py::is_tensor(own) ? !py::hashes_by_id(own) : !is_told_apart(*this, own)) return false;
    if (own == real_key) value = v;
  }
  if (!py::hashes_by_id(real_key) || !observe(key)) return false;
  const SourcePtr source = item_at(k.source, known_key->source);
  k.looked_up = true;
  if (!value && !guard_factory(k)) return false;
  if (!value)
    guard(GK::DictLacks, k.source, nullptr, 0, known_key->source);
  else if (what == LookUp::Item)
    return guard_item(k, value, source);
  else
    guard(GK::Type, source, reinterpret_cast<PyObject*>(Py_TYPE(value)), py311::type_version(Py_TYPE(value)));
  return true;
}

bool Machine::guard_lookup(Known& k, PyObject* key, LookUp what) {
  PyObject *const real = k.real.get(), *value = nullptr;
  SourcePtr source;
  if (PyList_CheckExact(real)) {
    if (what == LookUp::Presence || !PyLong_CheckExact(key)) return false;
    int overflow = 0;
    const long i = PyLong_AsLongAndOverflow(key, &overflow);
    if (overflow || i < 0 || i >= PyList_GET_SIZE(real)) return false;  // the length is what tells
    value = PyList_GET_ITEM(real, i);
    source = child(SK::ListItem, k.source, nullptr, i);
  } else if (PyDict_Check(real) && py::is_tensor(key)) {
    return guard_lookup_of_tensor(k, key, what);
  } else {
    if (!PyDict_Check(real) || !is_plain_key(*this, key)) return false;
    Py_ssize_t at = 0;
    PyObject *own, *v;
    while (PyDict_Next(real, &at, &own, &v)) {
      if (!is_told_apart(*this, own)) return false;
      if (!value && PyObject_RichCompareBool(own, key, Py_EQ) == 1) {
        value = v;
        source = child(SK::DictItem, k.source, own);
      }
    }
    PyErr_Clear();
  }
  k.looked_up = true;
  if (value && what == LookUp::Item) return guard_item(k, value, source);
  if (!value && PyDict_Check(real) && !guard_factory(k)) return false;
  guard(value ? GK::DictHas : GK::DictLacks, k.source, key);
  return true;
}

void Machine::note_item_written(PyObject* dict, PyObject* key) {
  static PyObject* const other_value = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  Known* const k = find(dict);
  k->touched = true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(k->snapshot.get()); i += 2) {
    PyObject* const own = PyList_GET_ITEM(k->snapshot.get(), i);
    const bool by_identity = py::is_tensor(own) || py::is_tensor(key);
    if (own == key || (!by_identity && PyObject_RichCompareBool(own, key, Py_EQ) == 1))
      PyList_SetItem(k->snapshot.get(), i + 1, Py_NewRef(other_value));
  }
  PyErr_Clear();
}

int Machine::looks_up(PyObject* container, PyObject* key, LookUp what) {
  Known* k = find(container);
  if (!k || k->active || k->kind != Known::Kind::Shadow) return 0;
  if (guard_lookup(*k, key, what)) return 1;
  return !PyErr_Occurred() && activate(*k) ? 0 : -1;
}

PyObject* Machine::look_up_unread(PyObject* callable, PyObject* dict, PyObject* key, PyObject* other) {
  static PyObject* const names_in_c[] = {
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyDict_Type), "get"),
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyDict_Type), "__contains__"),
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyDict_Type), "__getitem__"),
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyDict_Type), "setdefault")};
  constexpr int kGet = 0, kContains = 1, kSetDefault = 3;
  const auto which = std::find(std::begin(names_in_c), std::end(names_in_c), callable) - std::begin(names_in_c);
  if (which == std::ssize(names_in_c) || !PyDict_Check(dict)) return nullptr;
  if (other && which != kGet && which != kSetDefault) return nullptr;
  if (which == kSetDefault && PyODict_Check(dict)) return nullptr;  // it has a method of its own
  if (looks_up(dict, key, which == kContains ? LookUp::Presence : LookUp::Item) <= 0) return nullptr;
  const Hashing hashing(*this, key);
  if (which == kSetDefault) return Py_XNewRef(PyDict_SetDefault(dict, key, other ? other : Py_None));
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (which == kContains) return Py_NewRef(found ? Py_True : Py_False);
  if (found) return Py_NewRef(found);
  if (which == kGet) return Py_NewRef(other ? other : Py_None);
  PyErr_SetObject(PyExc_KeyError, key);
  return nullptr;
}

}  // namespace kiln::capture
