// Rounding sixteen elements at a time. One source for two instruction sets: the vectors have 256 bits
// in both, as AVX-512 gives these loops more registers and instructions, but no fewer loads.
#include "groups_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define SN_AVX2 "avx2,fma,f16c"
#define SN_AVX512 SN_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=256"
#define SN_LANES __attribute__((always_inline, target(SN_AVX2))) inline

namespace sn {
namespace {

constexpr int64_t kLanes = 16;

struct Floats16 {
  __m256 a, b;
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

// How sixteen elements lie in two vectors: float32 and float16 in order; bfloat16 as instructions on
// halves of 128 bits take them apart and put them together: 0-3 and 8-11, 4-7 and 12-15.
template <Floats kind>
struct Order {
  static SN_LANES Floats16 read(const void* from) {
    if constexpr (kind == Floats::kSingle) {
      const auto* values = static_cast<const float*>(from);
      return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
    } else {
      const auto* values = static_cast<const uint16_t*>(from);
      return {_mm256_cvtph_ps(load_half(values)), _mm256_cvtph_ps(load_half(values + 8))};
    }
  }
  static SN_LANES void write(const Floats16& it, void* to) {
    if constexpr (kind == Floats::kSingle) {
      _mm256_storeu_ps(static_cast<float*>(to), it.a);
      _mm256_storeu_ps(static_cast<float*>(to) + 8, it.b);
    } else {
      const __m128i a = _mm256_cvtps_ph(it.a, _MM_FROUND_TO_NEAREST_INT);
      const __m128i b = _mm256_cvtps_ph(it.b, _MM_FROUND_TO_NEAREST_INT);
      store(to, _mm256_set_m128i(b, a));
    }
  }
  // Which of eight words of two elements each take_apart() wants where.
  static SN_LANES __m256i places() { return _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7); }
  static SN_LANES __m256i placed(__m256i words) { return _mm256_permute4x64_epi64(words, 0xD8); }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    const __m128i codes = load_half(from);
    const __m256i a = _mm256_cvtepu8_epi32(codes);
    const __m256i b = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes));
    return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
  }
  // [0-3, 8-11, 4-7, 12-15] in order
  static SN_LANES __m128i ordered(__m128i packed) { return _mm_shuffle_epi32(packed, 0xD8); }
};

// Sixteen numbers of 16 bits as floats.
SN_LANES Floats16 take_apart(__m256i words) {
  const __m256i none = _mm256_setzero_si256();
  return {_mm256_cvtepi32_ps(_mm256_unpacklo_epi16(words, none)),
          _mm256_cvtepi32_ps(_mm256_unpackhi_epi16(words, none))};
}

template <>
struct Order<Floats::kBrain> {
  static SN_LANES Floats16 read(const void* from) {
    const __m256i words = load(from), none = _mm256_setzero_si256();
    return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, words)),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, words))};
  }
  static SN_LANES __m256i rounded(__m256 value) {  // to_brain() of numbers and infinities
    const __m256i raw = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    return _mm256_srli_epi32(_mm256_add_epi32(raw, half), 16);
  }
  static SN_LANES void write(const Floats16& it, void* to) {
    store(to, _mm256_packus_epi32(rounded(it.a), rounded(it.b)));
  }
  static SN_LANES __m256i places() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static SN_LANES __m256i placed(__m256i words) { return words; }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    return take_apart(_mm256_cvtepu8_epi16(load_half(from)));
  }
  static SN_LANES __m128i ordered(__m128i packed) { return packed; }
};

template <int bits>
SN_LANES __m256i folded(__m256i x) {
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, bits));
}

SN_LANES __m256i times(__m256i x, uint32_t factor) {
  return _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int32_t>(factor)));
}

// Random words, eight at a time; see random_word().
struct Words {
  __m256i at, step, other;  // the first product and sum are taken from one to the next

  SN_LANES Words(const Luck& luck, __m256i places)
      : step(_mm256_set1_epi32(static_cast<int32_t>(8 * 0x9E3779B9u))),
        other(_mm256_set1_epi32(static_cast<int32_t>(luck.other))) {
    const __m256i pairs =
        _mm256_add_epi32(places, _mm256_set1_epi32(static_cast<int32_t>(luck.pair)));
    at = _mm256_add_epi32(times(pairs, 0x9E3779B9u),
                          _mm256_set1_epi32(static_cast<int32_t>(luck.key)));
  }

  // Several vectors side by side: each is a long chain of instructions that wait for one another.
  template <int number>
  SN_LANES void next(__m256i* x) {
    for (int k = 0; k < number; ++k) {
      x[k] = at;
      at = _mm256_add_epi32(at, step);
    }
    for (int k = 0; k < number; ++k) x[k] = times(folded<17>(x[k]), 0xED5AD4BBu);
    for (int k = 0; k < number; ++k)
      x[k] = times(_mm256_add_epi32(folded<11>(x[k]), other), 0xAC4C1B51u);
    for (int k = 0; k < number; ++k) x[k] = times(folded<15>(x[k]), 0x31848BABu);
    for (int k = 0; k < number; ++k) x[k] = folded<14>(x[k]);
  }
};

