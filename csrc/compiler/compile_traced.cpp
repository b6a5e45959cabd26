#include "compiler/compile_traced.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "aten/schema.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/pass.h"
#include "base/timer.h"
#include "graph/passes/channels_last.h"
#include "graph/passes/lift_convolutions.h"
#include "graph/passes/passes.h"
#include "graph/passes/patch_convolutions.h"
#include "graph/passes/split_complex.h"
#include "graph/passes/volume_convolutions.h"
#include "graph/passes/widen_half.h"
#include "joint/finish.h"
#include "joint/partition/tangents.h"
#include "joint/rematerialize.h"
#include "ops/ops.h"
#include "runtime/aten_artifact.h"
#include "runtime/compiled_function.h"

namespace kiln::compiler {
namespace {

void pass(const char* name, graph::Graph& g, const std::function<bool()>& body) {
  run_pass(name, {[&] { return graph::print(g); }, [&] { graph::verify(g, /*functional=*/true); }}, body);
}

/// Whether the traced graph can be replayed on real tensors, without effects on what else there is: no .grad is
/// accumulated, no hook registered.
bool replayable(const graph::Graph& traced) {
  const auto may = [](const std::string& name) {
    return name == "kiln::tensor_constant" || name == "kiln::autograd_grad" ||
           name.starts_with("kiln::custom_function");
  };
  for (const auto& n : traced.nodes())
    if (n->kind == graph::NodeKind::Call && n->op.name().starts_with("kiln::") && !may(n->op.name()) &&
        !aten::find_op(n->op))
      return false;
  return true;
}

/// Makes parts of the backward pass, such as that for the outputs that have a gradient. It is called in the middle of a
/// backward(), where there is no way back to eager: what cannot be compiled runs by ATen's kernels.
struct BackwardMaker {
  std::shared_ptr<const graph::Graph> graph;
  size_t num_saved;
  std::vector<joint::TangentSet> reached_from;
  size_t num_grads;
  GraphCompiler compiler;
  std::shared_ptr<runtime::Artifact> all;  // for all outputs, if it was made at once
  int64_t made = 0;

  runtime::BackwardPass operator()(const joint::Part& wanted) {
    if (all && wanted.defined.all()) return {all, all_inputs()};
    joint::Narrowed part = graph_of(wanted);
    if (log_enabled(Topic::aot)) log_artifact(Topic::aot, "backward graph of some outputs", graph::print(*part.graph));
    const size_t before = stage_times().size();
    auto artifact = compile(*part.graph);
    log_stage_times("backward of some outputs", before);
    return {std::move(artifact), std::move(part.inputs)};
  }

  joint::Narrowed graph_of(const joint::Part& wanted) const {
    if (all && wanted.defined.all()) return {graph->clone(), all_inputs()};
    joint::Narrowed part = joint::narrow(*graph, num_saved, wanted, reached_from, num_grads);
    TORCH_CHECK(part.graph,
                "the gradient of one result of this compiled function by another is asked for (retain_grad, a hook, "
                "autograd.grad), and is no value of its own in the backward graph: run the function in eager");
    return part;
  }

