// Which bins stay: the k of largest magnitude, ties to the lower position. Twin: ops/select.py.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

constexpr uint32_t kMaxFinite = 0x7F7FFFFF;

// parts += decay * memory, [count] float32; returns the bits of the largest |part|, which exceed
// kMaxFinite if one is NaN or Inf. `memory` may be null.
uint32_t accumulate(float* parts, const float* memory, float decay, int64_t count);

// The power of two that keeps squares of a block with this peak inside float32.
float square_scale(uint32_t peak);

// keys[i] orders like the magnitude of bin i: bits of |scale * c|**2 for complex bins (parts = 2,
// lying as pairs), of |c| for real ones.
void magnitude_keys(const float* row, float scale, int64_t parts, int32_t* keys, int64_t bins);

// Sum of |scale * c|**2 over the bins with these keys.
double squares(const int32_t* keys, float scale, int64_t parts, int64_t bins);

// Finds the largest of `bins` keys, row after row.
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
