#include "python/frame/skip.h"

#include <string>
#include <string_view>
#include <vector>

#include "python/capture/callables.h"
#include "python/cpython/py311.h"
#include "python/cpython/tensor.h"
#include "python/frame/cache.h"
#include "python/frame/turn.h"
#include "python/pch.h"

namespace kiln::frame {
namespace {

/// Packages below site-packages whose frames never hold a user's tensor program.
constexpr std::string_view skipped_packages[] = {"numpy",  "scipy",     "sklearn", "pandas",  "matplotlib", "PIL",
                                                 "pytest", "_pytest",   "pluggy",  "rich",    "typer",      "jinja2",
                                                 "tqdm",   "packaging", "sympy",   "networkx"};
/// Parts of PyTorch that are written like users' programs.
constexpr std::string_view torch_kept[] = {"nn/", "optim/", "distributions/", "ao/nn/"};

std::string folder_of_module(const char* name) {
  py::Ref module = py::Ref::steal(py::import_module(name));
  py::Ref file = module ? py::Ref::steal(PyObject_GetAttrString(module.get(), "__file__")) : py::Ref();
  const char* path = file ? PyUnicode_AsUTF8(file.get()) : nullptr;
  std::string folder = path ? path : "";
  PyErr_Clear();
  return folder.substr(0, folder.rfind('/') + 1);
}

struct Folders {
  std::string library = folder_of_module("os"), torch = folder_of_module("torch"), kiln = folder_of_module("kiln");
  std::string site = torch.substr(0, torch.size() - std::string_view("torch/").size());
};

const Folders* folders = nullptr;
PyTypeObject* module_type = nullptr;

bool holds_tensor(PyObject* o, int depth) {
  if (!o) return false;
  if (py::is_tensor(o)) return true;
  if (module_type && PyType_IsSubtype(Py_TYPE(o), module_type)) return true;
  if (depth == 0) return false;
  if (PyCell_Check(o)) return holds_tensor(PyCell_GET(o), depth);
  if (PyTuple_Check(o) || PyList_Check(o)) {
    const Py_ssize_t n = std::min<Py_ssize_t>(Py_SIZE(o), 16);
    for (Py_ssize_t i = 0; i < n; ++i)
      if (holds_tensor(PyTuple_Check(o) ? PyTuple_GET_ITEM(o, i) : PyList_GET_ITEM(o, i), depth - 1)) return true;
  } else if (PyDict_Check(o)) {
    Py_ssize_t at = 0;
    PyObject *k, *v;
    for (int i = 0; i < 16 && PyDict_Next(o, &at, &k, &v); ++i)
      if (holds_tensor(v, depth - 1)) return true;
  }
  return false;
}

bool names_torch(PyCodeObject* code, PyObject* globals) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_names); ++i) {
    PyObject* value = PyDict_GetItemWithError(globals, PyTuple_GET_ITEM(code->co_names, i));
    if (!value) {
      PyErr_Clear();
      continue;
    }
    if (!PyModule_Check(value)) continue;
    const char* name = PyModule_GetName(value);
    if (!name)
      PyErr_Clear();
    else if (std::string_view(name).starts_with("torch"))
      return true;
  }
  return false;
}

/// Frames of torch.compile: it has an evaluator of its own, and what it runs is its. So is what PyTorch keeps from it.
bool of_other_compiler(PyCodeObject* code) {
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) PyErr_Clear();
  return file &&
         (std::string_view(file).starts_with(folders->torch + "_dynamo/") || file == folders->torch + "_compile.py");
}

}  // namespace

void init_skip() {
  if (folders) return;
  // What loads runs Python code, so another thread may come here meanwhile: it has to wait without the GIL, and not for
  // the guard of a static variable.
  const CompileTurn turn;
  if (folders) return;
  capture::load_callables();
  py::Ref nn = py::Ref::steal(py::import_module("torch.nn"));
  py::Ref type = nn ? py::Ref::steal(PyObject_GetAttrString(nn.get(), "Module")) : py::Ref();
  PyErr_Clear();
  module_type = reinterpret_cast<PyTypeObject*>(type.release());
  folders = new Folders();
}

PyTypeObject* nn_module_type() { return module_type; }

bool skipped_file(PyCodeObject* code) {
  const char* utf8 = PyUnicode_AsUTF8(code->co_filename);
  if (!utf8) {
    PyErr_Clear();
    return true;
  }
  const std::string_view file = utf8;
  if (file.starts_with("<frozen")) return true;
  const auto below = [&](const std::string& folder) { return !folder.empty() && file.starts_with(folder); };
  if (below(folders->kiln)) return true;
  if (below(folders->torch)) {
    const std::string_view rest = file.substr(folders->torch.size());
    // Bookkeeping that all modules share: below a break, each forward is compiled by itself.
    if (rest == "nn/modules/module.py" || rest == "nn/parameter.py") return true;
    for (std::string_view kept : torch_kept)
      if (rest.starts_with(kept)) return false;
    return true;
  }
  if (below(folders->site)) {
    const std::string_view rest = file.substr(folders->site.size());
    for (std::string_view p : skipped_packages)
      if (rest.starts_with(p) && rest.substr(p.size()).starts_with("/")) return true;
    return false;
  }
  return below(folders->library) && file.find("/site-packages/") == std::string_view::npos;
}

/// A __torch_function__ is called with one function after another: it would be compiled for each.
bool dispatches(PyCodeObject* code) {
  return PyUnicode_CompareWithASCIIString(code->co_name, "__torch_function__") == 0;
}

CodeInfo::Skip how_skipped(PyCodeObject* code) {
  const CodeInfo* info = find_code_info(code);
  return info ? info->skip : CodeInfo::Skip::Unknown;
}

bool should_skip(_PyInterpreterFrame* frame) {
  PyCodeObject* code = frame->f_code;
  CodeInfo* info = code_info(code);
  if (!info || info->internal) return true;
  using Skip = CodeInfo::Skip;
  if (info->skip == Skip::Unknown)
    info->skip = of_other_compiler(code)                                     ? Skip::Below
                 : capture::policy_of_code(code) == capture::Policy::StandIn ? Skip::Replaced
                 : skipped_file(code) || dispatches(code)                    ? Skip::Yes
                                                                             : Skip::No;
  if (info->skip != Skip::No) return true;
  if (info->resume) return false;
  const int slots = code->co_nlocalsplus - code->co_nfreevars;
  for (int i = 0; i < slots; ++i)
    if (holds_tensor(frame->localsplus[i], 2)) return false;
  if (PyObject* closure = frame->f_func->func_closure)
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i)
      if (holds_tensor(PyTuple_GET_ITEM(closure, i), 2)) return false;
  return !names_torch(code, frame->f_globals);
}

}  // namespace kiln::frame
