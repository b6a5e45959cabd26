// What is kept on disk between processes.
#include "runtime/disk_cache.h"

#include "python/bindings/bindings.h"

namespace kiln::bindings {

KILN_BINDINGS(disk_cache) {
  m.def(
      "disk_cache_info",
      [] {
        const runtime::DiskCacheInfo info = runtime::disk_cache_info();
        pybind11::dict out;
        if (info.path.empty()) return out;
        out["path"] = info.path;
        out["kernels"] = info.kernels;
        out["bytes"] = info.bytes;
        return out;
      },
      "The database's path, its kernels and bytes; empty if nothing is kept on disk.");
  m.def("disk_cache_clear", &runtime::clear_disk_cache, "Removes all kernels from the disk; False if that failed.");
}

}  // namespace kiln::bindings
