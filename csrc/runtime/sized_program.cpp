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
#include "joint/marks.h"
#include "runtime/compiled_graph.h"

namespace kiln::runtime {

using aten::Sizes;
using graph::Node;
using graph::Value;

namespace {
const graph::Op& constant_op() {
  static const graph::Op op("kiln::tensor_constant");
  return op;
}

bool is_for_autograd(const graph::Op& op) { return joint::is_autograd_call(op) || joint::is_mark(op); }

/// Why the call cannot be made at other sizes; empty if it can.
std::string call_refusal(const Node& n) {
  if (n.op == constant_op() || is_for_autograd(n.op)) return "";
  const aten::OpInfo* op = n.op.name().starts_with("kiln_functional::") ? nullptr : aten::find_op(n.op);
  if (!op) return n.op.name();
  return op->kind == aten::OpKind::InPlaceView ? n.op.name() + ", which changes sizes in place" : "";
}

std::vector<at::Tensor> autograd_call_on_fakes(const Node& n, const joint::TensorOf& tensor_of,
                                               joint::MarksOnFakes& marks) {
  const aten::RecordingPaused no_recording;
  const aten::FakeModeGuard factories_too;
  const aten::ShapesOnly shapes;
  std::vector<at::Tensor> results = marks.takes(n) ? marks.make(n, tensor_of) : joint::make_autograd_call(n, tensor_of);
  for (const at::Tensor& t : results)
    if (c10::IValue v(t); t.defined()) aten::restore_devices(c10::ArrayRef<c10::IValue>(&v, 1));
  return results;
}

/// The same, recorded.
std::vector<at::Tensor> record_autograd_call(aten::Trace& trace, const Node& n, const joint::TensorOf& tensor_of,
                                             joint::MarksOnFakes& marks) {
  std::vector<at::Tensor> results = autograd_call_on_fakes(n, tensor_of, marks);
  std::vector<graph::Arg> args = n.args;
  for (graph::Arg& a : args)
    graph::for_each_value(a, [&](Value& v) {
      if (v) v = trace.value_of(tensor_of(graph::Arg(v)));
    });
  Node* made = trace.record(n.op, std::move(args), results, n.name);
  made->returns_list = n.returns_list;
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined()) trace.rebind(results[i], made->out(static_cast<uint32_t>(i)));
  return results;
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
  bool gone = std::any_of(sizes.conditions().begin(), sizes.conditions().end(), is_gone);
  const std::vector<bool> used = sizes.used_leaves();
  for (size_t i = 0; i < used.size(); ++i) gone |= used[i] && is_gone(sizes.leaves()[i]);
  return gone ? "a size of what the graph does not compute" : "";
}

bool SizedProgram::runs(const graph::Graph& traced) {
  return std::none_of(traced.nodes().begin(), traced.nodes().end(),
                      [](const auto& n) { return n->checkpoint || joint::is_mark(n->op); });
}

std::shared_ptr<const SizedProgram> SizedProgram::make(std::shared_ptr<const graph::Graph> traced, const Sizes& sizes,
                                                       const std::function<bool(const Node&)>& changes) {
  const std::string why = refusal(*traced, sizes);
  KILN_CHECK(why.empty(), why);
  auto program = std::make_shared<SizedProgram>();
  program->graph_ = traced;
  program->runs_ = runs(*traced);
  program->conditions_ = sizes.conditions();
  program->num_leaves_ = sizes.leaves().size();
  program->sizes_ = sizes.outputs();
  std::unordered_map<Value, Slot>& slots = program->slots_;
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
    if (n->op == constant_op())
      step.constant = aten::constant_tensor(n->args);
    else if (!is_for_autograd(n->op))
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
    if (it != step_of.end()) program->steps_[it->second].sizes.push_back({a.arg, a.item, a.number});
  }
  std::vector<size_t> known_at(program->num_leaves_, 0);
  const auto step_that_knows = [&](const symbolic::Number& n) {
    size_t at = 0;
    symbolic::for_each_var(
        n, [&](const symbolic::AtomNode& v) { at = std::max(at, known_at.at(static_cast<size_t>(v.id))); });
    return at;
  };
  const std::vector<bool> used = sizes.used_leaves();
  for (size_t i = 0; i < program->num_leaves_; ++i) {
    const Sizes::Leaf& leaf = sizes.leaves()[i];
    if (!used[i]) continue;
    if (leaf.is_given()) {
      program->ints_.emplace_back(i, static_cast<size_t>(leaf.dim));
      continue;
    }
    if (leaf.of) {
      known_at[i] = step_that_knows(*leaf.of);
      program->steps_[known_at[i]].computed.emplace_back(i, *leaf.of);
      continue;
    }
    step_at(leaf.value).leaves.push_back({slot_of(leaf.value), leaf.dim, static_cast<int>(i)});
    known_at[i] = step_of[leaf.value.node];
  }
  for (const Sizes::Condition& c : program->conditions_) {
    if (c.kind == Sizes::Condition::Kind::Compare)
      program->steps_[step_that_knows(c.size)].checks.push_back({&c, kNoSlot});
    else
      step_at(c.value).checks.push_back({&c, slot_of(c.value)});
  }
  for (size_t i = 1; i < program->steps_.size(); ++i) {
    const Step& step = program->steps_[i];
    // That a call takes the sizes is asked, too: where it does not, the program may go on otherwise.
    bool open = !step.sizes.empty();
    for (const graph::Arg& a : step.node->args)
      graph::for_each_value(a, [&](Value v) { open |= sizes.is_open(v) && v.meta().dim() > 0; });
    if (!step.checks.empty() || !step.computed.empty() || step.node->returns_list || (step.call && open))
      program->last_asked_ = i;
  }
  const auto changing = [&](const Step& step) { return step.node && (!changes || changes(*step.node)); };
  const auto change = std::find_if(program->steps_.begin(), program->steps_.end(), changing);
  if (change != program->steps_.end()) program->first_change_ = static_cast<size_t>(change - program->steps_.begin());
  for (const symbolic::Number& n : program->sizes_)
    program->last_asked_ = std::max(program->last_asked_, step_that_knows(n));
  for (const graph::Arg& a : traced->outputs()) {
    KILN_CHECK(a.is_none() || a.is_value(), "a traced graph returns tensors or None");
    program->outputs_.push_back(a.is_none() || !a.value() ? kNoSlot : slot_of(a.value()));
  }
  std::vector<size_t> last_use(program->num_slots_, 0);
  for (size_t i = 0; i < program->steps_.size(); ++i) {
    Step& step = program->steps_[i];
    if (step.node)
      for (const graph::Arg& a : step.node->args)
        graph::for_each_value(a, [&](Value v) {
          if (v) last_use[slot_of(v)] = i;
        });
    for (Slot s : step.results) last_use[s] = std::max(last_use[s], i);
  }
  for (Slot s : program->outputs_)
    if (s != kNoSlot) last_use[s] = SIZE_MAX;
  for (size_t s = 0; s < last_use.size(); ++s)
    if (last_use[s] != SIZE_MAX) program->steps_[last_use[s]].frees.push_back(static_cast<Slot>(s));
  return program;
}

