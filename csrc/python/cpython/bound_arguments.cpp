#include "python/cpython/bound_arguments.h"

namespace kiln::py {

BoundArguments::BoundArguments(PyCodeObject* code, PyObject* const* locals) {
  const int positional = code->co_argcount, named = positional + code->co_kwonlyargcount;
  PyObject* const* rest = locals + named;  // *args, **kwargs
  PyObject* more = code->co_flags & CO_VARARGS ? *rest++ : nullptr;
  const Py_ssize_t others = more ? PyTuple_GET_SIZE(more) : 0;
  args = check(PyTuple_New(positional + others));
  kwargs = check(code->co_flags & CO_VARKEYWORDS ? PyDict_Copy(*rest) : PyDict_New());
  for (int i = 0; i < positional; ++i) PyTuple_SET_ITEM(args.get(), i, Py_NewRef(locals[i]));
  for (Py_ssize_t i = 0; i < others; ++i)
    PyTuple_SET_ITEM(args.get(), positional + i, Py_NewRef(PyTuple_GET_ITEM(more, i)));
  for (int i = positional; i < named; ++i)
    if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(code->co_localsplusnames, i), locals[i]) < 0) throw PythonError{};
}

}  // namespace kiln::py
