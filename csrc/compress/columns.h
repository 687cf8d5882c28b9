// Columns of numbers as digits in words, bit-identical to ops/fixed_point.py; see there.
#pragma once

#include <cstdint>

namespace sn {

// Tables shared by the columns of a bucket. An exponent e has index e - lowest in the tables.
struct Scales {
  const float* covered;  // [places] ascending: the largest magnitude that an exponent covers
  const float* units;    // [places]: the unit of a digit
  int32_t places, lowest;
  int bits;  // of a digit: 8 or 16
};

// Whether all numbers are finite.
bool all_finite(const float* values, int64_t count);

// Quantizes `columns` columns of sides[i] numbers each to digits up to `limit`, in scratch padded
// with zeros, [number of words * 4 or 2]; own = the values they decode to. heads[i]: the exponent
// that covers the column, plus a count of one in the high bits; 0 for a column of zeros.
template <typename Digit>
void to_digits(const float* values, const int64_t* sides, const int32_t* exponents,
               int64_t columns, const Scales& scales, float limit, int32_t count, int32_t* heads,
               Digit* digits, float* own);

// words[i] = the sum of digit i + place * words, times 2**(bits * place).
void join_digits(const int8_t* digits, int64_t words, int32_t* out);
void join_digits(const int16_t* digits, int64_t words, int32_t* out);

// Unpacks the first `count` sums of digits from the sum of the words.
void split_digits(const int32_t* words, int64_t size, int bits, int64_t count, int32_t* sums);

// each[k] = the unit of the column that contains k.
void spread_units(const int64_t* sides, const int32_t* exponents, int64_t columns,
                  const Scales& scales, float* each);

}  // namespace sn
