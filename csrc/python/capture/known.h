#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "python/capture/capture.h"
#include "python/cpython/ref.h"

// What a capture knows of an object that existed before the call.
namespace kiln::capture {

using guards::SourcePtr;

/// What reading an object means, by its exact type.
enum class Class : uint8_t {
  Constant,   // immutable and compared by value: int, str, dtype, ...
  Singleton,  // immutable and compared by identity: None, True, ..., builtin functions, types, modules
  Tuple,
  List,
  Dict,
  Set,
  FrozenSet,
  OrderedDict,
  DefaultDict,
  Deque,
  Tensor,
  Function,
  Method,
  Module,
  Type,
  Instance,  // everything else
};
inline bool is_container(Class c) { return c >= Class::Tuple && c <= Class::Deque; }

/// An object that existed before the call, or its stand-in.
struct Known {
  enum class Kind : uint8_t { Plain, Tensor, Shadow, Proxy };
  Kind kind = Kind::Plain;
  bool active = false;     // its guard is taken
  bool read = false;       // Plain: the memory it lends is guarded by what it holds
  bool written = false;    // a shadow that differs from its original; told on leaving
  bool touched = false;    // Shadow: was written to, and may be as before by now
  bool opened = false;     // Shadow: the lists in dicts in it are guarded, too
  bool looked_up = false;  // Shadow that is not active: some of its items are guarded
  bool whole = false;      // Shadow of a set: its elements are constants, guarded in one
  bool alike = false;      // Plain: a function for which others of the same code may stand
  SourcePtr source;
  py::Ref real;
  py::Ref stand_in;                                      // equals `real` for Plain; Proxy: one of the dict's shadow
  py::Ref snapshot;                                      // Shadow: what the copy held when it was made, as a list
  py::Ref appended;                                      // Shadow of a deque that nobody looked at: new items, a list
  py::Ref attributes;                                    // Shadow: what its __dict__ held then, null if it has none
  uint64_t version = 0;                                  // Shadow of a dict: that of the copy when it was made
  std::vector<std::pair<SourcePtr, py::Ref>> constants;  // Shadow: elements guarded by value when it is observed
  std::vector<py::Ref> contents;                         // Shadow: shadows and tensors among its elements
  /// Shadow: elements that were known by another path. That they are the same objects is guarded when it is observed.
  std::vector<std::pair<SourcePtr, py::Ref>> met_again;
};

/// Writes to attributes of existing objects: name -> value, null for deleted.
struct Overlay {
  py::Ref object;
  std::vector<std::pair<py::Ref, py::Ref>> entries;
  py::Ref* find(PyObject* name);
};

}  // namespace kiln::capture
