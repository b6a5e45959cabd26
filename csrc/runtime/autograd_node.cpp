#include "runtime/autograd_node.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/pch.h"
#include "base/error.h"
#include "runtime/silent_edges.h"

namespace kiln::runtime {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

bool is_asked_for(torch::autograd::Node& node);

/// Whether only operators know what is in it: many gradients in one, of vmap (is_grads_batched, vectorized Jacobians),
/// a tensor of a class in Python, a sparse or a nested one, zeros without memory.
bool is_special(const at::Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kSpecial({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                          DispatchKey::Batched, DispatchKey::Python, DispatchKey::ZeroTensor,
                                          DispatchKey::Functionalize});
  return t.defined() &&
         (t.key_set().has_any(kSpecial) || t.layout() != at::kStrided || t.unsafeGetTensorImpl()->is_nested());
}

/// `t` as the backward artifact expects it: with the strides that it was compiled for.
at::Tensor as_tangent(const at::Tensor& t, const graph::TensorMeta& m) {
  TORCH_CHECK(t.sizes() == c10::IntArrayRef(m.sizes), "a gradient of size ", t.sizes(), " for an output of size ",
              c10::IntArrayRef(m.sizes));
  if (t.strides() == c10::IntArrayRef(m.strides) && t.storage_offset() == 0 && !t.is_conj() && !t.is_neg()) return t;
  at::Tensor copy = aten::is_fake(t) ? t.new_empty_strided(m.sizes, m.strides) : aten::empty_of(m);
  copy.copy_(t);
  return copy;
}

std::atomic<CallsSomething> calls_something = nullptr;

bool hooked(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty();
}

}  // namespace

void set_calls_something(CallsSomething look) { calls_something = look; }

void CompiledBackward::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  release();
}

void CompiledBackward::release() {
  for (size_t i = 0; i < saved.size(); ++i)
    if (parts_->readers_of_saved[i].is_subset_of(used_up_)) saved[i].reset_data();
  if (used_up_.all()) inputs_.clear();
}

void CompiledBackward::use_up(const joint::TangentSet& defined) {
  for (size_t i = defined.find_first(); i != joint::TangentSet::npos; i = defined.find_next(i))
    used_up_ |= parts_->uses_up[i];
  release();
}

void CompiledBackward::keep_inputs(const std::vector<at::Tensor>& inputs, CallState before) {
  inputs_ = inputs;
  for (size_t k = 0; k < before.copies.size(); ++k) inputs_[parts_->copied[k]] = std::move(before.copies[k]);
  drawn_from_ = std::move(before.generator);
  versions_.reserve(inputs.size());
  for (const at::Tensor& t : inputs_) versions_.push_back(t.is_inference() ? 0 : t._version());
}

variable_list CompiledBackward::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  joint::TangentSet given = parts_->no_tangents();
  variable_list out = gradients(std::move(grads), given);
  TakenEdges taken =
      take_silent_edges(next_edges_, out, [&](size_t i) { return parts_->reached_from[i].intersects(given); });
  if (taken.empty()) return out;
  // They come back when this is let go: by the engine at the end of its task, or with the task where an error ends it.
  std::shared_ptr<void> put_back(nullptr, [node = getptr(), taken = std::move(taken)](void*) {
    auto& edges = static_cast<CompiledBackward&>(*node).next_edges_;
    for (const auto& [i, edge] : taken) edges[i] = edge;
  });
  torch::autograd::Engine::get_default_engine().queue_callback(
      [put_back = std::move(put_back)]() mutable { put_back.reset(); });
  return out;
}

at::Tensor CompiledBackward::zeros_for(size_t tangent) {
  if (std::ranges::none_of(parts_->zeros_from, [&](const joint::TangentSet& s) { return s.test(tangent); })) return {};
  zeros_.set(tangent);
  return aten::empty_of(parts_->tangent_metas[tangent]).zero_();
}

