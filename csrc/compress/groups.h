// Groups of floats on a grid of 2, 4, 16 or 256 points, rounded at random:
// see ops/groups.py.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

struct Grid {
  int bits;             // of a code: 1, 2, 4 or 8
  int64_t group;        // elements that share a grid, a power of two from 32 to 65536
  float bound;          // errors stay below; may be infinite
  uint32_t key, other;  // of the random numbers
};

// Floats of 4 bytes, of 2 (IEEE), or of 2 that are the upper halves of those of 4.
enum class Floats { kSingle, kHalf, kBrain };

// Elements that no code stands for, in ascending order of position; and how many are zero.
struct Escapes {
  std::vector<int64_t> at;
  std::vector<float> values;
  int64_t zeros = 0;
};

// `count` elements in runs of `run`, the first at position `first`. Groups begin anew with each run,
// and its codes with a whole byte. Per group: bases, steps (the upper half of a float32) and spread,
// the sum of what g (256 - g) is with g / 256 the way from one grid point to the next, unless it is
// null. Codes lie side by side, lowest bits first.
void pack_groups(const void* values, Floats kind, int64_t count, int64_t run, int64_t first,
                 const Grid& grid, float* bases, uint16_t* steps, uint32_t* spread, uint8_t* codes,
                 Escapes& escapes);

void unpack_groups(const float* bases, const uint16_t* steps, const uint8_t* codes, int64_t count,
                   int64_t run, int bits, int64_t group, void* values, Floats kind);

}  // namespace sn
