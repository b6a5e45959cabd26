// The evaluator's loop, the root frame, and the attempts at a capture.
#include "python/capture/machine.h"

#include <c10/util/ScopeExit.h>

#include <array>

#include "aten/fake.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
thread_local Machine* current = nullptr;

/// After so many attempts that ended because a number's value was needed, a capture goes on without numbers.
constexpr int kMostSpecializations = 8;

const std::array<Handler, 256>& handlers() {
  static const std::array<Handler, 256> table = [] {
    std::array<Handler, 256> t{};
#define KILN_OPCODE(name, handler) t[name] = &handler;
#include "python/capture/opcodes.def"
#undef KILN_OPCODE
    return t;
  }();
  return table;
}

/// While alive, no finalizer runs in the middle of a capture.
struct NoCollection {
  bool was = PyGC_Disable();
  ~NoCollection() {
    if (was) PyGC_Enable();
  }
};
}  // namespace

Machine* machine() { return current; }

bool is_capturing() { return current && current->paused == 0 && !aten::inside_operator(); }

PyObject* graph_break_type() {
  static PyObject* type = PyErr_NewExceptionWithDoc(
      "kiln.GraphBreak", "Carries a graph break to the captured frame; never seen by programs.", PyExc_BaseException,
      nullptr);
  return type;
}

const Names& names() {
  static const Names* n = [] {
    auto* x = new Names();
    auto s = [](const char* text) { return PyUnicode_InternFromString(text); };
    x->dict = s("__dict__");
    x->class_ = s("__class__");
    x->getattr = s("__getattr__");
    x->getattribute = s("__getattribute__");
    x->setattr = s("__setattr__");
    x->delattr = s("__delattr__");
    x->call = s("__call__");
    x->init = s("__init__");
    x->name = s("__name__");
    x->module = s("__module__");
    x->qualname = s("__qualname__");
    x->grad = s("grad");
    x->data = s("data");
    x->requires_grad = s("requires_grad");
    x->parameters = s("_parameters");
    x->buffers = s("_buffers");
    x->modules = s("_modules");
    x->code = s("__code__");
    x->closure = s("__closure__");
    x->defaults = s("__defaults__");
    x->kwdefaults = s("__kwdefaults__");
    x->self = s("__self__");
    x->func = s("__func__");
    x->enter = s("__enter__");
    x->exit = s("__exit__");
    x->contents = s("cell_contents");
    x->append = s("append");
    auto from = [](const char* module, const char* name) -> PyObject* {
      PyObject* m = py::import_module(module);
      PyObject* o = m ? PyObject_GetAttrString(m, name) : nullptr;
      Py_XDECREF(m);
      if (!o) throw InternalError(std::string("cannot find ") + module + "." + name);
      return o;
    };
    x->tensor_type = from("torch", "Tensor");
    x->parameter_type = from("torch.nn", "Parameter");
    x->buffer_type = from("torch.nn", "Buffer");
    x->module_type = from("torch.nn", "Module");
    x->module_getattr = PyObject_GetAttrString(x->module_type, "__getattr__");
    x->module_setattr = PyObject_GetAttrString(x->module_type, "__setattr__");
    x->ordered_dict = from("collections", "OrderedDict");
    x->default_dict = from("collections", "defaultdict");
    x->deque = from("collections", "deque");
    x->partial = from("functools", "partial");
    x->size_type = from("torch", "Size");
    return x;
  }();
  return *n;
}

// --- frames
// ------------------------------------------------------------------------------------------------------------

/// Whether what a local variable holds is not read before the variable is: a container that is not looked at as a
/// whole, see op_load_fast.
static bool is_read_when_loaded(const Machine& m, PyCodeObject* code, int local, PyObject* value) {
  return m.may_stay_unread(value) && !(py311::local_kind(code, local) & py311::KindCell);
}

