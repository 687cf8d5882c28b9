// What the doors to Python share: buffers, work without the lock, and the functions of each by name.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

namespace sn {

// Sets ValueError and returns null.
inline PyObject* wrong(const char* what) {
  PyErr_Format(PyExc_ValueError, "%s: the buffers do not belong together", what);
  return nullptr;
}

// Work without the interpreter lock; false with MemoryError set.
template <typename Work>
bool unlocked(const Work& work) {
  bool out_of_memory = false;
  Py_BEGIN_ALLOW_THREADS
  try {
    work();
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
  }
  Py_END_ALLOW_THREADS
  if (out_of_memory) PyErr_NoMemory();
  return !out_of_memory;
}

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
extern PyMethodDef rounds_methods[];    // of rounds_door.cpp

}  // namespace sn
