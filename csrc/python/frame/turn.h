#pragma once

namespace kiln::frame {

/// Threads capture and compile one at a time: captures fill tables that live as long as the process, and options are
/// set for all threads while one compiles. A thread that waits has let go of the GIL, since the one that compiles needs
/// it. A thread that has its turn takes it again at once.
class CompileTurn {
 public:
  /// Waits until no other thread compiles. Throws py::PythonError if a signal handler raised meanwhile.
  CompileTurn();
  ~CompileTurn();
  CompileTurn(const CompileTurn&) = delete;
  /// False if others compiled for so long that they may be waiting for this very thread: it must not compile then.
  explicit operator bool() const { return mine_; }
  /// Another thread compiled meanwhile; what is wanted may be there now.
  bool waited() const { return waited_; }

 private:
  bool mine_ = false, waited_ = false;
};

}  // namespace kiln::frame
