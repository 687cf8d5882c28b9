// CRC-32 of a payload, by words in any order; the counterpart is ops/checksum.py.
//
// Word i contributes word * x**(-32 i) modulo the polynomial, and a payload's sum is the exclusive
// or of its words' contributions. Powers come from a table of four levels, computed on the host.
// Reflected: bit 31 - i of a word is the coefficient of x**i.
#pragma once

#include "block.cuh"

namespace sn {

constexpr u32 kPolynomial = 0xEDB88320u;
constexpr int kLevelBits = 11, kLevels = 4;

// a * b modulo the polynomial.
SN_DEVICE u32 product(u32 a, u32 b) {
  u32 total = 0;
  SN_UNROLL
  for (int i = 31; i >= 0; --i) {
    total ^= b & (0u - (a >> i & 1u));
    b = b >> 1 ^ (kPolynomial & (0u - (b & 1u)));
  }
  return total;
}

// Returns x**(-32 i): level l of `powers` holds those of i * 2**(11 l).
SN_DEVICE u32 step_back(const u32* powers, i64 i) {
  constexpr i64 kMask = (1 << kLevelBits) - 1;
  u32 factor = powers[i & kMask];
  for (int level = 1; level < kLevels && (i >>= kLevelBits); ++level)
    if (i & kMask) factor = product(factor, powers[(level << kLevelBits) + (i & kMask)]);
  return factor;
}

// The contribution of words t, t + stride, ... below `count`; word 0 of these is number `first` of
// the payload. By Horner's rule from the last: a product per word of a thread, and one or two more.
template <typename Word>
SN_DEVICE u32 share(const u32* powers, i64 first, int t, int count, int stride, Word word) {
  u32 own = 0;
  for (int w = t + (count - 1 - t) / stride * stride; t < count && w >= t; w -= stride)
    own = (own ? product(own, powers[stride]) : 0u) ^ word(w);
  return own ? product(own, step_back(powers, first + t)) : 0u;
}

}  // namespace sn
