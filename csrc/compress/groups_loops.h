// The loops over one group's elements, in several bit-identical forms: see groups.cpp.
#pragma once

#include <cstdint>

#include "groups.h"
#include "tiles.h"

namespace sn {

constexpr uint32_t kUnfit = 0x7B800000;  // 2**120: values from there on, and NaN, escape
constexpr uint32_t kFinest = 0x0880;     // upper half of 2**-110, the finest step

struct Place {  // a grid: its lowest point, and the distance between adjacent points
  float base, step;
};

// Over the elements that fit: the least, the greatest, whether any is zero, and their number.
struct Extremes {
  float low = 0, high = 0;
  bool zero = false;
  int64_t fits = 0;
};

// The finest grid of `levels` steps that spans a group, or one of step `cap`.
Place choose(const Extremes& seen, int levels, float cap);

// Bits of a fraction: with a code's at most 23, so that one of a float32's 24 bits is left for the
// rounding of the quotient, and integers stay exact.
constexpr int fraction_of(int bits) { return bits < 8 ? 16 : 15; }

// The 16-bit random numbers from a position on: two per word, the lower half first.
struct Luck {
  uint32_t pair, key, other;  // the first word
  bool odd;                   // whether the first number is its upper half
};

constexpr uint32_t kWeyl = 0x9E3779B9u, kFirst = 0x7FEB352Du, kSecond = 0x846CA68Bu;

inline uint32_t random_word(uint32_t at, uint32_t key, uint32_t other) {
  uint32_t x = (at * kWeyl + key) ^ other;
  x ^= x >> 16;
  x *= kFirst;
  x ^= x >> 15;
  x *= kSecond;
  return x ^ (x >> 16);
}

constexpr int64_t kRun = 1024;  // elements processed at a time: scratch stays in the cache

// The extremes of a group whose elements all fit; false if one does not.
using RangeLoop = bool (*)(const void* values, int64_t count, Extremes& seen);
// The grids of up to eight groups.
using GridLoop = void (*)(const Extremes* seen, int count, int levels, float cap, Place* places);
// Rounds up to kRun elements, all within the grid, to packed codes; adds to `spread`, if requested,
// as described in groups.h.
using RoundLoop = void (*)(const void* values, int64_t count, const Place& place, const Luck& luck,
                           uint8_t* codes, uint32_t* spread);
// Decodes codes of one byte each, on a grid of finite numbers.
using ValueLoop = void (*)(const uint8_t* codes, int64_t count, const Place& place, void* values);

// Interleaved groups, as of channels in channels-last layout: a line of kLine bytes has one element
// of each. The next group's results are `groups` elements further, and its codes `bytes` further.
struct Beside {
  int64_t size;  // elements of each group; its codes fill words of 32 bits
  float* bases;
  uint16_t* steps;
  uint32_t* spread;
  uint8_t* codes;
  int64_t groups, bytes;
};

// False if an element does not fit or a step is not below `cap`; `luck` is per group, none odd.
using PackBeside = bool (*)(const Lines<const uint8_t>& lines, const Luck* luck, float cap,
                            const Beside& to);
using UnpackBeside = void (*)(const Beside& from, const Lines<uint8_t>& lines);  // for finite grids

// Indexed by Floats, by the logarithm of bits, and by whether with spread. Loops for interleaved
// groups exist for 2 bits and more, and are null in the plain table.
struct Loops {
  RangeLoop range[3];
  GridLoop grids;
  RoundLoop round[3][4][2];
  ValueLoop values[3];
  PackBeside pack[3][4][2];
  UnpackBeside unpack[3][4];
};

// Fills the table of a form, whose loops are static templates; kBeside: whether it has those for
// interleaved groups.
template <typename Form, Floats kind, int at>
constexpr void fill(Loops& loops) {
  constexpr int floats = static_cast<int>(kind), bits = 1 << at;
  loops.round[floats][at][0] = Form::template round<kind, bits, false>;
  loops.round[floats][at][1] = Form::template round<kind, bits, true>;
  if constexpr (Form::kBeside && bits > 1) {
    loops.pack[floats][at][0] = Form::template pack<kind, bits, false>;
    loops.pack[floats][at][1] = Form::template pack<kind, bits, true>;
    loops.unpack[floats][at] = Form::template unpack<kind, bits>;
  }
  if constexpr (bits < 8) fill<Form, kind, at + 1>(loops);
}

template <typename Form, Floats kind>
constexpr void fill(Loops& loops) {
  loops.range[static_cast<int>(kind)] = Form::template range<kind>;
  loops.values[static_cast<int>(kind)] = Form::template values<kind>;
  fill<Form, kind, 0>(loops);
}

template <typename Form>
constexpr Loops table_of() {
  Loops loops{};
  loops.grids = Form::grids;
  fill<Form, Floats::kSingle>(loops);
  fill<Form, Floats::kHalf>(loops);
  fill<Form, Floats::kBrain>(loops);
  return loops;
}

const Loops& plain_loops();

// With 256-bit vectors and the instructions of AVX2, FMA and F16C, or also of AVX-512; null if the
// compiler or this processor lacks them.
const Loops* avx2_loops();
const Loops* avx512_loops();

// For groups in which elements may escape, shared by all forms: see groups_plain.cpp.

constexpr int64_t width_of(Floats kind) { return kind == Floats::kSingle ? 4 : 2; }

Extremes extremes_of(const void* values, Floats kind, int64_t count);  // of elements that fit
int64_t zeros_of(const void* values, Floats kind, int64_t count);      // number of zeros

// Returns up to kRun values as float32: in place, or converted into `scratch`.
const float* widened(const void* values, Floats kind, int64_t count, float* scratch);

struct Drawn {  // random numbers of up to kRun elements
  uint32_t words[kRun / 2 + 1];
  const uint16_t* draw(const Luck& luck, int64_t count);
};

// Rounds up to kRun elements to codes of one byte each; `bad` marks those that no code represents,
// including those of a magnitude below `least`. Returns their number.
int32_t quantise(const float* values, int32_t count, const Place& place, int bits, float bound,
                 uint32_t least, const uint16_t* luck, uint8_t* codes, uint8_t* bad,
                 uint32_t* spread);

// Packs codes of one byte each, of up to kRun elements, where `wide` has room for another byte; and
// unpacks them, up to a multiple of 8 / bits codes.
void side_by_side(uint8_t* wide, int64_t count, int bits, uint8_t* codes);
void spread_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* wide);

}  // namespace sn
