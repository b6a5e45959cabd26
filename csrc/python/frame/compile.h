#pragma once
#include <Python.h>

#include "python/frame/cache.h"

struct _PyInterpreterFrame;

namespace kiln::frame {

/// A compile makes many objects that live on: of a program of thousands of operations, a tenth of the time would go
/// into looking for cycles among them.
class NoGarbageCollection {
 public:
  NoGarbageCollection() : was_on_(PyGC_Disable() == 1) {}
  ~NoGarbageCollection() {
    if (was_on_) PyGC_Enable();
  }
  NoGarbageCollection(const NoGarbageCollection&) = delete;

 private:
  const bool was_on_;
};

/// What kiln's own compiler makes of a traced graph for inputs like `examples`.
std::shared_ptr<runtime::CompiledFunction> compile_for(const graph::Graph& traced,
                                                       const std::vector<at::Tensor>& examples, const Config& config);

struct Target;

/// Why something is compiled beyond the recompile limit.
enum class Late : uint8_t {
  No,
  Sizes,         // see LateSizes
  SecondChance,  // see SecondChance
};

/// Captures `frame`, compiles what was captured and adds an entry to the target's cache. Where it is late, the owner's
/// entry that was used the longest ago goes if they are too many. Null if the frame is to run in eager; why was said
/// then, once. Throws py::PythonError for what the user must see: a graph break under fullgraph, a backend's error, a
/// KeyboardInterrupt, kiln's own failures under options().strict; and NotYet.
EntryPtr compile_frame(PyThreadState* tstate, _PyInterpreterFrame* frame, const Target& target, Late late);

/// "name (file:line)" of a code object.
std::string place_of(PyCodeObject* code);

}  // namespace kiln::frame
