#pragma once
#include <Python.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "python/cpython/ref.h"

// Branches on the values of tensors that always went one way. Where such a branch breaks the graph, the frame goes on
// in one of two resume functions, which tells the way. After some calls of one way the code is captured again with it,
// as an assertion (capture::CaptureOptions::expected_jump): a call for which it is another runs in eager.
namespace kiln::frame {

/// A jump instruction: its code object, never a resume function's, and its place in code units.
struct JumpSite {
  PyCodeObject* code = nullptr;
  int at = -1;
  py::Ref held;  // the code, unless it is that of the entry which has this
  explicit operator bool() const { return code != nullptr; }
};
/// What was seen of a jump.
struct JumpHistory {
  bool jumped = false;  // the last time
  int64_t call = -1;    // of the program's outermost compiled function, the last time
  int64_t calls = 0;    // up to that one, in a row, in which it went no other way
  bool both = false;    // it went the other way before
  bool varies = false;  // nothing is expected of it any more
};

/// The site of the instruction at `at` of `code`, which may be a resume function's, for an entry of the code `owner`.
JumpSite jump_site(PyCodeObject* code, int at, PyCodeObject* owner);
/// Whether the instruction jumps, if it did so, or did not, for long; else none.
std::optional<bool> expected_jump(PyCodeObject* code, int at);
/// In this call of the outermost compiled function the code goes on, behind the jump, in the resume function with this
/// code.
void note_jump(const JumpSite& site, PyCodeObject* resumed, int64_t call);
/// One of these went another way again and again.
void note_varying(const std::vector<JumpSite>& sites);

}  // namespace kiln::frame