struct Spot {
  __m256 base, step, inverse;
};

// Codes of `number` times sixteen values, in order, and what their spread adds to eight sums.
//
// How many steps a value lies above the lowest point is rounded as a quotient is, though a product
// and a correction take less time: true of all float32 and steps, which have eight significant bits
// (all 2**30 pairs of mantissas were tried), unless the rest underflows: see kFine.
//
// quantise_run() then keeps it within the grid. What roundings add beyond, three units in the last
// place at most, is cut off below; and has no code above, as codes of 8 bits end at 255 here, too.
// Products with powers of two are exact, so fused ones change nothing.
template <Floats kind, bool look, int number>
SN_LANES void codes_of(const uint8_t* values, const __m256i* words, const Spot& spot, __m256i wanted,
                       __m256i& sums, __m128i* made) {
  constexpr int64_t bytes = kLanes * (kind == Floats::kSingle ? 4 : 2);
  const __m256 part = _mm256_set1_ps(0x1p-16f);
  __m256 steps[2 * number], chance[2 * number];
  for (int k = 0; k < number; ++k) {
    const Floats16 x = Order<kind>::read(values + bytes * k);
    steps[2 * k] = _mm256_sub_ps(x.a, spot.base);
    steps[2 * k + 1] = _mm256_sub_ps(x.b, spot.base);
  }
  for (__m256& above : steps) {
    const __m256 near = _mm256_mul_ps(above, spot.inverse);
    above = _mm256_fmadd_ps(_mm256_fnmadd_ps(near, spot.step, above), spot.inverse, near);
  }
  for (int k = 0; k < number; ++k) {
    const Floats16 x = take_apart(words[k]);
    chance[2 * k] = x.a;
    chance[2 * k + 1] = x.b;
  }
  if constexpr (look) {
    // Modulo 256 a whole number of steps is 0, as is 256, and both count for nothing.
    const __m256 scale = _mm256_set1_ps(256.0f), half = _mm256_set1_ps(0.5f);
    for (int k = 0; k < number; ++k) {
      const __m256i whole = _mm256_packus_epi32(
          _mm256_cvttps_epi32(_mm256_fmadd_ps(steps[2 * k], scale, half)),
          _mm256_cvttps_epi32(_mm256_fmadd_ps(steps[2 * k + 1], scale, half)));
      const __m256i way = _mm256_and_si256(whole, wanted);
      const __m256i back = _mm256_sub_epi16(_mm256_set1_epi16(256), way);
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(way, back));
    }
  }
  for (int k = 0; k < number; ++k) {
    const __m256i codes = _mm256_packus_epi32(
        _mm256_cvttps_epi32(_mm256_fmadd_ps(chance[2 * k], part, steps[2 * k])),
        _mm256_cvttps_epi32(_mm256_fmadd_ps(chance[2 * k + 1], part, steps[2 * k + 1])));
    made[k] = Order<kind>::ordered(
        _mm_packus_epi16(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
  }
}

// With `odd`, the words are drawn first, as a vector of numbers begins in the middle of one.
template <Floats kind, bool look, bool odd>
SN_LANES void round_run(const void* values, int64_t count, const Place& place, const Luck& luck,
                        uint8_t* codes, uint32_t* spread) {
  constexpr int64_t size = kind == Floats::kSingle ? 4 : 2;
  constexpr int side = 2;  // vectors side by side
  const auto* from = static_cast<const uint8_t*>(values);
  const Spot spot = {_mm256_set1_ps(place.base), _mm256_set1_ps(place.step),
                     _mm256_set1_ps(1.0f / place.step)};
  Words source(luck, odd ? Order<Floats::kBrain>::places() : Order<kind>::places());
  [[maybe_unused]] uint32_t drawn[kRun / 2 + side * kLanes];
  if constexpr (odd)
    for (int64_t i = 0; i < count / 2 + 1; i += side * kLanes / 2) {
      __m256i words[side];
      source.next<side>(words);
      for (int k = 0; k < side; ++k) store(drawn + i + k * kLanes / 2, words[k]);
    }
  __m256i sums = _mm256_setzero_si256(), words[side];
  __m128i made[side];
  const __m256i all = _mm256_set1_epi16(255);
  const auto* numbers = reinterpret_cast<const uint16_t*>(drawn) + 1;
  int64_t i = 0;
  for (; i + side * kLanes <= count; i += side * kLanes) {
    if constexpr (odd)
      for (int k = 0; k < side; ++k)
        words[k] = Order<kind>::placed(load(numbers + i + k * kLanes));
    else
      source.next<side>(words);
    codes_of<kind, look, side>(from + size * i, words, spot, all, sums, made);
    for (int k = 0; k < side; ++k)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i + k * kLanes), made[k]);
  }
  for (; i < count; i += kLanes) {
    const int64_t rest = std::min(count - i, kLanes);
    uint8_t few[kLanes * size] = {}, bytes[kLanes];
    uint16_t wanted[kLanes] = {};
    std::memcpy(few, from + size * i, static_cast<size_t>(rest * size));
    // As codes_of() packs what it counts: bfloat16 in order, others in quarters.
    for (int64_t j = 0; j < kLanes; ++j)
      if ((kind == Floats::kBrain || j < 4 || j >= 12 ? j : j ^ 12) < rest) wanted[j] = 255;
    if constexpr (odd)
      words[0] = Order<kind>::placed(load(numbers + i));
    else
      source.next<1>(words);
    codes_of<kind, look, 1>(few, words, spot, load(wanted), sums, made);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), made[0]);
    std::memcpy(codes + i, bytes, static_cast<size_t>(rest));
  }
  if constexpr (look) {
    uint32_t eight[8];
    store(eight, sums);
    for (const uint32_t sum : eight) *spread += sum;
  }
}

