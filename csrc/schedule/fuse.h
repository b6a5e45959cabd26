#pragma once
#include "schedule/nest_tools.h"
#include "schedule/schedule.h"

namespace kiln::schedule {

/// One nest that does `a`'s work and then `b`'s, point by point of a common outer domain: variables of both are matched
/// by the buffers that both touch. nullopt if their domains do not match, if a point of one needs another point of the
/// other, or if the result would run slower.
std::optional<Nest> fuse_nests(const Nest& a, const Nest& b, const std::vector<Buffer>& buffers,
                               const Options& options);

/// Units of parallel work that the nest's outer domain offers, roughly.
int64_t parallelism(const Nest& n);
/// Which way to vectorize: over the last outer variable, or over each stage's last inner one.
bool prefer_columns(const Nest& n);

}  // namespace kiln::schedule
