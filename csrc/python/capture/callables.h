#pragma once
#include <Python.h>

#include <string>
#include <vector>

#include "python/cpython/ref.h"

namespace kiln::capture {

/// What calling something means during a capture; see callables.def and settings.def.
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
  IsCompiling,
  Iter,
  Next,
  Operator,
  Id,
  GetAttr,
  HasAttr,
  SetAttr,
  DelAttr,
  Vars,
  TypeSetAttr,
  ObjectSetAttr,
  ObjectDelAttr,
  ObjectGetAttr,
  RequiresGrad,
  RetainGrad,
  MakeParameter,
  RunBackward,
  CustomFunction,
  GradientHook,
  Branch,
  Checkpoint,
  DualLevel,
  InferenceMode,
  Number,
  Item,
  Polyfill,
  StandIn,
  OfConstants,
  Defer,
  Warn,
  Loads,
  ReadSetting,
  WriteSetting,
  Break,
};

/// Resolves the table's paths, once. Runs Python code, so it must be called before a capture begins.
void load_callables();
/// Gives kiln._sizes.Size its methods, once, so that the table finds them.
void load_sizes();
/// Paths of the table that name nothing in this Python and PyTorch.
const std::vector<std::string>& unresolved_callables();
/// What tells the setting that `setter` (WriteSetting) sets, borrowed.
PyObject* getter_of(PyObject* setter);
/// kiln._polyfills, borrowed.
PyObject* polyfills();
/// What it has in place of the function whose code this is. Throws py::PythonError if there is nothing.
py::Ref polyfill_of(PyCodeObject* code);
/// Of a builtin function or method, a descriptor or a slot wrapper; Unknown for what the table lacks.
Policy policy_of(PyObject* callable);
/// What a builtin function or method, or a slot, is bound to (of a function its module), borrowed; else null.
PyObject* self_of(PyObject* c_callable);
/// The name of a builtin function or method, a descriptor or a slot wrapper; "" of any other callable.
const char* name_of(PyObject* c_callable);
/// The classes of operator.itemgetter, attrgetter and methodcaller.
bool is_getter(PyTypeObject* t);
/// Of a Python function, by its code; Interpret for all that the table lacks.
Policy policy_of_code(PyCodeObject* code);
/// True for classes of C whose constructor only makes the object (int, list, range, exceptions, ...), and for Python
/// classes that derive from such.
bool constructs_purely(PyTypeObject* type);

/// The list that warnings are appended to now, inside catch_warnings(record=True) (borrowed); null where they are
/// shown.
PyObject* recorded_warnings();
/// Whether this is the dict of the module that says what happens to warnings.
bool says_of_warnings(PyObject* globals);

}  // namespace kiln::capture
