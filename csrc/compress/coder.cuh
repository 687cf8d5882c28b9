// Values as codes, bits in words, and float types without NVIDIA's headers (NVRTC ships none).
// Counterparts: ops/quantize.py, ops/record.py. The C++ in
// quantize.h uses 64-bit integers; here they have 32 bits, as a GPU has no others in hardware.
#pragma once

#include "crc.cuh"

namespace sn {

constexpr u32 kMaxFinite = 0x7F7FFFFF;
constexpr u32 kNonFinite = 0x7FC0;

enum Dtype { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };
enum ValueKind { kRange = 0, kHalf = 1, kSign = 2, kTwoBit = 3 };
enum PositionKind { kEliasFano = 0, kBitmap = 1, kAll = 2 };  // kAll: every bin is kept

SN_DEVICE u32 magnitude(float value) { return bits_of(value) & 0x7FFFFFFFu; }

SN_DEVICE float from_half(u32 code) {
  const u32 sign = (code & 0x8000u) << 16, exponent = code >> 10 & 31u, fraction = code & 0x3FFu;
  if (exponent == 31) return float_of(sign | 0x7F800000u | fraction << 13);
  const float value = exponent ? float_of((exponent + 112) << 23 | fraction << 13)
                               : static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2**-24
  return float_of(bits_of(value) | sign);
}

// Rounds to nearest, ties to even; values beyond half precision become infinity.
SN_DEVICE u32 to_half(float value) {
  const u32 raw = bits_of(value), sign = raw >> 16 & 0x8000u, size = raw & 0x7FFFFFFFu;
  if (size >= 0x47800000u)  // 2**16 and more, infinity, NaN
    return sign | (size > 0x7F800000u ? 0x7E00u : 0x7C00u);
  if (size < 0x38800000u) {  // below 2**-14: subnormal, a multiple of 2**-24
    const float steps = float_of(size) * 16777216.0f;           // below 2**10, exact
    const float rounded = (steps + 12582912.0f) - 12582912.0f;  // 1.5 * 2**23: to an integer
    return sign | static_cast<u32>(rounded);
  }
  return sign | (((size + 0xFFFu + (size >> 13 & 1u)) >> 13) - (112u << 10));
}

SN_DEVICE float from_bfloat(u32 code) { return float_of(code << 16); }

// Rounds to nearest, ties to even.
SN_DEVICE u32 to_bfloat(float value) {
  const u32 raw = bits_of(value);
  if ((raw & 0x7FFFFFFFu) > 0x7F800000u) return raw >> 16 | 0x40u;
  return (raw + 0x7FFFu + (raw >> 16 & 1u)) >> 16;
}

// The power of two that scales a peak to [1, 2), so that its square does not leave float32.
SN_DEVICE u32 clamped_exponent(u32 peak) { return peak >> 23 < 253u ? peak >> 23 : 253u; }
SN_DEVICE float unit_scale(u32 peak) { return float_of((254u - clamped_exponent(peak)) << 23); }

// Sets `count` <= 32 bits at bit `at`; the words are zero there.
template <typename Index>
SN_DEVICE void put(u32* words, Index at, u32 value, int count) {
  if (count == 0) return;
  const int offset = static_cast<int>(at & 31);
  atomic_or(words + (at >> 5), value << offset);
  if (offset + count > 32) atomic_or(words + (at >> 5) + 1, value >> (32 - offset));
}

// Returns the `count` <= 32 bits at bit `at`; reads no word beyond the last of them.
template <typename Index>
SN_DEVICE u32 get(const u32* words, Index at, int count) {
  if (count == 0) return 0;
  const int offset = static_cast<int>(at & 31);
  u64 pair = words[at >> 5];
  if (offset + count > 32) pair |= static_cast<u64>(words[(at >> 5) + 1]) << 32;
  return static_cast<u32>(pair >> offset & ((u64{1} << count) - 1));
}

// Bits of the Elias-Fano map; `low` is the number of low bits of each position.
SN_DEVICE i64 upper_bits(i64 kept, i64 bins, int low) { return kept + ((bins - 1) >> low) + 1; }

// Settings shared by all records of a launch. Counterpart: ops/launch.py, SETTINGS.
struct Settings {
  i64 kept, bins, words;  // bins and words per record
  int values, code_bits, mantissa, positions, low;
  int top;           // end of all ranges, upper half of a float32; negative: each block's own
  float factor;      // encode: decay of the memory; decode: weight of a rank
  int ranks;
  u64 powers;        // the table of crc.cuh

