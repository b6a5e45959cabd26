// The cores' peak rate of fused multiply-adds, for benchmarks to relate matrix products to.
#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "python/bindings/bindings.h"

namespace kiln::bindings {
namespace {

using Clock = std::chrono::steady_clock;

// Independent chains, enough to cover the latency of an FMA (4 cycles) on two ports, few enough to stay in registers.
constexpr int kChains = 12;
constexpr int kInner = 4096;

/// One block of kInner rounds on kChains registers; the result keeps the compiler from dropping the work.
__attribute__((target("avx512f"))) float block_avx512(float seed) {
  __m512 acc[kChains], a = _mm512_set1_ps(0.999999f), b = _mm512_set1_ps(seed);
  for (auto& x : acc) x = _mm512_set1_ps(seed);
  for (int i = 0; i < kInner; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], a, b);
  __m512 sum = acc[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, acc[c]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

__attribute__((target("avx2,fma"))) float block_avx2(float seed) {
  __m256 acc[kChains], a = _mm256_set1_ps(0.999999f), b = _mm256_set1_ps(seed);
  for (auto& x : acc) x = _mm256_set1_ps(seed);
  for (int i = 0; i < kInner; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], a, b);
  __m256 sum = acc[0];
  for (int c = 1; c < kChains; ++c) sum = _mm256_add_ps(sum, acc[c]);
  float lanes[8];
  _mm256_storeu_ps(lanes, sum);
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

std::atomic<float> keep{0};

/// float32 GFLOPS (two per fused multiply-add) of `threads` threads in the best of many slices of `seconds`.
/// The median of slices would measure the neighbours; the best slice measures the core.
double fma_peak(int threads, double seconds) {
  const bool avx512 = __builtin_cpu_supports("avx512f");
  if (!avx512 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")))
    throw UserError("fma_peak needs a CPU with AVX2 and FMA");
  if (threads < 1 || seconds <= 0) throw UserError("fma_peak needs at least one thread and a positive time");
  const double block_flops = 2.0 * kInner * kChains * (avx512 ? 16 : 8);
  std::vector<double> best(threads, 0.0);
  auto work = [&](int index) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
      const auto start = Clock::now();
      float total = 0;
      for (int i = 0; i < 32; ++i) total += avx512 ? block_avx512(1e-6f * i) : block_avx2(1e-6f * i);
      const double spent = std::chrono::duration<double>(Clock::now() - start).count();
      keep.store(total, std::memory_order_relaxed);
      best[index] = std::max(best[index], 32 * block_flops / spent);
    }
  };
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; ++i) pool.emplace_back(work, i);
  work(0);
  for (std::thread& t : pool) t.join();
  double sum = 0;
  for (double rate : best) sum += rate;
  return sum / 1e9;
}

}  // namespace

KILN_BINDINGS(peak) {
  m.def("fma_peak", &fma_peak, pybind11::arg("threads"), pybind11::arg("seconds") = 0.5,
        pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace kiln::bindings