/// Arguments may be defaults that existed before, or come out of containers through C code (map, sorted): look at them.
static bool see_arguments(Machine& m, Exec& e) {
  PyCodeObject* code = e.code;
  int n = code->co_argcount + code->co_kwonlyargcount;
  PyObject* defaults = e.frame->f_func->func_defaults;
  PyObject* kwdefaults = e.frame->f_func->func_kwdefaults;
  // The defaults of a function that the captured code made are its own objects.
  if (m.is_made_function(reinterpret_cast<PyObject*>(e.frame->f_func))) defaults = kwdefaults = nullptr;
  for (int i = 0; i < n; ++i) {
    PyObject*& slot = e.local(i);
    if (!slot) continue;
    const Class c = m.classify(slot);
    if (c == Class::Constant || c == Class::Singleton || c == Class::Type) continue;
    if (m.find(slot)) {
      Known* k = m.find(slot);
      if (k->stand_in.get() != slot) Py_SETREF(slot, k->stand_in.new_ref());
      if (!is_read_when_loaded(m, code, i, slot) && !m.observe(slot)) return false;
      continue;
    }
    if ((c < Class::Tuple || c > Class::Tensor) && c != Class::Instance) continue;
    using K = guards::Source::Kind;
    auto* f = reinterpret_cast<PyObject*>(e.frame->f_func);
    SourcePtr source;
    if (defaults) {
      const int first = code->co_argcount - static_cast<int>(PyTuple_GET_SIZE(defaults));
      if (i >= first && i < code->co_argcount && PyTuple_GET_ITEM(defaults, i - first) == slot)
        source = m.child(K::ListItem, m.child(K::Attr, m.source_of_object(f), names().defaults), nullptr, i - first);
    }
    if (!source && kwdefaults && i >= code->co_argcount) {
      PyObject* name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
      if (PyDict_GetItem(kwdefaults, name) == slot)
        source = m.child(K::DictItem, m.child(K::Attr, m.source_of_object(f), names().kwdefaults), name);
    }
    if (!source || m.is_constant(slot)) continue;
    PyObject* v = m.see(slot, source);
    if (!v) return false;
    Py_SETREF(slot, v);
  }
  return true;
}

void Machine::guard_function(PyFunctionObject* function) {
  auto* f = reinterpret_cast<PyObject*>(function);
  if (made_functions.count(f) || is_trusted_namespace(function->func_globals)) return;
  if (Known* k = find(f)) {
    activate(*k);
    if (k->source->kind != guards::Source::Kind::Const) return;
  }
  guard(Guard::Kind::Is, child(guards::Source::Kind::Const, nullptr, f), f);
}

/// Ends the levels of torch.func that an abandoned capture has left.
static void leave_transforms() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const py::Ref done = py::Ref::steal(PyObject_CallMethod(polyfills(), "leave_transforms", nullptr));
  if (!done) PyErr_WriteUnraisable(nullptr);
  PyErr_Restore(type, value, traceback);
}

