// Python buffers as 64-bit integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../compress/bindings.h"

namespace sn {

class Integers : public Buffer {
 public:
  bool take(PyObject* object, bool writable = false) {
    if (!Buffer::take(object, writable)) return false;
    if (bytes() % 8 == 0) return true;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not 64-bit integers", bytes());
    return false;
  }
  size_t count() const { return static_cast<size_t>(bytes()) / 8; }
  int64_t* begin() const { return as<int64_t>(); }
  int64_t* end() const { return begin() + count(); }
  // As 32-bit indices below `bound`; false with an exception set if one is not.
  bool indices(std::vector<int32_t>* out, int64_t bound) const {
    if (std::any_of(begin(), end(), [&](int64_t x) { return x < 0 || x >= bound; })) {
      PyErr_Format(PyExc_ValueError, "an index is outside [0, %lld)",
                   static_cast<long long>(bound));
      return false;
    }
    out->assign(begin(), end());
    return true;
  }
};

}  // namespace sn
