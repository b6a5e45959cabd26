#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "codegen/common/kernel.h"

// Kernels as Triton source: to be read, and run where the option emitter=triton asks for it. Nothing here knows Python;
// whoever does hands in a loader.
namespace kiln::codegen {

/// One kernel as a @triton.jit function. Its parameters are, in order: the kernel's buffers, the scratch buffers, with
/// segments the number of outer points (xnumel), with errors a pointer to an int32 that a failing program sets to an
/// error's number, and the constants XBLOCK and, if it is not 0, RBLOCK.
struct TritonKernel {
  struct Memory {
    DType dtype = DType::Float32;
    int64_t numel = 0;
  };
  std::string symbol;  // the function's name
  std::string text;    // its definition
  /// Outer points: one number, or one for each segment, which is a launch of its own with its own buffers.
  std::vector<int64_t> points;
  int64_t xblock = 1;           // outer points of one program
  int64_t rblock = 0;           // inner points at a time; 0: the kernel has no inner loops
  std::vector<Memory> buffers;  // of all segments
  std::vector<Memory> scratch;  // of one outer point; a launch needs it for all points of its programs
  bool segmented = false;
  std::vector<std::string> errors;  // as CompiledKernel::errors
};

/// `symbol` must be the text's own in its source. Throws Unsupported, with the reason, for what Triton has not: complex
/// dtypes, functions that are to give the C library's own bits, sums into memory of dtypes without atomic addition.
TritonKernel emit_triton(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                         const std::string& symbol);

/// What stands before the kernels of one source: imports, and functions of what Triton has no operator for.
std::string triton_prelude();

/// Runs one kernel on the memory of its buffers; returns 0 or an error's number.
using TritonLaunch = std::function<int32_t(void* const* buffers)>;
/// Makes the kernels of one source callable, in the order given. Throws Unsupported where there is no Triton.
using TritonLoader = std::vector<TritonLaunch> (*)(const std::string& source, const std::vector<TritonKernel>& kernels);
/// Set by the Python module when it is imported.
void set_triton_loader(TritonLoader loader);

/// Makes one source of all kernels that can be written in Triton and loads it; in the order given. A kernel that
/// cannot is left without a function, its error in `reasons` (empty for the others).
std::vector<CompiledKernel> compile_triton(const std::vector<schedule::Kernel>& kernels,
                                           const std::vector<loops::Buffer>& buffers,
                                           std::vector<std::string>& reasons);

}  // namespace kiln::codegen
