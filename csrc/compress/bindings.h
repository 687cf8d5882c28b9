// Shared by the Python bindings: buffers, work without the interpreter lock, method tables by file.
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

// Runs work without the interpreter lock; false with MemoryError set if memory ran out.
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

// The same for a method that returns None.
template <typename Work>
PyObject* run(const Work& work) {
  if (!unlocked(work)) return nullptr;
  Py_RETURN_NONE;
}

// A contiguous array from Python, released by the destructor.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool take(PyObject* object, bool writable) {
    return PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
  }
  // Converters for PyArg_ParseTuple's "O&": readable, writable, and either of these or None.
  static int in(PyObject* object, void* to) { return static_cast<Buffer*>(to)->take(object, false); }
  static int out(PyObject* object, void* to) { return static_cast<Buffer*>(to)->take(object, true); }
  static int in_or_none(PyObject* object, void* to) { return object == Py_None || in(object, to); }
  static int out_or_none(PyObject* object, void* to) { return object == Py_None || out(object, to); }

  // Null if None was passed.
  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  explicit operator bool() const { return view_.obj != nullptr; }
  Py_ssize_t bytes() const { return view_.len; }

 private:
  Py_buffer view_ = {};
};

extern PyMethodDef low_rank_methods[];  // of low_rank_bindings.cpp
extern PyMethodDef graph_methods[];     // of graph_bindings.cpp
extern PyMethodDef rounds_methods[];    // of rounds_bindings.cpp

}  // namespace sn
