#pragma once
#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace kiln::codegen {

/// Takes off the kernel's indices, by argument, what all accesses to its memory add at least, and returns it in bytes:
/// so much later its memory begins. Steps of a loop that was unrolled differ in these constants alone, and are one
/// structure then.
std::vector<int64_t> take_offsets(schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers);

}  // namespace kiln::codegen
