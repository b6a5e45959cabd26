#pragma once
#include <memory>
#include <string>
#include <vector>

#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/Module.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Target/TargetMachine.h"

// LLVM as a library: a target machine for this host, a short pass pipeline, and mapping of object code into memory.
namespace kiln::codegen {

/// A fresh target machine for the host's CPU (they are not thread-safe; every compiling thread makes one).
std::unique_ptr<llvm::TargetMachine> make_target_machine();
const std::string& host_cpu();
const std::string& host_features();

/// Verifies (debug builds), optimizes and assembles a module into an object file.
std::unique_ptr<llvm::MemoryBuffer> compile_module(llvm::Module& module, llvm::TargetMachine& machine);

/// Maps object files into the process. The owner keeps them mapped.
struct LoadedCode {
  std::shared_ptr<void> owner;
  std::vector<void*> addresses;  // of `symbols`, in order
};
/// `externals`: functions of this process that the code may call.
LoadedCode load_objects(std::vector<std::unique_ptr<llvm::MemoryBuffer>> objects,
                        const std::vector<std::string>& symbols,
                        const std::vector<std::pair<std::string, void*>>& externals);

}  // namespace kiln::codegen
