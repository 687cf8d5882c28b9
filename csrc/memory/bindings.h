// What sn_memory/plan/simulate.py, search/candidates.py and others call. Every size and index that comes in is checked.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>

namespace sn {

// What `work` returns; MemoryError where there is no room for it.
template <class Work>
PyObject* guarded(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Holds what is made for as long as Python does. A name for each type: it is freed by it.
template <class Made>
PyObject* capsule_of(std::unique_ptr<Made> made, const char* name) {
  const auto free = [](PyObject* capsule) {
    delete static_cast<Made*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  };
  PyObject* capsule = PyCapsule_New(made.get(), name, free);
  if (capsule) made.release();
  return capsule;
}

PyObject* tables(PyObject*, PyObject* args);
PyObject* simulate(PyObject*, PyObject* args);
PyObject* fit_choice(PyObject*, PyObject* args);
PyObject* trim_choice(PyObject*, PyObject* args);
PyObject* anneal_choice(PyObject*, PyObject* args);
// What sn_memory/torch/model/guards.py calls.
PyObject* contents(PyObject*, PyObject* list);
PyObject* unchanged(PyObject*, PyObject* args);
// What sn_memory/torch/activations/packing.py calls.
PyObject* pack_mask(PyObject*, PyObject* args);
PyObject* spread_mask(PyObject*, PyObject* args);
PyObject* two_values(PyObject*, PyObject* args);

}  // namespace sn
