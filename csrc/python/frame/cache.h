#pragma once
#include <Python.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "python/frame/expected_jumps.h"
#include "python/frame/late_sizes.h"
#include "python/frame/leave.h"
#include "python/frame/mode.h"
#include "python/frame/python_graph.h"
#include "python/frame/second_chance.h"
#include "python/frame/sized_entry.h"
#include "python/guards/tree.h"
#include "runtime/compiled_graph.h"

namespace kiln::frame {

/// One compiled variant of a code object: guards, graph, and how to leave.
struct Entry {
  explicit Entry(std::vector<guards::Guard> guards, const std::vector<guards::SourcePtr>& wanted)
      : tree(std::move(guards), wanted) {}
  guards::GuardTree tree;                            // delivers the graph's inputs, then the sources of recipes
  size_t num_inputs = 0, num_outputs = 0;            // of the graph
  size_t num_ints = 0;                               // that `sizes` is given; wanted behind the graph's inputs
  std::vector<int64_t> delivered_sizes;              // without `sizes`: what recipes of a Size give
  std::shared_ptr<runtime::CompiledFunction> graph;  // one of the two, or none if the region has no tensor op
  std::unique_ptr<SizedEntry> sizes;                 // if sizes are left open: in place of `graph`
  std::unique_ptr<PythonGraph> python_graph;         // of a Python backend
  /// As in CaptureResult.
  struct Condition {
    std::shared_ptr<runtime::CompiledFunction> graph;
    std::shared_ptr<const runtime::SizedProgram> program;  // in place of `graph`, where sizes are open
    std::vector<size_t> inputs;
    explicit operator bool() const { return graph || program; }
  };
  Condition eager_condition, other_branch;
  std::vector<capture::CaptureResult::InferenceOutput> inference_outputs;
  /// The graph's last output is CaptureResult::failed.
  bool has_assertions = false;
  /// What running the graph does beyond its outputs. If it raises before it has changed anything, the frame is run
  /// again in eager, which raises at the right place with the right effects before it; what it draws from the generator
  /// is put back first.
  struct Effects {
    bool changes = true, draws = true;
  } effects;
  std::unique_ptr<LeaveProgram> leave;
  /// Among what the tree delivers, the first of the sources of recipes.
  size_t first_source() const { return num_inputs + num_ints; }

  // Exit: if null, the result is leave's only one. Otherwise leave's results are the tuple that `continuation` takes
  // behind the original arguments.
  const void* owner = nullptr;    // see Target
  py::Ref globals;                // of the function it was made for: one code may run with others
  std::string raises;             // under fullgraph, what to say if the continuation does not raise
  py::Ref continuation;           // code object
  py::Ref continuation_function;  // made of it for the globals it was last used with; none if it has a closure
  int64_t id = 0;
  int64_t hits = 0;

  // Branches on tensors. The jump at which this code breaks; that at which it, or what it calls, does, while nobody
  // knows whether that always goes one way; and those that are assertions of the graph, with the calls that failed.
  JumpSite breaks_at, waits_for;
  std::vector<JumpSite> expected;
  int64_t failures = 0;
};
using EntryPtr = std::shared_ptr<Entry>;

/// Compiled entries of one code object under one config, most recently used first.
struct CodeCache {
  CodeCache();
  ~CodeCache();
  std::vector<EntryPtr> entries;
  bool eager = false;    // compile no more: the code cannot be captured, or the limit is reached
  int64_t compiles = 0;  // all compiles so far, those of `entries` and failed ones
  int64_t unfit = 0;     // captures of which a guard failed at once
  /// Sources of floats and ints that had another value in a later call, and those of them whose values the program
  /// needs.
  std::unordered_set<std::string> changing_numbers, constant_numbers;
  /// Sources of tensors that had other sizes in a later call, with the dimensions as bits.
  std::unordered_map<std::string, uint64_t> changing_sizes;
  /// Sources of functions that were others, of the same code, in a later call.
  std::unordered_set<std::string> changing_functions;
  /// Sources of arrays, and of other memory, that had other contents in a later call.
  std::unordered_set<std::string> changing_contents;
  /// Calls of item() whose value the program needs.
  std::unordered_set<std::string> breaking_items;
  bool backend_takes_sizes = true;  // false: it raised for a graph of open sizes
  struct Owner {
    int64_t compiles = 0;      // without late ones
    int64_t more_general = 0;  // of these, of resume functions in which something changed for the first time
    bool eager = false;        // has reached the limit, or was put off too often
    bool limited = false;      // has reached the limit
    SecondChance chance;
    int64_t put_off = 0;  // calls in a row that ran in eager for what a later call need not wait for
    /// Calls in eager that are not looked at, since those before did not differ in sizes alone; how many the last time.
    uint32_t quiet = 0, last_quiet = 0;
    /// The nodes of the guards of the entry with this id where such a call differed in sizes alone, and how many more
    /// calls are taken to do so; how many the last time.
    int64_t sizes_of = -1;
    std::vector<int> sizes_at;
    uint32_t taken = 0, last_taken = 0;
  };
  std::unordered_map<const void*, Owner> owners;
  LateSizes late_sizes;
  void clear();
  /// Drops the entries that no call can take any more, since they compare with an object that nothing but entries
  /// refers to (a model that is gone). If they were used often, they do not count for the recompile limit.
  void drop_unreachable();
};

struct ResumePoint;

/// All that kiln keeps per code object, in the code object's own extra slot.
struct CodeInfo {
  CodeInfo();
  ~CodeInfo();
  std::vector<std::pair<ConfigPtr, std::unique_ptr<CodeCache>>> caches;
  CodeCache& cache(const ConfigPtr& config);
  /// Yes: frames of this code run as they are (see skip.h); what they call may still be compiled. Below: that neither.
  /// Replaced: a polyfill runs in their place.
  enum class Skip : uint8_t { Unknown, No, Yes, Below, Replaced };
  Skip skip = Skip::Unknown;
  bool internal = false;  // made by kiln, runs as it is: continuations
  /// For resume functions: where they came from.
  std::shared_ptr<ResumePoint> resume;
  /// Resume functions made for this code, by their key.
  std::map<std::string, py::Ref> resume_points;
  /// Jumps at which the graph broke, by their places.
  std::unordered_map<int, JumpHistory> jumps;
};
/// The code object's record, made at the first call. Null only if memory ran out.
CodeInfo* code_info(PyCodeObject* code);
/// The record if there is one already.
CodeInfo* find_code_info(PyCodeObject* code);

/// Nothing counts for this owner any more: another may get its address. What was compiled for it stays, for others.
void forget_owner(const void* owner);
/// Forgets what was compiled for this config.
void forget_caches(const ConfigPtr& config);
/// Forgets every compiled entry of the process, and every warning given once.
void reset_caches();

/// Gives the warning `text` once per `key` until reset. Throws py::PythonError if warnings are errors.
void warn_once(const std::string& key, const std::string& text);

}  // namespace kiln::frame
