// Sides of columns, their exponents and the tables that these are looked up in, from Python.
#pragma once

#include "columns.h"
#include "door.h"

namespace sn {

struct ColumnArguments {
  Buffer sides, exponents, covered, units;
  int lowest, bits;
  int64_t columns, count = 0;

  bool take(PyObject* sides_arg, PyObject* exponents_arg, PyObject* covered_arg,
            PyObject* units_arg) {
    if (!sides.take(sides_arg, false) || !exponents.take(exponents_arg, false) ||
        !covered.take(covered_arg, false) || !units.take(units_arg, false))
      return false;
    columns = sides.bytes() / 8;
    bool legal = sides.bytes() == 8 * columns && exponents.bytes() == 4 * columns &&
                 covered.bytes() == units.bytes() && covered.bytes() >= 4 &&
                 (bits == 8 || bits == 16);
    for (int64_t i = 0; legal && i < columns; ++i) {
      const int64_t at = int64_t{exponents.as<const int32_t>()[i]} - lowest;
      const int64_t side = sides.as<const int64_t>()[i];
      legal = at >= 0 && at < covered.bytes() / 4 && side >= 0;
      count += side;
    }
    if (!legal) wrong("columns");
    return legal;
  }
  Scales scales() const {
    return {covered.as<const float>(), units.as<const float>(),
            static_cast<int32_t>(covered.bytes() / 4), lowest, bits};
  }
  int64_t words() const { return (count * bits + 31) / 32; }
};

}  // namespace sn
