// Instructions on locals, cells, globals, constants and the value stack.
#include "python/capture/eval.h"
#include "python/pch.h"

namespace kiln::capture {

Flow op_nop(Exec&, int) { return Flow::Next; }

Flow op_resume(Exec&, int) { return Flow::Next; }

Flow op_pop_top(Exec& e, int) {
  if (e.root && !e.m.may_let_go(e.top(0))) return Flow::Error;
  Py_DECREF(e.pop());
  return Flow::Next;
}

Flow op_push_null(Exec& e, int) {
  e.push(nullptr);
  return Flow::Next;
}

Flow op_copy(Exec& e, int arg) {
  PyObject* o = e.top(arg - 1);
  Py_XINCREF(o);
  e.push(o);
  return Flow::Next;
}

Flow op_swap(Exec& e, int arg) {
  std::swap(e.top(0), e.top(arg - 1));
  return Flow::Next;
}

Flow op_load_const(Exec& e, int arg) {
  e.push(Py_NewRef(PyTuple_GET_ITEM(e.code->co_consts, arg)));
  return Flow::Next;
}

namespace {
Flow unbound_local(Exec& e, int arg) {
  PyErr_Format(PyExc_UnboundLocalError, "cannot access local variable '%s' where it is not associated with a value",
               py311::local_name(e.code, arg));
  return Flow::Error;
}

Flow unbound_cell(Exec& e, int arg) {
  if (PyErr_Occurred()) return Flow::Error;
  if (!(py311::local_kind(e.code, arg) & py311::KindFree)) return unbound_local(e, arg);
  PyErr_Format(PyExc_NameError,
               "cannot access free variable '%s' where it is not associated with a value in enclosing scope",
               py311::local_name(e.code, arg));
  return Flow::Error;
}
}  // namespace

Flow op_load_fast(Exec& e, int arg) {
  PyObject* o = e.local(arg);
  if (!o) return unbound_local(e, arg);
  if (e.m.may_stay_unread(o)) {
    const Loading loading(e);
    if (!e.m.observe(o)) return Flow::Error;
  }
  e.push(Py_NewRef(o));
  return Flow::Next;
}

Flow op_store_fast(Exec& e, int arg) {
  if (e.root && !e.m.may_let_go(e.local(arg))) return Flow::Error;
  PyObject* old = std::exchange(e.local(arg), e.pop());
  Py_XDECREF(old);
  return Flow::Next;
}

Flow op_delete_fast(Exec& e, int arg) {
  if (!e.local(arg)) return unbound_local(e, arg);
  // The prologue of a resume function only moves what its arguments have to the stack.
  const bool moved = *py311::local_name(e.code, arg) == '.';
  if (e.root && !moved && !e.m.may_let_go(e.local(arg))) return Flow::Error;
  Py_CLEAR(e.local(arg));
  return Flow::Next;
}

Flow op_load_global(Exec& e, int arg) {
  const Loading loading(e);
  PyObject* v = e.m.load_global(e.frame->f_globals, e.frame->f_builtins, e.name(arg >> 1));
  if (!v) return Flow::Error;
  if (arg & 1) e.push(nullptr);
  return e.push_seen(v);
}

Flow op_store_global(Exec& e, int arg) {
  py::Ref v = py::Ref::steal(e.pop());
  return e.m.store_global(e.frame->f_globals, e.name(arg), v.get()) ? Flow::Next : Flow::Error;
}

Flow op_delete_global(Exec& e, int arg) {
  return e.m.store_global(e.frame->f_globals, e.name(arg), nullptr) ? Flow::Next : Flow::Error;
}

// Class bodies and module code: their namespace was made during the trace.
Flow op_load_name(Exec& e, int arg) {
  PyObject* name = e.name(arg);
  PyObject* locals = e.frame->f_locals;
  if (!locals) {
    PyErr_Format(PyExc_SystemError, "no locals when loading %R", name);
    return Flow::Error;
  }
  PyObject* v = PyObject_GetItem(locals, name);
  if (!v) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return Flow::Error;
    PyErr_Clear();
    v = e.m.load_global(e.frame->f_globals, e.frame->f_builtins, name);
  }
  return e.push_seen(v);
}

Flow op_store_name(Exec& e, int arg) {
  py::Ref v = py::Ref::steal(e.pop());
  if (!e.frame->f_locals) {
    PyErr_Format(PyExc_SystemError, "no locals found when storing %R", e.name(arg));
    return Flow::Error;
  }
  return PyObject_SetItem(e.frame->f_locals, e.name(arg), v.get()) < 0 ? Flow::Error : Flow::Next;
}