  SN_DEVICE int head_bits() const { return values == kTwoBit ? 32 : 16; }
};

// The scale of a record's codes, from its heads.
class Coder {
 public:
  // heads: the first 32 bits of the record; the upper 16 are used only for kTwoBit.
  SN_DEVICE Coder(u32 heads, const Settings& s) : values_(s.values), heads_(heads) {
    const u32 top = heads & 0xFFFFu;
    if (values_ == kRange) {
      shift_ = 23 - s.mantissa;
      positive_ = 1u << (s.code_bits - 1);
      const int base = static_cast<int>((top << 16) >> shift_) - static_cast<int>(positive_) + 1;
      base_ = base < 1 ? 1 : base;
      scale_ = 1.0f;
    } else {
      const u32 exponent = top >> 7 & 255u;
      scale_ = values_ == kHalf ? float_of((268u - (exponent > 15u ? exponent : 15u)) << 23) : 1.0f;
      shift_ = 0, positive_ = 0, base_ = 0;
    }
  }

  // The head of a block with this peak, for kRange and kHalf.
  SN_DEVICE static u32 head_for(u32 peak, const Settings& s) {
    if (s.values == kHalf) return (peak >> 23) << 7;
    if (s.top >= 0) return static_cast<u32>(s.top);
    const u32 rung = (peak + (1u << (22 - s.mantissa))) >> (23 - s.mantissa);
    const u32 top = ((rung << (23 - s.mantissa)) + 0xFFFFu) >> 16;
    return top < kMaxFinite >> 16 ? top : kMaxFinite >> 16;
  }

  // For kRange and kHalf; `saturated` is set to 1 if the value is beyond the range.
  SN_DEVICE u32 encode(float value, u32& saturated) const {
    saturated = 0;
    if (values_ == kHalf) {
      const u32 code = to_half(value * scale_), code_size = code & 0x7FFFu;
      // Scaled values are below 2**15. In the topmost binade 0x7800 would represent 2**128.
      const bool over = (heads_ >> 7 & 255u) == 254u && code_size >= 0x7800u;
      return over ? (code & 0x8000u) | 0x77FFu : code;
    }
    const u32 negative = bits_of(value) >> 31, size = magnitude(value);
    u32 rung = (size + (1u << (shift_ - 1))) >> shift_;
    const u32 top = base_ + positive_ - 1;
    if (rung > top) rung = top, saturated = 1;
    const u32 lowest = base_ + negative;  // the negative side has one code fewer
    if (rung < lowest) {
      const u32 low = lowest << shift_;
      const u32 halfway = low >= 2u << 23 ? low - (1u << 23) : low >> 1;
      if (size <= halfway) return 0;
      rung = lowest;
    }
    return rung - base_ + (negative ? positive_ : 1u);
  }

  SN_DEVICE float decode(u32 code) const {
    if (values_ == kHalf) return from_half(code) / scale_;
    if (values_ != kRange)  // sign and level
      return float_of((heads_ >> (16 * (code >> 1)) & 0xFFFFu) << 16 | (code & 1u) << 31);
    if (code == 0) return 0.0f;
    const u32 negative = code > positive_;
    const u32 rung = base_ + code - (negative ? positive_ : 1u);
    return float_of(rung << shift_ | negative << 31);
  }

 private:
  int values_;
  u32 heads_;
  int shift_;
  u32 positive_, base_;
  float scale_;
};

// |value| in units of 2**-22 of the peak's binade, truncated; below 2**23. Means of magnitudes
// are sums of these: the sum of integers is the same in any order.
SN_DEVICE u32 to_fixed(float value, float scale) {
  return static_cast<u32>(float_of(magnitude(value)) * scale * 4194304.0f);
}

// Converts back to the upper half of a float32, to nearest. Exact before that rounding, as every
// result is a multiple of float32's smallest number.
SN_DEVICE u32 from_fixed(u32 fixed, u32 peak) {
  const int power = static_cast<int>(clamped_exponent(peak)) - 149;
  const float unit = power >= -126 ? float_of(static_cast<u32>(power + 127) << 23)
                                   : float_of(1u << (power + 149));
  const u32 rounded = (bits_of(static_cast<float>(fixed) * unit) + 0x8000u) >> 16;
  return rounded < kMaxFinite >> 16 ? rounded : kMaxFinite >> 16;
}

}  // namespace sn
