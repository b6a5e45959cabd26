#include "schedule/epilogues.h"

#include <algorithm>

#include "schedule/nest_tools.h"

namespace kiln::schedule {
namespace {

using loops::StoreMode;

// Smaller results stay in the cache anyway.
constexpr int64_t kSmallestResult = 1 << 15;
// How far behind a library call its epilogue is looked for.
constexpr int kNearSteps = 8;

bool contains(const std::vector<BufferId>& list, BufferId b) {
  return std::find(list.begin(), list.end(), b) != list.end();
}

/// Live accesses of a buffer in a nest.
template <class F>
void for_each_access(const Nest& n, BufferId buffer, const F& f) {
  for (const Stage& s : n.stages)
    for (ValueId id : s.body)
      if (n.insts[id].buffer == buffer) f(n.insts[id]);
}

/// True if units of the nest's outer domain, in order, read `buffer` from its start to its end: a unit can run as soon
/// as the elements up to some point are there, and that point moves on in small steps.
bool reads_in_order(const Nest& n, BufferId buffer, int64_t numel) {
  bool any = false, in_order = true;
  for_each_access(n, buffer, [&](const Inst& i) {
    any = true;
    const std::optional<Affine> index = i.op == Opcode::Load ? as_affine(i.index) : std::nullopt;
    if (!index) {
      in_order = false;
      return;
    }
    const auto stride = [&](int v) {
      for (const Digit& d : index->digits)
        if (d.var == v) return d.stride;
      return int64_t{0};
    };
    int64_t later = 0;  // what the variables further in add at most
    for (size_t k = n.outer.size(); k-- > 0;) {
      const int v = n.outer[k];
      in_order &= stride(v) >= later || n.extents[v] <= 1;
      later += stride(v) * (n.extents[v] - 1);
    }
    int64_t within = 0;  // what one outer point spans
    for (const Digit& d : index->digits)
      if (std::find(n.outer.begin(), n.outer.end(), d.var) == n.outer.end())
        within += d.stride * (n.extents[d.var] - 1);
    in_order &= within <= numel / 8;
  });
  return any && in_order;
}

/// Runs whole, on any thread, at any time: nothing that may stop, and nothing whose order counts.
bool is_plain(const Kernel& k) {
  if (!k.segments.empty() || k.nest.outer.empty()) return false;
  for (const Stage& s : k.nest.stages)
    for (ValueId id : s.body) {
      const Inst& i = k.nest.insts[id];
      if (i.op == Opcode::Indirect || (i.op == Opcode::Store && i.mode != StoreMode::Assign)) return false;
      if (is_integral(i.dtype) && loops::divides(i.op)) return false;
    }
  return true;
}

/// Whether the kernel of step `at` may run when library call `call` of step `from` does.
bool may_move(const Plan& plan, size_t from, size_t at, const loops::Extern& call) {
  const std::vector<KernelArg>& args = plan.kernels[plan.steps[at].index].args;
  for (const KernelArg& a : args)
    if (a.written && (contains(call.reads, a.buffer) || contains(call.writes, a.buffer))) return false;
  for (const KernelArg& a : args)
    if (a.buffer != call.writes[0] && contains(call.writes, a.buffer)) return false;
  for (size_t s = from + 1; s < at; ++s) {
    const auto clashes = [&](BufferId b, bool written) {
      return std::any_of(args.begin(), args.end(),
                         [&](const KernelArg& a) { return a.buffer == b && (a.written || written); });
    };
    const Step& step = plan.steps[s];
    const int kernel = step.kernel();
    if (kernel >= 0)
      for (const KernelArg& a : plan.kernels[kernel].args)
        if (clashes(a.buffer, a.written)) return false;
    if (step.is_kernel) continue;
    for (BufferId b : plan.externs[step.index].reads)
      if (clashes(b, false)) return false;
    for (BufferId b : plan.externs[step.index].writes)
      if (clashes(b, true)) return false;
  }
  return true;
}

bool reads(const Kernel& k, BufferId b) {
  return std::any_of(k.args.begin(), k.args.end(), [&](const KernelArg& a) { return a.buffer == b && a.read; });
}

}  // namespace

void attach_epilogues(Plan& plan) {
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    if (plan.steps[s].is_kernel) continue;
    const loops::Extern& call = plan.externs[plan.steps[s].index];
    if (call.rows <= 0 || call.effect || plan.buffers[call.writes[0]].numel < kSmallestResult) continue;
    const BufferId result = call.writes[0];
    for (size_t at = s + 1; at < std::min(plan.steps.size(), s + 1 + kNearSteps); ++at) {
      if (!plan.steps[at].is_kernel) continue;
      const Kernel& k = plan.kernels[plan.steps[at].index];
      if (!reads(k, result)) continue;
      if (is_plain(k) && reads_in_order(k.nest, result, plan.buffers[result].numel) && may_move(plan, s, at, call)) {
        plan.steps[s].epilogue = plan.steps[at].index;
        plan.kernels[plan.steps[at].index].streamed = result;
        plan.steps.erase(plan.steps.begin() + static_cast<std::ptrdiff_t>(at));
      }
      break;
    }
  }
}

void share_places(Plan& plan) {
  const auto live = liveness(plan);
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const Step& step = plan.steps[s];
    const int kernel = step.kernel();
    if (kernel < 0) continue;
    Kernel& k = plan.kernels[kernel];
    if (!is_pointwise(k.nest) || !k.segments.empty()) continue;
    const auto is_temp = [&](BufferId b) { return plan.buffers[b].kind == loops::BufferKind::Temp; };
    // The one index of all plain accesses of a buffer.
    const auto index_of = [&](BufferId b) {
      std::optional<Expr> index;
      bool one = true;
      for_each_access(k.nest, b, [&](const Inst& i) {
        const bool plain = i.op == Opcode::Load || (i.op == Opcode::Store && i.mode == StoreMode::Assign);
        one &= plain && (!index || *index == i.index);
        index = i.index;
      });
      return one ? index : std::nullopt;
    };
    // Nothing is loaded from a place after the result is stored there.
    const auto loaded_before = [&](BufferId in, BufferId out) {
      bool stored = false, before = true;
      for (ValueId id : k.nest.stages[0].body) {
        stored |= k.nest.insts[id].buffer == out;
        before &= !(stored && k.nest.insts[id].buffer == in);
      }
      return before;
    };
    std::vector<BufferId> taken;
    for (KernelArg& out : k.args) {
      if (!out.written || out.read || !is_temp(out.buffer) || live[out.buffer].first != static_cast<int>(s)) continue;
      const std::optional<Expr> index = index_of(out.buffer);
      if (!index) continue;
      for (const KernelArg& in : k.args) {
        if (in.written || !is_temp(in.buffer) || live[in.buffer].second != static_cast<int>(s)) continue;
        if (plan.buffers[in.buffer].dtype != plan.buffers[out.buffer].dtype ||
            plan.buffers[in.buffer].numel != plan.buffers[out.buffer].numel)
          continue;
        if (!step.is_kernel && contains(plan.externs[step.index].reads, in.buffer)) continue;
        if (contains(taken, in.buffer) || index_of(in.buffer) != index || !loaded_before(in.buffer, out.buffer))
          continue;
        out.place = in.buffer;
        taken.push_back(in.buffer);
        break;
      }
    }
  }
}

}  // namespace kiln::schedule
