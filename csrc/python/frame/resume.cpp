#include "python/frame/resume.h"

#include <structmember.h>

#include <algorithm>

#include "base/error.h"
#include "python/cpython/py311.h"
#include "python/frame/bytecode/code.h"

namespace kiln::frame {

using bytecode::Body;
using bytecode::Instruction;
using capture::Recipe;
using py::check;
using py::Ref;

int num_arguments(PyCodeObject* code) {
  return code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
         ((code->co_flags & CO_VARKEYWORDS) != 0);
}

namespace {

// --- the objects that continuations call and return ------------------------------------------------------------------

struct CallObject {  // a ResumeCall in flight
  PyObject_HEAD ResumeCall* call;
};
struct HandleObject {  // calling it makes a ResumeCall; a constant of the continuation
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* code;
};

PyTypeObject* call_type() {
  static PyTypeObject* type = [] {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+[](PyObject* self) {
                              delete reinterpret_cast<CallObject*>(self)->call;
                              PyTypeObject* t = Py_TYPE(self);
                              t->tp_free(self);
                              Py_DECREF(t);
                            })},
                           {0, nullptr}};
    PyType_Spec spec = {"kiln._C.ResumeCall", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

PyObject* call_handle(PyObject* self, PyObject* const* args, size_t nargsf, PyObject*) {
  PyTypeObject* type = call_type();
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  auto* call = new ResumeCall;
  call->code = Ref::borrow(reinterpret_cast<HandleObject*>(self)->code);
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  call->args.reserve(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) call->args.push_back(Ref::borrow(args[i]));
  reinterpret_cast<CallObject*>(made)->call = call;
  return made;
}

PyTypeObject* handle_type() {
  static PyTypeObject* type = [] {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(HandleObject, vectorcall), READONLY, nullptr},
        {"code", T_OBJECT, offsetof(HandleObject, code), READONLY, "the resume function's code"},
        {nullptr, 0, 0, 0, nullptr}};
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+[](PyObject* self) {
                              Py_XDECREF(reinterpret_cast<HandleObject*>(self)->code);
                              PyTypeObject* t = Py_TYPE(self);
                              t->tp_free(self);
                              Py_DECREF(t);
                            })},
                           {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                           {Py_tp_members, members},
                           {Py_tp_repr, reinterpret_cast<void*>(+[](PyObject* self) {
                              auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<HandleObject*>(self)->code);
                              return PyUnicode_FromFormat("<resume function %U>", code->co_name);
                            })},
                           {0, nullptr}};
    PyType_Spec spec = {"kiln._C.ResumeHandle", sizeof(HandleObject), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

Ref make_handle(PyObject* code) {
  PyTypeObject* type = handle_type();
  Ref handle = check(type->tp_alloc(type, 0));
  auto* h = reinterpret_cast<HandleObject*>(handle.get());
  h->vectorcall = &call_handle;
  Py_INCREF(code);
  h->code = code;
  return handle;
}

// --- pieces of code
// ---------------------------------------------------------------------------------------------------

Instruction op(int opcode, int arg = 0, bytecode::Location location = {}) {
  Instruction i;
  i.opcode = opcode;
  i.arg = arg;
  i.location = location;
  return i;
}

Ref text(const std::string& s) {
  return check(PyUnicode_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size())));
}

/// The parts of a new code object that come from an old one, and its growing constants.
struct Builder {
  explicit Builder(PyCodeObject* code) : source(code) {
    frame.flags = code->co_flags & ~(CO_VARARGS | CO_VARKEYWORDS);
    frame.firstline = code->co_firstlineno;
    frame.names = Ref::borrow(code->co_names);
    frame.filename = Ref::borrow(code->co_filename);
    frame.name = Ref::borrow(code->co_name);
    frame.qualname = Ref::borrow(code->co_qualname);
    frame.stacksize = code->co_stacksize;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_consts); ++i)
      consts.push_back(Ref::borrow(PyTuple_GET_ITEM(code->co_consts, i)));
    num_slots = code->co_nlocalsplus - code->co_nfreevars;
    for (int i = num_slots; i < code->co_nlocalsplus; ++i) frame.freevars.push_back(slot_name(i));
  }
  Ref slot_name(int i) const { return Ref::borrow(PyTuple_GET_ITEM(source->co_localsplusnames, i)); }
  bool is_cell(int i) const { return py311::local_kind(source, i) & py311::KindCell; }
  int constant(Ref o) {
    consts.push_back(std::move(o));
    return static_cast<int>(consts.size()) - 1;
  }
  void emit(int opcode, int arg = 0) { body.instructions.push_back(op(opcode, arg, location)); }
  Ref finish(std::vector<int>* offsets = nullptr) {
    frame.consts = check(PyTuple_New(static_cast<Py_ssize_t>(consts.size())));
    for (size_t i = 0; i < consts.size(); ++i)
      PyTuple_SET_ITEM(frame.consts.get(), static_cast<Py_ssize_t>(i), consts[i].new_ref());
    return bytecode::assemble(body, frame, offsets);
  }

  PyCodeObject* source;
  bytecode::Frame frame;
  std::vector<Ref> consts;
  Body body;
  bytecode::Location location;  // of what is emitted
  int num_slots = 0;            // of the source, without free variables
};

