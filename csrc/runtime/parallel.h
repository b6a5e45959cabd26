#pragma once
#include <cstdint>
#include <functional>

// Work on ATen's own thread pool.
namespace kiln::runtime {

/// Runs body(i) for i in [0, tasks), fewer than 2^32. Each thread has a share, the same one in each call, as what it
/// wrote last time is in its caches: from a core behind another last-level cache a line takes several times as long.
/// Who has finished its share takes from the others', so that one busy core does not stall the rest. Exceptions of the
/// body come out of the call.
void parallel_tasks(int64_t tasks, const std::function<void(int64_t)>& body);

/// Runs f(begin, end) over [0, units), cut into several pieces per thread; `grain` units are worth a task. Serial if
/// the work is small, or inside another parallel region.
void run_parallel(int64_t units, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& f);

}  // namespace kiln::runtime
