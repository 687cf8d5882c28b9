// The portable loops over groups, and what all forms share for groups in which elements may escape.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bits.h"
#include "groups_loops.h"
#include "half.h"
#include "lanes.h"

namespace sn {
namespace {

constexpr float kEdge = 0.0009765625f;  // 2**-10 of a step

// Maps the bits of floats to integers in the same order, and back; its own inverse.
inline uint32_t ordered(uint32_t bits) {
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) & 0x7FFFFFFF);
}

// Extremes, as ordered integers, of elements that fit; and the numbers of zeros and of fits.
struct Range {
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
  int64_t zeros = 0, fits = 0;
};

SN_CLONES void range_run(const float* values, int64_t count, Range& range) {
  constexpr int32_t most = std::numeric_limits<int32_t>::max();
  int32_t low = range.low, high = range.high, zeros = 0, fits = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, values + i, 4);
    const uint32_t magnitude = word & 0x7FFFFFFF;
    const auto key = static_cast<int32_t>(ordered(word));
    // With masks: compilers turn selections that feed a minimum into branches, not vector code.
    const int32_t mask = -static_cast<int32_t>(magnitude < kUnfit);
    low = std::min((key & mask) | (most & ~mask), low);
    high = std::max((key & mask) | (~most & ~mask), high);
    zeros += magnitude == 0;
    fits -= mask;
  }
  range = {low, high, range.zeros + zeros, range.fits + fits};
}

template <typename Word>
SN_CLONES int64_t zeros_run(const Word* words, int64_t count) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < count; i += kRun) {
    Word here = 0;  // as wide as the words compared, so that lanes are not widened
    for (int64_t j = i; j < std::min(count, i + kRun); ++j)
      here = static_cast<Word>(here + (static_cast<Word>(words[j] << 1) == 0));
    zeros += here;
  }
  return zeros;
}

template <Floats kind>
SN_CLONES void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = kind == Floats::kHalf ? from_half(from[i]) : from_brain(from[i]);
}

}  // namespace

const float* widened(const void* values, Floats kind, int64_t count, float* scratch) {
  if (kind == Floats::kSingle) return static_cast<const float*>(values);
  const auto* from = static_cast<const uint16_t*>(values);
  if (kind == Floats::kHalf)
    widen<Floats::kHalf>(from, count, scratch);
  else
    widen<Floats::kBrain>(from, count, scratch);
  return scratch;
}

Extremes extremes_of(const void* values, Floats kind, int64_t count) {
  const auto* from = static_cast<const uint8_t*>(values);
  float scratch[kRun];
  Range range;
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t here = std::min(kRun, count - i);
    range_run(widened(from + width_of(kind) * i, kind, here, scratch), here, range);
  }
  const auto number = [&](int32_t key) {
    return range.fits ? from_bits(ordered(static_cast<uint32_t>(key))) : 0;
  };
  return {number(range.low), number(range.high), range.zeros > 0, range.fits};
}

int64_t zeros_of(const void* values, Floats kind, int64_t count) {
  if (kind == Floats::kSingle) return zeros_run(static_cast<const uint32_t*>(values), count);
  return zeros_run(static_cast<const uint16_t*>(values), count);
}

SN_CLONES const uint16_t* Drawn::draw(const Luck& luck, int64_t count) {
  const uint32_t pair = luck.pair, key = luck.key, other = luck.other;
  for (int64_t i = 0; i < (count + luck.odd + 1) / 2; ++i)
    words[i] = random_word(pair + static_cast<uint32_t>(i), key, other);
  return reinterpret_cast<const uint16_t*>(words) + luck.odd;
}

