#pragma once
#include <cstdint>
#include <functional>

// Work on ATen's own thread pool.
namespace kiln::runtime {

/// Runs body(i) for i in [0, tasks). The threads take tasks from a counter, so that one busy core does not stall the
/// rest. Exceptions of the body come out of the call.
void parallel_tasks(int64_t tasks, const std::function<void(int64_t)>& body);

}  // namespace kiln::runtime