namespace {
template <class F, class N>
auto value_or_differ(F evaluate, const N& n, const std::vector<int64_t>& leaves) {
  const auto value = evaluate(n, [&](size_t leaf) { return leaves[leaf]; });
  if (!value) throw SizesDiffer{};
  return *value;
}
}  // namespace

int64_t SizedProgram::value(const symbolic::Expr& e, const std::vector<int64_t>& leaves) {
  return value_or_differ([](const auto&... x) { return aten::evaluate(x...); }, e, leaves);
}
double SizedProgram::value(const symbolic::Real& r, const std::vector<int64_t>& leaves) {
  return value_or_differ([](const auto&... x) { return aten::evaluate(x...); }, r, leaves);
}
int64_t SizedProgram::bits(const symbolic::Number& n, const std::vector<int64_t>& leaves) {
  return value_or_differ(&aten::bits_of, n, leaves);
}

bool SizedProgram::check(const Step& step, const std::vector<at::Tensor>& tensors, std::vector<int64_t>& leaves) const {
  for (const LeafAt& leaf : step.leaves) {
    const at::Tensor& t = tensors[leaf.slot];
    if (t.dim() <= leaf.dim) return false;
    leaves[static_cast<size_t>(leaf.leaf)] = t.size(leaf.dim);
  }
  for (const auto& [leaf, of] : step.computed) leaves[leaf] = value_or_differ(&aten::evaluate_whole, of, leaves);
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

SizedProgram::State SizedProgram::run_steps(std::vector<at::Tensor> inputs, const Ints& ints, size_t end,
                                            const OnFakes* fakes, size_t& at) const {
  KILN_CHECK(inputs.size() == graph_->inputs().size(), "the graph takes another number of inputs");
  State state{std::move(inputs), first_leaves(ints)};
  std::vector<at::Tensor>& tensors = state.tensors;
  std::vector<int64_t>& leaves = state.leaves;
  tensors.resize(num_slots_);
  std::vector<c10::IValue> stack;
  std::optional<aten::AutocastStates> autocast;
  if (autocast_) autocast.emplace();
  for (at = 0; at < end; ++at) {
    const Step& step = steps_[at];
    if (step.node) {
      if (fakes) fakes->before(*step.node);
      if (autocast) autocast->set(step.node->autocast);
      const at::AutoGradMode grad_mode(step.node->grad_enabled);
      if (step.constant.defined()) {
        // A copy: the program may write to it.
        tensors[step.results[0]] = fakes ? fakes->constant(step.constant) : step.constant.clone();
      } else if (!step.call) {
        const auto tensor_of = [&](const graph::Arg& a) {
          return a.is_none() || !a.value() ? at::Tensor() : tensors[slots_.at(a.value())];
        };
        const std::vector<at::Tensor> results =
            fakes ? fakes->autograd_call(*step.node, tensor_of) : joint::make_autograd_call(*step.node, tensor_of);
        for (size_t i = 0; i < results.size(); ++i) tensors[step.results.at(i)] = results[i];
      } else {
        step.call->fill(tensors, stack);
        for (size_t i = 0; i < step.sizes.size(); ++i) {
          const SizeArg& a = step.sizes[i];
          if (a.item < 0) {
            stack[a.arg] = std::visit(
                [&](const auto& n) {
                  const auto now = value(n, leaves);
                  return stack[a.arg].isTensor() ? c10::IValue(aten::wrapped_number(now)) : c10::IValue(now);
                },
                a.number);
            continue;
          }
          const bool first = i == 0 || step.sizes[i - 1].arg != a.arg;
          c10::List<int64_t> list = stack[a.arg].toIntList();
          if (first) list = list.copy();  // the template's
          list.set(static_cast<size_t>(a.item), value(std::get<symbolic::Expr>(a.number), leaves));
          stack[a.arg] = std::move(list);
        }
        if (fakes)
          fakes->call(step.call->op(), stack);
        else
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
  return state;
}

std::vector<at::Tensor> SizedProgram::results(const State& state, Ints* sizes) const {
  sizes->clear();
  for (const symbolic::Number& n : sizes_) sizes->push_back(bits(n, state.leaves));
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (Slot s : outputs_) outputs.push_back(s == kNoSlot ? at::Tensor() : state.tensors[s]);
  return outputs;
}

std::vector<at::Tensor> SizedProgram::run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes) const {
  KILN_CHECK(runs_, "a program that only a joint trace can run");
  size_t at = 0;
  try {
    return results(run_steps(std::move(inputs), ints, steps_.size(), nullptr, at), sizes);
  } catch (...) {
    raised_before_writes() = at < first_change_;
    throw;
  }
}

bool SizedProgram::fits(const std::vector<at::Tensor>& inputs, const Ints& ints) const {
  joint::MarksOnFakes marks;
  const OnFakes on_fakes{
      [](const Node&) {}, [](const at::Tensor& t) { return aten::make_fake(t); },
      [&](const Node& n, const joint::TensorOf& tensor_of) { return autograd_call_on_fakes(n, tensor_of, marks); },
      [](const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
        aten::restore_devices(stack);
        aten::call_on_fakes(op, stack);
        aten::restore_devices(stack);
      }};
  std::vector<at::Tensor> fakes;
  const aten::FakeModeGuard factories_too;
  try {
    for (const at::Tensor& t : inputs) fakes.push_back(aten::make_fake(t));
    size_t at = 0;
    const State state = run_steps(std::move(fakes), ints, last_asked_ + 1, &on_fakes, at);
    for (const symbolic::Number& n : sizes_) bits(n, state.leaves);
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
  trace.on_node = [&](Node& n) {
    n.module_path = now ? now->module_path : "";
    n.checkpoint = now ? now->checkpoint : 0;
  };
  const aten::Recording recording(trace);
  joint::MarksOnFakes marks;
  const OnFakes on_fakes{
      [&](const Node& n) { now = &n; }, [&](const at::Tensor& t) { return aten::record_constant(trace, t); },
      [&](const Node& n, const joint::TensorOf& tensor_of) { return record_autograd_call(trace, n, tensor_of, marks); },
      [](const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) { op.callBoxed(stack); }};
  size_t at = 0;
  const std::vector<at::Tensor> outputs = results(run_steps(fakes, ints, steps_.size(), &on_fakes, at), sizes);
  for (const at::Tensor& t : outputs)
    trace.graph().outputs().push_back(t.defined() ? graph::Arg(trace.value_of(t)) : graph::Arg());
  return trace.share();
}

}  // namespace kiln::runtime
