#include "runtime/aten_artifact.h"

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"
#include "runtime/steps.h"

namespace kiln::runtime {

std::shared_ptr<Artifact> aten_artifact(const graph::Graph& g) {
  static const graph::Op kConstant("kiln::tensor_constant");
  Plan plan;
  plan.name = g.name;
  std::unordered_map<graph::Value, Slot> slots;
  auto slot_of = [&](graph::Value v) { return slots.at(v); };
  for (const graph::Node* in : g.inputs()) {
    const Slot s = plan.add_slot({SlotInfo::Kind::Input, in->name, in->results.at(0)});
    plan.inputs.push_back(s);
    slots[{const_cast<graph::Node*>(in), 0}] = s;
  }
  std::unordered_map<graph::Value, int> uses;
  auto use = [&](graph::Value v) {
    if (v) ++uses[v];
  };
  for (const auto& n : g.nodes())
    for (const auto& a : n->args) graph::for_each_value(a, use);
  for (const auto& a : g.outputs()) graph::for_each_value(a, use);
  for (const auto& m : g.mutations()) use(m.value);

  for (const auto& n : g.nodes()) {
    if (n->kind == graph::NodeKind::Placeholder) continue;
    if (n->op == kConstant) {
      SlotInfo info{SlotInfo::Kind::Constant, n->name, n->results.at(0)};
      info.constant = aten::constant_tensor(n->args);
      slots[n->out()] = plan.add_slot(std::move(info));
      continue;
    }
    std::vector<Slot> results;
    for (uint32_t i = 0; i < n->results.size(); ++i) {
      if (!uses.count(n->out(i))) {
        results.push_back(kNoSlot);
        continue;
      }
      const std::string name = n->results.size() > 1 ? n->name + "." + std::to_string(i) : n->name;
      results.push_back(plan.add_slot({SlotInfo::Kind::Dynamic, name, n->results[i]}));
      slots[n->out(i)] = results.back();
    }
    plan.steps.push_back(std::make_unique<AtenStep>(*n, slot_of, std::move(results), plan));
  }
  std::vector<Slot> outputs;
  for (const graph::Arg& a : g.outputs()) {
    if (a.is_none() || !a.is_value() || !a.value()) {
      KILN_CHECK(a.is_none() || a.is_value(), "a functional graph returns tensors or None");
      plan.outputs.push_back(kNoSlot);
    } else {
      plan.outputs.push_back(slot_of(a.value()));
    }
  }
  for (Slot& s : plan.outputs) {
    if (s == kNoSlot) continue;
    // A constant is the plan's own, and an input's slot must keep its tensor when the output is replaced by a copy.
    if (plan.slots[s].kind == SlotInfo::Kind::Constant ||
        (plan.slots[s].kind == SlotInfo::Kind::Input && !g.mutations().empty())) {
      SlotInfo info{SlotInfo::Kind::Dynamic, plan.slots[s].name + "_out", plan.slots[s].meta};
      const Slot from = s;
      s = plan.add_slot(std::move(info));
      if (plan.slots[from].kind == SlotInfo::Kind::Constant) {
        plan.steps.push_back(std::make_unique<AllocateStep>(std::vector<Slot>{s}, plan));
        plan.steps.push_back(std::make_unique<CopyStep>(s, from));
      } else {
        plan.slots[s].kind = SlotInfo::Kind::View;
        plan.slots[s].base = from;
        plan.slots[s].meta.offset = 0;
        plan.steps.push_back(std::make_unique<ViewStep>(s, plan));
      }
    }
    outputs.push_back(s);
  }
  if (g.asked) plan.steps.push_back(std::make_unique<AskStep>(outputs[*g.asked]));
  if (!g.mutations().empty()) {
    std::vector<MutateStep::Pair> pairs;
    for (const auto& m : g.mutations()) {
      pairs.push_back({slot_of(m.input), slot_of(m.value)});
      plan.add_mutated(slot_of(m.input), m.uncounted);
    }
    plan.steps.push_back(std::make_unique<MutateStep>(std::move(pairs), outputs));
    plan.first_write = plan.steps.back().get();
  }
  insert_frees(plan);
  return make_artifact(std::move(plan));
}

}  // namespace kiln::runtime
