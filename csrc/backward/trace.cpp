#include "backward/trace.h"

#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/pch.h"
#include "base/error.h"
#include "graph/passes/passes.h"
#include "runtime/autograd_node.h"

namespace kiln::backward {

namespace dynamo = torch::dynamo::autograd;

namespace {

/// The order of the dims of `base` that gives `view`, if it is no more than that.
std::optional<std::vector<int64_t>> permutation(const at::Tensor& base, const at::Tensor& view) {
  if (base.dim() != view.dim() || base.storage_offset() != view.storage_offset()) return std::nullopt;
  std::vector<int64_t> dims;
  std::vector<bool> taken(static_cast<size_t>(base.dim()));
  for (int64_t i = 0; i < view.dim(); ++i) {
    int64_t found = -1;
    for (int64_t k = 0; k < base.dim() && found < 0; ++k)
      if (!taken[static_cast<size_t>(k)] && base.size(k) == view.size(i) && base.stride(k) == view.stride(i)) found = k;
    if (found < 0) return std::nullopt;
    taken[static_cast<size_t>(found)] = true;
    dims.push_back(found);
  }
  return dims;
}

}  // namespace

using graph::Arg;
using graph::Value;

/// What PyTorch's nodes ask while they are traced. A node's own formula runs where PyTorch would note a call of it:
/// what it has saved is swapped for fakes then.
class Tracer::Interface : public dynamo::PyCompilerInterface {
 public:
  explicit Interface(Tracer& tracer) : tracer_(tracer) {}

  std::string bind_function(PyObject*, const std::string& name, torch::autograd::functional_apply_t,
                            std::vector<at::TypePtr>, bool, bool) const override {
    return name;
  }
  variable_list call_function(PyObject*, const char*, const std::string&, const variable_list& inputs,
                              const torch::autograd::ivalue_list&, const c10::IValue&) const override {
    Node* node = tracer_.node_;
    if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(node)) node = slices->fn.get();
    return guarded(node->num_outputs(), [&] { return (*node)(variable_list(inputs)); });
  }
  /// A write to a view, backwards: the gradient of the base as it was, with what reached the view taken out.
  variable_list call_copy_slices_prologue(PyObject*, const variable_list& inputs, const at::TensorGeometry& base,
                                          const at::TensorGeometry& view) const override {
    return guarded(3, [&]() -> variable_list {
      const at::Tensor result = inputs.at(0).new_empty_strided_symint(base.sym_sizes(), base.sym_strides());
      result.copy_(inputs[0]);
      const at::Tensor slice = result.as_strided_symint(view.sym_sizes(), view.sym_strides(),
                                                        view.sym_storage_offset() - base.sym_storage_offset());
      return {result, slice, slice.clone(at::MemoryFormat::Contiguous)};
    });
  }
  variable_list call_copy_slices_epilogue(PyObject*, const std::vector<bool>& needs, const at::Tensor& result,
                                          const variable_list& grads, const at::Tensor& slice) const override {
    return guarded(needs.size(), [&] {
      variable_list out(needs.size());
      for (size_t i = 0; i < needs.size() && i < grads.size(); ++i) {
        if (!needs[i] || !grads[i].defined()) continue;
        if (i == 0) slice.copy_(grads[0]);
        out[i] = i == 0 ? result : grads[i];
      }
      return out;
    });
  }
  at::Tensor call_unpack(PyObject*, std::optional<size_t>, size_t) const override {
    throw Unsupported("hooks on saved tensors");  // look_through() has refused them
  }
  at::Tensor call_accumulate_grad(PyObject*, const at::Tensor& variable, const at::Tensor&, const at::Tensor& grad,
                                  bool) const override {
    guarded(0, [&] {
      tracer_.note_accumulation(variable, grad);
      return variable_list();
    });
    return grad;
  }

 private:
  template <class F>
  variable_list guarded(size_t num_results, F&& body) const {
    if (!tracer_.failure_) try {
        return body();
      } catch (...) {
        tracer_.fail(std::current_exception());
      }
    return variable_list(num_results);
  }
  Tracer& tracer_;
};

Tracer::Tracer(Call& call, const ReturnedByTurn& returned)
    : call_(call),
      returned_(returned),
      graph_(std::make_unique<graph::Graph>()),
      recorder_(*graph_),
      state_(std::vector<std::optional<c10::SymInt>>(call.collected.all_size_inputs.size()), 0) {
  graph_->name = "compiled_autograd";
  recorder_.in_place = true;
}

