#include "python/frame/compile.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <unordered_set>

#include "aten/modes.h"
#include "aten/schema.h"
#include "base/bisect.h"
#include "base/error.h"
#include "base/log.h"
#include "base/pass.h"
#include "base/timer.h"
#include "compiler/compile.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"
#include "python/capture/callables.h"
#include "python/capture/capture.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/py311.h"
#include "python/frame/bytecode/code.h"
#include "python/frame/callable.h"
#include "python/frame/engine.h"
#include "python/frame/errors.h"
#include "python/frame/hook.h"
#include "python/frame/records.h"
#include "python/frame/resume.h"
#include "python/guards/class_image.h"
#include "python/pch.h"

namespace kiln::frame {

using capture::CaptureResult;
using capture::Exit;

namespace {

/// One code compiles this often on behalf of different owners, in units of the recompile limit.
constexpr int64_t kOwners = 16;

std::string utf8(PyObject* o) {
  const char* s = PyUnicode_AsUTF8(o);
  if (s) return s;
  PyErr_Clear();
  return "?";
}

/// The code's qualified name, of resume functions with what tells them apart.
std::string name_of(PyCodeObject* code) {
  const CodeInfo* info = find_code_info(code);
  return utf8(code->co_qualname) + (info && info->resume ? "." + info->resume->label : "");
}

/// Puts back a Python exception that travelled through C++ code as a C++ one.
void restore_python_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (pybind11::error_already_set& e) {
    e.restore();
  } catch (python_error& e) {
    e.restore();
  } catch (...) {
  }
}

/// An abandoned capture may leave in the middle of an except block: puts back what the thread was handling before.
class HandledException {
 public:
  explicit HandledException(PyThreadState* tstate)
      : tstate_(tstate), item_(tstate->exc_info), value_(py::Ref::borrow(item_->exc_value)) {}
  ~HandledException() {
    tstate_->exc_info = item_;
    Py_XSETREF(item_->exc_value, value_.release());
  }
  HandledException(const HandledException&) = delete;

