#include "aten/convert.h"
#include "base/error.h"
#include "graph/graph.h"
#include "python/bindings/bindings.h"
#include "python/bindings/fx.h"

// Graph texts to and from fx, for tests and for whoever reads an IR dump in Python.
namespace kiln {
namespace {

namespace pb = pybind11;

template <class F>
auto python_errors(F&& f) {
  try {
    return f();
  } catch (const py::PythonError&) {
    throw pb::error_already_set();
  }
}

pb::object graph_to_fx(const std::string& text, const pb::list& targets) {
  const auto g = graph::parse(text);
  graph::verify(*g);
  std::vector<py::Ref> refs;
  for (pb::handle h : targets) refs.push_back(py::Ref::borrow(h.ptr()));
  return python_errors([&] {
    return pb::reinterpret_steal<pb::object>(
        (refs.empty() ? bindings::aten_to_fx(*g) : bindings::to_fx(*g, refs)).release());
  });
}

std::string fx_to_graph(const pb::object& gm, const std::vector<at::Tensor>& inputs) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& t : inputs) metas.push_back(aten::meta_of(t));
  return python_errors([&] {
    const auto g = bindings::from_fx(gm.ptr(), metas);
    graph::verify(*g);
    return graph::print(*g);
  });
}

}  // namespace
}  // namespace kiln

KILN_BINDINGS(fx) {
  m.def("_graph_to_fx", &kiln::graph_to_fx, pybind11::arg("text"), pybind11::arg("targets") = pybind11::list());
  m.def("_fx_to_graph", &kiln::fx_to_graph, pybind11::arg("gm"), pybind11::arg("inputs"));
}
