// One record per block; see ops/record.py for the format, and the NumPy counterpart.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

constexpr uint32_t kNonFinite = 0x7FC0;

// Large blocks, whose transform might overflow float32, are divided by 2**kShift before encoding.
// Counterpart, with the reasons for these numbers: ops/quantize.py.
constexpr uint32_t kLarge = 0x8000;  // in the head
constexpr int kShift = 40;
constexpr uint32_t kOctave = 1 << 7;  // in a head
constexpr float kLimit = 0x1p90f, kMemory = 0x1p126f;

enum class Values { range, half, sign, two_bit };  // the order of ops/quantize.py

struct Layout {
  int64_t block, parts, kept, words;
  Values values;
  int code_bits, mantissa;
  bool bitmap;

  int64_t bins() const { return parts == 2 ? block / 2 + 1 : block; }
  int64_t floats() const { return bins() * parts; }  // coefficients of a row
  int head_bits() const { return values == Values::two_bit ? 32 : 16; }
  int64_t positions_at() const { return head_bits() + parts * kept * code_bits; }
};

struct Tally {
  int64_t saturated = 0;
  double energy = 0, error = 0;
};

// coefficients, memory: [rows, floats] float32, memory may be null; words: [rows, words].
// top: end of the range (upper half of a float32), or negative for each block's own.
Tally encode_records(float* coefficients, float* memory, uint32_t* words, int64_t rows,
                     const Layout& layout, float decay, int64_t top);

// Adds weight * values to accum, [rows, floats]; returns the first corrupt row or -1.
int64_t decode_records(const uint32_t* words, float* accum, int64_t rows, const Layout& layout,
                       float weight);

// encode_records of the spectra of `values`, [rows, block]; for parts = 2 and a span Fourier takes.
Tally encode_blocks(const float* values, float* memory, uint32_t* words, int64_t rows,
                    const Layout& layout, float decay, int64_t top, int64_t span,
                    const float* roots);

// Sets `values`, [rows, block], to the inverse transform of the weighted sum of the payloads'
// records; returns the first corrupt row or -1.
int64_t decode_blocks(const std::vector<const uint32_t*>& payloads, float* values, int64_t rows,
                      const Layout& layout, float weight, int64_t span, const float* roots);

}  // namespace sn
