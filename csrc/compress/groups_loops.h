// The loops over one group's elements in several forms of the same bits: see groups.cpp.
#pragma once

#include <cstdint>

#include "groups.h"

namespace sn {

struct Place {  // of a grid: its lowest point, and the distance of two points
  float base, step;
};

// The random numbers of 16 bits from a position on: two of a word, the lower half first.
struct Luck {
  uint32_t pair, key, other;  // the first word
  bool odd;                   // whether its upper half is the first number
};

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

constexpr int64_t kRun = 1024;  // elements worked on at a time: scratch stays in the cache

// Rounds up to kRun elements that all lie on the grid to codes of one byte; `spread`, if asked for,
// gets what groups.h says added.
using RoundLoop = void (*)(const void* values, int64_t count, const Place& place, float top,
                           const Luck& luck, uint8_t* codes, uint32_t* spread);
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