 private:
  PyThreadState* tstate_;
  _PyErr_StackItem* item_;
  py::Ref value_;
};

/// Ctrl-C during a compile stops it.
void check_signals() {
  if (PyErr_CheckSignals() < 0) throw py::PythonError{};
}

/// The user's stack with each line's text, as Python prints it.
std::string with_source(const std::string& stack) {
  static PyObject* show = PyObject_GetAttrString(capture::polyfills(), "with_source");
  py::Ref text = py::Ref::steal(show ? PyObject_CallFunction(show, "s", stack.c_str()) : nullptr);
  if (!text) PyErr_Clear();
  return text ? utf8(text.get()) : stack;
}

std::string reason_text(const capture::BreakReason& r) {
  std::string s = r.cause;
  if (!r.file.empty()) s += "\n  at " + r.file + ":" + std::to_string(r.line);
  if (!r.hint.empty()) s += "\n  hint: " + r.hint;
  if (!r.stack.empty()) s += "\n" + with_source(r.stack);
  if (!r.id.empty()) s += (s.back() == '\n' ? "  [" : "\n  [") + r.id + "]";
  return s;
}

/// Whether the break is the program's own exception, which the continuation raises as eager does.
bool raises_itself(const CaptureResult& result) { return result.exit.reason.id == "exception"; }

std::string not_full(const CaptureResult& result) {
  return "graph break in a function compiled with fullgraph=True: " + reason_text(result.exit.reason);
}

/// Outputs that no recipe uses (values of dead locals) are not computed.
void drop_unused_outputs(CaptureResult& result, LeaveProgram& leave) {
  if (!result.traced) return;
  const size_t count = result.traced->outputs().size();
  const std::vector<int64_t>& used = leave.used_outputs();
  if (used.size() == count) return;
  std::vector<int64_t> map(count, -1);
  for (size_t i = 0; i < used.size(); ++i) map.at(static_cast<size_t>(used[i])) = static_cast<int64_t>(i);
  for (graph::Graph* g : {result.traced.get(), result.torch_level.get()}) {
    if (!g || g->outputs().size() != count) continue;
    std::vector<graph::Arg> kept;
    for (int64_t i : used) kept.push_back(g->outputs()[static_cast<size_t>(i)]);
    g->outputs() = std::move(kept);
  }
  leave.renumber_outputs(map);
  for (auto& o : result.inference_outputs) o.index = map.at(static_cast<size_t>(o.index));
  std::erase_if(result.inference_outputs, [](const auto& o) { return o.index < 0; });
}

/// What running the graph changes.
Entry::Effects effects_of(const graph::Graph& g) {
  Entry::Effects effects{.changes = false, .draws = false};
  capture::Bases bases;
  for (const auto& n : g.nodes()) {
    const aten::OpInfo* op = n->kind == graph::NodeKind::Call ? aten::find_op(n->op) : nullptr;
    effects.changes |= !capture::changes_nothing(*n, bases);
    effects.draws |= op && op->random;
  }
  return effects;
}

/// Which inputs the graph's ops write to, directly or through views.
std::vector<bool> written_inputs(const graph::Graph& g) {
  std::unordered_map<const graph::Node*, size_t> place;
  for (size_t i = 0; i < g.inputs().size(); ++i) place[g.inputs()[i]] = i;
  std::vector<bool> written(g.inputs().size(), false);
  bool any = false;
  for (const auto& n : g.nodes())
    aten::for_each_written(*n, [&](graph::Value v) {
      const auto it = place.find(graph::storage_root(v).node);
      if (it != place.end()) written[it->second] = any = true;
    });
  return any ? written : std::vector<bool>();
}

const aten::Sizes& sizes_of(const CaptureResult::Condition& c) {
  static const auto* none = new aten::Sizes;
  return c.sizes ? *c.sizes : *none;
}

/// Whether the captured graph can be run at other sizes; if not, the guards are for these alone from now on.
bool leaves_sizes_open(CaptureResult& result, PyCodeObject* code, bool for_fx) {
  if (!result.sizes) return false;
  const aten::Sizes& sizes = *result.sizes;
  if (!result.traced && sizes.refused().empty() && sizes.conditions().empty() && sizes.outputs().empty())
    return false;  // nothing depends on them, and the guards need not
  std::string why;
  const bool open = sizes.any_open() || !result.open_ints.empty();
  if (!open || !result.traced)
    why = "no graph";
  else if (result.failed_is_asked)
    why = "an assertion that is asked before anything is written";
  else if (for_fx)
    why = backend_refusal(result);
  for (const auto* condition : {&result.eager_condition, &result.other_branch})
    if (why.empty() && condition->graph) {
      why = runtime::SizedProgram::refusal(*condition->graph, sizes_of(*condition));
      if (why.empty() && !runtime::SizedProgram::runs(*condition->graph))
        why = "a condition on data that autograd decides";
    }
  if (why.empty()) why = runtime::SizedProgram::refusal(*result.traced, sizes);
  if (why.empty()) return true;
  close_torch_sizes(result);
  for (guards::Guard& g : result.guards) {
    g.any_dims = 0;
    for (const auto& open : result.open_ints)
      if (g.kind == guards::Guard::Kind::SmallInt && g.source == open.source) {
        g.kind = guards::Guard::Kind::Equals;
        g.object = open.value;
      }
  }
  if (open) log_artifact(Topic::recompiles, place_of(code), "its sizes cannot be left open: " + why);
  return false;
}

/// The graph's inputs that have open sizes.
std::vector<size_t> open_inputs(const CaptureResult& result) {
  std::vector<size_t> open;
  for (size_t i = 0; i < result.inputs.size(); ++i)
    if (result.sizes->is_open(result.traced->inputs()[i]->out())) open.push_back(i);
  return open;
}

/// Gives the entry the other sizes. To be called last: what a backend is given of sizes, and looks at, is in the
/// program.
void open_sizes(const CaptureResult& result, const ConfigPtr& config, Entry& entry) {
  const auto changes = [bases = capture::Bases()](const graph::Node& n) mutable {
    return !capture::changes_nothing(n, bases);
  };
  auto program = runtime::SizedProgram::make(result.traced, *result.sizes, changes);
  // What has been written cannot be taken back; and a Python backend's graph asks nothing.
  const auto asks =
      program->asks_behind_changes() || config->backend ? SizedEntry::Asks::All : SizedEntry::Asks::Inputs;
  entry.sizes = std::make_unique<SizedEntry>(std::move(program), open_inputs(result), asks, config);
}

/// Gives the entry with open sizes what is compiled for `examples`.
void add_captured(const CaptureResult& result, const std::vector<at::Tensor>& examples, Entry& entry,
                  std::chrono::steady_clock::time_point start) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  runtime::SizedProgram::Ints ints;
  for (const auto& given : result.open_ints) ints.push_back(PyLong_AsLongLong(given.value.get()));
  entry.sizes->add_captured(examples, ints, std::move(entry.delivered_sizes), std::move(entry.graph), seconds);
}

