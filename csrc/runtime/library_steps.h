#pragma once
#include "runtime/steps.h"

// Steps that run kiln's own matrix products, convolutions and attention.
namespace kiln::runtime {

/// True if a kernel of kiln's own serves this node on this host, given its values' metas: its results may then lie in
/// planned memory. Convolutions ask for channels-last activations; see graph/passes.
bool has_library_kernel(const graph::Node& node);

/// Whether ATen's kernel may be faster than the one that has_library_kernel means: convolutions of many channels with
/// windows too large for Winograd's form.
bool library_may_be_faster(const graph::Node& node);

/// How many rows of equal length the first result of such a node is made of, if it is made row by row (RowsStep); else
/// 0.
int64_t result_rows(const graph::Node& node);

/// The step of such a node; null if has_library_kernel says no for the slots' actual layouts. `results` has a slot for
/// every result of the node (kNoSlot: nobody reads it).
std::unique_ptr<Step> make_library_step(const graph::Node& node, const AtenStep::SlotOf& slot_of,
                                        const std::vector<Slot>& results, const Plan& plan);

}  // namespace kiln::runtime