PyObject* Machine::evaluate(py311::Frame* frame, int throw_flag) {
  Exec e{*this, ts, frame, frame->f_code, nullptr, nullptr};
  py311::RunningFrame running(ts, frame);
  const bool fresh = py311::last_instruction(frame) < 0;
  if (fresh && !root) {
    root = frame;
    e.root = true;
  }
  int count = 0;
  e.units = py311::plain_code(e.code, &count);
  e.sp = frame->localsplus + frame->stacktop;
  e.next = py311::last_instruction(frame) + 1;
  frame->stacktop = -1;
  py::Ref handled_before = py::Ref::borrow(ts->exc_info->exc_value);
  _PyErr_StackItem* exc_info = ts->exc_info;
  Flow flow = Flow::Next;
  ++depth;
  const bool entered = Py_EnterRecursiveCall("") == 0;
  if (!entered) {
    flow = Flow::Error;
  } else if (depth > static_cast<int>(kiln::options().inline_depth_limit)) {
    graph_break("inline-depth", "calls nested deeper than " + std::to_string(kiln::options().inline_depth_limit));
    flow = Flow::Error;
  } else if (!e.units || throw_flag) {
    flow = Flow::Error;
    e.at = e.next ? e.next - 1 : 0;
  } else if (fresh && e.root) {
    if (!place_root_arguments(e)) flow = Flow::Error;
  } else if (fresh) {
    guard_function(frame->f_func);
    if (!see_arguments(*this, e)) flow = Flow::Error;
  }
  const auto& table = handlers();
  _Py_CODEUNIT* const first = py311::first_instruction(e.code);
  int call_start = -1;  // KW_NAMES and PRECALL belong to the CALL that follows
  for (;;) {
    while (flow == Flow::Next) {
      e.at = e.next;
      if ((++instructions & 0x3F) == 0 && !may_go_on()) {
        flow = Flow::Error;
        break;
      }
      int opcode = e.units[2 * e.next], arg = e.units[2 * e.next + 1];
      while (opcode == EXTENDED_ARG) {
        ++e.next;
        opcode = e.units[2 * e.next];
        arg = arg << 8 | e.units[2 * e.next + 1];
      }
      frame->prev_instr = first + e.next;
      const int opcode_at = e.next;
      e.next += 1 + py311::cache_units(opcode);
      if (e.root) {
        if (opcode == KW_NAMES || (opcode == PRECALL && call_start < 0)) call_start = e.at;
        root_instruction = opcode == CALL && call_start >= 0 ? call_start : e.at;
        if (!options.break_at.empty() && opcode != KW_NAMES && opcode != PRECALL &&
            options.break_at.count(root_instruction)) {
          leave_at(root_instruction, e.sp, frame);
          if (!PyErr_Occurred()) {
            e.result = Py_NewRef(Py_None);
            flow = Flow::Leave;
            break;
          }
          flow = Flow::Error;
          break;
        }
        if (opcode == CALL) call_start = -1;
        if (opcode == CALL || opcode == CALL_FUNCTION_EX || opcode == BEFORE_WITH || opcode == GET_ITER)
          root_calls.push_back(root_instruction);
      }
      Handler handler = table[opcode];
      loading = nullptr;
      if (!handler) {
        PyErr_Format(PyExc_SystemError, "unknown opcode %d", opcode);
        flow = Flow::Error;
        break;
      }
      flow = handler(e, arg);
      if (flow == Flow::Error) e.at = opcode_at;
    }
    if (flow == Flow::Leave) break;
    // An exception: to its handler, unless it carries a graph break.
    e.kwnames = nullptr;
    if (!broken && PyErr_Occurred() && trace.failure) after_c_call(nullptr);
    if (!broken && PyErr_Occurred() && refuses_stand_in())
      graph_break("symbolic-branch", "C code needs the value of a number that the graph computes");
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "an instruction failed without an exception");
    int handler = 0, level = 0;
    bool push_lasti = false;
    if (!broken && ts->curexc_value && find(ts->curexc_value))  // it would get another traceback and context
      graph_break("traceback", "an exception that existed before is raised");
    const bool catchable = !broken && !interrupted();
    if (!catchable || !py311::find_handler(e.code, e.at, &handler, &level, &push_lasti)) {
      PyObject** base = py311::stack_base(frame);
      while (e.sp > base) Py_XDECREF(e.pop());
      e.result = nullptr;
      break;
    }
    PyObject** top = py311::stack_base(frame) + level;
    while (e.sp > top) Py_XDECREF(e.pop());
    if (push_lasti) e.push(PyLong_FromLong(py311::last_instruction(frame)));
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyErr_NormalizeException(&type, &value, &tb);
    PyException_SetTraceback(value, tb ? tb : unknown_traceback());
    Py_XDECREF(tb);
    Py_XDECREF(type);
    caught.emplace(value, root_instruction);
    e.push(value);
    e.next = handler;
    call_start = -1;
    flow = Flow::Next;
  }
  if (broken && ts->exc_info == exc_info) Py_XSETREF(exc_info->exc_value, handled_before.release());
  if (entered) Py_LeaveRecursiveCall();
  --depth;
  // Whatever is left on a value stack that a root break leaves behind goes with the frame.
  frame->stacktop = static_cast<int>(e.sp - frame->localsplus);
  return e.result && !e.root ? result_of_slot(frame, e.result) : e.result;
}