variable_list CompiledBackward::gradients(variable_list&& grads, joint::TangentSet& given) {
  if (grads.size() == 1 && !grads[0].defined()) grads[0] = zeros_for(0);
  const joint::TangentSet zeros = std::exchange(zeros_, parts_->no_tangents());
  joint::Part part{joint::TangentSet(grads.size()), parts_->no_tangents()};
  for (size_t i = 0; i < grads.size(); ++i) part.defined[i] = grads[i].defined();
  TORCH_CHECK(!part.defined.intersects(used_up_), torch::autograd::ERR_BACKWARD_TWICE);
  // Of several results, each one's own node has asked.
  if (part.defined.none() || (grads.size() == 1 && !is_asked_for(*this))) return variable_list(parts_->grad_of.size());
  if (std::exchange(cut_in_, -1) == torch::autograd::get_current_graph_task_id()) part.cut = cut_;
  given = part.defined - zeros;
  variable_list out = run(part, std::move(grads), torch::autograd::get_current_graph_task_keep_graph());
  for (size_t i = 0; zeros.any() && i < parts_->grad_of.size(); ++i)
    if (!parts_->reached_from[i].intersects(given) && !parts_->zeros_from[i].intersects(zeros)) out[i].reset();
  return out;
}

variable_list CompiledBackward::contributions(size_t of, const joint::TangentSet& cut, const at::Tensor& grad) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(cut_in_, task) != task) cut_ = parts_->no_tangents();
  cut_ |= cut;
  variable_list grads(parts_->tangent_of.size());
  grads[of] = grad;
  return run({parts_->no_tangents().set(of), cut, /*contributions=*/true}, std::move(grads), /*keep_graph=*/true);
}

variable_list CompiledBackward::run(const joint::Part& part, variable_list&& grads, bool keep_graph) {
  if (at::GradMode::is_enabled() || std::any_of(grads.begin(), grads.end(), is_special)) {
    variable_list out = at::GradMode::is_enabled() ? apply_in_eager(part, grads) : replay(part, grads);
    if (!keep_graph) use_up(part.defined);
    return out;
  }

  const BackwardPass& pass = parts_->backward(part);
  std::vector<at::Tensor> args;
  args.reserve(pass.inputs.size());
  const auto self = getptr();
  for (size_t i : pass.inputs)
    if (i < saved.size()) args.push_back(saved[i].unpack(self));
  // Nothing else will read what is saved: let the artifact free each tensor after its last use.
  if (!keep_graph) use_up(part.defined);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i : pass.inputs) {
    if (i < saved.size()) continue;
    at::Tensor& grad = grads[i - saved.size()];
    args.push_back(as_tangent(grad, parts_->tangent_metas[i - saved.size()]));
    grad.reset();
  }
  grads.clear();
  return pass.artifact->run(std::move(args));
}

void CompiledBackward::compiled_args(torch::autograd::CompiledNodeArgs& args) const {
  // The engine knows which of the results that are left may be differentiated.
  TORCH_CHECK(used_up_.none(), torch::autograd::ERR_BACKWARD_TWICE);
  args.collect(parts_->id);
  args.collect(saved, /*is_output=*/true);
}

variable_list CompiledBackward::apply_with_saved(const variable_list& grads,
                                                 torch::autograd::SwapSavedVariables& fakes) {
  fakes.before(saved);
  // Whatever happens, what is saved comes back.
  std::exception_ptr failure;
  variable_list out;
  try {
    out = trace(grads);
  } catch (...) {
    failure = std::current_exception();
  }
  fakes.after(saved);
  if (failure) std::rethrow_exception(failure);
  return out;
}

variable_list CompiledBackward::trace(const variable_list& grads) {
  joint::Part part{joint::TangentSet(grads.size()), parts_->no_tangents()};
  for (size_t i = 0; i < grads.size(); ++i) part.defined[i] = grads[i].defined();
  return part.defined.none() ? variable_list(parts_->grad_of.size()) : replay(part, grads);
}

variable_list CompiledBackward::replay(const joint::Part& part, const variable_list& grads) {
  const joint::Narrowed narrowed = parts_->graph_of_backward(part);
  std::vector<at::Tensor> args;
  const auto self = getptr();
  for (size_t i : narrowed.inputs) {
    if (i < saved.size()) {
      args.push_back(saved[i].unpack(self));
      continue;
    }
    const at::Tensor& grad = grads[i - saved.size()];
    args.push_back(is_special(grad) ? grad : as_tangent(grad, parts_->tangent_metas[i - saved.size()]));
  }
  // Many gradients in one have other strides than the one that the graph was made for, and a dimension more than a
  // memory format is for.
  static const graph::Op kView("aten::view"), kReshape("aten::reshape"), kClone("aten::clone");
  const bool many = std::any_of(grads.begin(), grads.end(), is_special);
  for (const auto& node : narrowed.graph->nodes()) {
    if (node->op == kView) node->op = kReshape;
    if (many && node->op == kClone && node->args.size() > 1 && node->args[1].is<graph::MemoryFormat>() &&
        is_channels_last(node->args[1].as<graph::MemoryFormat>()))
      node->args.resize(1);
  }
  return joint::replay(*narrowed.graph, at::GradMode::is_enabled())(args);
}

