#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "loops/loops.h"

// From a program of single nests to kernels: dependencies, fusion, loop order, split reductions, memory plan.
namespace kiln::schedule {

/// Steps from lane to lane up to which a load reads what lies between too, and picks: no gather.
inline constexpr int64_t kMostInterleaved = 4;

using loops::BufferId;

/// A buffer that a kernel touches; its place in Kernel::args is its place in the kernel's pointer array.
struct KernelArg {
  BufferId buffer;
  bool read = false, written = false;
  BufferId place = -1;  // the argument in whose memory this one lies (an in-place result); -1: memory of its own
};

/// One fused nest, ready for an emitter. Buffers of kind Scratch are not among args: the emitter lays them out.
struct Kernel {
  loops::Nest nest;
  std::vector<KernelArg> args;
  /// The variable that runs over vector lanes: the last outer one (columns, pointwise), or else each stage's last.
  bool vectorize_outer = true;
  /// Not empty: one kernel for many tensors (an optimizer's update of all parameters). `nest` is the first segment's,
  /// pointwise over at most one variable; segment k runs it over its own extent and its own buffers, which stand at
  /// args[k * n .. (k + 1) * n), n = args.size() / segments.size(), in the order of the first's.
  std::vector<int64_t> segments;
  /// Of an epilogue: the library call's result, which the units load in order; else -1.
  BufferId streamed = -1;
};

struct Step {
  bool is_kernel = true;
  int index = 0;      // into Plan::kernels, or the program's externs
  int epilogue = -1;  // of an extern: the kernel that takes its result's rows as they are made; into Plan::kernels
  /// The kernel that runs in this step, if any; else -1.
  int kernel() const { return is_kernel ? index : epilogue; }
};

/// The buffers that the nest loads from and stores to, but for its scratch.
std::vector<KernelArg> kernel_args(const loops::Nest& n, const std::vector<loops::Buffer>& buffers);

/// What runs, in order. `buffers` begins with the program's own and may have more (partial results, scratch).
struct Plan {
  std::vector<loops::Buffer> buffers;
  std::vector<Kernel> kernels;
  std::vector<loops::Extern> externs;
  std::vector<Step> steps;
};

struct Options {
  bool fusion = true;
  bool epilogues = true;  // attach_epilogues
  bool pack = true;       // pack_operands
  bool in_place = true;   // share_places
  int threads = 1;        // split reductions are cut for this many
  int simd_bits = 512;
  int64_t max_ops = 512;  // instructions in one fused kernel
};

/// Schedules a program. Temps that no step touches any more keep their entry in Plan::buffers and get no memory.
Plan make_plan(const loops::Program& program, const Options& options);

/// Byte offsets of Temp buffers in one arena; -1 for buffers that need none (other kinds, vanished temps).
struct MemoryPlan {
  std::vector<int64_t> offsets;
  int64_t arena_bytes = 0;
};
/// First fit by size over lifetimes in steps; 64-byte alignment. Buffers that share a place (KernelArg::place) have one
/// offset and live as one.
MemoryPlan plan_memory(const Plan& plan);
/// First and last step that touches each buffer; {-1, -1} for none.
std::vector<std::pair<int, int>> liveness(const Plan& plan);

/// Text of kernels and steps, for KILN_LOGS=loops and output_code.
std::string print(const Plan& plan);

}  // namespace kiln::schedule
