// Vectors of sixteen elements of a group: loads and stores, extremes, grids, random numbers and
// codes, with AVX2, FMA and F16C instructions. For groups_avx.cpp.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bits.h"
#include "groups_loops.h"
#include "half.h"

#define SN_AVX2 "avx2,fma,f16c"
#define SN_LANES __attribute__((always_inline, target(SN_AVX2))) inline

namespace sn {
namespace {

constexpr Floats kFloats = Floats::kSingle, kHalf = Floats::kHalf, kBrain = Floats::kBrain;
constexpr int64_t kLanes = 16;

template <Floats kind>
constexpr int64_t kWidth = kind == kFloats ? 4 : 2;

struct Floats16 {
  __m256 a, b;
};

struct Words16 {
  __m256i a, b;
};

SN_LANES __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
SN_LANES __m128i load_half(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

SN_LANES void store(void* to, __m256i it) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), it);
}
SN_LANES void store_half(void* to, __m128i it) {
  _mm_storeu_si128(static_cast<__m128i*>(to), it);
}

SN_LANES __m256i all_of(uint32_t word) { return _mm256_set1_epi32(static_cast<int32_t>(word)); }

// The order of sixteen elements in two vectors: float32 and float16 in sequence; bfloat16 as
// unpacked and packed by instructions on 128-bit halves: 0-3 and 8-11, 4-7 and 12-15.
template <Floats kind>
struct Order {
  static SN_LANES Floats16 read(const void* from) {
    if constexpr (kind == kFloats) {
      const auto* values = static_cast<const float*>(from);
      return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
    } else {
      const auto* values = static_cast<const uint16_t*>(from);
      return {_mm256_cvtph_ps(load_half(values)), _mm256_cvtph_ps(load_half(values + 8))};
    }
  }
  static SN_LANES void write(const Floats16& it, void* to) {
    if constexpr (kind == kFloats) {
      _mm256_storeu_ps(static_cast<float*>(to), it.a);
      _mm256_storeu_ps(static_cast<float*>(to) + 8, it.b);
    } else {
      const __m128i a = _mm256_cvtps_ph(it.a, _MM_FROUND_TO_NEAREST_INT);
      const __m128i b = _mm256_cvtps_ph(it.b, _MM_FROUND_TO_NEAREST_INT);
      store(to, _mm256_set_m128i(b, a));
    }
  }
  static SN_LANES Words16 words(const uint32_t* from) { return {load(from), load(from + 8)}; }
  static SN_LANES void keep(const Words16& it, uint32_t* to) {
    store(to, it.a);
    store(to + 8, it.b);
  }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    const __m128i codes = load_half(from);
    const __m256i a = _mm256_cvtepu8_epi32(codes);
    const __m256i b = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes));
    return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
  }
  // The elements at even places, and those at odd ones; and the place of each lane's pair.
  static SN_LANES Floats16 pairs(const void* from) {
    const Floats16 it = read(from);
    return {_mm256_shuffle_ps(it.a, it.b, 0x88), _mm256_shuffle_ps(it.a, it.b, 0xDD)};
  }
  static SN_LANES __m256i places() { return _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7); }
  static SN_LANES __m256i placed(__m256i words) { return _mm256_permute4x64_epi64(words, 0xD8); }
  // The order of groups of four bytes in two vectors of pairs that were packed to bytes.
  static SN_LANES __m256i fours() { return _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); }
  static constexpr int64_t lane(int64_t element) {  // in a vector of pairs of 16 bits
    return element < 4 || element >= 12 ? element : element ^ 12;
  }
};

