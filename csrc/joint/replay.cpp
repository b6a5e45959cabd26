#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <deque>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/modes.h"
#include "aten/pch.h"
#include "aten/schema.h"
#include "base/error.h"
#include "joint/autograd_calls.h"
#include "joint/joint.h"
#include "joint/state.h"

namespace kiln::joint {

using graph::Arg;
using graph::Node;
using graph::Value;
using torch::autograd::variable_list;

namespace {

at::Tensor or_undefined(const std::unordered_map<Value, at::Tensor>& env, const Arg& a) {
  if (a.is_none() || !a.value()) return {};
  auto it = env.find(a.value());
  KILN_CHECK(it != env.end(), "the traced graph uses a value before its definition");
  return it->second;
}

bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

class Replay {
 public:
  explicit Replay(std::shared_ptr<const graph::Graph> g) : graph_(std::move(g)) {}
  void define(Value v, at::Tensor t) { env_[v] = std::move(t); }
  at::Tensor get(const Arg& a) const { return or_undefined(env_, a); }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, bool differentiable) {
    KILN_CHECK(inputs.size() == graph_->inputs().size(), "the traced graph takes another number of inputs");
    for (size_t i = 0; i < inputs.size(); ++i) env_[graph_->inputs()[i]->out()] = inputs[i];
    std::vector<Node*> nodes;
    for (const auto& node : graph_->nodes())
      if (node->kind != graph::NodeKind::Placeholder) nodes.push_back(node.get());
    run_nodes(nodes, differentiable);
    std::vector<at::Tensor> outputs;
    for (const Arg& a : graph_->outputs()) {
      KILN_CHECK(a.is_none() || a.is_value(), "a traced graph returns tensors or None");
      outputs.push_back(or_undefined(env_, a));
    }
    return outputs;
  }

  ~Replay() {
    for (auto& [number, hook] : hooks_) *hook.active = false;
  }
  Replay(const Replay&) = delete;

  /// Runs the nodes, in their grad mode where that is allowed at all.
  void run_nodes(const std::vector<Node*>& nodes, bool differentiable = true) {
    static const graph::Op kCustomFunction("kiln::custom_function"), kHookCall("kiln::gradient_hook");
    const aten::AutocastStates autocast;
    for (size_t i = 0; i < nodes.size(); ++i) {
      autocast.set(nodes[i]->autocast);
      TraceState::note_origin(*nodes[i]);
      at::AutoGradMode grad_mode(nodes[i]->grad_enabled && differentiable);
      if (nodes[i]->op == kCustomFunction)
        i = custom_function(nodes, i);
      else if (nodes[i]->op == kHookCall)
        i = hook_call(nodes, i);
      else
        step(*nodes[i]);
    }
  }

 private:
  /// Gives the outputs of the function that begins at nodes[begin] their history; returns the index of its end.
  size_t custom_function(const std::vector<Node*>& nodes, size_t begin);
  /// Keeps the call of a hook that begins at nodes[begin] for the next backward; returns the index of its end.
  size_t hook_call(const std::vector<Node*>& nodes, size_t begin);
  at::Tensor run_hook(int64_t number, const at::Tensor& grad);

  variable_list list(const Arg& a) const {
    return tensors_of(a, [&](const Arg& item) { return get(item); });
  }

  void set(Node& node, uint32_t i, at::Tensor t) { env_[node.out(i)] = std::move(t); }

  void step(Node& node) {
    static const graph::Op kConstant("kiln::tensor_constant"), kHook("kiln::register_hook"),
        kAccumulatedHook("kiln::register_accumulated_hook"), kUnhook("kiln::remove_hook");
    if (is_autograd_call(node.op)) {
      const variable_list results = make_autograd_call(node, [&](const Arg& a) { return get(a); });
      if (differentiates(node.op) && !hook_calls_.empty()) throw Unsupported("a hook on a gradient does not run");
      for (uint32_t i = 0; i < results.size(); ++i) set(node, i, results[i]);
    } else if (node.op == kHook || node.op == kAccumulatedHook) {
      const at::Tensor t = or_undefined(env_, node.arg(0));
      const int64_t number = node.arg(1).to_int();
      const auto active = std::make_shared<bool>(true);
      // It stays with the tensor, which may outlive this.
      const auto run = [this, number, active](const at::Tensor& g) {
        return *active ? run_hook(number, g) : at::Tensor();
      };
      if (node.op == kHook)
        t.register_hook(run);
      else
        aten::after_accumulation(t, [run] { run({}); });
      TraceState::note_hook(t.grad_fn().get(), true);
      hooks_.emplace(number, Hook{t.grad_fn(), active});
    } else if (node.op == kUnhook) {
      const auto hook = hooks_.find(node.arg(0).to_int());
      KILN_CHECK(hook != hooks_.end(), "a hook is removed that was not registered");
      *hook->second.active = false;
      TraceState::note_hook(hook->second.node.get(), false);
      hooks_.erase(hook);
    } else if (node.op == kConstant) {
      set(node, 0, TraceState::constant(node.args, node.results.at(0)));
    } else {
      call(node);
    }
  }