void compile_graph(CaptureResult& result, bool open, const ConfigPtr& wanted, Entry& entry) {
  if (!result.traced) return;
  const Config& config = *wanted;
  if (!config.backend) {
    StageTimer timer("backend");
    const auto start = std::chrono::steady_clock::now();
    std::vector<at::Tensor> examples;
    for (const py::Ref& o : result.example_inputs) examples.push_back(THPVariable_Unpack(o.get()));
    const bool computes = result.traced->nodes().size() > result.traced->inputs().size();
    if (computes) entry.graph = compile_for(*result.traced, examples, config);
    // The graph takes its inputs for separate; a write would otherwise show in another.
    entry.tree.set_written(written_inputs(*result.traced));
    const auto compiled = [&](const CaptureResult::Condition& c) -> Entry::Condition {
      std::vector<at::Tensor> asked;
      for (size_t i : c.inputs) asked.push_back(examples.at(i));
      if (!c.graph) return {};
      if (open) return {nullptr, runtime::SizedProgram::make(c.graph, sizes_of(c)), c.inputs};
      return {compile_for(*c.graph, asked, config), nullptr, c.inputs};
    };
    entry.eager_condition = compiled(result.eager_condition);
    entry.other_branch = compiled(result.other_branch);
    if (!open) return;
    open_sizes(result, wanted, entry);
    add_captured(result, examples, entry, start);
    return;
  }
  entry.python_graph = std::make_unique<PythonGraph>(result, config.backend.get(), open);
  if (open) open_sizes(result, wanted, entry);
}

/// Logs and the record for kiln.explain.
void tell(PyCodeObject* code, const CaptureResult& result, const Entry& entry, const Continuation* continuation,
          const graph::Graph* torch_level) {
  // What has no names at torch's level is shown as it was traced.
  const bool computes = result.traced && result.traced->nodes().size() > result.traced->inputs().size();
  const graph::Graph* const shown = torch_level || !computes ? torch_level : result.traced.get();
  const std::string graph_text = shown ? graph::print(*shown) : "";
  const std::string place = place_of(code);
  std::string bytecode;
  if (result.exit.kind == Exit::Kind::Break) log_artifact(Topic::graph_breaks, place, reason_text(result.exit.reason));
  if (log_enabled(Topic::bytecode) || (recording() && continuation)) {
    bytecode = "original:\n" + bytecode::disassemble(reinterpret_cast<PyObject*>(code));
    if (continuation) {
      bytecode += "\nafter graph break (the compiled graph has run; .state holds what it left):\n" +
                  bytecode::disassemble(continuation->code.get());
      for (const py::Ref& r : continuation->resume_codes)
        bytecode += "\n" + name_of(reinterpret_cast<PyCodeObject*>(r.get())) + ":\n" + bytecode::disassemble(r.get());
    } else {
      bytecode += "\nmodified: none, the compiled graph returns the function's result\n";
    }
    log_artifact(Topic::bytecode, place, bytecode);
  }
  if (log_enabled(Topic::guards)) {
    std::string text;
    for (const auto& g : entry.tree.guards()) text += g.text() + "\n";
    if (entry.sizes)
      for (const std::string& line : result.sizes->texts()) text += line + "\n";
    log_artifact(Topic::guards, place, text);
  }
  if (!graph_text.empty()) log_artifact(Topic::graph, place, graph_text);
  log_stage_times(place);
  if (!recording()) return;
  Record r;
  r.function = name_of(code);
  r.file = utf8(code->co_filename);
  r.line = code->co_firstlineno;
  r.graph = graph_text;
  if (shown) {
    for (const auto& n : shown->nodes())
      if (n->kind == graph::NodeKind::Call) r.ops.push_back(n->op.name());
    r.dot.push_back(graph::to_dot(*shown));
  }
  if (result.traced) r.aten.push_back(graph::print(*result.traced));
  for (const auto& g : entry.tree.guards()) r.guards.push_back(g.text());
  if (entry.sizes)
    for (std::string& line : result.sizes->texts()) r.guards.push_back(std::move(line));
  r.has_break = result.exit.kind == Exit::Kind::Break;
  r.reason = result.exit.reason;
  r.stages = stage_times();
  r.bytecode = bytecode;
  if (entry.graph) r.artifact = entry.graph->describe();
  add_record(std::move(r));
}

