#include "groups.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "bits.h"
#include "groups_loops.h"
#include "half.h"
#include "lanes.h"
#include "tiles.h"

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

int64_t width_of(Floats kind) { return kind == Floats::kSingle ? 4 : 2; }

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

int64_t zeros_of(const void* values, Floats kind, int64_t count) {
  if (kind == Floats::kSingle) return zeros_wide(static_cast<const uint32_t*>(values), count);
  return zeros_narrow(static_cast<const uint16_t*>(values), count);
}

inline float upper(float value) {  // to the next number with a lower half of zeros
  return from_bits((to_bits(value) + 0xFFFF) & 0xFFFF0000u);
}

// Random numbers of 16 bits for `count` elements; `words` has room for one word more than they fill.
SN_CLONES void draw(const Luck& luck, int64_t count, uint32_t* words) {
  const uint32_t pair = luck.pair, key = luck.key, other = luck.other;
  for (int64_t i = 0; i < (count + luck.odd + 1) / 2; ++i)
    words[i] = random_word(pair + static_cast<uint32_t>(i), key, other);
}

struct Drawn {
  uint32_t words[kRun / 2 + 1];

  const uint16_t* draw(const Luck& luck, int64_t count) {
    sn::draw(luck, count, words);
    return reinterpret_cast<const uint16_t*>(words) + luck.odd;
  }
};

// Rounds up to kRun elements: `bad` marks those that no code stands for, among them those of a
// magnitude below `least`, and the number of them is returned. Where all lie on the grid, `bad` is
// null.
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

SN_CLONES int32_t quantise(const float* values, int32_t count, const Place& place, int bits,
                           float bound, uint32_t least, const uint16_t* luck, uint8_t* codes,
                           uint8_t* bad, uint32_t* spread) {
  return quantise_run<false, true>(values, count, place, bits, bound, least, luck, codes, bad,
                                   spread);
}

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

// What squeeze() was given, up to a multiple of 8 / bits codes.
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

// Up to kRun values as float32: where they lie, or in `scratch`.
const float* widened(const void* values, Floats kind, int64_t count, float* scratch) {
  if (kind == Floats::kSingle) return static_cast<const float*>(values);
  const auto* from = static_cast<const uint16_t*>(values);
  if (kind == Floats::kHalf)
    widen_half(from, count, scratch);
  else
    widen_brain(from, count, scratch);
  return scratch;
}

// Codes of one byte each, of up to kRun elements, side by side; `wide` has room for a byte more.
void side_by_side(uint8_t* wide, int64_t count, int bits, uint8_t* codes) {
  for (int64_t j = count; j % 8; ++j) wide[j] = 0;
  squeeze(wide, count, bits, codes);
}

