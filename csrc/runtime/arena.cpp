#include "runtime/arena.h"

#include <algorithm>
#include <atomic>

#include "aten/pch.h"
#include "runtime/plan.h"
#include "runtime/pool.h"

namespace kiln::runtime {
namespace {

struct Shared {
  std::atomic<bool> busy{false};
  at::Tensor memory;   // guarded by busy, as all below
  int64_t leases = 0;  // of this memory
  uint64_t generation = 0;
};

Shared& shared() {
  static Shared* s = new Shared;
  return *s;
}
std::atomic<uint64_t> last_generation{0};

at::Tensor allocate_bytes(int64_t bytes) {
  graph::TensorMeta m;
  m.dtype = DType::UInt8;
  m.sizes = {bytes};
  m.strides = {1};
  return allocate(m);
}

}  // namespace

ArenaLease::ArenaLease(int64_t bytes) {
  if (bytes <= 0) {
    generation_ = ~uint64_t{0};
    return;
  }
  Shared& s = shared();
  if (s.busy.exchange(true, std::memory_order_acquire)) {
    own_ = allocate_bytes(bytes);
    data_ = static_cast<char*>(own_.mutable_data_ptr());
    generation_ = ++last_generation;
    return;
  }
  shared_ = true;
  try {
    if (!s.memory.defined() || s.memory.numel() < bytes) {
      // Before the larger one is made, and not into the pool: both at once would be the peak. Room for more, which is
      // no memory before it is written: a step that is compiled again, or for a larger batch, finds its pages there.
      s.memory = at::Tensor();
      trim_pool();
      constexpr int64_t kMostRoom = 512 << 20;
      s.memory = allocate_bytes(bytes + std::min(bytes / 2, kMostRoom));
      s.generation = ++last_generation;
      s.leases = 0;
    }
    if (++s.leases == 2) prefer_huge_pages(s.memory.mutable_data_ptr(), static_cast<size_t>(bytes));
  } catch (...) {
    s.busy.store(false, std::memory_order_release);
    throw;
  }
  data_ = static_cast<char*>(s.memory.mutable_data_ptr());
  generation_ = s.generation;
}

ArenaLease::~ArenaLease() {
  if (shared_) shared().busy.store(false, std::memory_order_release);
}

void* scratch(int64_t bytes, ScratchUser user) {
  struct Block {
    c10::DataPtr data;
    int64_t size = 0;
  };
  static thread_local Block blocks[2];
  Block& b = blocks[static_cast<int>(user)];
  if (b.size < bytes) {
    b.size = 0;
    b.data.clear();
    b.data = pool_allocator()->allocate(static_cast<size_t>(bytes));
    b.size = bytes;
  }
  return b.data.get();
}

void release_arena() {
  Shared& s = shared();
  if (s.busy.exchange(true, std::memory_order_acquire)) return;
  s.memory = at::Tensor();
  trim_pool();
  s.busy.store(false, std::memory_order_release);
}

}  // namespace kiln::runtime
