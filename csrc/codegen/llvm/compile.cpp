#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/timer.h"
#include "base/weak_map.h"
#include "codegen/common/kernel.h"
#include "codegen/common/offsets.h"
#include "codegen/common/shape.h"
#include "codegen/common/text.h"
#include "codegen/llvm/emitter.h"
#include "codegen/llvm/jit.h"

// Kernels in, functions out: those of equal structure once, in groups, on a few threads.
namespace kiln::codegen {
namespace {

struct Unique {
  std::vector<int> kernels;  // those of this structure; the first one is compiled
  std::string key;
  std::string symbol;
};

struct Group {
  std::vector<int> uniques;
  std::unique_ptr<llvm::MemoryBuffer> object;
  std::vector<std::pair<std::string, void*>> externals;
  std::vector<std::string> texts;  // one per unique
};

struct Code {
  std::shared_ptr<void> library;  // keeps it mapped
  void* address = nullptr;
  std::shared_ptr<const std::string> text;  // as CompiledKernel::text; null if it was not asked for
};

/// The code of this process by canonical_text and the width of registers: what a program compiles again (for another
/// batch size, after a guard failed, below a graph break) is mostly what it compiled before.
WeakMap<const Code>& known_code() {
  static auto* map = new WeakMap<const Code>;  // never destroyed, like the code itself
  return *map;
}

}  // namespace

std::vector<CompiledKernel> compile_llvm(std::vector<schedule::Kernel> kernels,
                                         const std::vector<loops::Buffer>& buffers, const CompileOptions& options) {
  const int simd = options.simd_bits > 0 ? std::min(options.simd_bits, host_simd_bits()) : host_simd_bits();
  std::vector<CompiledKernel> out(kernels.size());
  std::vector<KernelShape> shapes(kernels.size());
  std::vector<Unique> uniques;
  std::unordered_map<std::string, int> by_key;
  const auto give = [&](const Unique& u, const std::shared_ptr<const Code>& code) {
    for (int k : u.kernels) {
      out[k].fn = reinterpret_cast<KernelFn>(code->address);
      out[k].owner = code;
      if (options.keep_text) out[k].text = code->text;
    }
  };
  for (size_t k = 0; k < kernels.size(); ++k) {
    shapes[k] = shape_of(kernels[k], buffers, simd);
    CompiledKernel& c = out[k];
    c.name = kernels[k].nest.name;
    c.units = shapes[k].units;
    c.grain = shapes[k].grain;
    c.scratch_bytes = shapes[k].scratch_bytes;
    c.errors = shapes[k].errors;
    c.reads = unit_spans(kernels[k], shapes[k]);
    c.offsets = take_offsets(kernels[k], buffers);
    if (c.units == 0) continue;
    generalize(kernels[k], shapes[k]);
    c.args = shapes[k].args;
    const std::string key = std::to_string(simd) + " " + canonical_text(kernels[k], buffers, shapes[k]);
    const auto [it, fresh] = by_key.try_emplace(key, static_cast<int>(uniques.size()));
    if (fresh) uniques.push_back({{}, key, "kernel_" + std::to_string(uniques.size())});
    uniques[it->second].kernels.push_back(static_cast<int>(k));
  }
  if (options.reuse)
    std::erase_if(uniques, [&](const Unique& u) {
      const std::shared_ptr<const Code> code = known_code().find(u.key);
      if (!code || (options.keep_text && !code->text)) return false;
      give(u, code);
      return true;
    });
  if (uniques.empty()) return out;

  const StageTimer timer("codegen.llvm");
  const int threads = std::max(1, std::min<int>(options.threads, static_cast<int>(uniques.size())));
  // A few groups a thread, so that one long kernel does not leave the other thread idle.
  const size_t group_count = std::min<size_t>(uniques.size(), threads == 1 ? 1 : static_cast<size_t>(threads) * 3);
  std::vector<Group> groups(group_count);
  for (size_t u = 0; u < uniques.size(); ++u) groups[u % group_count].uniques.push_back(static_cast<int>(u));

  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      std::unique_ptr<llvm::TargetMachine> machine = make_target_machine();
      for (size_t g; (g = next++) < groups.size();) {
        Group& group = groups[g];
        llvm::LLVMContext context;
        llvm::Module module("kiln." + std::to_string(g), context);
        module.setTargetTriple(machine->getTargetTriple().str());
        module.setDataLayout(machine->createDataLayout());
        MathLibrary math(options.resolve);
        for (int u : group.uniques) {
          const int k = uniques[u].kernels[0];
          Emitter(module, math, kernels[k], buffers, shapes[k]).emit(uniques[u].symbol);
        }
        for (llvm::Function& f : module)
          if (!f.isDeclaration()) {
            f.addFnAttr("target-cpu", host_cpu());
            f.addFnAttr("target-features", host_features());
          }
        group.object = compile_module(module, *machine);
        if (options.keep_text)
          for (int u : group.uniques) {
            std::string text;
            llvm::raw_string_ostream stream(text);
            module.getFunction(uniques[u].symbol)->print(stream);
            group.texts.push_back(stream.str());
          }
        group.externals = math.externals();
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      next = groups.size();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
  if (error) std::rethrow_exception(error);

  std::vector<std::unique_ptr<llvm::MemoryBuffer>> objects;
  std::vector<std::string> symbols;
  std::vector<int> order;
  std::vector<std::shared_ptr<const std::string>> texts;
  std::unordered_map<std::string, void*> externals;
  for (Group& g : groups) {
    objects.push_back(std::move(g.object));
    for (const auto& e : g.externals) externals.insert(e);
    for (size_t i = 0; i < g.uniques.size(); ++i) {
      const int u = g.uniques[i];
      symbols.push_back(uniques[u].symbol);
      order.push_back(u);
      if (options.keep_text) texts.push_back(std::make_shared<const std::string>(std::move(g.texts[i])));
    }
  }
  const LoadedCode loaded = load_objects(std::move(objects), symbols, {externals.begin(), externals.end()});
  for (size_t i = 0; i < order.size(); ++i) {
    const Unique& u = uniques[order[i]];
    const auto code =
        std::make_shared<const Code>(Code{loaded.owner, loaded.addresses[i], options.keep_text ? texts[i] : nullptr});
    give(u, code);
    if (options.reuse) known_code().keep(u.key, code);
  }
  return out;
}

void run_serial(const CompiledKernel& kernel, void* const* buffers) {
  if (kernel.units == 0) return;
  void* scratch = kernel.scratch_bytes ? std::aligned_alloc(64, (kernel.scratch_bytes + 63) / 64 * 64) : nullptr;
  std::vector<void*> pointers(buffers, buffers + kernel.offsets.size());
  for (size_t i = 0; i < pointers.size(); ++i) pointers[i] = static_cast<char*>(pointers[i]) + kernel.offsets[i];
  const int32_t code = kernel.fn(pointers.data(), kernel.args.data(), 0, kernel.units, scratch);
  std::free(scratch);
  if (code != 0) throw loops::KernelError(kernel.errors.at(code - 1));
}

}  // namespace kiln::codegen
