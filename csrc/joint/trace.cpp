#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <typeinfo>
#include <unordered_set>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/functional_form.h"
#include "aten/functional_tensor.h"
#include "aten/modes.h"
#include "aten/pch.h"
#include "base/error.h"
#include "graph/passes/passes.h"
#include "joint/joint.h"
#include "joint/recorder.h"
#include "joint/state.h"

namespace kiln::joint {

namespace fn = at::functionalization::impl;
using aten::nodes_behind;
using graph::Arg;
using graph::Value;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace {

using Storage = const c10::StorageImpl*;

/// Of torch::autograd::ERR_BACKWARD_TWICE.
constexpr std::string_view kSecondTime = "backward through the graph a second time";

Storage storage_of(const at::Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }

/// The storage's tensor as of now, below functionalization.
at::Tensor storage_base(const at::Tensor& functional) {
  return static_cast<at::functionalization::FunctionalStorageImpl*>(
             functional.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl())
      ->base();
}

/// What autograd says that `t` is a view of; `t` itself if it is none.
at::Tensor base_of_views(const at::Tensor& t) { return t.is_view() ? at::Tensor(t._base()) : t; }

struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool operator==(const Geometry&) const = default;
};
Geometry geometry_of(const at::Tensor& t) { return {t.sizes().vec(), t.strides().vec(), t.storage_offset()}; }

/// How `view`, whose place in memory is `g`, is made from `base`.
void set_view(Output& out, const at::Tensor& base, const at::Tensor& view, const Geometry& g) {
  const int64_t base_size = static_cast<int64_t>(base.element_size()), size = static_cast<int64_t>(view.element_size());
  out.sizes = g.sizes;
  out.strides = g.strides;
  out.offset = g.offset - base.storage_offset() * base_size / size;
  if (view.scalar_type() != base.scalar_type()) out.dtype = view.scalar_type();
  out.conjugate = view.is_conj() != base.is_conj();
  out.negate = view.is_neg() != base.is_neg();
}

struct Reach;

class Tracer {
 public:
  explicit Tracer(const std::vector<at::Tensor>& examples)
      : examples_(examples), graph_(std::make_unique<graph::Graph>()), recorder_(*graph_) {
    graph_->name = "joint";
  }

  Joint run(const Program& program);

  // What TraceState serves.
  Recorder& recorder() { return recorder_; }
  bool is_primal(const at::Tensor& t) const { return primal_index_.count(t.unsafeGetTensorImpl()) != 0; }
  /// By autograd node: how many hooks of the program's are on it.
  std::unordered_map<const torch::autograd::Node*, int> hooked;
  /// Before a primal's requires_grad is changed: what it is for who calls the graph.
  void keep_flag(const at::Tensor& primal) {
    for (const auto& [seen, flag] : flags_)
      if (seen.is_same(primal)) return;
    flags_.emplace_back(primal, primal.requires_grad());
  }

 private:
  void make_primals();
  void find_mutations();
  bool fills_its_base(const at::Tensor& t);
  void classify(const std::vector<at::Tensor>& outputs);
  /// Whether autograd goes on from the output `t`. Throws Unsupported where that is not what a view of its base has.
  bool has_history(const at::Tensor& t, Output& out);
  int64_t add_forward(const at::Tensor& functional, Value value);
  void differentiate(const std::vector<at::Tensor>& outputs);
  /// Whether a backward inside the program has freed what is behind `root`.
  bool is_freed(const Edge& root) const;
  /// Whether the program has put a hook there.
  bool is_hooked(const Edge& root) const;
  /// The views among `outputs` by which gradients pass, of `roots` or of each other.
  std::vector<size_t> views_with_gradients(const std::vector<at::Tensor>& outputs, edge_list roots) const;
  /// Notes that the graph behind forward output `i` was freed.
  void note_freed(size_t i, const std::vector<at::Tensor>& outputs);
  void relate_tangents(const Reach& reach);
  void check_leaves(const edge_list& roots);
  void find_kept();
  Value value_of(const at::Tensor& t);
  /// What the caller's tensors hold now: the inputs and the forward outputs.
  std::vector<Value> visible_values();