std::unique_ptr<graph::Graph> Tracer::run(const std::vector<Turn>& turns, size_t num_outputs, PyObject* compiler) {
  compiler_ = compiler;
  auto& collected = call_.collected;
  for (auto& number : collected.lifted_ivalue_args.args) number.proxy = *number.actual_ptr;
  state_.outputs.resize(num_outputs);

  // Whoever records above autograd has nothing to see here.
  c10::impl::ExcludeDispatchKeyGuard quiet(c10::DispatchKeySet(c10::DispatchKey::TESTING_ONLY_GenericMode));
  const at::AutoGradMode no_grad(false);
  const aten::FakeModeGuard fakes;
  const aten::FakeObserverGuard observe(&recorder_);
  const dynamo::PyCompilerGuard interface(std::make_unique<Interface>(*this));
  make_inputs();
  Gradients gradients;
  for (turn_ = 0; turn_ < turns.size(); ++turn_) {
    dynamo::NodeCall& node = *call_.nodes[turn_];
    variable_list grads = before_node(node, gradients.take(*node.node));
    for (const auto& [input, output] : node.graph_output)
      state_.outputs.at(static_cast<size_t>(output)) = grads.at(static_cast<size_t>(input));
    if (!node.needed) continue;
    for (const int hook : node.pre_hooks)
      grads = record(kNodePreHook, {Arg(static_cast<int64_t>(hook)), args(grads)}, grads);
    variable_list outputs = run_node(node, grads);
    for (const int hook : node.post_hooks)
      outputs = record(kNodeHook, {Arg(static_cast<int64_t>(hook)), args(outputs), args(grads)}, outputs);
    const edge_list& edges = node.node->next_edges();
    for (size_t i = 0; i < edges.size() && i < outputs.size(); ++i) gradients.add(edges[i], outputs[i]);
  }
  for (const at::Tensor& t : state_.outputs) graph_->outputs().push_back(arg(t));
  find_owned();
  check_numbers();
  graph::verify(*graph_);
  return std::move(graph_);
}

void Tracer::make_inputs() {
  auto& arguments = call_.collected.tensor_args;
  const auto stand_in = [&](const at::Tensor& real, const at::Tensor& fake) {
    fake.set_requires_grad(real.requires_grad());  // some formulas ask
    arguments.lookup(real).proxy_tensor = is_constant(real) ? real : fake;
  };
  for (const at::Tensor& real : arguments.inputs) {
    const at::Tensor fake = aten::make_plain_fake(real);
    const std::string name = "input_" + std::to_string(graph_->inputs().size() + 1);
    recorder_.bind(fake, graph_->add_input(name, aten::meta_of(fake))->out());
    stand_in(real, fake);
  }
  // Views of other inputs, of weights most often, are made of these: who writes to one writes to both.
  for (const auto& [view, owner] : call_.view_of) {
    const at::Tensor& real = arguments.inputs[view];
    const at::Tensor& base = arguments.lookup(arguments.inputs[owner]).proxy_tensor;
    if (const auto dims = permutation(base, real)) {
      stand_in(real, base.permute(*dims));
      continue;
    }
    // Counted from the owner's first element: where its memory begins is no business of the graph.
    const at::Tensor row = base.is_contiguous() ? base.view({-1}) : base.as_strided({base.numel()}, {1});
    const int64_t first = real.storage_offset() - base.storage_offset();
    const int64_t extent = at::detail::computeStorageNbytes(real.sizes(), real.strides(), /*itemsize=*/1);
    const at::Tensor part = row.slice(0, first, first + extent);
    stand_in(real, real.is_contiguous() ? part.view(real.sizes()) : part.as_strided(real.sizes(), real.strides()));
  }
}

variable_list Tracer::before_node(const dynamo::NodeCall& node, variable_list grads) {
  const auto hook = [&](size_t index, int input) {
    at::Tensor& grad = grads.at(static_cast<size_t>(input));
    if (!grad.defined()) throw Unsupported("a hook on a gradient that there is not");
    grad = record(kTensorHook, {Arg(static_cast<int64_t>(index)), arg(grad)}, {grad})[0];
  };
  for (const auto& [index, input] : node.tensor_pre_hooks) hook(static_cast<size_t>(index), input);
  // Those of C++ follow all others in the list that the graph is given.
  for (const auto& [index, input] : node.cpp_tensor_pre_hooks)
    hook(call_.collected.hooks.size() + static_cast<size_t>(index), input);
  return grads;
}

variable_list Tracer::run_node(dynamo::NodeCall& node, const variable_list& grads) {
  node_ = node.node.get();
  if (dynamic_cast<runtime::CompiledBackward*>(node_)) {
    joint::TangentSet& defined = differentiated_[turn_];
    for (const at::Tensor& grad : grads) defined.push_back(grad.defined());
  }
  dynamo::SwapSavedVariables saved(call_.collected, state_, compiler_, node);
  variable_list outputs = node_->apply_with_saved(grads, saved);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  fit_gradients(*node_, outputs);
  return outputs;
}

variable_list Tracer::record(const char* function, std::vector<Arg> arguments, const variable_list& like) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& t : like) metas.push_back(t.defined() ? aten::meta_of(t) : graph::undefined_meta());
  return recorder_.call(graph::Op(function), std::move(arguments), std::move(metas), function != kTensorHook);
}

void Tracer::fail(std::exception_ptr why) {
  if (!failure_) failure_ = std::move(why);
}

