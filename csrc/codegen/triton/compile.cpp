#include <atomic>

#include "base/error.h"
#include "codegen/triton/emit.h"

namespace kiln::codegen {
namespace {

std::atomic<TritonLoader> loader{nullptr};

/// Triton's programs are all units at once: a kernel is one unit.
int32_t launch(void* const* buffers, const int64_t* args, int64_t, int64_t, void*) {
  const auto* kernel = reinterpret_cast<const TritonLaunch*>(args[0]);
  return (*kernel)(buffers);
}

}  // namespace

void set_triton_loader(TritonLoader l) { loader = l; }

std::vector<CompiledKernel> compile_triton(const std::vector<schedule::Kernel>& kernels,
                                           const std::vector<loops::Buffer>& buffers,
                                           std::vector<std::string>& reasons) {
  if (!loader) throw Unsupported("emitter=triton runs in Python alone");
  reasons.assign(kernels.size(), "");
  std::string source = triton_prelude();
  std::vector<TritonKernel> emitted;
  std::vector<size_t> places;
  for (size_t k = 0; k < kernels.size(); ++k) try {
      emitted.push_back(emit_triton(kernels[k], buffers, kernels[k].nest.name + "_" + std::to_string(k)));
      places.push_back(k);
      source += "\n\n" + emitted.back().text;
    } catch (const Unsupported& e) {
      reasons[k] = e.what();
    }
  std::vector<CompiledKernel> out(kernels.size());
  if (emitted.empty()) return out;
  const auto launches = std::make_shared<const std::vector<TritonLaunch>>(loader.load()(source, emitted));
  KILN_CHECK(launches->size() == emitted.size(), "Triton kernels that were not loaded");
  for (size_t e = 0; e < emitted.size(); ++e) {
    const size_t k = places[e];
    CompiledKernel& c = out[k];
    c.name = kernels[k].nest.name;
    c.fn = launch;
    c.args = {reinterpret_cast<int64_t>(&(*launches)[e])};
    c.offsets.assign(kernels[k].args.size(), 0);
    const std::vector<int64_t>& points = emitted[e].points;
    c.units = std::any_of(points.begin(), points.end(), [](int64_t p) { return p > 0; });
    c.errors = std::move(emitted[e].errors);
    c.text = std::make_shared<const std::string>(std::move(emitted[e].text));
    c.owner = launches;
  }
  return out;
}

}  // namespace kiln::codegen
