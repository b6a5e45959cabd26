#pragma once
#include <cstdint>

namespace kiln::frame {

/// When code that has reached the recompile limit is compiled once more. What was another in each call may have settled
/// since: a queue is full, a warm-up is over. If it has not, little is lost: each time comes after four compiles' worth
/// of calls in eager, and twice as many as the time before. Needs the GIL.
class SecondChance {
 public:
  bool due(double compile_seconds) const {
    return calls_ >= kCalls << taken_ && seconds_ >= 4 * compile_seconds * static_cast<double>(int64_t{1} << taken_);
  }
  /// A call ran in eager for so long.
  void ran(double seconds) { ++calls_, seconds_ += seconds; }
  /// It was due, and something was compiled, or refused to be.
  void taken() {
    constexpr int kMost = 30;
    if (taken_ < kMost) ++taken_;
    calls_ = 0, seconds_ = 0;
  }

 private:
  static constexpr int64_t kCalls = 32;
  int64_t calls_ = 0;
  double seconds_ = 0;
  int taken_ = 0;
};

}  // namespace kiln::frame