/// What input `i`, which the program changes, was before the call; gradients of it reach the input itself.
at::Tensor CompiledBackward::copy_of_input(size_t i) {
  at::Tensor copy = inputs_[i].detach().clone();
  const auto& grad_of = parts_->grad_of;
  const auto it = std::find(grad_of.begin(), grad_of.end(), static_cast<int64_t>(i));
  if (it == grad_of.end()) return copy.set_requires_grad(inputs_[i].requires_grad());
  const auto node = c10::make_intrusive<torch::autograd::Identity>();
  node->set_next_edges({next_edge(static_cast<size_t>(it - grad_of.begin()))});
  torch::autograd::set_history(copy, node);
  return copy;
}

/// What a second differentiation sends to a result comes to `again`, that of the program's second run, and would pass
/// by the hooks of the result itself, whose grad_fn is `result`.
void CompiledBackward::refuse_hooks(const at::Tensor& again, const WeakNode& result) {
  again.register_hook([result](const at::Tensor&) {
    const auto node = result.lock();
    if (!node) return;
    const CallsSomething look = calls_something;
    const auto& hooks = node->tensor_pre_hooks();
    TORCH_CHECK(std::none_of(hooks.begin(), hooks.end(), [&](const auto& hook) { return !look || look(*hook); }) &&
                    node->retains_grad_hooks().empty(),
                "there are hooks on a result of a compiled function; it cannot be differentiated twice "
                "(create_graph=True): call it under kiln.disable()");
  });
}

/// With create_graph=True: the gradients by running the program again in eager and differentiating that, which makes
/// the gradients' own graph.
variable_list CompiledBackward::apply_in_eager(const joint::Part& part, const variable_list& grads) {
  TORCH_CHECK(parts_->eager && !inputs_.empty(),
              "this compiled function makes leaves of autograd, accumulates gradients, or changes inputs, of which "
              "autograd sees the change or which are too large to keep; it cannot be differentiated twice "
              "(create_graph=True): call it under kiln.disable()");
  const auto written = [&](size_t i) {
    return std::find(parts_->written.begin(), parts_->written.end(), i) != parts_->written.end();
  };
  const joint::TangentSet wanted = part.defined | part.cut;
  for (size_t i = 0; i < inputs_.size(); ++i)
    TORCH_CHECK(inputs_[i].is_inference() || written(i) || inputs_[i]._version() == versions_[i] ||
                    !parts_->results_of[i].intersects(wanted),
                "one of the variables needed for gradient computation has been modified by an inplace operation");
  // Views of the inputs: the hooks of an input itself run once, when the caller's engine passes its gradient on.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> views;
  variable_list inputs;
  const variable_list outputs = [&] {
    const at::AutoGradMode history(true);
    // The numbers that the call drew are drawn once more; the program's own go on where they were.
    std::optional<GeneratorState> now;
    const auto put_back = c10::make_scope_exit([&] {
      if (now) now->restore();
    });
    if (drawn_from_) {
      now.emplace();
      drawn_from_->restore();
    }
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor& t = inputs_[i];
      at::Tensor& view = views[t.unsafeGetTensorImpl()];
      if (!view.defined()) view = written(i) ? copy_of_input(i) : t.requires_grad() ? at::alias(t) : t;
      inputs.push_back(view);
    }
    return parts_->eager(inputs);
  }();
  const auto result = [&](size_t tangent) {
    const joint::TangentOf& of = parts_->tangent_of[tangent];
    if (of.view >= 0) return outputs[static_cast<size_t>(of.view)];
    for (size_t i = 0; i < outputs.size(); ++i) {
      const joint::Output& o = parts_->outputs[i];
      const bool view = o.kind == joint::Output::Kind::View && o.requires_grad && outputs[i].is_view();
      if ((view || o.kind == joint::Output::Kind::Forward) && o.index == of.forward)
        return view ? at::Tensor(outputs[i]._base()) : outputs[i];
    }
    return at::Tensor();
  };
  torch::autograd::edge_list roots, targets;
  variable_list seeds, whole;
  std::vector<std::pair<at::Tensor, unsigned>> hooks;
  // The gradients' own graph goes through these results again.
  const auto unhook = c10::make_scope_exit([&] {
    for (const auto& [root, hook] : hooks) root.remove_hook(hook);
  });
  for (size_t k = 0; k < grads.size(); ++k) {
    const at::Tensor root = result(k);
    if (!root.defined()) continue;
    if (grads[k].defined()) {
      roots.push_back(torch::autograd::impl::gradient_edge(root));
      seeds.push_back(grads[k]);
    }
    if (!part.cut[k]) continue;
    // Hooks keep the contributions of other results to themselves and pass on what the caller gave.
    const size_t at = whole.size();
    whole.emplace_back();
    const unsigned hook = root.register_hook([&whole, at, given = grads[k]](const at::Tensor& arrived) {
      whole[at] = arrived;
      return given.defined() ? given : at::zeros_like(arrived);
    });
    hooks.emplace_back(root, hook);
  }
  for (int64_t i : parts_->grad_of)
    targets.push_back(torch::autograd::impl::gradient_edge(inputs[static_cast<size_t>(i)]));
  variable_list primals = torch::autograd::Engine::get_default_engine().execute(
      roots, seeds, /*keep_graph=*/true, /*create_graph=*/true, /*accumulate_grad=*/false, targets);
  for (size_t k = 0; k < grads.size(); ++k)
    if (const at::Tensor root = result(k); root.defined() && root.requires_grad())
      refuse_hooks(root, results_.empty() ? WeakNode(getptr()) : results_[k]);
  return part.contributions ? whole : primals;
}

