#pragma once
#include <Python.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/options.h"
#include "python/cpython/ref.h"

namespace kiln::frame {

/// What one kiln.compile call asked for. Equal requests share one Config, so that they share compiled entries.
struct Config {
  py::Ref backend;  // null: kiln's own compiler; else backend(gm, example_inputs) -> callable
  bool fullgraph = false;
  std::optional<bool> dynamic;  // which sizes are left open: all, those that are marked (none given), or none
  bool alone = false;           // shared with no other request; its caches go with the callable
  std::map<std::string, OptionValue> options;  // set while this config compiles
};
using ConfigPtr = std::shared_ptr<const Config>;
/// The shared Config of a request, or its own.
ConfigPtr intern_config(Config config);

/// What this thread is doing, as the frame hook needs it.
struct Mode {
  ConfigPtr config;            // of the innermost compiled call whose eager parts run; null outside of any
  int disabled = 0;            // inside kiln.disable'd functions: nothing is compiled, nothing compiled is used
  bool run_only = false;       // kiln.run: compile nothing new
  bool sizes_vary = false;     // inside a frame that runs in eager for its sizes (see LateSizes)
  double compile_seconds = 0;  // spent in all compiles so far
};
Mode& mode();

/// Sets a member of the thread's mode for a scope.
template <class T>
class Scoped {
 public:
  Scoped(T& slot, T value) : slot_(slot), before_(std::exchange(slot, std::move(value))) {}
  ~Scoped() { slot_ = std::move(before_); }
  Scoped(const Scoped&) = delete;

 private:
  T& slot_;
  T before_;
};

/// Sets a config's options for a scope (one compile, under the GIL).
class OptionScope {
 public:
  explicit OptionScope(const Config& config);
  ~OptionScope();
  OptionScope(const OptionScope&) = delete;

 private:
  std::map<std::string, OptionValue> before_;
};

}  // namespace kiln::frame
