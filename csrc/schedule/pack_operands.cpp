#include "schedule/pack_operands.h"

#include <algorithm>
#include <map>

#include "schedule/nest_tools.h"

namespace kiln::schedule {
namespace {

// A kernel more costs as much as a few hundred reads, and what does not stay in the cache is not read faster.
constexpr int64_t kFewReads = 8, kFewPoints = 1 << 14, kMostElements = 1 << 16;

/// A read of the same elements at each of many points.
struct Operand {
  BufferId buffer;
  int64_t offset;
  std::vector<std::pair<int64_t, int>> digits;  // (stride, variable), the lane's last
  auto operator<=>(const Operand&) const = default;
};

class Packer {
 public:
  Packer(Plan& plan, Kernel& kernel) : plan_(plan), kernel_(kernel), nest_(kernel.nest) {}

  /// The kernels that are to run before this one.
  std::vector<Kernel> run() {
    for (const KernelArg& a : kernel_.args)
      if (a.written) written_.push_back(a.buffer);
    for (const Stage& s : nest_.stages)
      for (ValueId id : s.body) pack(s, nest_.insts[id]);
    if (packed_.empty()) return {};
    kernel_.args = kernel_args(nest_, plan_.buffers);
    return copies();
  }

 private:
  int lane_of(const Stage& s) const {
    if (kernel_.vectorize_outer) return nest_.outer.empty() ? -1 : nest_.outer.back();
    return s.vars.empty() ? -1 : s.vars.back();
  }

  void pack(const Stage& s, Inst& i) {
    const int lane = lane_of(s);
    if (i.op != Opcode::Load || lane < 0 || plan_.buffers[i.buffer].kind == loops::BufferKind::Scratch) return;
    if (std::find(written_.begin(), written_.end(), i.buffer) != written_.end()) return;
    const std::optional<Affine> at = as_affine(i.index);
    if (!at) return;
    Operand o{i.buffer, at->offset, {}};
    int64_t elements = 1, step = 0;
    for (const Digit& d : at->digits) {
      elements *= nest_.extents[d.var];
      if (d.var == lane) step = d.stride;
    }
    int64_t points = 1;
    for (const auto* vars : std::initializer_list<const std::vector<int>*>{&nest_.outer, &s.vars})
      for (int v : *vars) points *= nest_.extents[v];
    if (step <= 1 || elements > kMostElements || points < kFewPoints || points < elements * kFewReads) return;
    for (auto d = at->digits.rbegin(); d != at->digits.rend(); ++d)
      if (d->var != lane) o.digits.emplace_back(d->stride, d->var);
    o.digits.emplace_back(step, lane);

    const auto [found, fresh] = packed_.emplace(o, static_cast<BufferId>(plan_.buffers.size()));
    if (fresh) {
      const loops::Buffer& from = plan_.buffers[i.buffer];
      plan_.buffers.push_back(
          {from.name + "_packed_" + std::to_string(found->second), from.dtype, elements, loops::BufferKind::Temp});
    }
    i.buffer = found->second;
    i.index = place(o, [&](int v) { return nest_.var(v); });
  }

  Expr place(const Operand& o, const std::function<Expr(int)>& var) const {
    Expr at(0);
    for (const auto& [stride, v] : o.digits) at = at * nest_.extents[v] + var(v);
    return at;
  }

  /// One kernel for the operands of each combination of variables.
  std::vector<Kernel> copies() const {
    std::map<std::vector<int>, std::vector<const std::pair<const Operand, BufferId>*>> alike;
    for (const auto& p : packed_) {
      std::vector<int> vars;
      for (const auto& [stride, v] : p.first.digits) vars.push_back(v);
      alike[vars].push_back(&p);
    }
    std::vector<Kernel> kernels;
    for (const auto& [vars, operands] : alike) {
      std::vector<int64_t> extents;
      for (int v : vars) extents.push_back(nest_.extents[v]);
      loops::NestBuilder b(plan_.buffers, nest_.name + "_operands", extents);
      b.stage({});
      const auto var = [&, vars = vars](int v) {
        return b.outer()[std::find(vars.begin(), vars.end(), v) - vars.begin()];
      };
      for (const auto* p : operands) {
        Expr from(p->first.offset);
        for (const auto& [stride, v] : p->first.digits) from = from + var(v) * stride;
        b.store(p->second, place(p->first, var), b.load(p->first.buffer, from));
      }
      Kernel k;
      k.nest = b.finish();
      k.args = kernel_args(k.nest, plan_.buffers);
      kernels.push_back(std::move(k));
    }
    return kernels;
  }

  Plan& plan_;
  Kernel& kernel_;
  Nest& nest_;
  std::vector<BufferId> written_;
  std::map<Operand, BufferId> packed_;
};

}  // namespace

void pack_operands(Plan& plan) {
  std::vector<Step> steps;
  for (const Step& step : plan.steps) {
    if (step.is_kernel && plan.kernels[step.index].segments.empty()) {
      std::vector<Kernel> before = Packer(plan, plan.kernels[step.index]).run();
      for (Kernel& k : before) {
        steps.push_back({true, static_cast<int>(plan.kernels.size())});
        plan.kernels.push_back(std::move(k));
      }
    }
    steps.push_back(step);
  }
  plan.steps = std::move(steps);
}

}  // namespace kiln::schedule
