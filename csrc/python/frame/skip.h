#pragma once
#include <Python.h>

#include "python/frame/cache.h"

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
/// What that means for a frame that is skipped: Below for another compiler's, Replaced for one with a stand-in, else
/// that it runs as it is. Known after should_skip.
CodeInfo::Skip how_skipped(PyCodeObject* code);
/// The part that depends on the file alone.
bool skipped_file(PyCodeObject* code);

}  // namespace kiln::frame
