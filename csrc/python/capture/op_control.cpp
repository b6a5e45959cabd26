// Jumps, loops, returns, generators, exceptions and with blocks.
#include "python/capture/eval.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

int truth(Exec& e, PyObject* o) {
  if (o == Py_True) return 1;
  if (o == Py_False || o == Py_None) return 0;
  if (py::is_tensor(o) && !e.m.asks_class(o)) {
    if (const auto known = e.m.decide_truth(THPVariable_Unpack(o))) return *known;
    e.m.graph_break("data-dependent-branch", "a branch on the value of a tensor");
    return -1;
  }
  if (const py::Ref length = py::Ref::steal(e.m.length_of_unread(o)); length || PyErr_Occurred())
    return length ? PyObject_IsTrue(length.get()) : -1;
  return e.m.reads(o, -1) ? PyObject_IsTrue(o) : -1;
}

Flow op_jump_forward(Exec& e, int arg) {
  e.next += arg;
  return Flow::Next;
}

Flow op_jump_backward(Exec& e, int arg) {
  e.next -= arg;
  return Flow::Next;
}

namespace {
/// Whether the instructions from `at` on end in an exception, or in the end of the process: a guess, by names.
bool only_raises(PyCodeObject* code, int at) {
  int count = 0;
  const uint8_t* units = py311::plain_code(code, &count);
  const auto loads = [&](uint32_t name, std::initializer_list<const char*> names) {
    if (name >= static_cast<uint32_t>(PyTuple_GET_SIZE(code->co_names))) return false;
    PyObject* const found = PyTuple_GET_ITEM(code->co_names, name);
    return std::any_of(names.begin(), names.end(),
                       [&](const char* n) { return PyUnicode_CompareWithASCIIString(found, n) == 0; });
  };
  uint32_t wide = 0;
  bool of_sys = false;
  for (; units && at < count; ++at) {
    const uint8_t op = units[2 * at];
    const uint32_t arg = wide | units[2 * at + 1];
    wide = op == EXTENDED_ARG ? arg << 8 : 0;
    if (op == RAISE_VARARGS) return true;
    const bool attribute = op == LOAD_ATTR || op == LOAD_METHOD;
    if (attribute && of_sys && loads(arg, {"exit", "_exit"})) return true;
    if (op == LOAD_GLOBAL && loads(arg >> 1, {"exit", "quit"})) return true;
    if (op == LOAD_GLOBAL || attribute) of_sys = op == LOAD_GLOBAL && loads(arg >> 1, {"sys", "os"});
    if (py311::is_jump(op) || py311::ends_block(op)) return false;
  }
  return false;
}
}  // namespace

std::optional<bool> truth_that_goes_on(PyCodeObject* code, int next, int offset, bool if_true) {
  const bool jump_raises = only_raises(code, next + offset);
  if (jump_raises == only_raises(code, next)) return std::nullopt;
  return jump_raises ? !if_true : if_true;
}

namespace {
/// The truth of a tensor that the jump at hand is expected to find; negative if nothing is, it is known, or nothing can
/// see to it.
int expected_truth(Exec& e, PyObject* o, bool if_true) {
  if (!e.m.options.expected_jump) return -1;
  const auto jumps = e.m.options.expected_jump(e.code, e.next - 1);
  if (!jumps) return -1;
  const at::Tensor& t = THPVariable_Unpack(o);
  if (const auto known = e.m.decide_truth(t)) return *known;
  if (t.numel() != 1 || t.is_complex()) return -1;
  const bool expected = *jumps == if_true;
  const bool plain = t.dim() == 0 && t.scalar_type() == at::kBool;
  if (!e.m.assert_that(plain ? t : at::ne(t.detach().reshape({}), 0), expected)) return -1;
  e.m.result.expected_jumps.emplace_back(py::Ref::borrow(reinterpret_cast<PyObject*>(e.code)), e.next - 1);
  return expected;
}

Flow pop_jump(Exec& e, int offset, bool if_true) {
  int t = -1;
  if (PyObject* o = e.top(); py::is_tensor(o) && e.m.has_fake(o) && !e.m.asks_class(o)) {
    const auto good = truth_that_goes_on(e.code, e.next, offset, if_true);
    if (good && e.m.assert_that(THPVariable_Unpack(o), *good)) t = *good;
    if (t < 0) t = expected_truth(e, o, if_true);
  }
  if (t < 0) t = truth(e, e.top());
  if (t < 0) {
    if (BreakReason& reason = e.m.reason; reason.id == "data-dependent-branch" && !reason.jump_code) {
      reason.jump_code = py::Ref::borrow(reinterpret_cast<PyObject*>(e.code));
      reason.jump_at = e.next - 1;
    }
    return Flow::Error;
  }
  e.drop(1);
  if ((t != 0) == if_true) e.next += offset;
  return Flow::Next;
}

Flow jump_or_pop(Exec& e, int offset, bool if_true) {
  const int t = truth(e, e.top());
  if (t < 0) return Flow::Error;
  if ((t != 0) == if_true)
    e.next += offset;
  else
    e.drop(1);
  return Flow::Next;
}

Flow jump_none(Exec& e, int offset, bool if_none) {
  PyObject* o = e.pop();
  if ((o == Py_None) == if_none) e.next += offset;
  Py_DECREF(o);
  return Flow::Next;
}
}  // namespace

