#pragma once
#include <Python.h>

#include <cstdint>

namespace kiln::capture {

/// What the user asked capture to do at calls of a function.
enum class UserRule : uint8_t {
  None,
  AllowInGraph,    // one opaque node of the torch-level graph
  Disallow,        // a graph break
  ConstantResult,  // called for real while capturing; its result is a constant
};

/// Sets the rule for a callable; a Python function is known by its code object, so that closures made from one code
/// share the rule. The key is held for good. GIL.
void set_user_rule(PyObject* callable, UserRule rule);
/// The rule for a callable, or None. Cheap while no rule was ever set. GIL.
UserRule user_rule(PyObject* callable);

}  // namespace kiln::capture