SN_CLONES int32_t quantise(const float* values, int32_t count, const Place& place, int bits,
                           float bound, uint32_t least, const uint16_t* luck, uint8_t* codes,
                           uint8_t* bad, uint32_t* spread) {
  const float base = place.base, inverse = 1.0f / place.step;
  const float top = static_cast<float>((1 << bits) - 1);
  const int fraction = fraction_of(bits), dropped = 16 - fraction, rest = fraction - 8;
  const float scale = static_cast<float>(1 << fraction);
  int32_t number = 0;
  uint32_t total = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, values + i, 4);
    // Below `least` the unsigned difference wraps around and exceeds all others.
    const bool fit = (word & 0x7FFFFFFF) - least < kUnfit - least;
    const float value = fit ? values[i] : base;
    const float raw = (value - base) * inverse;
    float q = raw > 0 ? raw : 0;
    q = q < top ? q : top;
    // Rounds to nearest, as the product is below 2**23.
    const auto steps = static_cast<int32_t>((q * scale + 0x1p23f) - 0x1p23f);
    const int32_t code = (steps + (luck[i] >> dropped)) >> fraction;
    codes[i] = static_cast<uint8_t>(code);
    const float error = (base + static_cast<float>(code) * place.step) - value;
    // On the grid up to rounding error. Farther off, its end may be within the bound, but biased.
    const bool on = (raw > -kEdge) & (raw < top + kEdge);
    const bool good = fit & on & (std::fabs(error) < bound);
    number += !good;
    bad[i] = !good;
    const int32_t g = ((steps + (1 << (rest - 1))) >> rest) & 255;
    total += static_cast<uint32_t>(good ? g * (256 - g) : 0);
  }
  *spread += total;
  return number;
}

SN_CLONES void side_by_side(uint8_t* wide, int64_t count, int bits, uint8_t* codes) {
  for (int64_t j = count; j % 8; ++j) wide[j] = 0;
  const int64_t bytes = (count * bits + 7) / 8;
  if (bits == 8) {
    std::memcpy(codes, wide, static_cast<size_t>(count));
  } else if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint16_t w;
      std::memcpy(&w, wide + 2 * i, 2);
      codes[i] = static_cast<uint8_t>(w | w >> 4);
    }
  } else if (bits == 2) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint32_t w;
      std::memcpy(&w, wide + 4 * i, 4);
      codes[i] = static_cast<uint8_t>(w | w >> 6 | w >> 12 | w >> 18);
    }
  } else {
    for (int64_t i = 0; i < bytes; ++i) codes[i] = squeezed(wide + 8 * i);
  }
}

SN_CLONES void spread_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* wide) {
  const int64_t bytes = (count * bits + 7) / 8;
  if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      const uint32_t w = codes[i];
      const uint16_t two = static_cast<uint16_t>((w | w << 4) & 0x0F0F);
      std::memcpy(wide + 2 * i, &two, 2);
    }
  } else if (bits == 2) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint32_t w = codes[i];
      w = (w | w << 12) & 0x000F000Fu;
      w = (w | w << 6) & 0x03030303u;
      std::memcpy(wide + 4 * i, &w, 4);
    }
  } else {
    for (int64_t i = 0; i < bytes; ++i) spread(codes[i], wide + 8 * i);
  }
}

namespace {

struct Plain {
  static constexpr bool kBeside = false;

  template <Floats kind, int bits, bool look>
  static void round(const void* values, int64_t count, const Place& place, const Luck& luck,
                    uint8_t* codes, uint32_t* spread) {
    Drawn drawn;
    float scratch[kRun];
    uint8_t wide[kRun], bad[kRun];
    const float* run = widened(values, kind, count, scratch);
    quantise(run, static_cast<int32_t>(count), place, bits,
             std::numeric_limits<float>::infinity(), 0, drawn.draw(luck, count), wide, bad, spread);
    side_by_side(wide, count, bits, codes);
  }

  template <Floats kind>
  static bool range(const void* values, int64_t count, Extremes& seen) {
    seen = extremes_of(values, kind, count);
    return true;
  }

  static void grids(const Extremes* seen, int count, int levels, float cap, Place* places) {
    for (int i = 0; i < count; ++i) places[i] = choose(seen[i], levels, cap);
  }

  template <Floats kind>
  static void values(const uint8_t* codes, int64_t count, const Place& place, void* to) {
    const float base = place.base, step = place.step;
    for (int64_t i = 0; i < count; ++i) {
      const float value = base + static_cast<float>(codes[i]) * step;
      if constexpr (kind == Floats::kSingle)
        static_cast<float*>(to)[i] = value;
      else
        static_cast<uint16_t*>(to)[i] = kind == Floats::kHalf ? to_half(value) : to_brain(value);
    }
  }
};

constexpr Loops kPlain = table_of<Plain>();

}  // namespace

const Loops& plain_loops() { return kPlain; }

}  // namespace sn