  /// `t` has changed its sizes or strides. Autograd makes its views' histories anew, of a geometry that the functional
  /// tensor below does not have.
  void transform(const Node& node, const at::Tensor& t) {
    transformed_.insert(t.unsafeGetTensorImpl());
    if (!t.requires_grad()) return;
    for (const auto& [v, other] : env_)
      if (other.defined() && other.is_view() && other._base().is_same(t))
        throw Unsupported(node.op.name() + " of a tensor that has views, with gradients");
  }

  /// Whether the functional tensor `t` has another layout than the tensor that it stands for: an in-place operator's
  /// functional form closes the gaps that the tensor has.
  bool lost_layout(const at::Tensor& t, const graph::TensorMeta& m) const {
    return t.defined() && at::functionalization::impl::isFunctionalTensor(t) && t.numel() > 0 &&
           t.strides() != at::IntArrayRef(m.strides) && !transformed_.contains(t.unsafeGetTensorImpl());
  }

  static bool is_base(const at::Tensor& t) {
    return t.defined() && at::functionalization::impl::isFunctionalTensor(t) &&
           at::functionalization::impl::isBaseTensor(t);
  }

  /// Gives what was written the layout that it had: some functional forms (masked_fill, scatter) give a row-major
  /// result for any layout, and those of out= variants the layout of their arguments. `strides` are those of `t`
  /// before.
  void restore_layout(const at::Tensor& t, const std::vector<int64_t>& strides) const {
    if (t.strides() == at::IntArrayRef(strides) || t.dim() != static_cast<int64_t>(strides.size())) return;
    if (is_base(t)) return TraceState::lay_out(t, strides);
    for (const auto& [v, base] : env_) {
      if (!is_base(base) || base.storage().unsafeGetStorageImpl() != t.storage().unsafeGetStorageImpl()) continue;
      if (!base.is_non_overlapping_and_dense()) return;
      const std::vector<int64_t> before = base.strides().vec();  // it learns of the write below
      at::functionalization::impl::sync(base);
      if (base.strides() != at::IntArrayRef(before)) TraceState::lay_out(base, before);
      return;
    }
  }

  /// Whether a reshape (contiguous(), ...) is a view depends on the layout: makes the results of `node`, whose
  /// arguments have lost theirs, share memory with them just where they do with the real layouts.
  void share_as_before(const Node& node, const aten::OpInfo& op, std::vector<at::Tensor>& results) {
    static const graph::Op kAsStrided("aten::as_strided"), kAsStridedInPlace("aten::as_strided_");
    if (node.op == kAsStrided || node.op == kAsStridedInPlace)
      throw Unsupported(node.op.name() + " of a tensor with gaps that was written");
    std::vector<at::Tensor> real, traced, given;
    {
      const aten::FakeObserverGuard unseen(nullptr);
      const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::Functionalize);
      torch::jit::Stack stack = aten::to_stack(op.schema(), node.args, [&](Value v) {
        traced.push_back(env_.at(v));
        return given.emplace_back(aten::make_fake(v.meta()));
      });
      aten::call_on_fakes(op.handle, stack);
      real = aten::flatten_tensors(stack);
    }
    KILN_CHECK(real.size() == results.size(), "an operator gives another number of results");
    for (size_t i = 0; i < results.size(); ++i) {
      bool shares = false, shared = false;
      for (size_t k = 0; k < given.size(); ++k) {
        shared |= shares_storage(real[i], given[k]);
        shares |= shares_storage(results[i], traced[k]);
      }
      if (shared && !shares) throw Unsupported("a view of a tensor with gaps that was written");
      if (shares && !shared) results[i] = results[i].clone();
    }
  }

