#pragma once
#include <Python.h>

#include "python/frame/mode.h"

namespace kiln::frame {

/// The type of what kiln.compile returns for functions and methods: kiln._C.CompiledCallable. Calling one binds the
/// arguments, looks for an entry whose guards hold and runs it without a Python frame; a call that fits none is
/// captured.
PyTypeObject* compiled_type();
/// A callable that compiles `target`, a Python function or a bound method of one. Attributes as functools.wraps keeps
/// them. Throws UserError for anything else, py::PythonError.
py::Ref make_compiled(PyObject* target, ConfigPtr config);

/// What such a callable compiles, if a capture under `config` may run it in place of the callable: it asks for no
/// backend or options of its own, or for the same. Borrowed; null otherwise, and for other objects.
PyObject* original_of(PyObject* callable, const Config& config);

/// What `make_disabled` and `make_run` return: kiln._C.ModeCallable. They call `target` with nothing compiled
/// (recursive: in all that it calls; else only its own frame), or with only what is compiled already.
PyTypeObject* mode_type();
py::Ref make_disabled(PyObject* target, bool recursive);
py::Ref make_run(PyObject* target);

}  // namespace kiln::frame
