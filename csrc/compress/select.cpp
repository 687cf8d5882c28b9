#include "select.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace sn {
namespace {

uint32_t magnitude_bits(float value) { return to_bits(value) & 0x7FFFFFFFu; }

SN_CLONES uint32_t add_and_peak(float* parts, const float* memory, float decay, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count; ++i) {
    parts[i] += memory[i] * decay;
    peak = std::max(peak, magnitude_bits(parts[i]));
  }
  return peak;
}

// Loops of float additions: enough partial sums to hide the latency of an addition.
constexpr int64_t kLanes = 64;

SN_CLONES double sum_of(const int32_t* keys, float scale, bool square, int64_t count) {
  float lanes[kLanes] = {};
  double total = 0;
  int64_t i = 0;
  while (i + kLanes <= count) {
    // Single precision within runs of at most 4096, then double: errors stay below 1e-6.
    const int64_t stop = std::min(count, i + 4096);
    for (; i + kLanes <= stop; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float key = from_bits(static_cast<uint32_t>(keys[i + lane]));
        const float scaled = key * scale;
        lanes[lane] += square ? scaled * scaled : key;
      }
    for (float& lane : lanes) total += lane, lane = 0;
  }
  for (; i < count; ++i) {
    const float key = from_bits(static_cast<uint32_t>(keys[i]));
    total += square ? static_cast<double>(key * scale) * (key * scale) : key;
  }
  return total;
}

inline int64_t count_at_least(const int32_t* keys, int64_t count, int32_t threshold) {
  constexpr int64_t kRun = 1 << 20;  // the count of a run fits a vector lane's 32 bits
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += kRun) {
    const int64_t stop = std::min(count, start + kRun);
    int32_t run = 0;
    for (int64_t i = start; i < stop; ++i) run += keys[i] >= threshold;
    found += run;
  }
  return found;
}

struct Reached {
  int32_t threshold;
  int64_t count;  // keys at or above it
};

// Finds the kept-th largest key, bit by bit from the top: counting can be vectorized, unlike
// sorting. Stops early with a lower threshold if at most `enough` keys reach it.
SN_CLONES Reached reach(const int32_t* keys, int64_t count, int64_t kept, int64_t enough) {
  Reached reached{0, count_at_least(keys, count, 0)};
  for (int bit = 30; bit >= 0 && reached.count > enough; --bit) {
    const int32_t candidate = reached.threshold | (1 << bit);
    const int64_t found = count_at_least(keys, count, candidate);
    if (found >= kept) reached = {candidate, found};
  }
  return reached;
}

SN_CLONES int64_t count_reaching(const int32_t* keys, int64_t count, int32_t threshold) {
  return count_at_least(keys, count, threshold);
}

// maxima[j] = the largest of keys j, j + groups, j + 2 * groups, ...
SN_CLONES void group_maxima(const int32_t* keys, int64_t count, int32_t* maxima, int64_t groups) {
  std::memcpy(maxima, keys, groups * 4);
  for (int64_t start = groups; start < count; start += groups) {
    const int64_t size = std::min(groups, count - start);
    for (int64_t i = 0; i < size; ++i) maxima[i] = std::max(maxima[i], keys[start + i]);
  }
}

// A bit for each of 64 keys, set if it reaches the threshold.
inline uint64_t map_of(const int32_t* keys, int32_t threshold) {
  uint8_t flags[64];
  for (int i = 0; i < 64; ++i) flags[i] = keys[i] >= threshold;
  uint64_t map = 0;
  for (int i = 0; i < 64; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    map |= eight * 0x0102040810204080u >> 56 << i;  // eight bytes of 0 or 1 to eight bits
  }
  return map;
}

// Lists the keys at or above a threshold, and their positions.
SN_CLONES void list_reaching(const int32_t* keys, int64_t count, int32_t threshold,
                             int32_t* found, uint32_t* where) {
  for (int64_t start = 0; start < count; start += 64) {
    uint64_t map = 0;
    if (start + 64 <= count)
      map = map_of(keys + start, threshold);
    else
      for (int64_t i = start; i < count; ++i)
        map |= static_cast<uint64_t>(keys[i] >= threshold) << (i - start);
    for (; map; map &= map - 1) {
      const int64_t at = start + __builtin_ctzll(map);
      *found++ = keys[at];
      *where++ = static_cast<uint32_t>(at);
    }
  }
}

}  // namespace

SN_CLONES uint32_t peak_of(const float* parts, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count; ++i) peak = std::max(peak, magnitude_bits(parts[i]));
  return peak;
}

uint32_t accumulate(float* parts, const float* memory, float decay, int64_t count) {
  return memory ? add_and_peak(parts, memory, decay, count) : peak_of(parts, count);
}

float square_scale(uint32_t peak) {
  return from_bits((254 - std::min(peak >> 23, 253u)) << 23);
}

template <bool complex>
SN_CLONES void keys_of(const float* row, float scale, int32_t* keys, int64_t bins) {
  for (int64_t i = 0; i < bins; ++i)
    keys[i] = complex ? complex_key(row + 2 * i, scale) : real_key(row[i]);
}

void magnitude_keys(const float* row, float scale, int64_t parts, int32_t* keys, int64_t bins) {
  parts == 2 ? keys_of<true>(row, scale, keys, bins) : keys_of<false>(row, scale, keys, bins);
}

double squares(const int32_t* keys, float scale, int64_t parts, int64_t bins) {
  return sum_of(keys, scale, parts == 1, bins);
}

// Rounds up, so that loops over few keys have no remainder.
int64_t whole_vectors(int64_t count) { return (count + 63) / 64 * 64; }

// k disjoint groups reach the k-th largest of the groups' maxima, so that is a lower bound for k
// keys, and a close one: with 2 k groups, 1.4 k keys reach it.
int32_t Largest::lower_bound(const int32_t* keys) {
  const int64_t groups = whole_vectors(2 * kept_);
  if (2 * groups > bins_) return reach(keys, bins_, kept_, kept_).threshold;
  maxima_.resize(groups);
  group_maxima(keys, bins_, maxima_.data(), groups);
  return reach(maxima_.data(), groups, kept_, kept_ + kept_ / 8).threshold;
}

void Largest::of(const int32_t* keys, uint32_t* positions) {
  const int32_t bound = lower_bound(keys);
  const int64_t count = count_reaching(keys, bins_, bound);
  found_.assign(whole_vectors(count), -1);  // no key; below every threshold
  where_.resize(count);
  list_reaching(keys, bins_, bound, found_.data(), where_.data());
  auto [threshold, at_least] =
      reach(found_.data(), static_cast<int64_t>(found_.size()), kept_, kept_);
  // More than k reach the threshold only if some are equal to it: drop the last of those.
  for (int64_t i = count - 1; at_least > kept_; --i)
    if (found_[i] == threshold) found_[i] = -1, --at_least;
  for (int64_t i = 0, next = 0; next < kept_; ++i) {
    positions[next] = where_[i];
    next += found_[i] >= threshold;
  }
}

}  // namespace sn