Flow op_pop_jump_forward_if_false(Exec& e, int arg) { return pop_jump(e, arg, false); }
Flow op_pop_jump_forward_if_true(Exec& e, int arg) { return pop_jump(e, arg, true); }
Flow op_pop_jump_backward_if_false(Exec& e, int arg) { return pop_jump(e, -arg, false); }
Flow op_pop_jump_backward_if_true(Exec& e, int arg) { return pop_jump(e, -arg, true); }
Flow op_jump_if_false_or_pop(Exec& e, int arg) { return jump_or_pop(e, arg, false); }
Flow op_jump_if_true_or_pop(Exec& e, int arg) { return jump_or_pop(e, arg, true); }
Flow op_pop_jump_forward_if_none(Exec& e, int arg) { return jump_none(e, arg, true); }
Flow op_pop_jump_forward_if_not_none(Exec& e, int arg) { return jump_none(e, arg, false); }
Flow op_pop_jump_backward_if_none(Exec& e, int arg) { return jump_none(e, -arg, true); }
Flow op_pop_jump_backward_if_not_none(Exec& e, int arg) { return jump_none(e, -arg, false); }

Flow op_get_iter(Exec& e, int) {
  PyObject* o = e.top();
  if (py::is_tensor(o) && e.m.has_fake(o)) {
    // Tensor.__iter__ is Python; it warns and unbinds.
    return e.replace_top(PyObject_GetIter(o));
  }
  if (!e.m.reads(o, -1)) return Flow::Error;
  return e.replace_top(e.m.after_c_call(PyObject_GetIter(o)));
}

Flow op_for_iter(Exec& e, int arg) {
  PyObject* it = e.top();
  if (Known* k = e.m.find_plain(it); k && !PyErr_Occurred()) {
    e.m.graph_break("iterator-from-outside",
                    std::string("a loop over a ") + Py_TYPE(it)->tp_name + " that was made before the captured code");
    return Flow::Error;
  }
  PyObject* v = (*Py_TYPE(it)->tp_iternext)(it);
  if (v) {
    v = e.m.after_c_call(v);
    return e.push_seen(v);
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
      if (e.m.failed_iterators.insert(it).second) e.m.alive.push_back(py::Ref::borrow(it));
      return Flow::Error;
    }
    PyErr_Clear();
  }
  e.drop(1);
  e.next += arg;
  return Flow::Next;
}

Flow op_return_value(Exec& e, int) {
  if (e.root) {
    e.m.leave_return(e.top());
    if (PyErr_Occurred()) return Flow::Error;
  }
  e.result = e.pop();
  return Flow::Leave;
}

