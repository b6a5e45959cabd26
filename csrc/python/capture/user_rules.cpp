#include "python/capture/user_rules.h"

#include <unordered_map>

namespace kiln::capture {
namespace {

std::unordered_map<PyObject*, UserRule>& rules() {
  static std::unordered_map<PyObject*, UserRule> table;
  return table;
}

PyObject* key_of(PyObject* callable) {
  if (PyMethod_Check(callable)) callable = PyMethod_GET_FUNCTION(callable);
  return PyFunction_Check(callable) ? PyFunction_GET_CODE(callable) : callable;
}

}  // namespace

void set_user_rule(PyObject* callable, UserRule rule) {
  PyObject* key = key_of(callable);
  if (rules().insert_or_assign(key, rule).second) Py_INCREF(key);
}

UserRule user_rule(PyObject* callable) {
  if (rules().empty()) return UserRule::None;
  auto it = rules().find(key_of(callable));
  return it == rules().end() ? UserRule::None : it->second;
}

}  // namespace kiln::capture