bool Machine::may_go_on() {
  if (broken) return true;
  const auto& limits = kiln::options();
  const auto give_up = [&](const std::string& what, int64_t n) {
    given_up = "its capture takes more than " + std::to_string(n) + " " + what + "; is it a loop without an end?";
  };
  if (instructions > limits.capture_limit)
    give_up("instructions", limits.capture_limit);
  else if (trace.num_nodes > limits.graph_size_limit)
    give_up("tensor operations", limits.graph_size_limit);
  if (given_up.empty()) {
    // Handlers are no part of the captured code, and what they raise is not the program's to catch here.
    Paused paused_here(*this);
    aten::RecordingPaused no_recording;
    aten::NoFakeGuard real;
    if (PyErr_CheckSignals() == 0) return true;
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyErr_NormalizeException(&type, &value, &tb);
    if (tb) PyException_SetTraceback(value, tb);
    Py_XDECREF(type);
    Py_XDECREF(tb);
    interrupt = py::Ref::steal(value);
  }
  broken = true;
  PyErr_SetNone(graph_break_type());
  return false;
}

bool Machine::place_root_arguments(Exec& e) {
  PyCodeObject* code = e.code;
  int n = code->co_argcount + code->co_kwonlyargcount;
  n += (code->co_flags & CO_VARARGS) != 0;
  n += (code->co_flags & CO_VARKEYWORDS) != 0;
  const auto place = [&](int i, PyObject* real) {
    PyObject* name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
    const SourcePtr source = child(guards::Source::Kind::Local, nullptr, name, i);
    PyObject* v = is_read_when_loaded(*this, code, i, real) ? stand_in(real, source) : see(real, source);
    if (v) Py_XSETREF(e.local(i), v);
    return v != nullptr;
  };
  // Tensors first, and what enumerate() gives: a parameter that is in an optimizer's list, too, is known by the
  // variable, not by its place there.
  const auto turn = [](PyObject* real) { return py::is_tensor(real) ? 0 : PyTuple_CheckExact(real) ? 1 : 2; };
  for (int now = 0; now < 3; ++now)
    for (int i = 0; i < n; ++i) {
      PyObject* const real = real_root->localsplus[i];
      if (!real)  // resume functions pass unbound locals as nothing
        Py_CLEAR(e.local(i));
      else if (turn(real) == now && !place(i, real))
        return false;
    }
  return true;
}

PyObject* eval_captured_frame(PyThreadState* tstate, py311::Frame* frame, int throw_flag) {
  Machine& m = *current;
  try {
    if (!throw_flag && py311::last_instruction(frame) < 0 && (m.root || frame->f_code != m.real_root->f_code)) {
      if (m.skips_finalizer(frame)) return Py_NewRef(Py_None);
      // C code through which a break passes may call Python: PyTorch shows the warnings that it kept until an operator
      // is left. None of it is the program's.
      if (m.broken || m.trace.failure || !m.root) {
        Machine::Paused paused_here(m);
        aten::RecordingPaused no_recording;
        aten::NoFakeGuard real;
        return _PyEval_EvalFrameDefault(tstate, frame, 0);
      }
      bool handled = false;
      PyObject* r = m.call_python_special(frame, &handled);
      if (handled) return r;
    }
    return m.evaluate(frame, throw_flag);
  } catch (const std::exception& e) {
    m.internal_error = e.what();
    m.broken = true;
    PyErr_SetNone(graph_break_type());
    return nullptr;
  }
}

// --- attempts
// ------------------------------------------------------------------------------------------------------------

Machine::Machine(PyThreadState* state, py311::Frame* frame, const CaptureOptions& capture_options)
    : ts(state), real_root(frame), options(capture_options) {
  // PyTorch's bindings give the GIL up around operators.
  trace.on_unknown = [this](const at::Tensor& t) {
    pybind11::gil_scoped_acquire gil;
    return input_value(t);
  };
  trace.known_value = [this](const at::Tensor& t) { return known_value(t); };
  trace.replace = [this](const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    return replace_data_shape(op, stack);
  };
  trace.on_node = [this](graph::Node& n) {
    n.checkpoint = checkpoint.depth > 0 ? checkpoint.number : 0;
    mirror_node(n);
  };
  trace.stack_trace = [this] {
    pybind11::gil_scoped_acquire gil;
    return stack_trace();
  };
  if (options.open_sizes != CaptureOptions::OpenSizes::None) open_sizes();
}

