// Coders of values: range-based N-bit floats, halves, levels. Formulas: ops/quantize.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "bits.h"
#include "half.h"
#include "select.h"

namespace sn {

// The 2**bits - 1 rungs of float32 with `mantissa` bits that end at `top` (upper half of a
// float32), and zero. Without branches, so that loops over values are vectorized; bits of finite
// magnitudes plus half a step stay below 2**31.
class Window {
 public:
  Window(int bits, int mantissa, uint32_t top)
      : shift_(23 - mantissa), positive_(1 << (bits - 1)) {
    base_ = (static_cast<int32_t>(top << 16) >> shift_) - positive_ + 1;
    if (base_ < 1) base_ = 1;
    for (int negative = 0; negative < 2; ++negative) {
      // Zero if rounded to a rung below the lowest, and nearer to zero than to the lowest.
      const int64_t low = static_cast<int64_t>(base_ + negative) << shift_;
      const int64_t halfway = low >= (int64_t{2} << 23) ? low - (int64_t{1} << 23) : low >> 1;
      const int64_t below = low - (int64_t{1} << (shift_ - 1)) - 1;
      zeros_to_[negative] = static_cast<int32_t>(halfway < below ? halfway : below);
    }
  }

  // The end of the range for a block with this peak.
  static uint32_t top_for(uint32_t peak, int mantissa) {
    const int64_t rung = (static_cast<int64_t>(peak) + (1 << (22 - mantissa))) >> (23 - mantissa);
    const int64_t top = ((rung << (23 - mantissa)) + 0xFFFF) >> 16;
    return static_cast<uint32_t>(top < kMaxFinite >> 16 ? top : kMaxFinite >> 16);
  }

  // The code of a finite value.
  uint32_t encode(float value, int32_t& saturated) const {
    const uint32_t raw = to_bits(value);
    const int32_t magnitude = raw & 0x7FFFFFFFu, sign = -static_cast<int32_t>(raw >> 31);
    const int32_t top = base_ + positive_ - 1, lowest = base_ - sign;
    const int32_t zeros_to = zeros_to_[0] + (sign & (zeros_to_[1] - zeros_to_[0]));
    int32_t rung = (magnitude + (1 << (shift_ - 1))) >> shift_;
    saturated += rung > top;
    rung = rung > top ? top : rung;
    rung = rung < lowest ? lowest : rung;
    const int32_t code = rung - base_ + 1 + (sign & (positive_ - 1));
    return static_cast<uint32_t>(magnitude <= zeros_to ? 0 : code);
  }

  float decode(uint32_t code) const {
    const bool negative = static_cast<int32_t>(code) > positive_;
    const uint32_t rung = static_cast<uint32_t>(base_) + code - (negative ? positive_ : 1);
    const uint32_t bits = rung << shift_ | (negative ? 0x80000000u : 0);
    return from_bits(code == 0 ? 0 : bits);
  }

 private:
  int shift_;
  int32_t positive_, base_, zeros_to_[2];
};

// IEEE half precision of values scaled by the power of two that brings the block's peak to
// [2**14, 2**15).
class HalfScale {
 public:
  explicit HalfScale(uint32_t head) {
    const uint32_t exponent = head >> 7;
    scale_ = from_bits((268 - (exponent > 15 ? exponent : 15)) << 23);
    if (exponent == 254) largest_ = 0x77FF;  // the next code represents 2**128
  }

  static uint32_t head_for(uint32_t peak) { return (peak >> 23) << 7; }

  // Rounds to nearest, ties to even, but never to infinity; scaled values are below 2**15.
  uint32_t encode(float value) const {
    const uint32_t code = to_half(value * scale_);
    return (code & 0x7FFFu) < largest_ ? code : (code & 0x8000u) | largest_;
  }

  // A corrupt payload may contain codes that are never encoded: infinity, NaN.
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

// The sign is bit 0 of a code, and the level, if there are two, bit 1.
struct Levels {
  uint32_t heads[2];

  float decode(uint32_t code) const { return from_bits(heads[code >> 1] << 16 | code << 31); }
};

}  // namespace sn
