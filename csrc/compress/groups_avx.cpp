// Rounding sixteen elements at a time. One source for two instruction sets, both with vectors of
// 256 bits, as AVX-512 gives these loops more registers and instructions, but no fewer loads.
#include "groups_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "groups_lanes.h"

#define SN_AVX512 SN_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=256"

namespace sn {
namespace {

// Rounds 32 elements to codes, in pairs, and adds their spread to eight sums. No code exceeds the
// grid except with 8 bits, where packing to bytes saturates at 255.
template <Floats kind, int bits, bool look>
SN_LANES void round_some(const uint8_t* values, const __m256i* mixed, const Spot& spot,
                         const __m256i* wanted, __m256i& sums, __m256i* codes) {
  Words16 steps[2];
  for (int k = 0; k < 2; ++k) {
    const Floats16 x = Order<kind>::pairs(values + kLanes * kWidth<kind> * k);
    steps[k] = {spot.steps(x.a), spot.steps(x.b)};
  }
  if constexpr (look)
    for (int k = 0; k < 2; ++k) {
      const __m256i ways = ways_of<bits>(steps[k].a, steps[k].b);
      sums = _mm256_add_epi32(sums, spread_of(_mm256_and_si256(ways, wanted[k])));
    }
  for (int k = 0; k < 2; ++k) {
    const Words16 luck = luck_of<bits>(mixed[k]);
    codes[k] = codes_of<bits>(_mm256_add_epi32(steps[k].a, luck.a),
                              _mm256_add_epi32(steps[k].b, luck.b));
  }
}

// With `odd`, the words are drawn first, as a vector of numbers begins in the middle of a word.
template <Floats kind, int bits, bool look, bool odd>
SN_LANES void round_run(const void* values, int64_t count, const Place& place, const Luck& luck,
                        uint8_t* codes, uint32_t* spread) {
  constexpr int64_t size = kWidth<kind>, most = 2 * kLanes;
  const auto* from = static_cast<const uint8_t*>(values);
  const Spot spot = Spot::of<bits>(_mm256_set1_ps(place.base), _mm256_set1_ps(place.step));
  Row row(luck, odd ? Order<kBrain>::places() : Order<kind>::places());
  [[maybe_unused]] uint32_t drawn[kRun / 2 + most];
  [[maybe_unused]] const auto* numbers = reinterpret_cast<const uint16_t*>(drawn) + 1;
  __m256i mixed[2], made[2], sums = _mm256_setzero_si256();
  if constexpr (odd)
    for (int64_t i = 0; i < count / 2 + 1; i += most / 2) {
      row.next<2>(mixed);
      for (int k = 0; k < 2; ++k) store(drawn + i + k * kLanes / 2, folded<16>(mixed[k]));
    }
  const __m256i byte = _mm256_set1_epi16(255), fours = Order<kind>::fours();
  __m256i wanted[2] = {byte, byte};
  int64_t i = 0;
  for (; i < count; i += most) {
    if constexpr (odd)  // folding is its own inverse
      for (int k = 0; k < 2; ++k)
        mixed[k] = folded<16>(Order<kind>::placed(load(numbers + i + k * kLanes)));
    else
      row.next<2>(mixed);
    if (i + most > count) break;
    round_some<kind, bits, look>(from + size * i, mixed, spot, wanted, sums, made);
    squeeze<bits>(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(made[0], made[1]), fours),
                  codes + i * bits / 8);
  }
  if (i < count) {
    const int64_t rest = count - i;
    uint8_t few[most * size] = {}, packed[most];
    uint16_t lanes[most] = {};
    std::memcpy(few, from + size * i, static_cast<size_t>(rest * size));
    for (int64_t j = 0; j < rest; ++j)
      lanes[j / kLanes * kLanes + Order<kind>::lane(j % kLanes)] = 255;
    for (int k = 0; k < 2; ++k) wanted[k] = load(lanes + k * kLanes);
    round_some<kind, bits, look>(few, mixed, spot, wanted, sums, made);
    for (int k = 0; k < 2; ++k)
      made[k] = _mm256_and_si256(_mm256_min_epi16(made[k], byte), wanted[k]);
    squeeze<bits>(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(made[0], made[1]), fours), packed);
    std::memcpy(codes + i * bits / 8, packed, static_cast<size_t>((rest * bits + 7) / 8));
  }
  if constexpr (look) {
    uint32_t eight[8];
    store(eight, sums);
    for (const uint32_t sum : eight) *spread += sum;
  }
}

