#include "python/capture/polyfills.h"

#include <algorithm>
#include <string>

#include "python/capture/callables.h"

namespace kiln::capture {

PolyfillCall::PolyfillCall(py311::Frame* frame) {
  PyCodeObject* code = frame->f_code;
  std::string name = PyUnicode_AsUTF8(code->co_qualname);
  std::replace(name.begin(), name.end(), '.', '_');
  function = py::check(PyObject_GetAttrString(polyfills(), name.c_str()));
  const int positional = code->co_argcount, keywords = code->co_kwonlyargcount;
  PyObject** rest = frame->localsplus + positional + keywords;  // *args, **kwargs
  PyObject* more = code->co_flags & CO_VARARGS ? *rest++ : nullptr;
  const Py_ssize_t others = more ? PyTuple_GET_SIZE(more) : 0;
  args = py::check(PyTuple_New(positional + others));
  kwargs = py::check(code->co_flags & CO_VARKEYWORDS ? PyDict_Copy(*rest) : PyDict_New());
  for (int i = 0; i < positional; ++i) PyTuple_SET_ITEM(args.get(), i, Py_NewRef(frame->localsplus[i]));
  for (Py_ssize_t i = 0; i < others; ++i)
    PyTuple_SET_ITEM(args.get(), positional + i, Py_NewRef(PyTuple_GET_ITEM(more, i)));
  for (int i = positional; i < positional + keywords; ++i)
    if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(code->co_localsplusnames, i), frame->localsplus[i]) < 0)
      throw py::PythonError{};
}

}  // namespace kiln::capture
