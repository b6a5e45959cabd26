#pragma once
#include <ATen/core/Tensor.h>
#include <Python.h>

#include "python/cpython/ref.h"

// NumPy's arrays that captured code makes of constants. What NumPy computes of numbers, of such arrays and of small
// existing ones (guarded by what they hold) is computed during the capture; an array that is alive where the captured
// part ends is made anew in each call.
namespace kiln::capture {

class Machine;

/// Of exactly the class numpy.ndarray.
bool is_array(PyObject* o);
/// The array that owns an array's memory (borrowed); null if something else does.
PyObject* owner_of(PyObject* array);
/// Whether captured code made the array and its memory.
bool is_made_array(Machine& m, PyObject* o);
/// Whether an array may be written to.
bool is_writeable(PyObject* array);
/// Whether its elements are objects of Python's, or have such.
bool holds_objects(PyObject* array);
/// Whether whoever holds this array is alone in having its memory.
bool is_held_once(PyObject* array);
/// A copy of an array with its layout, that nothing else refers to. Throws py::PythonError.
py::Ref copy_of_array(PyObject* array);
/// Attributes that tell where the memory lies, which is elsewhere in each call.
bool shows_address(PyObject* name);

/// Whether it is a call of numpy.dtype with what is constant.
bool makes_dtype(Machine& m, PyTypeObject* type, PyObject* const* args, size_t n);
/// What an operator makes of arrays made here, as Machine::call_numpy.
PyObject* operate_on_arrays(Machine& m, const char* op, PyObject* const* args, size_t n,
                            PyObject* (*native)(PyObject* const*));

/// An array with whose memory a tensor was made (torch.from_numpy).
struct SharedArray {
  py::Ref owner, contents;  // the array, and what it held then
  at::Tensor tensor;
  int64_t version;    // of the tensor, then
  int instruction;    // of the root, that made the tensor
  bool used = false;  // by NumPy, which may have written to the array and back

  SharedArray(PyObject* array, at::Tensor made, int made_at);
  /// Whether one of the two may have been written, which the other would show.
  bool changed() const;
};

}  // namespace kiln::capture