  const std::vector<at::Tensor>& examples_;
  std::unique_ptr<graph::Graph> graph_;
  Recorder recorder_;
  Joint joint_;
  std::vector<at::Tensor> primals_;                 // functional
  std::vector<std::pair<at::Tensor, bool>> flags_;  // of primals whose requires_grad the program changes
  std::vector<Edge> edges_;                         // where gradients of primals arrive, as of before the program ran
  std::vector<uint32_t> versions_;                  // of primals, likewise
  std::unordered_map<const c10::TensorImpl*, int64_t> primal_index_;
  std::unordered_map<Storage, int64_t> primal_of_storage_;
  std::vector<at::Tensor> forward_;  // functional tensors of the forward outputs
  std::vector<Value> forward_values_;
  std::unordered_map<const c10::TensorImpl*, int64_t> forward_index_;
};

thread_local Tracer* active = nullptr;

/// The functional tensor's value now.
Value Tracer::value_of(const at::Tensor& t) {
  if (!fn::isFunctionalTensor(t)) return recorder_.value_of(t);
  fn::sync(t);
  return recorder_.value_of(fn::from_functional_tensor(t));
}

std::vector<Value> Tracer::visible_values() {
  std::vector<Value> values;
  for (const auto* tensors : {&primals_, &forward_})
    for (const at::Tensor& t : *tensors)
      if (fn::isFunctionalTensor(t)) values.push_back(value_of(t));
  return values;
}

void Tracer::make_primals() {
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  versions_.resize(examples_.size());
  for (size_t i = 0; i < examples_.size(); ++i) {
    const at::Tensor& example = examples_[i];
    KILN_CHECK(example.defined(), "undefined example input");
    at::Tensor inner = aten::make_plain_fake(example);
    graph::TensorMeta meta = aten::meta_of(inner);
    meta.requires_grad = example.requires_grad();
    graph::Node* node = graph_->add_input("primals_" + std::to_string(i + 1), std::move(meta));
    // One tensor passed twice is one primal; the second placeholder stays unused.
    if (auto [it, fresh] = seen.emplace(example.unsafeGetTensorImpl(), i); !fresh) {
      primals_.push_back(primals_[it->second]);
      edges_.push_back(edges_[it->second]);
      continue;
    }
    recorder_.bind(inner, node->out());
    at::Tensor functional = fn::to_functional_tensor(inner);
    aten::copy_autograd(example, functional);
    versions_[i] = functional._version();
    edges_.push_back(functional.requires_grad() ? torch::autograd::impl::gradient_edge(functional) : Edge());
    primal_index_.emplace(functional.unsafeGetTensorImpl(), static_cast<int64_t>(i));
    primal_of_storage_.emplace(storage_of(functional), static_cast<int64_t>(i));
    primals_.push_back(std::move(functional));
  }
  for (size_t i = 0; i < examples_.size(); ++i) {
    if (!examples_[i].is_leaf() && !examples_[i].retains_grad()) continue;
    const at::Tensor& grad = examples_[i].grad();
    if (!grad.defined()) continue;
    if (auto it = seen.find(grad.unsafeGetTensorImpl()); it != seen.end())
      primals_[i].mutable_grad() = primals_[it->second];
  }
}

int64_t Tracer::add_forward(const at::Tensor& functional, Value value) {
  const int64_t index = static_cast<int64_t>(forward_.size());
  forward_.push_back(functional);
  forward_values_.push_back(value);
  forward_index_.emplace(functional.unsafeGetTensorImpl(), index);
  return index;
}

torch::autograd::CreationMeta creation_of(const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(t);
  return meta && meta->has_bw_view() ? meta->get_creation_meta() : torch::autograd::CreationMeta::DEFAULT;
}

/// Whether writes to one count as writes to the other (they do for views, not for .data).
bool counted_together(const at::Tensor& a, const at::Tensor& b) {
  c10::VariableVersion counter = a.unsafeGetTensorImpl()->version_counter();  // shares the count
  const uint32_t before = counter.current_version(), other = b._version();
  counter.bump();
  const bool together = b._version() != other;
  counter.set_version(before);
  return together;
}

/// Whether autograd refuses a write to `t` that it sees.
bool refuses_writes(const at::Tensor& t) {
  if (!t.is_view()) return false;
  return creation_of(t) != torch::autograd::CreationMeta::DEFAULT || (t.requires_grad() && t._base().is_leaf());
}

void Tracer::find_mutations() {
  std::unordered_map<const c10::StorageImpl*, std::vector<size_t>> sharing;
  for (size_t i = 0; i < examples_.size(); ++i)
    if (examples_[i].has_storage()) sharing[examples_[i].storage().unsafeGetStorageImpl()].push_back(i);
  for (size_t i = 0; i < primals_.size(); ++i) {
    if (primal_index_.at(primals_[i].unsafeGetTensorImpl()) != static_cast<int64_t>(i)) continue;
    // A number in a tensor, as autograd saves it, is never wrapped, and nobody writes to it.
    if (!fn::isFunctionalTensor(primals_[i])) continue;
    auto* wrapper = fn::unsafeGetFunctionalWrapper(primals_[i]);
    if (wrapper->was_storage_changed()) throw Unsupported("an input's storage is replaced (set_, .data =)");
    if (wrapper->has_metadata_mutation() || primals_[i].sizes() != examples_[i].sizes())
      throw Unsupported("an input's sizes or strides are changed in place");
    if (!primals_[i].requires_grad() && examples_[i].requires_grad())
      throw Unsupported("an input is detached in place");
    if (!wrapper->has_data_mutation()) continue;
    const Value value = value_of(primals_[i]);
    graph::Node* placeholder = graph_->inputs()[i];
    if (value == placeholder->out()) continue;
    for (size_t j : sharing[examples_[i].storage().unsafeGetStorageImpl()])
      if (!examples_[j].is_same(examples_[i]))
        throw Unsupported("inputs share memory and one of them is changed in place");
    // A write through a detached alias, or in no_grad, leaves the history as it was.
    if (primals_[i].requires_grad() && torch::autograd::impl::gradient_edge(primals_[i]) != edges_[i]) {
      if (refuses_writes(examples_[i]))
        throw Unsupported("a view that autograd lets nobody write to is changed in place");
      joint_.mutations.push_back({static_cast<int64_t>(i), add_forward(primals_[i], value)});
    } else {
      graph_->mutations().push_back({placeholder->out(), value, primals_[i]._version() == versions_[i]});
    }
  }
}

/// Whether a result that shares memory with no other result can be returned as memory of its own: as a view with gaps
/// or repeats of what eager keeps whole, it would have other strides.
bool Tracer::fills_its_base(const at::Tensor& t) {
  // A lazy conjugate or negative is one of what it is a view of.
  if (const at::Tensor inner = fn::from_functional_tensor(t); inner.is_conj() || inner.is_neg()) return false;
  // Autograd has to know that it is a view.
  if (t.requires_grad() && creation_of(t) == torch::autograd::CreationMeta::MULTI_OUTPUT_NODE) return false;
  if (fn::from_functional_tensor(t).is_non_overlapping_and_dense()) return true;
  const at::Tensor base = t.requires_grad() ? base_of_views(t) : storage_base(t);
  if (base.is_same(t)) return true;
  const Value value = fn::isFunctionalTensor(base) ? value_of(base) : recorder_.value_of(base);
  return !value.meta().is_non_overlapping_and_dense();
}

bool Tracer::has_history(const at::Tensor& t, Output& out) {
  bool has = false;
  try {
    has = t.grad_fn() != nullptr;  // a view of what was written gets it now
  } catch (const c10::Error& e) {
    if (out.kind != Output::Kind::InputView && out.kind != Output::Kind::View)
      throw Unsupported(std::string("the gradient: ") + e.what_without_backtrace());
    out.refused = true;
  }
  const bool input = out.kind == Output::Kind::InputView;
  if (!has || !(input || out.kind == Output::Kind::View)) return has;
  if (aten::is_custom_view(t)) throw Unsupported("a view that a custom autograd function made is returned");
  // The view will be made of its base, and has a history of that if it needs one.
  const auto at = static_cast<size_t>(out.index);
  const at::Tensor& base = input ? primals_[at] : forward_[at];
  if (base.requires_grad() && t.is_view() && base_of_views(t).is_same(base_of_views(base))) {
    const auto nodes = nodes_behind({torch::autograd::impl::gradient_edge(t)});
    const Edge wanted = torch::autograd::impl::gradient_edge(base);
    if (std::find(nodes.begin(), nodes.end(), wanted.function.get()) != nodes.end()) return true;
  }
  throw Unsupported("a view has another history than what it is a view of (detach, no_grad)");
}

void Tracer::classify(const std::vector<at::Tensor>& outputs) {
  // Outputs that share a storage with each other must do so again.
  std::unordered_map<Storage, std::vector<size_t>> groups;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].defined() && fn::isFunctionalTensor(outputs[i])) {
      fn::sync(outputs[i]);
      groups[storage_of(outputs[i])].push_back(i);
    }
  std::unordered_map<const c10::TensorImpl*, int64_t> first;
  std::unordered_map<Storage, int64_t> base_of;  // group -> its forward output
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& t = outputs[i];
    Output out;
    if (!t.defined()) {
      joint_.outputs.push_back(out);
      continue;
    }
    out.requires_grad = t.requires_grad();
    if (auto [it, fresh] = first.emplace(t.unsafeGetTensorImpl(), static_cast<int64_t>(i)); !fresh) {
      out.kind = Output::Kind::Same;
      out.index = it->second;
    } else if (auto primal = primal_index_.find(t.unsafeGetTensorImpl()); primal != primal_index_.end()) {
      out.kind = Output::Kind::Input;
      out.index = primal->second;
    } else if (!fn::isFunctionalTensor(t)) {
      out.kind = Output::Kind::Forward;
      out.index = add_forward(t, recorder_.value_of(t));
    } else if (auto owner = primal_of_storage_.find(storage_of(t)); owner != primal_of_storage_.end()) {
      // Geometry by the real input's strides: below functionalization a changed input is another tensor.
      out.kind = Output::Kind::InputView;
      out.index = owner->second;
      at::Tensor base = aten::make_plain_fake(examples_[static_cast<size_t>(owner->second)]);
      aten::FakeObserverGuard unseen(nullptr);
      c10::impl::ExcludeDispatchKeyGuard direct(c10::DispatchKeySet(c10::DispatchKey::Functionalize));
      const at::Tensor view = fn::apply_view_meta_sequence(base, fn::unsafeGetFunctionalWrapper(t)->view_metas());
      set_view(out, base, view, {view.sizes().vec(), view.strides().vec(), view.storage_offset()});
    } else if (const auto& group = groups.at(storage_of(t)); group.size() == 1 && fills_its_base(t)) {
      out.kind = Output::Kind::Forward;
      out.index = add_forward(t, value_of(t));
    } else {
      auto known = base_of.find(storage_of(t));
      if (known == base_of.end()) {
        at::Tensor base;
        for (size_t j : group) {
          const at::Tensor& member = outputs[j];
          if (!member.requires_grad()) continue;
          base = base_of_views(member);
          break;
        }
        for (size_t j : group)
          if (!base.defined() && fn::isBaseTensor(outputs[j])) base = outputs[j];
        const Value value = base.defined() ? value_of(base) : recorder_.value_of(storage_base(t));
        known = base_of.emplace(storage_of(t), add_forward(base.defined() ? base : storage_base(t), value)).first;
      }
      const at::Tensor& base = forward_[static_cast<size_t>(known->second)];
      out.index = known->second;
      if (base.is_same(t)) {
        out.kind = Output::Kind::Forward;
      } else {
        out.kind = Output::Kind::View;
        const at::Tensor inner = fn::from_functional_tensor(t);
        const at::Tensor inner_base = fn::isFunctionalTensor(base) ? fn::from_functional_tensor(base) : base;
        set_view(out, inner_base, inner, geometry_of(inner));
      }
    }
    if (t.requires_grad() && out.kind != Output::Kind::Input && out.kind != Output::Kind::Same)
      out.leaf = !has_history(t, out);
    out.detached = !t.is_view() && (out.leaf || !t.requires_grad());
    if (out.kind == Output::Kind::InputView || out.kind == Output::Kind::View) {
      const auto at = static_cast<size_t>(out.index);
      out.uncounted = !counted_together(out.kind == Output::Kind::View ? forward_[at] : primals_[at], t);
    }
    out.creation = creation_of(t);
    joint_.outputs.push_back(std::move(out));
  }
}

