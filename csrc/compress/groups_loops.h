// The loops over one group's elements in several forms of the same bits: see groups.cpp.
#pragma once

#include <cstdint>

#include "groups.h"

namespace sn {

struct Place {  // of a grid: its lowest point, and the distance of two points
  float base, step;
};

// Rounds elements that all lie on the grid to codes of one byte. `luck` has a random number for each;
// `spread`, if asked for, gets what groups.h says added.
using RoundLoop = void (*)(const void* values, int64_t count, const Place& place, float top,
                           const uint16_t* luck, uint8_t* codes, uint32_t* spread);
// The values of codes of one byte, on a grid of finite numbers.
using ValueLoop = void (*)(const uint8_t* codes, int64_t count, const Place& place, void* values);

struct Loops {
  RoundLoop round[3], round_seen[3];  // by Floats; without spread, and with it
  ValueLoop values[3];
};

// Of 256 bits, with the instructions of AVX2, FMA and F16C, or with those of AVX-512 too; null where
// the compiler or this processor lacks them.
const Loops* avx2_loops();
const Loops* avx512_loops();

}  // namespace sn