/// Code that asks for its own locals by other ways than instructions needs all of them.
bool inspects_locals(PyCodeObject* code) {
  static const char* const names[] = {"locals", "vars", "dir", "eval", "exec", "super", "_getframe", "currentframe"};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_names); ++i)
    for (const char* name : names)
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(code->co_names, i), name) == 0) return true;
  return false;
}

bool is_null(const capture::RecipePtr& r) { return !r || r->kind == Recipe::Kind::Null; }

/// The value stack when an instruction is about to run: which entries are CPython's NULL.
using StackShape = std::vector<bool>;

/// The stack behind `i` on one of its edges.
StackShape stack_after(const Instruction& i, const StackShape& before, bool jump) {
  const int depth = static_cast<int>(before.size()) + bytecode::stack_effect(i, jump);
  KILN_CHECK(depth >= 0, "an instruction takes more than the stack holds");
  StackShape after(before.begin(), before.begin() + std::min<long>(depth, static_cast<long>(before.size())));
  after.resize(static_cast<size_t>(depth), false);
  // Only calls take a NULL off the stack, and put their result in its place.
  if ((i.opcode == CALL || i.opcode == CALL_FUNCTION_EX) && depth > 0) after[depth - 1] = false;
  if (i.opcode == PUSH_NULL) after[depth - 1] = true;
  if (i.opcode == SWAP) std::vector<bool>::swap(after[depth - 1], after[depth - i.arg]);
  if (i.opcode == COPY) after[depth - 1] = before[before.size() - static_cast<size_t>(i.arg)];
  if (i.opcode == LOAD_GLOBAL && (i.arg & 1)) {
    after[depth - 2] = true;
    after[depth - 1] = false;
  }
  if (i.opcode == LOAD_METHOD) {
    // Run as LOAD_ATTR with a NULL below: see make_continuation.
    after[depth - 2] = true;
    after[depth - 1] = false;
  }
  return after;
}

