#pragma once
#include <c10/core/Allocator.h>

#include <cstddef>

// Memory for what an artifact hands out (outputs, tensors saved for the backward) and for arenas. Writing into fresh
// pages is several times slower than into pages that were there before, and the C library gives large blocks back to
// the system at every free; so blocks freed by one step are kept for the next.
namespace kiln::runtime {

/// Allocates CPU memory, 64-byte aligned; freed blocks above 64 KiB are kept in size classes for reuse.
/// Thread-safe. The blocks may outlive everything else in the library, so the allocator is never destroyed.
c10::Allocator* pool_allocator();

/// While one lives, what ATen allocates on the CPU comes from the pool: results and workspaces of library calls, for
/// which the C library would fetch fresh pages in every call. In all threads, which is as well; an allocator that the
/// program has set stays.
class PoolForLibraries {
 public:
  PoolForLibraries();
  ~PoolForLibraries();
  PoolForLibraries(const PoolForLibraries&) = delete;
  PoolForLibraries& operator=(const PoolForLibraries&) = delete;
};

/// Asks the system to put such memory, of 2 MiB or more, into huge pages in time: for memory that was written before.
/// To find huge pages when memory is first written can take the system several times as long as to find small ones.
void prefer_huge_pages(void* p, size_t bytes);

struct PoolStats {
  size_t in_use = 0;  // bytes handed out in pooled blocks
  size_t cached = 0;  // bytes kept for reuse
};
PoolStats pool_stats();
/// Gives all cached blocks back to the system.
void trim_pool();

}  // namespace kiln::runtime
