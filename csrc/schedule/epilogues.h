#pragma once
#include "schedule/schedule.h"

namespace kiln::schedule {

/// Epilogue fusion: lets a library call that makes its result row by row (loops::Extern::rows) hand each block of
/// finished rows to the kernel that reads them next, while they are in the cache. The kernel becomes Step::epilogue.
/// A kernel qualifies if its units, in order, read the result in order, and it needs nothing that the call or a step
/// between them changes.
void attach_epilogues(Plan& plan);

/// In-place results: a pointwise kernel's output (a Temp) takes the memory of an input that dies there, if all accesses
/// of both have one index and the loads come first. Sets KernelArg::place. A kernel that runs as an epilogue never
/// writes what its library call still reads.
void share_places(Plan& plan);

}  // namespace kiln::schedule
