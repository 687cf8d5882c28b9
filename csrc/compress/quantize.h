// Range-based N-bit floats. Twin: ops/quantize.py (formulas there).
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

}  // namespace sn
