
#include "compiler/compile.h"
#include "decompose/decompose.h"
#include "python/bindings/bindings.h"

// Doors into the compiler below the joint graph, for tests: graph texts in, callables and texts out.
namespace kiln {
namespace {

class CompiledText {
 public:
  explicit CompiledText(std::shared_ptr<runtime::Artifact> artifact) : artifact_(std::move(artifact)) {}
  std::vector<std::optional<at::Tensor>> call(std::vector<at::Tensor> inputs) const {
    std::vector<at::Tensor> out;
    {
      pybind11::gil_scoped_release release;
      out = artifact_->run(std::move(inputs));
    }
    std::vector<std::optional<at::Tensor>> result;
    for (at::Tensor& t : out) result.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
    return result;
  }
  std::string describe() const { return artifact_->describe(); }

 private:
  std::shared_ptr<runtime::Artifact> artifact_;
};

}  // namespace
}  // namespace kiln

KILN_BINDINGS(debug_compile) {
  pybind11::class_<kiln::CompiledText>(m, "_CompiledText")
      .def("__call__",
           [](const kiln::CompiledText& c, std::vector<at::Tensor> inputs) { return c.call(std::move(inputs)); })
      .def("describe", &kiln::CompiledText::describe);
  m.def(
      "_compile_graph_text",
      [](const std::string& text, bool inference) {
        return kiln::CompiledText(kiln::compiler::compile_functional(*kiln::graph::parse(text), inference));
      },
      pybind11::arg("text"), pybind11::arg("inference") = false);
  m.def("_decompose_graph_text", [](const std::string& text) {
    const auto g = kiln::graph::parse(text);
    kiln::decompose::decompose(*g);
    return kiln::graph::print(*g);
  });
}