namespace {

/// The grad_fn of one of several results: in eager each has a graph of its own, in which hooks are called for a
/// gradient that there is. If others are computed from a result, its gradient is in eager a value that hooks see and
/// may change; here it is one only if someone asks. Outputs: the gradient, to the common backward; then what it
/// contributes to the gradients of other results: undefined, since the common backward adds them up inside, unless such
/// a result is observed.
class ResultBackward : public torch::autograd::Node {
  friend bool is_asked_for(Node& node);

 public:
  ResultBackward(const CompiledParts& parts, size_t tangent)
      : tangent_(tangent), others_(parts.contributes_to[tangent]) {}
  std::string name() const override { return "CompiledBackward"; }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    for_each_other([&](size_t edge, size_t) {
      TORCH_CHECK_NOT_IMPLEMENTED(!observed(*next_edge(edge).function),
                                  "a hook on a result of a compiled function from which another result is computed");
    });
  }
  variable_list apply_with_saved(const variable_list& grads, torch::autograd::SwapSavedVariables&) override {
    return apply(variable_list(grads));
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    variable_list out(num_outputs());
    auto& common = static_cast<CompiledBackward&>(*next_edge(0).function);
    if (is_asked_for(*this)) out[0] = grads[0].defined() ? grads[0] : common.zeros_for(tangent_);
    if (!grads[0].defined()) return out;
    joint::TangentSet cut(others_.size());
    for_each_other([&](size_t edge, size_t k) { cut[k] = observed(*next_edge(edge).function); });
    if (cut.none()) return out;
    variable_list made = common.contributions(tangent_, cut, grads[0]);
    size_t next = 0;
    for_each_other([&](size_t edge, size_t k) {
      if (cut[k]) out[edge] = std::move(made[next++]);
    });
    return out;
  }

 private:
  template <class F>
  void for_each_other(const F& f) const {
    size_t edge = 1;
    for (size_t k = others_.find_first(); k != joint::TangentSet::npos; k = others_.find_next(k)) f(edge++, k);
  }

  /// Whether someone sees what passes the edge to `node`: to the grad_fn of a result, or, where it was written to a
  /// view, to nodes that lead from the view's by its base's to that.
  static bool observed(Node& node) {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    const auto captured = [&](Node* n) {
      const auto it = tasks ? tasks->find(n) : decltype(tasks->end()){};
      return tasks && it != tasks->end() && it->second.captures_;
    };
    for (Node* n = &node;; n = n->next_edge(dynamic_cast<torch::autograd::CopySlices*>(n) ? 1 : 0).function.get()) {
      if (hooked(*n) || captured(n)) return true;
      if (dynamic_cast<ResultBackward*>(n)) return false;
    }
  }

  const size_t tangent_;
  const joint::TangentSet others_;
};

