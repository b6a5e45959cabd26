// What users tell capture about single functions.
#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/capture/user_rules.h"

namespace kiln::bindings {
namespace {

void set_rule(const pybind11::object& callable, capture::UserRule rule) {
  capture::set_user_rule(callable.ptr(), rule);
}

}  // namespace

KILN_BINDINGS(control) {
  // A C function that capture does not know: a graph break by itself.
  m.def("graph_break", [] {}, "Ends the graph here when captured; does nothing otherwise.");
  m.def("_with_class", [](const pybind11::object& tensor, const pybind11::type& cls) {
    tensor.attr("__class__") = cls;
    return tensor;
  });
  m.def("_checkpoint", [](const std::string&, const pybind11::args&) {
    throw UserError("a step of a captured checkpoint outside of a capture");
  });
  m.def("_branch", [](const std::string&, const pybind11::args&) { return false; });
  m.def("_dual_level", [](const pybind11::args&) { return 0; });
  m.def("_inference_mode", [](bool) { return false; });
  m.def("_custom_function", [](const std::string&, const pybind11::args&) {
    throw UserError("a step of a captured torch.autograd.Function outside of a capture");
  });
  m.def("_gradient_hook", [](const std::string& step, const pybind11::args&) {
    // A hook is gone when the captured code that registered it ends.
    if (step != "remove") throw UserError("a captured hook outside of a capture");
  });
  m.def("_number", [](const std::string& what, const pybind11::args&) {
    if (what != "is" && what != "masked") throw UserError("a number of a graph outside of a capture");
    return false;
  });
  m.def("allow_in_graph", [](const pybind11::object& f) { set_rule(f, capture::UserRule::AllowInGraph); });
  m.def("disallow_in_graph", [](const pybind11::object& f) { set_rule(f, capture::UserRule::Disallow); });
  m.def("assume_constant_result", [](const pybind11::object& f) { set_rule(f, capture::UserRule::ConstantResult); });
}

}  // namespace kiln::bindings
