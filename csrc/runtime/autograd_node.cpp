#include "runtime/autograd_node.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unordered_map>

#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"

namespace kiln::runtime {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

/// `t` as the backward artifact expects it: with the strides that it was compiled for.
at::Tensor as_tangent(const at::Tensor& t, const graph::TensorMeta& m) {
  TORCH_CHECK(t.sizes() == c10::IntArrayRef(m.sizes), "a gradient of size ", t.sizes(), " for an output of size ",
              c10::IntArrayRef(m.sizes));
  if (t.strides() == c10::IntArrayRef(m.strides) && t.storage_offset() == 0 && !t.is_conj() && !t.is_neg()) return t;
  at::Tensor copy = aten::empty_of(m);
  copy.copy_(t);
  return copy;
}

/// Of vmap (is_grads_batched, vectorized Jacobians): many gradients in one, without memory of its own.
bool is_batched(const at::Tensor& t) {
  return t.defined() &&
         t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched}));
}

}  // namespace

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

void CompiledBackward::keep_inputs(const std::vector<at::Tensor>& inputs) {
  inputs_ = inputs;
  versions_.reserve(inputs.size());
  for (const at::Tensor& t : inputs) versions_.push_back(t.is_inference() ? 0 : t._version());
}

variable_list CompiledBackward::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  joint::TangentSet defined(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) defined[i] = grads[i].defined();
  TORCH_CHECK(!defined.intersects(used_up_), torch::autograd::ERR_BACKWARD_TWICE);
  if (defined.none()) return variable_list(parts_->grad_of.size());
  const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
  if (at::GradMode::is_enabled() || std::any_of(grads.begin(), grads.end(), is_batched)) {
    variable_list out = apply_in_eager(grads);
    if (!keep_graph) use_up(defined);
    return out;
  }

  const BackwardPass& pass = parts_->backward(defined);
  std::vector<at::Tensor> args;
  args.reserve(pass.inputs.size());
  const auto self = getptr();
  for (size_t i : pass.inputs)
    if (i < saved.size()) args.push_back(saved[i].unpack(self));
  // Nothing else will read what is saved: let the artifact free each tensor after its last use.
  if (!keep_graph) use_up(defined);
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

/// The gradients by running the program again in eager and differentiating that: with create_graph=True this makes the
/// gradients' own graph.
variable_list CompiledBackward::apply_in_eager(const variable_list& grads) {
  const bool create_graph = at::GradMode::is_enabled();
  TORCH_CHECK(
      parts_->eager && !inputs_.empty(),
      "this compiled function changes its inputs, draws random numbers or returns views of its inputs, and cannot "
      "be differentiated ",
      create_graph ? "twice (create_graph=True)" : "in batches (is_grads_batched=True)", ": run it in eager");
  for (size_t i = 0; i < inputs_.size(); ++i)
    TORCH_CHECK(inputs_[i].is_inference() || inputs_[i]._version() == versions_[i],
                "one of the variables needed for gradient computation has been modified by an inplace operation");
  // Views of the inputs: the hooks of an input itself run once, when the caller's engine passes its gradient on.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> views;
  variable_list inputs;
  const variable_list outputs = [&] {
    const at::AutoGradMode history(true);
    for (const at::Tensor& t : inputs_) {
      at::Tensor& view = views[t.unsafeGetTensorImpl()];
      if (!view.defined()) view = t.requires_grad() ? at::alias(t) : t;
      inputs.push_back(view);
    }
    return parts_->eager(inputs);
  }();
  torch::autograd::edge_list roots, targets;
  variable_list seeds;
  for (size_t k = 0; k < grads.size(); ++k) {
    if (!grads[k].defined()) continue;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const joint::Output& o = parts_->outputs[i];
      const bool view = o.kind == joint::Output::Kind::View && o.requires_grad && outputs[i].is_view();
      if ((view || o.kind == joint::Output::Kind::Forward) && o.index == parts_->tangent_of[k]) {
        roots.push_back(torch::autograd::impl::gradient_edge(view ? at::Tensor(outputs[i]._base()) : outputs[i]));
        seeds.push_back(grads[k]);
        break;
      }
    }
  }
  for (int64_t i : parts_->grad_of)
    targets.push_back(torch::autograd::impl::gradient_edge(inputs[static_cast<size_t>(i)]));
  return torch::autograd::Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/true, create_graph,
                                                               /*accumulate_grad=*/false, targets);
}

variable_list FreedBackward::apply(variable_list&&) { TORCH_CHECK(false, torch::autograd::ERR_BACKWARD_TWICE); }

}  // namespace kiln::runtime
