#pragma once
#include <Python.h>

#include <cstdint>

namespace kiln::frame {

/// Finds out whether a module's call means nothing but its `forward`, and remembers what that rests on, so that a call
/// of a module without hooks costs a few compares. One per compiled module.
class ModuleCall {
 public:
  /// True if `function` is torch.nn.Module's own __call__ or _call_impl and `self` a module.
  static bool applies(PyFunctionObject* function, PyObject* self);
  /// The function that `function(self, ...)` would end in: the class's forward, if the module and the process have no
  /// hooks, nobody replaced forward or __call__ for this instance, and nothing is being traced. Null otherwise.
  /// Borrowed.
  PyFunctionObject* forward(PyFunctionObject* function, PyObject* self);

 private:
  bool refresh(PyFunctionObject* function, PyObject* self);

  PyTypeObject* type_ = nullptr;
  unsigned type_version_ = 0;
  PyObject* dict_ = nullptr;  // the instance's; compared, never read unless its stamp is right
  uint64_t dict_version_ = 0, globals_version_ = 0;
  PyObject* hooks_[8] = {};  // dicts that must be empty, kept alive by the two dicts above
  PyFunctionObject* forward_ = nullptr;
};

}  // namespace kiln::frame
