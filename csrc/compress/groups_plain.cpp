// The loops over groups that run anywhere, and what all forms share where elements may escape.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bits.h"
#include "groups_loops.h"
#include "half.h"
#include "lanes.h"

namespace sn {
namespace {

constexpr float kEdge = 0.0009765625f;  // 2**-10 of a step

// Floats in the order of integers, and back; its own inverse.
template <typename Word>
inline std::make_signed_t<Word> ordered(Word bits) {
  using Signed = std::make_signed_t<Word>;
  constexpr auto magnitude = static_cast<Signed>(static_cast<Word>(~Word{0}) >> 1);
  const auto b = static_cast<Signed>(bits);
  return static_cast<Signed>(b ^ ((b >> (8 * sizeof(Word) - 1)) & magnitude));
}

// Extremes, in the order of integers, of what fits; and how many are zero, or fit.
template <typename Word>
struct Range {
  using Signed = std::make_signed_t<Word>;
  Signed low = std::numeric_limits<Signed>::max(), high = std::numeric_limits<Signed>::min();
  int64_t zeros = 0, fits = 0;
};

// Up to kRun words; `limit` is the magnitude from which on they do not fit, if not `all` do.
template <typename Word, bool all>
__attribute__((always_inline)) inline void range_run(const Word* words, int64_t count, Word limit,
                                                     Range<Word>& range) {
  using Signed = std::make_signed_t<Word>;
  constexpr auto top = static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);
  constexpr Signed most = std::numeric_limits<Signed>::max();
  constexpr Signed least = std::numeric_limits<Signed>::min();
  Signed low = range.low, high = range.high;
  Word zeros = 0, fits = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<Word>(words[i] & top);
    const Signed key = ordered(words[i]);
    Signed down = key, up = key;
    if (!all) {
      // By masks: compilers make branches of selections that feed a minimum, and no vector code.
      const bool fit = magnitude < limit;
      const auto mask = static_cast<Signed>(-static_cast<Signed>(fit));
      down = static_cast<Signed>((key & mask) | (most & ~mask));
      up = static_cast<Signed>((key & mask) | (least & ~mask));
      fits = static_cast<Word>(fits + fit);
    }
    low = std::min(down, low);
    high = std::max(up, high);
    zeros = static_cast<Word>(zeros + (magnitude == 0));
  }
  range = {low, high, range.zeros + zeros, range.fits + fits};
}

SN_CLONES void range_wide(const uint32_t* words, int64_t count, uint32_t limit, bool all,
                          Range<uint32_t>& range) {
  if (all)
    range_run<uint32_t, true>(words, count, limit, range);
  else
    range_run<uint32_t, false>(words, count, limit, range);
}

SN_CLONES void range_narrow(const uint16_t* words, int64_t count, uint16_t limit, bool all,
                            Range<uint16_t>& range) {
  if (all)
    range_run<uint16_t, true>(words, count, limit, range);
  else
    range_run<uint16_t, false>(words, count, limit, range);
}

template <typename Word, typename Loop>
Range<Word> range_of(const void* values, int64_t count, Word limit, Loop loop) {
  const auto* words = static_cast<const Word*>(values);
  Range<Word> range;
  for (int64_t i = 0; i < count; i += kRun)
    loop(words + i, std::min(kRun, count - i), limit, true, range);
  range.fits = count;
  // In the order of integers a negative number is its magnitude and one more, negated.
  const auto top = static_cast<std::make_signed_t<Word>>(limit);
  if (range.high < top && range.low >= -top) return range;
  range = {};
  for (int64_t i = 0; i < count; i += kRun)
    loop(words + i, std::min(kRun, count - i), limit, false, range);
  return range;
}

}  // namespace

