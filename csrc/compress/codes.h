// The values of one record, contiguous: to codes and back, and codes to bits.
#pragma once

#include <cstdint>

#include "quantize.h"

namespace sn {

// Encodes `values`, [count] finite float32, which become the codes' error.
void to_codes(const Window& window, float* values, uint32_t* codes, int64_t count,
              int64_t& saturated);
void to_codes(const HalfScale& half, float* values, uint32_t* codes, int64_t count);

// values[i] = weight * the value of codes[i].
void from_codes(const Window& window, const uint32_t* codes, float weight, float* values,
                int64_t count);
template <typename Coder>  // HalfScale, Levels
void from_codes(const Coder& coder, const uint32_t* codes, float weight, float* values,
                int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = coder.decode(codes[i]) * weight;
}

// Writes or reads `count` fields of `bits` <= 16 at bit `at`; written words are zero from there on.
void put_codes(uint32_t* words, int64_t at, const uint32_t* codes, int64_t count, int bits);
void get_codes(const uint32_t* words, int64_t at, uint32_t* codes, int64_t count, int bits);

}  // namespace sn
