// A float32 rounded to float16 and back, to nearest, ties to even, as NumPy casts.
#pragma once

#include "bits.h"

namespace sn {

// Without branches, so that loops over values become vector code.
inline float through_half(float value) {
  const uint32_t raw = to_bits(value), sign = raw & 0x80000000u, magnitude = raw & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u)) & ~0x1FFFu;
  // Below 2**-14 the spacing is 2**-24, as that of float32 from 1/2 to 1.
  const uint32_t small = to_bits((from_bits(magnitude) + 0.5f) - 0.5f);
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t huge = magnitude > 0x7F800000u ? 0x7FC00000u : 0x7F800000u;  // NaN, or too large
  return from_bits(sign | (magnitude >= 0x477FF000u ? huge : finite));
}

}  // namespace sn
