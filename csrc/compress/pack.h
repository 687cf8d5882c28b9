// Bit fields in 32-bit words, and Elias-Fano positions. Twin: ops/pack.py.
#pragma once

#include <cstdint>

namespace sn {

// Sets `count` <= 32 bits at bit `at`; the words are zero there.
inline void put(uint32_t* words, int64_t at, uint32_t value, int count) {
  if (count == 0) return;
  const int offset = at & 31;
  words[at >> 5] |= value << offset;
  if (offset + count > 32) words[(at >> 5) + 1] |= value >> (32 - offset);
}

// The `count` <= 32 bits at bit `at`; reads no word beyond the last of them.
inline uint32_t get(const uint32_t* words, int64_t at, int count) {
  if (count == 0) return 0;
  const int offset = at & 31;
  uint64_t pair = words[at >> 5];
  if (offset + count > 32) pair |= static_cast<uint64_t>(words[(at >> 5) + 1]) << 32;
  return static_cast<uint32_t>(pair >> offset & ((uint64_t{1} << count) - 1));
}

inline int low_bits(int64_t kept, int64_t bins) {
  int low = 0;
  while (kept && (bins / kept) >> (low + 1)) ++low;
  return low;
}

inline int64_t upper_bits(int64_t kept, int64_t bins) {
  return kept + ((bins - 1) >> low_bits(kept, bins)) + 1;
}

inline void put_elias_fano(uint32_t* words, int64_t at, const uint32_t* positions, int64_t kept,
                           int64_t bins) {
  const int low = low_bits(kept, bins);
  const int64_t upper = at + kept * low;
  const uint32_t mask = (uint32_t{1} << low) - 1;
  for (int64_t i = 0; i < kept; ++i) {
    put(words, at + i * low, positions[i] & mask, low);
    put(words, upper + (positions[i] >> low) + i, 1, 1);
  }
}

inline void put_bitmap(uint32_t* words, int64_t at, const uint32_t* positions, int64_t kept) {
  for (int64_t i = 0; i < kept; ++i) put(words, at + positions[i], 1, 1);
}

// Calls visit(i, position) for the i-th one of the `length` bits at `at`; false unless there are
// `kept` of them.
template <typename Visit>
bool each_one(const uint32_t* words, int64_t at, int64_t length, int64_t kept, Visit visit) {
  int64_t seen = 0;
  for (int64_t start = 0; start < length; start += 32) {
    const int count = static_cast<int>(length - start < 32 ? length - start : 32);
    for (uint32_t run = get(words, at + start, count); run; run &= run - 1) {
      if (seen == kept || !visit(seen, start + __builtin_ctz(run))) return false;
      ++seen;
    }
  }
  return seen == kept;
}

// Calls visit(i, position) for each position in order; false unless there are `kept`, ascending
// strictly below `bins`.
template <typename Visit>
bool each_position(const uint32_t* words, int64_t at, int64_t kept, int64_t bins, bool bitmap,
                   Visit visit) {
  if (bitmap)
    return each_one(words, at, bins, kept, [&](int64_t i, int64_t one) {
      visit(i, one);
      return true;
    });
  const int low = low_bits(kept, bins);
  int64_t last = -1;
  return each_one(words, at + kept * low, upper_bits(kept, bins), kept,
                  [&](int64_t i, int64_t one) {
                    const int64_t position = (one - i) << low | get(words, at + i * low, low);
                    if (position <= last || position >= bins) return false;
                    visit(i, last = position);
                    return true;
                  });
}

}  // namespace sn
