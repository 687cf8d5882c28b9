// Rounding sixteen elements at a time. One source for two instruction sets: the vectors have 256 bits
// in both, as AVX-512 gives these loops more registers and instructions, but no fewer loads.
#include "groups_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

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

// How sixteen elements lie in two vectors. bfloat16 in the order in which instructions that work on
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
      _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_set_m128i(b, a));
    }
  }
  static SN_LANES Floats16 halves(const uint16_t* from) {
    const __m256i a = _mm256_cvtepu16_epi32(load_half(from));
    const __m256i b = _mm256_cvtepu16_epi32(load_half(from + 8));
    return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
  }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    const __m128i codes = load_half(from);
    const __m256i a = _mm256_cvtepu8_epi32(codes);
    const __m256i b = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes));
    return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
  }
  // [0-3, 8-11, 4-7, 12-15] in order
  static SN_LANES __m128i ordered(__m128i packed) { return _mm_shuffle_epi32(packed, 0xD8); }
};

template <>
struct Order<Floats::kBrain> {
  static SN_LANES Floats16 floats(__m256i words) {
    const __m256i none = _mm256_setzero_si256();
    return {_mm256_cvtepi32_ps(_mm256_unpacklo_epi16(words, none)),
            _mm256_cvtepi32_ps(_mm256_unpackhi_epi16(words, none))};
  }
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
    const __m256i words = _mm256_packus_epi32(rounded(it.a), rounded(it.b));
    _mm256_storeu_si256(static_cast<__m256i*>(to), words);
  }
  static SN_LANES Floats16 halves(const uint16_t* from) { return floats(load(from)); }
  static SN_LANES Floats16 bytes(const uint8_t* from) {
    return floats(_mm256_cvtepu8_epi16(load_half(from)));
  }
  static SN_LANES __m128i ordered(__m128i packed) { return packed; }
};

// Sixteen codes, in order, and what their spread adds to eight sums; see quantise_run().
template <Floats kind, bool look>
SN_LANES __m128i codes_of(const void* values, const uint16_t* luck, __m256 base, __m256 step,
                          __m256 top, __m256i wanted, __m256i& sums) {
  const Floats16 x = Order<kind>::read(values), chance = Order<kind>::halves(luck);
  const __m256 none = _mm256_setzero_ps(), part = _mm256_set1_ps(0x1p-16f);
  const __m256 a = _mm256_min_ps(
      _mm256_max_ps(_mm256_div_ps(_mm256_sub_ps(x.a, base), step), none), top);
  const __m256 b = _mm256_min_ps(
      _mm256_max_ps(_mm256_div_ps(_mm256_sub_ps(x.b, base), step), none), top);
  if constexpr (look) {
    // Products with powers of two are exact, so these are the bits of two roundings. Modulo 256 a
    // whole number of steps is 0, and 256, which stands for none as well, too.
    const __m256 scale = _mm256_set1_ps(256.0f), half = _mm256_set1_ps(0.5f);
    const __m256i whole = _mm256_packus_epi32(_mm256_cvttps_epi32(_mm256_fmadd_ps(a, scale, half)),
                                              _mm256_cvttps_epi32(_mm256_fmadd_ps(b, scale, half)));
    const __m256i way = _mm256_and_si256(_mm256_and_si256(whole, _mm256_set1_epi16(255)), wanted);
    const __m256i back = _mm256_sub_epi16(_mm256_set1_epi16(256), way);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(way, back));
  }
  const __m256i codes = _mm256_packus_epi32(_mm256_cvttps_epi32(_mm256_fmadd_ps(chance.a, part, a)),
                                            _mm256_cvttps_epi32(_mm256_fmadd_ps(chance.b, part, b)));
  return Order<kind>::ordered(
      _mm_packus_epi16(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
}

template <Floats kind, bool look>
SN_LANES void round_all(const void* values, int64_t count, const Place& place, float top_code,
                        const uint16_t* luck, uint8_t* codes, uint32_t* spread) {
  constexpr int64_t size = kind == Floats::kSingle ? 4 : 2;
  const auto* from = static_cast<const uint8_t*>(values);
  const __m256 base = _mm256_set1_ps(place.base), step = _mm256_set1_ps(place.step);
  const __m256 top = _mm256_set1_ps(top_code);
  const __m256i all = _mm256_set1_epi32(-1);
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(codes + i),
        codes_of<kind, look>(from + size * i, luck + i, base, step, top, all, sums));
  if (i < count) {
    const auto rest = static_cast<size_t>(count - i);
    uint8_t few[kLanes * size] = {}, made[kLanes];
    uint16_t chance[kLanes] = {}, on[kLanes] = {}, given[kLanes];
    std::memcpy(few, from + size * i, rest * size);
    std::memcpy(chance, luck + i, rest * 2);
    std::memset(on, 0xFF, rest * 2);
    // As codes_of() packs what it counts: bfloat16 in order, others in quarters.
    for (int64_t j = 0; j < kLanes; ++j)
      given[j] = on[kind == Floats::kBrain || j < 4 || j >= 12 ? j : j ^ 12];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(made),
                     codes_of<kind, look>(few, chance, base, step, top, load(given), sums));
    std::memcpy(codes + i, made, rest);
  }
  if constexpr (look) {
    uint32_t eight[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(eight), sums);
    for (const uint32_t sum : eight) *spread += sum;
  }
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
                                                 const Place& place, float top,
                                                 const uint16_t* luck, uint8_t* codes,
                                                 uint32_t* spread) {
  round_all<kind, look>(values, count, place, top, luck, codes, spread);
}

template <Floats kind, bool look>
__attribute__((target(SN_AVX512))) void round_avx512(const void* values, int64_t count,
                                                     const Place& place, float top,
                                                     const uint16_t* luck, uint8_t* codes,
                                                     uint32_t* spread) {
  round_all<kind, look>(values, count, place, top, luck, codes, spread);
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
