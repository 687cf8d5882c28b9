// Range-based N-bit floats and scaled half precision. Twin: ops/quantize.py (formulas there).
#pragma once

#include <cstdint>
#include <cstring>

#include "select.h"

namespace sn {

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The 2**bits - 1 rungs of float32 with `mantissa` bits that end at `top` (upper half of a
// float32), and zero.
class Window {
 public:
  Window(int bits, int mantissa, uint32_t top)
      : shift_(23 - mantissa), positive_(int64_t{1} << (bits - 1)) {
    base_ = (static_cast<int64_t>(top) << 16 >> shift_) - positive_ + 1;
    if (base_ < 1) base_ = 1;
    for (int negative = 0; negative < 2; ++negative) {
      const int64_t low = (base_ + negative) << shift_;
      halfway_[negative] = low >= (int64_t{2} << 23) ? low - (int64_t{1} << 23) : low >> 1;
    }
  }

  // The end of the range that holds a block with this peak.
  static uint32_t top_for(uint32_t peak, int mantissa) {
    const int64_t rung = (static_cast<int64_t>(peak) + (1 << (22 - mantissa))) >> (23 - mantissa);
    const int64_t top = ((rung << (23 - mantissa)) + 0xFFFF) >> 16;
    return static_cast<uint32_t>(top < kMaxFinite >> 16 ? top : kMaxFinite >> 16);
  }

  uint32_t encode(float value, int64_t& saturated) const {
    const uint32_t raw = to_bits(value);
    const int64_t negative = raw >> 31, magnitude = raw & 0x7FFFFFFFu;
    int64_t rung = (magnitude + (int64_t{1} << (shift_ - 1))) >> shift_;
    const int64_t top = base_ + positive_ - 1;
    if (rung > top) rung = top, ++saturated;
    const int64_t lowest = base_ + negative;
    if (rung < lowest) {
      if (magnitude <= halfway_[negative]) return 0;
      rung = lowest;
    }
    return static_cast<uint32_t>(rung - base_ + (negative ? positive_ : 1));
  }

  float decode(uint32_t code) const {
    if (code == 0) return 0.0f;
    const bool negative = code > positive_;
    const int64_t rung = base_ + code - (negative ? positive_ : 1);
    return from_bits(static_cast<uint32_t>(rung << shift_) | (negative ? 0x80000000u : 0));
  }

 private:
  int shift_;
  int64_t positive_, base_, halfway_[2];
};

// IEEE half precision of values scaled by a power of two that takes the block's peak to
// [2**14, 2**15).
class HalfScale {
 public:
  explicit HalfScale(uint32_t top) {
    const uint32_t exponent = top >> 7;
    scale_ = from_bits((268 - (exponent > 15 ? exponent : 15)) << 23);
  }

  static uint32_t top_for(uint32_t peak) { return (peak >> 23) << 7; }

  // Rounds to nearest, ties to even; scaled values are below 2**15, so nothing overflows.
  uint32_t encode(float value) const {
    const uint32_t raw = to_bits(value * scale_);
    const uint32_t sign = raw >> 16 & 0x8000u, magnitude = raw & 0x7FFFFFFFu;
    if (magnitude < 0x38800000u) {  // below 2**-14: a subnormal half, a multiple of 2**-24
      const float steps = from_bits(magnitude) * 16777216.0f;      // below 2**10, exact
      const float rounded = (steps + 12582912.0f) - 12582912.0f;  // 1.5 * 2**23: to integer
      return sign | static_cast<uint32_t>(rounded);
    }
    const uint32_t even = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return sign | ((even >> 13) - (112u << 10));
  }

  float decode(uint32_t code) const {
    const uint32_t sign = (code & 0x8000u) << 16, exponent = code >> 10 & 31u;
    const uint32_t fraction = code & 0x3FFu;
    if (exponent == 31)  // never encoded; a damaged payload may hold it
      return from_bits(sign | 0x7F800000u | fraction << 13) / scale_;
    const float magnitude = exponent ? from_bits((exponent + 112) << 23 | fraction << 13)
                                     : static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return from_bits(to_bits(magnitude) | sign) / scale_;
  }

 private:
  float scale_;
};

}  // namespace sn
