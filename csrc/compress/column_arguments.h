// Lengths of columns, their exponents and the tables these index, as arguments from Python.
#pragma once

#include <vector>

#include "bindings.h"
#include "columns.h"

namespace sn {

struct ColumnArguments {
  Buffer sides, exponents, covered, units;  // `covered` may be omitted if nothing is packed
  double limit = 0;
  int lowest, bits;
  int64_t columns, count = 0;

  // Whether the sizes of the parsed buffers are consistent; if not, an exception is set.
  bool check() {
    columns = sides.bytes() / 8;
    bool legal = sides.bytes() == 8 * columns && exponents.bytes() == 4 * columns &&
                 (!covered || covered.bytes() == units.bytes()) && units.bytes() >= 4 &&
                 (bits == 8 || bits == 16) && limit >= 0 && limit < (1 << (bits - 1));
    for (int64_t i = 0; legal && i < columns; ++i) {
      const int64_t at = int64_t{exponents.as<const int32_t>()[i]} - lowest;
      const int64_t side = sides.as<const int64_t>()[i];
      legal = at >= 0 && at < places() && side >= 0;
      count += side;
    }
    if (!legal) wrong("columns");
    return legal;
  }

  int32_t places() const { return static_cast<int32_t>(units.bytes() / 4); }
  Scales scales() const {
    return {covered.as<const float>(), units.as<const float>(), places(), lowest, bits};
  }
  int64_t words() const { return (count * bits + 31) / 32; }
  int64_t all_words() const { return columns + words(); }

  // A word per column, then the digits; see columns.h. `one` counts a rank in a column's word.
  void pack(const float* values, int32_t one, int32_t* to, float* own) const {
    if (bits == 8)
      pack_as<int8_t>(values, one, to, own);
    else
      pack_as<int16_t>(values, one, to, own);
  }

 private:
  template <typename Digit>
  void pack_as(const float* values, int32_t one, int32_t* to, float* own) const {
    std::vector<Digit> digits(static_cast<size_t>(words() * 4) / sizeof(Digit));
    to_digits(values, sides.as<const int64_t>(), exponents.as<const int32_t>(), columns, scales(),
              static_cast<float>(limit), one, to, digits.data(), own);
    join_digits(digits.data(), words(), to + columns);
  }
};

}  // namespace sn