/// Whether a node has lost what it had saved, to a backward without retain_graph. Only the node itself knows, and says
/// so when it is run; without a gradient it does nothing else. Formulas that are not PyTorch's own may do more, and are
/// not asked: they count as `others`.
bool gave_up_saved(torch::autograd::Node& node, bool others) {
  if (dynamic_cast<torch::autograd::AccumulateGrad*>(&node) || dynamic_cast<torch::autograd::CopyBackwards*>(&node) ||
      aten::is_history_of_input(node))
    return false;
  if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(&node)) return slices->fn == nullptr;
  if (std::string_view(typeid(node).name()).find("autograd9generated") == std::string_view::npos) return others;
  aten::FakeObserverGuard unseen(nullptr);
  try {
    node(variable_list(node.num_inputs()));
  } catch (const c10::Error& e) {
    return std::string_view(e.what_without_backtrace()).find(kSecondTime) != std::string_view::npos;
  }
  return false;
}

/// Throws Unsupported if a gradient would flow into a leaf that is no primal, and that anybody could ask for it: not
/// into one that was made inside and is gone.
void Tracer::check_leaves(const edge_list& roots) {
  std::unordered_set<const torch::autograd::Node*> known;
  for (const Edge& e : edges_)
    if (e.is_valid()) known.insert(e.function.get());
  for (torch::autograd::Node* node : nodes_behind(roots)) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    if (!leaf || known.count(node)) continue;
    const at::Tensor& t = leaf->variable;
    if (!fn::isFunctionalTensor(t) || forward_index_.count(t.unsafeGetTensorImpl()))
      throw Unsupported("a tensor with requires_grad=True is made inside and outputs depend on it");
  }
}

