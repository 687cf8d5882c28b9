// Columns of numbers as digits in words: see ops/fixed_point.py, whose bits these are.
#pragma once

#include <cstdint>

namespace sn {

// What the columns of a bucket share. An exponent e is the place e - lowest in the tables.
struct Scales {
  const float* covered;  // [places] ascending: the largest magnitude that an exponent covers
  const float* units;    // [places]: what a digit stands for
  int32_t places, lowest;
  int bits;  // of a digit: 8 or 16
};

// Whether all numbers are finite.
bool all_finite(const float* values, int64_t count);

// Digits up to `limit` of `columns` columns of sides[i] numbers each, in one scratch of zeros
// behind them, [places of the words * 4 or 2]; own = what they will be read as. heads[i]: the
// exponent that covers the column, above it a count of one; 0 for a column of zeros.
template <typename Digit>
void to_digits(const float* values, const int64_t* sides, const int32_t* exponents,
               int64_t columns, const Scales& scales, float limit, int32_t count, int32_t* heads,
               Digit* digits, float* own);

// words[i] = the sum of digit i + place * words, times 2**(bits * place).
void join_digits(const int8_t* digits, int64_t words, int32_t* out);
void join_digits(const int16_t* digits, int64_t words, int32_t* out);

// The first `count` sums of digits, from the sum of the words.
void split_digits(const int32_t* words, int64_t size, int bits, int64_t count, int32_t* sums);

// each[k] = the unit of the column that k is in.
void spread_units(const int64_t* sides, const int32_t* exponents, int64_t columns,
                  const Scales& scales, float* each);

}  // namespace sn