Extremes extremes_of(const void* values, Floats kind, int64_t count) {
  if (kind == Floats::kSingle) {
    const auto range = range_of<uint32_t>(values, count, kUnfit, range_wide);
    if (!range.fits) return {0, 0, range.zeros > 0, 0};
    const auto number = [](int32_t key) {
      return from_bits(static_cast<uint32_t>(ordered(static_cast<uint32_t>(key))));
    };
    return {number(range.low), number(range.high), range.zeros > 0, range.fits};
  }
  const bool half = kind == Floats::kHalf;
  // Of float16 the infinite ones alone are that large.
  const auto limit = static_cast<uint16_t>(half ? 0x7C00u : kUnfit >> 16);
  const auto range = range_of<uint16_t>(values, count, limit, range_narrow);
  if (!range.fits) return {0, 0, range.zeros > 0, 0};
  const auto number = [half](int16_t key) {
    const auto word = static_cast<uint16_t>(ordered(static_cast<uint16_t>(key)));
    return half ? from_half(word) : from_brain(word);
  };
  return {number(range.low), number(range.high), range.zeros > 0, range.fits};
}

namespace {

template <typename Word>
__attribute__((always_inline)) inline int64_t zeros_run(const Word* words, int64_t count) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < count; i += kRun) {
    Word here = 0;  // as wide as what is compared, so that lanes are not widened
    for (int64_t j = i; j < std::min(count, i + kRun); ++j)
      here = static_cast<Word>(here + (static_cast<Word>(words[j] << 1) == 0));
    zeros += here;
  }
  return zeros;
}

SN_CLONES int64_t zeros_wide(const uint32_t* words, int64_t count) {
  return zeros_run(words, count);
}

SN_CLONES int64_t zeros_narrow(const uint16_t* words, int64_t count) {
  return zeros_run(words, count);
}

}  // namespace

int64_t zeros_of(const void* values, Floats kind, int64_t count) {
  if (kind == Floats::kSingle) return zeros_wide(static_cast<const uint32_t*>(values), count);
  return zeros_narrow(static_cast<const uint16_t*>(values), count);
}

namespace {

// Random numbers of 16 bits for `count` elements; `words` has room for one word more than they fill.
SN_CLONES void draw(const Luck& luck, int64_t count, uint32_t* words) {
  const uint32_t pair = luck.pair, key = luck.key, other = luck.other;
  for (int64_t i = 0; i < (count + luck.odd + 1) / 2; ++i)
    words[i] = random_word(pair + static_cast<uint32_t>(i), key, other);
}

// See quantise(). Where all lie on the grid, `bad` is null.
template <bool whole, bool look>
__attribute__((always_inline)) inline int32_t quantise_run(
    const float* values, int32_t count, const Place& place, int bits, float bound, uint32_t least,
    const uint16_t* luck, uint8_t* codes, uint8_t* bad, uint32_t* spread) {
  const float base = place.base, inverse = 1.0f / place.step;
  const float top = static_cast<float>((1 << bits) - 1);
  const int fraction = fraction_of(bits), dropped = 16 - fraction, rest = fraction - 8;
  const float scale = static_cast<float>(1 << fraction);
  int32_t number = 0;
  uint32_t total = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, values + i, 4);
    // Below the least the difference wraps around, past all others.
    const bool fit = whole || (word & 0x7FFFFFFF) - least < kUnfit - least;
    const float value = fit ? values[i] : base;
    const float raw = (value - base) * inverse;
    float q = raw > 0 ? raw : 0;
    q = q < top ? q : top;
    // To nearest, as it is below 2**23.
    const auto steps = static_cast<int32_t>((q * scale + 0x1p23f) - 0x1p23f);
    const int32_t code = (steps + (luck[i] >> dropped)) >> fraction;
    codes[i] = static_cast<uint8_t>(code);
    bool good = true;
    if (!whole) {
      const float error = (base + static_cast<float>(code) * place.step) - value;
      // Off the grid by more than what rounding does: its end would be within the bound, but biased.
      const bool on = (raw > -kEdge) & (raw < top + kEdge);
      good = fit & on & (std::fabs(error) < bound);
      number += !good;
      bad[i] = !good;
    }
    if (look) {
      const int32_t g = ((steps + (1 << (rest - 1))) >> rest) & 255;
      total += static_cast<uint32_t>(good ? g * (256 - g) : 0);
    }
  }
  if (look) *spread += total;
  return number;
}

}  // namespace

const uint16_t* Drawn::draw(const Luck& luck, int64_t count) {
  sn::draw(luck, count, words);
  return reinterpret_cast<const uint16_t*>(words) + luck.odd;
}

