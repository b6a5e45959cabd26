#include "python/frame/turn.h"

#include <Python.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "python/cpython/ref.h"

namespace kiln::frame {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(1);
constexpr auto kLongest = std::chrono::seconds(120);

// Under the GIL. No mutex: a process forked while another thread compiles must not find it locked for ever.
struct Holder {
  unsigned long thread = 0;
  pid_t process = 0;
  int depth = 0;
};
Holder holder;

}  // namespace

CompileTurn::CompileTurn() {
  const unsigned long self = PyThread_get_thread_ident();
  const auto taken = [&] { return holder.depth > 0 && holder.thread != self && holder.process == getpid(); };
  for (const Clock::time_point start = Clock::now(); taken();) {
    waited_ = true;
    if (Clock::now() - start > kLongest) return;
    Py_BEGIN_ALLOW_THREADS;
    std::this_thread::sleep_for(kPoll);
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals() < 0) throw py::PythonError{};
  }
  if (holder.depth > 0 && holder.thread == self && holder.process == getpid())
    ++holder.depth;
  else
    holder = {self, getpid(), 1};
  mine_ = true;
}

CompileTurn::~CompileTurn() {
  if (mine_ && holder.depth > 0) --holder.depth;
}

}  // namespace kiln::frame
