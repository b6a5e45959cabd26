#pragma once
#include <Python.h>

#include <string>
#include <vector>

#include "python/cpython/ref.h"

// CPython 3.11 bytecode as a list of instructions that can be edited and put together again.
namespace kiln::frame::bytecode {

struct Location {
  int line = -1, end_line = -1, column = -1, end_column = -1;  // -1: not known
  bool operator==(const Location&) const = default;
};

/// One instruction without its EXTENDED_ARGs and caches. A jump names its target by index; `arg` is then computed.
struct Instruction {
  int opcode = 0;
  int arg = 0;
  int target = -1;  // index of the instruction jumped to
  Location location;
  int offset = -1;  // where it stood in the code it was decoded from, in code units; -1: new
};

/// An entry of the exception table: instructions [start, end) are covered by the handler at `target`.
struct Handler {
  int start = 0, end = 0, target = 0, depth = 0;
  bool lasti = false;
};

struct Body {
  std::vector<Instruction> instructions;
  std::vector<Handler> handlers;  // disjoint
};

/// Everything of a code object but its body. `varnames` starts with the arguments, which are all positional.
struct Frame {
  int argcount = 0;
  int flags = 0;
  int stacksize = 0;
  int firstline = 0;
  py::Ref consts, names;                              // tuples
  std::vector<py::Ref> varnames, cellvars, freevars;  // a cell that is also in varnames shares its slot
  py::Ref filename, name, qualname;
};

/// Throws InternalError for bytes that are no 3.11 code.
Body decode(PyCodeObject* code);
/// Index of the instruction at `offset` (code units; its EXTENDED_ARGs and caches belong to it), -1 if none.
int index_at(const Body& body, int offset);
/// A new code object; `offsets`, if given, receives each instruction's offset in code units. Throws py::PythonError.
py::Ref assemble(const Body& body, const Frame& frame, std::vector<int>* offsets = nullptr);

/// Appends `part` to `body`, with indices moved; returns the index of its first instruction.
int append(Body& body, const Body& part);

using py311::ends_block;
using py311::is_backward_jump;
using py311::is_jump;
/// The same conditional or unconditional jump in the forward direction.
int forward_jump(int opcode);
/// arg is a slot of localsplus.
bool uses_slot(int opcode);
/// Change of the stack's depth. `jump`: along the jump edge.
int stack_effect(const Instruction& i, bool jump);

/// Per instruction, the local slots whose values may still be read from there on.
std::vector<std::vector<bool>> live_slots(const Body& body, int num_slots);
/// Per instruction, how many exceptions are being handled there (PUSH_EXC_INFO without POP_EXCEPT); -1: unreachable.
std::vector<int> handled_exceptions(const Body& body);

/// `dis` of the code as text.
std::string disassemble(PyObject* code);

}  // namespace kiln::frame::bytecode
