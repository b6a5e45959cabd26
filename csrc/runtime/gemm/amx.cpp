#include "runtime/gemm/amx.h"

// GCC 12's own AVX-512 header trips its uninitialized-variable warning on every shuffle.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

namespace kiln::runtime::gemm::amx {
namespace {

bool has_unit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;  // of leaf 7's edx
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBFloat16) && (d & kTile);
}

/// Linux gives a process the registers when it asks for them; it refuses where a signal stack is too small for them.
bool ask_for_registers() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Instructions by name: the compiler's intrinsics do not tell it that they read and write memory.
template <int kTile>
KILN_INLINE void load(const float* from, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kTile) : "memory");
}
template <int kTile>
KILN_INLINE void store(float* to, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes), "i"(kTile) : "memory");
}
template <int kTile>
KILN_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile) : "memory");
}
/// sum += left * right.
template <int kSum, int kLeft, int kRight>
KILN_INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
}

struct Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Config) == 64);

/// The parts of 16 pairs of numbers, a pair of bfloat16 each. Rounding takes the nearest, so that what remains needs a
/// bit less: after two parts eight bits or fewer.
KILN_AVX512 KILN_INLINE void split(const float* low, const float* high, float* to, __m512i& largest) {
  const __m512i kept = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512 x = _mm512_loadu_ps(low), y = _mm512_loadu_ps(high);
  largest = _mm512_max_epu32(largest, _mm512_and_epi32(_mm512_castps_si512(x), magnitude));
  largest = _mm512_max_epu32(largest, _mm512_and_epi32(_mm512_castps_si512(y), magnitude));
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    __m512i px = _mm512_castps_si512(x), py = _mm512_castps_si512(y);
    if (part + 1 < kParts) px = _mm512_add_epi32(px, half), py = _mm512_add_epi32(py, half);
    px = _mm512_and_epi32(px, kept), py = _mm512_and_epi32(py, kept);  // the last part, too: it may be denormal
    if (part + 1 < kParts) {
      x = _mm512_sub_ps(x, _mm512_castsi512_ps(px));
      y = _mm512_sub_ps(y, _mm512_castsi512_ps(py));
    }
    _mm512_store_si512(to + part * kPartFloats, _mm512_or_epi32(_mm512_srli_epi32(px, 16), py));
  }
}

}  // namespace

/// Packing's loop, to be inlined into the product's.
struct Lines {
  KILN_AVX512 KILN_INLINE static void go_on(Packing& p, int64_t count) {
    __m512i largest = _mm512_load_si512(p.largest_);
    for (; count > 0 && p.lines_ > 0; --count) {
      split(p.low_, p.high_, p.to_, largest);
      p.low_ += p.apart_, p.high_ += p.apart_, p.to_ += kAcross;
      if (--p.lines_ % kAcross == 0) p.begin_step();
    }
    _mm512_store_si512(p.largest_, largest);
  }
};

namespace {

KILN_AVX512 void go_on512(Packing& p, int64_t count) { Lines::go_on(p, count); }
KILN_AVX512 uint32_t largest512(const uint32_t* of) { return _mm512_reduce_max_epu32(_mm512_load_si512(of)); }

KILN_AVX512 void store512(const Finished& f) {
  for (int64_t r = 0; r < f.rows; ++r) {
    float* to = f.c + r * f.ldc;
    const float* sums = f.sums + r * kAcross;
    for (int64_t j = 0; j < f.columns; j += kAcross, sums += kPairFloats) {
      const int64_t rest = f.columns - j;
      const __mmask16 mask =
          rest >= kAcross ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << rest) - 1);
      __m512 x = _mm512_load_ps(sums);
      if (f.accumulate) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, to + j));
      if (f.bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, f.bias + j));
      _mm512_mask_storeu_ps(to + j, mask, x);
    }
  }
}

KILN_AVX512 void add512(const float* sums, int64_t tiles, float* to) {
  for (const float* const end = sums + tiles * kAcross * kAcross; sums < end; sums += kAcross, to += kAcross)
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_load_ps(sums)));
}