  void call(Node& node) {
    const aten::OpInfo* op = aten::find_op(node.op);
    if (!op) throw Unsupported("the operator " + node.op.name() + " has no meaning to the dispatcher");
    bool lost = false;
    torch::jit::Stack stack = aten::to_stack(op->schema(), node.args, [&](Value v) {
      auto it = env_.find(v);
      KILN_CHECK(it != env_.end(), "the traced graph uses a value before its definition");
      lost |= lost_layout(it->second, v.meta());
      return it->second;
    });
    std::vector<std::pair<at::Tensor, std::vector<int64_t>>> written;  // with the strides
    if (op->kind == aten::OpKind::InPlace || op->kind == aten::OpKind::Out)
      for (int i : op->written_args) {
        const c10::IValue& v = stack.at(static_cast<size_t>(i));
        if (!v.isTensor() || !v.toTensor().defined()) continue;
        const at::Tensor& t = v.toTensor();
        // The gaps of a base are closed: see share_as_before.
        const bool open = is_base(t) && !t.is_non_overlapping_and_dense();
        if (at::functionalization::impl::isFunctionalTensor(t) && !open) written.emplace_back(t, t.strides().vec());
      }
    // Operators on lists run one that counts its writes for each of their tensors; here they run whole.
    std::vector<at::Tensor> counted;
    if (op->kind == aten::OpKind::InPlace && node.op.name().starts_with("aten::_foreach_"))
      for (int i : op->written_args)
        aten::for_each_tensor(stack.at(static_cast<size_t>(i)), [&](const at::Tensor& t) { counted.push_back(t); });
    aten::call_on_fakes(op->handle, stack);
    for (const auto& [t, strides] : written) restore_layout(t, strides);
    for (const at::Tensor& t : counted)
      if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    std::vector<at::Tensor> results = aten::flatten_tensors(stack);
    if (op->kind == aten::OpKind::InPlaceView && !results.empty()) transform(node, results[0]);
    if (lost && (op->kind == aten::OpKind::Functional || op->kind == aten::OpKind::View))
      share_as_before(node, *op, results);
    for (uint32_t i = 0; i < results.size(); ++i) set(node, i, results[i]);
  }

  std::shared_ptr<const graph::Graph> graph_;
  std::unordered_map<Value, at::Tensor> env_;
  struct Hook {
    c10::intrusive_ptr<torch::autograd::Node> node;  // null for a leaf's
    std::shared_ptr<bool> active;
  };
  std::unordered_map<int64_t, Hook> hooks_;  // by number
  struct HookCall {
    Node *begin, *end;
    std::vector<Node*> body;
  };
  std::deque<HookCall> hook_calls_;                         // of the next backward
  std::unordered_set<const c10::TensorImpl*> transformed_;  // by t_() and the like: no longer as their nodes say
};

/// grad_fn of a custom function's outputs: runs the nodes that its backward was captured as.
class CustomFunction : public torch::autograd::Node {
 public:
  CustomFunction(std::shared_ptr<const graph::Graph> g, const graph::Node& begin, std::vector<graph::Node*> body,
                 const graph::Node& end)
      : graph_(std::move(g)), begin_(begin), end_(end), body_(std::move(body)) {}
  std::string name() const override { return "CustomFunction"; }

  /// Keeps what the backward uses of `env`; the outputs have this grad_fn already.
  void save(const std::unordered_map<Value, at::Tensor>& env) {
    std::unordered_set<const graph::Node*> own{&begin_};
    std::unordered_set<Value> outputs, seen;
    graph::for_each_value(begin_.arg(1), [&](Value v) { outputs.insert(v); });
    const auto use = [&](Value v) {
      if (!v || own.count(v.node) || !seen.insert(v).second) return;
      saved_.emplace_back(v, torch::autograd::SavedVariable(or_undefined(env, v), outputs.count(v) > 0));
    };
    for (const graph::Node* n : body_) {
      for (const Arg& a : n->args) graph::for_each_value(a, use);
      own.insert(n);
    }
    graph::for_each_value(end_.arg(0), use);
  }