Machine::~Machine() {
  for (const auto& node : custom_functions) node->forget();
  close_sizes();
}

std::shared_ptr<const graph::StackTrace> Machine::stack_trace() {
  py311::Frame* f = ts->cframe->current_frame;
  if (last_stack_ && last_stack_frame_ == f && last_stack_instruction_ == f->prev_instr) return last_stack_;
  auto trace_out = std::make_shared<graph::StackTrace>();
  for (py311::Frame* at = f; at; at = at->previous) {
    trace_out->push_back(place_of(at));
    if (at == root) break;
  }
  std::reverse(trace_out->begin(), trace_out->end());
  last_stack_ = std::move(trace_out);
  last_stack_frame_ = f;
  last_stack_instruction_ = f->prev_instr;
  return last_stack_;
}

CaptureResult Machine::run() {
  PyCodeObject* code = real_root->f_code;
  PyFunctionObject* function = real_root->f_func;
  if (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))
    throw Unsupported("the function is a generator");
  if (!(code->co_flags & CO_OPTIMIZED)) throw Unsupported("module or class code");
  // CPython makes the running copy of the frame from a call with arguments of the right number; place_root_arguments
  // puts the stand-ins in their places.
  const int positional = code->co_argcount, keywords = code->co_kwonlyargcount;
  std::vector<PyObject*> args(static_cast<size_t>(positional + keywords + 1), Py_None);
  py::Ref kwnames;
  if (keywords) {
    kwnames = py::Ref::steal(PyTuple_New(keywords));
    for (int i = 0; i < keywords; ++i)
      PyTuple_SET_ITEM(kwnames.get(), i, Py_NewRef(PyTuple_GET_ITEM(code->co_localsplusnames, positional + i)));
  }
  NoCollection no_collection;
  modes_at_start = aten::Modes();
  transform_modes_at_start = aten::TransformModes();
  function_modes_at_start = py::FunctionModes();
  handled_at_start = py::Ref::steal(PyErr_GetHandledException());
  struct RestoreModes {
    Machine& m;
    ~RestoreModes() {
      m.modes_at_start.restore();
      // What an abandoned or a finished capture entered, it leaves; the effects on leaving do it for real.
      for (int i = 0; i < m.autocast_nesting; ++i) at::autocast::decrement_nesting();
      for (int i = 0; i > m.autocast_nesting; --i) at::autocast::increment_nesting();
      at::autocast::clear_cache();  // it may hold casts of fakes
      m.transform_modes_at_start.restore();
      m.function_modes_at_start.restore();
      m.restore_settings();
    }
  } restore_modes{*this};
  Machine* outer = std::exchange(current, this);
  struct Restore {
    Machine* outer;
    ~Restore() { current = outer; }
  } restore{outer};
  PyObject* r;
  {
    aten::Recording recording(trace);
    const auto leave_entered = c10::make_scope_exit([this] {
      inference_stays = done && !inference_modes.empty();
      if (aten::inside_transform()) {  // the modes' end would hide the levels entered in them
        Paused paused_here(*this);
        aten::RecordingPaused no_recording;
        leave_transforms();
      }
      while (!inference_modes.empty()) inference_modes.pop_back();
    });
    guard(Guard::Kind::GlobalState, nullptr, nullptr, guards::pack_global_state());
    // Calls go to these from C, so that nobody looks them up.
    for (int64_t i = 0; i < py::num_function_modes(); ++i) {
      const py::Ref seen =
          py::Ref::steal(see(py::function_mode(i), child(guards::Source::Kind::FunctionMode, nullptr, nullptr, i)));
      if (seen) continue;
      PyErr_Clear();
      throw Unsupported("a TorchFunctionMode is active that no guard can describe");
    }
    r = PyObject_Vectorcall(reinterpret_cast<PyObject*>(function), args.data() + 1,
                            static_cast<size_t>(positional) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames.get());
  }
  Py_XDECREF(r);
  // What is still held goes with the machine; it never was, so that neither its __del__ nor a generator's finally is
  // run (CPython's bit for that).
  const auto never_was = [](PyObject* o) {
    if (PyObject_IS_GC(o)) reinterpret_cast<uintptr_t*>(o)[-1] |= 1;
  };
  for (const auto& [o, made_at] : finalizable) never_was(o);
  finalizable.clear();
  for (const py::Ref& weak : generators)
    if (PyObject* o = PyWeakref_GET_OBJECT(weak.get()); o != Py_None) never_was(o);
  if (!internal_error.empty()) {
    PyErr_Clear();
    throw InternalError(internal_error);
  }
  if (interrupt) {
    PyErr_Clear();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.get())), interrupt.get());
    throw py::PythonError{};
  }
  if (!given_up.empty()) {
    PyErr_Clear();
    if (not_yet) throw NotYet(given_up);
    throw Unsupported(given_up);
  }
  if (!r && interrupted()) {
    PyErr_Clear();
    PyErr_SetInterrupt();  // it reaches the user where eager code runs on
    throw Unsupported("interrupted");
  }
  if (done) {
    PyErr_Clear();
    assertions_refused = !finish_assertions();
    finish();
    return std::move(result);
  }
  // A break or an exception inside the root's current instruction.
  if (!broken) {
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    // What came past a finally or a with statement is raised anew in eager where it was raised first: its traceback
    // tells.
    if (const auto raised = caught.find(value); raised != caught.end()) root_instruction = raised->second;
    py::Ref text = py::Ref::steal(value ? PyObject_Str(value) : nullptr);
    PyErr_Clear();
    reason = {};
    reason.id = "exception";
    reason.cause = std::string("the program raises ") +
                   (type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "an exception") + ": " +
                   (text ? PyUnicode_AsUTF8(text.get()) : "");
    PyErr_Clear();
    PyErr_Restore(type, value, tb);
  }
  PyErr_Clear();
  return std::move(result);
}

