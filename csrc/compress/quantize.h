// Range-based N-bit floats. Twin: ops/quantize.py (formulas there).
#pragma once

#include <cstdint>

#include "bits.h"
#include "select.h"

namespace sn {

// The 2**bits - 1 rungs of float32 with `mantissa` bits that end at `top` (upper half of a
// float32), and zero. Without branches, so that loops over values become vector code; bits of
// finite magnitudes, half a step added, stay below 2**31.
class Window {
 public:
  Window(int bits, int mantissa, uint32_t top)
      : shift_(23 - mantissa), positive_(1 << (bits - 1)) {
    base_ = (static_cast<int32_t>(top << 16) >> shift_) - positive_ + 1;
    if (base_ < 1) base_ = 1;
    for (int negative = 0; negative < 2; ++negative) {
      // Zero are those that round to a rung below the lowest and are nearer to zero than to that.
      const int64_t low = static_cast<int64_t>(base_ + negative) << shift_;
      const int64_t halfway = low >= (int64_t{2} << 23) ? low - (int64_t{1} << 23) : low >> 1;
      const int64_t below = low - (int64_t{1} << (shift_ - 1)) - 1;
      zeros_to_[negative] = static_cast<int32_t>(halfway < below ? halfway : below);
    }
  }

  // The end of the range that holds a block with this peak.
  static uint32_t top_for(uint32_t peak, int mantissa) {
    const int64_t rung = (static_cast<int64_t>(peak) + (1 << (22 - mantissa))) >> (23 - mantissa);
    const int64_t top = ((rung << (23 - mantissa)) + 0xFFFF) >> 16;
    return static_cast<uint32_t>(top < kMaxFinite >> 16 ? top : kMaxFinite >> 16);
  }

  // Of a finite value.
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

}  // namespace sn
