#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "base/build_id.h"
#include "base/error.h"
#include "base/timer.h"
#include "base/weak_map.h"
#include "codegen/common/kernel.h"
#include "codegen/common/offsets.h"
#include "codegen/common/shape.h"
#include "codegen/common/text.h"
#include "codegen/llvm/emitter.h"
#include "codegen/llvm/jit.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/xxhash.h"

// Kernels in, functions out: those of equal structure once, on a few threads.
namespace kiln::codegen {
namespace {

struct Unique {
  std::vector<int> kernels;  // those of this structure; the first one is compiled
  std::string key;           // what its code depends on, on this host
  std::string symbol;        // of its own in whatever library it is loaded into
  std::unique_ptr<llvm::MemoryBuffer> object;
  std::vector<std::pair<std::string, void*>> externals;  // functions that it calls
  std::shared_ptr<const std::string> text;
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

uint64_t checksum(llvm::StringRef bytes) { return llvm::xxh3_64bits(bytes); }

std::string symbol_of(const std::string& key) {
  const auto hash = llvm::xxh3_128bits({reinterpret_cast<const uint8_t*>(key.data()), key.size()});
  return "kernel_" + llvm::utohexstr(hash.high64) + "_" + llvm::utohexstr(hash.low64);
}

/// Key in a store: other processes may be of other builds, and on other machines.
std::string stored_key(const std::string& key) {
  static const std::string here =
      "\n" + host_cpu() + " " + llvm::utohexstr(checksum(host_features())) + " " + build_id();
  return key + here;
}

void take_stored(std::vector<Unique>& uniques, const CompileOptions& options) {
  std::vector<std::string> keys;
  std::unordered_map<std::string, Unique*> by_key;
  for (Unique& u : uniques) by_key[keys.emplace_back(stored_key(u.key))] = &u;
  for (const StoredObject& o : options.store->find(keys)) {
    Unique& u = *by_key.at(o.key);
    MathLibrary math(options.resolve);
    bool all = true;
    for (const std::string& name : o.externals) all &= math.find(name);
    if (!all || checksum(o.code) != o.checksum) continue;
    u.externals = math.externals();
    u.object = llvm::MemoryBuffer::getMemBufferCopy(o.code, u.symbol);
  }
}

/// Compiles those that have no object, on a few threads.
void compile_new(std::vector<Unique>& uniques, const std::vector<schedule::Kernel>& kernels,
                 const std::vector<loops::Buffer>& buffers, const std::vector<KernelShape>& shapes,
                 const CompileOptions& options) {
  std::vector<Unique*> fresh;
  for (Unique& u : uniques)
    if (!u.object) fresh.push_back(&u);
  if (fresh.empty()) return;
  const StageTimer timer("codegen.llvm");
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      std::unique_ptr<llvm::TargetMachine> machine = make_target_machine();
      for (size_t i; (i = next++) < fresh.size();) {
        Unique& u = *fresh[i];
        llvm::LLVMContext context;
        llvm::Module module(u.symbol, context);
        module.setTargetTriple(machine->getTargetTriple().str());
        module.setDataLayout(machine->createDataLayout());
        MathLibrary math(options.resolve);
        const int k = u.kernels[0];
        Emitter(module, math, kernels[k], buffers, shapes[k]).emit(u.symbol);
        for (llvm::Function& f : module)
          if (!f.isDeclaration()) {
            f.addFnAttr("target-cpu", host_cpu());
            f.addFnAttr("target-features", host_features());
          }
        u.object = compile_module(module, *machine);
        if (options.keep_text) {
          std::string text;
          llvm::raw_string_ostream stream(text);
          module.getFunction(u.symbol)->print(stream);
          u.text = std::make_shared<const std::string>(stream.str());
        }
        u.externals = math.externals();
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      next = fresh.size();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < std::min<int>(options.threads, static_cast<int>(fresh.size())); ++t) pool.emplace_back(work);
  work();
  for (std::thread& t : pool) t.join();
  if (error) std::rethrow_exception(error);
  if (!options.store) return;
  std::vector<StoredObject> objects;
  for (const Unique* u : fresh) {
    StoredObject& o = objects.emplace_back(StoredObject{stored_key(u->key), u->object->getBuffer().str(), {}});
    for (const auto& e : u->externals) o.externals.push_back(e.first);
    o.checksum = checksum(o.code);
  }
  options.store->keep(objects);
}

/// A kernel as it would be compiled.
struct Candidate {
  schedule::Kernel kernel;
  KernelShape shape;
  std::string key;
};

Candidate candidate(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers, KernelShape shape) {
  Candidate c{kernel, std::move(shape), {}};
  generalize(c.kernel, c.shape);
  c.key = std::to_string(c.shape.simd_bits) + " " + canonical_text(c.kernel, buffers, c.shape);
  return c;
}

/// Kernels that one code could serve (Lengths::Any), each of which got its own.
class Families {
 public:
  static Families& of_process() {
    static auto* families = new Families;
    return *families;
  }
  /// Whether there was one before whose text differs in numbers alone. Counts this one.
  bool has_like(const std::string& key) {
    std::string text;
    text.reserve(key.size());
    bool digit = false;  // the last character was one
    for (const char c : key) {
      if (!std::strchr("0123456789.+-", c) && !(c == 'e' && digit)) text += c;
      digit = c >= '0' && c <= '9';
    }
    return seen_before(text);
  }
  /// Whether there was one before that this one's code would have served. Counts this one.
  bool has_same(const Candidate& any) {
    std::string text;  // how long rounds are does not tell families apart
    size_t from = 0;
    for (size_t by; (by = any.key.find(kRoundText, from)) != std::string::npos;
         from = any.key.find(' ', by + kRoundText.size()))
      text.append(any.key, from, by - from);
    return seen_before(text.append(any.key, from));
  }

