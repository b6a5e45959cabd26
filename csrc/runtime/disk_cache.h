#pragma once
#include <cstdint>
#include <string>

#include "codegen/common/object_store.h"

// Compiled kernels on disk, so that the next process finds them: an SQLite database in the user's cache folder.
namespace kiln::runtime {

/// The store of this process, or null: switched off (option disk_cache), no folder, or one that others may write to.
/// Thread-safe.
codegen::ObjectStore* disk_cache();

struct DiskCacheInfo {
  std::string path;  // of the database; empty if there is none
  int64_t kernels = 0;
  int64_t bytes = 0;  // of the file
};
DiskCacheInfo disk_cache_info();
/// Forgets all kernels. False if there is no database or it cannot be written.
bool clear_disk_cache();

}  // namespace kiln::runtime