/// The resume function of `original` at instruction offset `offset`, for a stack of this shape and these bound slots.
Ref resume_code(PyCodeObject* original, const Body& body, int index, const StackShape& stack,
                const std::vector<bool>& bound) {
  CodeInfo* info = code_info(original);
  if (!info) throw py::PythonError{};
  const int offset = body.instructions[index].offset;
  std::string key = std::to_string(offset) + "/";
  for (bool b : stack) key += b ? '0' : 'v';
  key += "/";
  for (bool b : bound) key += b ? '1' : '0';
  if (auto it = info->resume_points.find(key); it != info->resume_points.end()) return it->second;

  Builder b(original);
  const int slots = b.num_slots;
  for (int i = 0; i < slots; ++i) {
    b.frame.varnames.push_back(b.slot_name(i));
    if (b.is_cell(i)) b.frame.cellvars.push_back(b.slot_name(i));
  }
  std::vector<int> stack_slot;
  for (size_t i = 0; i < stack.size(); ++i) {
    stack_slot.push_back(stack[i] ? -1 : static_cast<int>(b.frame.varnames.size()));
    if (!stack[i]) b.frame.varnames.push_back(text(".stack" + std::to_string(i)));
  }
  const int shift = static_cast<int>(b.frame.varnames.size()) - slots;
  b.frame.argcount = static_cast<int>(b.frame.varnames.size());
  b.frame.stacksize += static_cast<int>(stack.size()) + 2;
  b.location = body.instructions[index].location;
  if (original->co_nfreevars) b.emit(COPY_FREE_VARS, original->co_nfreevars);
  b.emit(RESUME, 0);
  for (int i = 0; i < slots; ++i)
    if (!bound[i]) b.emit(DELETE_FAST, i);
  for (int slot : stack_slot) {
    if (slot < 0) {
      b.emit(PUSH_NULL);
      continue;
    }
    // The stack alone holds them from here on, as it did before.
    b.emit(LOAD_FAST, slot);
    b.emit(DELETE_FAST, slot);
  }
  b.emit(JUMP_FORWARD);
  const int prologue = static_cast<int>(b.body.instructions.size());
  b.body.instructions.back().target = prologue + index;
  const int base = bytecode::append(b.body, body);
  for (size_t i = static_cast<size_t>(base); i < b.body.instructions.size(); ++i) {
    Instruction& in = b.body.instructions[i];
    if (bytecode::uses_slot(in.opcode) && in.arg >= slots) in.arg += shift;
  }
  std::vector<int> offsets;
  Ref code = b.finish(&offsets);

  auto point = std::make_shared<ResumePoint>();
  point->original = Ref::borrow(reinterpret_cast<PyObject*>(original));
  point->label = "__resume_at_" + std::to_string(2 * offset) + "_" + std::to_string(info->resume_points.size());
  point->offset = offset;
  point->num_slots = slots;
  for (size_t i = 0; i < offsets.size(); ++i) point->copies.emplace_back(offsets[i], b.body.instructions[i].offset);
  CodeInfo* own = code_info(reinterpret_cast<PyCodeObject*>(code.get()));
  if (!own) throw py::PythonError{};
  own->resume = std::move(point);
  own->skip = CodeInfo::Skip::No;
  info->resume_points.emplace(std::move(key), code);
  return code;
}

/// A short straight way to RETURN_VALUE needs no resume function: it is done on the spot.
bool returns_at_once(const Body& body, int index) {
  for (int steps = 0; steps < 4; ++steps, ++index) {
    switch (body.instructions.at(static_cast<size_t>(index)).opcode) {
      case RETURN_VALUE:
        return true;
      case POP_TOP:
      case LOAD_CONST:
      case NOP:
        continue;
      default:
        return false;
    }
  }
  return false;
}

}  // namespace

bool take_resume_call(PyObject* result, ResumeCall* call) {
  if (Py_TYPE(result) != call_type()) return false;
  auto* o = reinterpret_cast<CallObject*>(result);
  *call = std::move(*o->call);
  return true;
}

