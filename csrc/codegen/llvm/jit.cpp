#include "codegen/llvm/jit.h"

#include <atomic>
#include <mutex>

#include "base/error.h"
#include "codegen/common/kernel.h"
#include "llvm/ExecutionEngine/Orc/LLJIT.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/PatternMatch.h"
#include "llvm/IR/Verifier.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/SmallVectorMemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/TargetParser/Host.h"

namespace kiln::codegen {
namespace {

void init_llvm() {
  static std::once_flag once;
  std::call_once(once, [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
  });
}

[[noreturn]] void fail(llvm::Error error, const std::string& what) {
  throw InternalError(what + ": " + llvm::toString(std::move(error)));
}

llvm::orc::LLJIT& engine() {
  // Never destroyed: code may still run while the process's statics go away.
  static llvm::orc::LLJIT* jit = [] {
    init_llvm();
    auto made = llvm::orc::LLJITBuilder().create();
    if (!made) fail(made.takeError(), "LLVM's JIT");
    return made->release();
  }();
  return *jit;
}

/// Makes x != 0 of |x| > 0. InstCombine of LLVM 19 does so too, but not for a comparison that selects the larger of |x|
/// and zero, and where such a one meets a test for NaN of x (`isnan(x) || |x| > 0`) it makes x > 0 of it.
struct CompareMagnitudes : llvm::PassInfoMixin<CompareMagnitudes> {
  static llvm::PreservedAnalyses run(llvm::Function& function, llvm::FunctionAnalysisManager&) {
    namespace match = llvm::PatternMatch;
    using llvm::FCmpInst;
    for (llvm::BasicBlock& block : function)
      for (llvm::Instruction& i : block) {
        auto* compare = llvm::dyn_cast<FCmpInst>(&i);
        if (!compare) continue;
        if (match::match(compare->getOperand(0), match::m_AnyZeroFP())) compare->swapOperands();
        llvm::Value* x = nullptr;
        const auto predicate = compare->getPredicate();
        if ((predicate != FCmpInst::FCMP_OGT && predicate != FCmpInst::FCMP_UGT) ||
            !match::match(compare->getOperand(0), match::m_FAbs(match::m_Value(x))) ||
            !match::match(compare->getOperand(1), match::m_AnyZeroFP()))
          continue;
        compare->setPredicate(predicate == FCmpInst::FCMP_OGT ? FCmpInst::FCMP_ONE : FCmpInst::FCMP_UNE);
        compare->setOperand(0, x);
      }
    return llvm::PreservedAnalyses::none();
  }
};

}  // namespace

const std::string& host_cpu() {
  static const std::string cpu = llvm::sys::getHostCPUName().str();
  return cpu;
}

const std::string& host_features() {
  static const std::string features = [] {
    std::string out;
    for (const auto& f : llvm::sys::getHostCPUFeatures()) {
      if (!out.empty()) out += ",";
      out += (f.second ? "+" : "-") + f.first().str();
    }
    return out;
  }();
  return features;
}

int host_simd_bits() {
  const auto features = llvm::sys::getHostCPUFeatures();
  const auto has = [&](const char* name) {
    const auto it = features.find(name);
    return it != features.end() && it->second;
  };
  if (has("avx512f") && has("avx512bw") && has("avx512vl") && has("avx512dq")) return 512;
  return has("avx2") && has("fma") ? 256 : 128;
}

std::unique_ptr<llvm::TargetMachine> make_target_machine() {
  init_llvm();
  const std::string triple = llvm::sys::getProcessTriple();
  std::string error;
  const llvm::Target* target = llvm::TargetRegistry::lookupTarget(triple, error);
  if (!target) throw InternalError("LLVM has no target " + triple + ": " + error);
  llvm::TargetOptions options;
  // a*b + c is two roundings, as in eager; only the Fma opcode contracts.
  options.AllowFPOpFusion = llvm::FPOpFusion::Strict;
  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(triple, host_cpu(), host_features(), options,
                                                                          llvm::Reloc::PIC_, llvm::CodeModel::Small,
                                                                          llvm::CodeGenOptLevel::Default, true));
}

