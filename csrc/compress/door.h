// What the doors to Python share: buffers, and the functions of each door by name.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace sn {

// A contiguous array of Python's, let go of at the end.
class Buffer {
 public:
  ~Buffer() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool take(PyObject* object, bool writable) {
    return PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  Py_ssize_t bytes() const { return view_.len; }

 private:
  Py_buffer view_ = {};
};

extern PyMethodDef low_rank_methods[];  // of low_rank_door.cpp
extern PyMethodDef graph_methods[];     // of graph_door.cpp
extern PyMethodDef long_methods[];      // of long_door.cpp
extern PyMethodDef rounds_methods[];    // of rounds_door.cpp

}  // namespace sn