/// Which tangents arrive where in the autograd graph behind some forward outputs.
struct Reach {
  using Node = torch::autograd::Node;
  struct Arrivals {
    TangentSet all;
    TangentSet zeros;  // those of them that a custom function on the way makes zeros for
  };
  explicit Reach(const edge_list& roots) : none(roots.size()), nodes(nodes_behind(roots)), nothing_{none, none} {
    std::sort(nodes.begin(), nodes.end(), [](Node* a, Node* b) { return a->topological_nr() > b->topological_nr(); });
    for (size_t i = 0; i < roots.size(); ++i) note(roots[i], {TangentSet(none).set(i), none});
    for (Node* node : nodes) {
      Arrivals& here = at_node_.at(node);
      if (makes_zeros(*node)) here.zeros = here.all;
      for (const Edge& e : node->next_edges())
        if (e.is_valid()) note(e, here);
    }
  }
  const TangentSet& at(const Edge& e) const { return arrivals(e).all; }
  const TangentSet& at(Node* node) const { return at_node_.at(node).all; }
  const TangentSet& zeros_at(const Edge& e) const { return arrivals(e).zeros; }

  const TangentSet none;
  std::vector<Node*> nodes;  // each before those that it passes gradients to

 private:
  const Arrivals& arrivals(const Edge& e) const {
    const auto it = at_edge_.find({e.function.get(), e.input_nr});
    return it == at_edge_.end() ? nothing_ : it->second;
  }
  void note(const Edge& e, const Arrivals& more) {
    const auto add = [&](Arrivals& to) {
      to.all |= more.all;
      to.zeros |= more.zeros;
    };
    add(at_node_.try_emplace(e.function.get(), nothing_).first->second);
    add(at_edge_.try_emplace({e.function.get(), e.input_nr}, nothing_).first->second);
  }
  const Arrivals nothing_;
  std::unordered_map<Node*, Arrivals> at_node_;
  std::map<std::pair<Node*, uint32_t>, Arrivals> at_edge_;
};