 private:
  bool seen_before(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !seen_.insert(checksum(text)).second;
  }

  std::mutex mutex_;
  std::unordered_set<uint64_t> seen_;
};

/// How a kernel of which there is no code yet is compiled: the first two of a family for their own lengths, since an
/// epoch's last batch is shorter; the third for any.
Candidate choose(Candidate few, const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers) {
  Families& families = Families::of_process();
  if (!families.has_like(few.key)) return few;
  Candidate any = candidate(kernel, buffers, shape_of(kernel, buffers, few.shape.simd_bits, Lengths::Any));
  return any.key != few.key && families.has_same(any) ? std::move(any) : std::move(few);
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
    CompiledKernel& c = out[k];
    c.name = kernels[k].nest.name;
    shapes[k] = shape_of(kernels[k], buffers, simd, options.lengths.value_or(Lengths::Few));
    c.reads = unit_spans(kernels[k], shapes[k]);  // units are the same for any length
    c.offsets = take_offsets(kernels[k], buffers);
    std::string key;
    if (shapes[k].units > 0) {
      Candidate best = candidate(kernels[k], buffers, std::move(shapes[k]));
      if (options.reuse && !options.lengths && !by_key.count(best.key) && !known_code().find(best.key))
        best = choose(std::move(best), kernels[k], buffers);
      kernels[k] = std::move(best.kernel);
      shapes[k] = std::move(best.shape);
      key = std::move(best.key);
    }
    c.units = shapes[k].units;
    c.grain = shapes[k].grain;
    c.scratch_bytes = shapes[k].scratch_bytes;
    c.errors = shapes[k].errors;
    c.args = shapes[k].args;
    if (key.empty()) continue;
    const auto [it, fresh] = by_key.try_emplace(key, static_cast<int>(uniques.size()));
    if (fresh) uniques.push_back({{}, key, symbol_of(key), nullptr, {}, nullptr});
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

  CompileOptions how = options;
  if (!options.reuse || options.keep_text || build_id().empty()) how.store = nullptr;
  if (how.store) take_stored(uniques, how);
  compile_new(uniques, kernels, buffers, shapes, how);

  std::vector<std::unique_ptr<llvm::MemoryBuffer>> objects;
  std::vector<std::string> symbols;
  std::unordered_map<std::string, void*> externals;
  for (Unique& u : uniques) {
    objects.push_back(std::move(u.object));
    symbols.push_back(u.symbol);
    externals.insert(u.externals.begin(), u.externals.end());
  }
  const LoadedCode loaded = load_objects(std::move(objects), symbols, {externals.begin(), externals.end()});
  for (size_t i = 0; i < uniques.size(); ++i) {
    const auto code = std::make_shared<const Code>(Code{loaded.owner, loaded.addresses[i], uniques[i].text});
    give(uniques[i], code);
    if (options.reuse) known_code().keep(uniques[i].key, code);
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
