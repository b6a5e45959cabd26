#pragma once
#include <Python.h>

namespace kiln::capture {

/// What calling something means during a capture; see callables.def.
enum class Policy : unsigned char {
  Unknown,
  Interpret,
  Pure,
  Torch,
  TensorData,
  Paused,
  Global,
  Skip,
  SkipSelf,
  True,
  False,
  Iter,
  Next,
  Operator,
  Id,
  GetAttr,
  HasAttr,
  SetAttr,
  DelAttr,
  Vars,
  ObjectSetAttr,
  ObjectDelAttr,
  ObjectGetAttr,
  RequiresGrad,
  RunBackward,
  Polyfill,
  Break,
};

/// Of a builtin function or method, a descriptor or a slot wrapper; Unknown for what the table lacks.
Policy policy_of(PyObject* callable);
/// Of a Python function, by its code; Interpret for all that the table lacks.
Policy policy_of_code(PyCodeObject* code);
/// True for classes of C whose constructor only makes the object (int, list, range, exceptions, ...), and for Python
/// classes that derive from such.
bool constructs_purely(PyTypeObject* type);

}  // namespace kiln::capture
