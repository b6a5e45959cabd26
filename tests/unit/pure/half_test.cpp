#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kiln {
namespace {

TEST(Half, EveryNumberComesBack) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
    const float v = half_to_float(static_cast<uint16_t>(h));
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(v), fraction != 0);
      EXPECT_EQ(std::isinf(v), fraction == 0);
    } else {
      const double magnitude =
          exponent ? std::ldexp(1024.0 + fraction, static_cast<int>(exponent) - 25) : std::ldexp(fraction, -24);
      EXPECT_EQ(v, h & 0x8000 ? -magnitude : magnitude);
    }
    EXPECT_EQ(std::signbit(v), (h & 0x8000) != 0);
    if (!std::isnan(v)) EXPECT_EQ(float_to_half(v), h);
  }
}

TEST(Half, TiesGoToEven) {
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const float low = half_to_float(static_cast<uint16_t>(h));
    const float high = h == 0x7bff ? 65536.0f : half_to_float(static_cast<uint16_t>(h + 1));
    const float tie = low + (high - low) / 2;
    EXPECT_EQ(float_to_half(tie), h + (h & 1));
    EXPECT_EQ(float_to_half(std::nextafter(tie, 0.0f)), h);
    EXPECT_EQ(float_to_half(std::nextafter(tie, INFINITY)), h + 1);
  }
}

TEST(Half, BFloat16IsHalfOfAFloat) {
  for (uint32_t h = 0; h < 0x7f80; ++h) {
    const float low = bf16_to_float(static_cast<uint16_t>(h));
    const float tie = std::bit_cast<float>(h << 16 | 0x8000);
    EXPECT_EQ(float_to_bf16(low), h);
    EXPECT_EQ(float_to_bf16(tie), h + (h & 1));
    EXPECT_EQ(float_to_bf16(-std::nextafter(tie, INFINITY)), (h + 1) | 0x8000);
  }
  EXPECT_EQ(float_to_bf16(NAN), 0x7fc0);
}

}  // namespace
}  // namespace kiln