/// Whether the graph changes something, or draws, behind the last node that is known to save tensors. A checkpoint
/// stops its second run at the last tensor that the first saved.
bool changes_behind_saves(const graph::Graph& g) {
  capture::Bases bases;
  bool behind = false;
  for (const auto& n : g.nodes()) {
    if (n->kind != graph::NodeKind::Call) continue;
    const aten::OpInfo* op = aten::find_op(n->op);
    behind |= !capture::changes_nothing(*n, bases) || (op && op->random);
    if (ops::saves_tensors(n->op) && !n->results.empty() && n->results[0].requires_grad) behind = false;
  }
  return behind;
}

/// Throws where the second run that a checkpoint makes of the call would leave other effects than eager's.
void check_checkpoint(const CaptureResult& result) {
  if (guards::saved_hooks() != guards::SavedHooks::Keeping) return;
  if (!result.side_effects.empty() || (result.traced && changes_behind_saves(*result.traced)))
    throw UnsupportedHere(
        "it has side effects inside of a checkpoint, which stops its second run half way. Hint: compile the function "
        "that calls the checkpoint");
}

guards::Call call_of(PyCodeObject* code, _PyInterpreterFrame* frame) {
  const int first_free = code->co_nlocalsplus - code->co_nfreevars;
  return {frame->localsplus, first_free, frame->f_func->func_closure, first_free};
}

struct BuildOptions {
  bool last = false;  // few more may be compiled
  bool expects_jumps = true;
};

