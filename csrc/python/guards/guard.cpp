#include "python/guards/guard.h"

#include "base/dtype.h"
#include "python/guards/text.h"

namespace kiln::guards {
namespace {

std::string list_text(const std::vector<int64_t>& values) {
  std::string s = "[";
  for (size_t i = 0; i < values.size(); ++i) s += (i ? ", " : "") + std::to_string(values[i]);
  return s + "]";
}

const char* device_text(graph::DeviceType t) {
  switch (t) {
    case graph::DeviceType::CPU:
      return "cpu";
    case graph::DeviceType::CUDA:
      return "cuda";
    case graph::DeviceType::Meta:
      return "meta";
    case graph::DeviceType::Other:
      return "other";
  }
  return "?";
}

std::string tensor_text(const graph::TensorMeta& m) {
  std::string s = std::string(dtype_name(m.dtype)) + list_text(m.sizes) + ", strides " + list_text(m.strides) + ", " +
                  device_text(m.device.type);
  if (m.device.index >= 0) s += ":" + std::to_string(m.device.index);
  return s + (m.requires_grad ? ", requires grad" : "");
}

/// getter(args) == value
std::string setting_text(PyObject* setting) {
  const auto text = [&](Py_ssize_t i) { return repr_of(PyTuple_GET_ITEM(setting, i), 200); };
  const py::Ref name = py::check(PyObject_GetAttrString(PyTuple_GET_ITEM(setting, 0), "__name__"));
  return PyUnicode_AsUTF8(name.get()) + text(1) + " == " + text(2);
}

}  // namespace

bool is_small_int(PyObject* o) {
  int overflow = 0;
  const int64_t v = PyLong_CheckExact(o) ? PyLong_AsLongLongAndOverflow(o, &overflow) : kSmallInt;
  return overflow == 0 && v < kSmallInt && v > -kSmallInt;
}

std::string Guard::text() const {
  const std::string s = source ? source->text() : "";
  const std::string o = other ? other->text() : "";
  const std::string v = object ? repr_of(object.get(), 200) : "";
  std::string t;
  switch (kind) {
    case Kind::Type:
      t = "type(" + s + ") is " + v;
      break;
    case Kind::ClassVersion:
      t = "class_unchanged(" + s + ")";
      break;
    case Kind::Is:
      t = s + " is " + v;
      break;
    case Kind::Equals:
      t = s + " == " + v;
      break;
    case Kind::SmallInt:
      t = "small_int(" + s + ")";
      break;
    case Kind::Contents:
      t = "contents(" + s + ") unchanged";
      break;
    case Kind::Length:
      t = "len(" + s + ") == " + std::to_string(number);
      break;
    case Kind::Keys:
      t = "tuple(" + s + ") == " + v;
      break;
    case Kind::DictHas:
      t = v + " in " + s;
      break;
    case Kind::DictLacks:
      t = (object ? v : o) + " not in " + s;
      break;
    case Kind::AttrLacks:
      t = "not hasattr(" + s + ", " + v + ")";
      break;
    case Kind::Tensor:
      t = "tensor(" + s + ": " + tensor_text(meta) + (is_leaf ? "" : ", not a leaf");
      for (size_t d = 0; d < meta.sizes.size(); ++d)
        if (any_dims >> d & 1) t += ", any size " + std::to_string(d);
      t += ")";
      break;
    case Kind::SameObject:
      t = s + " is " + o;
      break;
    case Kind::NotSame:
      t = s + " is not " + o;
      break;
    case Kind::Apart:
      t = "apart(" + s + ")";
      break;
    case Kind::NoHooks:
      t = "no_gradient_hooks(" + s + ")";
      break;
    case Kind::GlobalState:
      t = "global_state() == " + std::to_string(number);
      break;
    case Kind::Setting:
      t = setting_text(object.get());
      break;
  }
  if (where) t += "  # " + *where;
  return t;
}

}  // namespace kiln::guards