PyObject* Machine::inference_mode_step(PyObject* const* args, size_t n) {
  KILN_CHECK(n == 1, "kiln._C._inference_mode takes whether to enter");
  if (args[0] == Py_True) {
    // A graph for a custom backend has no node for it.
    if (!options.inference_modes || options.for_fx || aten::inside_transform() || py::function_mode_active())
      Py_RETURN_FALSE;
    inference_modes.push_back(std::make_unique<c10::InferenceMode>());
    Py_RETURN_TRUE;
  }
  if (inference_modes.empty()) Py_RETURN_FALSE;
  inference_modes.pop_back();
  Py_RETURN_TRUE;
}

PyObject* Machine::dual_level_step(PyObject* const* args, size_t n) {
  if (n == 0) return PyLong_FromLongLong(level_around_duals);
  KILN_CHECK(n == 1 && PyLong_Check(args[0]), "kiln._C._dual_level takes a level");
  if (!options.dual_levels) return graph_break("call-that-breaks", "a call of torch._C._enter_dual_level");
  level_around_duals = PyLong_AsLongLong(args[0]);
  Py_RETURN_NONE;
}

CaptureResult capture_frame(PyThreadState* tstate, py311::Frame* frame, const CaptureOptions& given) {
  names();
  load_callables();
  if (given.item_numbers || (given.changing_numbers && !given.changing_numbers->empty())) load_numbers();
  CaptureOptions options = given;
  int specializations = 0;
  bool int_needed = false;
  std::unordered_map<int, BreakReason> reasons;
  for (int attempt = 0; attempt < 64; ++attempt) {
    Machine m(tstate, frame, options);
    m.break_reasons = reasons;
    CaptureResult result = m.run();
    const bool number_breaks = options.constant_numbers_break && m.needed_items.empty() && m.root_instruction >= 0 &&
                               !options.break_at.contains(m.root_instruction);
    if ((!m.needed_numbers.empty() || !m.needed_items.empty()) && !number_breaks) {
      options.constant_numbers_break = options.constant_numbers_break && m.needed_numbers.empty();
      for (const std::string& s : m.needed_numbers)
        log_artifact(Topic::recompiles, guards::shown(s),
                     "changes between calls, but stays a constant: its value is needed\n" + m.reason.stack);
      for (const std::string& s : m.needed_items)
        log_artifact(Topic::graph_breaks, s, "its value is needed: a guard on it, or a break\n" + m.reason.stack);
      options.constant_numbers.insert(m.needed_numbers.begin(), m.needed_numbers.end());
      options.breaking_items.insert(m.needed_items.begin(), m.needed_items.end());
      // Ints are needed more often than not (as sizes, indices, bounds): a second one is reason enough to stop trying.
      if (m.needed_int && std::exchange(int_needed, true)) options.ints_change = false;
      if (++specializations >= kMostSpecializations) {
        options.changing_numbers = nullptr;
        options.item_numbers = false;
      }
      continue;
    }
    if (m.inference_stays) {
      options.inference_modes = false;
      continue;
    }
    if (m.text_needed) {
      options.texts = false;
      continue;
    }
    if (m.level_around_duals) {  // it ended inside of one
      options.dual_levels = false;
      continue;
    }
    if (!m.branches.empty()) {  // it ended inside of one
      log_artifact(Topic::graph_breaks, "torch.cond", "one branch is run: " + m.reason.cause + "\n" + m.reason.stack);
      options.both_branches = false;
      continue;
    }
    if (m.assertions_refused) {
      options.assertions_in_graph = false;
      continue;
    }
    if (m.done) {
      result.constant_numbers = options.constant_numbers;
      result.breaking_items = options.breaking_items;
      return result;
    }
    if (m.root_instruction < 0 || !options.break_at.insert(m.root_instruction).second)
      throw Unsupported(m.reason.cause);
    reasons[m.root_instruction] = m.reason;
  }
  throw Unsupported("too many attempts at a capture");
}