template <>
struct Order<kBrain> {
  static SN_LANES Floats16 read(const void* from) {
    const __m256i words = load(from), none = _mm256_setzero_si256();
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, words)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, words))};
  }
  static SN_LANES __m256i rounded(__m256 value) {  // to_brain() of numbers and infinities
    const __m256i raw = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), all_of(1));
    const __m256i half = _mm256_add_epi32(odd, all_of(0x7FFF));
    return _mm256_srli_epi32(_mm256_add_epi32(raw, half), 16);
  }
  static SN_LANES void write(const Floats16& it, void* to) {
    store(to, _mm256_packus_epi32(rounded(it.a), rounded(it.b)));
  }
  static SN_LANES Words16 words(const uint32_t* from) {
    return {_mm256_set_m128i(load_half(from + 8), load_half(from)),
            _mm256_set_m128i(load_half(from + 12), load_half(from + 4))};
  }
  static SN_LANES void keep(const Words16& it, uint32_t* to) {
    store(to, _mm256_permute2x128_si256(it.a, it.b, 0x20));
    store(to + 8, _mm256_permute2x128_si256(it.a, it.b, 0x31));
  }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    const __m256i codes = _mm256_cvtepu8_epi16(load_half(from)), none = _mm256_setzero_si256();
    return {_mm256_cvtepi32_ps(_mm256_unpacklo_epi16(codes, none)),
            _mm256_cvtepi32_ps(_mm256_unpackhi_epi16(codes, none))};
  }
  static SN_LANES Floats16 pairs(const void* from) {
    const __m256i words = load(from);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, all_of(0xFFFF0000u)))};
  }
  static SN_LANES __m256i places() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static SN_LANES __m256i placed(__m256i words) { return words; }
  static SN_LANES __m256i fours() { return _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7); }
  static constexpr int64_t lane(int64_t element) { return element; }
};

// Extremes of raw words, per lane. Magnitudes of floats of equal sign order like unsigned words; as
// signed words, negative ones come first. So the least float is the greatest unsigned word if its
// sign is set, else the least; the greatest is the greatest signed word unless its sign is set.
template <Floats kind>
struct Reach {
  static constexpr uint32_t kSign = kind == kFloats ? 0x80000000u : 0x80008000u;
  __m256i high, low, up, down;

  SN_LANES Reach() : high(all_of(kSign)), low(all_of(~kSign)), up(all_of(0)), down(all_of(~0u)) {}

  SN_LANES void add(__m256i words) {
    if constexpr (kind == kFloats) {
      high = _mm256_max_epi32(high, words);
      low = _mm256_min_epi32(low, words);
      up = _mm256_max_epu32(up, words);
      down = _mm256_min_epu32(down, words);
    } else {
      high = _mm256_max_epi16(high, words);
      low = _mm256_min_epi16(low, words);
      up = _mm256_max_epu16(up, words);
      down = _mm256_min_epu16(down, words);
    }
  }
  // All ones in lanes whose sign is set.
  static SN_LANES __m256i signs(__m256i words) {
    return kind == kFloats ? _mm256_srai_epi32(words, 31) : _mm256_srai_epi16(words, 15);
  }
  static SN_LANES __m256i equal(__m256i a, __m256i b) {
    return kind == kFloats ? _mm256_cmpeq_epi32(a, b) : _mm256_cmpeq_epi16(a, b);
  }
  SN_LANES __m256i least() const { return _mm256_blendv_epi8(down, up, signs(up)); }
  SN_LANES __m256i greatest() const { return _mm256_blendv_epi8(high, low, signs(high)); }
  SN_LANES __m256i zeros() const {
    return _mm256_or_si256(equal(down, _mm256_setzero_si256()), equal(low, all_of(kSign)));
  }
  static SN_LANES __m256i far(__m256i words) {
    constexpr uint32_t most = kind == kFloats ? kUnfit - 1
                              : kind == kHalf ? 0x7BFF7BFFu
                                              : ((kUnfit >> 16) - 1) * 0x10001u;
    const __m256i it = _mm256_and_si256(words, all_of(~kSign));
    return kind == kFloats ? _mm256_cmpgt_epi32(it, all_of(most))
                           : _mm256_cmpgt_epi16(it, all_of(most));
  }
  SN_LANES bool fits() const {
    const __m256i some = _mm256_or_si256(far(least()), far(greatest()));
    return _mm256_testz_si256(some, some) != 0;
  }

  // The least or the greatest of all lanes, as a float.
  template <bool most>
  static SN_LANES float one(__m256i words) {
    // Keys in the order of unsigned words, reversed if the greatest is wanted.
    const __m256i ordered = _mm256_xor_si256(words, _mm256_and_si256(signs(words), all_of(~kSign)));
    const __m256i keys = _mm256_xor_si256(ordered, all_of(most ? ~kSign : kSign));
    const __m128i half = _mm256_castsi256_si128(keys), other = _mm256_extracti128_si256(keys, 1);
    uint32_t word;
    if constexpr (kind == kFloats) {
      __m128i least = _mm_min_epu32(half, other);
      least = _mm_min_epu32(least, _mm_shuffle_epi32(least, 0x4E));
      least = _mm_min_epu32(least, _mm_shuffle_epi32(least, 0xB1));
      word = static_cast<uint32_t>(_mm_cvtsi128_si32(least));
    } else {
      const __m128i least = _mm_minpos_epu16(_mm_min_epu16(half, other));
      word = static_cast<uint32_t>(_mm_cvtsi128_si32(least)) << 16;
    }
    constexpr uint32_t sign = 0x80000000u;
    word ^= most ? ~sign : sign;
    if (kind != kFloats) word &= 0xFFFF0000u;
    word ^= word & sign ? (kind == kFloats ? ~sign : 0x7FFF0000u) : 0u;
    if constexpr (kind == kHalf) return from_half(static_cast<uint16_t>(word >> 16));
    return from_bits(word);
  }
};