/// Whether the engine's task wants a gradient that one of `node` contributes to. The engine goes by edges, and those of
/// a compiled function lead to all of its inputs, whatever result they start from.
bool is_asked_for(torch::autograd::Node& node) {
  using torch::autograd::Node;
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (!tasks || tasks->empty()) return true;
  thread_local int task = -1;
  thread_local std::unordered_map<Node*, bool> known;
  if (std::exchange(task, torch::autograd::get_current_graph_task_id()) != task) known.clear();

  const auto runs = [&](Node* n) {
    const auto it = tasks->find(n);
    return it != tasks->end() && it->second.should_execute();
  };
  // backward(inputs=...) captures nothing: it ends at nodes that accumulate or retain a gradient.
  const auto is_end = [&](Node& n) {
    if (!runs(&n)) return false;
    const auto& next = n.next_edges();
    return tasks->at(&n).captures_ || !n.retains_grad_hooks().empty() ||
           std::none_of(next.begin(), next.end(), [&](const auto& e) { return runs(e.function.get()); });
  };
  const auto for_each_next = [](Node& n, const auto& f) {
    const auto follow = [&](const Node& from, size_t begin, size_t end, const auto& passes) {
      for (size_t i = begin; i < end; ++i)
        if (const auto& e = from.next_edge(i); e.is_valid() && passes(i)) f(*e.function);
    };
    const auto all = [](size_t) { return true; };
    if (const auto* result = dynamic_cast<ResultBackward*>(&n)) {
      const auto& common = static_cast<const CompiledBackward&>(*n.next_edge(0).function);
      follow(common, 0, common.num_outputs(), [&](size_t i) { return common.reached(i, result->tangent_); });
      follow(n, 1, n.num_outputs(), all);
    } else {
      follow(n, 0, n.num_outputs(), all);
    }
  };
  std::vector<Node*> todo{&node};  // each is left when what is next to it is known
  while (!todo.empty()) {
    Node* n = todo.back();
    const size_t before = todo.size();
    bool wanted = is_end(*n);
    if (runs(n) && !wanted)
      for_each_next(*n, [&](Node& next) {
        if (wanted) return;
        if (const auto found = known.find(&next); found != known.end())
          wanted = found->second;
        else if (!(wanted = is_end(next)))
          todo.push_back(&next);
      });
    if (!wanted && todo.size() > before) continue;
    known[n] = wanted;
    todo.resize(before - 1);
  }
  return known.at(&node);
}

}  // namespace

void attach_results(const c10::intrusive_ptr<CompiledBackward>& node, const CompiledParts& parts,
                    const std::vector<at::Tensor>& results, c10::function_ref<at::Tensor(size_t)> view,
                    c10::function_ref<torch::autograd::Edge(size_t)> write) {
  using torch::autograd::Edge;
  const size_t count = parts.tangent_of.size();
  if (count == 1) {
    const auto i = static_cast<size_t>(parts.tangent_of[0].forward);
    torch::autograd::set_history(results[i], node);
    write(i);
    return;
  }
  std::vector<at::Tensor> differentiated(count);
  // The engine runs what was made last first. What a view is a view of comes before it.
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> nodes(count);
  std::vector<Edge> reached_by(count);  // where what others contribute goes
  for (size_t k : parts.in_order) {
    nodes[k] = c10::make_intrusive<ResultBackward>(parts, k);
    torch::autograd::edge_list edges{Edge(node, static_cast<uint32_t>(k))};
    const joint::TangentSet& others = parts.contributes_to[k];
    for (size_t j = others.find_first(); j != joint::TangentSet::npos; j = others.find_next(j))
      edges.push_back(reached_by[j]);
    nodes[k]->set_next_edges(std::move(edges));
    const joint::TangentOf& of = parts.tangent_of[k];
    reached_by[k] = Edge(nodes[k], 0);
    if (of.view < 0) {
      const auto i = static_cast<size_t>(of.forward);
      differentiated[k] = results[i];
      torch::autograd::set_history(differentiated[k], nodes[k]);
      if (Edge written = write(i); written.is_valid()) reached_by[k] = std::move(written);
    } else {
      differentiated[k] = view(static_cast<size_t>(of.view));
      nodes[k]->add_input_metadata(differentiated[k]);
      torch::autograd::impl::set_gradient_edge(differentiated[k], reached_by[k]);
    }
  }
  for (const at::Tensor& t : differentiated) node->add_input_metadata(t);
  if (parts.eager) node->results_.assign(nodes.begin(), nodes.end());
}

variable_list FreedBackward::apply(variable_list&&) { TORCH_CHECK(false, torch::autograd::ERR_BACKWARD_TWICE); }

}  // namespace kiln::runtime
