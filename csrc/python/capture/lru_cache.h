#pragma once
#include <vector>

#include "python/cpython/ref.h"

// What a capture remembers of calls of functools.lru_cache's wrappers that it interpreted (lru_cache.cpp).
namespace kiln::capture {

/// Such a call: the next one with these arguments gives the same object.
struct CachedCall {
  PyObject* wrapper;
  py::Ref kwnames;
  std::vector<py::Ref> args;
  py::Ref result;
};

/// A list or dict of a result. The program's own is the cache's, so this one may neither be changed nor leave.
struct CachedObject {
  py::Ref object;
  std::vector<PyObject*> parts;  // when it was made
  int instruction = -1;          // of the root, which made it
  bool changed() const;
};

}  // namespace kiln::capture