template <Floats kind>
SN_LANES bool range_all(const void* values, int64_t count, Extremes& seen) {
  constexpr int64_t size = kWidth<kind>, step = 32 / size;
  const auto* from = static_cast<const uint8_t*>(values);
  Reach<kind> reach;
  int64_t i = 0;
  for (; i + step <= count; i += step) reach.add(load(from + size * i));
  if (i < count && count >= step) {
    reach.add(load(from + size * (count - step)));
  } else if (i < count) {
    uint8_t few[32];
    for (int64_t j = 0; j < step; ++j)
      std::memcpy(few + size * j, from + size * std::min(j, count - 1), static_cast<size_t>(size));
    reach.add(load(few));
  }
  if (!reach.fits()) return false;
  const __m256i zeros = reach.zeros();
  seen.low = Reach<kind>::template one<false>(reach.least());
  seen.high = Reach<kind>::template one<true>(reach.greatest());
  seen.zero = _mm256_testz_si256(zeros, zeros) == 0;
  seen.fits = count;
  return true;
}

SN_LANES __m256 one_of(__m256 mask, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, mask); }

// choose() for eight groups, except for steps beyond `cap`.
struct Grids8 {
  __m256 base, step;

  SN_LANES Grids8(__m256 low, __m256 high, __m256 zero, int levels) {
    const __m256 none = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
    const __m256 top = _mm256_set1_ps(static_cast<float>(levels));
    const __m256 depth = none - low, span = high - low;
    const __m256 negative = _mm256_cmp_ps(low, none, _CMP_LT_OQ);
    const __m256 lattice = _mm256_and_ps(zero, negative);
    const __m256 both = _mm256_and_ps(lattice, _mm256_cmp_ps(high, none, _CMP_GT_OQ));
    __m256 below = top;
    step = one_of(lattice, depth, span) / top;
    if (_mm256_movemask_ps(both) && levels == 1) {
      const __m256 deep = _mm256_cmp_ps(depth, high, _CMP_GT_OQ);
      below = one_of(both, _mm256_and_ps(deep, one), below);
      step = one_of(both, one_of(deep, depth, high), step);
    } else if (_mm256_movemask_ps(both)) {
      const __m256 last = top - one, share = _mm256_floor_ps(top * depth / span);
      const __m256 a = _mm256_min_ps(_mm256_max_ps(share, one), last);
      const __m256 b = _mm256_min_ps(_mm256_max_ps(share + one, one), last);
      const __m256 step_a = _mm256_max_ps(depth / a, high / (top - a));
      const __m256 step_b = _mm256_max_ps(depth / b, high / (top - b));
      const __m256 first = _mm256_cmp_ps(step_a, step_b, _CMP_LE_OQ);
      below = one_of(both, one_of(first, a, b), below);
      step = one_of(both, _mm256_min_ps(step_a, step_b), step);
    }
    const __m256i upper = _mm256_and_si256(
        _mm256_add_epi32(_mm256_castps_si256(step), all_of(0xFFFF)), all_of(0xFFFF0000u));
    const __m256 finest = _mm256_castsi256_ps(all_of(kFinest << 16));
    step = _mm256_max_ps(_mm256_castsi256_ps(upper), finest);
    base = one_of(lattice, _mm256_xor_ps(below * step, _mm256_set1_ps(-0.0f)), low);
  }
};

SN_LANES void grids_all(const Extremes* seen, int count, int levels, float cap, Place* places) {
  float low[8] = {}, high[8] = {}, base[8], step[8];
  int32_t zero[8] = {};
  for (int i = 0; i < count; ++i) {
    low[i] = seen[i].low;
    high[i] = seen[i].high;
    zero[i] = -seen[i].zero;
  }
  const Grids8 grids(_mm256_loadu_ps(low), _mm256_loadu_ps(high), _mm256_castsi256_ps(load(zero)),
                     levels);
  _mm256_storeu_ps(base, grids.base);
  _mm256_storeu_ps(step, grids.step);
  for (int i = 0; i < count; ++i)
    places[i] = step[i] <= cap ? Place{base[i], step[i]} : choose(seen[i], levels, cap);
}

