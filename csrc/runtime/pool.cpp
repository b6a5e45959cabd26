#include "runtime/pool.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <deque>
#include <list>
#include <mutex>
#include <utility>

#include "aten/pch.h"

namespace kiln::runtime {
namespace {

constexpr size_t kSmallest = 64 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kSlack = 32 << 20;

/// Sizes are rounded up to a multiple of an eighth of their power of two: at most 12.5 % is lost.
size_t size_class(size_t bytes) {
  const size_t top = size_t{1} << (63 - __builtin_clzll(bytes | 1));
  const size_t grain = std::max<size_t>(top / 8, 4096);
  return (bytes + grain - 1) / grain * grain;
}

struct Pool {
  struct Block {
    void* p;
    size_t size;
    bool huge = false;  // prefer_huge_pages() was called for it
  };
  std::mutex mutex;
  std::list<Block> free;                                                            // the last one freed comes first
  std::unordered_map<size_t, std::deque<std::list<Block>::iterator>> free_of_size;  // in the same order
  std::unordered_map<void*, Block> handed_out;                                      // a deleter gets only the pointer
  PoolStats stats;
  size_t peak_in_use = 0;

  void* get(size_t size) {
    {
      std::lock_guard lock(mutex);
      stats.in_use += size;
      peak_in_use = std::max(peak_in_use, stats.in_use);
      const auto it = free_of_size.find(size);
      if (it != free_of_size.end() && !it->second.empty()) {
        Block b = *it->second.front();
        free.erase(it->second.front());
        it->second.pop_front();
        stats.cached -= size;
        if (!std::exchange(b.huge, true)) prefer_huge_pages(b.p, size);
        handed_out[b.p] = b;
        return b.p;
      }
    }
    void* p = nullptr;
    if (posix_memalign(&p, size >= kHugePage ? kHugePage : 4096, size) != 0) {
      trim_pool();
      if (posix_memalign(&p, 4096, size) != 0) {
        std::lock_guard lock(mutex);
        stats.in_use -= size;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "kiln could not allocate ", size, " bytes");
      }
    }
    std::lock_guard lock(mutex);
    handed_out[p] = {p, size};
    return p;
  }

  /// False if the block is none of the pool's.
  bool put(void* p) {
    std::list<Block> dropped;
    {
      std::lock_guard lock(mutex);
      const auto it = handed_out.find(p);
      if (it == handed_out.end()) return false;
      const size_t size = it->second.size;
      free.push_front(it->second);
      handed_out.erase(it);
      stats.in_use -= size;
      stats.cached += size;
      free_of_size[size].push_front(free.begin());
      // What a step needs at once is at most its peak; keeping much more than that only holds on to memory. A little
      // more is what blocks of several sizes need: a workspace is free when the result behind it is asked for, and
      // would go as soon as that step's input is free, too. Blocks of sizes that nobody asks for any more go first.
      while (stats.in_use + stats.cached > peak_in_use + std::max(peak_in_use / 8, kSlack)) {
        const auto oldest = std::prev(free.end());
        stats.cached -= oldest->size;
        free_of_size[oldest->size].pop_back();
        dropped.splice(dropped.end(), free, oldest);
      }
    }
    for (const Block& b : dropped) std::free(b.p);
    return true;
  }
};

Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

/// Of blocks of any size: small ones are not the pool's.
void release(void* p) {
  if (!pool().put(p)) c10::GetDefaultCPUAllocator()->raw_deleter()(p);
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    const size_t size = size_class(bytes);
    void* p = pool().get(size);
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

}  // namespace

void prefer_huge_pages(void* p, size_t bytes) {
  if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);
}

c10::Allocator* pool_allocator() {
  static PoolAllocator* a = new PoolAllocator;
  return a;
}

namespace {
std::mutex scopes_mutex;
int scopes = 0;
}  // namespace

PoolForLibraries::PoolForLibraries() {
  std::lock_guard lock(scopes_mutex);
  if (scopes++ == 0 && c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(pool_allocator());
}

PoolForLibraries::~PoolForLibraries() {
  std::lock_guard lock(scopes_mutex);
  if (--scopes == 0 && c10::GetCPUAllocator() == pool_allocator()) c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
}

PoolStats pool_stats() {
  std::lock_guard lock(pool().mutex);
  return pool().stats;
}

void trim_pool() {
  std::list<Pool::Block> blocks;
  {
    std::lock_guard lock(pool().mutex);
    blocks.swap(pool().free);
    pool().free_of_size.clear();
    pool().stats.cached = 0;
    pool().peak_in_use = pool().stats.in_use;
  }
  for (const Pool::Block& b : blocks) std::free(b.p);
}

}  // namespace kiln::runtime