template <Floats kind, int bits, bool look>
SN_LANES void round_all(const void* values, int64_t count, const Place& place, const Luck& luck,
                        uint8_t* codes, uint32_t* spread) {
  if (luck.odd)
    round_run<kind, bits, look, true>(values, count, place, luck, codes, spread);
  else
    round_run<kind, bits, look, false>(values, count, place, luck, codes, spread);
}

template <Floats kind>
SN_LANES void value_some(const uint8_t* codes, __m256 base, __m256 step, void* values) {
  const Floats16 code = Order<kind>::bytes(codes);
  Order<kind>::write({base + code.a * step, base + code.b * step}, values);
}

template <Floats kind>
SN_LANES void value_all(const uint8_t* codes, int64_t count, const Place& place, void* values) {
  constexpr int64_t size = kWidth<kind>;
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

// The grids of sixteen interleaved groups; false if an element does not fit, or a step is too wide.
template <Floats kind>
SN_LANES bool grids_beside(const Reach<kind>* reach, int levels, float cap, Floats16& base,
                           Floats16& step) {
  constexpr int parts = kind == kFloats ? 2 : 1;
  uint8_t low[64], high[64], zero[64];
  for (int k = 0; k < parts; ++k) {
    if (!reach[k].fits()) return false;
    store(low + 32 * k, reach[k].least());
    store(high + 32 * k, reach[k].greatest());
    store(zero + 32 * k, reach[k].zeros());
  }
  Words16 none;
  if constexpr (kind == kFloats)
    none = {load(zero), load(zero + 32)};
  else if constexpr (kind == kBrain)
    none = {_mm256_unpacklo_epi16(load(zero), load(zero)),
            _mm256_unpackhi_epi16(load(zero), load(zero))};
  else
    none = {_mm256_cvtepi16_epi32(load_half(zero)), _mm256_cvtepi16_epi32(load_half(zero + 16))};
  const Floats16 least = Order<kind>::read(low), most = Order<kind>::read(high);
  const Grids8 a(least.a, most.a, _mm256_castsi256_ps(none.a), levels);
  const Grids8 b(least.b, most.b, _mm256_castsi256_ps(none.b), levels);
  base = {a.base, b.base};
  step = {a.step, b.step};
  const __m256 widest = _mm256_max_ps(a.step, b.step);
  return !_mm256_movemask_ps(_mm256_cmp_ps(widest, _mm256_set1_ps(cap), _CMP_GE_OQ));
}

SN_LANES Floats16 as_floats(const Words16& it) {
  return {_mm256_castsi256_ps(it.a), _mm256_castsi256_ps(it.b)};
}

template <Floats kind>
SN_LANES void keep_floats(const Floats16& it, float* to) {
  uint32_t words[kLanes];
  Order<kind>::keep({_mm256_castps_si256(it.a), _mm256_castps_si256(it.b)}, words);
  std::memcpy(to, words, sizeof words);
}

// Rounds four elements of each of eight groups, one group per lane: two neighbours, and the two
// half a word of codes further on, whose codes share their lanes. `mixed`: words of either pair.
template <int bits, bool look>
SN_LANES void round_beside(const __m256* x, __m256i* mixed, __m256i other, const Spot& spot,
                           int shift, __m256i& made, __m256i& sums) {
  mix<2>(mixed, other);
  const Words16 near = luck_of<bits>(mixed[0]), away = luck_of<bits>(mixed[1]);
  __m256i steps[4];
  for (int j = 0; j < 4; ++j) steps[j] = spot.steps(x[j]);
  if constexpr (look)
    for (int j = 0; j < 2; ++j) {
      const __m256i ways = _mm256_and_si256(ways_of<bits>(steps[j], steps[j + 2]),
                                            _mm256_set1_epi16(255));
      sums = _mm256_add_epi32(sums, spread_of(ways));
    }
  const __m256i chance[4] = {near.a, near.b, away.a, away.b};
  for (int j = 0; j < 4; ++j) steps[j] = _mm256_add_epi32(steps[j], chance[j]);
  const __m256i even = codes_of<bits>(steps[0], steps[2]), odd = codes_of<bits>(steps[1], steps[3]);
  if constexpr (bits == 8) {  // a word is complete at once; packing to bytes saturates at 255
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    made = _mm256_shuffle_epi8(_mm256_packus_epi16(even, odd), order);
  } else {
    made = _mm256_or_si256(made, _mm256_slli_epi32(even, shift));
    made = _mm256_or_si256(made, _mm256_slli_epi32(odd, shift + bits));
  }
}

// A group's codes fill words of 32 bits; words at the same place in all groups are built together.
template <Floats kind, int bits, bool look>
SN_LANES bool pack_all(const Lines<const uint8_t>& lines, const Luck* luck, float cap,
                       const Beside& to) {
  constexpr int64_t held = 32 / bits, quarter = held / 4;
  constexpr int64_t groups = kLine / kWidth<kind>;
  Reach<kind> reach[2];  // for the halves of a line
  for (int64_t i = 0; i < to.size; ++i)
    for (int k = 0; k < 2; ++k) reach[k].add(load(lines.first + lines.stride * i + 32 * k));
  for (int64_t first = 0; first < groups; first += kLanes) {
    const uint8_t* half = lines.first + first * kWidth<kind>;
    Floats16 base, step;
    if (!grids_beside<kind>(reach + first / kLanes, (1 << bits) - 1, cap, base, step)) return false;
    const Spot spots[2] = {Spot::of<bits>(base.a, step.a), Spot::of<bits>(base.b, step.b)};
    uint32_t pairs[kLanes], others[kLanes], words[kTileRun / held * kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      pairs[j] = luck[first + j].pair * kWeyl + luck[first + j].key;
      others[j] = luck[first + j].other;
    }
    const Words16 begin = Order<kind>::words(pairs), mixed_in = Order<kind>::words(others);
    __m256i at[2] = {begin.a, begin.b}, sums[2] = {all_of(0), all_of(0)};
    const __m256i other[2] = {mixed_in.a, mixed_in.b};
    for (int64_t i = 0; i < to.size; i += held) {
      __m256i made[2] = {all_of(0), all_of(0)};
      for (int64_t k = 0; k < quarter; ++k) {
        Floats16 x[4];
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t place = i + 2 * k + j % 2 + j / 2 * (held / 2);
          const uint8_t* line = half + lines.stride * place;
          if (first == 0) __builtin_prefetch(lines.next + lines.next_stride * place);
          x[j] = Order<kind>::read(line);
        }
        const int shift = 2 * bits * static_cast<int>(k);
        const __m256i near = all_of(static_cast<uint32_t>(k) * kWeyl);
        const __m256i away = all_of(static_cast<uint32_t>(k + quarter) * kWeyl);
        const __m256 a[4] = {x[0].a, x[1].a, x[2].a, x[3].a};
        const __m256 b[4] = {x[0].b, x[1].b, x[2].b, x[3].b};
        __m256i mixed_a[2] = {_mm256_add_epi32(at[0], near), _mm256_add_epi32(at[0], away)};
        __m256i mixed_b[2] = {_mm256_add_epi32(at[1], near), _mm256_add_epi32(at[1], away)};
        round_beside<bits, look>(a, mixed_a, other[0], spots[0], shift, made[0], sums[0]);
        round_beside<bits, look>(b, mixed_b, other[1], spots[1], shift, made[1], sums[1]);
      }
      const __m256i ahead = all_of(static_cast<uint32_t>(held / 2) * kWeyl);
      for (__m256i& pair : at) pair = _mm256_add_epi32(pair, ahead);
      Order<kind>::keep({made[0], made[1]}, words + i / held * kLanes);
    }
    turn_runs<4, false>(reinterpret_cast<const uint8_t*>(words), 4 * kLanes, to.size / held, kLanes,
                        to.codes + first * to.bytes, to.bytes);
    float bases[kLanes], steps[kLanes];
    keep_floats<kind>(base, bases);
    keep_floats<kind>(step, steps);
    uint32_t spread[kLanes];
    Order<kind>::keep({sums[0], sums[1]}, spread);
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t g = (first + j) * to.groups;
      to.bases[g] = bases[j];
      to.steps[g] = static_cast<uint16_t>(to_bits(steps[j]) >> 16);
      if constexpr (look) to.spread[g] = spread[j];
    }
  }
  return true;
}

