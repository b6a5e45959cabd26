#pragma once
#include <vector>

#include "schedule/nest_tools.h"

namespace kiln::schedule {

/// One step in the making: a (fused) nest or a library call.
struct Group {
  bool is_extern = false;
  int extern_index = -1;
  Nest nest;
  int first_item = 0;  // program position of its first member: keeps the order of what is independent
  int not_before = 0;  // loops::Nest::not_before of its members: the last
  /// Whether it may raise an error, depending on the data.
  bool raises(const std::vector<loops::Extern>& externs) const;
};

/// Buffers that a group reads and writes (a buffer may be in both).
struct Touches {
  std::vector<BufferId> reads, writes;
};
Touches touches(const Group& g, const std::vector<loops::Extern>& externs);

/// Groups of the program's items in an order that keeps every dependency, fused where that pays.
std::vector<Group> group_program(const loops::Program& program, const Options& options);

/// Removes stores to temps that nothing reads, and the groups that are left without any work.
void drop_dead_stores(std::vector<Group>& groups, const std::vector<Buffer>& buffers,
                      const std::vector<loops::Extern>& externs);
/// Temps that live within one point of one nest's outer domain become scratch rows: new buffers are appended.
void contract_temps(std::vector<Group>& groups, std::vector<Buffer>& buffers,
                    const std::vector<loops::Extern>& externs);

/// Welford and online-softmax reductions as two plain passes, for rows that stay in the cache.
void expand_two_pass(Nest& n, const Options& options);
/// Cuts the reductions of a nest with too few outer points into parts: returns the nest that combines the parts (run it
/// after `n`), or nullopt if `n` stays as it was. Partial results go to new Temp buffers.
std::optional<Nest> split_reduction(Nest& n, std::vector<Buffer>& buffers, const Options& options);

/// Costly values that several passes over a row compute are kept in scratch rows: new buffers are appended.
void share_costly_values(Nest& n, std::vector<Buffer>& buffers);
/// Joins independent kernels that do one pointwise thing to tensors of different sizes into one with segments.
void join_segments(Plan& plan);

}  // namespace kiln::schedule
