#include "runtime/random/bernoulli.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "aten/convert.h"
#include "aten/pch.h"
#include "runtime/gemm/gemm.h"
#include "runtime/gemm/kernels.h"

// The generator is MT19937: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998. A mask's element is one
// number of 53 bits, made of two of its words (the first one is the upper), compared with p.
namespace kiln::runtime::random {
namespace {

constexpr int kState = 624, kShift = 397;
constexpr int64_t kWords = 4096;  // words that are drawn at a time: they stay in the first-level cache

// Loops without branches and calls, which the compiler makes vectors of; each is compiled for two kinds of hosts.
#define KILN_INLINE inline __attribute__((always_inline))

KILN_INLINE uint32_t twist(uint32_t u, uint32_t v) {
  return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ (-(v & 1u) & 0x9908b0dfu);
}

KILN_INLINE void next_state(uint32_t* s) {
  for (int j = 0; j < kState - kShift; ++j) s[j] = s[j + kShift] ^ twist(s[j], s[j + 1]);
#pragma GCC ivdep
  for (int j = kState - kShift; j < kState - 1; ++j) s[j] = s[j + kShift - kState] ^ twist(s[j], s[j + 1]);
  s[kState - 1] = s[kShift - 1] ^ twist(s[kState - 1], s[0]);
}

KILN_INLINE void temper(const uint32_t* state, int64_t count, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t y = state[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    out[i] = y ^ (y >> 18);
  }
}

KILN_INLINE void draw_words(at::mt19937_data_pod& g, uint32_t* out, int64_t count) {
  while (count > 0) {
    if (g.left_ == 1) {
      next_state(g.state_.data());
      g.left_ = kState + 1;  // as if none of them were taken: ATen counts down before it takes one
      g.next_ = 0;
    }
    const int64_t n = std::min<int64_t>(count, g.left_ - 1);
    temper(g.state_.data() + g.next_, n, out);
    g.next_ += static_cast<uint32_t>(n);
    g.left_ -= static_cast<int>(n);
    out += n;
    count -= n;
  }
}

template <class Element>
KILN_INLINE void fill(at::mt19937_data_pod& g, Element* out, int64_t count, int64_t bound, Element one) {
  alignas(64) uint32_t words[kWords];
  constexpr int64_t kMask = (int64_t{1} << 53) - 1;
  for (int64_t at = 0; at < count; at += kWords / 2) {
    const int64_t n = std::min(count - at, kWords / 2);
    draw_words(g, words, 2 * n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t number = ((static_cast<int64_t>(words[2 * i]) << 32) | words[2 * i + 1]) & kMask;
      out[at + i] = number < bound ? one : Element{0};
    }
  }
}

#define KILN_FILL(name, attribute)                                                                     \
  attribute void name(at::mt19937_data_pod& g, void* out, DType dtype, int64_t count, int64_t bound) { \
    switch (dtype) {                                                                                   \
      case DType::Float64:                                                                             \
        return fill(g, static_cast<double*>(out), count, bound, 1.0);                                  \
      case DType::Float32:                                                                             \
        return fill(g, static_cast<float*>(out), count, bound, 1.0f);                                  \
      case DType::BFloat16:                                                                            \
        return fill(g, static_cast<uint16_t*>(out), count, bound, c10::BFloat16(1.0f).x);              \
      default:                                                                                         \
        return fill(g, static_cast<uint16_t*>(out), count, bound, c10::Half(1.0f).x);                  \
    }                                                                                                  \
  }
KILN_FILL(fill_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), optimize("O3"))))
KILN_FILL(fill_avx2, __attribute__((target("avx2"), optimize("O3"))))
KILN_FILL(fill_any, __attribute__((optimize("O3"))))
#undef KILN_FILL

bool is_served(DType dtype) {
  return dtype == DType::Float64 || dtype == DType::Float32 || dtype == DType::BFloat16 || dtype == DType::Float16;
}

void draw(at::CPUGeneratorImpl& generator, void* out, DType dtype, int64_t count, double p) {
  // number * 2^-53 < p, in integers.
  const auto bound = static_cast<int64_t>(std::ceil(std::ldexp(p, 53)));
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine = generator.engine();
  at::mt19937_data_pod state = engine.data();
  (gemm::has_avx512() ? fill_avx512 : gemm::supported() ? fill_avx2 : fill_any)(state, out, dtype, count, bound);
  engine.set_data(state);
  generator.set_engine(engine);
}

}  // namespace

void bernoulli(void* out, DType dtype, int64_t count, double p) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  draw(*at::check_generator<at::CPUGeneratorImpl>(generator), out, dtype, count, p);
}

bool serves_bernoulli(DType dtype) {
  static const bool same = [] {
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset);
    at::Generator theirs = at::detail::createCPUGenerator(7), ours = at::detail::createCPUGenerator(7);
    at::Tensor expected = at::empty({3001}), drawn = at::empty({3001});
    for (int i = 0; i < 2; ++i) {
      expected.bernoulli_(0.3, theirs);
      draw(*at::check_generator<at::CPUGeneratorImpl>(ours), drawn.mutable_data_ptr(), DType::Float32, 3001, 0.3);
      if (!expected.equal(drawn)) return false;
    }
    return theirs.get_state().equal(ours.get_state());
  }();
  return same && is_served(dtype);
}

}  // namespace kiln::runtime::random
