#include "backward/compiled_autograd.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <mutex>

#include "aten/fake.h"
#include "aten/pch.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/timer.h"
#include "runtime/autograd_node.h"

namespace kiln::backward {
namespace {

std::mutex session_mutex;
std::shared_ptr<Session> the_session;

std::shared_ptr<Session> current_session() {
  const std::lock_guard<std::mutex> lock(session_mutex);
  return the_session;
}

/// Whether a trace differentiates: its engine is not the program's.
bool is_traced(const NodePtr& root) {
  const auto* graph_root = dynamic_cast<const torch::autograd::GraphRoot*>(root.get());
  const auto is_fake = [](const at::Tensor& t) {
    return aten::is_fake(t) || (t.defined() && at::functionalization::impl::isFunctionalTensor(t));
  };
  return graph_root && std::any_of(graph_root->outputs.begin(), graph_root->outputs.end(), is_fake);
}

/// Whether only a run shows which gradients a node returns: that of a torch.autograd.Function.
bool must_be_seen(const Turn& turn) { return turn.runs && is_of_type(*turn.node, "PyNode"); }

/// What PyTorch's engine calls in place of running a backward.
variable_list run_backward(const NodePtr& root, const GraphTask& given, bool accumulate, const edge_list& outputs) {
  auto& task = const_cast<GraphTask&>(given);
  const at::ThreadLocalStateGuard modes(task.thread_locals_);
  const std::vector<Turn> turns = execution_order(root, task);
  const edge_list captured = accumulate ? edge_list() : outputs;
  const std::shared_ptr<Session> session = is_traced(root) ? nullptr : current_session();
  return session ? session->run(turns, task, captured) : run_in_eager(turns, task, captured.size());
}

/// What the engine does when it has run nodes whose graph is not kept.
void release(const std::vector<Turn>& turns, const DifferentiatedByTurn& differentiated) {
  for (const auto& [turn, results] : differentiated)
    static_cast<runtime::CompiledBackward&>(*turns[turn].node).use_up(results);
  for (const Turn& turn : turns) {
    if (!turn.runs) continue;
    turn.node->will_release_variables();
    turn.node->release_variables();
  }
}

}  // namespace

std::shared_ptr<Session> set_session(std::shared_ptr<Session> session) {
  const std::lock_guard<std::mutex> lock(session_mutex);
  torch::autograd::Engine::set_compiled_autograd(session ? &run_backward : nullptr);
  return std::exchange(the_session, std::move(session));
}

void Session::say(const std::string& why) {
  log_artifact(Topic::compiled_autograd, "a backward that runs in eager", why);
  if (said_.insert(why).second) frontend_->warn("kiln: a backward runs in eager under kiln.compiled_autograd: " + why);
}

Session::Entry* Session::find(const std::vector<Turn>& turns, const GraphTask& task, const edge_list& outputs,
                              Call& call) {
  try {
    look_through(turns, task, outputs, call);
  } catch (const c10::NotImplementedError& e) {
    say(e.what_without_backtrace());
    return nullptr;
  } catch (const c10::Error&) {
    return nullptr;  // the engine will say it, when it comes to that node
  }
  if (!call.collected.sv_to_hooks.empty()) {
    say("a node's tensors were saved by hooks (checkpoint, saved_tensors_hooks)");
    return nullptr;
  }
  const auto found = entries_.find(call.key);
  if (found != entries_.end()) return &found->second;
  if (kinds_[call.structure]++ >= options().recompile_limit) {
    say("recompile_limit (" + std::to_string(options().recompile_limit) + ") backwards of one kind were compiled");
    return nullptr;
  }
  return &entries_[call.key];
}

void Session::compile(Entry& entry, Call& call, const std::vector<Turn>& turns, size_t num_outputs) {
  const auto refuse = [&](const std::string& why) {
    entry.refused = true;
    say(why);
  };
  try {
    std::unique_ptr<graph::Graph> g;
    {
      const StageTimer timer("compiled autograd");
      Tracer tracer(call, entry.returned);
      frontend_->with_compiler(tracer, [&](PyObject* compiler) { g = tracer.run(turns, num_outputs, compiler); });
      entry.differentiated = tracer.differentiated();
    }
    log_artifact(Topic::compiled_autograd, "backward", graph::print(*g));
    entry.compiled = frontend_->compile(*g, call);
    ++size_;
  } catch (const Unsupported& e) {
    refuse(e.what());
  } catch (const aten::NeedsData& e) {
    refuse(e.what());
  } catch (const c10::Error& e) {
    refuse(e.what_without_backtrace());
  } catch (const InternalError& e) {
    if (options().strict) throw;
    refuse(std::string(e.what()) + " (a bug of kiln's)");
  }
}

variable_list Session::run(const std::vector<Turn>& turns, GraphTask& task, const edge_list& outputs) {
  variable_list result;
  Entry* entry = nullptr;
  bool compiled = false;
  frontend_->hold_gil([&] {
    const std::string why = why_not(turns);
    if (!why.empty()) log_artifact(Topic::compiled_autograd, "a backward that runs in eager", why);
    if (!why.empty() || busy_) return;
    Call call;
    {
      busy_ = true;
      const auto done = c10::make_scope_exit([&] { busy_ = false; });
      entry = find(turns, task, outputs, call);
      if (!entry || entry->refused) return;
      if (!entry->compiled && !entry->seen && std::any_of(turns.begin(), turns.end(), must_be_seen)) return;
      if (!entry->compiled) compile(*entry, call, turns, outputs.size());
      if (entry->refused) return;
    }
    compiled = true;
    const Frontend::Compiled function = entry->compiled;
    if (!task.keep_graph_) release(turns, entry->differentiated);
    result = function(call);
  });
  if (!compiled) {
    if (!entry || entry->refused || entry->seen) return run_in_eager(turns, task, outputs.size());
    ReturnedByTurn returned;
    result = run_in_eager(turns, task, outputs.size(), [&](size_t turn, Node&, const variable_list& grads) {
      for (const at::Tensor& t : grads) returned[turn].push_back(t.defined());
    });
    frontend_->hold_gil([&] {
      entry->returned = std::move(returned);
      entry->seen = true;
    });
    return result;
  }
  run_final_callbacks(task);
  return result;
}

}  // namespace kiln::backward