// --- breaks
// ------------------------------------------------------------------------------------------------------------

namespace {
struct BreakRow {
  const char *id, *hint;
};
const BreakRow kBreaks[] = {
#define KILN_BREAK(id, hint) {id, hint},
#include "python/capture/graph_breaks.def"
#undef KILN_BREAK
};
}  // namespace

py311::Frame* Machine::user_frame() {
  static const std::string own = [] {
    const py::Ref file = py::check(PyObject_GetAttrString(polyfills(), "__file__"));
    const std::string path = PyUnicode_AsUTF8(file.get());
    return path.substr(0, path.rfind('/') + 1);
  }();
  const auto is_own = [](const std::string& file) {
    return file.starts_with(own) && file.find('/', own.size()) == std::string::npos;
  };
  py311::Frame* f = ts->cframe->current_frame;
  while (f && f != root && f->previous && is_own(place_of(f)->file)) f = f->previous;
  return f;
}

std::string Machine::user_stack() {
  std::string out;
  std::vector<py311::Frame*> frames;
  for (py311::Frame* f = user_frame(); f; f = f->previous) {
    frames.push_back(f);
    if (f == root) break;
  }
  for (auto it = frames.rbegin(); it != frames.rend(); ++it) {
    const graph::StackFrame& at = *place_of(*it);
    out += "  File \"" + at.file + "\", line " + std::to_string(at.line) + ", in " + at.function + "\n";
  }
  return out;
}

PyObject* Machine::graph_break(const char* id, const std::string& particulars) {
  PyErr_Clear();
  if (!broken) {
    broken = true;
    reason = {};
    reason.id = id;
    reason.cause = particulars;
    for (const BreakRow& row : kBreaks)
      if (reason.id == row.id) reason.hint = row.hint;
    reason.stack = user_stack();
    if (py311::Frame* f = user_frame()) {
      reason.file = place_of(f)->file;
      reason.line = place_of(f)->line;
    }
  }
  PyErr_SetNone(graph_break_type());
  return nullptr;
}

}  // namespace kiln::capture
