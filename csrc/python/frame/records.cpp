#include "python/frame/records.h"

namespace kiln::frame {
namespace {
bool on = false;
std::vector<Record>& records() {
  static std::vector<Record> list;
  return list;
}

std::string text_of(PyObject* o, const char* attribute) {
  const py::Ref value = py::Ref::steal(PyObject_GetAttrString(o, attribute));
  const char* text = value && PyUnicode_Check(value.get()) ? PyUnicode_AsUTF8(value.get()) : nullptr;
  PyErr_Clear();
  return text ? text : "";
}

/// Empty for an object without a name.
std::string dotted_name(PyObject* target) {
  const std::string name = text_of(target, "__name__");
  if (name.empty() || name == "<lambda>") return "";
  std::string module = text_of(target, "__module__");
  if (module == "_operator") module = "operator";
  if (module.starts_with("torch._ops.")) module.erase(sizeof("torch.") - 1, 1);  // torch.ops.aten
  if (Py_IS_TYPE(target, &PyMethodDescr_Type)) module = "torch.Tensor";
  // Functions that the type torch._C._VariableFunctions holds.
  if (module.empty() && PyCFunction_Check(target)) module = "torch";
  return module.empty() ? "" : module + "." + name;
}
}  // namespace

std::shared_ptr<graph::Graph> with_names(const graph::Graph& torch_level, const std::vector<py::Ref>& targets) {
  std::shared_ptr<graph::Graph> copy = torch_level.clone();
  for (const auto& n : copy->nodes()) {
    const auto index = n->kind == graph::NodeKind::Call ? capture::target_index(n->op.name()) : std::nullopt;
    if (!index) continue;
    const std::string name = dotted_name(targets.at(*index).get());
    if (!name.empty()) n->op = graph::Op(name);
  }
  return copy;
}

bool recording() { return on; }
void set_recording(bool value) { on = value; }
void add_record(Record record) { records().push_back(std::move(record)); }
std::vector<Record> take_records() { return std::exchange(records(), {}); }

}  // namespace kiln::frame