EntryPtr build(PyThreadState* tstate, _PyInterpreterFrame* frame, CodeCache& cache, const ConfigPtr& shared_config,
               const BuildOptions& how) {
  const Config& config = *shared_config;
  PyCodeObject* code = frame->f_code;
  stage_times().clear();
  const guards::ChangingNumbers changing;
  CaptureResult result;
  {
    StageTimer timer("capture");
    capture::CaptureOptions options;
    options.fullgraph = config.fullgraph;
    options.changing_numbers = &cache.changing_numbers;
    if (pass_enabled("capture.changing_functions")) options.changing_functions = &cache.changing_functions;
    // Better a break than a compile for each.
    if (!config.fullgraph) options.changing_contents = &cache.changing_contents;
    // An fx graph has ints as they are, and floats as constants.
    options.floats_change = !config.backend && pass_enabled("capture.changing_floats");
    options.open_ints = pass_enabled("capture.changing_ints");
    const CodeInfo* info = code_info(code);
    options.resumes = info && info->resume;
    options.ints_change = !config.backend && options.open_ints;
    options.constant_numbers = cache.constant_numbers;
    options.constant_numbers_break = how.last && options.ints_change && !config.fullgraph;
    options.item_numbers = !config.backend && pass_enabled("capture.item_numbers");
    options.breaking_items = cache.breaking_items;
    options.assertions = !config.backend && pass_enabled("capture.assertions");
    options.for_fx = static_cast<bool>(config.backend);
    // kiln.explain tells of the breaks that may come.
    if (how.expects_jumps && options.assertions && !recording() && pass_enabled("capture.expected_jumps"))
      options.expected_jump = expected_jump;
    // Data that decide otherwise again and again: better a break than the recompile limit.
    constexpr int64_t kMostBranches = 4;
    const int64_t branches = std::count_if(cache.entries.begin(), cache.entries.end(),
                                           [](const EntryPtr& e) { return static_cast<bool>(e->other_branch); });
    options.data_branches = pass_enabled("capture.data_branches") && branches < kMostBranches;
    options.masks = pass_enabled("capture.masks");
    options.masks_change = branches > 0;
    // Where sizes decide on the program's way again and again, each is better taken by itself.
    constexpr int64_t kMostOpen = 4;
    const bool few = std::count_if(cache.entries.begin(), cache.entries.end(), [&](const EntryPtr& e) {
                       return e->sizes && e->tree.failure(call_of(code, frame)).empty();
                     }) < kMostOpen;
    // What runs operator by operator first, and is compiled then, saves other tensors in a checkpoint's second run.
    const bool settled = guards::saved_hooks() == guards::SavedHooks::Keeping;
    if (few && !settled && cache.backend_takes_sizes && pass_enabled("capture.open_sizes"))
      options.open_sizes = config.dynamic.value_or(false) ? capture::CaptureOptions::OpenSizes::All
                           : config.dynamic               ? capture::CaptureOptions::OpenSizes::None
                                                          : capture::CaptureOptions::OpenSizes::Some;
    if (pass_enabled("capture.changing_sizes")) options.changing_sizes = &cache.changing_sizes;
    options.look_through = [&](PyObject* o) { return original_of(o, config); };
    const HandledException handled(tstate);
    result = capture::capture_frame(tstate, frame, options);
    cache.constant_numbers = result.constant_numbers;
    cache.breaking_items = result.breaking_items;
  }
  check_signals();
  check_checkpoint(result);
  const bool breaks = result.exit.kind == Exit::Kind::Break;
  if (breaks && config.fullgraph && !raises_itself(result)) {
    log_artifact(Topic::graph_breaks, place_of(code), reason_text(result.exit.reason));
    raise("GraphBreakError", not_full(result));
  }
  Continuation continuation;
  const bool open = leaves_sizes_open(result, code, static_cast<bool>(config.backend));
  // A loop over parameters of many shapes: better a break than to compile for each.
  if (!open && result.sizes && result.sizes->any_open() && result.failed_is_asked && !result.expected_jumps.empty())
    return build(tstate, frame, cache, shared_config, {.last = how.last, .expects_jumps = false});
  std::vector<guards::SourcePtr> wanted;
  for (const auto& input : result.inputs) wanted.push_back(input.source);
  if (open)
    for (const auto& given : result.open_ints) wanted.push_back(given.source);
  std::vector<capture::RecipePtr> results;
  if (breaks) {
    StageTimer timer("resume");
    continuation = make_continuation(code, result.exit);
    results = continuation.results;
  } else {
    results.push_back(result.exit.value);
  }
  auto leave = std::make_unique<LeaveProgram>(results, result.side_effects, wanted);
  drop_unused_outputs(result, *leave);
  if (result.failed) {
    result.traced->outputs().emplace_back(result.failed);
    if (result.failed_is_asked) result.traced->asked = result.traced->outputs().size() - 1;
  }
  // Backends may change the graph they are given.
  std::shared_ptr<graph::Graph> torch_level;
  if (result.torch_level && (recording() || log_enabled(Topic::graph)))
    torch_level = with_names(*result.torch_level, result.torch_targets);
  auto entry = std::make_shared<Entry>(result.guards, wanted);
  entry->globals = py::Ref::borrow(frame->f_func->func_globals);
  entry->num_inputs = result.inputs.size();
  if (open) entry->num_ints = result.open_ints.size();
  if (result.sizes)
    for (const symbolic::Number& n : result.sizes->outputs())
      entry->delivered_sizes.push_back(result.sizes->hint_bits(n));
  entry->leave = std::move(leave);
  entry->inference_outputs = result.inference_outputs;
  entry->continuation = continuation.code;
  if (breaks && config.fullgraph) entry->raises = not_full(result);
  if (result.traced) entry->num_outputs = result.traced->outputs().size();
  if (result.traced) entry->effects = effects_of(*result.traced);
  entry->has_assertions = static_cast<bool>(result.failed);
  for (const auto& [in, at] : result.expected_jumps)
    entry->expected.push_back(jump_site(reinterpret_cast<PyCodeObject*>(in.get()), at, code));
  if (const auto& reason = result.exit.reason; breaks && reason.jump_code && entry->raises.empty() && !config.backend) {
    auto* const in = reinterpret_cast<PyCodeObject*>(reason.jump_code.get());
    const JumpSite site = jump_site(in, reason.jump_at, code);
    if (in == code) entry->breaks_at = site;
    // Known, and a break all the same: nothing could see to it.
    if (pass_enabled("capture.expected_jumps") && !expected_jump(in, reason.jump_at)) entry->waits_for = site;
  }
  try {
    compile_graph(result, open, shared_config, *entry);
  } catch (const py::PythonError&) {
    // Sizes that nobody asked to be left open: perhaps the backend is for tensors alone.
    if (!config.backend || !open || config.dynamic || !PyErr_ExceptionMatches(PyExc_Exception)) throw;
    log_artifact(Topic::recompiles, place_of(code),
                 "the backend raised for open sizes, which are constants from now on");
    PyErr_Clear();
    cache.backend_takes_sizes = false;
    return build(tstate, frame, cache, shared_config, how);
  }
  check_signals();
  tell(code, result, *entry, breaks ? &continuation : nullptr, torch_level.get());
  return entry;
}

