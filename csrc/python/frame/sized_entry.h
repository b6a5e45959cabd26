#pragma once
#include <Python.h>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "python/frame/mode.h"
#include "runtime/compiled_graph.h"
#include "runtime/sized_program.h"

namespace kiln::frame {

/// What one captured graph whose sizes are left open has for each combination of sizes that came up. New ones run
/// operator by operator, without Python. Those that come again are compiled: at once as long as few are
/// (recompile_limit), then once they have spent the time of a compile, for which see LateSizes. Where new ones keep
/// coming, the functions that the program calls may see fewer: it is tried whether compiling these is faster. Programs
/// that must be compiled to run (SizedProgram::runs) are, at once, as long as few are, and run in eager otherwise.
/// Needs the GIL.
class SizedEntry {
 public:
  /// What is asked before the graph runs: the conditions on its inputs, with others left to the run; or all of them.
  enum class Asks : uint8_t { Inputs, All };
  /// `open`: the graph's inputs with open sizes.
  SizedEntry(std::shared_ptr<const runtime::SizedProgram> program, std::vector<size_t> open, Asks asks,
             ConfigPtr config)
      : program_(std::move(program)), open_(std::move(open)), asks_(asks), config_(std::move(config)) {}

  using Ints = runtime::SizedProgram::Ints;
  /// Whether the captured graph is for the sizes of a call with these graph inputs and ints, as far as is known.
  bool fits(PyObject* const* inputs, const Ints& ints);
  /// The sizes of the captured call are compiled already; it took so long.
  void add_captured(const std::vector<at::Tensor>& inputs, const Ints& ints, Ints sizes,
                    std::shared_ptr<runtime::CompiledFunction> graph, double seconds);
  /// What the program delivers for these inputs, for who runs the graph otherwise. Throws SizesDiffer.
  Ints delivered(PyObject* const* inputs, const Ints& ints);
  /// For a program that must be compiled to run: null if it is, for these sizes, or has been made so by this call. Else
  /// the call is eager's, and what is returned is to be told the seconds that it took.
  std::function<void(double seconds)> waits(const std::vector<at::Tensor>& inputs, const Ints& ints);
  /// For sizes that are not compiled: whether the call is eager's, with what it calls compiled, since that is faster
  /// than operator by operator, or is to be tried. What is returned is told the seconds that it took; else null.
  std::function<void(double seconds)> runs_in_parts(const std::vector<at::Tensor>& inputs, const Ints& ints);
  /// Runs what there is for the sizes of `inputs`; `sizes`: gets those that the program delivers. Throws SizesDiffer,
  /// with nothing changed, if the program goes another way for them after all; fits() knows then.
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const Ints& ints, Ints* sizes);

  size_t num_variants() const { return variants_.size(); }
  size_t num_compiled() const { return num_compiled_; }

 private:
  /// What calls took that ran in one way.
  struct Way {
    int64_t calls = 0;
    double seconds = 0, recent = 0;  // of all calls; of one, lately
    void add(double s);
  };
  /// One combination of sizes.
  struct Variant {
    std::shared_ptr<runtime::CompiledFunction> graph;  // null: not compiled
    Ints sizes;                                        // that are delivered, once known
    bool fits = true;                                  // false: the program goes another way for these sizes
    bool asked = true;                                 // false: what Asks::All asks was put off
    bool refused = false;                              // compiling failed; not tried again
    int64_t failures = 0;                              // of calls that were not compiled
    Way uncompiled;                                    // calls
    uint64_t used = 0;
  };
  using Key = std::vector<int64_t>;
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  /// The variant of the inputs that `get` gives by position.
  template <class Get>
  std::shared_ptr<Variant> find(const Ints& ints, Get&& get);
  bool fits_inside(const std::vector<at::Tensor>& inputs, const Ints& ints) const;
  /// Whether trials have shown that runs_in_parts is the faster way.
  bool prefers_parts() const;
  /// Whether `v`, of a call at hand, is to be compiled.
  bool pays(const Variant& v) const;
  void compile(Variant& v, const std::vector<at::Tensor>& inputs, const Ints& ints);

  std::shared_ptr<const runtime::SizedProgram> program_;
  std::vector<size_t> open_;
  Asks asks_;
  ConfigPtr config_;
  std::unordered_map<Key, std::shared_ptr<Variant>, Hash> variants_;
  Key key_, last_key_;             // of the call at hand; of the one before
  std::shared_ptr<Variant> last_;  // what that one found
  uint64_t calls_ = 0;
  size_t num_compiled_ = 0;
  double compile_seconds_ = 0;
  Way by_operator_;
  std::shared_ptr<Way> in_parts_ = std::make_shared<Way>();
};

}  // namespace kiln::frame
