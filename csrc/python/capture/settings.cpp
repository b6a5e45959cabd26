// Settings of PyTorch that a program reads and sets (settings.def).
#include "python/capture/callables.h"
#include "python/capture/machine.h"
#include "python/pch.h"

namespace kiln::capture {

Machine::Setting* Machine::find_setting(PyObject* getter, PyObject* const* args, size_t n) {
  py::Ref all = py::Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(n)));
  if (!all) return nullptr;
  for (size_t i = 0; i < n; ++i) PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), Py_NewRef(args[i]));
  for (Setting& s : settings)
    if (s.getter.get() == getter && PyObject_RichCompareBool(s.args.get(), all.get(), Py_EQ) == 1) return &s;
  py::Ref before = py::Ref::steal(PyObject_CallObject(getter, all.get()));
  const py::Ref fact = before ? py::Ref::steal(PyTuple_Pack(3, getter, all.get(), before.get())) : py::Ref();
  if (!fact) return nullptr;
  guard(Guard::Kind::Setting, nullptr, fact.get());
  settings.push_back({py::Ref::borrow(getter), std::move(all), std::move(before), {}});
  return &settings.back();
}

PyObject* Machine::call_setting(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames) {
  const bool writes = policy_of(callable) == Policy::WriteSetting;
  const auto is_plain = [this](PyObject* o) {
    if (!PyList_CheckExact(o) || find(o)) return is_constant(o);
    PyObject** const items = PySequence_Fast_ITEMS(o);
    return std::all_of(items, items + PyList_GET_SIZE(o), [this](PyObject* item) { return is_constant(item); });
  };
  if (kwnames || n < (writes ? 1 : 0) || !std::all_of(args, args + n, is_plain))
    return graph_break("call-that-breaks", std::string("a call of ") + name_of(callable));
  Setting* s = find_setting(writes ? getter_of(callable) : callable, args, writes ? n - 1 : n);
  if (s && writes) s->setter = py::Ref::borrow(callable);
  Paused paused_here(*this);  // some warn, in Python
  // Asked once more where it is only read: a list is the program's own.
  return after_c_call(s ? PyObject_Vectorcall(callable, args, n, nullptr) : nullptr);
}

void Machine::restore_settings() {
  PyObject *type, *value, *tb;
  PyErr_Fetch(&type, &value, &tb);
  for (auto s = settings.rbegin(); s != settings.rend(); ++s) {
    if (!s->setter) continue;
    // Called while other exceptions pass: none of its own.
    const py::Ref last = py::Ref::steal(PyTuple_Pack(1, s->before.get()));
    const py::Ref all = last ? py::Ref::steal(PySequence_Concat(s->args.get(), last.get())) : py::Ref();
    if (!all || !py::Ref::steal(PyObject_CallObject(s->setter.get(), all.get()))) PyErr_Clear();
  }
  PyErr_Restore(type, value, tb);
}

}  // namespace kiln::capture
