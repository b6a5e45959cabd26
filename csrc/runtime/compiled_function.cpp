#include "runtime/compiled_function.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/pch.h"
#include "base/error.h"
#include "runtime/autograd_node.h"

namespace kiln::runtime {

using joint::Output;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::SavedVariable;

namespace {

at::Tensor view_of(const at::Tensor& base, const Output& out) {
  // As it was where the program made the view, whatever the mode is where the graph begins.
  const at::AutoGradMode mode(!out.leaf);
  at::Tensor from = base.requires_grad() && !out.requires_grad ? base.detach() : base;
  if (out.dtype != c10::ScalarType::Undefined) from = aten::reinterpret(from, out.dtype);
  at::Tensor view = from.as_strided(out.sizes, out.strides, from.storage_offset() + out.offset);
  if (out.conjugate) view = at::_conj(view);
  if (out.negate) view = at::_neg_view(view);
  if (auto* meta = torch::autograd::impl::get_view_autograd_meta(view); meta && meta->has_bw_view()) {
    meta->set_creation_meta(out.creation);
    if (out.refused) meta->set_attr_version(meta->get_attr_version() - 1);  // as if made before the write
  }
  if (out.uncounted)
    view = view.variable_data();
  else if (out.detached)
    view = view.detach();
  if (out.leaf && !view.requires_grad()) view.set_requires_grad(true);
  return view;
}

constexpr auto kCustomView = torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION;

/// Makes `value` the new value of `input`, and its history that of `input`. Returns the edge of the input's gradient if
/// that leads to the value's.
Edge write(at::Tensor input, const at::Tensor& value) {
  // Eager allows a write to such a leaf only where autograd does not see it (through .data, in no_grad).
  const bool visible = !(input.is_leaf() && input.requires_grad());
  const at::AutoGradMode mode(visible);
  if (!visible || !value.requires_grad()) {
    input.copy_(value);
    return {};
  }
  if (input.is_view()) {  // of a base that autograd rebases, too
    input.copy_(value);
  } else {
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      input.copy_(value);
    }
    torch::autograd::impl::bump_version(input);
    torch::autograd::impl::rebase_history(input, torch::autograd::impl::gradient_edge(value));
  }
  return torch::autograd::impl::gradient_edge(input);
}

/// `result` as the view of a tensor that nobody has, with its history: autograd lets nobody write to it.
at::Tensor custom_view_of(const at::Tensor& result) {
  const at::AutoGradMode mode(false);
  const at::Tensor base = result.detach(), view = base.view_as(base);
  torch::autograd::impl::set_gradient_edge(view, torch::autograd::impl::gradient_edge(result));
  aten::note_custom_view(view);
  return view;
}

class Function : public CompiledFunction {
 public:
  explicit Function(std::shared_ptr<CompiledParts> parts) : parts_(std::move(parts)) {
    for (const Output& o : parts_->outputs)
      needs_inputs_ |= o.kind == Output::Kind::Input || o.kind == Output::Kind::InputView;
    const bool any_freed = !parts_->freed.empty();
    needs_inputs_ |= parts_->trains() || !parts_->mutations.empty() || any_freed;
    // Outputs that are the artifact's own, in order: nothing to build.
    plain_ = parts_->outputs.size() == parts_->num_forward && !any_freed;
    for (size_t i = 0; i < parts_->outputs.size(); ++i) {
      const Output& o = parts_->outputs[i];
      plain_ &=
          o.kind == Output::Kind::Forward && o.index == static_cast<int64_t>(i) && !o.leaf && o.creation != kCustomView;
    }
  }

  std::vector<at::Tensor> call(std::vector<at::Tensor> inputs) override {
    const CompiledParts& p = *parts_;
    KILN_CHECK(inputs.size() == p.num_primals, "a compiled function got another number of inputs");
    std::vector<at::Tensor> kept;
    if (needs_inputs_) kept = inputs;
    CallState before;
    if (p.eager) {
      if (p.draws) before.generator.emplace();
      for (size_t i : p.copied)
        before.copies.push_back(inputs[i].detach().clone().set_requires_grad(inputs[i].requires_grad()));
    }
    std::vector<at::Tensor> results;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      results = p.forward->run(std::move(inputs));
    }
    KILN_CHECK(results.size() >= p.num_forward, "an artifact returned too few outputs");
    Views views;
    if (p.trains()) attach(kept, results, views, std::move(before));
    attach_freed(kept, results, views);
    for (const joint::VisibleMutation& m : p.mutations)  // those with a history are written
      if (const at::Tensor& value = results[static_cast<size_t>(m.forward)]; !value.requires_grad())
        write(kept[static_cast<size_t>(m.input)], value);
    if (plain_) {
      results.resize(p.num_forward);
      return results;
    }
    return build(kept, results, views);
  }

