#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codegen/common/object_store.h"
#include "schedule/schedule.h"

// The door to the code generators: scheduled kernels in, callable functions out.
namespace kiln::codegen {

/// Runs parallel units [begin, end) of a kernel. buffers[i] is the memory of Kernel::args[i], from
/// CompiledKernel::offsets[i] on. `scratch` has CompiledKernel::scratch_bytes, 64-byte aligned, used by one thread at a
/// time. Returns 0, or the error's number k: the program stops with CompiledKernel::errors[k - 1] (an IndexError, or a
/// division by zero).
using KernelFn = int32_t (*)(void* const* buffers, const int64_t* args, int64_t begin, int64_t end, void* scratch);

/// Which part of a buffer each unit of a kernel loads: elements [first[u], last[u]], both rising with u.
struct UnitSpans {
  std::vector<int64_t> first, last;
};

struct CompiledKernel {
  std::string name;
  KernelFn fn = nullptr;
  std::vector<int64_t> args;     // passed to fn as they are
  std::vector<int64_t> offsets;  // by pointer, in bytes
  int64_t units = 0;             // the parallel domain is [0, units)
  int64_t grain = 1;             // units that are worth a task of their own
  int64_t scratch_bytes = 0;     // per thread
  UnitSpans reads;               // of Kernel::streamed, if it has one; else, or if units do not read it in order, empty
  std::vector<std::string> errors;
  std::shared_ptr<const std::string> text;  // generated code, when asked for
  std::shared_ptr<const void> owner;        // keeps the code mapped
};

/// Few: each length of a loop has the code that suits it best. Any: one code serves as many as it can.
enum class Lengths : uint8_t { Few, Any };

struct CompileOptions {
  int simd_bits = 0;       // 0: the host's best (512, 256 or 128)
  int threads = 2;         // compile on this many
  bool keep_text = false;  // fill CompiledKernel::text
  bool reuse = true;       // code of earlier calls in this process, for kernels of the same structure
  /// Null: Few for the first kernels that differ in lengths alone, then Any.
  std::optional<Lengths> lengths = std::nullopt;
  ObjectStore* store = nullptr;  // of earlier processes, if there is one; not asked when keep_text or not reuse
  /// Address of a function by name (vector math of the host process), or null. Names asked for: Sleef_expf16_u10 and
  /// such.
  std::function<void*(const std::string& name)> resolve;
};

/// Compiles kernels with LLVM, in this process. Kernels of one structure are compiled once, whatever their batch size
/// (KernelShape::open); results in the order given.
/// Thread-safe. Throws Unsupported for what no emitter handles (complex dtypes) and InternalError otherwise.
std::vector<CompiledKernel> compile_llvm(std::vector<schedule::Kernel> kernels,
                                         const std::vector<loops::Buffer>& buffers, const CompileOptions& options);

/// The host's vector width in bits as kernels use it (512, 256 or 128).
int host_simd_bits();

/// Runs all units on this thread with fresh scratch; throws loops::KernelError. For tests and tools.
void run_serial(const CompiledKernel& kernel, void* const* buffers);

}  // namespace kiln::codegen
