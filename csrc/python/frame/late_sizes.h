#pragma once
#include <cstdint>
#include <unordered_map>

namespace kiln::frame {

/// When to compile sizes that come up beyond the recompile limit.
///
/// Sizes are guarded by value, so a program whose sequences have a hundred lengths has a hundred variants. Compiling
/// each at once is a loss for one that never comes again; leaving all in eager is a loss for the rest. As with renting
/// or buying skis, sizes are compiled once what a compile would have saved is what it costs: whatever the program does
/// next, both together take at most twice the better of the two (Karlin, Manasse, Rudolph and Sleator, Competitive
/// Snoopy Caching, 1988). Compiled code is taken to need half of eager's time. Needs the GIL.
class LateSizes {
 public:
  /// Whether calls of the sizes `key` (GuardTree::sizes_key) have spent twice the last compile's time in eager.
  bool pays(uint64_t key) const;
  /// A call of these sizes ran in eager for so long.
  void ran(uint64_t key, double seconds);
  /// They were compiled, and start anew should the entry be dropped; or cannot be, and are not tried again.
  void compiled(uint64_t key, bool made);
  /// Any compile of the code took so long.
  void took(double seconds) { compile_seconds_ = seconds; }
  double compile_seconds() const { return compile_seconds_; }
  /// How many entries were made late.
  int64_t made() const { return made_; }

 private:
  std::unordered_map<uint64_t, double> eager_seconds_;  // by key
  double compile_seconds_ = 0;
  int64_t made_ = 0;
};

}  // namespace kiln::frame
