#include <deque>
#include <set>
#include <utility>

#include "base/error.h"
#include "schedule/groups.h"

// Horizontal fusion: the same pointwise work on many tensors as one kernel. An optimizer's step over two hundred
// parameters is then one call and one piece of code, whatever the parameters' sizes.
namespace kiln::schedule {
namespace {

constexpr size_t kMostSegments = 512, kMostHeads = 64;
// Kernels that fill more than this much of the arena stay near their readers: both the memory and the caches.
constexpr int64_t kLargeBytes = 1 << 20;
constexpr int kNearSteps = 16;

/// What two kernels must have in common to be segments of one; empty if the kernel cannot be one.
std::string segment_key(const Kernel& k, const std::vector<Buffer>& buffers) {
  const Nest& n = k.nest;
  if (!is_pointwise(n) || n.outer.size() > 1 || !k.segments.empty() || n.indirect_vars > 0 || n.after_errors) return "";
  std::string head;
  for (const KernelArg& a : k.args)
    head += std::string(dtype_name(buffers[a.buffer].dtype)) + (a.read ? "r" : "") + (a.written ? "w " : " ");
  for (ValueId id : n.stages[0].body) {
    const Inst& i = n.insts[id];
    if (i.op == Opcode::IndexValue || i.op == Opcode::InRange || i.op == Opcode::MaskedLoad) return "";
    if (i.op == Opcode::Store && (i.args.size() > 1 || i.mode != loops::StoreMode::Assign)) return "";
    // Contiguous from the start, or one element for all.
    if (i.buffer >= 0 && !(i.index.is_constant() || (!n.outer.empty() && i.index == n.var(n.outer[0])))) return "";
    if (is_integral(i.dtype) && loops::divides(i.op)) return "";
  }
  Nest anonymous = n;
  anonymous.name.clear();
  std::fill(anonymous.extents.begin(), anonymous.extents.end(), 0);
  return head + loops::print(anonymous, [&](BufferId b) {
           const auto is_it = [b](const KernelArg& a) { return a.buffer == b; };
           return "b" + std::to_string(std::find_if(k.args.begin(), k.args.end(), is_it) - k.args.begin());
         });
}

/// Bytes of the arena that a kernel writes. A segment is computed when the first one is, so they are held for longer.
int64_t arena_bytes(const Kernel& k, const std::vector<Buffer>& buffers) {
  int64_t bytes = 0;
  for (const KernelArg& a : k.args)
    if (a.written && buffers[a.buffer].kind == loops::BufferKind::Temp)
      bytes += buffers[a.buffer].numel * dtype_size(buffers[a.buffer].dtype);
  return bytes;
}

struct StepTouches {
  std::vector<BufferId> reads, writes;
};

}  // namespace

void join_segments(Plan& plan) {
  const int count = static_cast<int>(plan.steps.size());
  std::unordered_map<std::string, std::vector<int>> by_key;
  std::vector<std::string> order;  // of first appearance: the result must not depend on hashing
  for (int s = 0; s < count; ++s) {
    if (!plan.steps[s].is_kernel) continue;
    const std::string key = segment_key(plan.kernels[plan.steps[s].index], plan.buffers);
    if (key.empty()) continue;
    if (by_key[key].empty()) order.push_back(key);
    by_key[key].push_back(s);
  }
  std::erase_if(order, [&](const std::string& k) { return by_key[k].size() < 2; });
  if (order.empty()) return;

  // Dependencies among steps; the plan's order is one that keeps them.
  std::vector<std::set<int>> succ(count), pred(count);
  const auto edge = [&](int a, int b) {
    if (a < 0 || a == b) return;
    succ[a].insert(b);
    pred[b].insert(a);
  };
  std::unordered_map<BufferId, int> writer;
  std::unordered_map<BufferId, std::vector<int>> readers;
  int effect = -1;
  for (int s = 0; s < count; ++s) {
    StepTouches t;
    if (plan.steps[s].is_kernel) {
      for (const KernelArg& a : plan.kernels[plan.steps[s].index].args) {
        if (a.read) t.reads.push_back(a.buffer);
        if (a.written) t.writes.push_back(a.buffer);
      }
    } else {
      const loops::Extern& e = plan.externs[plan.steps[s].index];
      t.reads = e.reads;
      t.writes = e.writes;
      if (e.effect) edge(effect, s), effect = s;
    }
    for (BufferId b : t.reads) {
      if (const auto it = writer.find(b); it != writer.end()) edge(it->second, s);
      readers[b].push_back(s);
    }
    for (BufferId b : t.writes) {
      if (const auto it = writer.find(b); it != writer.end()) edge(it->second, s);
      for (int r : readers[b]) edge(r, s);
      readers[b].clear();
      writer[b] = s;
    }
  }
  std::vector<bool> alive(count, true);
  // Marks what depends on a step, or what it depends on: once for all kernels that might take it as a segment.
  std::vector<int> marked(count, -1);
  const auto mark = [&](int from, const std::vector<std::set<int>>& edges) {
    std::vector<int> work{from};
    while (!work.empty()) {
      const int s = work.back();
      work.pop_back();
      for (int next : edges[s])
        if (std::exchange(marked[next], from) != from) work.push_back(next);
    }
  };
  for (const std::string& key : order) {
    std::deque<int> heads;  // kernels that take segments: the last ones, of a loop that was unrolled
    for (int s : by_key[key]) {
      bool joined = false;
      if (!heads.empty()) {
        mark(s, succ);
        mark(s, pred);
      }
      for (int h : heads) {
        Kernel& head = plan.kernels[plan.steps[h].index];
        if (head.segments.size() >= kMostSegments || marked[h] == s) continue;
        Kernel& one = plan.kernels[plan.steps[s].index];
        if (s - h > kNearSteps && arena_bytes(one, plan.buffers) > kLargeBytes) continue;
        if (head.segments.empty()) head.segments.push_back(head.nest.outer_size());
        head.segments.push_back(one.nest.outer_size());
        head.args.insert(head.args.end(), one.args.begin(), one.args.end());
        alive[s] = false;
        for (int x : succ[s]) pred[x].erase(s), edge(h, x);
        for (int x : pred[s]) succ[x].erase(s), edge(x, h);
        succ[s].clear();
        pred[s].clear();
        joined = true;
        break;
      }
      if (joined) continue;
      heads.push_back(s);
      if (heads.size() > kMostHeads) heads.pop_front();
    }
  }
  // Kernels and steps anew, each as early as its position and its dependencies allow.
  std::vector<int> waiting(count);
  std::set<int> ready;
  for (int s = 0; s < count; ++s) {
    if (!alive[s]) continue;
    waiting[s] = static_cast<int>(pred[s].size());
    if (waiting[s] == 0) ready.insert(s);
  }
  std::vector<Step> steps;
  std::vector<Kernel> kernels;
  while (!ready.empty()) {
    const int s = *ready.begin();
    ready.erase(ready.begin());
    Step step = plan.steps[s];
    if (step.is_kernel) {
      kernels.push_back(std::move(plan.kernels[step.index]));
      step.index = static_cast<int>(kernels.size()) - 1;
    }
    steps.push_back(step);
    for (int x : succ[s])
      if (--waiting[x] == 0) ready.insert(x);
  }
  KILN_CHECK(steps.size() == static_cast<size_t>(std::count(alive.begin(), alive.end(), true)),
             "joining kernels made a cycle");
  plan.steps = std::move(steps);
  plan.kernels = std::move(kernels);
}

}  // namespace kiln::schedule