/// Finds out which tangents have autograd nodes with saved tensors in common. The graph has run and released its
/// variables.
void Tracer::relate_tangents(const Reach& reach) {
  // From the leaves up: what is shared by many is asked first, and answers for many.
  joint_.uses_up.assign(reach.none.size(), reach.none);
  for (auto it = reach.nodes.rbegin(); it != reach.nodes.rend(); ++it) {
    const TangentSet& here = reach.at(*it);
    const auto each = [&](auto&& f) {
      for (size_t i = here.find_first(); i != TangentSet::npos; i = here.find_next(i)) f(joint_.uses_up[i]);
    };
    bool known = true;
    each([&](const TangentSet& s) { known &= here.is_subset_of(s); });
    if (!known && gave_up_saved(**it, /*others=*/true)) each([&](TangentSet& s) { s |= here; });
  }
}

bool Tracer::is_freed(const Edge& root) const {
  return recorder_.differentiated &&
         std::ranges::any_of(nodes_behind({root}), [](auto* node) { return gave_up_saved(*node, /*others=*/false); });
}

bool Tracer::is_hooked(const Edge& root) const {
  return !hooked.empty() && std::ranges::any_of(nodes_behind({root}), [&](const auto* node) {
    const auto it = hooked.find(node);
    return it != hooked.end() && it->second > 0;
  });
}