template <Floats kind, int bits>
SN_LANES void unpack_all(const Beside& from, const Lines<uint8_t>& all) {
  constexpr int64_t held = 32 / bits, groups = kLine / kWidth<kind>;
  for (int64_t first = 0; first < groups; first += kLanes) {
    uint8_t* lines = all.first + first * kWidth<kind>;
    uint32_t bases[kLanes], steps[kLanes], words[kTileRun / held * kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t g = (first + j) * from.groups;
      bases[j] = to_bits(from.bases[g]);
      steps[j] = static_cast<uint32_t>(from.steps[g]) << 16;
    }
    const Floats16 base = as_floats(Order<kind>::words(bases));
    const Floats16 step = as_floats(Order<kind>::words(steps));
    turn_runs<4, false>(from.codes + first * from.bytes, from.bytes, kLanes, from.size / held,
                        reinterpret_cast<uint8_t*>(words), 4 * kLanes);
    for (int64_t i = 0; i < from.size; i += held) {
      Words16 codes = Order<kind>::words(words + i / held * kLanes);
      for (int64_t j = 0; j < held; ++j) {
        const __m256i mask = all_of((1u << bits) - 1);
        const __m256 a = _mm256_cvtepi32_ps(_mm256_and_si256(codes.a, mask));
        const __m256 b = _mm256_cvtepi32_ps(_mm256_and_si256(codes.b, mask));
        codes = {_mm256_srli_epi32(codes.a, bits), _mm256_srli_epi32(codes.b, bits)};
        Order<kind>::write({base.a + a * step.a, base.b + b * step.b}, lines + all.stride * (i + j));
        if (first == 0) __builtin_prefetch(all.next + all.next_stride * (i + j), 1);
      }
    }
  }
}

