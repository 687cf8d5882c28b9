// 16-bit floats, rounded to nearest, ties to even, as NumPy casts. Without branches, so that loops
// over values are vectorized.
#pragma once

#include <cstdint>

#include "bits.h"

namespace sn {

// Rounds a float32 to float16 and converts it back.
inline float through_half(float value) {
  const uint32_t raw = to_bits(value), sign = raw & 0x80000000u, magnitude = raw & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u)) & ~0x1FFFu;
  // Below 2**-14 the spacing is 2**-24, like that of float32 from 1/2 to 1.
  const uint32_t small = to_bits((from_bits(magnitude) + 0.5f) - 0.5f);
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t huge = magnitude > 0x7F800000u ? 0x7FC00000u : 0x7F800000u;  // NaN, or too large
  return from_bits(sign | (magnitude >= 0x477FF000u ? huge : finite));
}

inline float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  // The exponent biases differ by 112; a product with 2**112 also converts subnormals correctly.
  const uint32_t finite = to_bits(from_bits(magnitude) * from_bits(0x77800000u));
  return from_bits(sign | (magnitude >= 0x0F800000u ? magnitude + 0x70000000u : finite));
}

inline uint16_t to_half(float value) {
  const uint32_t raw = to_bits(through_half(value)), magnitude = raw & 0x7FFFFFFFu;
  // Below 2**-14 a float16 is a number of steps of 2**-24.
  const float count = from_bits(magnitude) * 16777216.0f;
  const bool small = magnitude < 0x38800000u;
  const auto denormal = static_cast<uint32_t>(static_cast<int32_t>(small ? count : 0.0f));
  const uint32_t normal = (magnitude - 0x38000000u) >> 13;
  const uint32_t huge = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t finite = small ? denormal : normal;
  return static_cast<uint16_t>(raw >> 16 & 0x8000u) |
         static_cast<uint16_t>(magnitude >= 0x7F800000u ? huge : finite);
}

inline float from_brain(uint16_t upper) { return from_bits(static_cast<uint32_t>(upper) << 16); }

inline uint16_t to_brain(float value) {
  const uint32_t raw = to_bits(value);
  const uint32_t nearest = (raw + 0x7FFFu + (raw >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((raw & 0x7FFFFFFFu) > 0x7F800000u ? raw >> 16 | 0x40u : nearest);
}

// `out` may be `values`.
void through_half(const float* values, float* out, int64_t count);

}  // namespace sn
