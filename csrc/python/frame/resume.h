#pragma once
#include <Python.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "python/capture/recipe.h"
#include "python/frame/cache.h"

namespace kiln::frame {

/// This call of the program ends where no graph can; another call may take another way.
class UnsupportedHere : public Unsupported {
 public:
  using Unsupported::Unsupported;
};

/// Where a resume function goes on. Its code's slots are those of the original code that are not free variables, then
/// the value stack, then the free variables; all but the last are its arguments.
struct ResumePoint {
  py::Ref original;   // code object; never itself a resume function
  std::string label;  // in logs; the code has the original's name, which tracebacks show
  int offset = 0;     // in the original, in code units
  int num_slots = 0;  // the original's slots without free variables
  /// For each instruction of the resume code, in order: its offset, and the offset in the original it is a copy of, or
  /// -1.
  std::vector<std::pair<int, int>> copies;
};

/// How a frame goes on after a graph break: code that runs the breaking instruction and then asks for a resume
/// function.
struct Continuation {
  /// Code object: the original's arguments, all positional, then the tuple of `results`.
  py::Ref code;
  /// What that tuple holds: locals and stack that differ from the arguments.
  std::vector<capture::RecipePtr> results;
  /// Code objects of the resume functions that it may ask for.
  std::vector<py::Ref> resume_codes;
};

/// Builds the continuation for a break in frames of `code`: it restores locals and stack, runs the breaking instruction
/// under the handlers of its try and with blocks, and at each instruction that may follow returns a ResumeCall (see
/// take_resume_call). If the instruction raises and the code has a handler, that runs in eager, in a copy of the code.
/// Throws Unsupported where a frame cannot be left and entered again: generators, and inside except blocks.
Continuation make_continuation(PyCodeObject* code, const capture::Exit& exit);

/// Number of argument slots: positional, keyword-only, *args and **kwargs.
int num_arguments(PyCodeObject* code);

/// A continuation that wants to go on in a resume function returns one of these instead of calling it, so that a loop
/// with a break in it does not nest deeper at each turn.
struct ResumeCall {
  py::Ref code;
  std::vector<py::Ref> args;
};
/// True and the call if `result` is a ResumeCall.
bool take_resume_call(PyObject* result, ResumeCall* call);

}  // namespace kiln::frame
