#include "groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bits.h"
#include "half.h"
#include "lanes.h"

namespace sn {
namespace {

constexpr uint32_t kUnfit = 0x7B800000;  // 2**120: from here on, NaN included, values escape
constexpr uint32_t kFinest = 0x0880;     // upper half of 2**-110, the finest step
constexpr float kEdge = 0.0009765625f;   // 2**-10 of a step
constexpr int64_t kRun = 1024;           // elements worked on at a time: scratch stays in the cache

// Floats in the order of integers, and back; its own inverse.
inline int32_t ordered(uint32_t bits) {
  const int32_t b = static_cast<int32_t>(bits);
  return b ^ ((b >> 31) & 0x7FFFFFFF);
}

struct Range {
  int32_t low = INT32_MAX, high = INT32_MIN;
  int32_t zeros = 0, fits = 0;
};

SN_CLONES void range_of(const float* values, int64_t count, Range& range) {
  int32_t low = range.low, high = range.high, zeros = range.zeros, fits = range.fits;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    const bool fit = magnitude < kUnfit;
    const int32_t key = ordered(bits);
    // By masks: compilers make branches of selections that feed a minimum, and no vector code.
    const int32_t mask = -static_cast<int32_t>(fit);
    const int32_t down = (key & mask) | (INT32_MAX & ~mask), up = (key & mask) | (INT32_MIN & ~mask);
    low = std::min(down, low);
    high = std::max(up, high);
    zeros += magnitude == 0;
    fits += fit;
  }
  range = {low, high, zeros, fits};
}

inline float upper(float value) {  // to the next number with a lower half of zeros
  return from_bits((to_bits(value) + 0xFFFF) & 0xFFFF0000u);
}

struct Place {
  float base, step;
};

// Grid of a group: the finest that holds it, with zero on it if the group has one; see choose() in
// ops/groups.py for the reasons.
Place choose(float low, float high, bool zero, int levels, float cap) {
  const float top = static_cast<float>(levels);
  const bool both = low < 0 && high > 0;
  const bool lattice = zero && low < 0;
  float step, below = 0;
  if (!lattice) {
    step = (high - low) / top;
  } else if (!both) {
    below = top;
    step = -low / top;
  } else if (levels == 1) {
    below = -low > high ? 1.0f : 0.0f;
    step = -low > high ? -low : high;
  } else {
    const float share = std::floor(top * -low / (high - low));
    const float a = std::min(std::max(share, 1.0f), top - 1);
    const float b = std::min(std::max(share + 1, 1.0f), top - 1);
    const float step_a = std::max(-low / a, high / (top - a));
    const float step_b = std::max(-low / b, high / (top - b));
    below = step_a <= step_b ? a : b;
    step = std::min(step_a, step_b);
  }
  step = std::max(upper(step), from_bits(kFinest << 16));
  if (step <= cap) return {lattice ? -below * step : low, step};
  step = cap;
  if (low >= 0) return {low, step};
  if (!both) return {zero ? -top * step : high - top * step, step};
  const float half = std::floor((top + 1) / 2);
  const float left = std::ceil(-low / step), right = std::ceil(high / step);
  below = left <= half ? left : right <= half ? top - right : half;
  return {-below * step, step};
}

inline uint32_t random_word(uint32_t at, uint32_t key, uint32_t other) {
  uint32_t x = at * 0x9E3779B9u + key;
  x ^= x >> 17;
  x *= 0xED5AD4BBu;
  x ^= x >> 11;
  x += other;
  x *= 0xAC4C1B51u;
  x ^= x >> 15;
  x *= 0x31848BABu;
  return x ^ (x >> 14);
}

// Random numbers of 16 bits for `count` elements, two of a word, from the first half of word `pair`
// on; `luck` has room for a whole number of words.
SN_CLONES void draw(uint32_t pair, int32_t count, uint32_t key, uint32_t other, uint32_t* luck) {
  for (int32_t i = 0; i < (count + 1) / 2; ++i)
    luck[i] = random_word(pair + static_cast<uint32_t>(i), key, other);
}

// Rounds up to kRun elements. Where `whole`, every element lies on the grid; else `bad` marks those
// that no code stands for, and the number of them is returned.
template <bool whole, bool look>
__attribute__((always_inline)) inline int32_t quantise_run(
    const float* values, int32_t count, const Place& place, float top, float bound,
    const uint16_t* luck, uint8_t* codes, uint8_t* bad, uint32_t* spread) {
  const float base = place.base, step = place.step;
  int32_t number = 0;
  uint32_t total = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    const bool fit = whole || (bits & 0x7FFFFFFF) < kUnfit;
    const float value = fit ? values[i] : base;
    const float raw = (value - base) / step;
    float q = raw > 0 ? raw : 0;
    q = q < top ? q : top;
    // A number below 256 plus one below 1 in 2**-16: a whole one stays what it is.
    const auto code = static_cast<int32_t>(q + static_cast<float>(luck[i]) * 0x1p-16f);
    codes[i] = static_cast<uint8_t>(code);
    bool good = true;
    if (!whole) {
      const float error = (base + static_cast<float>(code) * step) - value;
      // Off the grid by more than what rounding does: its end would be within the bound, but biased.
      const bool on = (raw > -kEdge) & (raw < top + kEdge);
      good = fit & on & (std::fabs(error) < bound);
      number += !good;
      bad[i] = !good;
    }
    if (look) {
      const float part = q - static_cast<float>(static_cast<int32_t>(q));
      const int32_t g = static_cast<int32_t>(part * 256.0f + 0.5f);
      total += static_cast<uint32_t>(good ? g * (256 - g) : 0);
    }
  }
  if (look) *spread += total;
  return number;
}

