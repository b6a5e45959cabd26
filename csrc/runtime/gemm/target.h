#pragma once

// Functions for one vector unit, whatever the rest of the library is compiled for. Whether the host has it is asked at
// run time: gemm::has_avx512(), gemm::supported().
#define KILN_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prfchw")))
#define KILN_AVX2 __attribute__((target("avx2,fma,prfchw")))
#define KILN_INLINE inline __attribute__((always_inline))

namespace kiln::runtime::gemm {

/// kLanes floats anywhere in memory.
template <int kLanes>
struct Lanes {
  typedef float type __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));
};

}  // namespace kiln::runtime::gemm
