// Functions for sn_memory/plan/simulate.py, search/candidates.py and others. All sizes and indices are checked.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>

namespace sn {

// Returns the result of `work`; raises MemoryError if memory runs out.
template <class Work>
PyObject* guarded(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Wraps a C++ object in a capsule, which frees it; `name` identifies its type.
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
// For sn_memory/torch/model/guards.py.
PyObject* contents(PyObject*, PyObject* list);
PyObject* unchanged(PyObject*, PyObject* args);
// For sn_memory/torch/activations/packing.py.
PyObject* pack_mask(PyObject*, PyObject* args);
PyObject* spread_mask(PyObject*, PyObject* args);
PyObject* two_values(PyObject*, PyObject* args);

}  // namespace sn
