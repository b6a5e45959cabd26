#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

// The memory of intermediates. One arena serves all artifacts in turn: a program of several graphs, or one that was
// compiled again, needs the largest of its arenas, not their sum, and every call finds pages that are there already.
namespace kiln::runtime {

/// The process' arena for as long as this lives, at least `bytes` large; or, while another call has that one (threads,
/// nested calls), memory of its own.
class ArenaLease {
 public:
  explicit ArenaLease(int64_t bytes);
  ~ArenaLease();
  ArenaLease(const ArenaLease&) = delete;
  ArenaLease& operator=(const ArenaLease&) = delete;

  char* data() const { return data_; }
  /// Two leases with the same generation have the same memory; never 0.
  uint64_t generation() const { return generation_; }

 private:
  char* data_ = nullptr;
  uint64_t generation_ = 0;
  bool shared_ = false;
  at::Tensor own_;
};

/// Who asks: an epilogue runs while the library call that it belongs to uses its own scratch.
enum class ScratchUser : uint8_t { Step, Epilogue };
/// `bytes` of 64-byte aligned memory for one step: this thread's, grown as needed, good until the thread asks again for
/// the same user.
void* scratch(int64_t bytes, ScratchUser user = ScratchUser::Step);

/// Gives the idle arena and what the pool keeps back to the system; the next call makes them anew.
void release_arena();

}  // namespace kiln::runtime
