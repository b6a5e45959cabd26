#pragma once
#include <cstdint>

namespace kiln {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

}  // namespace kiln