std::unique_ptr<llvm::MemoryBuffer> compile_module(llvm::Module& module, llvm::TargetMachine& machine) {
  std::string problem;
  llvm::raw_string_ostream stream(problem);
  if (llvm::verifyModule(module, &stream)) throw InternalError("malformed LLVM IR: " + stream.str());
  {
    llvm::LoopAnalysisManager loops;
    llvm::FunctionAnalysisManager functions;
    llvm::CGSCCAnalysisManager cgscc;
    llvm::ModuleAnalysisManager modules;
    llvm::PassBuilder builder(&machine);
    builder.registerModuleAnalyses(modules);
    builder.registerCGSCCAnalyses(cgscc);
    builder.registerFunctionAnalyses(functions);
    builder.registerLoopAnalyses(loops);
    builder.crossRegisterProxies(loops, functions, cgscc, modules);
    llvm::ModulePassManager passes;
    // The emitter vectorizes and unrolls itself; what is left is promotion of its stack slots, clean-up and hoisting.
    const auto add = [&](const char* pipeline) {
      if (auto e = builder.parsePassPipeline(passes, pipeline)) fail(std::move(e), "pass pipeline");
    };
    add("function(sroa,early-cse<memssa>)");
    passes.addPass(llvm::createModuleToFunctionPassAdaptor(CompareMagnitudes()));
    add("function(instcombine<no-verify-fixpoint>,loop-mssa(licm),simplifycfg)");
    passes.run(module, modules);
  }
  llvm::SmallVector<char, 0> bytes;
  llvm::raw_svector_ostream out(bytes);
  llvm::legacy::PassManager emit;
  if (machine.addPassesToEmitFile(emit, out, nullptr, llvm::CodeGenFileType::ObjectFile))
    throw InternalError("LLVM cannot emit object code for this host");
  emit.run(module);
  return std::make_unique<llvm::SmallVectorMemoryBuffer>(std::move(bytes), module.getName(), false);
}

LoadedCode load_objects(std::vector<std::unique_ptr<llvm::MemoryBuffer>> objects,
                        const std::vector<std::string>& symbols,
                        const std::vector<std::pair<std::string, void*>>& externals) {
  static std::atomic<int> counter{0};
  llvm::orc::LLJIT& jit = engine();
  llvm::orc::ExecutionSession& session = jit.getExecutionSession();
  llvm::orc::JITDylib& library = session.createBareJITDylib("kiln." + std::to_string(counter++));
  LoadedCode code;
  code.owner = std::shared_ptr<void>(&library, [&session](void* p) {
    llvm::consumeError(session.removeJITDylib(*static_cast<llvm::orc::JITDylib*>(p)));
  });
  if (!externals.empty()) {
    llvm::orc::SymbolMap map;
    for (const auto& [name, address] : externals)
      map[jit.mangleAndIntern(name)] = {llvm::orc::ExecutorAddr::fromPtr(address), llvm::JITSymbolFlags::Exported};
    if (auto e = library.define(llvm::orc::absoluteSymbols(std::move(map)))) fail(std::move(e), "kernel symbols");
  }
  for (auto& o : objects)
    if (auto e = jit.addObjectFile(library, std::move(o))) fail(std::move(e), "loading kernels");
  llvm::orc::SymbolLookupSet wanted;
  for (const std::string& s : symbols) wanted.add(jit.mangleAndIntern(s));
  auto found = session.lookup({{&library, llvm::orc::JITDylibLookupFlags::MatchAllSymbols}}, wanted);
  if (!found) fail(found.takeError(), "loading kernels");
  for (const std::string& s : symbols)
    code.addresses.push_back((*found)[jit.mangleAndIntern(s)].getAddress().toPtr<void*>());
  return code;
}

}  // namespace kiln::codegen
