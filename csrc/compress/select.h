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

// Positions of the `kept` largest keys, ascending. flags: scratch of bins + 8 bytes.
void largest(const int32_t* keys, int64_t bins, int64_t kept, std::vector<uint8_t>& flags,
             uint32_t* positions);

// Sum of (scale * part)**2 in 16 partial sums, [count] float32.
double squares(const float* parts, float scale, int64_t count);

}  // namespace sn
