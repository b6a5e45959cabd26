// Options, logs and bisection counters.
#include "base/options.h"

#include "base/bisect.h"
#include "base/error.h"
#include "base/log.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace kiln::bindings {
namespace {

py::object to_python(const OptionValue& value) {
  return std::visit([](const auto& v) -> py::object { return py::cast(v); }, value);
}

/// bool before int: True is an int in Python too.
OptionValue from_python(const std::string& name, py::handle value) {
  if (PyBool_Check(value.ptr())) return value.cast<bool>();
  if (PyLong_Check(value.ptr())) return value.cast<int64_t>();
  if (PyUnicode_Check(value.ptr())) return value.cast<std::string>();
  throw UserError("option '" + name + "' takes a bool, an int or a str, not " + Py_TYPE(value.ptr())->tp_name);
}

}  // namespace

KILN_BINDINGS(options) {
  m.def("option_table", [] {
    py::list rows;
    for (const OptionInfo& o : option_table())
      rows.append(py::make_tuple(o.name, o.type, to_python(o.default_value), o.env, o.help));
    return rows;
  });
  m.def("get_option", [](const std::string& name) { return to_python(get_option(name)); });
  m.def("set_option", [](const std::string& name, py::handle value) { set_option(name, from_python(name, value)); });
  m.def("set_logs", [](const std::string& topics) { set_logs(topics); });
  m.def("log_topics", [] {
    py::list rows;
#define KILN_X(name, help) rows.append(py::make_tuple(#name, help));
    KILN_LOG_TOPICS(KILN_X)
#undef KILN_X
    return rows;
  });
  m.def("bisect_counts", [] {
    py::dict counts;
    counts["function"] = bisect_count(BisectUnit::Function);
    counts["graph"] = bisect_count(BisectUnit::Graph);
    counts["kernel"] = bisect_count(BisectUnit::Kernel);
    return counts;
  });
  m.def("reset_bisect", [] { reset_bisect(); });
}

}  // namespace kiln::bindings
