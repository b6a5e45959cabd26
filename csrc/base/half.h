#pragma once
#include <bit>
#include <cstdint>

// float16 (IEEE 754's binary16) and bfloat16 by their bits, on any machine: rounding is to nearest, ties to even.
namespace kiln {

/// Exponent and fraction at float's places make a number that is 2^112 times too small; of infinities and NaN the
/// exponent is filled up.
inline float half_to_float(uint16_t bits) {
  const uint32_t h = bits, special = (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  const float v = std::bit_cast<float>((h & 0x7fff) << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(v) | special | (h & 0x8000) << 16);
}

inline uint16_t float_to_half(float v) {
  const uint32_t sign = std::bit_cast<uint32_t>(v) >> 16 & 0x8000, bits = std::bit_cast<uint32_t>(v) & 0x7fffffff;
  uint32_t h = 0x7e00;    // NaN
  if (bits < 0x38800000)  // below 2^-14 a step is 2^-24, as it is behind 0.5
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000;
  else if (bits < 0x477ff000)  // 65520, which is rounded to infinity
    h = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
  else if (bits <= 0x7f800000)
    h = 0x7c00;
  return static_cast<uint16_t>(sign | h);
}

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float v) {
  if (v != v) return 0x7fc0;
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace kiln