/// Whether autograd knows the output as a view with a gradient.
bool is_differentiable_view(const Output& o) {
  return (o.kind == Output::Kind::View || o.kind == Output::Kind::InputView) && o.requires_grad && !o.leaf &&
         !o.refused && !o.uncounted;
}

void Tracer::note_freed(size_t i, const std::vector<at::Tensor>& outputs) {
  joint_.forward_freed[i] = true;
  const auto nodes = nodes_behind({torch::autograd::impl::gradient_edge(forward_[i])});
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (!is_differentiable_view(joint_.outputs[k])) continue;
    const Edge edge = torch::autograd::impl::gradient_edge(outputs[k]);
    if (std::find(nodes.begin(), nodes.end(), edge.function.get()) != nodes.end())
      joint_.views_behind_freed[static_cast<int64_t>(i)].push_back(k);
  }
}

std::vector<size_t> Tracer::views_with_gradients(const std::vector<at::Tensor>& outputs, edge_list roots) const {
  std::vector<size_t> views, out;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!is_differentiable_view(joint_.outputs[i])) continue;
    const Edge edge = torch::autograd::impl::gradient_edge(outputs[i]);
    if (std::find(roots.begin(), roots.end(), edge) != roots.end() || is_freed(edge) || is_hooked(edge)) continue;
    views.push_back(i);
    roots.push_back(edge);
  }
  if (views.empty()) return out;
  const Reach reach(roots);
  const size_t first = roots.size() - views.size();
  TangentSet wanted = reach.none;
  for (size_t k = first; k < roots.size(); ++k)
    if (const TangentSet& here = reach.at(roots[k]); here.count() > 1)
      wanted |= here;  // this view, and who passes by it
  for (size_t k = 0; k < views.size(); ++k)
    if (wanted.test(first + k)) out.push_back(views[k]);
  return out;
}