template <int bits>
SN_LANES __m256i folded(__m256i x) {
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, bits));
}

SN_LANES __m256i times(__m256i x, uint32_t factor) { return _mm256_mullo_epi32(x, all_of(factor)); }

// random_word() after the first sum, except for its last line.
template <int number>
SN_LANES void mix(__m256i* x, __m256i other) {
  for (int k = 0; k < number; ++k)
    x[k] = times(folded<16>(_mm256_xor_si256(x[k], other)), kFirst);
  for (int k = 0; k < number; ++k) x[k] = times(folded<15>(x[k]), kSecond);
}

// Extracts from mix()'s words the random numbers, with as many bits as a fraction: those of eight
// elements at even places, and of the elements after them.
template <int bits>
SN_LANES Words16 luck_of(__m256i mixed) {
  const __m256i upper = _mm256_srli_epi32(mixed, 16), word = _mm256_xor_si256(mixed, upper);
  if constexpr (fraction_of(bits) == 16) return {_mm256_and_si256(word, all_of(0xFFFF)), upper};
  return {_mm256_and_si256(_mm256_srli_epi32(word, 1), all_of(0x7FFF)),
          _mm256_srli_epi32(mixed, 17)};
}

// The random words of eight pairs of a row, in the lanes of Order::places().
struct Row {
  __m256i at, step, other;  // the first product and sum are computed incrementally

  SN_LANES Row(const Luck& luck, __m256i places)
      : step(all_of(8 * kWeyl)), other(all_of(luck.other)) {
    at = _mm256_add_epi32(times(_mm256_add_epi32(places, all_of(luck.pair)), kWeyl),
                          all_of(luck.key));
  }

  // Interleaves several vectors, as each is a long chain of dependent instructions.
  template <int number>
  SN_LANES void next(__m256i* x) {
    for (int k = 0; k < number; ++k) {
      x[k] = at;
      at = _mm256_add_epi32(at, step);
    }
    mix<number>(x, other);
  }
};

struct Spot {
  __m256 base, inverse;  // the inverse of a step, times the scale of the fraction

  template <int bits>
  static SN_LANES Spot of(__m256 base, __m256 step) {
    return {base, _mm256_set1_ps(1.0f) / step * _mm256_set1_ps(1 << fraction_of(bits))};
  }
  SN_LANES __m256i steps(__m256 values) const {
    return _mm256_cvtps_epi32((values - base) * inverse);
  }
};

// The integer parts of two vectors, in the lower and the upper halves of lanes.
template <int bits>
SN_LANES __m256i codes_of(__m256i lower, __m256i upper) {
  constexpr int fraction = fraction_of(bits);
  return _mm256_blend_epi16(_mm256_srli_epi32(lower, fraction),
                            _mm256_slli_epi32(upper, 16 - fraction), 0xAA);
}

// The distances from the point below, in 1/256, likewise; 0 and 256 both become 0, or contribute 0.
template <int bits>
SN_LANES __m256i ways_of(__m256i lower, __m256i upper) {
  constexpr int rest = fraction_of(bits) - 8;
  const __m256i half = all_of(1u << (rest - 1));
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_add_epi32(lower, half), rest),
                            _mm256_slli_epi32(_mm256_add_epi32(upper, half), 16 - rest), 0xAA);
}

SN_LANES __m256i spread_of(__m256i ways) {
  return _mm256_madd_epi16(ways, _mm256_sub_epi16(_mm256_set1_epi16(256), ways));
}

// Packs 32 codes of one byte each.
template <int bits>
SN_LANES void squeeze(__m256i codes, uint8_t* to) {
  if constexpr (bits == 8) {
    store(to, codes);
  } else if constexpr (bits == 4) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const __m256i bytes = _mm256_packus_epi16(pairs, pairs);
    store_half(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0x08)));
  } else if constexpr (bits == 2) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0401));
    const __m256i fours = _mm256_madd_epi16(pairs, all_of(0x00100001));
    const __m256i bytes = _mm256_shuffle_epi8(fours, all_of(0x0C080400));
    const __m128i eight = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes),
                                             _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), eight);
  } else {
    const int word = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7));
    std::memcpy(to, &word, 4);
  }
}

}  // namespace
}  // namespace sn
