#pragma once
#include "python/capture/machine.h"

// The evaluator's inner interface: one running frame, and the handlers of instructions (opcodes.def) that work on it.
namespace kiln::capture {

enum class Flow : uint8_t {
  Next,   // go on at Exec::next
  Error,  // a Python exception is set
  Leave,  // the frame is left with Exec::result (may be null with done set, for a root that breaks)
};

struct Exec {
  Machine& m;
  PyThreadState* ts;
  py311::Frame* frame;
  PyCodeObject* code;
  const uint8_t* units;  // plain code: opcode, argument pairs
  PyObject** sp;         // first free stack slot
  PyObject* kwnames = nullptr;
  PyObject* result = nullptr;
  int at = 0;    // instruction being run (its EXTENDED_ARG prefix, if any)
  int next = 0;  // instruction to run next
  bool root = false;
  bool pushed = false;  // what is observed is what the instruction put on top of the stack

  void push(PyObject* o) { *sp++ = o; }
  PyObject* pop() { return *--sp; }
  PyObject*& top(int i = 0) { return sp[-1 - i]; }
  PyObject*& local(int i) { return frame->localsplus[i]; }
  PyObject* name(int i) const { return PyTuple_GET_ITEM(code->co_names, i); }
  void drop(int n) {
    while (n-- > 0) Py_DECREF(pop());
  }
  /// Pushes a new reference after observing it; null is an error.
  Flow push_seen(PyObject* o) {
    if (!o) return Flow::Error;
    push(o);
    return observe_top();
  }
  /// Replaces the top by a new reference (or fails, leaving the stack for the unwinder).
  Flow replace_top(PyObject* o) {
    if (!o) return Flow::Error;
    Py_SETREF(sp[-1], o);
    return observe_top();
  }

 private:
  Flow observe_top() {
    pushed = true;
    const bool seen = m.observe(top());
    pushed = false;
    return seen ? Flow::Next : Flow::Error;
  }
};

/// While an instruction loads something, activate() asks what it is loaded for.
class Loading {
 public:
  explicit Loading(Exec& e) : loading_(e.m.loading), before_(std::exchange(e.m.loading, &e)) {}
  ~Loading() { loading_ = before_; }
  Loading(const Loading&) = delete;

 private:
  const Exec*& loading_;
  const Exec* const before_;
};

/// What a frame does with the object that its current instruction puts on top of the stack, or has put there
/// (Exec::pushed), as far as the straight line of instructions that follow tells.
enum class Use : uint8_t {
  Other,
  Append,  // loads its method `append`, and calls it
  LookUp,  // asks for an item by a key, whether there is one, or sets it: o[key], key in o, o.get(key), o[key] = x
  Length,  // asks how many items it has: len(o)
  Keep,    // puts it into a local variable, of its own or of a function that it calls
};
Use use_of_top(const Exec& e);
/// Whether the current instruction loads the attribute `name`, and what follows asks whether it is None, and drops it.
bool loads_to_ask_for_none(const Exec& e, PyObject* name);

using Handler = Flow (*)(Exec& e, int arg);

#define KILN_OPCODE(name, handler) Flow handler(Exec& e, int arg);
#include "python/capture/opcodes.def"
#undef KILN_OPCODE

/// Truth of `o` for a branch: 1, 0, or -1 with an error set (a graph break for tensors).
int truth(Exec& e, PyObject* o);
/// Of a branch that jumps from instruction `next` by `offset` if its condition is `if_true`: the truth that goes on
/// where the other side does nothing but raise an exception. None if that is not so.
std::optional<bool> truth_that_goes_on(PyCodeObject* code, int next, int offset, bool if_true);
/// A binary or comparison operator's torch-level call if a fake is involved, `f` itself otherwise.
PyObject* operate(Machine& m, const char* op, PyObject* const* args, size_t n, PyObject* (*f)(PyObject* const*));
/// The Python operator object of a name ("add", "iadd", "getitem").
PyObject* operator_object(const char* name);

/// Whether a function of the module operator changes its first operand, if that can change.
bool changes_operand(std::string_view name);

}  // namespace kiln::capture