Continuation make_continuation(PyCodeObject* code, const capture::Exit& exit) {
  if (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))
    throw Unsupported("a graph break in a generator or coroutine");
  const Body root = bytecode::decode(code);
  int at = bytecode::index_at(root, exit.offset);
  KILN_CHECK(at >= 0, "a graph break names an instruction that does not exist");
  KILN_CHECK(exit.watched.size() == exit.locals.size(), "a graph break does not say of each local what watches it");
  if (bytecode::handled_exceptions(root)[at] > 0)
    throw UnsupportedHere("a graph break while an exception is being handled (in an except or finally block)");

  // KW_NAMES, PRECALL and CALL are one instruction in three parts.
  const auto opcode_at = [&](int i) { return root.instructions.at(static_cast<size_t>(i)).opcode; };
  int first = at;
  if (opcode_at(at) == CALL && at > 0 && opcode_at(at - 1) == PRECALL) first = at - 1;
  if (opcode_at(first) == PRECALL && first > 0 && opcode_at(first - 1) == KW_NAMES) --first;
  if (opcode_at(at) == KW_NAMES) ++at;
  if (opcode_at(at) == PRECALL) ++at;
  const Instruction breaking = root.instructions[at];
  switch (breaking.opcode) {
    case SEND:
    case YIELD_VALUE:
    case RETURN_GENERATOR:
      throw Unsupported("a graph break at an instruction of a generator");
    default:
      break;
  }

  // The original of a resume function is what it was made from, so that a loop uses one resume function again and
  // again.
  PyCodeObject* original = code;
  const Body* original_body = &root;
  Body decoded;
  const ResumePoint* point = nullptr;
  if (CodeInfo* info = find_code_info(code); info && info->resume) {
    point = info->resume.get();
    original = reinterpret_cast<PyCodeObject*>(point->original.get());
    decoded = bytecode::decode(original);
    original_body = &decoded;
  }
  const auto original_index = [&](int index) {
    if (!point) return index;
    const int offset = point->copies.at(static_cast<size_t>(index)).second;
    KILN_CHECK(offset >= 0, "a graph break in a resume function's first part");
    return bytecode::index_at(*original_body, offset);
  };
  const int original_slots = original->co_nlocalsplus - original->co_nfreevars;

  Builder b(code);
  const int slots = b.num_slots;
  const int args = num_arguments(code);
  StackShape stack;
  for (const auto& r : exit.stack) stack.push_back(is_null(r));
  int deepest = static_cast<int>(stack.size());
  deepest = std::max(deepest, deepest + std::max(bytecode::stack_effect(breaking, false),
                                                 breaking.target >= 0 ? bytecode::stack_effect(breaking, true) : 0));

  // Slots: arguments, the state, other locals and cells, temporaries, free variables.
  const int state_slot = args, temporaries = slots + 1;
  const auto slot = [&](int i) { return i < args ? i : i < slots ? i + 1 : i + 1 + deepest; };
  for (int i = 0; i < args; ++i) b.frame.varnames.push_back(b.slot_name(i));
  b.frame.varnames.push_back(text(".state"));
  for (int i = args; i < slots; ++i) b.frame.varnames.push_back(b.slot_name(i));
  for (int i = 0; i < deepest; ++i) b.frame.varnames.push_back(text(".temporary" + std::to_string(i)));
  for (int i = 0; i < slots; ++i)
    if (b.is_cell(i)) b.frame.cellvars.push_back(b.slot_name(i));
  b.frame.argcount = args + 1;

  // --- prologue: unpack the state ---------------------------------------------------------------------------------
  Continuation result;
  std::vector<bool> bound(static_cast<size_t>(slots), false);
  std::vector<int> stores, deletes;
  const std::vector<std::vector<bool>> root_live = bytecode::live_slots(root, slots);
  const bool all_live = inspects_locals(original);
  for (int i = 0; i < slots; ++i) {
    const auto& r = i < static_cast<int>(exit.locals.size()) ? exit.locals[i] : nullptr;
    if (is_null(r)) {
      if (i < args) deletes.push_back(i);
      continue;
    }
    // What nothing will read is not worth computing, unless somebody sees that it is gone.
    if (!all_live && !b.is_cell(i) && !root_live[first][i] && !exit.watched[i]) continue;
    bound[i] = true;
    const bool unchanged = i < args && r->kind == Recipe::Kind::Source &&
                           r->source->kind == guards::Source::Kind::Local && r->source->index == i;
    if (unchanged) continue;
    stores.push_back(i);
    result.results.push_back(r);
  }
  std::vector<int> nulls;  // positions in the stack, from the bottom
  for (int i = static_cast<int>(stack.size()) - 1; i >= 0; --i) {
    static const capture::RecipePtr none = [] {
      auto r = std::make_shared<Recipe>();
      r->kind = Recipe::Kind::Constant;
      r->object = Ref::borrow(Py_None);
      return r;
    }();
    result.results.push_back(stack[i] ? none : exit.stack[i]);
    if (stack[i]) nulls.push_back(i);
  }
  b.location = breaking.location;
  if (code->co_nfreevars) b.emit(COPY_FREE_VARS, code->co_nfreevars);
  b.emit(RESUME, 0);
  if (!result.results.empty()) {
    b.emit(LOAD_FAST, state_slot);
    b.emit(DELETE_FAST, state_slot);
    b.emit(UNPACK_SEQUENCE, static_cast<int>(result.results.size()));
  }
  for (int i : stores) b.emit(STORE_FAST, slot(i));
  for (int i : deletes) b.emit(DELETE_FAST, slot(i));
  for (int position : nulls) {
    // A NULL takes the place of the None that stood in for it.
    b.emit(PUSH_NULL);
    b.emit(SWAP, static_cast<int>(stack.size()) - position + 1);
    b.emit(POP_TOP);
  }

  // --- the breaking instruction -------------------------------------------------------------------------------------
  const int break_start = static_cast<int>(b.body.instructions.size());
  if (breaking.opcode == LOAD_METHOD) {
    // It would push a method and self, or NULL and a bound method; only the latter is known beforehand.
    Instruction load = breaking;
    load.opcode = LOAD_ATTR;
    b.body.instructions.push_back(load);
    b.emit(PUSH_NULL);
    b.emit(SWAP, 2);
  } else {
    for (int i = first; i <= at; ++i) {
      Instruction in = root.instructions[i];
      if (bytecode::uses_slot(in.opcode)) in.arg = slot(in.arg);
      in.opcode = bytecode::forward_jump(in.opcode);
      b.body.instructions.push_back(in);
    }
  }
  const int break_end = static_cast<int>(b.body.instructions.size());

  // --- at each instruction that may follow: ask for its resume function ---------------------------------------------
  const std::vector<std::vector<bool>> live = bytecode::live_slots(*original_body, original_slots);
  int largest_call = 0;
  const auto leave_to = [&](int index, bool jump) {
    StackShape after = stack_after(breaking, stack, jump);
    if (opcode_at(index) == POP_TOP && !after.empty() && !after.back()) {  // what nobody looks at needs no guard
      b.body.instructions.push_back(root.instructions[index++]);
      after.pop_back();
    }
    if (returns_at_once(root, index)) {
      for (;; ++index) {
        b.body.instructions.push_back(root.instructions[index]);
        if (opcode_at(index) == RETURN_VALUE) return;
      }
    }
    const int to = original_index(index);
    std::vector<bool> passed(static_cast<size_t>(original_slots), false);
    for (int i = 0; i < original_slots; ++i) {
      const bool cell = py311::local_kind(original, i) & py311::KindCell;
      passed[i] = bound[i] && (all_live || cell || live[to][i] || exit.watched[i]);
    }
    // A breaking instruction that stores or deletes a local changes what is bound.
    if (breaking.opcode == STORE_FAST) passed[breaking.arg] = all_live || live[to][breaking.arg];
    if (breaking.opcode == DELETE_FAST) passed[breaking.arg] = false;
    Ref resume = resume_code(original, *original_body, to, after, passed);
    result.resume_codes.push_back(resume);
    for (int i = static_cast<int>(after.size()) - 1; i >= 0; --i) b.emit(STORE_FAST, temporaries + i);
    b.emit(PUSH_NULL);
    b.emit(LOAD_CONST, b.constant(make_handle(resume.get())));
    int count = 0;
    int none = -1;
    for (int i = 0; i < original_slots; ++i, ++count) {
      if (passed[i]) {
        b.emit(LOAD_FAST, slot(i));
      } else {
        if (none < 0) none = b.constant(Ref::borrow(Py_None));
        b.emit(LOAD_CONST, none);
      }
    }
    for (size_t i = 0; i < after.size(); ++i) {
      if (after[i]) continue;
      b.emit(LOAD_FAST, temporaries + static_cast<int>(i));
      ++count;
    }
    b.emit(PRECALL, count);
    b.emit(CALL, count);
    b.emit(RETURN_VALUE);
    largest_call = std::max(largest_call, count + 2);
  };
  if (!bytecode::ends_block(breaking.opcode)) leave_to(at + 1, false);
  if (breaking.target >= 0) {
    b.body.instructions[break_end - 1].target = static_cast<int>(b.body.instructions.size());
    leave_to(breaking.target, true);
  }

  // --- its handler, if it has one, in a copy of the code -----------------------------------------------------------
  for (const bytecode::Handler& h : root.handlers) {
    if (h.start > at || at >= h.end) continue;
    const int base = bytecode::append(b.body, root);
    for (size_t i = static_cast<size_t>(base); i < b.body.instructions.size(); ++i) {
      Instruction& in = b.body.instructions[i];
      if (bytecode::uses_slot(in.opcode)) in.arg = slot(in.arg);
    }
    b.body.handlers.push_back({break_start, break_end, base + h.target, h.depth, h.lasti});
    break;
  }
  b.frame.stacksize += static_cast<int>(result.results.size()) + largest_call + deepest + 4;
  result.code = b.finish();
  CodeInfo* info = code_info(reinterpret_cast<PyCodeObject*>(result.code.get()));
  if (!info) throw py::PythonError{};
  info->internal = true;
  return result;
}

}  // namespace kiln::frame
