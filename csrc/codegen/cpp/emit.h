#pragma once
#include <string>
#include <vector>

#include "codegen/common/kernel.h"

// Kernels as C++ source with OpenMP pragmas: to be read (KILN_LOGS=output_code), and run where the option
// emitter=cpp asks for it.
namespace kiln::codegen {

/// One kernel as a function of the signature KernelFn.
struct CppKernel {
  std::string symbol;  // the function's name
  std::string text;    // its definition
  int64_t units = 0;
  std::vector<std::string> errors;  // as CompiledKernel::errors
};

/// `symbol` must be the text's own in whatever it is compiled with. Throws Unsupported for complex dtypes.
CppKernel emit_cpp(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers,
                   const std::string& symbol);

/// What stands before the kernels of one source: includes, and the operators that C++ has none for.
std::string cpp_prelude();

/// Compiles all kernels as one source with the system's C++ compiler ($CXX, or c++), and loads them; in the order
/// given. Throws Unsupported if there is no compiler, InternalError with its messages if it fails.
std::vector<CompiledKernel> compile_cpp(const std::vector<schedule::Kernel>& kernels,
                                        const std::vector<loops::Buffer>& buffers);

}  // namespace kiln::codegen
