#pragma once
#include <Python.h>

struct _PyInterpreterFrame;

namespace kiln::frame {

/// Finds the folders and types that the other functions need; called before any frame is looked at, since it imports.
void init_skip();
/// torch.nn.Module; null before init_skip.
PyTypeObject* nn_module_type();

/// True for frames that are not worth or not fit to be captured when eager code calls them: Python's library, PyTorch's
/// internals, array libraries and kiln itself, by file; and frames that see no tensor, module or PyTorch name.
/// What they call may still be compiled.
bool should_skip(_PyInterpreterFrame* frame);
/// True for skipped frames below which nothing is compiled either: another compiler's. Known after should_skip.
bool skipped_with_calls(PyCodeObject* code);
/// True for skipped frames in whose place a polyfill runs. Known after should_skip.
bool replaced(PyCodeObject* code);
/// The part that depends on the file alone.
bool skipped_file(PyCodeObject* code);

}  // namespace kiln::frame
