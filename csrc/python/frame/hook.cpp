#include "python/frame/hook.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "aten/autograd.h"
#include "aten/modes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "python/capture/callables.h"
#include "python/capture/capture.h"
#include "python/cpython/bound_arguments.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/py311.h"
#include "python/cpython/tensor.h"
#include "python/frame/compile.h"
#include "python/frame/errors.h"
#include "python/frame/resume.h"
#include "python/frame/skip.h"
#include "python/frame/turn.h"
#include "python/pch.h"
#include "runtime/random/generator_state.h"

namespace kiln::frame {
namespace {

int hook_depth = 0;                       // under the GIL
int64_t outermost_calls = 0;              // so often it was 0 before
_PyFrameEvalFunction previous = nullptr;  // the evaluator that was installed before
_PyFrameEvalFunction above = nullptr;     // the one that was put above ours and calls it; null if there is none

/// The frame that compile_and_run waits for on this thread.
struct Pending {
  const Target* target = nullptr;
};
Pending& pending() {
  thread_local Pending p;
  return p;
}

PyObject* run_plainly(PyThreadState* tstate, py311::Frame* frame, int throw_flag) {
  // The one before may have put itself above ours since, and hands the frame back: it has had its turn then.
  thread_local const py311::Frame* handed_on = nullptr;
  if (!previous || handed_on == frame) return _PyEval_EvalFrameDefault(tstate, frame, throw_flag);
  Scoped<const py311::Frame*> handed(handed_on, frame);
  return previous(tstate, frame, throw_flag);
}

guards::Call call_of(const Target& t, PyObject* const* locals, int count) {
  return {locals, count, t.function->func_closure, t.code->co_nlocalsplus - t.code->co_nfreevars,
          t.function->func_globals};
}

/// A function object for `code` with the target's globals and closure.
py::Ref function_for(const Target& t, PyObject* code) {
  py::Ref f = py::check(PyFunction_New(code, t.function->func_globals));
  if (t.function->func_closure && PyFunction_SetClosure(f.get(), t.function->func_closure) < 0) throw py::PythonError{};
  return f;
}

/// A graph raised that leaves no trace, or is not to run: the frame is to be run as it is. `took`: wants to know how
/// long; may be empty.
struct RunAgain {
  std::function<void(double seconds)> took = nullptr;
  bool in_parts = false;  // what the call calls is compiled, which does not count
  bool failed = false;    // an assertion of the program, or a branch that went another way than expected
};

/// What `f` returns, and the seconds that it took, compiles aside.
template <class F>
std::pair<PyObject*, double> timed(F&& f) {
  using Clock = std::chrono::steady_clock;
  const double compiles = mode().compile_seconds;
  const Clock::time_point start = Clock::now();
  PyObject* result = f();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return {result, seconds - (mode().compile_seconds - compiles)};
}

/// Calls the target's code as CPython would, with arguments that are bound already, and compiles nothing below it, or
/// what it calls alone. `held`: what holds the arguments of a resume function, to be let go when it begins.
PyObject* call_plainly(Target t, const guards::Call& call, const RunAgain& again, std::vector<py::Ref>* held) {
  const py::Ref function = function_for(t, reinterpret_cast<PyObject*>(t.code));
  std::optional<py::BoundArguments> given;
  if (!held) given.emplace(t.code, call.locals);
  const auto invoke = [&] {
    return given
               ? PyObject_Call(function.get(), given->args.get(), given->kwargs.get())
               : PyObject_Vectorcall(function.get(), call.locals, static_cast<size_t>(num_arguments(t.code)), nullptr);
  };
  const auto [result, seconds] = timed([&] {
    t.plain = again.in_parts || held;
    t.all_plain = !again.in_parts;
    t.held = held;
    if (t.plain) return compile_and_run(t, invoke);
    Scoped<int> off(mode().disabled, mode().disabled + 1);
    return invoke();
  });
  if (again.took && result) again.took(seconds);
  return result;
}

/// The same of a call whose frame may be there, and has not begun.
PyObject* run_again(const Target& target, const guards::Call& call, const RunAgain& again, std::vector<py::Ref>* held,
                    py311::Frame* frame) {
  if (!frame) return call_plainly(target, call, again, held);
  const auto [result, seconds] = timed([&] {
    Scoped<int> off(mode().disabled, mode().disabled + (again.in_parts ? 0 : 1));
    return run_plainly(PyThreadState_Get(), frame, 0);
  });
  if (again.took && result) again.took(seconds);
  return result;
}

/// The ints that an entry with open sizes is given.
std::vector<int64_t> ints_of(const Entry& entry, PyObject* const* values) {
  std::vector<int64_t> ints;
  for (size_t i = 0; i < entry.num_ints; ++i) ints.push_back(PyLong_AsLongLong(values[entry.num_inputs + i]));
  return ints;
}

/// Whether there is a condition and it holds for the entry's inputs. What cannot be computed (an int divided by zero)
/// is no case for the entry either.
bool holds(const Entry& entry, const Entry::Condition& condition, PyObject* const* values) {
  if (!condition) return false;
  std::vector<at::Tensor> asked;
  asked.reserve(condition.inputs.size());
  for (size_t i : condition.inputs) asked.push_back(py::graph_input(values[i]));
  try {
    runtime::SizedProgram::Ints delivered;
    return (condition.program ? condition.program->run(std::move(asked), ints_of(entry, values), &delivered)
                              : condition.graph->call(std::move(asked)))
        .at(0)
        .item<bool>();
  } catch (const std::exception&) {
    return true;
  }
}

/// Whether the entry is for the sizes of a call for which its guards hold.
bool fits(const Entry& entry, PyObject* const* values) {
  return !entry.sizes || entry.sizes->fits(values, ints_of(entry, values));
}

/// The graph's outputs for the inputs `values`. Lets go of what the guards fetched once the inputs are held otherwise.
GraphOutputs run_graph(Entry& entry, PyObject* const* values, guards::Owned& owned) {
  GraphOutputs out;
  out.sizes = entry.delivered_sizes;
  if (entry.graph || (entry.sizes && !entry.python_graph)) {
    std::vector<at::Tensor> inputs;
    inputs.reserve(entry.num_inputs);
    for (size_t i = 0; i < entry.num_inputs; ++i) inputs.push_back(py::graph_input(values[i]));
    if (holds(entry, entry.eager_condition, values)) throw RunAgain{};
    const std::vector<int64_t> ints = ints_of(entry, values);
    if (entry.sizes) {
      if (auto took = entry.sizes->waits(inputs, ints)) throw RunAgain{std::move(took)};
      if (auto took = entry.sizes->runs_in_parts(inputs, ints)) throw RunAgain{std::move(took), /*in_parts=*/true};
    }
    if (!entry.has_assertions) entry.leave->drop_gradients(values + entry.first_source());
    owned.clear();
    std::optional<runtime::GeneratorState> generator;
    if (entry.effects.draws) generator.emplace();
    Scoped<ConfigPtr> quiet(mode().config, nullptr);  // kernels of operators may be in Python
    runtime::raised_before_writes() = false;
    try {
      if (entry.sizes) {
        out.tensors = entry.sizes->run(std::move(inputs), ints, &out.sizes);
      } else {
        pybind11::gil_scoped_release no_gil;
        out.tensors = entry.graph->call(std::move(inputs));
      }
    } catch (const runtime::AssertionFailed& e) {
      if (generator) generator->restore();
      log_artifact(Topic::fallback, "the call is run again in eager", e.what());
      throw RunAgain{.failed = true};
    } catch (const std::exception& e) {
      if (entry.effects.changes && !runtime::raised_before_writes()) throw;
      log_artifact(Topic::fallback, "a graph raised and is run again in eager", e.what());
      if (generator) generator->restore();
      throw RunAgain{};
    }
    if (entry.has_assertions) {
      if (out.tensors.back().item<bool>()) {
        log_artifact(Topic::fallback, "an assertion failed and the call is run again in eager", "");
        if (generator) generator->restore();
        throw RunAgain{.failed = true};
      }
      out.tensors.pop_back();
    }
    for (const auto& made : entry.inference_outputs) {
      at::Tensor& t = out.tensors.at(static_cast<size_t>(made.index));
      if (made.view)
        aten::note_inference_view(t);
      else
        t = aten::as_inference_tensor(t);
    }
  } else if (entry.python_graph) {
    out.python = true;
    if (entry.sizes) out.sizes = entry.sizes->delivered(values, ints_of(entry, values));
    out.objects = entry.python_graph->run(values);
  }
  return out;
}

/// Runs graph, recipes and effects; returns the results.
std::vector<py::Ref> run_region(Entry& entry, PyObject* const* values, guards::Owned& owned) {
  // What the recipes read must stay while other code may run.
  const size_t sources = entry.tree.num_wanted() - entry.first_source();
  std::vector<py::Ref> held;
  held.reserve(sources);
  for (size_t i = 0; i < sources; ++i) held.push_back(py::Ref::borrow(values[entry.first_source() + i]));
  const GraphOutputs outputs = run_graph(entry, values, owned);
  return entry.leave->run(outputs, values + entry.first_source());
}

/// For a call that differs from an entry of the owner's in sizes alone: what tells its sizes from others. The oldest
/// such entry is asked, so that equal sizes have one key; the very first is often for the state before an optimizer's
/// first step.
std::optional<uint64_t> other_sizes(const Target& target, const guards::Call& call) {
  CodeCache& cache = *target.cache;
  if (cache.eager || mode().run_only || options().size_limit <= 0) return std::nullopt;
  CodeCache::Owner& owner = cache.owners[target.owner];
  if (owner.quiet > 0 && !mode().sizes_vary) {
    --owner.quiet;
    return std::nullopt;
  }
  // Taken wrongly, a call runs in eager, and its time counts for other sizes.
  for (const EntryPtr& e : cache.entries) {
    if (owner.taken == 0 || e->id != owner.sizes_of || e->globals.get() != call.globals) continue;
    const std::optional<uint64_t> key = e->tree.sizes_key_at(call, owner.sizes_at);
    if (!key || cache.late_sizes.pays(*key)) break;
    --owner.taken;
    return key;
  }
  std::vector<Entry*> own;
  for (const EntryPtr& e : cache.entries)
    if (e->owner == target.owner && e->globals.get() == call.globals) own.push_back(e.get());
  std::sort(own.begin(), own.end(), [](const Entry* a, const Entry* b) { return a->id < b->id; });
  constexpr uint32_t kLongestTaken = 63;
  for (Entry* e : own) {
    owner.sizes_at.clear();
    if (const std::optional<uint64_t> key = e->tree.sizes_key(call, &owner.sizes_at)) {
      owner.last_quiet = 0;
      owner.taken = owner.last_taken = std::min(2 * owner.last_taken + 1, kLongestTaken);
      owner.sizes_of = e->id;
      return key;
    }
  }
  owner.taken = owner.last_taken = 0;
  // A look at all guards of all entries costs more than many a call.
  constexpr uint32_t kLongestQuiet = 1023;
  owner.quiet = owner.last_quiet = std::min(2 * owner.last_quiet + 1, kLongestQuiet);
  return std::nullopt;
}

/// Runs the frame as it is, and tells `cache` what calls of such sizes cost. What it calls may be compiled, which is
/// not counted.
PyObject* run_for_sizes(PyThreadState* tstate, py311::Frame* frame, CodeCache& cache, uint64_t sizes) {
  Scoped<bool> vary(mode().sizes_vary, true);
  const auto [result, seconds] = timed([&] { return run_plainly(tstate, frame, 0); });
  if (result) cache.late_sizes.ran(sizes, seconds);
  return result;
}

/// The owner's, if it runs in eager because it has reached the recompile limit; else null.
SecondChance* chance_of(const Target& target) {
  if (target.cache->eager || mode().run_only || options().size_limit <= 0) return nullptr;
  CodeCache::Owner& owner = target.cache->owners[target.owner];
  return owner.limited ? &owner.chance : nullptr;
}

/// Runs the frame as it is, which counts for a second chance.
PyObject* run_for_chance(PyThreadState* tstate, py311::Frame* frame, const Target& target) {
  const auto [result, seconds] = timed([&] { return run_plainly(tstate, frame, 0); });
  if (SecondChance* const chance = chance_of(target); chance && result) chance->ran(seconds);  // if it is there still
  return result;
}

PyObject* run_frame(PyThreadState* tstate, py311::Frame* frame, const Target& target) {
  const guards::Call call = call_of(target, frame->localsplus, target.code->co_nlocalsplus - target.code->co_nfreevars);
  std::vector<PyObject*> values;
  guards::Owned owned;
  EntryPtr entry = find_entry(target, call, values, owned);
  if (!entry) {
    const auto eager = [&] {
      return target.cache->eager || target.cache->owners[target.owner].eager || mode().run_only;
    };
    const bool vary = mode().sizes_vary;
    const bool settled = guards::saved_hooks() != guards::SavedHooks::None;  // see find_entry
    const std::optional<uint64_t> sizes = !settled && (eager() || vary) ? other_sizes(target, call) : std::nullopt;
    const bool late = sizes.has_value();
    SecondChance* const chance = settled || late || vary ? nullptr : chance_of(target);
    const bool again = chance && chance->due(target.cache->late_sizes.compile_seconds());
    const uint64_t key = sizes.value_or(0);
    // The outermost frame is the one to be compiled for its sizes.
    if (late ? vary : eager() && !again)
      return chance ? run_for_chance(tstate, frame, target) : run_plainly(tstate, frame, 0);
    if (late && !target.cache->late_sizes.pays(key)) return run_for_sizes(tstate, frame, *target.cache, key);
    // The first run found no entry either.
    if (guards::recomputing()) return run_plainly(tstate, frame, 0);
    std::optional<CompileTurn> turn(std::in_place);
    if (turn->waited()) entry = find_entry(target, call, values, owned);
    try {
      if (!entry && *turn && (late || again || !eager())) {
        if (SecondChance* const taken = again ? chance_of(target) : nullptr) taken->taken();
        entry = compile_frame(tstate, frame, target, late ? Late::Sizes : again ? Late::SecondChance : Late::No);
        if (late) target.cache->late_sizes.compiled(key, static_cast<bool>(entry));
      }
    } catch (const NotYet& e) {
      log_artifact(Topic::recompiles, place_of(target.code), std::string("this call runs in eager: ") + e.what());
      // A program that goes another way in eager never does what its capture waits for.
      constexpr int64_t kPatience = 3;
      CodeCache::Owner& owner = target.cache->owners[target.owner];
      owner.eager = ++owner.put_off >= kPatience;
      if (owner.eager)
        warn_once("put off " + place_of(target.code),
                  "kiln: " + place_of(target.code) + " runs in eager: " + e.what() +
                      ", and calls in eager did not change that. Hint: run what does once, outside of compiled code.");
      turn.reset();
      Scoped<ConfigPtr> whole(mode().config, nullptr);
      return run_plainly(tstate, frame, 0);
    }
    if (!entry) {
      turn.reset();
      return run_plainly(tstate, frame, 0);
    }
    values.assign(entry->tree.num_wanted(), nullptr);
    owned.clear();
    if (!entry->tree.check(call, values.data(), owned) || !fits(*entry, values.data())) {
      const std::string failure = entry->tree.failure(call);
      std::erase(target.cache->entries, entry);
      if (failure == guards::kSharedMemory) {  // as a trace says of tensors of one storage
        target.cache->eager = target.cache->entries.empty();
        if (target.root)
          warn_once("unsupported " + place_of(target.code),
                    "kiln: " + place_of(target.code) + " runs in eager: " + failure);
      } else if (target.cache->unfit++ == 0) {
        // The capture imported what the program looks for in sys.modules, say.
        turn.reset();
        return run_frame(tstate, frame, target);
      } else {
        target.cache->eager = true;
        const std::string text = "a guard fails right after capture of " + place_of(target.code) + ": " + failure;
        if (options().strict) throw InternalError(text);
        warn_once("fresh " + place_of(target.code), "kiln: " + text + "; it runs in eager");
      }
      turn.reset();
      return run_plainly(tstate, frame, 0);
    }
  }
  return run_entry(target, std::move(entry), call, values, owned, frame);
}

/// The code is to be captured anew in place of this entry, which does not count for the recompile limit.
void retire(const Target& target, const EntryPtr& entry, const std::string& why) {
  if (std::erase(target.cache->entries, entry) == 0) return;
  log_artifact(Topic::recompiles, place_of(target.code), why);
  if (const auto owner = target.cache->owners.find(entry->owner); owner != target.cache->owners.end())
    --owner->second.compiles;
}

/// The entry's assertions failed for a call. It costs a run of the graph, and one in eager.
void note_failure(const Target& target, const EntryPtr& entry) {
  constexpr int64_t kFirst = 2, kRare = 16;
  if (entry->expected.empty() || ++entry->failures < kFirst || entry->failures * kRare < entry->hits) return;
  note_varying(entry->expected);
  retire(target, entry, "branches on tensors that were expected to go one way break the graph from now on");
}

/// The module whose method the frame is of, else null.
const void* module_of(py311::Frame* frame) {
  PyObject* self = frame->f_code->co_argcount > 0 ? frame->localsplus[0] : nullptr;
  PyTypeObject* module = nn_module_type();
  return self && module && PyObject_TypeCheck(self, module) ? self : nullptr;
}

bool starts_here(py311::Frame* frame) {
  return frame->prev_instr == py311::first_instruction(frame->f_code) - 1 && frame->owner == py311::OwnedByThread;
}

PyObject* eval_frame(PyThreadState* tstate, py311::Frame* frame, int throw_flag) {
  if (capture::is_capturing()) return capture::eval_captured_frame(tstate, frame, throw_flag);
  Mode& m = mode();
  if (!m.config || m.disabled) return run_plainly(tstate, frame, throw_flag);
  PyCodeObject* code = frame->f_code;
  try {
    if (const Target* wanted = pending().target; wanted && wanted->code == code && starts_here(frame)) {
      pending().target = nullptr;
      if (wanted->held) wanted->held->clear();
      if (wanted->plain) {
        Scoped<int> off(m.disabled, m.disabled + (wanted->all_plain ? 1 : 0));
        return run_plainly(tstate, frame, throw_flag);
      }
      return run_frame(tstate, frame, *wanted);
    }
    if (throw_flag || !starts_here(frame) || !(code->co_flags & CO_OPTIMIZED) ||
        (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)))
      return run_plainly(tstate, frame, throw_flag);
    if (should_skip(frame)) {
      const CodeInfo::Skip how = how_skipped(code);
      if (how == CodeInfo::Skip::Replaced) {
        const py::Ref polyfill = capture::polyfill_of(code);
        const py::BoundArguments given(code, frame->localsplus);
        return PyObject_Call(polyfill.get(), given.args.get(), given.kwargs.get());
      }
      Scoped<int> below(m.disabled, m.disabled + (how == CodeInfo::Skip::Below ? 1 : 0));
      return run_plainly(tstate, frame, throw_flag);
    }
    CodeInfo* info = code_info(code);
    if (!info) return run_plainly(tstate, frame, throw_flag);
    Target target{frame->f_func, code, &info->cache(m.config), m.config, false, module_of(frame)};
    if (target.cache->eager) return run_plainly(tstate, frame, throw_flag);
    return run_frame(tstate, frame, target);
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

}  // namespace

HookScope::HookScope() {
  if (hook_depth++ > 0) return;
  ++outermost_calls;
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  if (now == &eval_frame) return;     // the one above has gone and left ours there
  if (above && now == above) return;  // below it still: a second time above it, each would call the other for ever
  previous = now == &_PyEval_EvalFrameDefault ? nullptr : now;
  _PyInterpreterState_SetEvalFrameFunc(interpreter, &eval_frame);
}

HookScope::~HookScope() {
  if (--hook_depth > 0) return;
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  // If someone else put a hook above ours meanwhile, ours stays below it and passes everything on.
  _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  if (now == &eval_frame)
    _PyInterpreterState_SetEvalFrameFunc(interpreter, previous ? previous : &_PyEval_EvalFrameDefault);
  above = now == &eval_frame || now == &_PyEval_EvalFrameDefault || now == previous ? nullptr : now;
}

EntryPtr find_entry(const Target& target, const guards::Call& call, std::vector<PyObject*>& values,
                    guards::Owned& owned) {
  auto& entries = target.cache->entries;
  bool others = false;
  // The second run of what a checkpoint contains takes what the first took, whatever was compiled between them.
  const bool oldest = entries.size() > 1 && guards::saved_hooks() != guards::SavedHooks::None;
  if (oldest)
    std::sort(entries.begin(), entries.end(), [](const EntryPtr& a, const EntryPtr& b) { return a->id < b->id; });
  const auto find = [&](bool own) -> EntryPtr {
    for (size_t i = 0; i < entries.size(); ++i) {
      Entry& entry = *entries[i];
      if ((entry.owner == target.owner) != own) {
        others = true;
        continue;
      }
      values.resize(entry.tree.num_wanted());
      owned.clear();
      if (entry.globals.get() != call.globals || !entry.tree.check(call, values.data(), owned)) continue;
      if (holds(entry, entry.other_branch, values.data())) continue;
      if (!fits(entry, values.data())) continue;
      ++entry.hits;
      // The next call most likely takes the same one.
      if (i > 0 && !oldest)
        std::rotate(entries.begin(), entries.begin() + static_cast<long>(i),
                    entries.begin() + static_cast<long>(i) + 1);
      return entries[oldest ? i : 0];
    }
    return nullptr;
  };
  EntryPtr found = find(true);
  return found || !others ? found : find(false);
}

PyObject* run_entry(Target target, EntryPtr entry, const guards::Call& first_call, std::vector<PyObject*>& values,
                    guards::Owned& owned, py311::Frame* frame) {
  if (!entry->continuation) {
    try {
      if (entry->leave->single_output() >= 0) {
        const GraphOutputs outputs = run_graph(*entry, values.data(), owned);
        return outputs.object(static_cast<size_t>(entry->leave->single_output())).release();
      }
      std::vector<py::Ref> results = run_region(*entry, values.data(), owned);
      KILN_CHECK(results.size() == 1 && results[0], "a function's entry has no result");
      return results[0].release();
    } catch (const RunAgain& again) {
      if (again.failed) note_failure(target, entry);
      owned.clear();
      return run_again(target, first_call, again, nullptr, frame);
    }
  }
  // The frame goes on in plain code, whose calls are compiled in their own right.
  HookScope hook;
  Scoped<ConfigPtr> active(mode().config, target.config);
  guards::Call call = first_call;
  ResumeCall resume;              // holds the arguments and code of the resume function that runs
  std::vector<PyObject*> locals;  // its arguments, borrowed
  for (;;) {
    std::vector<py::Ref> results;
    try {
      results = run_region(*entry, values.data(), owned);
    } catch (const RunAgain& again) {
      if (again.failed) note_failure(target, entry);
      owned.clear();
      return run_again(target, call, again, resume.code ? &resume.args : nullptr, frame);
    }
    if (!entry->continuation) {
      KILN_CHECK(results.size() == 1 && results[0], "a function's entry has no result");
      return results[0].release();
    }
    py::Ref state = py::check(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
    for (size_t i = 0; i < results.size(); ++i) {
      KILN_CHECK(results[i], "a local at a graph break has no value");
      PyTuple_SET_ITEM(state.get(), static_cast<Py_ssize_t>(i), results[i].release());
    }
    // A closure is not kept: the user's objects are in it.
    py::Ref function = entry->continuation_function;
    if (!function ||
        reinterpret_cast<PyFunctionObject*>(function.get())->func_globals != target.function->func_globals ||
        target.function->func_closure) {
      function = function_for(target, entry->continuation.get());
      entry->continuation_function = target.function->func_closure ? py::Ref() : function;
    }
    const int count = num_arguments(target.code);
    std::vector<PyObject*> args(call.locals, call.locals + count);
    args.push_back(state.get());
    owned.clear();
    results.clear();
    std::optional<Scoped<ConfigPtr>> whole;  // nothing behind an exception is a graph of its own
    if (!entry->raises.empty()) whole.emplace(mode().config, nullptr);
    py::Ref result = py::Ref::steal(PyObject_Vectorcall(function.get(), args.data(), args.size(), nullptr));
    if (!result) return nullptr;
    if (whole) raise("GraphBreakError", entry->raises);
    ResumeCall next;
    const bool resumes = take_resume_call(result.get(), &next);
    if (resumes && entry->breaks_at)
      note_jump(entry->breaks_at, reinterpret_cast<PyCodeObject*>(next.code.get()), outermost_calls);
    if (entry->waits_for && expected_jump(entry->waits_for.code, entry->waits_for.at))
      retire(target, entry, "a branch on a tensor, which is an assertion from now on, always went one way");
    if (!resumes) return result.release();
    result = py::Ref();
    state = py::Ref();
    // What the next part has no use for dies before it runs, as in eager.
    if (CodeInfo* own = frame ? code_info(target.code) : nullptr; own && own->resume)
      for (int i = 0; i < count; ++i) Py_CLEAR(frame->localsplus[i]);
    frame = nullptr;
    resume = std::move(next);
    locals.clear();
    for (const py::Ref& a : resume.args) locals.push_back(a.get());
    target.code = reinterpret_cast<PyCodeObject*>(resume.code.get());
    CodeInfo* info = code_info(target.code);
    if (!info) throw py::PythonError{};
    target.cache = &info->cache(target.config);
    call = call_of(target, locals.data(), static_cast<int>(locals.size()));
    entry = find_entry(target, call, values, owned);
    if (entry) continue;
    const py::Ref resumed = function_for(target, resume.code.get());
    const auto invoke = [&] { return PyObject_Vectorcall(resumed.get(), locals.data(), locals.size(), nullptr); };
    target.held = &resume.args;
    return compile_and_run(target, invoke);
  }
}

PyObject* compile_and_run(const Target& target, const std::function<PyObject*()>& invoke) {
  HookScope hook;
  Scoped<ConfigPtr> active(mode().config, target.config);
  Scoped<const Target*> wait(pending().target, &target);
  return invoke();
}

}  // namespace kiln::frame