template <Floats kind, int bits, bool look>
void round_plain(const void* values, int64_t count, const Place& place, const Luck& luck,
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
bool range_plain(const void* values, int64_t count, Extremes& seen) {
  seen = extremes_of(values, kind, count);
  return true;
}

void grids_plain(const Extremes* seen, int count, int levels, float cap, Place* places) {
  for (int i = 0; i < count; ++i) places[i] = choose(seen[i], levels, cap);
}


template <Floats kind>
void value_plain(const uint8_t* codes, int64_t count, const Place& place, void* values) {
  if (kind == Floats::kSingle) return value_wide(codes, count, place, values);
  float scratch[kRun];
  value_wide(codes, count, place, scratch);
  if (kind == Floats::kHalf)
    narrow_half(scratch, count, static_cast<uint16_t*>(values));
  else
    narrow_brain(scratch, count, static_cast<uint16_t*>(values));
}

template <Floats kind>
constexpr void fill(Loops& loops) {
  constexpr int it = static_cast<int>(kind);
  loops.range[it] = range_plain<kind>;
  loops.values[it] = value_plain<kind>;
  auto& round = loops.round[it];
  round[0][0] = round_plain<kind, 1, false>, round[0][1] = round_plain<kind, 1, true>;
  round[1][0] = round_plain<kind, 2, false>, round[1][1] = round_plain<kind, 2, true>;
  round[2][0] = round_plain<kind, 4, false>, round[2][1] = round_plain<kind, 4, true>;
  round[3][0] = round_plain<kind, 8, false>, round[3][1] = round_plain<kind, 8, true>;
}

constexpr Loops plain_loops() {
  Loops loops{};
  loops.grids = grids_plain;
  fill<Floats::kSingle>(loops);
  fill<Floats::kHalf>(loops);
  fill<Floats::kBrain>(loops);
  return loops;
}

constexpr Loops kPlain = plain_loops();

int index_of(int bits) { return bits == 8 ? 3 : bits / 2; }

const Loops* loops_of(Form form) {
  if (form == Form::kPlain) return &kPlain;
  if (form == Form::kAvx2) return avx2_loops();
  if (form == Form::kAvx512) return avx512_loops();
  const Loops* found = avx512_loops() ? avx512_loops() : avx2_loops();
  return found ? found : &kPlain;
}

// Packs groups, some at a time: finding a grid is a chain of divisions, and those of several groups
// run beside each other.
class Packer {
 public:
  Packer(Floats kind, const Grid& grid, const Loops& loops, const Packed& to, Escapes& escapes)
      : kind_(kind), grid_(grid), loops_(loops), to_(to), escapes_(escapes) {}

  // Group g has `size` values, the first of them at position `at`; its codes begin at byte `byte`.
  // Until flush() the values are still to be read.
  void add(const void* values, int64_t size, int64_t at, int64_t g, int64_t byte) {
    jobs_[waiting_] = {values, size, at, g, byte};
    if (++waiting_ == kJobs || size > kRun) flush();
  }

  void flush() {
    const int kind = static_cast<int>(kind_);
    for (int i = 0; i < waiting_; ++i)
      if (!loops_.range[kind](jobs_[i].values, jobs_[i].size, seen_[i]))
        seen_[i] = extremes_of(jobs_[i].values, kind_, jobs_[i].size);
    loops_.grids(seen_, waiting_, levels_, cap_, places_);
    for (int i = 0; i < waiting_; ++i) {
      const Extremes& seen = seen_[i];
      bool zeros_escape = levels_ == 1 && about_zero(seen) && few_zeros(jobs_[i], seen);
      if (zeros_escape) {
        places_[i] = choose({seen.low, seen.high, false, seen.fits}, 1, cap_);
        zeros_escape = places_[i].base == seen.low;
      }
      round(jobs_[i], seen, places_[i], zeros_escape);
    }
    waiting_ = 0;
  }

  // Groups that lie side by side in lines, the first as in add(), the next ones `run`
  // positions, `groups` and `bytes` further; false if that is not for them.
  bool beside(const Lines<const uint8_t>& lines, int64_t size, int64_t at, int64_t g, int64_t byte,
              int64_t run, int64_t groups, int64_t bytes) {
    const PackBeside pack = loops_.pack[static_cast<int>(kind_)][index_][to_.spread != nullptr];
    if (!pack || !std::isinf(grid_.bound) || run % 2 || size * grid_.bits % 32) return false;
    Luck luck[kLine / 2];
    const int64_t count = kLine / width_of(kind_);
    for (int64_t r = 0; r < count; ++r) luck[r] = luck_at(at + run * r);
    const Beside to = {size, to_.bases + g, to_.steps + g, to_.spread ? to_.spread + g : nullptr,
                       to_.codes + byte, groups, bytes};
    if (!pack(lines, luck, cap_, to)) return false;
    for (int64_t i = 0; to_.spread && i < size; ++i)
      escapes_.zeros += zeros_of(lines.first + lines.stride * i, kind_, count);
    return true;
  }

 private:
  static constexpr int kJobs = 8;

  struct Job {
    const void* values;
    int64_t size, at, g, byte;
  };

  static bool about_zero(const Extremes& seen) {
    return seen.zero && seen.low < 0 && seen.high > 0;
  }

  // Two points about zero hold one side only: whether zeros are fewer than the elements of either
  // side. Then these escape.
  bool few_zeros(const Job& job, const Extremes& seen) {
    const auto* values = static_cast<const uint8_t*>(job.values);
    const int64_t zeros = zeros_of(job.values, kind_, job.size);
    int64_t below = 0;
    for (int64_t i = 0; i < job.size; i += kRun) {
      const int64_t here = std::min(kRun, job.size - i);
      const float* run = widened(values + width_of(kind_) * i, kind_, here, scratch_);
      for (int64_t j = 0; j < here; ++j)
        below += run[j] < 0 && (to_bits(run[j]) & 0x7FFFFFFF) < kUnfit;
    }
    return zeros < std::min(below, seen.fits - zeros - below);
  }

  void round(const Job& job, const Extremes& seen, const Place& place, bool zeros_escape) {
    to_.bases[job.g] = place.base;
    to_.steps[job.g] = static_cast<uint16_t>(to_bits(place.step) >> 16);
    uint32_t unread = 0;
    uint32_t* spread = to_.spread ? to_.spread + job.g : &unread;
    *spread = 0;
    if (to_.spread && seen.zero) escapes_.zeros += zeros_of(job.values, kind_, job.size);
    // A grid as fine as its group allows holds all of it: nothing escapes, and nothing is checked.
    const bool whole = seen.fits == job.size && std::isinf(grid_.bound) &&
                       (levels_ > 1 || !about_zero(seen)) && place.step < cap_;
    const RoundLoop loop = loops_.round[static_cast<int>(kind_)][index_][to_.spread != nullptr];
    const auto* values = static_cast<const uint8_t*>(job.values);
    uint8_t* codes = to_.codes + job.byte;
    for (int64_t i = 0; i < job.size; i += kRun) {
      const int64_t here = std::min(kRun, job.size - i);
      const void* run = values + width_of(kind_) * i;
      if (whole)
        loop(run, here, place, luck_at(job.at + i), codes, spread);
      else
        check(run, here, job.at + i, place, zeros_escape, codes, spread);
      codes += (here * grid_.bits + 7) / 8;
    }
  }

  Luck luck_at(int64_t at) const {
    const auto pair = static_cast<uint64_t>(at) >> 1;
    const uint32_t other = grid_.other + static_cast<uint32_t>(pair >> 32) * 0x85EBCA6Bu;
    return {static_cast<uint32_t>(pair), grid_.key, other, (at & 1) != 0};
  }

  // Where elements may escape.
  void check(const void* values, int64_t count, int64_t at, const Place& place, bool zeros_escape,
             uint8_t* codes, uint32_t* spread) {
    const float* run = widened(values, kind_, count, scratch_);
    const int32_t lost =
        quantise(run, static_cast<int32_t>(count), place, grid_.bits, grid_.bound,
                 zeros_escape ? 1 : 0, drawn_.draw(luck_at(at), count), wide_, bad_, spread);
    side_by_side(wide_, count, grid_.bits, codes);
    for (int64_t j = 0; lost && j < count; ++j)
      if (bad_[j]) {
        escapes_.at.push_back(at + j);
        escapes_.values.push_back(run[j]);
      }
  }

  const Floats kind_;
  const Grid& grid_;
  const Loops& loops_;
  const Packed& to_;
  Escapes& escapes_;
  const int levels_ = (1 << grid_.bits) - 1, index_ = index_of(grid_.bits);
  const float cap_ = from_bits(to_bits(std::min(grid_.bound, from_bits(kUnfit))) & 0xFFFF0000u);
  uint8_t wide_[kRun], bad_[kRun];
  Drawn drawn_;
  float scratch_[kRun];
  Job jobs_[kJobs];
  Extremes seen_[kJobs];
  Place places_[kJobs];
  int waiting_ = 0;
};

Place place_of(const Packed& from, int64_t g) {
  return {from.bases[g], from_bits(static_cast<uint32_t>(from.steps[g]) << 16)};
}

// Of what is no number in a damaged payload, instructions make other bits than half.h.
bool sound(const Place& place) { return std::isfinite(place.base) && std::isfinite(place.step); }

// The values of a group whose codes begin at byte `byte`.
void unpack(const Packed& from, int bits, const Loops& loops, Floats kind, int64_t size, int64_t g,
            int64_t byte, void* values) {
  const Place place = place_of(from, g);
  const ValueLoop loop = (sound(place) ? loops : kPlain).values[static_cast<int>(kind)];
  const int64_t width = width_of(kind);
  const uint8_t* codes = from.codes + byte;
  for (int64_t i = 0; i < size; i += kRun) {
    const int64_t here = std::min(kRun, size - i);
    uint8_t spread[kRun];
    if (bits < 8) spread_codes(codes, here, bits, spread);
    loop(bits < 8 ? spread : codes, here, place, static_cast<uint8_t*>(values) + width * i);
    codes += (here * bits + 7) / 8;
  }
}

// Calls work(start, size, g, byte) for each group of `count` elements in runs.
template <typename Work>
void each_group(int64_t count, int64_t run, int64_t group, int bits, Work work) {
  int64_t size = 0, byte = 0;
  for (int64_t start = 0, g = 0; start < count; start += size, ++g) {
    size = std::min(group, run - start % run);
    work(start, size, g, byte);
    byte += (size * bits + 7) / 8;
  }
}

// Packs or unpacks the rows [first, first + rows) of a turned tensor in tiles: by `beside` those of
// which memory has a line of neighbours, if it returns true, else by `one` after the other; `done`
// follows those.
template <bool back, typename Byte, typename ByLines, typename One, typename Done>
void through_tiles(const Turn& turn, int64_t first, int64_t rows, int64_t run, int64_t group,
                   int bits, int64_t width, Byte* memory, ByLines beside, One one, Done done) {
  const int64_t groups = (run + group - 1) / group, bytes = (run * bits + 7) / 8;
  const bool all = first % turn.rows == 0 && rows % turn.rows == 0;
  Tile tile;
  const auto move = [&](const Block& block) {
    if (width == 4)
      move_block<4, back>(turn, block, memory, tile);
    else
      move_block<2, back>(turn, block, memory, tile);
  };
  each_block(turn, first, rows, run, group, width, [&](const Block& block) {
    const int64_t kept = block.row - first, g = kept * groups + block.start / group;
    const int64_t at = block.row * run + block.start, byte = kept * bytes + block.start * bits / 8;
    if (turn.near_row == 1 && block.rows * width == kLine) {
      const Lines<Byte> lines = lines_of(turn, block, width, all, memory);
      if (lines.first && beside(lines, block.size, at, g, byte, groups, bytes)) return;
    }
    if (!back) move(block);
    for (int64_t r = 0; r < block.rows; ++r)
      one(tile.memory + kTileRun * width * r, block.size, at + run * r, g + groups * r,
          byte + bytes * r);
    done();
    if (back) move(block);
  });
}

void sort(Escapes& escapes) {
  const auto size = escapes.at.size();
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return escapes.at[a] < escapes.at[b]; });
  Escapes sorted;
  for (const size_t i : order) {
    sorted.at.push_back(escapes.at[i]);
    sorted.values.push_back(escapes.values[i]);
  }
  escapes.at.swap(sorted.at);
  escapes.values.swap(sorted.values);
}

}  // namespace

