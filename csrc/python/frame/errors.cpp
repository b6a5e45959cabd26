#include "python/frame/errors.h"

#include <torch/csrc/Exceptions.h>

#include "base/error.h"
#include "python/pch.h"
#include "runtime/compiled_function.h"

namespace kiln::frame {
namespace {

void set_class(const char* name, const std::string& message) {
  py::Ref module = py::Ref::steal(py::import_module("kiln.exc"));
  py::Ref type = module ? py::Ref::steal(PyObject_GetAttrString(module.get(), name)) : py::Ref();
  if (type) PyErr_SetString(type.get(), message.c_str());
}

}  // namespace

void raise(const char* name, const std::string& message) {
  set_class(name, message);
  throw py::PythonError{};
}

void set_python_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const py::PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "kiln lost an exception");
  } catch (const UserError& e) {
    set_class("UserError", e.what());
  } catch (const Unsupported& e) {
    set_class("Unsupported", e.what());
  } catch (const InternalError& e) {
    set_class("InternalError", e.what());
  } catch (pybind11::error_already_set& e) {
    e.restore();
  } catch (const runtime::HookRaised& raised) {
    set_python_error(raised.error);
  } catch (...) {
    const auto translate = []() -> PyObject* {
      HANDLE_TH_ERRORS
      throw;
      END_HANDLE_TH_ERRORS
    };
    translate();
  }
}

}  // namespace kiln::frame
