// Groups of floats on a grid of 2, 4, 16 or 256 points, stochastically rounded:
// see ops/groups.py.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

struct Grid {
  int bits;             // per code: 1, 2, 4 or 8
  int64_t group;        // elements that share a grid, a power of two from 32 to 65536
  float bound;          // errors stay below; may be infinite
  uint32_t key, other;  // of the random numbers
};

// float32, float16, or bfloat16 (the upper halves of float32).
enum class Floats { kSingle, kHalf, kBrain };

// Elements that no code represents, in ascending order of position; and the number of zeros.
struct Escape {
  int64_t at;
  float value;
};
struct Escapes {
  std::vector<Escape> found;
  int64_t zeros = 0;
};

// The strides of a tensor with permuted axes: element t of row r is at the offset, in elements,
// r / rows far_row + r % rows near_row + t / piece far + t % piece near.
// Either near_row or near is 1.
struct Turn {
  int64_t rows, far_row, near_row, piece, far, near;
};

// `count` elements in runs, the first at position `first`. Each run begins a new group, and its
// codes a new byte. With a turn, which requires groups of at most 256, a run is a row, and the
// memory passed contains all rows, not only those from the first of the `count` elements on.
struct Runs {
  int64_t count, length, first;
  const Turn* turn;
};

// Loops exist in several forms, which are bit-identical.
enum class Form { kBest, kPlain, kAvx2, kAvx512 };
bool form_runs(Form form);  // whether this processor supports the instructions

// Per group: bases, steps (the upper half of a float32) and, unless null, spread: the sum of
// g (256 - g), where g / 256 is an element's distance from the grid point below. Codes are
// contiguous, lowest bits first.
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