Flow op_return_generator(Exec& e, int) {
  if (e.root) {
    e.m.graph_break("generator-function", "the captured function is a generator");
    return Flow::Error;
  }
  if (e.code->co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)) {
    e.m.graph_break("async", std::string("a call of the coroutine function ") + PyUnicode_AsUTF8(e.code->co_qualname));
    return Flow::Error;
  }
  // CPython's own evaluator runs exactly this instruction: it makes the generator from the frame and returns it.
  e.frame->prev_instr = py311::first_instruction(e.code) + e.at - 1;
  e.frame->stacktop = static_cast<int>(e.sp - e.frame->localsplus);
  py311::Frame* previous = e.frame->previous;
  e.ts->cframe->current_frame = previous;
  e.result = _PyEval_EvalFrameDefault(e.ts, e.frame, 0);
  e.ts->cframe->current_frame = e.frame;
  e.frame->previous = previous;
  if (!e.result) return Flow::Error;
  e.m.generators.push_back(py::check(PyWeakref_NewRef(e.result, nullptr)));
  e.sp = e.frame->localsplus;  // the generator owns the frame's contents now
  return Flow::Leave;
}

Flow op_yield_value(Exec& e, int) {
  e.result = e.pop();
  py311::generator_of(e.frame)->gi_frame_state = py311::Suspended;
  return Flow::Leave;
}

Flow op_get_yield_from_iter(Exec& e, int) {
  PyObject* o = e.top();
  if (PyGen_CheckExact(o) || PyCoro_CheckExact(o)) return Flow::Next;
  return e.replace_top(PyObject_GetIter(o));
}

Flow op_send(Exec& e, int arg) {
  PyObject* v = e.pop();
  PyObject* receiver = e.top();
  if (e.m.refuses_iterator(receiver)) return Flow::Error;
  PyObject* value = nullptr;
  PySendResult r;
  if (PyIter_Check(receiver) && v == Py_None && !PyGen_CheckExact(receiver) && !PyCoro_CheckExact(receiver)) {
    value = Py_TYPE(receiver)->tp_iternext(receiver);
    if (value) {
      r = PYGEN_NEXT;
    } else {
      r = _PyGen_FetchStopIterationValue(&value) == 0 ? PYGEN_RETURN : PYGEN_ERROR;
    }
  } else if (Py_TYPE(receiver)->tp_as_async && Py_TYPE(receiver)->tp_as_async->am_send) {
    r = PyIter_Send(receiver, v, &value);
  } else {
    static PyObject* send = PyUnicode_InternFromString("send");
    value = PyObject_CallMethodOneArg(receiver, send, v);
    r = value ? PYGEN_NEXT : _PyGen_FetchStopIterationValue(&value) == 0 ? PYGEN_RETURN : PYGEN_ERROR;
  }
  Py_DECREF(v);
  if (r == PYGEN_ERROR) return Flow::Error;
  if (r == PYGEN_RETURN) {
    e.top() = value;
    Py_DECREF(receiver);
    e.next += arg;
    return e.m.observe(value) ? Flow::Next : Flow::Error;
  }
  return e.push_seen(value);
}

Flow op_async(Exec& e, int) {
  e.m.graph_break("async", "asynchronous code");
  return Flow::Error;
}

// --- exceptions --------------------------------------------------------------------------------------------------

Flow op_push_exc_info(Exec& e, int) {
  PyObject* value = e.pop();
  _PyErr_StackItem* info = e.ts->exc_info;
  e.push(info->exc_value ? info->exc_value : Py_NewRef(Py_None));
  e.push(Py_NewRef(value));
  info->exc_value = value;
  return Flow::Next;
}

Flow op_pop_except(Exec& e, int) {
  Py_XSETREF(e.ts->exc_info->exc_value, e.pop());
  return Flow::Next;
}

Flow op_check_exc_match(Exec& e, int) {
  PyObject* type = e.top();
  const bool tuple = PyTuple_Check(type);
  const Py_ssize_t n = tuple ? PyTuple_GET_SIZE(type) : 1;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* t = tuple ? PyTuple_GET_ITEM(type, i) : type;
    if (!PyExceptionClass_Check(t)) {
      PyErr_SetString(PyExc_TypeError, "catching classes that do not inherit from BaseException is not allowed");
      return Flow::Error;
    }
  }
  const int match = PyErr_GivenExceptionMatches(e.top(1), type);
  Py_SETREF(e.top(), Py_NewRef(match ? Py_True : Py_False));
  return Flow::Next;
}

Flow op_check_eg_match(Exec& e, int) {
  e.m.graph_break("exception-group", "except* (exception groups)");
  return Flow::Error;
}

