#include "runtime/sized_program.h"

#include <algorithm>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/modes.h"
#include "aten/pch.h"
#include "aten/schema.h"
#include "aten/trace.h"
#include "base/error.h"
#include "base/log.h"

namespace kiln::runtime {

using aten::Sizes;
using graph::Node;
using graph::Value;

namespace {
const graph::Op& constant_op() {
  static const graph::Op op("kiln::tensor_constant");
  return op;
}

/// Why the call cannot be made at other sizes; empty if it can.
std::string call_refusal(const Node& n) {
  if (n.op == constant_op()) return "";
  if (n.checkpoint) return "a checkpointed call";
  const aten::OpInfo* op = n.op.name().starts_with("kiln_functional::") ? nullptr : aten::find_op(n.op);
  if (!op) return n.op.name();
  return op->kind == aten::OpKind::InPlaceView ? n.op.name() + ", which changes sizes in place" : "";
}

bool same_layout(const at::Tensor& t, const graph::TensorMeta& m) {
  return t.sizes() == at::IntArrayRef(m.sizes) && t.strides() == at::IntArrayRef(m.strides) &&
         t.storage_offset() == m.offset;
}
}  // namespace

std::string SizedProgram::refusal(const graph::Graph& traced, const Sizes& sizes) {
  if (!sizes.refused().empty()) return sizes.refused();
  std::unordered_set<const Node*> there;
  for (const auto& n : traced.nodes()) {
    there.insert(n.get());
    if (n->kind == graph::NodeKind::Placeholder) continue;
    if (std::string why = call_refusal(*n); !why.empty()) return why;
  }
  const auto is_gone = [&](const auto& asked) { return asked.value && !there.contains(asked.value.node); };
  const bool gone = std::any_of(sizes.leaves().begin(), sizes.leaves().end(), is_gone) ||
                    std::any_of(sizes.conditions().begin(), sizes.conditions().end(), is_gone);
  return gone ? "a size of what the graph does not compute" : "";
}

std::shared_ptr<const SizedProgram> SizedProgram::make(std::shared_ptr<const graph::Graph> traced, const Sizes& sizes) {
  const std::string why = refusal(*traced, sizes);
  KILN_CHECK(why.empty(), why);
  auto program = std::make_shared<SizedProgram>();
  program->graph_ = traced;
  program->conditions_ = sizes.conditions();
  program->num_leaves_ = sizes.leaves().size();
  program->sizes_ = sizes.outputs();
  std::unordered_map<Value, Slot> slots;
  std::unordered_map<const Node*, size_t> step_of;
  const auto new_slot = [&] { return static_cast<Slot>(program->num_slots_++); };
  const auto slot_of = [&](Value v) { return slots.at(v); };
  program->steps_.emplace_back();
  for (const Node* in : traced->inputs()) {
    slots[const_cast<Node*>(in)->out()] = new_slot();
    step_of[in] = 0;
  }
  for (const auto& n : traced->nodes()) {
    if (n->kind == graph::NodeKind::Placeholder) continue;
    Step step;
    step.node = n.get();
    program->autocast_ |= n->autocast != DType::Opaque;
    program->asks_inside_ |= n->returns_list;
    if (n->op == constant_op())
      step.constant = aten::constant_tensor(n->args);
    else
      step.call.emplace(*n, slot_of);
    for (uint32_t i = 0; i < n->results.size(); ++i) {
      step.results.push_back(new_slot());
      slots[n->out(i)] = step.results.back();
    }
    step_of[n.get()] = program->steps_.size();
    program->steps_.push_back(std::move(step));
  }
  const auto step_at = [&](Value v) -> Step& { return program->steps_[step_of.at(v.node)]; };
  for (const Sizes::Argument& a : sizes.arguments()) {
    const auto it = step_of.find(a.node);
    if (it != step_of.end()) program->steps_[it->second].sizes.push_back({a.arg, a.item, a.size});
  }
  std::vector<size_t> known_at(program->num_leaves_, 0);
  for (size_t i = 0; i < program->num_leaves_; ++i) {
    const Sizes::Leaf& leaf = sizes.leaves()[i];
    if (!leaf.value) {
      program->ints_.emplace_back(i, static_cast<size_t>(leaf.dim));
      continue;
    }
    step_at(leaf.value).leaves.push_back({slot_of(leaf.value), leaf.dim, static_cast<int>(i)});
    known_at[i] = step_of[leaf.value.node];
  }
  for (const Sizes::Condition& c : program->conditions_) {
    if (c.kind != Sizes::Condition::Kind::Compare) {
      step_at(c.value).checks.push_back({&c, slot_of(c.value)});
      continue;
    }
    size_t at = 0;
    symbolic::for_each_var(
        c.size, [&](const symbolic::AtomNode& v) { at = std::max(at, known_at.at(static_cast<size_t>(v.id))); });
    program->steps_[at].checks.push_back({&c, kNoSlot});
  }
  for (size_t i = 1; i < program->steps_.size(); ++i) program->asks_inside_ |= !program->steps_[i].checks.empty();
  for (const graph::Arg& a : traced->outputs()) {
    KILN_CHECK(a.is_none() || a.is_value(), "a traced graph returns tensors or None");
    program->outputs_.push_back(a.is_none() || !a.value() ? kNoSlot : slot_of(a.value()));
  }
  std::vector<size_t> last_use(program->num_slots_, 0);
  for (size_t i = 0; i < program->steps_.size(); ++i) {
    Step& step = program->steps_[i];
    if (step.call)
      step.call->for_each_slot([&](Slot s) {
        if (s != kNoSlot) last_use[s] = i;
      });
    for (Slot s : step.results) last_use[s] = std::max(last_use[s], i);
  }
  for (Slot s : program->outputs_)
    if (s != kNoSlot) last_use[s] = SIZE_MAX;
  for (size_t s = 0; s < last_use.size(); ++s)
    if (last_use[s] != SIZE_MAX) program->steps_[last_use[s]].frees.push_back(static_cast<Slot>(s));
  return program;
}

int64_t SizedProgram::value(const symbolic::Expr& e, const std::vector<int64_t>& leaves) const {
  const auto value = aten::evaluate(e, [&](size_t leaf) { return leaves[leaf]; });
  if (!value) throw SizesDiffer{};
  return *value;
}

bool SizedProgram::check(const Step& step, const std::vector<at::Tensor>& tensors, std::vector<int64_t>& leaves) const {
  for (const LeafAt& leaf : step.leaves) {
    const at::Tensor& t = tensors[leaf.slot];
    if (t.dim() <= leaf.dim) return false;
    leaves[static_cast<size_t>(leaf.leaf)] = t.size(leaf.dim);
  }
  for (const Check& one : step.checks) {
    const Sizes::Condition& c = *one.condition;
    bool holds = false;
    switch (c.kind) {
      case Sizes::Condition::Kind::Compare:
        holds = aten::holds(c.relation, value(c.size, leaves));
        break;
      case Sizes::Condition::Kind::Layout:
        holds = same_layout(tensors[one.slot], c.layout);
        break;
      case Sizes::Condition::Kind::Contiguous:
        holds = tensors[one.slot].is_contiguous() == c.contiguous;
        break;
    }
    if (!holds) return false;
  }
  return true;
}

std::vector<int64_t> SizedProgram::first_leaves(const Ints& ints) const {
  std::vector<int64_t> leaves(num_leaves_);
  for (const auto& [leaf, number] : ints_) leaves[leaf] = ints.at(number);
  return leaves;
}

bool SizedProgram::may_fit(const std::vector<at::Tensor>& inputs, const Ints& ints) const {
  std::vector<int64_t> leaves = first_leaves(ints);
  try {
    return check(steps_.front(), inputs, leaves);
  } catch (const SizesDiffer&) {
    return false;
  }
}

std::vector<at::Tensor> SizedProgram::run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes,
                                          const Tracing* tracing) const {
  KILN_CHECK(inputs.size() == graph_->inputs().size(), "the graph takes another number of inputs");
  std::vector<at::Tensor> tensors = std::move(inputs);
  tensors.resize(num_slots_);
  std::vector<int64_t> leaves = first_leaves(ints);
  std::vector<c10::IValue> stack;
  std::optional<aten::AutocastStates> autocast;
  if (autocast_) autocast.emplace();
  for (const Step& step : steps_) {
    if (step.node) {
      if (tracing) tracing->before(*step.node);
      if (autocast) autocast->set(step.node->autocast);
      const at::AutoGradMode grad_mode(step.node->grad_enabled);
      if (!step.call) {
        // A copy: the program may write to it.
        tensors[step.results[0]] = tracing ? tracing->constant(step.constant) : step.constant.clone();
      } else {
        step.call->fill(tensors, stack);
        for (size_t i = 0; i < step.sizes.size(); ++i) {
          const SizeArg& a = step.sizes[i];
          if (a.item < 0) {
            stack[a.arg] = stack[a.arg].isTensor() ? c10::IValue(aten::wrapped_number(value(a.size, leaves)))
                                                   : value(a.size, leaves);
            continue;
          }
          const bool first = i == 0 || step.sizes[i - 1].arg != a.arg;
          c10::List<int64_t> list = stack[a.arg].toIntList();
          if (first) list = list.copy();  // the template's
          list.set(static_cast<size_t>(a.item), value(a.size, leaves));
          stack[a.arg] = std::move(list);
        }
        step.call->op().callBoxed(stack);
        size_t i = 0;
        bool fewer = false;
        for_each_result(stack, [&](at::Tensor t) {
          if (i < step.results.size())
            tensors[step.results[i++]] = std::move(t);
          else
            fewer = true;
        });
        stack.clear();
        if (fewer || i != step.results.size()) throw SizesDiffer{};  // as many as a size says
      }
    }
    if (!check(step, tensors, leaves)) throw SizesDiffer{};
    for (Slot s : step.frees) tensors[s] = at::Tensor();
  }
  sizes->clear();
  for (const symbolic::Expr& e : sizes_) sizes->push_back(value(e, leaves));
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (Slot s : outputs_) outputs.push_back(s == kNoSlot ? at::Tensor() : tensors[s]);
  return outputs;
}

