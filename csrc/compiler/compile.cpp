#include "compiler/compile.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include "base/bisect.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/pass.h"
#include "base/timer.h"
#include "codegen/cpp/emit.h"
#include "codegen/triton/emit.h"
#include "compiler/build_plan.h"
#include "compiler/freeze.h"
#include "decompose/decompose.h"
#include "graph/passes/passes.h"
#include "runtime/aten_artifact.h"
#include "runtime/disk_cache.h"
#include "runtime/frozen.h"
#include "runtime/library_steps.h"

namespace kiln::compiler {

namespace {

PassHooks hooks_of(const graph::Graph& g) {
  return {[&g] { return graph::print(g); }, [&g] { graph::verify(g, /*functional=*/true); }};
}

/// Math functions of the host process: PyTorch's own (SLEEF), then the C library's vector ones.
void* resolve(const std::string& name) {
  static void* const libraries[] = {dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD),
                                    dlopen("libmvec.so.1", RTLD_LAZY), dlopen("libm.so.6", RTLD_LAZY)};
  for (void* library : libraries)
    if (library)
      if (void* f = dlsym(library, name.c_str())) return f;
  return dlsym(RTLD_DEFAULT, name.c_str());
}

/// Kernels from Triton source; those that Triton cannot express are made by LLVM.
std::vector<codegen::CompiledKernel> compile_by_triton(const schedule::Plan& schedule,
                                                       const codegen::CompileOptions& options) {
  std::vector<std::string> reasons;
  auto kernels = codegen::compile_triton(schedule.kernels, schedule.buffers, reasons);
  std::vector<schedule::Kernel> others;
  for (size_t k = 0; k < reasons.size(); ++k) {
    if (reasons[k].empty()) continue;
    log_artifact(Topic::fallback, "kernel " + schedule.kernels[k].nest.name + " is LLVM's, not Triton's", reasons[k]);
    others.push_back(schedule.kernels[k]);
  }
  auto by_llvm = codegen::compile_llvm(std::move(others), schedule.buffers, options);
  for (size_t k = 0, at = 0; k < reasons.size(); ++k)
    if (!reasons[k].empty()) kernels[k] = std::move(by_llvm[at++]);
  return kernels;
}

std::vector<codegen::CompiledKernel> compile_kernels(const schedule::Plan& schedule,
                                                     const codegen::CompileOptions& options,
                                                     const std::string& emitter) {
  if (emitter == "llvm") return codegen::compile_llvm(schedule.kernels, schedule.buffers, options);
  if (emitter == "cpp") return codegen::compile_cpp(schedule.kernels, schedule.buffers);
  if (emitter == "triton") return compile_by_triton(schedule, options);
  throw UserError("emitter is 'llvm', 'cpp' or 'triton', not '" + emitter + "'");
}

/// Source of kernel `k`, as KILN_LOGS=output_code prints it.
std::string source_of(const schedule::Plan& schedule, const std::vector<codegen::CompiledKernel>& kernels, size_t k,
                      const std::string& emitter) {
  if (emitter == "triton" && kernels[k].text) return *kernels[k].text;
  return codegen::emit_cpp(schedule.kernels[k], schedule.buffers, schedule.kernels[k].nest.name).text;
}

std::shared_ptr<runtime::Artifact> generate(const std::unique_ptr<graph::Graph> g) {
  const PassHooks hooks = hooks_of(*g);

  // ATen ops -> primitives. Needs a functional graph with metas; leaves one.
  run_pass("decompose", hooks, [&] { return decompose::decompose(*g); });

  // Decompositions leave equal calls and constants behind (each norm's gradient normalizes again).
  graph::clean_up(*g);
  run_pass("graph.recompute_operands", hooks, [&] { return graph::recompute_operands(*g); });

  // Primitives -> loop nests, one per value that is kept, and library calls. Pointwise producers and views are inlined.
  lower::Lowered lowered;
  {
    StageTimer timer("lower");
    lowered = lower::lower(*g, {runtime::has_library_kernel, runtime::result_rows, pass_enabled("lower.in_place")});
  }
  if (log_enabled(Topic::loops)) log_artifact(Topic::loops, g->name + " before scheduling", print(lowered.program));
  if (options().verify) loops::verify(lowered.program);

  // Nests -> fused kernels in order.
  schedule::Plan schedule;
  schedule::MemoryPlan memory;
  {
    StageTimer timer("schedule");
    const Options& o = options();
    schedule::Options s;
    s.fusion = o.fusion;
    s.threads = at::get_num_threads();
    s.max_ops = o.fuse_max_ops;
    s.epilogues = pass_enabled("schedule.epilogues");
    s.pack = pass_enabled("schedule.pack_operands");
    s.in_place = pass_enabled("schedule.in_place");
    s.simd_bits = o.simd_bits ? static_cast<int>(o.simd_bits) : codegen::host_simd_bits();
    schedule = schedule::make_plan(lowered.program, s);
    memory = schedule::plan_memory(schedule);
  }
  if (log_enabled(Topic::loops)) log_artifact(Topic::loops, g->name + " after scheduling", print(schedule));

  // Kernels -> functions.
  const std::string emitter = options().emitter;
  std::vector<codegen::CompiledKernel> kernels;
  {
    StageTimer timer("codegen");
    codegen::CompileOptions c;
    c.simd_bits = static_cast<int>(options().simd_bits);
    c.threads = at::get_num_threads();
    c.keep_text = log_enabled(Topic::llvm_ir);
    c.reuse = pass_enabled("codegen.reuse");
    c.store = runtime::disk_cache();
    c.resolve = resolve;
    kernels = compile_kernels(schedule, c, emitter);
  }
  if (log_enabled(Topic::output_code))
    for (size_t k = 0; k < kernels.size(); ++k)
      log_artifact(Topic::output_code, schedule.kernels[k].nest.name, source_of(schedule, kernels, k, emitter));
  if (log_enabled(Topic::llvm_ir))
    for (const codegen::CompiledKernel& k : kernels)
      if (k.text && emitter == "llvm") log_artifact(Topic::llvm_ir, k.name, *k.text);

  // Everything into slots and steps.
  StageTimer timer("plan");
  auto artifact = runtime::make_artifact(build_plan(g->name, lowered, schedule, memory, std::move(kernels)));
  if (log_enabled(Topic::output_code)) log_artifact(Topic::output_code, g->name, artifact->describe());
  return artifact;
}

}  // namespace

std::shared_ptr<runtime::Artifact> compile_functional(const graph::Graph& g, bool inference) {
  graph::verify(g, /*functional=*/true);
  if (!options().codegen || !bisect_allows(BisectUnit::Graph, g.name)) return runtime::aten_artifact(g);
  if (!inference) return generate(g.clone());
  // Inference: what depends on the weights alone is computed when they change.
  std::unique_ptr<graph::Graph> own = g.clone();
  std::optional<FrozenSplit> split;
  run_pass("graph.fold_norms", hooks_of(*own), [&] { return graph::fold_norms(*own); });
  run_pass("compiler.freeze", hooks_of(*own), [&] {
    split = split_frozen(*own);
    return false;
  });
  if (!split) return generate(std::move(own));
  graph::verify(*split->prologue, /*functional=*/true);
  graph::verify(*split->rest, /*functional=*/true);
  std::string form = graph::print(*split->prologue);
  return runtime::frozen_artifact(std::move(form), generate(std::move(split->prologue)),
                                  generate(std::move(split->rest)), std::move(split->prologue_inputs),
                                  std::move(split->rest_inputs));
}

}  // namespace kiln::compiler