SN_CLONES int32_t quantise(const float* values, int32_t count, const Place& place, float top,
                           float bound, const uint16_t* luck, uint8_t* codes, uint8_t* bad,
                           uint32_t* spread) {
  return quantise_run<false, true>(values, count, place, top, bound, luck, codes, bad, spread);
}

SN_CLONES void quantise_seen(const float* values, int32_t count, const Place& place, float top,
                             const uint16_t* luck, uint8_t* codes, uint32_t* spread) {
  quantise_run<true, true>(values, count, place, top, 0.0f, luck, codes, nullptr, spread);
}

SN_CLONES void quantise_whole(const float* values, int32_t count, const Place& place, float top,
                              const uint16_t* luck, uint8_t* codes) {
  quantise_run<true, false>(values, count, place, top, 0.0f, luck, codes, nullptr, nullptr);
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

// Codes to values; `count` is a multiple of 8 / bits but at the end of the last group.
SN_CLONES void spread_out(const uint8_t* codes, int64_t count, int bits, const Place& place,
                          float* out) {
  const float base = place.base, step = place.step;
  if (bits == 8) {
    for (int64_t i = 0; i < count; ++i) out[i] = base + static_cast<float>(codes[i]) * step;
  } else {
    uint8_t wide[kRun];
    const int per = 8 / bits;
    const int64_t bytes = (count + per - 1) / per;
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
    for (int64_t i = 0; i < count; ++i) out[i] = base + static_cast<float>(wide[i]) * step;
  }
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

// Up to kRun values from `start` on as float32: where they lie, or in `scratch`.
const float* widened(const void* values, Floats kind, int64_t start, int64_t count,
                     float* scratch) {
  if (kind == Floats::kSingle) return static_cast<const float*>(values) + start;
  const uint16_t* from = static_cast<const uint16_t*>(values) + start;
  if (kind == Floats::kHalf)
    widen_half(from, count, scratch);
  else
    widen_brain(from, count, scratch);
  return scratch;
}

}  // namespace

void pack_groups(const void* values, Floats kind, int64_t count, int64_t run_length, int64_t first,
                 const Grid& grid, float* bases, uint16_t* steps, uint32_t* spread, uint8_t* codes,
                 Escapes& escapes) {
  const int levels = (1 << grid.bits) - 1;
  const float top = static_cast<float>(levels), largest = from_bits(kUnfit);
  const float cap = from_bits(to_bits(std::min(grid.bound, largest)) & 0xFFFF0000u);
  uint8_t wide[kRun], bad[kRun];
  uint32_t words[kRun / 2 + 1];
  float scratch[kRun];
  int64_t size = 0;
  for (int64_t start = 0, g = 0; start < count; start += size, ++g) {
    size = std::min(grid.group, run_length - start % run_length);
    Range range;
    const float* run = nullptr;
    for (int64_t i = 0; i < size; i += kRun) {
      const int64_t here = std::min(kRun, size - i);
      run = widened(values, kind, start + i, here, scratch);
      range_of(run, here, range);
    }
    escapes.zeros += range.zeros;
    const float low = range.fits ? from_bits(ordered(range.low)) : 0.0f;
    const float high = range.fits ? from_bits(ordered(range.high)) : 0.0f;
    const Place place = choose(low, high, range.zeros > 0, levels, cap);
    bases[g] = place.base;
    steps[g] = static_cast<uint16_t>(to_bits(place.step) >> 16);
    uint32_t unread = 0;
    uint32_t* seen = spread ? spread + g : &unread;
    *seen = 0;
    // A grid as fine as its group allows holds all of it: nothing escapes, and nothing is checked.
    // Two points about zero hold one side only.
    const bool about_zero = range.zeros > 0 && low < 0 && high > 0;
    const bool whole = range.fits == size && std::isinf(grid.bound) &&
                       (levels > 1 || !about_zero) && place.step < cap;
    for (int64_t i = 0; i < size; i += kRun) {
      const int64_t here = std::min(kRun, size - i), at = first + start + i;
      if (size > kRun) run = widened(values, kind, start + i, here, scratch);
      const auto number = static_cast<int32_t>(here);
      const auto pair = static_cast<uint64_t>(at) >> 1;
      const uint32_t other = grid.other + static_cast<uint32_t>(pair >> 32) * 0x85EBCA6Bu;
      draw(static_cast<uint32_t>(pair), number + 1, grid.key, other, words);
      const auto* luck = reinterpret_cast<const uint16_t*>(words) + (at & 1);
      int32_t lost = 0;
      if (!whole)
        lost = quantise(run, number, place, top, grid.bound, luck, wide, bad, seen);
      else if (spread)
        quantise_seen(run, number, place, top, luck, wide, seen);
      else
        quantise_whole(run, number, place, top, luck, wide);
      for (int64_t j = here; j % 8; ++j) wide[j] = 0;
      squeeze(wide, here, grid.bits, codes);
      codes += (here * grid.bits + 7) / 8;
      for (int64_t j = 0; lost && j < here; ++j)
        if (bad[j]) {
          escapes.at.push_back(at + j);
          escapes.values.push_back(run[j]);
        }
    }
  }
}

void unpack_groups(const float* bases, const uint16_t* steps, const uint8_t* codes, int64_t count,
                   int64_t run_length, int bits, int64_t group, void* values, Floats kind) {
  float scratch[kRun];
  int64_t size = 0;
  for (int64_t start = 0, g = 0; start < count; start += size, ++g) {
    const Place place = {bases[g], from_bits(static_cast<uint32_t>(steps[g]) << 16)};
    size = std::min(group, run_length - start % run_length);
    for (int64_t i = 0; i < size; i += kRun) {
      const int64_t here = std::min(kRun, size - i), at = start + i;
      float* out = kind == Floats::kSingle ? static_cast<float*>(values) + at : scratch;
      spread_out(codes, here, bits, place, out);
      codes += (here * bits + 7) / 8;
      if (kind == Floats::kHalf)
        narrow_half(out, here, static_cast<uint16_t*>(values) + at);
      else if (kind == Floats::kBrain)
        narrow_brain(out, here, static_cast<uint16_t*>(values) + at);
    }
  }
}

}  // namespace sn
