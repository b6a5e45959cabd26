#pragma once
#include <cstdint>
#include <string>

// Bisection: the parts of a program that kiln handles are counted in the order in which they are compiled, and only the
// first so many are. A tool runs the program again and again with other limits until one part is left.
namespace kiln {

enum class BisectUnit : uint8_t { Function, Graph, Kernel };

/// Counts one more `unit`, called `name`, and says whether it is within its limit (options function_limit, graph_limit,
/// kernel_limit; -1 allows all). A refused function runs in eager, a refused graph by ATen kernels, a refused kernel by
/// the loop interpreter. Thread-safe. Logged under the topic `bisect` as "function 3: name".
bool bisect_allows(BisectUnit unit, const std::string& name);
/// How many units were counted so far.
int64_t bisect_count(BisectUnit unit);
/// Starts all counts at zero again.
void reset_bisect();

}  // namespace kiln
