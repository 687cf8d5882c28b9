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
      const int64_t low = static_cast<int64_t>(base_ + negative) << shift_;
      halfway_[negative] =
          static_cast<int32_t>(low >= (int64_t{2} << 23) ? low - (int64_t{1} << 23) : low >> 1);
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
    const int32_t negative = raw >> 31, magnitude = raw & 0x7FFFFFFFu;
    const int32_t top = base_ + positive_ - 1, lowest = base_ + negative;
    int32_t rung = (magnitude + (1 << (shift_ - 1))) >> shift_;
    saturated += rung > top;
    const bool zero = (rung < lowest) & (magnitude <= (negative ? halfway_[1] : halfway_[0]));
    rung = rung > top ? top : rung;
    rung = rung < lowest ? lowest : rung;
    const int32_t code = rung - base_ + (negative ? positive_ : 1);
    return static_cast<uint32_t>(zero ? 0 : code);
  }

  float decode(uint32_t code) const {
    const bool negative = static_cast<int32_t>(code) > positive_;
    const uint32_t rung = static_cast<uint32_t>(base_) + code - (negative ? positive_ : 1);
    const uint32_t bits = rung << shift_ | (negative ? 0x80000000u : 0);
    return from_bits(code == 0 ? 0 : bits);
  }

 private:
  int shift_;
  int32_t positive_, base_, halfway_[2];
};

}  // namespace sn
