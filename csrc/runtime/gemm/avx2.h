#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "runtime/gemm/target.h"

namespace kiln::runtime::gemm {

/// The first `count` of eight lanes; all of them from eight on, none up to 0.
KILN_AVX2 KILN_INLINE __m256i first_lanes(int64_t count) {
  alignas(32) static constexpr int32_t kMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMask + 8 - std::clamp<int64_t>(count, 0, 8)));
}

}  // namespace kiln::runtime::gemm
