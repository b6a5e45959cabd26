#include "base/error.h"
#include "python/capture/capture.h"
namespace kiln::capture {
__attribute__((weak)) CaptureResult capture_frame(PyThreadState*, _PyInterpreterFrame*, const CaptureOptions&) {
  throw Unsupported("this build has no capture");
}
__attribute__((weak)) bool is_capturing() { return false; }
__attribute__((weak)) PyObject* eval_captured_frame(PyThreadState*, _PyInterpreterFrame*, int) { return nullptr; }
}  // namespace kiln::capture
