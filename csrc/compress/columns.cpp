#include "columns.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "select.h"

namespace sn {
namespace {

// Rounds to the nearest integer, ties to even: exact below 2**22, which no digit exceeds.
inline float whole(float value) {
  const float magic = 12582912.0f;  // 1.5 * 2**23
  return (value + magic) - magic;
}

template <typename Digit>
SN_CLONES void digits_of(const float* values, int64_t count, float unit, float limit, Digit* digits,
                         float* own) {
  for (int64_t i = 0; i < count; ++i) {
    float value = values[i] / unit;
    // Clips before rounding, with the same result as clipping afterwards.
    value = value > limit ? limit : value;
    value = value < -limit ? -limit : value;
    value = whole(value);
    digits[i] = static_cast<Digit>(static_cast<int32_t>(value));
    // A negative value that rounds to zero is decoded as -0, as by rounding.
    own[i] = std::copysign(value, values[i]) * unit;
  }
}

}  // namespace

bool all_finite(const float* values, int64_t count) { return peak_of(values, count) <= kMaxFinite; }

template <typename Digit>
void to_digits(const float* values, const int64_t* sides, const int32_t* exponents,
               int64_t columns, const Scales& scales, float limit, int32_t count, int32_t* heads,
               Digit* digits, float* own) {
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t side = sides[column];
    const uint32_t bits = peak_of(values, side);
    const float peak = from_bits(bits);
    const float* end = scales.covered + scales.places;
    const auto at = static_cast<int32_t>(std::lower_bound(scales.covered, end, peak) -
                                         scales.covered);
    heads[column] = bits ? std::min(at, scales.places - 1) + scales.lowest + count : 0;
    digits_of(values, side, scales.units[exponents[column] - scales.lowest], limit, digits, own);
    values += side;
    digits += side;
    own += side;
  }
}

template void to_digits(const float*, const int64_t*, const int32_t*, int64_t, const Scales&,
                        float, int32_t, int32_t*, int8_t*, float*);
template void to_digits(const float*, const int64_t*, const int32_t*, int64_t, const Scales&,
                        float, int32_t, int32_t*, int16_t*, float*);

SN_CLONES void join_digits(const int8_t* digits, int64_t words, int32_t* out) {
  for (int64_t i = 0; i < words; ++i) {
    int32_t word = digits[i + 3 * words];
    word = word * 256 + digits[i + 2 * words];
    word = word * 256 + digits[i + words];
    out[i] = word * 256 + digits[i];
  }
}

SN_CLONES void join_digits(const int16_t* digits, int64_t words, int32_t* out) {
  for (int64_t i = 0; i < words; ++i) out[i] = digits[i + words] * 65536 + digits[i];
}

SN_CLONES void split_digits(const int32_t* words, int64_t size, int bits, int64_t count,
                            int32_t* sums) {
  const int places = 32 / bits;
  const uint32_t half = 1u << (bits - 1), mask = (half << 1) - 1;
  uint32_t halves = 0;
  for (int place = 0; place + 1 < places; ++place) halves += half << (bits * place);
  for (int place = 0; place < places; ++place) {
    const int64_t first = place * size, here = std::min(size, count - first);
    const int shift = bits * place;
    const bool last = place + 1 == places;
    for (int64_t i = 0; i < here; ++i) {
      const uint32_t rest = static_cast<uint32_t>(words[i]) + halves;
      sums[first + i] = last ? static_cast<int32_t>(rest) >> shift
                             : static_cast<int32_t>((rest >> shift) & mask) -
                                   static_cast<int32_t>(half);
    }
  }
}

void spread_units(const int64_t* sides, const int32_t* exponents, int64_t columns,
                  const Scales& scales, float* each) {
  for (int64_t column = 0; column < columns; ++column) {
    std::fill_n(each, sides[column], scales.units[exponents[column] - scales.lowest]);
    each += sides[column];
  }
}

}  // namespace sn
