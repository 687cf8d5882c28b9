// Value coders beside the range float. Twin: ops/quantize.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "half.h"
#include "quantize.h"

namespace sn {

// IEEE half precision of values scaled by a power of two that takes the block's peak to
// [2**14, 2**15).
class HalfScale {
 public:
  explicit HalfScale(uint32_t head) {
    const uint32_t exponent = head >> 7;
    scale_ = from_bits((268 - (exponent > 15 ? exponent : 15)) << 23);
    if (exponent == 254) largest_ = 0x77FF;  // the next code stands for 2**128
  }

  static uint32_t head_for(uint32_t peak) { return (peak >> 23) << 7; }

  // Rounds to nearest, ties to even, but never to an infinite value; scaled values are below 2**15.
  uint32_t encode(float value) const {
    const uint32_t code = to_half(value * scale_);
    return (code & 0x7FFFu) < largest_ ? code : (code & 0x8000u) | largest_;
  }

  // A damaged payload may hold what is never encoded: infinity, NaN.
  float decode(uint32_t code) const { return from_half(static_cast<uint16_t>(code)) / scale_; }

 private:
  float scale_;
  uint32_t largest_ = 0x7BFF;
};

// Magnitudes in fixed point, 22 bits below the binade of the block's peak: sums of integers are
// the same in any order.
class Fixed {
 public:
  explicit Fixed(uint32_t peak) : exponent_(static_cast<int>(peak >> 23 < 253 ? peak >> 23 : 253)) {
    scale_ = from_bits(static_cast<uint32_t>(254 - exponent_) << 23);
  }

  int64_t of(float value) const {
    return static_cast<int64_t>(std::fabs(value) * scale_ * 4194304.0f);
  }

  // The upper half of the float32 nearest to a magnitude.
  uint32_t head(int64_t fixed) const {
    const float value = std::ldexp(static_cast<float>(fixed), exponent_ - 127 - 22);
    const int64_t rounded = (static_cast<int64_t>(to_bits(value)) + 0x8000) >> 16;
    return static_cast<uint32_t>(rounded < kMaxFinite >> 16 ? rounded : kMaxFinite >> 16);
  }

 private:
  int exponent_;
  float scale_;
};

// Sign in bit 0 of a code and, with two levels, the level in bit 1.
struct Levels {
  uint32_t heads[2];

  float decode(uint32_t code) const { return from_bits(heads[code >> 1] << 16 | code << 31); }
};

}  // namespace sn