Flow op_prep_reraise_star(Exec& e, int arg) { return op_check_eg_match(e, arg); }

Flow op_reraise(Exec& e, int arg) {
  if (arg) {
    const long last = PyLong_AsLong(e.top(arg));
    e.frame->prev_instr = py311::first_instruction(e.code) + last;
  }
  PyObject* value = e.pop();
  PyErr_Restore(Py_NewRef(PyExceptionInstance_Class(value)), value, PyException_GetTraceback(value));
  return Flow::Error;
}

bool Machine::interrupted() const {
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) return false;
  return !raised_interrupt || PyThreadState_Get()->curexc_value != raised_interrupt.get();
}

Flow op_raise_varargs(Exec& e, int arg) {
  py::Ref cause = arg == 2 ? py::Ref::steal(e.pop()) : py::Ref();
  py::Ref exc = arg >= 1 ? py::Ref::steal(e.pop()) : py::Ref();
  if (!exc) {
    PyObject* handled = PyErr_GetHandledException();
    if (!handled || handled == Py_None) {
      Py_XDECREF(handled);
      PyErr_SetString(PyExc_RuntimeError, "No active exception to reraise");
      return Flow::Error;
    }
    PyErr_Restore(Py_NewRef(PyExceptionInstance_Class(handled)), handled, PyException_GetTraceback(handled));
    return Flow::Error;
  }
  auto instance = [](PyObject* o, const char* message) {
    if (PyExceptionClass_Check(o)) {
      py::Ref v = py::Ref::steal(PyObject_CallNoArgs(o));
      if (v && !PyExceptionInstance_Check(v.get())) {
        PyErr_Format(PyExc_TypeError, "calling %R should have returned an instance of BaseException, not %R", o,
                     Py_TYPE(v.get()));
        return py::Ref();
      }
      return v;
    }
    if (PyExceptionInstance_Check(o)) return py::Ref::borrow(o);
    PyErr_SetString(PyExc_TypeError, message);
    return py::Ref();
  };
  py::Ref value = instance(exc.get(), "exceptions must derive from BaseException");
  if (!value) return Flow::Error;
  if (cause) {
    py::Ref c =
        cause.get() == Py_None ? py::Ref() : instance(cause.get(), "exception causes must derive from BaseException");
    if (!c && cause.get() != Py_None) return Flow::Error;
    PyException_SetCause(value.get(), c.release());
  }
  PyErr_SetObject(PyExceptionInstance_Class(value.get()), value.get());
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) e.m.raised_interrupt = value;
  return Flow::Error;
}

Flow op_load_assertion_error(Exec& e, int) {
  e.push(Py_NewRef(PyExc_AssertionError));
  return Flow::Next;
}

Flow op_before_with(Exec& e, int) {
  PyObject* manager = e.top();
  auto bound = [&](PyObject* name) {
    PyTypeObject* t = Py_TYPE(manager);
    PyObject* descr = _PyType_Lookup(t, name);
    if (!descr) {
      PyErr_Format(PyExc_TypeError, "'%.200s' object does not support the context manager protocol", t->tp_name);
      return py::Ref();
    }
    descrgetfunc get = Py_TYPE(descr)->tp_descr_get;
    return get ? py::Ref::steal(get(descr, manager, reinterpret_cast<PyObject*>(t))) : py::Ref::borrow(descr);
  };
  py::Ref enter_method = bound(names().enter);
  py::Ref exit_method = enter_method ? bound(names().exit) : py::Ref();
  if (!exit_method) return Flow::Error;
  PyObject* v = e.m.call(enter_method.get(), nullptr, 0, nullptr);
  if (!v) return Flow::Error;
  Py_SETREF(e.top(), exit_method.release());
  return e.push_seen(v);
}

Flow op_with_except_start(Exec& e, int) {
  PyObject* value = e.top(0);
  PyObject* exit = e.top(3);
  py::Ref tb = py::Ref::steal(PyException_GetTraceback(value));
  PyObject* args[4] = {nullptr, PyExceptionInstance_Class(value), value, tb ? tb.get() : Py_None};
  return e.push_seen(e.m.call(exit, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

}  // namespace kiln::capture