 private:
  std::vector<size_t> all_inputs() const {
    std::vector<size_t> inputs(graph->inputs().size());
    std::iota(inputs.begin(), inputs.end(), size_t{0});
    return inputs;
  }
  std::shared_ptr<runtime::Artifact> compile(const graph::Graph& g) {
    // One loss after another, each with a graph of its own, is no reason to compile for ever.
    if (made++ >= options().recompile_limit) return runtime::aten_artifact(g);
    try {
      graph::verify(g, /*functional=*/true);
      return compiler(g, "backward");
    } catch (const Unsupported& e) {
      TORCH_WARN("kiln: a backward pass cannot be compiled, its operations run one by one: ", e.what());
    } catch (const InternalError& e) {
      if (options().strict) throw;
      TORCH_WARN("kiln: compiling a backward pass failed, its operations run one by one. This is a bug of kiln's: ",
                 e.what());
    }
    return runtime::aten_artifact(g);
  }
};

/// Whether results of `n`, new statistics aside, depend on its argument `i`: a normalization by the statistics of its
/// own input does not read the running ones.
bool depends_on(const graph::Node& n, size_t i) {
  const aten::OpInfo* op = aten::find_op(n.op);
  if (!op) return true;
  const auto& arguments = op->schema().arguments();
  const auto is_named = [&](size_t at, std::initializer_list<std::string_view> names) {
    return at < arguments.size() && std::find(names.begin(), names.end(), arguments[at].name()) != names.end();
  };
  if (!is_named(i, {"running_mean", "running_var"})) return true;
  for (size_t k = 0; k < n.args.size(); ++k)
    if (is_named(k, {"training", "train"})) return !n.args[k].is<bool>() || !n.args[k].as<bool>();
  return true;
}

using NodeSet = std::unordered_set<const graph::Node*>;

/// The nodes that `a` depends on.
NodeSet computed_from(const graph::Arg& a) {
  NodeSet read;
  std::vector<const graph::Node*> todo;
  const auto visit = [&](graph::Value v) {
    if (v && read.insert(v.node).second) todo.push_back(v.node);
  };
  graph::for_each_value(a, visit);
  while (!todo.empty()) {
    const graph::Node* n = todo.back();
    todo.pop_back();
    for (size_t i = 0; i < n->args.size(); ++i)
      if (depends_on(*n, i)) graph::for_each_value(n->args[i], visit);
  }
  return read;
}

/// The value that a tangent is the gradient of; of a view, what that is a view of.
graph::Arg differentiated(const joint::Joint& joint, size_t tangent) {
  const joint::TangentOf& of = joint.tangent_of[tangent];
  if (of.view < 0) return joint.graph->outputs()[static_cast<size_t>(of.forward)];
  const joint::Output& o = joint.outputs[static_cast<size_t>(of.view)];
  const auto i = static_cast<size_t>(o.index);
  return o.kind == joint::Output::Kind::View ? joint.graph->outputs()[i] : graph::Arg(joint.graph->inputs()[i]->out());
}

/// By primal: the tangents whose results are computed from it.
std::vector<joint::TangentSet> results_of_primals(const joint::Joint& joint) {
  const joint::TangentSet none(joint.tangent_of.size());
  std::unordered_map<const graph::Node*, joint::TangentSet> results;
  const auto note = [&](const joint::TangentSet& of) {
    return [&](graph::Value v) {
      if (v) results.try_emplace(v.node, none).first->second |= of;
    };
  };
  const graph::Graph& g = *joint.graph;
  for (size_t k = 0; k < none.size(); ++k)
    graph::for_each_value(differentiated(joint, k), note(joint::TangentSet(none).set(k)));
  for (auto n = g.nodes().rbegin(); n != g.nodes().rend(); ++n) {
    const auto it = results.find(n->get());
    if (it == results.end()) continue;
    const joint::TangentSet of = it->second;
    for (size_t i = 0; i < (*n)->args.size(); ++i)
      if (depends_on(**n, i)) graph::for_each_value((*n)->args[i], note(of));
  }
  std::vector<joint::TangentSet> out;
  for (size_t i = 0; i < joint.num_primals; ++i) {
    const auto it = results.find(g.inputs()[i]);
    out.push_back(it == results.end() ? none : it->second);
  }
  return out;
}

/// Whether a second differentiation, which runs the program again, finds the results of the first time: its outputs by
/// position, and its inputs as they were. Tells `parts` what to keep for it.
bool can_run_again(const joint::Joint& joint, runtime::CompiledParts& parts) {
  constexpr int64_t kMostCopied = 1 << 20;  // bytes in all
  if (!joint.mutations.empty()) return false;
  for (const joint::Output& o : joint.outputs)
    if (o.kind == joint::Output::Kind::View && !o.requires_grad) return false;
  const graph::Graph& g = *joint.graph;
  for (const auto& n : g.nodes()) parts.draws |= n->kind == graph::NodeKind::Call && ops::is_random(n->op);
  NodeSet read;
  if (!g.mutations().empty())
    for (const graph::Arg& a : g.outputs()) read.merge(computed_from(a));
  parts.results_of = results_of_primals(joint);
  int64_t copied = 0;
  for (size_t i = 0; i < joint.num_primals; ++i) {
    const graph::Node* input = g.inputs()[i];
    if (std::none_of(g.mutations().begin(), g.mutations().end(), [&](const auto& m) { return m.input.node == input; }))
      continue;
    parts.written.push_back(i);
    if (!read.contains(input)) continue;  // running statistics
    parts.copied.push_back(i);
    const graph::TensorMeta& meta = input->results.at(0);
    copied += meta.numel() * dtype_size(meta.dtype);
  }
  return copied <= kMostCopied;
}

using Positions = std::unordered_map<const graph::Node*, size_t>;

Positions positions_in(const graph::Graph& g) {
  Positions position;
  for (const auto& n : g.nodes()) position.emplace(n.get(), position.size());
  return position;
}

/// Who asks for gradients of an input or another result finds that the way there was freed only if there was one.
void note_freed(const joint::Joint& joint, runtime::CompiledParts& parts) {
  const auto& outputs = joint.graph->outputs();
  std::vector<size_t> freed;
  for (size_t i = 0; i < joint.forward_freed.size(); ++i)
    if (joint.forward_freed[i]) freed.push_back(i);
  if (freed.empty()) return;
  Positions position = positions_in(*joint.graph);
  std::ranges::sort(freed, {}, [&](size_t i) { return position[outputs[i].value().node]; });
  for (size_t at = 0; at < freed.size(); ++at) {
    const NodeSet from = computed_from(outputs[freed[at]]);
    runtime::CompiledParts::Freed f{.forward = freed[at]};
    for (size_t k = 0; k < joint.num_primals; ++k)
      if (from.contains(joint.graph->inputs()[k])) f.primals.push_back(k);
    const auto note = [&](size_t k) {
      if (from.contains(outputs[k].value().node)) f.forwards.push_back(k);
    };
    for (const joint::TangentOf& of : joint.tangent_of)
      if (of.view < 0) note(static_cast<size_t>(of.forward));
    std::for_each_n(freed.begin(), at, note);
    if (const auto it = joint.views_behind_freed.find(static_cast<int64_t>(freed[at]));
        it != joint.views_behind_freed.end())
      f.views = it->second;
    parts.freed.push_back(std::move(f));
  }
}

void note_order(const joint::Joint& joint, runtime::CompiledParts& parts) {
  Positions position = positions_in(*joint.graph);
  std::vector<std::pair<size_t, size_t>> places;
  for (size_t k = 0; k < joint.tangent_of.size(); ++k) {
    size_t last = 0;
    graph::for_each_value(differentiated(joint, k), [&](graph::Value v) { last = position[v.node]; });
    places.emplace_back(last, k);
  }
  std::sort(places.begin(), places.end());
  joint::TangentSet placed(places.size());
  const std::function<void(size_t)> put = [&](size_t k) {
    if (placed.test_set(k)) return;
    const joint::TangentSet& before = parts.contributes_to[k];
    for (size_t j = before.find_first(); j != joint::TangentSet::npos; j = before.find_next(j)) put(j);
    parts.in_order.push_back(k);
  };
  for (const auto& [place, k] : places) put(k);
}

/// Rewrites operators, and lays values out, for kiln's kernels. Before the partition, so that saved activations keep
/// the layout.
void prepare_for_kernels(graph::Graph& g) {
  const auto slow = [](DType t) { return options().widen_half ? is_half(t) : graph::has_slow_products(t); };
  pass("joint.widen_half", g, [&] { return graph::widen_half(g, slow) && (graph::clean_up(g), true); });
  pass("joint.split_complex", g, [&] { return graph::split_complex(g) && (graph::clean_up(g), true); });
  pass("joint.lift_convolutions", g, [&] { return graph::lift_convolutions(g); });
  pass("joint.channels_last", g, [&] { return graph::convert_to_channels_last(g); });
  pass("joint.patch_convolutions", g, [&] { return graph::patch_convolutions(g); });
  pass("joint.volume_convolutions", g, [&] { return graph::volume_convolutions(g); });
}

}  // namespace

std::shared_ptr<runtime::CompiledFunction> compile_joint(joint::Joint joint, GraphCompiler compiler,
                                                         joint::PartitionMode mode, joint::Program eager,
                                                         Strides strides) {
  if (!compiler)
    compiler = [](const graph::Graph& g, const std::string& which) {
      return compile_functional(g, which == "inference");
    };
  graph::Graph& g = *joint.graph;
  pass("joint.remove_dead", g, [&] { return joint::remove_dead(g); });
  graph::clean_up(g);
  if (strides == Strides::Free) prepare_for_kernels(g);
  pass("joint.rematerialize", g, [&] { return joint::rematerialize(g); });
  pass("joint.separate_outputs", g, [&] { return joint::separate_outputs(joint); });
  if (log_enabled(Topic::aot)) log_artifact(Topic::aot, "joint graph", graph::print(g));

  auto parts = std::make_shared<runtime::CompiledParts>();
  parts->num_primals = joint.num_primals;
  parts->num_forward = joint.num_forward;
  parts->outputs = joint.outputs;
  parts->mutations = joint.mutations;
  parts->forward_requires_grad = joint.forward_requires_grad;
  parts->tangent_of = joint.tangent_of;
  parts->grad_of = joint.grad_of;
  for (size_t i = joint.num_primals; i < g.inputs().size(); ++i)
    parts->tangent_metas.push_back(g.inputs()[i]->results.at(0));
  note_freed(joint, *parts);
  if (!joint.has_backward()) {
    parts->forward = compiler(g, "inference");
    return runtime::make_compiled_function(std::move(parts));
  }
  if (eager && can_run_again(joint, *parts)) parts->eager = std::move(eager);

  joint::Parts cut;
  {
    StageTimer timer("joint.partition");
    cut = joint::partition(joint, mode);
    graph::verify(*cut.forward, /*functional=*/true);
    graph::verify(*cut.backward, /*functional=*/true);
  }
  if (log_enabled(Topic::aot)) {
    log_artifact(Topic::aot, "forward graph", graph::print(*cut.forward));
    log_artifact(Topic::aot, "backward graph", graph::print(*cut.backward));
  }
  parts->saved = cut.saved;
  parts->readers_of_saved = joint::readers_of_saved(*cut.backward, cut.saved.size(), joint.reached_from);
  parts->uses_up = joint.uses_up;
  parts->reached_from.assign(joint.reached_from.begin(),
                             joint.reached_from.begin() + static_cast<ptrdiff_t>(joint.grad_of.size()));
  parts->zeros_from.assign(joint.zeros_from.begin(),
                           joint.zeros_from.begin() + static_cast<ptrdiff_t>(joint.grad_of.size()));
  parts->contributes_to.assign(joint.tangent_of.size(), parts->no_tangents());
  for (size_t i = 0; i < joint.total_of.size(); ++i) {
    const auto to = static_cast<size_t>(joint.total_of[i]);
    const joint::TangentSet& from = joint.reached_from[joint.grad_of.size() + i];
    for (size_t k = from.find_first(); k != joint::TangentSet::npos; k = from.find_next(k))
      if (k != to) parts->contributes_to[k].set(to);
  }
  note_order(joint, *parts);
  parts->forward = compiler(*cut.forward, "forward");
  // Which of several outputs will be differentiated is known at the first backward().
  std::shared_ptr<runtime::Artifact> all;
  if (joint.tangent_of.size() == 1) all = compiler(*cut.backward, "backward");
  const auto maker = std::make_shared<BackwardMaker>(BackwardMaker{std::move(cut.backward), cut.saved.size(),
                                                                   std::move(joint.reached_from), joint.grad_of.size(),
                                                                   std::move(compiler), std::move(all)});
  static std::atomic<uint64_t> last_id{0};
  parts->id = ++last_id;
  parts->make_backward = [maker](const joint::Part& wanted) { return (*maker)(wanted); };
  parts->graph_of_backward = [maker](const joint::Part& wanted) { return maker->graph_of(wanted); };
  return runtime::make_compiled_function(std::move(parts));
}

std::shared_ptr<runtime::CompiledFunction> compile_traced(const graph::Graph& traced,
                                                          const std::vector<at::Tensor>& examples,
                                                          GraphCompiler compiler) {
  joint::Joint joint;
  {
    StageTimer timer("joint.trace");
    joint = joint::trace_joint(joint::replay(traced), examples);
  }
  if (traced.asked) {
    const joint::Output& asked = joint.outputs.at(*traced.asked);
    KILN_CHECK(asked.kind == joint::Output::Kind::Forward, "what a graph asks is no value of its own");
    joint.graph->asked = static_cast<size_t>(asked.index);
  }
  // Weights that nobody writes here keep their packed and folded forms between calls; with a backward, an update
  // follows.
  if (!joint.has_backward()) {
    for (size_t i = 0; i < joint.num_primals; ++i) joint.graph->inputs()[i]->frozen = traced.inputs()[i]->frozen;
    for (const graph::Mutation& m : joint.graph->mutations()) m.input.node->frozen = false;
    for (const joint::VisibleMutation& m : joint.mutations)
      joint.graph->inputs()[static_cast<size_t>(m.input)]->frozen = false;
  }
  joint::Program eager;
  if (joint.has_backward() && replayable(traced)) {
    eager = joint::replay(std::shared_ptr<const graph::Graph>(traced.clone()));
  }
  return compile_joint(std::move(joint), std::move(compiler), joint::PartitionMode::MinCut, std::move(eager));
}

}  // namespace kiln::compiler
