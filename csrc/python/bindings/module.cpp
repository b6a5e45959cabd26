#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/cpython/ref.h"

namespace kiln::bindings {
namespace {

std::vector<Init>& inits() {
  static std::vector<Init> list;
  return list;
}

/// Raises kiln.exc.<name> with the message of `e`.
void raise_as(const char* name, const std::exception& e) {
  PyObject* module = kiln::py::import_module("kiln.exc");
  PyObject* type = module ? PyObject_GetAttrString(module, name) : nullptr;
  if (type) PyErr_SetString(type, e.what());
  Py_XDECREF(type);
  Py_XDECREF(module);
}

}  // namespace

bool add_bindings(Init init) {
  inits().push_back(init);
  return true;
}

}  // namespace kiln::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "kiln's C++ core.";
  pybind11::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const kiln::UserError& e) {
      kiln::bindings::raise_as("UserError", e);
    } catch (const kiln::Unsupported& e) {
      kiln::bindings::raise_as("Unsupported", e);
    } catch (const kiln::InternalError& e) {
      kiln::bindings::raise_as("InternalError", e);
    }
  });
  for (kiln::bindings::Init init : kiln::bindings::inits()) init(m);
}
