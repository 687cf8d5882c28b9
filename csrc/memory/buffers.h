// Python buffers as 64-bit integers.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sn {

class Integers {
 public:
  ~Integers() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool take(PyObject* object, bool writable = false) {
    if (PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      return false;
    if (view_.len % 8 == 0) return true;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not 64-bit integers", view_.len);
    return false;
  }
  size_t count() const { return static_cast<size_t>(view_.len) / 8; }
  int64_t* begin() const { return static_cast<int64_t*>(view_.buf); }
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

 private:
  Py_buffer view_ = {};
};

}  // namespace sn