Flow op_delete_name(Exec& e, int arg) {
  if (PyObject_DelItem(e.frame->f_locals, e.name(arg)) == 0) return Flow::Next;
  PyErr_Format(PyExc_NameError, "name '%U' is not defined", e.name(arg));
  return Flow::Error;
}

Flow op_make_cell(Exec& e, int arg) {
  PyObject* initial = e.local(arg);
  PyObject* cell = PyCell_New(initial);
  if (!cell) return Flow::Error;
  Py_XDECREF(initial);
  e.local(arg) = cell;
  e.m.made_cells.insert(cell);
  e.m.alive.push_back(py::Ref::borrow(cell));
  return Flow::Next;
}

Flow op_copy_free_vars(Exec& e, int arg) {
  PyObject* closure = e.frame->f_func->func_closure;
  const int offset = e.code->co_nlocalsplus - arg;
  auto* function = reinterpret_cast<PyObject*>(e.frame->f_func);
  const bool made = !e.root && e.m.is_made_function(function);
  SourcePtr closure_source;
  for (int i = 0; i < arg; ++i) {
    PyObject* cell = PyTuple_GET_ITEM(closure, i);
    e.local(offset + i) = Py_NewRef(cell);
    if (made || e.m.made_cells.count(cell)) continue;
    const SourcePtr known = e.m.source_of_contents(cell);
    SourcePtr contents;
    if (e.root) {
      contents = guards::cell(offset + i, py311::local_name(e.code, offset + i));
    } else {
      using K = guards::Source::Kind;
      if (!closure_source) closure_source = e.m.child(K::Attr, e.m.source_of_object(function), names().closure);
      contents = e.m.child(K::CellContents, e.m.child(K::ListItem, closure_source, nullptr, i), nullptr);
    }
    if (!known) {
      e.m.cell_source.emplace(cell, contents);
      e.m.alive.push_back(py::Ref::borrow(cell));
    } else if (known != contents) {
      e.m.guard(guards::Guard::Kind::SameObject, e.m.cell_itself(contents), nullptr, 0, e.m.cell_itself(known));
    }
  }
  return Flow::Next;
}

Flow op_load_closure(Exec& e, int arg) {
  PyObject* cell = e.local(arg);
  if (!cell) return unbound_local(e, arg);
  e.push(Py_NewRef(cell));
  return Flow::Next;
}

Flow op_load_deref(Exec& e, int arg) {
  const Loading loading(e);
  PyObject* v = e.m.load_cell(e.local(arg), nullptr);
  if (!v) return unbound_cell(e, arg);
  return e.push_seen(v);
}

Flow op_load_classderef(Exec& e, int arg) {
  PyObject* name = PyTuple_GET_ITEM(e.code->co_localsplusnames, arg);
  PyObject* v = PyObject_GetItem(e.frame->f_locals, name);
  if (v) return e.push_seen(v);
  if (!PyErr_ExceptionMatches(PyExc_KeyError)) return Flow::Error;
  PyErr_Clear();
  return op_load_deref(e, arg);
}

Flow op_store_deref(Exec& e, int arg) {
  py::Ref v = py::Ref::steal(e.pop());
  return e.m.store_cell(e.local(arg), v.get()) ? Flow::Next : Flow::Error;
}

Flow op_delete_deref(Exec& e, int arg) {
  py::Ref old = py::Ref::steal(e.m.load_cell(e.local(arg), nullptr));
  if (!old) return unbound_cell(e, arg);
  return e.m.store_cell(e.local(arg), nullptr) ? Flow::Next : Flow::Error;
}

Flow op_load_attr(Exec& e, int arg) {
  const Loading loading(e);
  return e.replace_top(e.m.load_attr(e.top(), e.name(arg)));
}

Flow op_store_attr(Exec& e, int arg) {
  const bool ok = e.m.store_attr(e.top(0), e.name(arg), e.top(1));
  if (!ok) return Flow::Error;
  e.drop(2);
  return Flow::Next;
}

Flow op_delete_attr(Exec& e, int arg) {
  if (!e.m.store_attr(e.top(0), e.name(arg), nullptr)) return Flow::Error;
  e.drop(1);
  return Flow::Next;
}

Flow op_load_method(Exec& e, int arg) {
  PyObject* self = e.top();
  PyObject* method = nullptr;
  const int unbound = e.m.load_method(self, e.name(arg), &method);
  if (unbound < 0) return Flow::Error;
  if (unbound) {
    e.top() = method;
    e.push(self);
  } else {
    e.top() = nullptr;
    e.push(method);
    Py_DECREF(self);
  }
  return e.m.observe(method) ? Flow::Next : Flow::Error;
}

}  // namespace kiln::capture
