#pragma once
#include <Python.h>

#include "python/frame/cache.h"

struct _PyInterpreterFrame;

namespace kiln::frame {

/// A frame about to run that kiln may run instead: code, where its free variables are, and where its entries live.
struct Target {
  PyFunctionObject* function = nullptr;  // borrowed; its closure and globals are the frame's
  PyCodeObject* code = nullptr;          // the function's own, or that of a resume function made from it
  CodeCache* cache = nullptr;
  ConfigPtr config;
  bool root = false;  // what the user asked to compile
  /// On whose behalf the code runs, for the recompile limit: one code may serve many compiled callables (closures of
  /// one function, resume functions) and many modules. The compiled callable, or else the module whose method this is.
  const void* owner = nullptr;
  /// What its caller holds for its frame, which has references of its own: to be let go when it begins.
  std::vector<py::Ref>* held = nullptr;
  bool plain = false;      // its frame runs as it is: only what it calls is compiled
  bool all_plain = false;  // nor that
};

/// The entry of `target` whose guards hold for `call`, with what it delivers; null if there is none.
EntryPtr find_entry(const Target& target, const guards::Call& call, std::vector<PyObject*>& values,
                    guards::Owned& owned);
/// Runs a found entry, and what follows it up to the frame's end: the breaking instruction, resume functions. A new
/// reference, or null with a Python exception set. `frame`: whose locals `call` has, if it is there; those of a resume
/// function are let go when the next one begins.
PyObject* run_entry(Target target, EntryPtr entry, const guards::Call& call, std::vector<PyObject*>& values,
                    guards::Owned& owned, _PyInterpreterFrame* frame = nullptr);
/// Lets `invoke` make the Python call whose frame is `target`'s, captures that frame, and runs what was compiled, or
/// runs the frame as it is if it cannot be compiled.
PyObject* compile_and_run(const Target& target, const std::function<PyObject*()>& invoke);

/// Keeps kiln's evaluator installed (PEP 523) for a scope; nests. The one that was installed before is called for every
/// frame that kiln leaves alone, and is put back at the end.
class HookScope {
 public:
  HookScope();
  ~HookScope();
  HookScope(const HookScope&) = delete;
};

}  // namespace kiln::frame