std::vector<at::Tensor> SizedProgram::run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes) const {
  return run(std::move(inputs), ints, sizes, nullptr);
}

bool SizedProgram::fits(const std::vector<at::Tensor>& inputs, const Ints& ints) const {
  Ints ignored;
  try {
    trace_at(inputs, ints, &ignored);
    return true;
  } catch (const SizesDiffer&) {
    return false;
  } catch (const std::exception& e) {
    // If something is wrong with the program, eager says it.
    log_artifact(Topic::recompiles, "a captured graph cannot be traced at other sizes", e.what());
    return false;
  }
}

std::shared_ptr<graph::Graph> SizedProgram::trace_at(const std::vector<at::Tensor>& inputs, const Ints& ints,
                                                     Ints* sizes) const {
  aten::Trace trace;
  trace.graph().name = graph_->name;
  std::vector<at::Tensor> fakes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Node& in = *graph_->inputs()[i];
    fakes.push_back(aten::make_fake(inputs[i]));
    Node* node = trace.graph().add_input(in.name, aten::meta_of(fakes.back()));
    node->frozen = in.frozen;
    trace.bind(fakes.back(), node->out());
  }
  const Node* now = nullptr;
  trace.stack_trace = [&] { return now ? now->stack : nullptr; };
  trace.on_node = [&](Node& n) { n.module_path = now ? now->module_path : ""; };
  const aten::Recording recording(trace);
  const Tracing tracing{[&](const Node& n) { now = &n; },
                        [&](const at::Tensor& t) { return aten::record_constant(trace, t); }};
  const std::vector<at::Tensor> outputs = run(fakes, ints, sizes, &tracing);
  for (const at::Tensor& t : outputs)
    trace.graph().outputs().push_back(t.defined() ? graph::Arg(trace.value_of(t)) : graph::Arg());
  return trace.share();
}

}  // namespace kiln::runtime