// Six of the nine products of parts: the other three are below 2^-24 of the whole. Each part of B meets both tiles of
// A, as two sums hide the latency of an addition. The core waits for the unit most of the time, and sees no further
// ahead than a step: what else there is to do is dealt out to all of them.
template <bool kSecond>
KILN_AVX512 void multiply_tiles(const float* first, const float* second, const float* right, int64_t steps,
                                const float* from, float* to, const Meanwhile& meanwhile) {
  constexpr int64_t kBytes = 64, kTileFloats = kAcross * kAcross, kAsked = 2 * kAcross;
  if (from) {
    load<0>(from, kBytes);
    if (kSecond) load<1>(from + kTileFloats, kBytes);
  } else {
    zero<0>();
    if (kSecond) zero<1>();
  }
  const float* soon = meanwhile.soon;
  const int64_t asked = soon ? (kAsked + steps - 1) / steps : 0;
  for (int64_t s = 0; s < steps; ++s, first += kStepFloats, second += kStepFloats, right += kStepFloats) {
    load<2>(first, kBytes);
    if (kSecond) load<3>(second, kBytes);
    load<5>(right, kBytes);
    add_product<0, 2, 5>();
    if (kSecond) add_product<1, 3, 5>();
    load<6>(right + kPartFloats, kBytes);
    add_product<0, 2, 6>();
    if (kSecond) add_product<1, 3, 6>();
    for (int64_t i = 0; i < asked; ++i, soon += meanwhile.apart) __builtin_prefetch(soon);
    load<7>(right + 2 * kPartFloats, kBytes);
    add_product<0, 2, 7>();
    if (kSecond) add_product<1, 3, 7>();
    load<2>(first + kPartFloats, kBytes);
    if (kSecond) load<3>(second + kPartFloats, kBytes);
    add_product<0, 2, 5>();
    if (kSecond) add_product<1, 3, 5>();
    if (meanwhile.lines > 0) {
      Packing* const packing = meanwhile.packing[meanwhile.packing[0]->lines() == 0 && meanwhile.packing[1]];
      Lines::go_on(*packing, meanwhile.lines);
    }
    add_product<0, 2, 6>();
    if (kSecond) add_product<1, 3, 6>();
    load<4>(first + 2 * kPartFloats, kBytes);
    add_product<0, 4, 5>();
    if (kSecond) {
      load<2>(second + 2 * kPartFloats, kBytes);
      add_product<1, 2, 5>();
    }
  }
  store<0>(to, kBytes);
  if (kSecond) store<1>(to + kTileFloats, kBytes);
}

}  // namespace

bool supported() {
  static const bool yes = has_avx512() && has_unit() && ask_for_registers();
  return yes;
}

Tiles::Tiles() {
  const Config config;
  asm volatile("sttilecfg %0" : "=m"(before_)::"memory");
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
Tiles::~Tiles() { asm volatile("ldtilecfg %0" ::"m"(before_) : "memory"); }

void Packing::begin(const Vectors& vectors, int64_t depth, Side side, float* to) {
  vectors_ = vectors, depth_ = depth, side_ = side, at_ = 0;
  lines_ = (depth + kStep - 1) / kStep * kAcross;
  to_ = to - (kParts - 1) * kPartFloats;
  std::memset(largest_, 0, sizeof(largest_));
  begin_step();
}

void Packing::begin_step() {
  to_ += (kParts - 1) * kPartFloats;  // behind the step's other parts
  if (lines_ == 0) return;
  // A tile's lines are vectors of A, or pairs of k of B; its lanes the other.
  const Vectors& v = vectors_;
  const bool left = side_ == Side::Left;
  const int64_t line = left ? v.vector : v.step, lane = left ? v.step : v.vector, p = at_;
  at_ += kStep;
  low_ = v.data + p * v.step, high_ = low_ + kStep / 2 * v.step, apart_ = line;
  const bool whole = v.count == kAcross && p + kStep <= depth_;
  if (whole && lane == 1) return;
  if (whole && line == 1) {
    transpose16(low_, lane, turned_[0], kAcross);
    transpose16(high_, lane, turned_[1], kAcross);
  } else {
    std::memset(turned_, 0, sizeof(turned_));
    for (int64_t i = 0; i < v.count; ++i)
      for (int64_t q = 0; q < std::min(kStep, depth_ - p); ++q) {
        const int64_t r = q % kAcross;
        turned_[q / kAcross][left ? i * kAcross + r : r * kAcross + i] = low_[i * v.vector + q * v.step];
      }
  }
  low_ = turned_[0], high_ = turned_[1], apart_ = kAcross;
}

void Packing::go_on(int64_t count) { go_on512(*this, count); }
uint32_t Packing::largest() const { return largest512(largest_); }

bool exact(uint32_t largest_left, uint32_t largest_right) {
  constexpr int kBias = 127, kFar = 100;
  const auto exponent = [](uint32_t bits) { return static_cast<int>(bits >> 23) - kBias; };
  const auto near = [&](int e) { return e >= -kFar && e <= kFar; };
  const auto fits = [&](uint32_t bits) { return bits == 0 || near(exponent(bits)); };
  if (!fits(largest_left) || !fits(largest_right)) return false;
  return largest_left == 0 || largest_right == 0 || near(exponent(largest_left) + exponent(largest_right));
}

void multiply(const float* first, const float* second, const float* right, int64_t steps, const float* from, float* to,
              const Meanwhile& meanwhile) {
  if (second)
    multiply_tiles<true>(first, second, right, steps, from, to, meanwhile);
  else
    multiply_tiles<false>(first, first, right, steps, from, to, meanwhile);
}

void add(const float* sums, int64_t tiles, float* to) { add512(sums, tiles, to); }
void store(const Finished& f) { store512(f); }

}  // namespace kiln::runtime::gemm::amx
#pragma GCC diagnostic pop