void Tracer::differentiate(const std::vector<at::Tensor>& outputs) {
  const size_t n = forward_.size();
  joint_.forward_requires_grad.assign(n, false);
  joint_.forward_freed.assign(n, false);
  edge_list roots, targets;
  std::vector<at::Tensor> of;
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& t = forward_[i];
    if (!t.requires_grad() || t.is_leaf()) continue;
    joint_.forward_requires_grad[i] = true;
    const Edge root = torch::autograd::impl::gradient_edge(t);
    if (is_freed(root)) {
      note_freed(i, outputs);
      continue;
    }
    if (is_hooked(root))
      throw Unsupported("a hook on a gradient that may be computed once more, after the captured part");
    joint_.tangent_of.push_back({.forward = static_cast<int64_t>(i)});
    of.push_back(t);
    roots.push_back(root);
  }
  if (roots.empty()) return;
  for (size_t i : views_with_gradients(outputs, roots)) {
    joint_.tangent_of.push_back({.view = static_cast<int64_t>(i)});
    of.push_back(outputs[i]);
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
  }
  check_leaves(roots);
  const Reach reach(roots);
  std::vector<int64_t> primals;
  for (size_t i = 0; i < edges_.size(); ++i) {
    const auto it = primal_index_.find(primals_[i].unsafeGetTensorImpl());
    if (!edges_[i].is_valid() || it->second != static_cast<int64_t>(i)) continue;
    // With an edge to it, autograd would run what lies behind this one, hooks too, on no gradient.
    if (reach.at(edges_[i]).none()) continue;
    primals.push_back(static_cast<int64_t>(i));
    targets.push_back(edges_[i]);
  }
  for (size_t k = 0; k < roots.size(); ++k)
    if (reach.at(roots[k]).count() > 1) {
      joint_.total_of.push_back(static_cast<int64_t>(k));
      targets.push_back(roots[k]);
    }
  for (const Edge& e : targets) {
    joint_.reached_from.push_back(reach.at(e));
    joint_.zeros_from.push_back(reach.zeros_at(e));
  }
  variable_list tangents;
  for (const at::Tensor& t : of) {
    graph::TensorMeta meta = aten::meta_of(t);
    meta.requires_grad = false;
    meta.offset = 0;
    if (!meta.is_non_overlapping_and_dense()) meta.strides = graph::contiguous_strides(meta.sizes);
    at::Tensor inner = aten::make_fake(meta);
    graph::Node* node = graph_->add_input("tangents_" + std::to_string(tangents.size() + 1), meta);
    recorder_.bind(inner, node->out());
    tangents.push_back(fn::to_functional_tensor(inner));
  }
  variable_list grads;
  try {
    recorder_.backward = true;
    at::AutoGradMode no_grad(false);
    if (!targets.empty())  // all leaves were made inside
      grads = torch::autograd::Engine::get_base_engine().execute(roots, tangents, /*keep_graph=*/false,
                                                                 /*create_graph=*/false,
                                                                 /*accumulate_grad=*/false, targets);
    recorder_.backward = false;
  } catch (const c10::Error& e) {
    recorder_.backward = false;
    // A backward() inside the program has freed the graph: the outputs still require grad, and differentiating them
    // fails.
    if (std::string_view(e.what_without_backtrace()).find(kSecondTime) == std::string_view::npos)
      // Eager, too, will fail, but only if the gradient is asked for.
      throw Unsupported(std::string("the gradient: ") + e.what_without_backtrace());
    for (const TangentOf& t : joint_.tangent_of)
      if (t.view < 0) note_freed(static_cast<size_t>(t.forward), outputs);
    joint_.tangent_of.clear();
    joint_.total_of.clear();
    joint_.reached_from.clear();
    joint_.zeros_from.clear();
    return;
  } catch (const aten::NeedsData&) {
    throw;
  } catch (const Unsupported&) {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& e) {  // of a custom operator's Python formula
    throw Unsupported(std::string("the gradient: ") + e.what());
  }
  relate_tangents(reach);
  for (const at::Tensor& g : grads) graph_->outputs().push_back(g.defined() ? Arg(value_of(g)) : Arg());
  joint_.grad_of = std::move(primals);
}

void Tracer::find_kept() {
  std::unordered_set<const graph::Node*> read;
  for (const auto& n : graph_->nodes())
    if (n->backward)
      for (const Arg& a : n->args)
        graph::for_each_value(a, [&](Value v) {
          if (v) read.insert(graph::storage_root(v).node);
        });
  for (size_t i = 0; i < primals_.size(); ++i) joint_.primal_kept.push_back(read.count(graph_->inputs()[i]) != 0);
  for (size_t i = 0; i < joint_.num_forward; ++i) {
    const Arg& out = graph_->outputs()[i];
    const Value v = out.is_value() ? out.value() : Value();
    joint_.output_kept.push_back(v && read.count(graph::storage_root(v).node) != 0);
  }
  for (const VisibleMutation& m : joint_.mutations) joint_.output_kept[static_cast<size_t>(m.forward)] = true;
}

