
#include "aten/convert.h"
#include "codegen/cpp/emit.h"
#include "codegen/triton/emit.h"
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

/// Memory of a plan's buffers: the given tensors', and of what the scheduler adds.
class BufferMemory {
 public:
  BufferMemory(const std::vector<loops::Buffer>& buffers, const std::vector<at::Tensor>& tensors) {
    if (tensors.size() > buffers.size()) throw UserError("more tensors than buffers");
    for (size_t b = 0; b < buffers.size(); ++b) {
      const at::ScalarType type = aten::scalar_type_of(buffers[b].dtype);
      tensors_.push_back(b < tensors.size() ? tensors[b] : at::zeros({buffers[b].numel}, type));
      const at::Tensor& t = tensors_.back();
      if (t.scalar_type() != type || t.numel() != buffers[b].numel || !t.is_contiguous())
        throw UserError("the tensor of " + buffers[b].name + " has another dtype or size");
      pointers.push_back(t.data_ptr());
    }
  }
  std::vector<void*> pointers;

 private:
  std::vector<at::Tensor> tensors_;
};

void run_plan(const schedule::Plan& plan, const std::vector<codegen::CompiledKernel>& kernels, BufferMemory& memory) {
  for (const schedule::Step& step : plan.steps) {
    std::vector<void*> pointers;
    for (const schedule::KernelArg& a : plan.kernels.at(step.index).args) {
      if (a.place >= 0) memory.pointers.at(a.buffer) = memory.pointers.at(a.place);
      pointers.push_back(memory.pointers.at(a.buffer));
    }
    codegen::run_serial(kernels.at(step.index), pointers.data());
  }
}

/// Runs a program of loops on the tensors of its buffers, which it changes, as `how` says: by the interpreter of the
/// IR, or by the kernels of an emitter. Returns the kernels' texts, where the emitter has some.
std::vector<std::string> run_loops(const std::string& text, const std::vector<at::Tensor>& tensors,
                                   const std::string& how, bool fusion) {
  const loops::Program program = loops::parse(text);
  loops::verify(program);
  if (how == "interpreter") {
    BufferMemory memory(program.buffers, tensors);
    for (const auto& item : program.items)
      loops::interpret(program.nests.at(item.index), program.buffers, memory.pointers);
    return {};
  }
  schedule::Options options;
  options.fusion = fusion;
  const schedule::Plan plan = schedule::make_plan(program, options);
  std::vector<std::string> reasons(plan.kernels.size());
  const auto kernels = how == "triton" ? codegen::compile_triton(plan.kernels, plan.buffers, reasons)
                       : how == "cpp"  ? codegen::compile_cpp(plan.kernels, plan.buffers)
                                       : codegen::compile_llvm(plan.kernels, plan.buffers, {});
  for (const std::string& reason : reasons)
    if (!reason.empty()) throw Unsupported(reason);
  BufferMemory memory(plan.buffers, tensors);
  run_plan(plan, kernels, memory);
  std::vector<std::string> texts;
  for (const codegen::CompiledKernel& k : kernels)
    if (k.text) texts.push_back(*k.text);
  return texts;
}

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
  m.def("_run_loops", &kiln::run_loops, pybind11::arg("text"), pybind11::arg("tensors"), pybind11::arg("how"),
        pybind11::arg("fusion") = true);
  m.def("_decompose_graph_text", [](const std::string& text) {
    const auto g = kiln::graph::parse(text);
    kiln::decompose::decompose(*g);
    return kiln::graph::print(*g);
  });
}