/// What differs from the last entry in this call, and need not be a constant of the next one; or from an older one that
/// differs in nothing else: weights and biases may take turns, and so may callers. True if that was news.
bool note_changes(CodeCache& cache, const guards::Call& call) {
  using Kind = guards::GuardTree::Change::Kind;
  bool news = false;
  for (const EntryPtr& entry : cache.entries) {
    bool alone = false;
    const auto changes = entry->tree.changes(call, &alone);
    if (!alone && entry != cache.entries.front()) continue;
    for (const auto& change : changes) {
      const std::string source = change.source->id();
      if (change.kind == Kind::Sizes) {
        uint64_t& dims = cache.changing_sizes[source];
        news |= (change.dims & ~dims) != 0;
        dims |= change.dims;
      } else {
        auto& sources = change.kind == Kind::Function   ? cache.changing_functions
                        : change.kind == Kind::Contents ? cache.changing_contents
                                                        : cache.changing_numbers;
        news |= sources.insert(source).second;
      }
    }
    if (alone) break;
  }
  return news;
}

/// The guards that failed for this call, one line for each entry, of those that were used last.
std::string failures(PyCodeObject* code, _PyInterpreterFrame* frame, CodeCache& cache) {
  constexpr size_t kMostLines = 10;
  const guards::Call call = call_of(code, frame);
  std::string text;
  for (size_t i = 0; i < cache.entries.size(); ++i) {
    if (i == kMostLines) return text + "  and " + std::to_string(cache.entries.size() - i) + " more\n";
    const std::string failure = cache.entries[i]->tree.failure(call);
    const char* none = cache.entries[i]->other_branch ? "a number decides for another branch" : "no guard fails";
    text += "  entry " + std::to_string(cache.entries[i]->id) + ": " + (failure.empty() ? none : failure) + "\n";
  }
  return text;
}

/// Drops the entry of `owner` that was used the longest ago if there are more than `most`.
void drop_oldest(CodeCache& cache, const void* owner, int64_t most) {
  const auto own = [&](const EntryPtr& e) { return e->owner == owner; };
  if (std::count_if(cache.entries.begin(), cache.entries.end(), own) <= most) return;
  cache.entries.erase(std::next(std::find_if(cache.entries.rbegin(), cache.entries.rend(), own)).base());
}

}  // namespace

std::string place_of(PyCodeObject* code) {
  return name_of(code) + " (" + utf8(code->co_filename) + ":" + std::to_string(code->co_firstlineno) + ")";
}

std::shared_ptr<runtime::CompiledFunction> compile_for(const graph::Graph& traced,
                                                       const std::vector<at::Tensor>& examples, const Config& config) {
  // A backward() may call it later, without the GIL.
  const auto compiler = [config](const graph::Graph& g, const std::string& which) {
    const pybind11::gil_scoped_acquire gil;  // of the options
    const OptionScope options(config);
    return compiler::compile_functional(g, which == "inference");
  };
  return compiler::compile_traced(traced, examples, compiler);
}