  std::string describe() const override {
    std::string text = parts_->forward->describe();
    if (parts_->trains()) {
      const joint::TangentSet none = parts_->no_tangents();
      text += "\n" + parts_->backward({~none, none}).artifact->describe();
    }
    return text;
  }

 private:
  /// Outputs that are views and have to be there before the others, by their positions.
  using Views = std::map<size_t, at::Tensor>;

  const at::Tensor& view(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results, size_t i,
                         Views& views) const {
    at::Tensor& known = views[i];
    const Output& o = parts_->outputs[i];
    if (!known.defined())
      known = view_of((o.kind == Output::Kind::View ? results : inputs)[static_cast<size_t>(o.index)], o);
    return known;
  }

  /// Writes forward output `i`, which has a history, to the input whose new value it is, and returns the input's edge.
  Edge write_forward(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results, size_t i) const {
    for (const joint::VisibleMutation& m : parts_->mutations)
      if (m.forward == static_cast<int64_t>(i)) return write(inputs[static_cast<size_t>(m.input)], results[i]);
    return {};
  }

  /// Gives the outputs a grad_fn that holds what the backward needs; makes the views that have one of their own.
  void attach(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results, Views& views,
              CallState before) const {
    const CompiledParts& p = *parts_;
    auto node = c10::make_intrusive<CompiledBackward>(parts_);
    edge_list edges;
    edges.reserve(p.grad_of.size());
    for (int64_t i : p.grad_of) {
      const at::Tensor& t = inputs[static_cast<size_t>(i)];
      edges.push_back(t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge());
    }
    node->set_next_edges(std::move(edges));
    const auto view = [&](size_t i) { return this->view(inputs, results, i, views); };
    attach_results(node, p, results, view, [&](size_t i) { return write_forward(inputs, results, i); });
    node->saved.reserve(p.saved.size());
    const auto save = [&](const at::Tensor& t, bool is_output) {
      try {
        node->saved.emplace_back(t, is_output);
      } catch (...) {
        throw HookRaised{std::current_exception()};
      }
    };
    for (const joint::Parts::Saved& s : p.saved) {
      const size_t i = static_cast<size_t>(s.index);
      if (s.primal)
        save(inputs[i], /*is_output=*/false);
      else {
        // As views of each other know of writes: the saved one says so when the output was written.
        if (s.shares >= 0)
          torch::autograd::impl::set_version_counter(
              results[i], torch::autograd::impl::version_counter(results[static_cast<size_t>(s.shares)]));
        save(results[i], /*is_output=*/i < p.num_forward && p.forward_requires_grad[i]);
      }
    }
    if (p.eager) node->keep_inputs(inputs, std::move(before));
  }

  void attach_freed(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results, Views& views) const {
    for (const CompiledParts::Freed& f : parts_->freed) {
      edge_list edges;
      const auto add = [&](const at::Tensor& t) {
        if (t.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(t));
      };
      for (size_t k : f.primals) add(inputs[k]);
      for (size_t k : f.forwards) add(results[k]);
      for (size_t k : f.views) add(view(inputs, results, k, views));
      const auto node = c10::make_intrusive<FreedBackward>();
      node->set_next_edges(std::move(edges));
      torch::autograd::set_history(results[f.forward], node);
      write_forward(inputs, results, f.forward);
    }
  }

  /// `views`: what there is of them.
  std::vector<at::Tensor> build(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& results,
                                const Views& views) const {
    std::vector<at::Tensor> out;
    out.reserve(parts_->outputs.size());
    // Before others become views of them, which need no gradient.
    for (const Output& o : parts_->outputs)
      if (o.kind == Output::Kind::Forward && o.leaf) results[static_cast<size_t>(o.index)].set_requires_grad(true);
    for (const Output& o : parts_->outputs) {
      if (const auto known = views.find(out.size()); known != views.end()) {
        out.push_back(known->second);
        continue;
      }
      const size_t i = static_cast<size_t>(o.index);
      switch (o.kind) {
        case Output::Kind::None:
          out.emplace_back();
          break;
        case Output::Kind::Forward:
          out.push_back(o.creation == kCustomView && !o.leaf && results[i].requires_grad() ? custom_view_of(results[i])
                                                                                           : results[i]);
          break;
        case Output::Kind::Input:
          out.push_back(inputs[i]);
          break;
        case Output::Kind::InputView:
          out.push_back(view_of(inputs[i], o));
          break;
        case Output::Kind::View:
          out.push_back(view_of(results[i], o));
          break;
        case Output::Kind::Same:
          out.push_back(out[i]);
          break;
      }
    }
    return out;
  }

  std::shared_ptr<CompiledParts> parts_;
  bool needs_inputs_ = false;
  bool plain_ = false;
};

}  // namespace

std::shared_ptr<CompiledFunction> make_compiled_function(std::shared_ptr<CompiledParts> parts) {
  return std::make_shared<Function>(std::move(parts));
}

}  // namespace kiln::runtime
