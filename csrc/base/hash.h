#pragma once
#include <cstddef>
#include <functional>

namespace kiln {

/// Mixes `value`'s hash into `seed` (boost's formula with a 64-bit constant).
template <class T>
void hash_combine(size_t& seed, const T& value) {
  seed ^= std::hash<T>{}(value) + 0x9e3779b97f4a7c15ull + (seed << 12) + (seed >> 4);
}

}  // namespace kiln
