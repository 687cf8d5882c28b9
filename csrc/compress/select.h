// Selection of the bins to keep: the k of largest magnitude, ties to the lower position.
// Counterpart: ops/quantize.py.
#pragma once

#include <cstdint>
#include <vector>

#include "bits.h"

namespace sn {

constexpr uint32_t kMaxFinite = 0x7F7FFFFF;

// The bits of the largest magnitude, or of NaN, if there is one.
uint32_t peak_of(const float* parts, int64_t count);

// parts += decay * memory, [count] float32; returns the bits of the largest |part|, which exceed
// kMaxFinite if one is NaN or Inf. `memory` may be null.
uint32_t accumulate(float* parts, const float* memory, float decay, int64_t count);

// The power of two with which squares of a block with this peak do not leave float32.
float square_scale(uint32_t peak);

// A key orders like the magnitude of its bin: bits of |scale * c|**2 for complex bins (parts = 2,
// stored as pairs), of |c| for real ones.
inline int32_t complex_key(const float* bin, float scale) {
  const float re = bin[0] * scale, im = bin[1] * scale;
  return static_cast<int32_t>(to_bits(re * re + im * im));
}
inline int32_t real_key(float bin) { return static_cast<int32_t>(to_bits(bin) & 0x7FFFFFFFu); }
void magnitude_keys(const float* row, float scale, int64_t parts, int32_t* keys, int64_t bins);

// Sum of |scale * c|**2 over the bins with these keys.
double squares(const int32_t* keys, float scale, int64_t parts, int64_t bins);

// Finds the largest of `bins` keys, row by row.
class Largest {
 public:
  Largest(int64_t bins, int64_t kept) : bins_(bins), kept_(kept) {}
  // Positions of the `kept` largest, ascending.
  void of(const int32_t* keys, uint32_t* positions);

 private:
  int32_t lower_bound(const int32_t* keys);

  int64_t bins_, kept_;
  std::vector<int32_t> maxima_, found_;
  std::vector<uint32_t> where_;
};

}  // namespace sn