  void release_variables() override {
    for (auto& [value, variable] : saved_) variable.reset_data();
  }

  bool makes_zeros() const { return begin_.arg(2).to_bool(); }

 protected:
  variable_list apply(variable_list&& grads) override {
    const auto self = getptr();
    Replay backward(graph_);
    for (uint32_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined() && !makes_zeros())
        throw Unsupported("a custom function's backward that is given no gradient, and no zeros instead");
      backward.define({const_cast<graph::Node*>(&begin_), i},
                      grads[i].defined() ? grads[i] : input_metadata(i).zeros_like());
    }
    for (const auto& [value, variable] : saved_) backward.define(value, variable.unpack(self));
    const auto calls_autograd = [](const graph::Node* n) { return differentiates(n->op); };
    const bool differentiable = at::GradMode::is_enabled();
    backward.run_nodes(body_, differentiable || std::any_of(body_.begin(), body_.end(), calls_autograd));
    variable_list out;
    for (const Arg& a : end_.arg(0).list()) {
      at::Tensor grad = backward.get(a);
      out.push_back(grad.defined() && grad.requires_grad() && !differentiable ? grad.detach() : grad);
    }
    return out;
  }

 private:
  std::shared_ptr<const graph::Graph> graph_;  // keeps the nodes
  const graph::Node &begin_, &end_;
  std::vector<graph::Node*> body_;
  std::vector<std::pair<Value, torch::autograd::SavedVariable>> saved_;
};

/// Where the part ends that begins at nodes[begin]: at the next `op`.
size_t end_of(const std::vector<Node*>& nodes, size_t begin, const graph::Op& op) {
  const auto end = std::find_if(nodes.begin() + static_cast<long>(begin) + 1, nodes.end(),
                                [&](const Node* n) { return n->op == op; });
  KILN_CHECK(end != nodes.end(), "a traced graph has no " + op.name());
  return static_cast<size_t>(end - nodes.begin());
}

size_t Replay::custom_function(const std::vector<Node*>& nodes, size_t begin) {
  static const graph::Op kEnd("kiln::custom_function_end");
  const size_t end = end_of(nodes, begin, kEnd);
  const variable_list inputs = list(nodes[begin]->arg(0));
  auto function = c10::make_intrusive<CustomFunction>(
      graph_, *nodes[begin], std::vector<Node*>(nodes.begin() + begin + 1, nodes.begin() + end), *nodes[end]);
  function->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor& t : list(nodes[begin]->arg(1))) {
    torch::autograd::set_history(t, function);
    aten::note_custom_view(t);
  }
  function->save(env_);
  return end;
}

size_t Replay::hook_call(const std::vector<Node*>& nodes, size_t begin) {
  static const graph::Op kEnd("kiln::gradient_hook_end");
  const size_t end = end_of(nodes, begin, kEnd);
  hook_calls_.push_back({nodes[begin], nodes[end], std::vector<Node*>(nodes.begin() + begin + 1, nodes.begin() + end)});
  return end;
}

at::Tensor Replay::run_hook(int64_t number, const at::Tensor& grad) {
  if (hook_calls_.empty() || hook_calls_.front().begin->arg(0).to_int() != number)
    throw Unsupported("hooks on gradients run in another order");
  const HookCall call = std::move(hook_calls_.front());
  hook_calls_.pop_front();
  if (grad.defined()) set(*call.begin, 0, grad);
  run_nodes(call.body, at::GradMode::is_enabled());
  return get(call.end->arg(0));
}

}  // namespace

bool makes_zeros(const torch::autograd::Node& node) {
  const auto* custom = dynamic_cast<const CustomFunction*>(&node);
  return custom && custom->makes_zeros();
}

Program replay(const graph::Graph& traced, bool differentiable) {
  const std::shared_ptr<void> owned_by_the_caller;
  return replay(std::shared_ptr<const graph::Graph>(owned_by_the_caller, &traced), differentiable);
}

Program replay(std::shared_ptr<const graph::Graph> traced, bool differentiable) {
  return [traced, differentiable](const std::vector<at::Tensor>& inputs) {
    return Replay(traced).run(inputs, differentiable);
  };
}

}  // namespace kiln::joint