// The loops as functions compiled for one instruction set, with everything inlined.
#define SN_FORM(NAME, TARGET)                                                                       \
  struct NAME {                                                                                     \
    template <auto loop, typename Result, typename... Args>                                         \
    __attribute__((target(TARGET))) static Result in(Args... args) {                                \
      return loop(args...);                                                                         \
    }                                                                                               \
    static constexpr bool kBeside = true;                                                           \
    static constexpr GridLoop grids = in<grids_all>;                                                \
    template <Floats kind>                                                                          \
    static constexpr RangeLoop range = in<range_all<kind>>;                                         \
    template <Floats kind>                                                                          \
    static constexpr ValueLoop values = in<value_all<kind>>;                                        \
    template <Floats kind, int bits, bool look>                                                     \
    static constexpr RoundLoop round = in<round_all<kind, bits, look>>;                             \
    template <Floats kind, int bits, bool look>                                                     \
    static constexpr PackBeside pack = in<pack_all<kind, bits, look>>;                              \
    template <Floats kind, int bits>                                                                \
    static constexpr UnpackBeside unpack = in<unpack_all<kind, bits>>;                              \
  }

SN_FORM(Avx2, SN_AVX2);
SN_FORM(Avx512, SN_AVX512);

constexpr Loops kAvx2 = table_of<Avx2>(), kAvx512 = table_of<Avx512>();

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