// With zero on the grid if the group has one; see choose() in ops/groups.py for the reasons.
Place choose(const Extremes& seen, int levels, float cap) {
  const float low = seen.low, high = seen.high, top = static_cast<float>(levels);
  const bool zero = seen.zero;
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

bool form_runs(Form form) { return loops_of(form) != nullptr; }

void pack_groups(const void* values, Floats kind, const Runs& runs, const Grid& grid, Form form,
                 const Packed& to, Escapes& escapes) {
  Packer packer(kind, grid, *loops_of(form), to, escapes);
  const int64_t width = width_of(kind);
  const auto* from = static_cast<const uint8_t*>(values);
  if (runs.turn) {
    through_tiles<false>(
        *runs.turn, runs.first / runs.length, runs.count / runs.length, runs.length, grid.group,
        grid.bits, width, from,
        [&](const Lines<const uint8_t>& lines, int64_t size, int64_t at, int64_t g, int64_t byte,
            int64_t groups, int64_t bytes) {
          return packer.beside(lines, size, at, g, byte, runs.length, groups, bytes);
        },
        [&](const uint8_t* row, int64_t size, int64_t at, int64_t g, int64_t byte) {
          packer.add(row, size, at, g, byte);
        },
        [&] { packer.flush(); });
    sort(escapes);
  } else {
    each_group(runs.count, runs.length, grid.group, grid.bits,
               [&](int64_t start, int64_t size, int64_t g, int64_t byte) {
                 packer.add(from + width * start, size, runs.first + start, g, byte);
               });
    packer.flush();
  }
}

void unpack_groups(const Packed& from, const Runs& runs, int bits, int64_t group, Form form,
                   void* values, Floats kind) {
  const Loops& loops = *loops_of(form);
  const int64_t width = width_of(kind);
  auto* to = static_cast<uint8_t*>(values);
  const UnpackBeside beside = loops.unpack[static_cast<int>(kind)][index_of(bits)];
  if (runs.turn)
    through_tiles<true>(
        *runs.turn, runs.first / runs.length, runs.count / runs.length, runs.length, group, bits,
        width, to,
        [&](const Lines<uint8_t>& lines, int64_t size, int64_t, int64_t g, int64_t byte,
            int64_t groups, int64_t bytes) {
          if (!beside || size * bits % 32) return false;
          for (int64_t r = 0; r < kLine / width; ++r)
            if (!sound(place_of(from, g + groups * r))) return false;
          beside({size, from.bases + g, from.steps + g, nullptr, from.codes + byte, groups, bytes},
                 lines);
          return true;
        },
        [&](uint8_t* row, int64_t size, int64_t, int64_t g, int64_t byte) {
          unpack(from, bits, loops, kind, size, g, byte, row);
        },
        [] {});
  else
    each_group(runs.count, runs.length, group, bits,
               [&](int64_t start, int64_t size, int64_t g, int64_t byte) {
                 unpack(from, bits, loops, kind, size, g, byte, to + width * start);
               });
}

}  // namespace sn
