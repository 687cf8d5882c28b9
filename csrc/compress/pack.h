// Bit fields in 32-bit words, and Elias-Fano positions. Counterpart: ops/record.py.
#pragma once

#include <cstdint>

namespace sn {

constexpr uint32_t mask_of(int count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

// Writes consecutive fields of at most 32 bits; the words must be zero from bit `at` on.
class Writer {
 public:
  Writer(uint32_t* words, int64_t at) : word_(words + (at >> 5)), filled_(at & 31) {
    if (filled_) pending_ = *word_;
  }
  void put(uint32_t value, int count) {
    pending_ |= static_cast<uint64_t>(value) << filled_;
    filled_ += count;
    if (filled_ >= 32) {
      *word_++ = static_cast<uint32_t>(pending_);
      pending_ >>= 32;
      filled_ -= 32;
    }
  }
  // Preserves what another Writer has written after it.
  void flush() {
    if (filled_) *word_ |= static_cast<uint32_t>(pending_);
  }

 private:
  uint32_t* word_;
  uint64_t pending_ = 0;
  int filled_;
};

// Reads consecutive fields of at most 32 bits, and no word beyond the last of them.
class Reader {
 public:
  Reader(const uint32_t* words, int64_t at) : word_(words + (at >> 5)) {
    if (at & 31) {
      pending_ = *word_++ >> (at & 31);
      filled_ = 32 - (at & 31);
    }
  }
  uint32_t get(int count) {
    if (filled_ < count) {
      pending_ |= static_cast<uint64_t>(*word_++) << filled_;
      filled_ += 32;
    }
    const uint32_t value = static_cast<uint32_t>(pending_) & mask_of(count);
    pending_ >>= count;
    filled_ -= count;
    return value;
  }

 private:
  const uint32_t* word_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

inline void set_bit(uint32_t* words, int64_t at) { words[at >> 5] |= uint32_t{1} << (at & 31); }

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
  Writer lows(words, at);
  for (int64_t i = 0; i < kept; ++i) lows.put(positions[i] & mask_of(low), low);
  lows.flush();
  const int64_t upper = at + kept * low;
  for (int64_t i = 0; i < kept; ++i) set_bit(words, upper + (positions[i] >> low) + i);
}

inline void put_bitmap(uint32_t* words, int64_t at, const uint32_t* positions, int64_t kept) {
  for (int64_t i = 0; i < kept; ++i) set_bit(words, at + positions[i]);
}

// Finds the ones among the `length` bits at `at`; false unless there are `kept` of them.
inline bool get_ones(const uint32_t* words, int64_t at, int64_t length, int64_t kept,
                     uint32_t* ones) {
  Reader map(words, at);
  int64_t seen = 0;
  for (int64_t start = 0; start < length; start += 32) {
    uint32_t run = map.get(static_cast<int>(length - start < 32 ? length - start : 32));
    for (; run; run &= run - 1) {
      if (seen == kept) return false;
      ones[seen++] = static_cast<uint32_t>(start + __builtin_ctz(run));
    }
  }
  return seen == kept;
}

// Reads the positions in order; false unless there are `kept`, strictly ascending below `bins`.
inline bool get_positions(const uint32_t* words, int64_t at, int64_t kept, int64_t bins,
                          bool bitmap, uint32_t* positions) {
  if (bitmap) return get_ones(words, at, bins, kept, positions);
  const int low = low_bits(kept, bins);
  if (!get_ones(words, at + kept * low, upper_bits(kept, bins), kept, positions)) return false;
  Reader lows(words, at);
  int64_t last = -1;
  bool ascending = true;
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t position = (positions[i] - i) << low | lows.get(low);
    ascending &= position > last;
    positions[i] = static_cast<uint32_t>(last = position);
  }
  return ascending && last < bins;
}

}  // namespace sn
