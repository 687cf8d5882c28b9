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
struct Escape {
  int64_t at;
  float value;
};
struct Escapes {
  std::vector<Escape> found;
  int64_t zeros = 0;
};

// How element t of row r of a turned tensor lies in memory, counted in elements: at
// r / rows far_row + r % rows near_row + t / piece far + t % piece near.
// Either near_row or near is 1.
struct Turn {
  int64_t rows, far_row, near_row, piece, far, near;
};

// `count` elements in runs, the first at position `first`. Groups begin anew with each run, and its
// codes with a whole byte. With a turn, which is for groups of 256 at most, a run is a row, and memory
// has all rows, not from the first of `count` on.
struct Runs {
  int64_t count, length, first;
  const Turn* turn;
};

// Loops are there in several forms, which give the same bits.
enum class Form { kBest, kPlain, kAvx2, kAvx512 };
bool form_runs(Form form);  // whether this processor has the instructions

// Per group: bases, steps (the upper half of a float32) and spread, the sum of what g (256 - g) is
// with g / 256 the way from one grid point to the next, unless it is null. Codes lie side by side,
// lowest bits first.
struct Packed {
  float* bases;
  uint16_t* steps;
  uint32_t* spread;
  uint8_t* codes;
};

void pack_groups(const void* values, Floats kind, const Runs& runs, const Grid& grid, Form form,
                 const Packed& to, Escapes& escapes);

void unpack_groups(const Packed& from, const Runs& runs, int bits, int64_t group, Form form,
                   void* values, Floats kind);

}  // namespace sn
