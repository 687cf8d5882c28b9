#include "select.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace sn {
namespace {

uint32_t magnitude_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x7FFFFFFFu;
}

SN_CLONES uint32_t peak_of(const float* parts, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count; ++i) peak = std::max(peak, magnitude_bits(parts[i]));
  return peak;
}

SN_CLONES uint32_t add_and_peak(float* parts, const float* memory, float decay, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count; ++i) {
    parts[i] += memory[i] * decay;
    peak = std::max(peak, magnitude_bits(parts[i]));
  }
  return peak;
}

SN_CLONES int32_t count_run(const int32_t* keys, int64_t count, int32_t threshold) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += keys[i] >= threshold;
  return found;
}

int64_t count_at_least(const int32_t* keys, int64_t count, int32_t threshold) {
  constexpr int64_t kRun = 1 << 20;  // a run's count fits the vector lanes' 32 bits
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kRun)
    found += count_run(keys + i, std::min(kRun, count - i), threshold);
  return found;
}

SN_CLONES void mark(const int32_t* keys, int64_t count, int32_t threshold, uint8_t* flags) {
  for (int64_t i = 0; i < count; ++i) flags[i] = keys[i] >= threshold;
}

}  // namespace

uint32_t accumulate(float* parts, const float* memory, float decay, int64_t count) {
  return memory ? add_and_peak(parts, memory, decay, count) : peak_of(parts, count);
}

float square_scale(uint32_t peak) {
  const uint32_t bits = (254 - std::min(peak >> 23, 253u)) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

SN_CLONES void complex_keys(const float* row, float scale, int32_t* keys, int64_t bins) {
  for (int64_t i = 0; i < bins; ++i) {
    const float re = row[2 * i] * scale, im = row[2 * i + 1] * scale;
    const float square = re * re + im * im;
    std::memcpy(&keys[i], &square, 4);
  }
}

SN_CLONES void real_keys(const float* row, int32_t* keys, int64_t bins) {
  for (int64_t i = 0; i < bins; ++i) keys[i] = static_cast<int32_t>(magnitude_bits(row[i]));
}

void magnitude_keys(const float* row, float scale, int64_t parts, int32_t* keys, int64_t bins) {
  if (parts == 2)
    complex_keys(row, scale, keys, bins);
  else
    real_keys(row, keys, bins);
}

void largest(const int32_t* keys, int64_t bins, int64_t kept, std::vector<uint8_t>& flags,
             uint32_t* positions) {
  // The k-th largest key, bit by bit from the top: counting is vector work, sorting is not.
  int32_t threshold = 0;
  int64_t at_least = bins;
  for (int bit = 30; bit >= 0 && at_least != kept; --bit) {
    const int32_t candidate = threshold | (1 << bit);
    const int64_t found = count_at_least(keys, bins, candidate);
    if (found >= kept) threshold = candidate, at_least = found;
  }
  flags.resize(bins + 8);
  mark(keys, bins, threshold, flags.data());
  std::memset(flags.data() + bins, 0, 8);
  // More than k reach the threshold only if some are equal to it: the last of those go.
  for (int64_t i = bins - 1; at_least > kept; --i)
    if (flags[i] && keys[i] == threshold) flags[i] = 0, --at_least;
  int64_t count = 0;
  for (int64_t i = 0; i < bins; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags.data() + i, 8);
    for (; eight; eight &= eight - 1)
      positions[count++] = static_cast<uint32_t>(i + (__builtin_ctzll(eight) >> 3));
  }
}

SN_CLONES double squares(const float* parts, float scale, int64_t count) {
  float lanes[16] = {};
  double total = 0;
  int64_t i = 0;
  while (i + 16 <= count) {
    // Single precision for a run of at most 4096, then double: errors stay below 1e-6.
    const int64_t stop = std::min(count, i + 4096);
    for (; i + 16 <= stop; i += 16)
      for (int lane = 0; lane < 16; ++lane) {
        const float part = parts[i + lane] * scale;
        lanes[lane] += part * part;
      }
    for (float& lane : lanes) total += lane, lane = 0;
  }
  for (; i < count; ++i) total += static_cast<double>(parts[i] * scale) * (parts[i] * scale);
  return total;
}

}  // namespace sn