variable_list Tracer::call_function(size_t context, const variable_list& saved, const variable_list& grads,
                                    const std::vector<std::optional<graph::TensorMeta>>& metas) try {
  const auto known = returned_.find(turn_);
  if (known == returned_.end()) throw Unsupported("a Python function whose gradients were not seen");
  std::vector<graph::TensorMeta> results;
  Arg::List wanted;    // by input: None, or sizes and dtype
  size_t tensors = 0;  // those among the inputs, which alone had gradients to be seen
  for (size_t i = 0; i < metas.size(); ++i) {
    const size_t seen = tensors;
    if (metas[i]) ++tensors;
    const bool is = metas[i] && seen < known->second.size() && known->second[seen];
    results.push_back(is ? *metas[i] : graph::undefined_meta());
    wanted.push_back(is ? Arg(Arg::List{Arg::ints(metas[i]->sizes), Arg(metas[i]->dtype)}) : Arg());
  }
  return recorder_.call(graph::Op(kFunction),
                        {Arg(static_cast<int64_t>(context)), Arg(std::move(wanted)), args(saved), args(grads)},
                        std::move(results), /*returns_list=*/true);
} catch (...) {
  fail(std::current_exception());
  return variable_list(metas.size());
}

void Tracer::call_accumulated_hook(const at::Tensor& variable, size_t hook) try {
  record(kAccumulated, {Arg(static_cast<int64_t>(hook)), arg(variable)}, {});
} catch (...) {
  fail(std::current_exception());
}

void Tracer::note_accumulation(const at::Tensor& variable, const at::Tensor& grad) {
  KILN_CHECK(recorder_.value_of(variable).node->kind == graph::NodeKind::Placeholder, "a leaf is no input");
  // The layout that the engine gives a leaf's gradient; none where `grad` has it.
  Arg strides;
  if (!torch::autograd::utils::obeys_layout_contract(grad, variable))
    strides = Arg::ints(variable.is_non_overlapping_and_dense() ? variable.strides().vec()
                                                                : graph::contiguous_strides(variable.sizes().vec()));
  record(kAccumulate, {arg(variable), arg(grad), std::move(strides)}, {});
}

/// A gradient may become a leaf's as it is, without a copy, where nobody else has its memory, or will read it.
void Tracer::find_owned() {
  std::unordered_map<Value, size_t> last_use, seen_outside;
  const auto is_python = [](const graph::Node& n) { return n.op.name().starts_with("kiln.compiled_autograd."); };
  size_t position = 0;
  for (const auto& n : graph_->nodes()) {
    ++position;
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](Value v) {
        if (!v) return;
        last_use[graph::storage_root(v)] = position;
        if (is_python(*n)) ++seen_outside[graph::storage_root(v)];
      });
  }
  for (const Arg& a : graph_->outputs())
    graph::for_each_value(a, [&](Value v) {
      if (v) ++seen_outside[graph::storage_root(v)];
    });
  static const graph::Op kAccumulateOp(kAccumulate);
  position = 0;
  for (const auto& n : graph_->nodes()) {
    ++position;
    if (n->op != kAccumulateOp) continue;
    const Value root = graph::storage_root(n->arg(1).value());
    const bool made_here = root.node->kind == graph::NodeKind::Call && !is_python(*root.node);
    if (made_here && seen_outside[root] == 1 && last_use[root] == position) continue;
    if (n->args[2].is_none()) n->args[2] = Arg::ints(n->arg(1).value().meta().strides);
  }
}

Arg Tracer::arg(const at::Tensor& t) { return t.defined() ? Arg(recorder_.value_of(t)) : Arg(); }

Arg Tracer::args(const variable_list& list) {
  Arg::List items;
  for (const at::Tensor& t : list) items.push_back(arg(t));
  return Arg(std::move(items));
}

/// A number that autograd has saved is a number in the graph, whose types are promoted as with one: where that can be.
void Tracer::check_numbers() {
  static const std::unordered_set<std::string> takes_number = {"aten::add.Tensor", "aten::sub.Tensor",
                                                               "aten::mul.Tensor", "aten::div.Tensor"};
  std::unordered_set<const graph::Node*> numbers;
  for (size_t i = 0; i < graph_->inputs().size(); ++i)
    if (is_number(call_.collected.tensor_args.inputs[i])) numbers.insert(graph_->inputs()[i]);
  const auto check = [&](const Arg& a, bool allowed, const std::string& user) {
    graph::for_each_value(a, [&](Value v) {
      if (v && numbers.contains(v.node) && !allowed) throw Unsupported("a number that autograd has saved, in " + user);
    });
  };
  for (const auto& n : graph_->nodes())
    for (size_t i = 0; i < n->args.size(); ++i)
      check(n->args[i], i == 1 && takes_number.contains(n->op.name()) && (n->args.size() < 3 || n->arg(2) == Arg(1)),
            n->op.name());
  for (const Arg& a : graph_->outputs()) check(a, false, "the results");
}

}  // namespace kiln::backward
