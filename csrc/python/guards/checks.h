#pragma once
#include <Python.h>

#include <array>
#include <optional>
#include <vector>

#include "python/guards/guard.h"

namespace kiln::guards {

/// What a tensor guard compares, laid out for speed. Sizes and strides follow each other in one array.
struct TensorFacts {
  PyTypeObject* type = nullptr;  // borrowed: the guard holds it
  uint64_t key_set = 0;
  int16_t scalar_type = 0;
  int16_t device_type = 0;
  int16_t device_index = 0;
  int16_t dim = 0;
  bool requires_grad = false;
  bool is_leaf = true;
  bool has_strides = false;
  uint64_t any_dims = 0;            // as Guard::any_dims
  std::array<int64_t, 8> few = {};  // up to four dimensions
  std::vector<int64_t> many;
  const int64_t* sizes_strides() const { return dim <= 4 ? few.data() : many.data(); }
};
/// From a guard of kind Tensor.
TensorFacts tensor_facts(const Guard& guard);
/// True if `o` is a tensor of exactly these facts. Runs no Python code. About 10 ns.
bool check_tensor(PyObject* o, const TensorFacts& facts);
/// If `o` is a tensor of these facts but for its sizes and strides: a hash of its own.
std::optional<uint64_t> other_sizes(PyObject* o, const TensorFacts& facts);
/// If so: the dimensions in which it has another size, as bits; else 0.
uint64_t other_dims(PyObject* o, const TensorFacts& facts);
/// Which fact differs, for the recompile log ("size 0: expected 4, got 5"); empty if none.
std::string explain_tensor(PyObject* o, const TensorFacts& facts);

/// True if a gradient that arrives at the tensor `o` may run hooks: those of the tensor, or of the node that adds to
/// its .grad, if that is alive. True too if `o` is no tensor.
bool has_gradient_hooks(PyObject* o);
/// The same of the node's own hooks alone, which see it as any other node.
bool has_accumulator_hooks(PyObject* o);

/// Guard kind Equals: same type and same value; floats bit for bit. Runs no Python code: objects of classes defined in
/// Python are compared by identity.
bool same_constant(PyObject* a, PyObject* b);

/// Whether `descr` is a data descriptor whose __get__ runs C code only: a getset or member descriptor, a field of
/// ctypes, a property with a getter in C.
bool is_c_accessor(PyObject* descr);

}  // namespace kiln::guards