template <Floats kind, bool look>
SN_LANES void round_all(const void* values, int64_t count, const Place& place, const Luck& luck,
                        uint8_t* codes, uint32_t* spread) {
  if (luck.odd)
    round_run<kind, look, true>(values, count, place, luck, codes, spread);
  else
    round_run<kind, look, false>(values, count, place, luck, codes, spread);
}

template <Floats kind>
SN_LANES void value_some(const uint8_t* codes, __m256 base, __m256 step, void* values) {
  const Floats16 code = Order<kind>::bytes(codes);
  Order<kind>::write({_mm256_add_ps(base, _mm256_mul_ps(code.a, step)),
                      _mm256_add_ps(base, _mm256_mul_ps(code.b, step))},
                     values);
}

template <Floats kind>
SN_LANES void value_all(const uint8_t* codes, int64_t count, const Place& place, void* values) {
  constexpr int64_t size = kind == Floats::kSingle ? 4 : 2;
  auto* to = static_cast<uint8_t*>(values);
  const __m256 base = _mm256_set1_ps(place.base), step = _mm256_set1_ps(place.step);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) value_some<kind>(codes + i, base, step, to + size * i);
  if (i < count) {
    uint8_t few[kLanes] = {}, made[kLanes * size];
    std::memcpy(few, codes + i, static_cast<size_t>(count - i));
    value_some<kind>(few, base, step, made);
    std::memcpy(to + size * i, made, static_cast<size_t>((count - i) * size));
  }
}

template <Floats kind, bool look>
__attribute__((target(SN_AVX2))) void round_avx2(const void* values, int64_t count,
                                                 const Place& place, float,
                                                 const Luck& luck, uint8_t* codes,
                                                 uint32_t* spread) {
  round_all<kind, look>(values, count, place, luck, codes, spread);
}

template <Floats kind, bool look>
__attribute__((target(SN_AVX512))) void round_avx512(const void* values, int64_t count,
                                                     const Place& place, float,
                                                     const Luck& luck, uint8_t* codes,
                                                     uint32_t* spread) {
  round_all<kind, look>(values, count, place, luck, codes, spread);
}

template <Floats kind>
__attribute__((target(SN_AVX2))) void value_avx2(const uint8_t* codes, int64_t count,
                                                 const Place& place, void* values) {
  value_all<kind>(codes, count, place, values);
}

template <Floats kind>
__attribute__((target(SN_AVX512))) void value_avx512(const uint8_t* codes, int64_t count,
                                                     const Place& place, void* values) {
  value_all<kind>(codes, count, place, values);
}

constexpr Floats kFloats = Floats::kSingle, kHalf = Floats::kHalf, kBrain = Floats::kBrain;
constexpr Loops kAvx2 = {
    {round_avx2<kFloats, false>, round_avx2<kHalf, false>, round_avx2<kBrain, false>},
    {round_avx2<kFloats, true>, round_avx2<kHalf, true>, round_avx2<kBrain, true>},
    {value_avx2<kFloats>, value_avx2<kHalf>, value_avx2<kBrain>}};
constexpr Loops kAvx512 = {
    {round_avx512<kFloats, false>, round_avx512<kHalf, false>, round_avx512<kBrain, false>},
    {round_avx512<kFloats, true>, round_avx512<kHalf, true>, round_avx512<kBrain, true>},
    {value_avx512<kFloats>, value_avx512<kHalf>, value_avx512<kBrain>}};

}  // namespace

const Loops* avx2_loops() {
  static const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c");
  return runs ? &kAvx2 : nullptr;
}

const Loops* avx512_loops() {
  static const bool runs =
      avx2_loops() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return runs ? &kAvx512 : nullptr;
}

}  // namespace sn

#else

namespace sn {
const Loops* avx2_loops() { return nullptr; }
const Loops* avx512_loops() { return nullptr; }
}  // namespace sn

#endif