Joint Tracer::run(const Program& program) {
  using c10::DispatchKey;
  const bool grad_enabled = aten::grad_enabled();
  c10::InferenceMode no_inference(false);
  at::AutoGradMode grad_mode(grad_enabled);
  // Whoever records above autograd has nothing to see here.
  c10::impl::ExcludeDispatchKeyGuard quiet(c10::DispatchKeySet(DispatchKey::TESTING_ONLY_GenericMode));
  make_primals();
  aten::FakeModeGuard fakes;
  aten::FakeObserverGuard observe(&recorder_);
  c10::impl::IncludeDispatchKeyGuard functional(c10::DispatchKeySet(DispatchKey::Functionalize));
  fn::FunctionalizationReapplyViewsGuard views(true);
  const aten::FunctionalForms forms;
  const std::vector<at::Tensor> outputs = program(primals_);
  recorder_.stack = nullptr;
  recorder_.module_path.clear();
  for (const auto& [primal, flag] : flags_) primal.set_requires_grad(flag);
  find_mutations();
  classify(outputs);
  joint_.num_primals = primals_.size();
  joint_.num_forward = forward_.size();
  for (const Value& v : forward_values_) graph_->outputs().push_back(Arg(v));
  const std::vector<Value> before = visible_values();
  differentiate(outputs);
  if (visible_values() != before) throw Unsupported("the backward of a custom operator writes to an input or a result");
  find_kept();
  if (joint_.tangent_of.empty())
    while (graph_->inputs().size() > joint_.num_primals) graph_->erase_input(graph_->inputs().size() - 1);
  joint_.graph = std::move(graph_);
  return std::move(joint_);
}

}  // namespace

bool TraceState::is_active() { return active != nullptr; }
void TraceState::note_origin(const graph::Node& node) {
  if (!active) return;
  active->recorder().stack = node.stack;
  active->recorder().module_path = node.module_path;
  active->recorder().checkpoint = node.checkpoint;
}
void TraceState::set_requires_grad(const at::Tensor& t, bool wanted) {
  if (active && active->is_primal(t)) active->keep_flag(t);
  t.set_requires_grad(wanted);
}
void TraceState::note_hook(const torch::autograd::Node* node, bool registered) {
  if (active && node) active->hooked[node] += registered ? 1 : -1;
}

at::Tensor TraceState::constant(const std::vector<Arg>& args, const graph::TensorMeta& meta) {
  if (!active) return aten::constant_tensor(args);
  return fn::to_functional_tensor(active->recorder().constant(args, meta));
}
at::Tensor TraceState::laid_out(const at::Tensor& value, const std::vector<int64_t>& strides) {
  return active ? active->recorder().laid_out(value, strides) : value;
}
void TraceState::lay_out(const at::Tensor& functional, const std::vector<int64_t>& strides) {
  if (active) aten::write_below(functional, laid_out(aten::value_below(functional), strides));
}
TraceState::BackwardScope::BackwardScope() {
  if (!active) return;
  before_ = std::exchange(active->recorder().backward, true);
  active->recorder().differentiated = true;
}
TraceState::BackwardScope::~BackwardScope() {
  if (active) active->recorder().backward = before_;
}

namespace {
/// What PyTorch's functionalization has no form for: what it says, and in the user's words.
constexpr std::pair<std::string_view, const char*> kWithoutForm[] = {
    {"as_strided() is non-compositional", "a write to an as_strided() view of a view"},
    {"a tensor being mutated that has internal overlap", "a write to a view whose elements share memory (unfold)"},
    {"view_as_real doesn't work on unresolved conjugated tensors", "a write to a lazy conjugate that is taken apart"},
};
}  // namespace

Joint trace_joint(const Program& program, const std::vector<at::Tensor>& examples) {
  Tracer tracer(examples);
  const aten::NoSavedTensorHooks no_hooks;
  const at::DisableRecordFunctionGuard not_profiled;  // it would look into tensors without data
  struct Activate {
    explicit Activate(Tracer* t) : before(std::exchange(active, t)) {}
    ~Activate() { active = before; }
    Tracer* before;
  } activate(&tracer);
  try {
    return tracer.run(program);
  } catch (const aten::NeedsData& e) {
    throw Unsupported(std::string("the gradient needs data of the forward pass: ") + e.what());
  } catch (const std::exception& e) {  // a c10::Error, or one that came through a Python program
    for (const auto& [text, cause] : kWithoutForm)
      if (std::string_view(e.what()).find(text) != std::string_view::npos) throw Unsupported(cause);
    throw;
  }
}

}  // namespace kiln::joint
