#include "schedule/schedule.h"

#include <numeric>

#include "base/error.h"
#include "schedule/epilogues.h"
#include "schedule/fuse.h"
#include "schedule/groups.h"
#include "schedule/pack_operands.h"

namespace kiln::schedule {

using loops::Inst;
using loops::Nest;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

std::vector<KernelArg> kernel_args(const Nest& n, const std::vector<loops::Buffer>& buffers) {
  std::vector<KernelArg> args;
  for (const Stage& s : n.stages)
    for (ValueId id : s.body) {
      const Inst& i = n.insts[id];
      if (i.buffer < 0 || buffers[i.buffer].kind == loops::BufferKind::Scratch) continue;
      auto it = std::find_if(args.begin(), args.end(), [&](const KernelArg& a) { return a.buffer == i.buffer; });
      if (it == args.end()) it = args.insert(args.end(), KernelArg{i.buffer});
      if (i.op == Opcode::Store) {
        it->written = true;
        it->read |= i.mode == loops::StoreMode::Add;
      } else {
        it->read = true;
      }
    }
  return args;
}

Plan make_plan(const loops::Program& program, const Options& options) {
  Plan plan;
  plan.buffers = program.buffers;
  plan.externs = program.externs;
  std::vector<Group> groups = group_program(program, options);
  if (options.fusion) {
    drop_dead_stores(groups, plan.buffers, plan.externs);
    for (Group& g : groups)
      if (!g.is_extern) {
        order_loops(g.nest);
        compact(g.nest);
      }
    contract_temps(groups, plan.buffers, plan.externs);
    for (Group& g : groups)
      if (!g.is_extern) share_costly_values(g.nest, plan.buffers);
  }
  const auto add_kernel = [&](Nest nest) {
    Kernel k;
    if (options.fusion) {
      order_loops(nest);
      merge_vars(nest);
      order_loops(nest);
      join_lanes(nest);
      compact(nest);
    }
    k.nest = std::move(nest);
    k.args = kernel_args(k.nest, plan.buffers);
    // A scratch row holds one row: it was made for lanes that run along it.
    const bool keeps_row = std::any_of(k.nest.insts.begin(), k.nest.insts.end(), [&](const Inst& i) {
      return i.buffer >= 0 && plan.buffers[i.buffer].kind == loops::BufferKind::Scratch;
    });
    k.vectorize_outer = !keeps_row && prefer_columns(k.nest);
    plan.steps.push_back({true, static_cast<int>(plan.kernels.size())});
    plan.kernels.push_back(std::move(k));
  };
  for (Group& g : groups) {
    if (g.is_extern) {
      plan.steps.push_back({false, g.extern_index});
      continue;
    }
    std::optional<Nest> combine;
    if (options.fusion) combine = split_reduction(g.nest, plan.buffers, options);
    add_kernel(std::move(g.nest));
    if (combine) add_kernel(std::move(*combine));
  }
  if (options.fusion) join_segments(plan);
  if (options.fusion && options.epilogues) attach_epilogues(plan);
  if (options.fusion && options.pack) pack_operands(plan);
  if (options.fusion && options.in_place) share_places(plan);
  return plan;
}

std::vector<std::pair<int, int>> liveness(const Plan& plan) {
  std::vector<std::pair<int, int>> live(plan.buffers.size(), {-1, -1});
  const auto touch = [&](BufferId b, int step) {
    if (live[b].first < 0) live[b].first = step;
    live[b].second = step;
  };
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const Step& step = plan.steps[s];
    const int at = static_cast<int>(s);
    const int kernel = step.kernel();
    if (kernel >= 0)
      for (const KernelArg& a : plan.kernels[kernel].args) touch(a.buffer, at);
    if (step.is_kernel) continue;
    for (BufferId b : plan.externs[step.index].reads) touch(b, at);
    for (BufferId b : plan.externs[step.index].writes) touch(b, at);
  }
  return live;
}

MemoryPlan plan_memory(const Plan& plan) {
  MemoryPlan memory;
  memory.offsets.assign(plan.buffers.size(), -1);
  auto live = liveness(plan);
  // Buffers in one place are one buffer: the first of them, which lives as long as all of them.
  std::vector<BufferId> place(plan.buffers.size());
  std::iota(place.begin(), place.end(), 0);
  for (const Step& s : plan.steps) {
    const int kernel = s.kernel();
    if (kernel < 0) continue;
    for (const KernelArg& a : plan.kernels[kernel].args) {
      if (a.place < 0) continue;
      place[a.buffer] = place[a.place];
      live[place[a.buffer]].second = std::max(live[place[a.buffer]].second, live[a.buffer].second);
    }
  }
  struct Block {
    BufferId buffer;
    int64_t bytes;
  };
  std::vector<Block> order;
  for (size_t b = 0; b < plan.buffers.size(); ++b) {
    const loops::Buffer& buffer = plan.buffers[b];
    if (buffer.kind != loops::BufferKind::Temp || live[b].first < 0 || place[b] != static_cast<BufferId>(b)) continue;
    const int64_t bytes = std::max<int64_t>(buffer.numel, 1) * dtype_size(buffer.dtype);
    order.push_back({static_cast<BufferId>(b), (bytes + 63) / 64 * 64});
  }
  // Largest first, each at the lowest offset free over its whole life.
  std::stable_sort(order.begin(), order.end(), [](const Block& a, const Block& b) { return a.bytes > b.bytes; });
  struct Placed {
    int64_t begin, end;
    std::pair<int, int> live;
  };
  std::vector<Placed> placed;  // by where they begin
  for (const Block& x : order) {
    const auto [first, last] = live[x.buffer];
    int64_t at = 0;
    for (const Placed& y : placed) {
      if (first > y.live.second || y.live.first > last) continue;
      if (y.begin - at >= x.bytes) break;
      at = std::max(at, y.end);
    }
    memory.offsets[x.buffer] = at;
    memory.arena_bytes = std::max(memory.arena_bytes, at + x.bytes);
    const auto behind = [](const Placed& y, int64_t begin) { return y.begin <= begin; };
    placed.insert(std::lower_bound(placed.begin(), placed.end(), at, behind), {at, at + x.bytes, {first, last}});
  }
  for (size_t b = 0; b < place.size(); ++b) memory.offsets[b] = memory.offsets[place[b]];
  return memory;
}

std::string print(const Plan& plan) {
  std::string out;
  for (const Step& s : plan.steps) {
    if (!s.is_kernel) out += "extern " + plan.externs[s.index].name + "\n";
    const int index = s.kernel();
    if (index < 0) continue;
    const Kernel& k = plan.kernels[index];
    out += std::string(s.is_kernel ? "kernel " : "epilogue ") + (k.vectorize_outer ? "columns" : "rows");
    for (const KernelArg& a : k.args)
      out += " " + plan.buffers[a.buffer].name + (a.written ? a.read ? ":rw" : ":w" : ":r") +
             (a.place >= 0 ? "@" + plan.buffers[a.place].name : "");
    for (int64_t extent : k.segments) out += " segment:" + std::to_string(extent);
    out += "\n" + loops::print(k.nest, plan.buffers);
  }
  return out;
}

}  // namespace kiln::schedule