SN_CLONES int32_t quantise(const float* values, int32_t count, const Place& place, int bits,
                           float bound, uint32_t least, const uint16_t* luck, uint8_t* codes,
                           uint8_t* bad, uint32_t* spread) {
  return quantise_run<false, true>(values, count, place, bits, bound, least, luck, codes, bad,
                                   spread);
}

namespace {

SN_CLONES void quantise_seen(const float* values, int32_t count, const Place& place, int bits,
                             const uint16_t* luck, uint8_t* codes, uint32_t* spread) {
  quantise_run<true, true>(values, count, place, bits, 0.0f, 0, luck, codes, nullptr, spread);
}

SN_CLONES void quantise_whole(const float* values, int32_t count, const Place& place, int bits,
                              const uint16_t* luck, uint8_t* codes) {
  quantise_run<true, false>(values, count, place, bits, 0.0f, 0, luck, codes, nullptr, nullptr);
}

// Codes of one byte each, [count] and zeros up to a multiple of 8, to `bits` bits each.
SN_CLONES void squeeze(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  const int64_t bytes = (count * bits + 7) / 8;
  if (bits == 8) {
    std::memcpy(out, codes, static_cast<size_t>(count));
  } else if (bits == 4) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint16_t w;
      std::memcpy(&w, codes + 2 * i, 2);
      out[i] = static_cast<uint8_t>(w | w >> 4);
    }
  } else if (bits == 2) {
    for (int64_t i = 0; i < bytes; ++i) {
      uint32_t w;
      std::memcpy(&w, codes + 4 * i, 4);
      out[i] = static_cast<uint8_t>(w | w >> 6 | w >> 12 | w >> 18);
    }
  } else {
    for (int64_t i = 0; i < bytes; ++i) out[i] = squeezed(codes + 8 * i);
  }
}

}  // namespace

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

SN_CLONES void value_wide(const uint8_t* codes, int64_t count, const Place& place, void* values) {
  const float base = place.base, step = place.step;
  auto* out = static_cast<float*>(values);
  for (int64_t i = 0; i < count; ++i) out[i] = base + static_cast<float>(codes[i]) * step;
}

SN_CLONES void widen_half(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_half(from[i]);
}

SN_CLONES void widen_brain(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_brain(from[i]);
}

SN_CLONES void narrow_half(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_half(from[i]);
}

SN_CLONES void narrow_brain(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_brain(from[i]);
}

}  // namespace

const float* widened(const void* values, Floats kind, int64_t count, float* scratch) {
  if (kind == Floats::kSingle) return static_cast<const float*>(values);
  const auto* from = static_cast<const uint16_t*>(values);
  if (kind == Floats::kHalf)
    widen_half(from, count, scratch);
  else
    widen_brain(from, count, scratch);
  return scratch;
}

void side_by_side(uint8_t* wide, int64_t count, int bits, uint8_t* codes) {
  for (int64_t j = count; j % 8; ++j) wide[j] = 0;
  squeeze(wide, count, bits, codes);
}

namespace {

struct Plain {
  static constexpr bool kBeside = false;

  template <Floats kind, int bits, bool look>
  static void round(const void* values, int64_t count, const Place& place, const Luck& luck,
                   uint8_t* codes, uint32_t* spread) {
    Drawn drawn;
    float scratch[kRun];
    uint8_t wide[kRun];
    const float* run = widened(values, kind, count, scratch);
    const uint16_t* numbers = drawn.draw(luck, count);
    if (look)
      quantise_seen(run, static_cast<int32_t>(count), place, bits, numbers, wide, spread);
    else
      quantise_whole(run, static_cast<int32_t>(count), place, bits, numbers, wide);
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
    if (kind == Floats::kSingle) return value_wide(codes, count, place, to);
    float scratch[kRun];
    value_wide(codes, count, place, scratch);
    if (kind == Floats::kHalf)
      narrow_half(scratch, count, static_cast<uint16_t*>(to));
    else
      narrow_brain(scratch, count, static_cast<uint16_t*>(to));
  }
};

constexpr Loops kPlain = table_of<Plain>();

}  // namespace

const Loops& plain_loops() { return kPlain; }

}  // namespace sn