EntryPtr compile_frame(PyThreadState* tstate, _PyInterpreterFrame* frame, const Target& target, Late late) {
  const ConfigPtr& config = target.config;
  CodeCache& cache = *target.cache;
  CodeCache::Owner& owner = cache.owners[target.owner];
  const bool root = target.root;
  PyCodeObject* code = frame->f_code;
  const std::string place = place_of(code);
  // Nothing that runs for the compile itself is to be compiled.
  Scoped<ConfigPtr> quiet(mode().config, nullptr);
  const NoGarbageCollection no_collection;
  // A profiler would record operators that run on stand-ins, whose memory it cannot ask for.
  const at::DisableRecordFunctionGuard not_profiled;
  OptionScope scope(*config);
  const aten::NoSavedTensorHooks no_hooks;
  if (const char* why = guards::eager_only()) {
    if (config->fullgraph) raise("Unsupported", "cannot compile " + place + ": " + why);
    log_artifact(Topic::graph_breaks, place, std::string("runs in eager: ") + why);
    if (root && guards::saved_hooks() == guards::SavedHooks::Others)
      warn_once("hooks around " + place, "kiln: " + place + " runs in eager: " + why +
                                             ". Hint: compile the function that sets them, or calls the checkpoint.");
    return nullptr;
  }
  start_engine();
  if (!cache.entries.empty() && log_enabled(Topic::recompiles))
    log_artifact(Topic::recompiles, place, failures(code, frame, cache));
  // In a loop over parameters, whose turns differ in several respects, what is only learned need not count: the next
  // entry does for the calls of one that was made for a constant.
  const bool news = note_changes(cache, call_of(code, frame)), resumes = code_info(code) && code_info(code)->resume;
  cache.drop_unreachable();  // only now: a function that is gone tells what changes as well as another does
  const int64_t limit = options().recompile_limit;
  const bool all = cache.compiles - cache.late_sizes.made() >= kOwners * limit;
  const int64_t counted = owner.compiles - std::min(owner.more_general, limit / 2);
  if (late == Late::No && (all || counted >= limit)) {
    const std::string text =
        "kiln: " + place + " was compiled " + std::to_string(all ? cache.compiles : owner.compiles) +
        " times, the recompile limit; other calls run in eager from now on" +
        (options().size_limit > 0 ? ", unless they come so often that a compile pays" : "") +
        ". Guards that failed this time:\n" + failures(code, frame, cache) +
        "Hint: raise kiln.config.recompile_limit, or make what changes a tensor. KILN_LOGS=recompiles shows each.";
    if (config->fullgraph) raise("RecompileLimit", text);
    (all ? cache.eager : owner.eager) = true;
    owner.limited = true;
    warn_once("limit " + place, text);
    return nullptr;
  }
  if (!bisect_allows(BisectUnit::Function, place)) {
    cache.eager = true;
    return nullptr;
  }
  try {
    const auto start = std::chrono::steady_clock::now();
    // Better a break at what needs a number's value than the recompile limit: a list that is indexed by a counter.
    const bool last = late != Late::Sizes && counted + limit / 4 >= limit;
    EntryPtr entry = build(tstate, frame, cache, config, {.last = last});
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    cache.late_sizes.took(seconds);
    mode().compile_seconds += seconds;
    entry->id = cache.compiles++;
    entry->owner = target.owner;
    cache.owners[target.owner].put_off = 0;
    if (late == Late::No) {
      ++cache.owners[target.owner].compiles;
      cache.owners[target.owner].more_general += news && resumes;
    }
    cache.entries.insert(cache.entries.begin(), entry);
    if (late != Late::No) drop_oldest(cache, target.owner, limit + options().size_limit);
    return entry;
  } catch (const py::PythonError&) {
    throw;
  } catch (const NotYet&) {
    throw;
  } catch (const Unsupported& e) {
    if (config->fullgraph) raise("Unsupported", "cannot compile " + place + " as one graph: " + e.what());
    // Other calls have, or may get, their entries; this kind of call runs in eager, and is tried again until the limit.
    if (cache.entries.empty() && !dynamic_cast<const UnsupportedHere*>(&e)) {
      cache.eager = true;
    } else {
      ++cache.compiles;
      ++cache.owners[target.owner].compiles;
    }
    log_artifact(Topic::graph_breaks, place, std::string("runs in eager: ") + e.what());
    if (root) warn_once("unsupported " + place, "kiln: " + place + " runs in eager: " + e.what());
  } catch (const UserError& e) {
    raise("UserError", e.what());
  } catch (const std::exception& e) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&e);
    const std::string what = c10_error ? c10_error->what_without_backtrace() : e.what();
    restore_python_error(std::current_exception());
    // Ctrl-C and sys.exit are the user's.
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw py::PythonError{};
    PyErr_Clear();
    if (options().strict) raise("InternalError", "compiling " + place + " failed: " + what);
    cache.eager = true;
    warn_once("internal " + what, "kiln: compiling " + place + " failed, it runs in eager. This is a bug of kiln's: " +
                                      what + "\nHint: KILN_STRICT=1 raises the error instead.");
  }
  return nullptr;
}

}  // namespace kiln::frame
